// x[[0, 2]], x[True], x[x.sum() > 0], and writes to them: torch makes a plain tensor of the list or the bool, which is the same
// on every rank.
#include "bindings/bindings.h"

#include "dispatch/plain_tensors.h"
#include "tensor/shard_tensor.h"

#include <torch/csrc/autograd/python_variable.h>

#include <optional>

namespace shardtensor::bindings {

namespace {

// Python's isinstance is slow for objects that are not instances.
bool is_tensor(PyObject* index) {
  const bool other = PySlice_Check(index) || PyLong_Check(index) || index == Py_None || index == Py_Ellipsis;
  return !other && THPVariable_Check(index);
}

bool is_plain_tensor(PyObject* index) {
  return is_tensor(index) && !as_shard_tensor(THPVariable_Unpack(index));
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

bool is_bool(PyObject* index) {
  if (!is_tensor(index)) {
    return PyBool_Check(index);
  }
  const auto& t = THPVariable_Unpack(index);
  return as_shard_tensor(t) && t.dim() == 0 && t.scalar_type() == at::kBool;
}

// Whether the indices include lists of numbers or bools, but no plain tensor (which only the promotion mode allows).
bool becomes_plain(PyObject* index) {
  if (!PyTuple_Check(index)) {
    return is_list(index) ? has_only_numbers(index) : is_bool(index);
  }
  bool found = false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(index); ++i) {
    auto* item = PyTuple_GET_ITEM(index, i);
    if (is_plain_tensor(item) || (is_list(item) && !has_only_numbers(item))) {
      return false;
    }
    found |= is_list(item) || is_bool(item);
  }
  return found;
}

PyMappingMethods& torchs() {
  return *reinterpret_cast<PyTypeObject*>(THPVariableClass)->tp_as_mapping;
}

PyObject* get_item(PyObject* self, PyObject* index) {
  std::optional<AsReplicatedGuard> guard;
  if (becomes_plain(index)) {
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
        std::optional<AsReplicatedGuard> guard;
        if (becomes_plain(index.ptr()) && !is_plain_tensor(value.ptr())) {
          guard.emplace();
        }
        if (torchs().mp_ass_subscript(tensor.ptr(), index.ptr(), value.ptr())) {
          throw py::error_already_set();
        }
      },
      py::arg("tensor"), py::arg("index"), py::arg("value"));
}

} // namespace shardtensor::bindings
