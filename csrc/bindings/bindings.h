// One register function per file of this folder; the module's body is their list. No logic here: convert and forward.
#pragma once

#include "layout/layout.h"

#include <torch/csrc/utils/pybind.h>

namespace shardtensor::bindings {

namespace py = pybind11;

// pybind11 holds no pointers to const.
template <typename T>
c10::intrusive_ptr<T> as_mutable(c10::intrusive_ptr<const T> p) {
  return c10::intrusive_ptr<T>::reclaim(const_cast<T*>(p.release()));
}
using MutableLayout = c10::intrusive_ptr<Layout>;

// (offsets, sizes)
using BoxTuple = std::pair<std::vector<int64_t>, std::vector<int64_t>>;
inline Box box_from(const BoxTuple& t) {
  return {{t.first.begin(), t.first.end()}, {t.second.begin(), t.second.end()}};
}
inline BoxTuple tuple_of(const Box& box) {
  return {{box.offsets.begin(), box.offsets.end()}, {box.sizes.begin(), box.sizes.end()}};
}

// A Python function that C++ notifies, from any thread. If it returns a text, the text is raised as an error.
class PythonListener {
 public:
  void set(py::object function) {
    function_ = std::move(function);
  }
  bool listens() const {
    return function_ && !function_.is_none();
  }
  // `arguments` makes the tuple, under the GIL.
  template <typename F>
  std::string tell(F arguments) {
    py::gil_scoped_acquire gil;
    const auto answer = listens() ? function_(*arguments()) : py::none();
    return answer.is_none() ? "" : answer.template cast<std::string>();
  }

 private:
  py::object function_;
};
// One for each Observer. Never destroyed: the interpreter may be gone by then.
template <auto& observer>
PythonListener& listener_for() {
  static auto* listener = new PythonListener();
  return *listener;
}
// Defines the module's function `name`, which sets the Python function that the observer notifies, or none (None). `tell` calls
// it.
template <auto& observer, auto tell>
void def_observer(py::module& m, const char* name) {
  m.def(name, [](py::object f) {
    auto& listener = listener_for<observer>();
    listener.set(std::move(f));
    observer.set(listener.listens() ? tell : nullptr);
  });
}

// A method in C, for frequent calls.
inline void add_method(const py::type& type, PyMethodDef& method) {
  type.attr(method.ml_name) =
      py::reinterpret_steal<py::object>(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &method));
}

void register_layout(py::module& m);
void register_tensor(py::module& m);
void register_properties(py::module& m);
void register_traced(py::module& m);
void register_dispatch(py::module& m);
void register_indexing(py::module& m);
void register_operators(py::module& m);
void register_comm(py::module& m);
void register_verdict(py::module& m);
void register_random(py::module& m);
void register_kernels(py::module& m);

} // namespace shardtensor::bindings
