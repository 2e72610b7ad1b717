// Fourier transforms: the transformed dims stay whole, every other dim may be cut, and summands pass.
#include "rules/empties.h"
#include "rules/pieces.h"
#include "rules/registry.h"

namespace shardtensor::rules {

namespace {

Rule fft(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  auto dims = fresh_dims(rule, x.dim());
  for (const auto d : call.ints(call.position("dim"))) {
    dims[wrap_dim(d, x.dim())] = Dim(kNone);
  }
  rule.operands.emplace_back(dims);
  rule.results.emplace_back(dims);
  add_outputs(call, rule);
  rule.jointly_linear(with_outputs(call, 0b1));
  if (rule.operands.size() == 1) { // MKL refuses empty pieces before torch 2.15
    rule.kernel = call_op_nonempty;
    rule.kernel_if = is_empty;
  }
  return rule;
}

} // namespace

void register_spectral(Registry& r) {
  Options o;
  o.asks_order = true;
  r.add("spectral", {"_fft_c2c", "_fft_c2c.out", "_fft_c2r", "_fft_c2r.out", "_fft_r2c", "_fft_r2c.out"}, fft, o);
}

} // namespace shardtensor::rules
