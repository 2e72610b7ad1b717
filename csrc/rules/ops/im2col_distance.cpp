// Affine grids, patches, distances, and a few other ops whose batch may be cut.
#include "rules/batched.h"
#include "rules/kernel_utils.h"
#include "rules/pad_empty.h"
#include "rules/registry.h"
#include "rules/windows.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardtensor::rules {

namespace {

// theta [n, 2, 3] -> [n, h, w, 2], or one dim more. Arguments give n, c, h, w.
void affine_grid_kernel(KernelRun& run) {
  auto sizes = run.arg(1).toIntVector();
  sizes[0] = run.arg(0).toTensor().size(0);
  run.arg(1) = c10::List<int64_t>(sizes);
  run.call_op();
}

Rule affine_grid(const Call& call) {
  const auto sizes = call.ints(1);
  TORCH_CHECK(
      !sizes.empty() && call.tensors[0].size(0) == sizes[0], "Expected a batch of ", c10::IntArrayRef(sizes),
      " affine matrices, got ", call.tensors[0].sizes());
  auto rule = linear(batched(call, sizes.size() == 4 ? "N..->N..." : "N..->N...."), {0});
  rule.always(affine_grid_kernel);
  return rule;
}

// [n, c, h, w] or [c, h, w], and columns [n, c * k * k, blocks].
// The channels may be cut, and the height, where the blocks are cut in whole rows of blocks. If the width is cut, another dim is
// cut instead: a row of blocks holds all of it.

// The blocks' places along height and width; nothing if torch refuses the call. `lead`: dims before the channels.
std::optional<Windows> patches_of(const Call& call, int64_t lead, c10::IntArrayRef sizes) {
  const auto list = [&](const char* name) { return call.ints(call.position(name)); };
  const auto kernel = list("kernel_size"), dilation = list("dilation"), padding = list("padding"), stride = list("stride");
  for (const auto* l : {&kernel, &dilation, &padding, &stride}) {
    if (l->size() != 2) {
      return std::nullopt;
    }
  }
  Windows p;
  p.lead = lead + 1;
  for (int64_t i = 0; i < 2; ++i) {
    const WindowSpec t{kernel[i], stride[i], padding[i], dilation[i]};
    if (t.count < 1 || t.stride < 1 || t.dilation < 1 || t.padding < 0 || sizes[i] < 1 || t.results(sizes[i]) < 1) {
      return std::nullopt;
    }
    p.space.push_back({sizes[i], t.results(sizes[i]), t.reach(), t});
  }
  return p;
}

int64_t cells_of_block(const Windows& p) {
  return p.space[0].taps.count * p.space[1].taps.count;
}

void im2col_kernel(KernelRun& run) {
  const auto x = run.arg(0).toTensor();
  const auto sizes = guarded(sizes_of_piece(run));
  if (x.numel() == 0 || sizes.back() == 0) {
    return run.returns({x.new_zeros(sizes)});
  }
  if (run.solution.halo(0)) {
    set_along(run, kernel_data<Windows>(run.solution), "padding", 0, 0);
  }
  run.call_op();
}

Rule im2col(const Call& call) {
  const auto& x = call.tensors[0];
  auto rule = linear(batched(call, x.dim() == 4 ? "N...->N.." : "...->.."), {0});
  const auto lead = x.dim() - 3;
  const auto cut = [&](int64_t d) { return x.layout->shards(lead + d); };
  const auto p = lead < 0 || lead > 1 || !(cut(0) || cut(1) || cut(2))
                     ? std::nullopt
                     : patches_of(call, lead, {x.size(lead + 1), x.size(lead + 2)});
  if (!p) {
    return rule;
  }
  TORCH_CHECK(
      x.size(lead) && x.size(lead + 1) && x.size(lead + 2),
      "Expected 3D or 4D (batch mode) tensor with possibly 0 batch size and other non-zero dimensions for input, but got: ",
      x.sizes());
  const auto rows = p->space[0].count, columns = p->space[1].count;
  const auto channel = rule.factor(), row = rule.factor({.size = rows});
  rule.operands[0].dims[lead] = channel;
  rule.operands[0].dims[lead + 1] = rule.windows(row, p->space[0].reach);
  auto& result = rule.results[0];
  result.dims[lead] = Dim(channel, cells_of_block(*p));
  result.dims[lead + 1] = Dim(row, columns);
  result.sizes = lead ? SymSizes{x.sym_size(0)} : SymSizes();
  result.sizes.push_back(x.sym_size(lead) * cells_of_block(*p));
  result.sizes.push_back(rows * columns);
  if (cut(2)) {
    rule.spread = lead ? c10::SmallVector<int64_t, 1>{0, row, channel} : c10::SmallVector<int64_t, 1>{row, channel};
  }
  rule.kernel_data = *p;
  rule.always(im2col_kernel);
  return rule;
}

void col2im_kernel(KernelRun& run) {
  const auto& p = kernel_data<Windows>(run.solution);
  const auto blocks = run.arg(0).toTensor();
  const auto sizes = guarded(sizes_of_piece(run));
  const auto* halo = run.solution.halo(0);
  if (blocks.numel() == 0 || (halo && sizes[p.lead] == 0)) {
    return run.returns({blocks.new_zeros(sizes)});
  }
  if (!halo) {
    return run.call_op();
  }
  const auto& [size, count, reach, taps] = p.space[0];
  const auto& read = halo->fetch.mine()[p.lead].inside;
  const auto columns = p.space[1].count;
  const auto held = taps.cells({read.start / columns, read.length / columns});
  set_along(run, p, "output_size", 0, held.length);
  set_along(run, p, "padding", 0, 0);
  run.call_op();
  CropOrPad crop;
  crop.along(p.lead, held, run.solution.results[0].layout->intervals(p.lead, size, run.mesh().coordinate())[0]);
  run.stack.back() = crop(run.stack.back().toTensor());
}

Rule col2im(const Call& call) {
  const auto& x = call.tensors[0];
  auto rule = linear(batched(call, x.dim() == 3 ? "N..->N..." : "..->..."), {0});
  const auto lead = x.dim() - 2;
  const auto size = call.ints(1);
  const auto p = lead < 0 || lead > 1 || !(x.layout->shards(lead) || x.layout->shards(lead + 1)) || size.size() != 2
                     ? std::nullopt
                     : patches_of(call, lead, size);
  if (!p || x.size(lead + 1) != p->space[0].count * p->space[1].count || x.size(lead) % cells_of_block(*p)) {
    return rule;
  }
  const auto channel = rule.factor(), row = rule.factor({.size = size[0]});
  rule.operands[0].dims[lead] = Dim(channel, cells_of_block(*p));
  auto& dim = rule.operands[0].dims[lead + 1];
  dim = rule.windows(row, mirror(p->space[0].reach, -1));
  dim.inner = p->space[1].count;
  rule.operands[0].padding = std::nullopt;
  auto& result = rule.results[0];
  result.dims[lead] = channel;
  result.dims[lead + 1] = row;
  result.sizes = lead ? SymSizes{x.sym_size(0)} : SymSizes();
  result.sizes.push_back(x.sym_size(lead) / cells_of_block(*p));
  result.sizes.push_back(size[0]);
  result.sizes.push_back(size[1]);
  rule.kernel_data = *p;
  rule.always(col2im_kernel);
  return rule;
}

// A distance for each pair of rows, so rows stay whole; features may be cut, over which it is a norm.
Rule pdist(const Call& call) {
  if (call.tensors[0].dim() != 2) {
    return replicate(call); // the op says what is wrong
  }
  Rule rule;
  const auto features = rule.factor(normed(call.arg(1).toDouble()));
  rule.operands.emplace_back(Dims{Dim(kNone), Dim(features)});
  rule.results.emplace_back(Dims{Dim(kNone)});
  return rule;
}

// The product of three operands, each broadcast along the dims that it lacks, summed over some dims.
Rule trilinear(const Call& call) {
  Rule rule;
  const auto has = [](const Sizes& dims, int64_t d) { return std::find(dims.begin(), dims.end(), d) != dims.end(); };
  const auto summed = call.ints(6);
  Dims out;
  const auto ndim = call.tensors[0].dim() + static_cast<int64_t>(call.ints(3).size());
  for (int64_t d = 0; d < ndim; ++d) {
    const auto f = has(summed, d) ? rule.reduced(ReduceOp::Sum) : rule.factor();
    if (!has(summed, d)) {
      out.emplace_back(f);
    }
  }
  for (int64_t i = 0; i < 3; ++i) {
    const auto lacking = call.ints(3 + i);
    Dims dims;
    for (int64_t d = 0; d < ndim; ++d) {
      if (!has(lacking, d)) {
        dims.emplace_back(d);
      }
    }
    rule.operands.emplace_back(std::move(dims));
  }
  rule.results.emplace_back(std::move(out));
  rule.linear_in({0, 1, 2});
  return rule;
}

// Each element is searched among all test elements.
Rule isin(const Call& call) {
  Rule rule;
  auto dims = fresh_dims(rule, call.tensors[0].dim());
  rule.operands.emplace_back(dims);
  for (size_t i = 1; i < call.tensors.size(); ++i) {
    rule.operands.emplace_back(Dims(call.tensors[i].dim(), Dim(kNone)));
  }
  rule.results.emplace_back(dims);
  return rule;
}

// By a copy, for any dtype: torch's kernel rejects some dtypes, but not on a rank with an empty piece.
void channel_shuffle_kernel(KernelRun& run) {
  const auto x = run.arg(0).toTensor();
  const auto groups = run.arg(1).toInt();
  const auto shuffled = x.unflatten(1, {groups, x.size(1) / groups}).transpose(1, 2);
  run.returns({shuffled.clone(at::MemoryFormat::Contiguous).view(x.sizes())});
}

Rule channel_shuffle(const Call& call) {
  const auto& x = call.tensors[0];
  TORCH_CHECK(x.dim() > 2, "channel_shuffle expects input with > 2 dims, but got input with sizes ", x.sizes());
  const auto groups = call.integer(1);
  TORCH_CHECK(groups > 0, "Number of groups to divide channels in must be positive. Value of groups:", groups);
  TORCH_CHECK(
      x.size(1) % groups == 0, "Number of channels must be divisible by groups. Got ", x.size(1), " channels and ", groups,
      " groups.");
  Rule rule;
  rule.always(channel_shuffle_kernel);
  auto dims = fresh_dims(rule, x.dim());
  dims[1] = Dim(kNone);
  rule.operands.emplace_back(dims);
  rule.results.emplace_back(dims);
  rule.passes_partial();
  return rule;
}

// v may be cut along the dim that has a norm for each index: g and the norms have that dim, and size 1 elsewhere. Also the
// backward.
Rule weight_norm(const Call& call) {
  Rule rule;
  const auto ndim = call.tensors[0].dim();
  const auto dim = call.integer(call.position("dim"));
  Dims dims(ndim, Dim(kNone));
  if (dim >= 0 && dim < ndim) {
    dims[dim] = Dim(rule.factor());
  }
  for (const auto& t : call.tensors) {
    rule.operands.emplace_back(t.dim() == ndim ? dims : Dims(t.dim(), Dim(kNone)));
  }
  rule.results = {Result(dims), Result(dims)};
  rule.kernel = call_op_nonempty; // torch 2.11 divides by the number of indices
  rule.kernel_if = is_empty;
  return rule;
}

} // namespace

