#include <torch/csrc/python_headers.h>

#include "tensor/symbolic.h"

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <array>

namespace shardtensor {

at::Tensor in_numbers(const at::Tensor& t) {
  const auto sizes = guarded(t.sym_sizes()), strides = guarded(t.sym_strides());
  return t.as_strided(sizes, strides, t.sym_storage_offset().guard_int(__FILE__, __LINE__));
}

int64_t hint_of(const c10::SymInt& n) {
  if (const auto number = n.maybe_as_int()) {
    return *number;
  }
  pybind11::gil_scoped_acquire gil;
  const auto hint = pybind11::cast(n).attr("node").attr("hint");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !hint.is_none(),
      "shardtensor: a size that depends on a tensor's values (such as a selection by a mask) cannot be traced into a "
      "graph (torch.compile, export). Do it outside of the compiled function, or use torch.where() or masked_fill()");
  return pybind11::object(hint).cast<int64_t>();
}

Sizes hints_of(c10::SymIntArrayRef symbols) {
  Sizes out;
  for (const auto& n : symbols) {
    out.push_back(hint_of(n));
  }
  return out;
}

Cut cut_that_follows(c10::SymIntArrayRef pieces, const c10::SymInt& size) {
  if (!size.is_symbolic()) {
    return nullptr;
  }
  pybind11::gil_scoped_acquire gil;
  const auto found = pybind11::module_::import("shardtensor.tensor._compile").attr("shares_of")(pieces.vec(), size);
  if (found.is_none()) {
    return nullptr;
  }
  using List = std::vector<int64_t>;
  auto [sizes, shares, per, times, quotients] =
      pybind11::object(found).cast<std::tuple<List, List, int64_t, List, std::vector<std::array<int64_t, 3>>>>();
  auto out = std::make_shared<PieceSizes>(std::move(sizes));
  out->shares = std::move(shares);
  out->per = per;
  out->times = std::move(times);
  for (const auto& [up, shift, down] : quotients) {
    out->quotients.push_back({up, shift, down});
  }
  return out;
}

} // namespace shardtensor
