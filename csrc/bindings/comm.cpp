#include "bindings/bindings.h"

#include "comm/comm.h"

#include "redistribute/plan.h"
#include "redistribute/watch.h"

#include <ATen/ATen.h>

namespace shardtensor::bindings {

namespace {

// Python's ear: called under the GIL; a text that it returns is an error on this rank.
class Ear {
 public:
  void set(py::object object) {
    object_ = std::move(object);
  }
  bool listens() const {
    return object_ && !object_.is_none();
  }
  template <typename... Args>
  std::string operator()(Args&&... args) {
    const auto answer = object_(std::forward<Args>(args)...);
    return answer.is_none() ? "" : answer.template cast<std::string>();
  }

 private:
  py::object object_;
};

Ear& comm_ear() {
  static auto* ear = new Ear();
  return *ear;
}
Ear& move_ear() {
  static auto* ear = new Ear();
  return *ear;
}

c10::intrusive_ptr<Mesh> as_mutable(const Mesh& mesh) {
  return c10::intrusive_ptr<Mesh>::reclaim_copy(const_cast<Mesh*>(&mesh));
}

void tell_of_call(comm::Kind kind, int64_t bytes, const Mesh& mesh, int64_t mesh_dim) {
  std::string error;
  {
    py::gil_scoped_acquire gil;
    error = comm_ear()(comm::name_of(kind), bytes, as_mutable(mesh), mesh_dim);
  }
  TORCH_CHECK_WITH(DistError, error.empty(), error);
}

void tell_of_move(const ImplicitMove& move) {
  const auto bytes = static_cast<double>(c10::multiply_integers(move.sizes) * move.item);
  const bool communicates = &move.from.mesh() != &move.to.mesh() || plan_for(move.from, move.to, bytes).communicates();
  std::string error;
  {
    py::gil_scoped_acquire gil;
    error = move_ear()(
        move.op, move.argument, move.why, bindings::as_mutable(LayoutPtr::reclaim_copy(&move.from)),
        bindings::as_mutable(LayoutPtr::reclaim_copy(&move.to)), move.sizes.vec(), move.item, communicates);
  }
  TORCH_CHECK(error.empty(), error);
}

} // namespace

void register_comm(py::module& m) {
  m.def("comm_counts", [] {
    const auto c = comm::counts();
    py::dict out;
    for (size_t i = 0; i < c.calls.size(); ++i) {
      if (c.calls[i]) {
        out[comm::name_of(static_cast<comm::Kind>(i))] = py::make_tuple(c.calls[i], c.bytes[i]);
      }
    }
    return out;
  });
  m.def("reset_comm_counts", &comm::reset_counts);
  m.def("comm_call_alone", &comm::call_alone);
  m.def("is_calling", &comm::is_calling);
  m.def("set_comm_listener", [](py::object f) {
    comm_ear().set(std::move(f));
    comm::set_listener(comm_ear().listens() ? &tell_of_call : nullptr);
  });
  m.def("set_watcher", [](py::object f) {
    move_ear().set(std::move(f));
    set_watcher(move_ear().listens() ? &tell_of_move : nullptr);
  });
  m.def(
      "max_over",
      [](const c10::intrusive_ptr<Mesh>& mesh, int64_t value) {
        auto t = at::full({1}, value, at::TensorOptions(at::kLong).device(c10::Device(mesh->description().device_type)));
        comm::all_reduce_over(t, *mesh, ~uint64_t{0}, ReduceOp::Max);
        return t.item<int64_t>();
      },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "broadcast",
      [](at::Tensor tensor, const c10::intrusive_ptr<Mesh>& mesh, int64_t mesh_dim, int64_t from_coordinate) {
        comm::broadcast(tensor, *mesh, mesh_dim, from_coordinate);
      },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "scatter",
      [](at::Tensor mine, std::vector<at::Tensor> pieces, const c10::intrusive_ptr<Mesh>& mesh, int64_t mesh_dim,
         int64_t from_coordinate) { comm::scatter(mine, pieces, *mesh, mesh_dim, from_coordinate); },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "all_gather",
      [](std::vector<at::Tensor> pieces, const at::Tensor& mine, const c10::intrusive_ptr<Mesh>& mesh, int64_t mesh_dim) {
        comm::all_gather(pieces, mine, *mesh, mesh_dim);
        return pieces;
      },
      py::call_guard<py::gil_scoped_release>());
}

} // namespace shardtensor::bindings
