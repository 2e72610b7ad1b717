// Cat, stack and their kin: several operands become one, or one becomes larger than it was.
// Along a sharded dim each operand of cat is a window of the result: pieces stay where they are if their order allows it.
#include "rules/empties.h"
#include "rules/registry.h"
#include "rules/resolve.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardtensor::rules {

namespace {

// ---- cat, stack ----

Rule cat(const Call& call) {
  Rule rule;
  int64_t n = 0;
  for (const auto& t : call.tensors) {
    n = std::max(n, t.dim());
  }
  TORCH_CHECK(n > 0, "zero-dimensional tensor cannot be concatenated");
  const auto dim = call.dim(1, n);
  const auto skipped = [&](const TensorArg& t) { return t.dim() == 1 && n > 1 && t.size(0) == 0; }; // as torch does
  bool sharded = false;
  int64_t total = 0;
  Sizes sizes;
  for (const auto& t : call.tensors) {
    if (!skipped(t)) {
      TORCH_CHECK(t.dim() == n, "Tensors must have same number of dimensions: got ", n, " and ", t.dim());
      sharded |= t.layout->shards(dim);
    }
  }
  for (const auto& t : call.tensors) {
    if (sharded && !skipped(t)) {
      total += t.size(dim);
      sizes.assign(t.sizes().begin(), t.sizes().end());
    }
  }
  auto dims = fresh_dims(rule, n);
  auto out = dims;
  out[dim] = sharded ? dims[dim] : Dim(kNone);
  if (sharded) {
    rule.factors[dim].size = total;
  }
  int64_t start = 0;
  for (const auto& t : call.tensors) {
    if (skipped(t)) {
      rule.operands.emplace_back(Dims(1, Dim(kNone)));
      continue;
    }
    auto& operand = rule.operands.emplace_back(out);
    if (sharded) {
      operand.dims[dim].window = Dim::Window{start, 1, t.size(dim)};
      start += t.size(dim);
    }
  }
  auto& result = rule.results.emplace_back(std::move(out));
  if (sharded) {
    sizes[dim] = total;
    result.sizes = std::move(sizes);
  }
  rule.passes_partial(OperandSet::first(call.tensors.size()));
  return rule;
}

Rule stack(const Call& call) {
  Rule rule;
  auto dims = fresh_dims(rule, call.tensors[0].dim());
  const auto dim = call.dim(1, call.tensors[0].dim() + 1);
  for (const auto& t : call.tensors) {
    TORCH_CHECK(
        t.sizes() == call.tensors[0].sizes(), "stack expects each tensor to be equal size, but got ", call.tensors[0].sizes(),
        " and ", t.sizes());
    rule.operands.emplace_back(dims);
  }
  dims.insert(dims.begin() + dim, Dim(kNone));
  rule.results.emplace_back(std::move(dims));
  rule.passes_partial(OperandSet::first(call.tensors.size()));
  return rule;
}

// ---- one operand, rearranged along some dims, which stay whole ----

Rule whole_along(const Call& call, uint64_t mask) {
  Rule rule;
  Dims dims;
  for (int64_t d = 0; d < call.tensors[0].dim(); ++d) {
    dims.push_back(mask >> d & 1 ? Dim(kNone) : Dim(rule.factor()));
  }
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    rule.operands.emplace_back(dims);
  }
  rule.results.emplace_back(std::move(dims));
  rule.passes_partial(OperandSet::first(call.tensors.size()));
  return rule;
}

uint64_t named_dims(const Call& call, int64_t arg) {
  uint64_t mask = 0;
  for (auto d : call.ints(arg)) {
    mask |= uint64_t{1} << wrap_dim(d, call.tensors[0].dim());
  }
  return mask;
}

Rule flip(const Call& call) {
  return whole_along(call, named_dims(call, 1));
}

// Without dims the tensor is rolled as if it were flat.
Rule roll(const Call& call) {
  return whole_along(call, call.ints(2).empty() ? ~uint64_t{0} : named_dims(call, 2));
}

Rule rot90(const Call& call) {
  return whole_along(call, named_dims(call, 2));
}

Rule repeat(const Call& call) {
  Rule rule;
  const auto n = call.tensors[0].dim();
  const auto times = call.ints(1);
  const auto lead = static_cast<int64_t>(times.size()) - n;
  TORCH_CHECK(lead >= 0, "Number of dimensions of repeat dims can not be smaller than number of dimensions of tensor");
  Dims in, out(lead, Dim(kNone));
  for (int64_t d = 0; d < n; ++d) {
    in.push_back(times[lead + d] == 1 ? Dim(rule.factor()) : Dim(kNone));
    out.push_back(in.back());
  }
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out));
  rule.passes_partial();
  return rule;
}

