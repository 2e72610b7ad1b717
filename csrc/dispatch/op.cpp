#include "dispatch/op.h"

#include <algorithm>

namespace shardtensor {

namespace {

std::deque<Op>& ops() {
  static auto* all = new std::deque<Op>();
  return *all;
}

} // namespace

bool is_known(const std::string& name) {
  return name.rfind("aten::", 0) == 0 || name.rfind("shardtensor::", 0) == 0;
}

const rules::Entry* entry_of(const std::string& name) {
  return rules::registry().find(name.rfind("aten::", 0) == 0 ? name.substr(6) : name);
}

std::string text_of(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

ArgKind kind_of(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::TensorType) {
    return ArgKind::Tensor;
  }
  for (const auto& inner : type.containedTypes()) {
    if (const auto kind = kind_of(*inner); kind != ArgKind::Other) {
      return type.kind() == c10::TypeKind::ListType ? ArgKind::TensorList : kind;
    }
  }
  return ArgKind::Other;
}

Op::Op(const c10::OperatorHandle& op) : handle(op), id(static_cast<int32_t>(ops().size())) {
  const auto& schema_ = handle.schema();
  name = text_of(handle.operator_name());
  const auto& arguments = schema_.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    kinds.push_back(kind_of(*arguments[i].type()));
    if (arguments[i].alias_info() && arguments[i].alias_info()->isWrite()) {
      mutated |= uint64_t{1} << i;
      // aten ops write such arguments without reading them; other libraries' ops may do both.
      outputs |= static_cast<uint64_t>(arguments[i].kwarg_only() && is_known(name)) << i;
    }
  }
  for (const auto& r : schema_.returns()) {
    int8_t same = -1;
    if (const auto* alias = r.alias_info()) {
      is_view |= !alias->isWrite();
      for (size_t i = 0; i < arguments.size() && alias->isWrite(); ++i) {
        if (arguments[i].alias_info() && arguments[i].alias_info()->beforeSets() == alias->beforeSets()) {
          same = static_cast<int8_t>(i);
        }
      }
    }
    returns_argument.push_back(same);
  }
  is_random = handle.hasTag(at::Tag::nondeterministic_seeded);
  reshapes_self = handle.hasTag(at::Tag::inplace_view);
  if (reshapes_self) {
    mutated = 0; // argument 0 keeps its values
  }
  if (is_known(name)) {
    entry = entry_of(name);
    mutated |= entry ? entry->options.writes : 0;
  }
  TORCH_INTERNAL_ASSERT(arguments.size() <= rules::Reads::kMostArgs, name);
  asks_sizes = outputs && !(entry && entry->options.broadcasts);
  if (asks_sizes) {
    has_read(rules::Reads::kSizes); // so that the outputs' sizes are found once for these sizes
  }
}

const Op& add_op(const c10::OperatorHandle& handle) {
  return ops().emplace_back(handle);
}

const std::deque<Op>& installed_ops() {
  return ops();
}

const Op& installed_op(const char* name) {
  const auto it = std::find_if(ops().begin(), ops().end(), [&](const Op& op) { return op.name == name; });
  TORCH_INTERNAL_ASSERT(it != ops().end(), name, " is not installed");
  return *it;
}

} // namespace shardtensor
