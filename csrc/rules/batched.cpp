#include "rules/batched.h"

#include "rules/kernel_utils.h"

#include <array>
#include <cstring>
#include <string>
#include <vector>

namespace shardtensor::rules {

namespace {

std::vector<std::string> items(const std::string& text) {
  std::vector<std::string> out;
  for (size_t start = 0; !text.empty() && start <= text.size();) {
    const auto end = std::min(text.find(',', start), text.size());
    out.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  return out;
}

bool has_batch(const std::string& item) {
  return item[0] == '*' || item[0] == '^';
}

int64_t named(const std::string& item) {
  return static_cast<int64_t>(item.size()) - has_batch(item);
}

// How many Tensor arguments the schema has before this one.
size_t nth_tensor(const c10::FunctionSchema& schema, int64_t arg) {
  size_t n = 0;
  for (int64_t i = 0; i < arg; ++i) {
    n += schema.arguments()[i].type()->annotation_str().find("Tensor") != std::string::npos;
  }
  return n;
}

} // namespace

Rule batched(const Call& call, const char* text) {
  const auto* arrow = std::strstr(text, "->");
  const auto inputs = items(std::string(text, arrow)), outputs = items(arrow + 2);
  const auto item_of = [&](const TensorArg& t) -> const std::string& { return inputs.at(nth_tensor(call.schema, t.arg)); };
  Rule rule;
  std::array<int16_t, 128> factor_of;
  factor_of.fill(kNone);
  const auto named_dims = [&](const std::string& item, Dims dims) {
    for (size_t i = has_batch(item); i < item.size(); ++i) {
      auto& f = factor_of[static_cast<size_t>(item[i])];
      if (f == kNone && item[i] != '.') {
        f = static_cast<int16_t>(rule.factor());
      }
      dims.emplace_back(f);
    }
    return dims;
  };

  int64_t batch = 0;
  for (const auto& t : call.tensors) {
    if (t.output) {
      continue;
    }
    const auto& item = item_of(t);
    if (has_batch(item) ? t.dim() < named(item) : t.dim() != named(item)) {
      return replicate(call); // the op itself will raise
    }
    batch = std::max(batch, t.dim() - named(item));
  }
  Broadcast all(fresh_dims(rule, batch));
  for (const auto& t : call.tensors) {
    if (!t.output) {
      all.widen(t, t.dim() - named(item_of(t)));
    }
  }
  for (const auto& t : call.tensors) {
    if (!t.output) {
      rule.operands.emplace_back(named_dims(item_of(t), all.of(t, t.dim() - named(item_of(t)))));
    }
  }
  const auto first_batch = rule.operands[0].dims.size() - static_cast<size_t>(named(item_of(call.tensors[0])));
  for (const auto& item : outputs) {
    if (item == "0") {
      rule.results.emplace_back(Dims{Dim(kNone)});
    } else {
      const Dims first(rule.operands[0].dims.begin(), rule.operands[0].dims.begin() + static_cast<int64_t>(first_batch));
      rule.results.emplace_back(named_dims(item, item[0] == '*' ? all.dims : item[0] == '^' ? first : Dims{}));
    }
    rule.results.back().same_over = ~uint64_t{0};
  }
  add_outputs(call, rule);
  return rule;
}

} // namespace shardtensor::rules
