#include "bindings/bindings.h"

PYBIND11_MODULE(_C, m) {
  using namespace shardtensor::bindings;
  register_layout(m);
  register_tensor(m);
  register_properties(m);
  register_traced(m);
  register_dispatch(m);
  register_indexing(m);
  register_operators(m);
  register_comm(m);
  register_verdict(m);
  register_random(m);
  register_kernels(m);
}
