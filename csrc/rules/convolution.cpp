// Convolutions, and ops on whole planes (pooling, resampling): batch and channels may be cut, space stays whole.
#include "rules/empties.h"
#include "rules/pieces.h"
#include "rules/registry.h"
#include "rules/resolve.h"

#include <ATen/ATen.h>

namespace shardtensor::rules {

namespace {

// ---- convolution: input [n, in, ...], weight [out, in / groups, ...] (transposed: [in, out / groups, ...]), bias [out] ----

struct Factors {
  int64_t n, in, out;
};

// Grouped channels belong together, so they stay whole.
Factors convolution_factors(Rule& rule, bool grouped) {
  Factor channels;
  channels.whole = grouped;
  channels.reduce = ReduceOp::Sum;
  Factors f{};
  f.n = rule.reduced(ReduceOp::Sum);
  f.in = rule.factor(channels);
  f.out = rule.factor(channels);
  return f;
}

Dims with_space(const TensorArg& t, int64_t first, int64_t second) {
  Dims dims(t.dim(), Dim(kNone));
  dims[0] = first;
  dims[1] = second;
  return dims;
}

Dims weight_dims(const TensorArg& t, const Factors& f, bool transposed) {
  return transposed ? with_space(t, f.in, f.out) : with_space(t, f.out, f.in);
}

// If the input's channels are sharded, one rank along them adds the bias.
void convolution_kernel(Run& run) {
  add_bias_once(run, 2);
  call_op_nonempty(run);
}

// The meta kernel does not recognize a batch of one as channels_last.
std::optional<Order> order_of_result(const TensorArg& input, const TensorArg& weight) {
  for (const auto* t : {&input, &weight}) {
    if (t->has_symbols()) {
      continue;
    }
    if (c10::is_channels_last_strides_2d(t->sizes(), t->strides())) {
      return Order{0, 2, 3, 1};
    }
    if (c10::is_channels_last_strides_3d(t->sizes(), t->strides())) {
      return Order{0, 2, 3, 4, 1};
    }
  }
  return std::nullopt;
}

Rule convolution(const Call& call) {
  Rule rule;
  const bool transposed = call.flag(call.position("transposed"));
  const auto f = convolution_factors(rule, call.integer(call.position("groups")) != 1);
  const auto& input = call.tensors[0];
  rule.operands.emplace_back(with_space(input, f.n, f.in));
  rule.operands.emplace_back(weight_dims(call.tensors[1], f, transposed));
  const bool biased = call.operand(2) >= 0;
  if (biased) {
    rule.operands.emplace_back(Dims{Dim(f.out)});
  }
  rule.results.emplace_back(with_space(input, f.n, f.out));
  rule.results[0].order = order_of_result(input, call.tensors[1]);
  const uint64_t bias = biased ? 0b100 : 0;
  rule.jointly_linear(0b001 | bias);
  rule.jointly_linear(0b010 | bias);
  rule.kernel = convolution_kernel;
  rule.always_kernel = true;
  rule.notes = Contracted{f.in};
  return rule;
}

void convolution_backward_kernel(Run& run) {
  const auto bias_sizes = run.op.schema().argumentIndexWithName("bias_sizes");
  if (!run.arg(*bias_sizes).isNone()) {
    const auto channels = run.arg(0).toTensor().sym_size(1);
    run.arg(*bias_sizes) = c10::SymIntArrayRef({channels == 0 ? c10::SymInt(1) : channels});
  }
  call_op_nonempty(run);
}

Rule convolution_backward(const Call& call) {
  Rule rule;
  const bool transposed = call.flag(call.position("transposed"));
  const auto f = convolution_factors(rule, call.integer(call.position("groups")) != 1);
  rule.operands.emplace_back(with_space(call.tensors[0], f.n, f.out));
  rule.operands.emplace_back(with_space(call.tensors[1], f.n, f.in));
  rule.operands.emplace_back(weight_dims(call.tensors[2], f, transposed));
  rule.results.emplace_back(rule.operands[1].dims);
  rule.results.emplace_back(rule.operands[2].dims);
  rule.results.emplace_back(Dims{Dim(f.out)});
  rule.results[2].same_over = uint64_t{1} << f.in;
  rule.linear_in({0});
  rule.kernel = convolution_backward_kernel;
  rule.always_kernel = true;
  return rule;
}

// ---- planes: the last `space` dims stay whole, the dims before them are shared by all operands and results ----

Rule planes(const Call& call, int64_t space) {
  Rule rule;
  const auto lead = call.tensors[0].dim() - space;
  Dims dims;
  for (int64_t d = 0; d < call.tensors[0].dim(); ++d) {
    dims.push_back(d < lead ? Dim(rule.factor()) : Dim(kNone));
  }
  for (const auto& t : call.tensors) {
    rule.operands.emplace_back(t.dim() == static_cast<int64_t>(dims.size()) ? dims : Dims(t.dim(), Dim(kNone)));
  }
  for (size_t i = 0; i < call.schema.returns().size(); ++i) {
    rule.results.emplace_back(dims);
  }
  rule.kernel = call_op_nonempty;
  rule.kernel_if = is_empty;
  return rule;
}

template <int64_t space>
Rule pool(const Call& call) {
  return planes(call, space);
}

template <int64_t space>
Rule linear_pool(const Call& call) {
  auto rule = planes(call, space);
  rule.linear_in({0});
  return rule;
}

// (self, ..., random samples [n, c, space]): n is 1 where self has no batch.
template <int64_t space>
Rule fractional_pool(const Call& call) {
  auto rule = planes(call, space);
  if (call.tensors[1].dim() != 3) {
    return replicate(call); // the op says what is wrong
  }
  const auto& dims = rule.operands[0].dims;
  const bool batched = static_cast<int64_t>(dims.size()) == space + 2;
  rule.operands[1].dims = batched ? Dims{dims[0], dims[1], Dim(kNone)} : Dims{Dim(kNone), dims[0], Dim(kNone)};
  return rule;
}

// Argument `input_size` lists the global sizes of the gradient. The kernel replaces them by those of this rank's piece.
void resample_backward_kernel(Run& run) {
  const auto at = *run.op.schema().argumentIndexWithName("input_size");
  auto sizes = run.arg(at).toSymIntVector();
  const auto grad = run.arg(0).toTensor();
  for (int64_t d = 0; d < 2; ++d) {
    const auto n = grad.sym_size(d);
    sizes[d] = n == 0 && run.operands[0].symbols[d] != 0 ? c10::SymInt(1) : n; // see call_op_nonempty()
  }
  run.arg(at) = c10::SymIntArrayRef(sizes);
  call_op_nonempty(run);
}

template <int64_t space>
Rule resample_backward(const Call& call) {
  auto rule = planes(call, space);
  rule.kernel = resample_backward_kernel;
  rule.always_kernel = true;
  rule.linear_in({0});
  return rule;
}

// torch's pixel_unshuffle returns an empty tensor with its old shape.
void pixel_unshuffle_kernel(Run& run) {
  const auto x = run.arg(0).toTensor();
  if (x.numel()) {
    return run.call_op();
  }
  const auto r = run.arg(1).toInt();
  auto sizes = x.sizes().vec();
  const auto n = sizes.size();
  sizes[n - 3] *= r * r;
  sizes[n - 2] /= r;
  sizes[n - 1] /= r;
  run.returns({at::empty(sizes, x.options())});
}

// [..., c * r * r, h, w] and [..., c, h * r, w * r], in either direction.
template <bool shuffle>
Rule pixel_shuffle(const Call& call) {
  Rule rule;
  const auto r = call.integer(1);
  const auto& x = call.tensors[0];
  const auto n = x.dim();
  const auto* name = shuffle ? "pixel_shuffle" : "pixel_unshuffle";
  TORCH_CHECK(n >= 3, name, " expects input to have at least 3 dimensions, but got input with ", n, " dimension(s)");
  TORCH_CHECK(r > 0, name, " expects a positive ", shuffle ? "upscale" : "downscale", "_factor, but got ", r);
  Dims packed, spread;
  for (int64_t d = 0; d < n; ++d) {
    const auto f = rule.factor();
    packed.emplace_back(f, d == n - 3 ? r * r : 1);
    spread.emplace_back(f, d >= n - 2 ? r : 1);
  }
  rule.operands.emplace_back(shuffle ? packed : spread);
  rule.results.emplace_back(shuffle ? spread : packed);
  for (int64_t d = 0; d < n; ++d) {
    const auto inner = rule.operands[0].dims[d].inner.guard_int(__FILE__, __LINE__);
    TORCH_CHECK(
        x.size(d) % inner == 0, name, " expects dim ", d - n, " of its input, of size ", x.size(d), ", to be divisible by ",
        inner);
    rule.results[0].sizes.push_back(x.size(d) / inner * rule.results[0].dims[d].inner);
  }
  rule.passes_partial();
  rule.kernel = pixel_unshuffle_kernel;
  rule.always_kernel = !shuffle;
  return rule;
}

} // namespace

void register_convolution(Registry& r) {
  Options same;
  same.one_dtype = ~uint64_t{0};
  same.symbols = true;
  const Options symbols{.symbols = true};
  r.add("convolution", {"convolution", "convolution_overrideable"}, convolution, same);
  r.add("convolution", {"convolution_backward", "convolution_backward_overrideable"}, convolution_backward, symbols);

  r.add(
      "pooling", {"_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "avg_pool2d", "avg_pool2d_backward"}, linear_pool<2>,
      symbols);
  r.add(
      "pooling", {"_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward", "avg_pool3d", "avg_pool3d_backward"}, linear_pool<3>,
      symbols);
  r.add("pooling", {"adaptive_max_pool2d", "max_pool2d_with_indices"}, pool<2>, symbols);
  r.add("pooling", {"adaptive_max_pool3d", "max_pool3d_with_indices"}, pool<3>, symbols);
  r.add("pooling", {"adaptive_max_pool2d_backward", "max_pool2d_with_indices_backward", "max_unpool2d"}, linear_pool<2>, symbols);
  r.add("pooling", {"adaptive_max_pool3d_backward", "max_pool3d_with_indices_backward", "max_unpool3d"}, linear_pool<3>, symbols);

  r.add("pooling", {"fractional_max_pool2d"}, fractional_pool<2>, symbols);
  r.add("pooling", {"fractional_max_pool2d_backward"}, linear_pool<2>, symbols);
  r.add("pooling", {"fractional_max_pool3d"}, fractional_pool<3>, symbols);
  r.add("pooling", {"fractional_max_pool3d_backward"}, linear_pool<3>, symbols);
  r.add(
      "pooling", {"max_pool1d"}, pool<1>,
      {.way = Way::Whole, .symbols = true}); // torch reads the data pointer if no gradient is needed

  r.add("resampling", {"pixel_shuffle"}, pixel_shuffle<true>);
  r.add("resampling", {"pixel_unshuffle"}, pixel_shuffle<false>);
  r.add("resampling", {"_upsample_nearest_exact1d", "upsample_linear1d", "upsample_nearest1d"}, linear_pool<1>, symbols);
  r.add(
      "resampling",
      {
          "_upsample_bicubic2d_aa",
          "_upsample_bilinear2d_aa",
          "_upsample_lanczos2d_aa",
          "_upsample_nearest_exact2d",
          "upsample_bicubic2d",
          "upsample_bilinear2d",
          "upsample_nearest2d",
      },
      linear_pool<2>, symbols);
  r.add("resampling", {"_upsample_nearest_exact3d", "upsample_nearest3d", "upsample_trilinear3d"}, linear_pool<3>, symbols);
  r.add(
      "resampling",
      {
          "_upsample_nearest_exact1d_backward",
          "upsample_linear1d_backward",
          "upsample_nearest1d_backward",
      },
      resample_backward<1>, symbols);
  r.add(
      "resampling",
      {
          "_upsample_bicubic2d_aa_backward",
          "_upsample_bilinear2d_aa_backward",
          "_upsample_lanczos2d_aa_backward",
          "_upsample_nearest_exact2d_backward",
          "upsample_bicubic2d_backward",
          "upsample_bilinear2d_backward",
          "upsample_nearest2d_backward",
      },
      resample_backward<2>, symbols);
  r.add(
      "resampling",
      {
          "_upsample_nearest_exact3d_backward",
          "upsample_nearest3d_backward",
          "upsample_trilinear3d_backward",
      },
      resample_backward<3>, symbols);
}

} // namespace shardtensor::rules
