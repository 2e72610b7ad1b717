#include "bindings/bindings.h"

#include "autograd/functions.h"
#include "autograd/gradients.h"
#include "comm/tensor_kind.h"
#include "tensor/lists.h"
#include "tensor/overlap.h"
#include "tensor/shard_tensor.h"
#include "tensor/versions.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

namespace shardtensor::bindings {

namespace {

LayoutPtr as_const(const MutableLayout& l) {
  return LayoutPtr(l);
}

// pybind11's own conversion calls isinstance for each tensor, which is a third of an optimizer's overhead.
std::optional<Tensors> tensor_list(const py::list& list) {
  Tensors out;
  out.reserve(list.size());
  for (const auto& item : list) {
    if (Py_TYPE(item.ptr()) != python_class() && !THPVariable_CheckExact(item.ptr())) {
      return std::nullopt;
    }
    out.push_back(THPVariable_Unpack(item.ptr()));
  }
  return out;
}

// The positions of two arguments that may share elements; the first of them is written.
std::optional<std::pair<size_t, size_t>> overlapping(const py::list& args, const std::vector<size_t>& written) {
  std::vector<TensorAccess> uses;
  std::vector<size_t> places;
  for (size_t i = 0; i < args.size(); ++i) {
    auto* arg = args[i].ptr();
    const auto* impl = THPVariable_Check(arg) ? as_shard_tensor(THPVariable_Unpack(arg)) : nullptr;
    if (impl) {
      const bool writes = std::binary_search(written.begin(), written.end(), i);
      uses.push_back({&THPVariable_Unpack(arg), impl, writes, reinterpret_cast<size_t>(impl)});
      places.push_back(i);
    }
  }
  const auto found = first_overlap(uses);
  return found ? std::optional(std::pair(places[found->first], places[found->second])) : std::nullopt;
}

const Mesh* mesh_of(const at::Tensor& t) {
  const auto* impl = as_shard_tensor(t);
  return impl ? &impl->layout().mesh() : nullptr;
}

// Whether the same mesh dims of one mesh cut all tensors: their norms then have one layout, or are all replicated.
bool cut_alike(const Tensors& tensors) {
  const auto* first = tensors.empty() ? nullptr : as_shard_tensor(tensors[0]);
  return first && std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) {
           const auto* impl = as_shard_tensor(t);
           if (!impl || &impl->layout().mesh() != &first->layout().mesh()) {
             return false;
           }
           for (int64_t m = 0; m < impl->layout().ndim(); ++m) {
             if (impl->layout().placement(m).is_shard() != first->layout().placement(m).is_shard() &&
                 impl->layout().mesh().size(m) > 1) {
               return false;
             }
           }
           return true;
         });
}

bool all_on(const Mesh* mesh, const Tensors& tensors) {
  return mesh && std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) { return mesh_of(t) == mesh; });
}

py::list as_list(const Tensors& list) {
  py::list out(list.size());
  for (size_t n = 0; n < list.size(); ++n) {
    PyList_SET_ITEM(out.ptr(), static_cast<Py_ssize_t>(n), THPVariable_Wrap(list[n]));
  }
  return out;
}

} // namespace

