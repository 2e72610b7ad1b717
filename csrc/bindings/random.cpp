#include "bindings/bindings.h"

#include "kernels/stream.h"

namespace shardtensor::bindings {

void register_random(py::module& m) {
  m.def("mark_random_agreed", [](const c10::intrusive_ptr<Mesh>& mesh) { kernels::mark_agreed(*mesh); });
}

} // namespace shardtensor::bindings
