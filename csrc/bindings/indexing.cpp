// x[[0, 2]] and x[[0, 2]] = y: torch makes a plain tensor of the list, which is the same on every rank as Python's numbers are.
#include "bindings/bindings.h"

#include "dispatch/plain.h"
#include "tensor/shard_tensor.h"

#include <torch/csrc/autograd/python_variable.h>

#include <optional>

namespace shardtensor::bindings {

namespace {

bool is_plain_tensor(PyObject* index) {
  return THPVariable_Check(index) && !as_shard_tensor(THPVariable_Unpack(index));
}

bool is_list(PyObject* index) {
  return PyList_Check(index) || PyTuple_Check(index) || PyRange_Check(index);
}

bool has_only_numbers(PyObject* list) {
  if (PyRange_Check(list)) {
    return true;
  }
  const auto count = PySequence_Fast_GET_SIZE(list);
  for (Py_ssize_t i = 0; i < count; ++i) {
    auto* item = PySequence_Fast_GET_ITEM(list, i);
    const bool number = is_list(item) ? has_only_numbers(item) : PyIndex_Check(item) && !THPVariable_Check(item);
    if (!number) {
      return false;
    }
  }
  return true;
}

// Lists of numbers among the indices, and no plain tensor, which only the promotion mode can let pass.
bool lists_numbers(PyObject* index) {
  if (!PyTuple_Check(index)) {
    return is_list(index) && has_only_numbers(index);
  }
  bool found = false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(index); ++i) {
    auto* item = PyTuple_GET_ITEM(index, i);
    if (is_plain_tensor(item) || (is_list(item) && !has_only_numbers(item))) {
      return false;
    }
    found |= is_list(item);
  }
  return found;
}

PyMappingMethods& torchs() {
  return *reinterpret_cast<PyTypeObject*>(THPVariableClass)->tp_as_mapping;
}

PyObject* get_item(PyObject* self, PyObject* index) {
  std::optional<AsReplicated> guard;
  if (lists_numbers(index)) {
    guard.emplace();
  }
  return torchs().mp_subscript(self, index);
}

} // namespace

void register_indexing(py::module& m) {
  m.def("install_getitem", [](const py::type& type) {
    static PyMethodDef method{"__getitem__", get_item, METH_O | METH_COEXIST, nullptr};
    add_method(type, method);
  });
  m.def(
      "set_item",
      [](const py::object& tensor, const py::object& index, const py::object& value) {
        std::optional<AsReplicated> guard;
        if (lists_numbers(index.ptr()) && !is_plain_tensor(value.ptr())) {
          guard.emplace();
        }
        if (torchs().mp_ass_subscript(tensor.ptr(), index.ptr(), value.ptr())) {
          throw py::error_already_set();
        }
      },
      py::arg("tensor"), py::arg("index"), py::arg("value"));
}

} // namespace shardtensor::bindings
