#include "bindings/bindings.h"

#include "kernels/boxes.h"
#include "kernels/memory.h"

namespace shardtensor::bindings {

namespace {

std::vector<Box> boxes_from(const std::vector<BoxTuple>& tuples) {
  std::vector<Box> boxes(tuples.size());
  std::transform(tuples.begin(), tuples.end(), boxes.begin(), box_from);
  return boxes;
}

} // namespace

void register_kernels(py::module& m) {
  m.def("count_memory", &kernels::count_memory);
  m.def("reset_peak_memory", &kernels::reset_peak_memory);
  m.def("allocated_memory", [] {
    const auto held = kernels::allocated_memory();
    return py::make_tuple(held.now, held.peak);
  });
  using ReleaseGil = py::call_guard<py::gil_scoped_release>;
  m.def(
      "pack",
      [](const at::Tensor& source, const std::vector<BoxTuple>& boxes, at::Tensor flat, const std::vector<int64_t>& parts,
         int64_t elements) {
        kernels::pack(source, boxes_from(boxes), flat, {parts, elements});
      },
      py::arg("source"), py::arg("boxes"), py::arg("flat"), py::arg("parts") = std::vector<int64_t>(), py::arg("elements") = 1,
      ReleaseGil());
  m.def(
      "unpack",
      [](const at::Tensor& flat, const std::vector<BoxTuple>& boxes, at::Tensor target, const std::vector<int64_t>& parts,
         int64_t elements) {
        kernels::unpack(flat, boxes_from(boxes), target, {parts, elements});
      },
      py::arg("flat"), py::arg("boxes"), py::arg("target"), py::arg("parts") = std::vector<int64_t>(), py::arg("elements") = 1,
      ReleaseGil());
  m.def(
      "copy_boxes",
      [](const at::Tensor& source, const std::vector<BoxTuple>& from, at::Tensor target, const std::vector<BoxTuple>& to) {
        kernels::copy(source, boxes_from(from), target, boxes_from(to));
      },
      py::arg("source"), py::arg("source_boxes"), py::arg("target"), py::arg("target_boxes"), ReleaseGil());
  m.def(
      "unpack_reduce",
      [](const at::Tensor& flat, int64_t parts, const std::vector<BoxTuple>& boxes, const std::string& op, at::Tensor target) {
        kernels::unpack_reduce(flat, parts, boxes_from(boxes), reduce_op_from(op), target);
      },
      py::arg("flat"), py::arg("parts"), py::arg("boxes"), py::arg("op"), py::arg("target"), ReleaseGil());
}

} // namespace shardtensor::bindings
