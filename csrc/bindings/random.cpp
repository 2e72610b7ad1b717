#include "bindings/bindings.h"

#include "draws/keys.h"

#include <torch/csrc/Exceptions.h>

namespace shardtensor::bindings {

void register_random(py::module& m) {
  // The wrapper turns warnings into Python's.
  m.def("agree_random", torch::wrap_pybind_function_no_gil([](const c10::intrusive_ptr<Mesh>& mesh) { draws::agree(*mesh); }));
  m.def("mark_random_agreed", [](const c10::intrusive_ptr<Mesh>& mesh) { draws::mark_agreed(*mesh); });
}

} // namespace shardtensor::bindings
