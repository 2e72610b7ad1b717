// The box copies and the random numbers of csrc/kernels, on CPU tensors, by the CUDA kernels' own text.
#include "kernels/box_copies.h"
#include "kernels/boxes.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/random.h"

#include <torch/csrc/utils/pybind.h>

namespace shardtensor::kernels {

bool for_cuda(const at::Tensor&) {
  return true;
}

namespace cpu {
void move(const BoxCopies&, const at::Tensor&, at::Tensor&) {
  TORCH_CHECK(false, "not the CPU's");
}
void reduce(const BoxCopies& moves, const at::Tensor&, int64_t, ReduceOp, at::Tensor&) {
  TORCH_CHECK(moves.boxes == 0, "not the CPU's"); // of nothing, it refuses dtypes
}
} // namespace cpu

namespace {

namespace py = pybind11;
using BoxTuple = std::pair<std::vector<int64_t>, std::vector<int64_t>>;
using Runs = std::vector<std::pair<int64_t, int64_t>>;

std::vector<Box> boxes_from(const std::vector<BoxTuple>& tuples) {
  std::vector<Box> boxes;
  for (const auto& [offsets, sizes] : tuples) {
    boxes.push_back({{offsets.begin(), offsets.end()}, {sizes.begin(), sizes.end()}});
  }
  return boxes;
}

// dims: global size and the runs that are held.
void fill(
    bool on_cuda,
    at::Tensor local,
    uint64_t key,
    const std::vector<std::pair<int64_t, Runs>>& dims,
    int kind,
    double a,
    double b,
    int64_t low,
    uint64_t range) {
  LocalRegion held;
  for (const auto& [size, runs] : dims) {
    LocalRegion::RegionDim dim{size, 0, {}};
    for (const auto& [start, length] : runs) {
      dim.runs.push_back({start, length});
      dim.local += length;
    }
    held.numel *= dim.local;
    held.dims.push_back(std::move(dim));
  }
  TORCH_CHECK(held.numel == local.numel(), "a piece of ", local.numel(), " elements where ", held.numel, " are held");
  const Distribution distribution{static_cast<Distribution::Family>(kind), a, b, low, range};
  (on_cuda ? cuda::fill_random : cpu::fill_random)(local, key, held, distribution);
}

} // namespace
} // namespace shardtensor::kernels

PYBIND11_MODULE(_cuda_on_host, m) {
  namespace k = shardtensor::kernels;
  using Boxes = std::vector<k::BoxTuple>;
  using Numbers = std::vector<int64_t>;
  m.def(
      "pack",
      [](const at::Tensor& source, const Boxes& boxes, at::Tensor flat, const Numbers& parts, int64_t elements) {
        k::pack(source, k::boxes_from(boxes), flat, {parts, elements});
      },
      py::arg("source"), py::arg("boxes"), py::arg("flat"), py::arg("parts") = Numbers(), py::arg("elements") = 1);
  m.def(
      "unpack",
      [](const at::Tensor& flat, const Boxes& boxes, at::Tensor target, const Numbers& parts, int64_t elements) {
        k::unpack(flat, k::boxes_from(boxes), target, {parts, elements});
      },
      py::arg("flat"), py::arg("boxes"), py::arg("target"), py::arg("parts") = Numbers(), py::arg("elements") = 1);
  m.def("copy_boxes", [](const at::Tensor& source, const Boxes& from, at::Tensor target, const Boxes& to) {
    k::copy(source, k::boxes_from(from), target, k::boxes_from(to));
  });
  m.def("unpack_reduce", [](const at::Tensor& flat, int64_t parts, const Boxes& boxes, const std::string& op, at::Tensor target) {
    k::unpack_reduce(flat, parts, k::boxes_from(boxes), shardtensor::reduce_op_from(op), target);
  });
  m.def("fill", &k::fill);
  m.def("capture", [](bool on) { host::capturing = on; });
  m.def("launches", [] { return std::exchange(host::launches, 0); });
}
