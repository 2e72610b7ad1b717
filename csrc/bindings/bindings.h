// One register function per file of this folder; the module's body is their list. No logic here: convert and forward.
#pragma once

#include "layout/layout.h"

#include <torch/csrc/utils/pybind.h>

namespace shardtensor::bindings {

namespace py = pybind11;

// pybind11 holds no pointers to const.
using MutableLayout = c10::intrusive_ptr<Layout>;
inline MutableLayout as_mutable(LayoutPtr l) {
  return MutableLayout::reclaim(const_cast<Layout*>(l.release()));
}

void register_layout(py::module& m);
void register_tensor(py::module& m);
void register_dispatch(py::module& m);
void register_indexing(py::module& m);
void register_comm(py::module& m);
void register_random(py::module& m);
void register_kernels(py::module& m);

} // namespace shardtensor::bindings
