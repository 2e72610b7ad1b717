// Fourier transforms whose torch formulas need the whole of a cut dim: stft makes its windows by strides, and the gradient of a
// transform of real numbers pads one half of the spectrum with zeros. And the transform of one signal, of which each rank has a
// part. Uses autograd/functions, dispatch/plain, redistribute/watch, tensor/. Registers itself at AutogradPrivateUse2.
#include "autograd/functions.h"
#include "dispatch/plain.h"
#include "redistribute/watch.h"
#include "tensor/shard_tensor.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_fft_c2c_ops.h>
#include <ATen/ops/_fft_c2r_ops.h>
#include <ATen/ops/_fft_r2c_ops.h>
#include <ATen/ops/stft_compositeimplicitautograd_dispatch.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cmath>
#include <numbers>

namespace shardtensor {

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// ---- one signal ----

// The mesh dims that cut tensor dim d.
std::vector<int64_t> mesh_dims_of(const Layout& layout, int64_t d) {
  std::vector<int64_t> out;
  for (int64_t m = 0; m < layout.ndim(); ++m) {
    if (layout.placement(m).is_shard(d)) {
      out.push_back(m);
    }
  }
  return out;
}

int64_t pieces_along(const Layout& layout, int64_t d) {
  int64_t pieces = 1;
  for (const auto m : mesh_dims_of(layout, d)) {
    pieces *= layout.mesh().size(m);
  }
  return pieces;
}

LayoutPtr recut(const Tensor& t, int64_t from, int64_t to) {
  auto layout = as_shard_tensor(t)->layout_ptr();
  for (const auto m : mesh_dims_of(*layout, from)) {
    layout = layout->with(m, Placement::shard(to));
  }
  return layout;
}

// A signal of n = rows * columns numbers: its transform is that of the rows' numbers, column by column, then of the columns'.
struct Grid {
  int64_t dim, rows, columns;
};

// If the transformed dim is cut, no other dim has an index for each rank, and n has two factors that do. A short signal is
// gathered: that takes one message instead of three.
std::optional<Grid> grid_of(const Tensor& self, at::IntArrayRef dims, std::optional<int64_t> results = std::nullopt) {
  constexpr int64_t kShort = 1 << 12;
  const auto* impl = as_shard_tensor(self);
  const auto d = dims.size() == 1 ? (dims[0] < 0 ? dims[0] + self.dim() : dims[0]) : -1;
  if (!impl || d < 0 || d >= self.dim() || !impl->layout().shards(d) || is_symbolic(self) || has_tangent(self)) {
    return std::nullopt;
  }
  const auto n = results.value_or(self.size(d));
  if (n < kShort) {
    return std::nullopt;
  }
  const auto& layout = impl->layout();
  const auto ranks = pieces_along(layout, d);
  for (int64_t m = 0; m < layout.ndim(); ++m) {
    if (layout.placement(m).is_partial() || layout.placement(m).split_factor != 1) {
      return std::nullopt;
    }
  }
  for (int64_t e = 0; e < self.dim(); ++e) {
    if (e != d && self.size(e) >= ranks * pieces_along(layout, e)) {
      return std::nullopt; // cut instead (rules/spectral.cpp)
    }
  }
  for (auto rows = static_cast<int64_t>(std::sqrt(static_cast<double>(n))); rows >= ranks; --rows) {
    if (n % rows == 0) {
      return Grid{d, rows, n / rows};
    }
  }
  return std::nullopt;
}

// exp(-2 pi i row column / n), or its conjugate, where `like`, [.., rows, columns, ..], has its columns.
Tensor twiddles(const Tensor& like, const Grid& grid, bool forward) {
  const auto& has = as_shard_tensor(like)->layout();
  auto layout = Layout::replicated(has.mesh_ptr());
  for (const auto m : mesh_dims_of(has, grid.dim + 1)) {
    layout = layout->with(m, Placement::shard(1));
  }
  const auto columns = layout->intervals(1, grid.columns, layout->mesh().coordinate())[0];
  const auto numbers = as_shard_tensor(like)->local().options().dtype(at::kLong);
  const auto n = grid.rows * grid.columns;
  const auto turns = at::arange(grid.rows, numbers)
                         .unsqueeze(1)
                         .mul(at::arange(columns.start, columns.start + columns.length, numbers))
                         .remainder(n)
                         .to(at::kDouble);
  const auto angles = turns.mul((forward ? -2 : 2) * std::numbers::pi / static_cast<double>(n));
  const auto local = at::polar(at::ones_like(angles), angles).to(like.scalar_type());
  std::vector<int64_t> sizes{grid.rows, grid.columns}, broad = sizes;
  broad.resize(like.dim() - grid.dim, 1);
  return from_local(local, layout, at::IntArrayRef(sizes), at::IntArrayRef({grid.columns, int64_t{1}})).view(broad);
}

// Of the first `kept` frequencies. Three exchanges, and one before if a rank's piece is not whole rows. No rank ever has more
// than its part.
Tensor transformed(const char* op, const Tensor& self, const Grid& grid, int64_t normalization, bool forward, int64_t kept) {
  const auto d = grid.dim;
  const auto exchanged = [&](const Tensor& t, int64_t from, int64_t to) {
    const auto layout = recut(t, from, to);
    tell_watcher(op, "self", "rows of one signal are exchanged for columns", as_shard_tensor(t)->layout(), *layout, t);
    return redistribute(t, layout);
  };
  auto t = exchanged(self.unflatten(d, {grid.rows, grid.columns}), d, d + 1);
  t = at::_fft_c2c(t.to(c10::toComplexType(t.scalar_type())), {d}, normalization, forward);
  t = exchanged(t * twiddles(t, grid, forward), d + 1, d);
  t = at::_fft_c2c(t, {d + 1}, normalization, forward).narrow(d + 1, 0, (kept + grid.rows - 1) / grid.rows);
  return exchanged(t, d, d + 1).transpose(d, d + 1).flatten(d, d + 1).narrow(d, 0, kept); // frequency row + rows * column
}

Tensor fft_c2c(c10::DispatchKeySet keys, const Tensor& self, c10::SymIntArrayRef dims, int64_t normalization, bool forward) {
  const auto grid = dims.size() == 1 ? grid_of(self, C10_AS_INTARRAYREF_SLOW(dims)) : std::nullopt;
  if (!grid) {
    return at::_ops::_fft_c2c::redispatch(torchs_autograd(keys), self, dims, normalization, forward);
  }
  return transformed("aten::_fft_c2c", self, *grid, normalization, forward, self.size(grid->dim));
}

// From all frequencies: those that are not given are the mirrored ones' conjugates.
Tensor fft_c2r(c10::DispatchKeySet keys, const Tensor& self, at::IntArrayRef dims, int64_t normalization, c10::SymInt size) {
  const auto grid = size.is_symbolic() ? std::nullopt : grid_of(self, dims, size.expect_int());
  if (!grid || self.size(grid->dim) != size.expect_int() / 2 + 1) {
    return at::_ops::_fft_c2r::redispatch(torchs_autograd(keys), self, dims, normalization, size);
  }
  const auto d = grid->dim, mirrored = size.expect_int() - self.size(d);
  const auto rest = self.narrow(d, 1, mirrored).flip(d).conj();
  const auto all = at::cat({self, rest}, d);
  return at::real(transformed("aten::_fft_c2r", all, *grid, normalization, false, size.expect_int())).contiguous();
}

// ---- several signals ----

// The half of a spectrum that real numbers need. Its gradient is a transform from such a half: back to real numbers every
// frequency that has a mirror counts twice, so these are halved before.
struct HalfSpectrum : torch::autograd::Function<HalfSpectrum> {
  static Tensor forward(AutogradContext* ctx, const Tensor& self, const std::vector<int64_t>& dims, int64_t normalization) {
    ctx->saved_data["dims"] = dims;
    ctx->saved_data["normalization"] = normalization;
    ctx->saved_data["size"] = self.sym_size(dims.back());
    at::AutoDispatchBelowADInplaceOrView below;
    return at::_fft_r2c(self, dims, normalization, true);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    auto dims = ctx->saved_data["dims"].toIntVector();
    const auto normalization = ctx->saved_data["normalization"].toInt();
    const auto size = ctx->saved_data["size"].toSymInt();
    const auto last = dims.back();
    dims.pop_back();
    auto half = grads[0].clone();
    half.narrow_symint(last, 1, size - half.sym_size(last)).mul_(0.5);
    half = dims.empty() ? half : at::_fft_c2c(half, dims, normalization, false);
    return {at::_fft_c2r_symint(half, {last}, normalization, size), Tensor(), Tensor()};
  }
};

Tensor fft_r2c(c10::DispatchKeySet keys, const Tensor& self, at::IntArrayRef dims, int64_t normalization, bool onesided) {
  if (const auto grid = grid_of(self, dims)) {
    const auto n = self.size(grid->dim);
    return transformed("aten::_fft_r2c", self, *grid, normalization, true, onesided ? n / 2 + 1 : n);
  }
  const auto* impl = as_shard_tensor(self);
  std::vector<int64_t> wrapped;
  bool cut = false;
  for (const auto given : dims) {
    wrapped.push_back(given < 0 ? given + self.dim() : given);
    cut = cut || (impl && wrapped.back() >= 0 && wrapped.back() < self.dim() && impl->layout().shards(wrapped.back()));
  }
  if (!cut || !onesided || has_tangent(self) || !self.requires_grad() || !at::GradMode::is_enabled()) {
    return at::_ops::_fft_r2c::redispatch(torchs_autograd(keys), self, dims, normalization, onesided);
  }
  return HalfSpectrum::apply(self, wrapped, normalization);
}

Tensor stft(
    const Tensor& self,
    int64_t n_fft,
    std::optional<int64_t> hop_length,
    std::optional<int64_t> win_length,
    const std::optional<Tensor>& window,
    bool normalized,
    std::optional<bool> onesided,
    std::optional<bool> return_complex,
    std::optional<bool> align_to_window) {
  const auto hop = hop_length.value_or(n_fft / 4), width = win_length.value_or(n_fft);
  const bool has_window = window && window->defined();
  const bool is_complex = self.is_complex() || (has_window && window->is_complex());
  const auto* impl = as_shard_tensor(self);
  const bool cut = impl && (self.dim() == 1 || self.dim() == 2) && impl->layout().shards(self.dim() - 1);
  const bool fits = cut && n_fft > 0 && self.sym_size(-1) >= n_fft && hop > 0 && width > 0 && width <= n_fft &&
                    (has_window ? window->dim() == 1 && window->sym_size(0) == width : width == n_fft);
  if (!fits || !return_complex.value_or(is_complex) || (is_complex && onesided.value_or(false)) ||
      align_to_window.value_or(false)) {
    return at::compositeimplicitautograd::stft(
        self, n_fft, hop_length, win_length, window, normalized, onesided, return_complex, align_to_window);
  }
  auto frames = (self.dim() == 1 ? self.unsqueeze(0) : self).unfold(1, n_fft, hop); // they exchange halos
  if (has_window) {
    const auto before = (n_fft - width) / 2;
    frames = frames * (width < n_fft ? at::constant_pad_nd(*window, {before, n_fft - width - before}) : *window);
  }
  const int64_t by_root_n = normalized;
  auto out =
      is_complex ? at::_fft_c2c(frames, {2}, by_root_n, true) : at::_fft_r2c(frames, {2}, by_root_n, onesided.value_or(true));
  out.transpose_(1, 2);
  return self.dim() == 1 ? out.squeeze_(0) : out;
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse2, m) {
  m.impl("_fft_c2c", fft_c2c);
  m.impl("_fft_c2r", fft_c2r);
  m.impl("_fft_r2c", fft_r2c);
  m.impl("stft", stft);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse2, m) { // in inference mode
  m.impl("stft", stft);
}

} // namespace

} // namespace shardtensor