void register_im2col_distance(Registry& r) {
  const Options real{.takes = kReals};
  const Options patches{.takes = kAllNumbers & ~kIntegers};
  const Options products{.takes = kReals | kComplex};
  const Options ordered{.takes = kAllNumbers & ~kComplex};
  const Options distances{.takes = kWideReals, .one_dtype = 0b11, .asks_order = true};
  r.add("sampling", {"affine_grid_generator"}, affine_grid, real);

  r.add("patches", {"channel_shuffle"}, channel_shuffle);
  r.add("patches", {"col2im"}, col2im, patches);
  r.add("patches", {"im2col"}, im2col, patches);

  r.add("distances", {"_cdist_backward"}, batch<"*R.,*R.,*..,*R.->*R.", 0>, distances);
  r.add("distances", {"_cdist_forward"}, batch<"*R.,*C.->*RC">, distances);
  r.add("distances", {"_pdist_backward"}, batch<".,.K,.->.K", 0>, distances);
  r.add("distances", {"_pdist_forward"}, pdist, real);

  r.add("various", {"_trilinear"}, trilinear, products);
  r.add("various", {"_weight_norm_interface", "_weight_norm_interface_backward"}, weight_norm, real);
  r.add("various", {"isin.Tensor_Scalar", "isin.Tensor_Tensor"}, isin, ordered);
}

} // namespace shardtensor::rules
