// Views: which dim of the result is which of the operand. Sizes matter, so most rules here are sized.
#include "rules/registry.h"

#include <algorithm>

namespace shardtensor::rules {

namespace {

// The result has the operand's dims in another order.
Rule permuted(const Call& call, c10::ArrayRef<int64_t> order) {
  Rule rule;
  Dims in, out;
  for (int64_t d = 0; d < call.tensors[0].dim(); ++d) {
    in.emplace_back(rule.factor());
  }
  for (auto d : order) {
    out.push_back(in[d]);
  }
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out));
  rule.passes_partial();
  return rule;
}

Sizes identity(int64_t n) {
  Sizes order;
  for (int64_t d = 0; d < n; ++d) {
    order.push_back(d);
  }
  return order;
}

Rule same(const Call& call) {
  return permuted(call, identity(call.tensors[0].dim()));
}

Rule t(const Call& call) {
  auto order = identity(call.tensors[0].dim());
  std::reverse(order.begin(), order.end());
  return permuted(call, order);
}

Rule transpose(const Call& call) {
  const auto n = call.tensors[0].dim();
  auto order = identity(n);
  if (n > 0) {
    std::swap(order[call.dim(1, n)], order[call.dim(2, n)]);
  }
  return permuted(call, order);
}

Rule permute(const Call& call) {
  const auto n = call.tensors[0].dim();
  Sizes order;
  for (auto d : call.ints(1)) {
    order.push_back(wrap_dim(d, n));
  }
  return permuted(call, order);
}

} // namespace

void register_views(Registry& r) {
  Options o;
  o.any_args = true;
  r.add("views", {"alias", "detach", "detach_"}, same, o);
  r.add("views", {"t"}, t, o);
  r.add("views", {"transpose.int"}, transpose);
  r.add("views", {"permute"}, permute);
}

} // namespace shardtensor::rules
