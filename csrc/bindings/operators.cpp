// x + y and similar operators between ShardTensors and with numbers go directly to the dispatcher. torch's argument parser
// costs more than the handler, because it checks both operands' types several times. Other operands, and calls that Python
// code intercepts, go through torch.
#include "bindings/bindings.h"

#include "tensor/shard_tensor.h"

#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ScalarOps.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <functional>
#include <type_traits>

namespace shardtensor::bindings {

namespace {

bool is_ours(PyObject* object) {
  return Py_TYPE(object) == python_class();
}

// Whether a mode or a function handler intercepts calls.
bool is_intercepted() {
  return !torch_function_disabled() || at::impl::torch_function_mode_enabled();
}

// A Python number as torch converts it next to a tensor.
at::Tensor as_number(PyObject* object) {
  if (PyFloat_CheckExact(object)) {
    return at::native::wrapped_scalar_tensor(PyFloat_AS_DOUBLE(object));
  }
  if (!PyLong_CheckExact(object)) {
    return {};
  }
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow ? at::Tensor() : at::native::wrapped_scalar_tensor(value);
}

struct MatmulOperator {
  at::Tensor operator()(const at::Tensor& x, const at::Tensor& y) const {
    return x.matmul(y);
  }
};

// py::gil_scoped_release without the look-up of pybind's internals.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    PyEval_RestoreThread(state_);
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

template <typename F>
PyObject* call(const at::Tensor& x, const at::Tensor& y) {
  HANDLE_TH_ERRORS
  at::Tensor result;
  {
    const GilRelease released;
    result = F()(x, y);
  }
  return THPVariable_Wrap(std::move(result));
  END_HANDLE_TH_ERRORS
}

// `reflected`: for the operand on the right. torch also swaps the operands of + and *, which commute.
template <typename F, bool reflected = false>
struct Operator {
  static inline PyObject* torchs = nullptr;

  static PyObject* method(PyObject* x, PyObject* y) {
    if (is_ours(x) && !is_intercepted()) {
      if (is_ours(y)) {
        return call<F>(THPVariable_Unpack(x), THPVariable_Unpack(y));
      }
      const auto number = std::is_same_v<F, MatmulOperator> ? at::Tensor() : as_number(y);
      if (number.defined()) {
        return call<F>(THPVariable_Unpack(x), number);
      }
    }
    return PyObject_CallFunctionObjArgs(torchs, x, y, nullptr);
  }

  static void install(const py::type& type, const char* name) {
    static PyMethodDef definition{name, method, METH_O | METH_COEXIST, nullptr};
    torchs = py::object(py::handle(THPVariableClass).attr(name)).release().ptr();
    add_method(type, definition);
  }
};

} // namespace

void register_operators(py::module& m) {
  m.def("install_operators", [](const py::type& type) {
    Operator<std::plus<>>::install(type, "__add__");
    Operator<std::plus<>, true>::install(type, "__radd__");
    Operator<std::minus<>>::install(type, "__sub__");
    Operator<std::multiplies<>>::install(type, "__mul__");
    Operator<std::multiplies<>, true>::install(type, "__rmul__");
    Operator<std::divides<>>::install(type, "__truediv__");
    Operator<MatmulOperator>::install(type, "__matmul__");
  });
}

} // namespace shardtensor::bindings
