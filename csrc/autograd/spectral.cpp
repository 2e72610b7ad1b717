// Fourier transforms for which torch needs the whole of a cut dim: stft makes its windows by strides, and the gradient of a
// transform of real numbers pads one half of the spectrum with zeros. Uses dispatch/plain_tensors, tensor/.
#include "autograd/make_formula.h"
#include "autograd/with_gradient.h"
#include "dispatch/plain_tensors.h"
#include "tensor/shard_tensor.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_fft_r2c_ops.h>
#include <ATen/ops/istft_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/stft_compositeimplicitautograd_dispatch.h>

#include <algorithm>
#include <numeric>

namespace shardtensor {

namespace {

using at::Tensor;
using torch::autograd::variable_list;

// The gradient of the half of the spectrum that real numbers need. It is a transform from such a half to real numbers, which
// counts every frequency that has a mirror twice, so these are halved first. torch transforms the spectrum padded with zeros, in
// contiguous memory, so the result has the transformed dims last in memory. `size`: of the last transformed dim.
Tensor half_spectrum_backward(const Tensor& grad, std::vector<int64_t> dims, int64_t normalization, const c10::SymInt& size) {
  std::vector<int64_t> order(grad.dim()), back(grad.dim());
  std::iota(order.begin(), order.end(), 0);
  std::stable_partition(order.begin(), order.end(), [&](int64_t d) { return std::count(dims.begin(), dims.end(), d) == 0; });
  for (size_t i = 0; i < order.size(); ++i) {
    back[order[i]] = static_cast<int64_t>(i);
  }
  const auto last = dims.back();
  dims.pop_back();
  auto half = grad.clone(at::MemoryFormat::Contiguous);
  half.narrow_symint(last, 1, size - half.sym_size(last)).mul_(0.5);
  half = dims.empty() ? half : at::_fft_c2c(half, dims, normalization, false);
  const auto out = at::_fft_c2r_symint(half, {last}, normalization, size);
  const bool in_order = out.is_contiguous() && std::is_sorted(order.begin(), order.end());
  return in_order ? out : out.permute(order).contiguous().permute(back);
}

Tensor fft_r2c(c10::DispatchKeySet keys, const Tensor& self, at::IntArrayRef dims, int64_t normalization, bool onesided) {
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
  return with_gradient(
      {self}, {}, [&] { return at::_fft_r2c(self, wrapped, normalization, true); },
      [wrapped, normalization, size = self.sym_size(wrapped.back())](const Tensor& grad, const variable_list&) -> variable_list {
        return {half_spectrum_backward(grad, wrapped, normalization, size)};
      });
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

// torch's version makes its own window as a plain tensor, and reads whether the windows' sum has zeros.
Tensor istft(
    const Tensor& self,
    int64_t n_fft,
    std::optional<int64_t> hop_length,
    std::optional<int64_t> win_length,
    const std::optional<Tensor>& window,
    bool center,
    bool normalized,
    std::optional<bool> onesided,
    std::optional<int64_t> length,
    bool return_complex) {
  const auto* impl = as_shard_tensor(self);
  const bool has_window = window && window->defined();
  const auto call = [&](const std::optional<Tensor>& by) {
    return at::compositeimplicitautograd::istft(
        self, n_fft, hop_length, win_length, by, center, normalized, onesided, length, return_complex);
  };
  const auto width = win_length.value_or(n_fft);
  if (!impl || width <= 0) {
    return call(window);
  }
  if (impl->layout().mesh().has_this_rank()) {
    return call(has_window ? window : self.new_ones({width}, self.options().dtype(c10::toRealValueType(self.scalar_type()))));
  }
  // Ranks outside the mesh have no values. So any window will do; a user's window is used, so that it is in the graph with its
  // gradient.
  const AsReplicatedGuard no_values;
  const auto dtype = has_window ? window->scalar_type() : c10::toRealValueType(self.scalar_type());
  const auto out = call(at::ones({width}, at::TensorOptions(self.device()).dtype(dtype)));
  return has_window ? out + window->sum() * 0 : out;
}

} // namespace

const Formula formulas::fft_r2c = formula<&shardtensor::fft_r2c>;
const Formula formulas::istft = formula<&shardtensor::istft>;
const Formula formulas::stft = formula<&shardtensor::stft>;

} // namespace shardtensor
