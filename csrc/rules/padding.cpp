// Padding: with a number, along any dim, each piece adding its share; with the border's values, only along whole dims.
#include "rules/empties.h"
#include "rules/pieces.h"
#include "rules/registry.h"
#include "rules/resolve.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardtensor::rules {

namespace {

struct Padded {
  SymSizes sizes; // of the result
};

// Every piece adds its share of the padding.
void pad_kernel(Run& run) {
  auto pad = run.arg(1).toSymIntVector();
  const auto n = static_cast<int64_t>(run.operands[0].dim());
  const auto& to = *run.solution.results[0].layout;
  for (size_t i = 0; i * 2 < pad.size(); ++i) {
    const auto d = n - 1 - static_cast<int64_t>(i);
    if (!to.shards(d)) {
      continue;
    }
    const auto held = mine(run, 0, d).numbers();
    const auto made = mine(to, d, noted<Padded>(run.solution).sizes[d]).numbers();
    const auto whole_before = pad[2 * i].guard_int(__FILE__, __LINE__);
    // If both pieces have elements, their offsets decide; an empty piece has no place.
    const auto before = made.length == 0   ? -held.length
                        : held.length == 0 ? made.length
                                           : std::max(whole_before + held.start - made.start, -held.length);
    pad[2 * i] = before;
    pad[2 * i + 1] = made.length - held.length - before;
  }
  run.returns({at::constant_pad_nd_symint(run.arg(0).toTensor(), pad, run.arg(2).toScalar())});
}

Rule constant_pad(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  const auto pad = call.sym_ints(1);
  TORCH_CHECK(
      pad.size() % 2 == 0 && static_cast<int64_t>(pad.size()) <= 2 * x.dim(), "constant_pad_nd: length of pad is ", pad.size(),
      "; it must be even and at most twice the ", x.dim(), " dims of the input");
  Dims in, out;
  auto sizes = x.sym_sizes();
  for (int64_t d = 0; d < x.dim(); ++d) {
    const auto i = static_cast<size_t>(x.dim() - 1 - d) * 2;
    const c10::SymInt before = i < pad.size() ? pad[i] : 0, after = i < pad.size() ? pad[i + 1] : 0;
    const auto added = before + after;
    sizes[d] = added == 0 ? sizes[d] : sizes[d] + added; // torch cannot trace a symbol plus 0
    TORCH_CHECK(
        sizes[d] >= 0, "The input size ", x.sym_size(d), ", plus negative padding ", before, " and ", after,
        ", resulted in a negative output size, which is invalid.");
    Factor f;
    f.kernel = before != 0 || after != 0;
    const bool grows = before >= 0 && after >= 0, shrinks = before <= 0 && after <= 0;
    f.whole = !grows && !shrinks;
    f.size = grows ? sizes[d] : x.sym_size(d);
    in.emplace_back(rule.factor(f));
    out.push_back(in.back());
    if (f.kernel && grows) {
      in.back().window = Dim::SymWindow{before, 1, x.sym_size(d)};
    } else if (f.kernel && shrinks) {
      out.back().window = Dim::SymWindow{-before, 1, sizes[d]};
    }
  }
  rule.notes = Padded{sizes};
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out), std::move(sizes));
  rule.kernel = pad_kernel;
  if (call.arg(2).toScalar().equal(0)) {
    rule.linear_in({0});
  }
  return rule;
}

// The last `spatial` dims stay whole. torch rejects empty batches and channels, but pieces may be empty.
template <int64_t spatial>
Rule border_pad(const Call& call) {
  const auto n = call.tensors[0].dim();
  uint64_t mask = 0;
  for (int64_t d = std::max<int64_t>(0, n - spatial); d < n; ++d) {
    mask |= uint64_t{1} << d;
  }
  auto rule = whole_along(call, mask);
  rule.linear.clear();
  rule.linear_in({0});
  rule.kernel = call_op_nonempty;
  rule.always_kernel = true;
  return rule;
}

} // namespace

void register_padding(Registry& r) {
  r.add("padding", {"constant_pad_nd"}, constant_pad, {.symbols = true});
  r.add(
      "padding",
      {
          "reflection_pad1d",
          "reflection_pad1d_backward",
          "replication_pad1d",
          "replication_pad1d_backward",
      },
      border_pad<1>);
  r.add(
      "padding",
      {
          "reflection_pad2d",
          "reflection_pad2d_backward",
          "replication_pad2d",
          "replication_pad2d_backward",
      },
      border_pad<2>);
  r.add(
      "padding",
      {
          "reflection_pad3d",
          "reflection_pad3d_backward",
          "replication_pad3d",
          "replication_pad3d_backward",
      },
      border_pad<3>);
}

} // namespace shardtensor::rules
