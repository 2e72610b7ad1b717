// Ops on ShardTensors whose local tensors are Python subclasses (fake, quantised, several shards): __torch_dispatch__ calls
// these.
#include "bindings/bindings.h"

#include "dispatch/traced.h"
#include "tensor/shard_tensor.h"

#include <torch/csrc/jit/python/pybind_utils.h>

namespace shardtensor::bindings {

void register_traced(py::module& m) {
  // The kernel that the dispatcher calls for native ShardTensors: ours, or the user's override.
  m.def(
      "call",
      [](bool overridden, const std::string& name, const std::string& overload, const py::args& args, const py::kwargs& kwargs) {
        const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
        torch::jit::ToIValueAllowNumbersAsTensors numbers(true);
        auto stack = torch::jit::createStackForSchema(op.schema(), args, kwargs, std::nullopt);
        {
          py::gil_scoped_release no_gil;
          overridden ? op.callBoxedForDispatchKey(kKey, stack) : call_traced(op, &stack);
        }
        return torch::jit::createPyObjectForStack(std::move(stack));
      });
}

} // namespace shardtensor::bindings