void register_tensor(py::module& m) {
  m.def(
      "set_python_class",
      [](const py::type& type, bool torch_function_disabled) {
        set_python_class(reinterpret_cast<PyTypeObject*>(type.ptr()), torch_function_disabled);
      },
      py::arg("type"), py::arg("torch_function_disabled") = true);
  m.def("is_shard_tensor", [](const at::Tensor& t) { return as_shard_tensor(t) != nullptr; });
  m.def("local", [](const at::Tensor& t) { return shard_tensor(t, "_local_tensor").local(); });
  m.def("set_local", [](const at::Tensor& t, const at::Tensor& local) { shard_tensor(t, "_local_tensor").set_local(local); });
  m.def("overlapping", &overlapping);
  m.def("count_on_piece", [](const at::Tensor& t) { bump_piece(shard_tensor(t, "count_on_piece").local(/*to_view=*/true)); });
  m.def(
      "note_write", [](const at::Tensor& t) { shard_tensor(t, "note_write").note_write(); },
      py::call_guard<py::gil_scoped_release>());
  m.def("cut_alike", [](const py::list& list) {
    const auto tensors = tensor_list(list);
    return tensors && cut_alike(*tensors);
  });
  m.def("gradients_on_mesh_of", [](const at::Tensor& t, const py::list& list) {
    const auto parameters = tensor_list(list);
    Tensors gradients;
    for (const auto& parameter : parameters.value_or(Tensors())) {
      if (const auto& gradient = parameter.grad(); gradient.defined()) {
        gradients.push_back(gradient);
      }
    }
    return parameters && all_on(mesh_of(t), gradients);
  });
  m.def("layout", [](const at::Tensor& t) { return as_mutable(shard_tensor(t, "layout").layout_ptr()); });
  m.def("need_values", [](const at::Tensor& t, const std::string& what) { need_values(t, what.c_str()); });
  m.def("is_traced", [](const at::Tensor& t) { return shard_tensor(t, "is_traced").traced(); });
  m.def(
      "wrap",
      [](const at::Tensor& local, const MutableLayout& layout, const SymSizes& sizes, const SymSizes& strides,
         const c10::SymInt& offset) { return wrap_symbolic(local, as_const(layout), sizes, strides, nullptr, offset); },
      py::arg("local"), py::arg("layout"), py::arg("sizes"), py::arg("strides"), py::arg("offset") = 0);
  m.def("laid", [](at::Tensor local, const std::vector<int64_t>& strides) {
    c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    return in_dim_order(std::move(local), strides);
  });
  m.def("strides_like", [](const SymSizes& sizes, const at::Tensor& local) { return strides_like(sizes, local); });
  m.def(
      "laid_out_like",
      [](const py::list& parameters, const py::list& gradients) -> std::optional<py::list> {
        const auto p = tensor_list(parameters), g = tensor_list(gradients);
        if (!p || !g) {
          return std::nullopt;
        }
        Tensors moved;
        {
          py::gil_scoped_release no_gil;
          moved = laid_out_like(*p, *g);
        }
        return as_list(moved);
      },
      py::arg("parameters"), py::arg("gradients"));
  m.def(
      "local_lists",
      [](const std::vector<py::list>& lists, int64_t read_only) -> std::optional<std::vector<py::list>> {
        std::vector<Tensors> tensors;
        for (const auto& list : lists) {
          auto converted = tensor_list(list);
          if (!converted) {
            return std::nullopt;
          }
          tensors.push_back(std::move(*converted));
        }
        const auto locals = local_lists(tensors, read_only);
        if (!locals) {
          return std::nullopt;
        }
        std::vector<py::list> out;
        for (const auto& list : *locals) {
          out.push_back(as_list(list));
        }
        return out;
      },
      py::arg("lists"), py::arg("read_only"));
  m.def(
      "from_local",
      [](const at::Tensor& local, const MutableLayout& layout, const std::optional<SymSizes>& sizes,
         const std::optional<SymSizes>& strides, const std::optional<MutableLayout>& grad_layout) {
        const auto gradient = grad_layout ? as_const(*grad_layout) : LayoutPtr();
        if (!sizes && !strides && !is_symbolic(local)) {
          return from_local_of_equal_pieces(local, as_const(layout), gradient);
        }
        const auto global = sizes ? *sizes : layout->sizes_of_equal_pieces(local.sym_sizes().vec());
        return from_local(local, as_const(layout), global, strides ? *strides : strides_like(global, local), gradient);
      },
      py::arg("local"), py::arg("layout"), py::arg("sizes") = py::none(), py::arg("strides") = py::none(),
      py::arg("grad_layout") = py::none(), py::call_guard<py::gil_scoped_release>());
  m.def("with_cuts_of", &with_cuts_of, py::arg("leaf"), py::arg("grad"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "to_local",
      [](const at::Tensor& t, const std::optional<MutableLayout>& grad_layout) {
        return to_local(t, grad_layout ? as_const(*grad_layout) : LayoutPtr());
      },
      py::arg("tensor"), py::arg("grad_layout") = py::none(), py::call_guard<py::gil_scoped_release>());
  m.def(
      "redistribute",
      [](const at::Tensor& t, const MutableLayout& layout, std::optional<at::ScalarType> forward_dtype,
         std::optional<at::ScalarType> backward_dtype,
         bool async_op) { return redistribute(t, as_const(layout), forward_dtype, backward_dtype, async_op); },
      py::arg("tensor"), py::arg("layout"), py::arg("forward_dtype") = py::none(), py::arg("backward_dtype") = py::none(),
      py::arg("async_op") = false, py::call_guard<py::gil_scoped_release>());
  m.def(
      "redistribute_all",
      [](const std::vector<at::Tensor>& tensors, const std::vector<MutableLayout>& layouts,
         std::optional<at::ScalarType> forward_dtype, std::optional<at::ScalarType> backward_dtype, bool async_op) {
        return redistribute_all(
            tensors, std::vector<LayoutPtr>(layouts.begin(), layouts.end()), forward_dtype, backward_dtype, async_op);
      },
      py::arg("tensors"), py::arg("layouts"), py::arg("forward_dtype") = py::none(), py::arg("backward_dtype") = py::none(),
      py::arg("async_op") = false, py::call_guard<py::gil_scoped_release>());
}

} // namespace shardtensor::bindings
