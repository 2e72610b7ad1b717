// Ops on ShardTensors whose local tensors are Python's (fake, quantised, several in one): they come by __torch_dispatch__.
#include "bindings/bindings.h"

#include "tensor/shard_tensor.h"

#include <torch/csrc/jit/python/pybind_utils.h>

namespace shardtensor::bindings {

void register_traced(py::module& m) {
  // The same kernel that native ShardTensors get from the dispatcher.
  m.def("call", [](const std::string& name, const std::string& overload, const py::args& args, const py::kwargs& kwargs) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    torch::jit::ToIValueAllowNumbersAsTensors numbers(true);
    auto stack = torch::jit::createStackForSchema(op.schema(), args, kwargs, std::nullopt);
    {
      py::gil_scoped_release no_gil;
      op.callBoxedForDispatchKey(kKey, stack);
    }
    return torch::jit::createPyObjectForStack(std::move(stack));
  });
}

} // namespace shardtensor::bindings
