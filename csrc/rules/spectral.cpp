// Fourier transforms: the transformed dims stay whole, every other dim may be cut, and summands pass. If a transformed dim is
// cut, another dim is cut instead, by one exchange: the first (a batch), or else the last, that has an index for each rank. Of
// several transformed dims, those that are whole on every rank may go first, and the rest in a second call.
#include "rules/empties.h"
#include "rules/pieces.h"
#include "rules/registry.h"
#include "tensor/shard_tensor.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardtensor::rules {

namespace {

Rule transform(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  auto dims = fresh_dims(rule, x.dim());
  bool cut = false;
  for (const auto given : call.ints(call.position("dim"))) {
    const auto d = wrap_dim(given, x.dim());
    dims[d] = Dim(kNone);
    cut = cut || x.layout->shards(d);
  }
  for (int64_t i = 0; i < x.dim() && cut; ++i) {
    const auto d = i ? x.dim() - i : 0;
    if (dims[d].factor != kNone) {
      rule.spread.push_back(dims[d].factor);
    }
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

bool has(const Sizes& dims, int64_t d) {
  return std::find(dims.begin(), dims.end(), d) != dims.end();
}

// Whether one of the tensor dims `dims` has an index for each rank if mesh dim m cuts it too.
bool takes_cut(const Layout& layout, c10::SymIntArrayRef sizes, const Sizes& dims, int64_t m) {
  return std::any_of(dims.begin(), dims.end(), [&](int64_t d) {
    int64_t ranks = layout.mesh().size(m);
    for (int64_t k = 0; k < layout.ndim(); ++k) {
      ranks *= k != m && layout.placement(k).is_shard(d) ? layout.mesh().size(k) : 1;
    }
    return sizes[d] >= ranks;
  });
}

// From complex numbers to complex ones, from real ones, or to real ones. torch transforms the last dim first if it starts from
// real numbers, and last if it ends with them.
enum class Transform : uint8_t { C2C, R2C, C2R };

struct Stages {
  Sizes first, rest;
};
// Nothing if one call sends as little. `dims`: the transformed ones, in the call's order.
std::optional<Stages> stages_of(Transform kind, const Layout& layout, c10::SymIntArrayRef sizes, const Sizes& dims) {
  Sizes cut, whole, others; // of `dims`; the other dims
  for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); ++d) {
    if (!has(dims, d)) {
      others.push_back(d);
    }
  }
  for (const auto d : dims) {
    (layout.shards(d) ? cut : whole).push_back(d);
  }
  if (cut.empty() || dims.size() == 1) {
    return std::nullopt;
  }
  const auto last = dims.back();
  auto held = sizes.vec(); // before an exchange
  held[last] = kind == Transform::R2C ? held[last] / 2 + 1 : held[last];
  const auto take_cuts = [&](const Sizes& by) {
    for (int64_t m = 0; m < layout.ndim(); ++m) {
      const auto& p = layout.placement(m);
      if (p.is_shard() && has(cut, p.dim) && !takes_cut(layout, held, by, m)) {
        return false;
      }
    }
    return true;
  };
  const Sizes last_alone{last}, before(dims.begin(), dims.end() - 1);
  if (kind == Transform::C2R) {
    const bool others_cut = cut.size() > 1 || cut[0] != last;
    return take_cuts(others_cut ? others : before) == others_cut ? std::nullopt : std::optional(Stages{before, last_alone});
  }
  const bool may_begin = kind == Transform::C2C ? !whole.empty() : !layout.shards(last);
  if (may_begin && take_cuts(whole)) {
    return Stages{whole, cut};
  }
  return take_cuts(others) ? std::nullopt : std::optional(Stages{last_alone, before});
}

// `arguments`: self, dims, normalization, and one more.
template <Transform kind>
std::optional<at::Tensor> in_stages(c10::ArrayRef<c10::IValue> arguments) {
  const auto& self = arguments[0].toTensor();
  const auto* impl = as_shard_tensor(self);
  if (!impl) {
    return std::nullopt;
  }
  Sizes dims;
  for (const auto& given : arguments[1].toSymIntVector()) {
    const auto d = given.guard_int(__FILE__, __LINE__), at = d < 0 ? d + self.dim() : d;
    if (at < 0 || at >= self.dim() || has(dims, at)) {
      return std::nullopt;
    }
    dims.push_back(at);
  }
  const auto stages = stages_of(kind, impl->layout(), self.sym_sizes(), dims);
  if (!stages) {
    return std::nullopt;
  }
  const auto normalization = arguments[2].toInt();
  const auto& [first, rest] = *stages;
  if constexpr (kind == Transform::C2C) {
    const auto forward = arguments[3].toBool();
    return at::_fft_c2c(at::_fft_c2c(self, first, normalization, forward), rest, normalization, forward);
  } else if constexpr (kind == Transform::R2C) {
    const auto onesided = arguments[3].toBool();
    return at::_fft_c2c(at::_fft_r2c(self, first, normalization, onesided), rest, normalization, /*forward=*/true);
  } else {
    const auto last = arguments[3].toSymInt();
    return at::_fft_c2r_symint(at::_fft_c2c(self, first, normalization, /*forward=*/false), rest, normalization, last);
  }
}

} // namespace

void register_spectral(Registry& r) {
  Options o{.asks_order = true};
  r.add("spectral", {"_fft_c2c.out", "_fft_c2r.out", "_fft_r2c.out"}, transform, o);
  o.way = Way::Stages;
  o.in_stages = in_stages<Transform::C2C>;
  r.add("spectral", {"_fft_c2c"}, transform, o);
  o.in_stages = in_stages<Transform::R2C>;
  r.add("spectral", {"_fft_r2c"}, transform, o);
  o.in_stages = in_stages<Transform::C2R>;
  r.add("spectral", {"_fft_c2r"}, transform, o);
}

} // namespace shardtensor::rules