Rule block_diag(const Call& call) {
  auto rule = replicate(call);
  rule.results.emplace_back(Dims(2, Dim(kNone)));
  rule.passes_partial(OperandSet::first(call.tensors.size()));
  return rule;
}

// ---- padding ----

Interval mine(const Layout& layout, int64_t dim, int64_t size) {
  return layout.intervals(dim, size, layout.mesh().coordinate())[0];
}

// Every piece takes the padding that falls to it. Notes: the result's sizes.
void pad_kernel(Run& run) {
  auto pad = run.arg(1).toIntVector();
  const auto n = static_cast<int64_t>(run.operands[0].sizes.size());
  const auto& to = *run.solution.results[0].layout;
  for (size_t i = 0; i * 2 < pad.size(); ++i) {
    const auto d = n - 1 - static_cast<int64_t>(i);
    if (!to.shards(d)) {
      continue;
    }
    const auto held = mine(*run.operands[0].layout, d, run.operands[0].sizes[d]);
    const auto made = mine(to, d, run.solution.notes[d]);
    // Of two pieces with elements the places tell; an empty one is anywhere.
    const auto before = made.length == 0   ? -held.length
                        : held.length == 0 ? made.length
                                           : std::max(pad[2 * i] + held.start - made.start, -held.length);
    pad[2 * i] = before;
    pad[2 * i + 1] = made.length - held.length - before;
  }
  run.returns({at::constant_pad_nd(run.arg(0).toTensor(), pad, run.arg(2).toScalar())});
}

Rule constant_pad(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  const auto pad = call.ints(1);
  TORCH_CHECK(
      pad.size() % 2 == 0 && static_cast<int64_t>(pad.size()) <= 2 * x.dim(), "constant_pad_nd: length of pad is ", pad.size(),
      "; it must be even and at most twice the ", x.dim(), " dims of the input");
  Dims in, out;
  Sizes sizes(x.sizes().begin(), x.sizes().end());
  for (int64_t d = 0; d < x.dim(); ++d) {
    const auto i = static_cast<size_t>(x.dim() - 1 - d) * 2;
    const auto before = i < pad.size() ? pad[i] : 0, after = i < pad.size() ? pad[i + 1] : 0;
    sizes[d] += before + after;
    TORCH_CHECK(
        sizes[d] >= 0, "The input size ", x.size(d), ", plus negative padding ", before, " and ", after,
        ", resulted in a negative output size, which is invalid.");
    Factor f;
    f.kernel = before || after;
    const bool grows = before >= 0 && after >= 0, shrinks = before <= 0 && after <= 0;
    f.whole = !grows && !shrinks;
    f.size = grows ? sizes[d] : x.size(d);
    in.emplace_back(rule.factor(f));
    out.push_back(in.back());
    if (f.kernel && grows) {
      in.back().window = Dim::Window{before, 1, x.size(d)};
    } else if (f.kernel && shrinks) {
      out.back().window = Dim::Window{-before, 1, sizes[d]};
    }
  }
  rule.notes.append(sizes.begin(), sizes.end());
  rule.operands.emplace_back(std::move(in));
  rule.results.emplace_back(std::move(out), std::move(sizes));
  rule.kernel = pad_kernel;
  if (call.arg(2).toScalar().equal(0)) {
    rule.linear_in({0});
  }
  return rule;
}

// The last `spatial` dims stay whole. torch refuses empty batches and channels; pieces may be empty.
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

void register_joins(Registry& r) {
  Options whole;
  whole.whole = true;
  r.add("joins", {"block_diag"}, block_diag, whole);
  r.add("joins", {"cat"}, cat);
  r.add("joins", {"constant_pad_nd"}, constant_pad);
  r.add("joins", {"flip"}, flip);
  r.add(
      "joins",
      {
          "reflection_pad1d",
          "reflection_pad1d_backward",
          "replication_pad1d",
          "replication_pad1d_backward",
      },
      border_pad<1>);
  r.add(
      "joins",
      {
          "reflection_pad2d",
          "reflection_pad2d_backward",
          "replication_pad2d",
          "replication_pad2d_backward",
      },
      border_pad<2>);
  r.add(
      "joins",
      {
          "reflection_pad3d",
          "reflection_pad3d_backward",
          "replication_pad3d",
          "replication_pad3d_backward",
      },
      border_pad<3>);
  r.add("joins", {"repeat"}, repeat);
  r.add("joins", {"roll"}, roll);
  Options turned;
  turned.asks_order = true;
  r.add("joins", {"rot90"}, rot90, turned);
  r.add("joins", {"stack"}, stack);
}

} // namespace shardtensor::rules
