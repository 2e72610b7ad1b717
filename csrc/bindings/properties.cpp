// The properties that torch.compile reads from every ShardTensor at every call of a graph: _local_tensor, _spec and
// device_mesh. And _has_partial, which every backward() reads.
#include "bindings/bindings.h"

#include "tensor/shard_tensor.h"

#include <torch/csrc/autograd/python_variable.h>

namespace shardtensor::bindings {

namespace {

// Python's functions that make a tensor's spec and a mesh's DeviceMesh. Never destroyed: the interpreter may be gone by then.
PyObject* g_make_spec = nullptr;
PyObject* g_make_device_mesh = nullptr;

// By a mesh's id: weak references to the users' DeviceMeshes.
std::vector<py::object>& device_meshes() {
  static auto* all = new std::vector<py::object>();
  return *all;
}

// None if it no longer exists.
py::object known_device_mesh(const Mesh& mesh) {
  const auto& all = device_meshes();
  const auto id = static_cast<size_t>(mesh.id());
  return id < all.size() && all[id] ? all[id]() : py::none();
}

void let_go(void* object) {
  if (Py_IsInitialized()) {
    py::gil_scoped_acquire gil;
    Py_DECREF(static_cast<PyObject*>(object));
  }
}

template <typename F>
PyObject* guarded_call(F&& f) {
  HANDLE_TH_ERRORS
  return f();
  END_HANDLE_TH_ERRORS
}

PyObject* get_local(PyObject* self, void*) {
  return guarded_call([&] { return THPVariable_Wrap(shard_tensor(THPVariable_Unpack(self), "_local_tensor").local()); });
}

int set_local(PyObject* self, PyObject* value, void*) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(value && THPVariable_Check(value), "ShardTensor._local_tensor: expected a torch.Tensor");
  shard_tensor(THPVariable_Unpack(self), "_local_tensor").set_local(THPVariable_Unpack(value));
  return 0;
  END_HANDLE_TH_ERRORS_RET(-1)
}

// The tensor's spec, made again if its layout, sizes or strides have changed. Borrowed from the tensor, or new (traced tensors
// keep none).
py::object spec_of(PyObject* self) {
  const auto& t = THPVariable_Unpack(self);
  auto& impl = shard_tensor(t, "_spec");
  if (auto* known = static_cast<PyObject*>(impl.cached_spec())) {
    return py::reinterpret_borrow<py::object>(known);
  }
  auto made = py::reinterpret_steal<py::object>(PyObject_CallOneArg(g_make_spec, self));
  if (!made) {
    throw python_error();
  }
  if (!impl.traced()) {
    impl.cache_spec(std::shared_ptr<void>(py::object(made).release().ptr(), let_go));
  }
  return made;
}

PyObject* get_spec(PyObject* self, void*) {
  return guarded_call([&] { return spec_of(self).release().ptr(); });
}

PyObject* get_device_mesh(PyObject* self, void*) {
  return guarded_call([&] {
    auto mesh = shard_tensor(THPVariable_Unpack(self), "device_mesh").layout().mesh_ptr();
    auto found = known_device_mesh(*mesh);
    return (found.is_none() ? py::handle(g_make_device_mesh)(as_mutable(std::move(mesh))) : std::move(found)).release().ptr();
  });
}

PyObject* get_has_partial(PyObject* self, void*) {
  return guarded_call(
      [&] { return PyBool_FromLong(shard_tensor(THPVariable_Unpack(self), "_has_partial").layout().has_partial()); });
}

PyGetSetDef g_properties[] = {
    {"_local_tensor", get_local, set_local, "This rank's piece.", nullptr},
    {"_spec", get_spec, nullptr, "The ShardTensorSpec.", nullptr},
    {"device_mesh", get_device_mesh, nullptr, "The DeviceMesh.", nullptr},
    {"_has_partial", get_has_partial, nullptr, "Whether some placement is Partial.", nullptr},
};

} // namespace

void register_properties(py::module& m) {
  m.def("device_mesh", [](const c10::intrusive_ptr<Mesh>& mesh) { return known_device_mesh(*mesh); });
  m.def("set_device_mesh", [](const c10::intrusive_ptr<Mesh>& mesh, py::object reference) {
    auto& all = device_meshes();
    const auto id = static_cast<size_t>(mesh->id());
    all.resize(std::max(all.size(), id + 1));
    all[id] = std::move(reference);
  });
  m.def("install_properties", [](const py::type& type, py::object make_spec, py::object make_device_mesh) {
    g_make_spec = make_spec.release().ptr();
    g_make_device_mesh = make_device_mesh.release().ptr();
    for (auto& property : g_properties) {
      type.attr(property.name) =
          py::reinterpret_steal<py::object>(PyDescr_NewGetSet(reinterpret_cast<PyTypeObject*>(type.ptr()), &property));
    }
  });
}

} // namespace shardtensor::bindings
