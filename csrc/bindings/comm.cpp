#include "bindings/bindings.h"

#include "comm/collective_call.h"
#include "comm/comm.h"
#include "comm/counts.h"
#include "comm/desync.h"
#include "comm/error_context.h"
#include "comm/peer_store.h"
#include "comm/range.h"
#include "redistribute/exchange.h"
#include "redistribute/plan.h"
#include "redistribute/watch.h"

#include <ATen/ATen.h>

namespace shardtensor::bindings {

namespace {

template <typename T>
c10::intrusive_ptr<T> shared(const T& object) {
  return as_mutable(c10::intrusive_ptr<const T>::reclaim_copy(&object));
}

void tell_of_call(comm::CollectiveKind kind, int64_t bytes, const Mesh& mesh, int64_t mesh_dim) {
  const auto error = listener_for<comm::on_collective>().tell(
      [&] { return py::make_tuple(comm::name_of(kind), bytes, shared(mesh), mesh_dim); });
  TORCH_CHECK_WITH(DistError, error.empty(), error);
}

void tell_of_move(const ImplicitMove& move) {
  constexpr double kSome = 1024; // any number of bytes: whether a move communicates does not depend on it
  const bool communicates = &move.from.mesh() != &move.to.mesh() || plan_for(move.from, move.to, kSome)->communicates();
  const auto error = listener_for<on_move>().tell([&] {
    return py::make_tuple(
        move.cause.op, move.cause.argument, move.cause.why, shared(move.from), shared(move.to), move.sizes, move.item,
        communicates);
  });
  TORCH_CHECK(error.empty(), error);
}

void tell_of_halo(const HaloRead& read) {
  listener_for<on_halo>().tell([&] {
    py::dict sent, received;
    for (size_t i = 0; i < read.peers.size(); ++i) {
      sent[py::int_(read.peers[i])] = read.sent[i] * read.item;
      received[py::int_(read.peers[i])] = read.received[i] * read.item;
    }
    return py::make_tuple(comm::doing_now(), shared(read.from), read.sizes.vec(), sent, received);
  });
}

std::string ask_call_site() {
  return listener_for<comm::find_call_site>().tell([] { return py::tuple(); });
}

std::string ask_range_name(const char* kind, const std::string& move, int64_t bytes) {
  return listener_for<comm::range_name>().tell([&] { return py::make_tuple(kind, move, bytes); });
}

} // namespace

void register_comm(py::module& m) {
  m.def("comm_counts", [] {
    const auto c = comm::counts();
    py::dict out;
    for (size_t i = 0; i < c.calls.size(); ++i) {
      if (c.calls[i]) {
        out[comm::name_of(static_cast<comm::CollectiveKind>(i))] = py::make_tuple(c.calls[i], c.bytes[i]);
      }
    }
    return out;
  });
  m.def("reset_comm_counts", &comm::reset_counts);
  m.def("comm_call_alone", &comm::call_alone);
  m.def("is_calling", &comm::is_calling);
  def_observer<comm::on_collective, &tell_of_call>(m, "set_comm_listener");
  def_observer<comm::find_call_site, &ask_call_site>(m, "set_call_site");
  def_observer<comm::range_name, &ask_range_name>(m, "set_range_name");
  def_observer<on_move, &tell_of_move>(m, "set_watcher");
  def_observer<on_halo, &tell_of_halo>(m, "set_halo_watcher");
  m.def("failed_in_part", &comm::desync::failed_in_part, py::call_guard<py::gil_scoped_release>());
  m.def("set_fault_notice", &comm::desync::set_notice);
  m.def("ended", &comm::desync::ended, py::call_guard<py::gil_scoped_release>());
  m.def("destroyed_groups", &comm::desync::destroyed_groups, py::call_guard<py::gil_scoped_release>());
  m.def("device_of", [](const c10::intrusive_ptr<Mesh>& mesh) { return comm::device_of(*mesh); });
  m.def("drain_dropped", &comm::drain_dropped, py::call_guard<py::gil_scoped_release>());
  m.def("dropped_in_flight", &comm::dropped_in_flight);
  // The destructor of a group with a collective in flight would wait for it.
  m.def("keep_for_ever", [](py::object thing) { (void)thing.release(); });
  m.def("stop_freeing_dropped", &comm::stop_freeing_dropped);
  m.def("begin_barrier", &comm::desync::begin_barrier);
  py::class_<comm::desync::BarrierGuard>(m, "InBarrier")
      .def(py::init<std::string>())
      .def("leave", &comm::desync::BarrierGuard::leave);
  m.def("set_fault_grace", &comm::desync::set_grace);
  m.def("set_fault_comparison", &comm::desync::set_between);
  m.def(
      "max_over",
      [](const c10::intrusive_ptr<Mesh>& mesh, int64_t value) {
        auto t = at::full({1}, value, at::TensorOptions(at::kLong).device(comm::device_of(*mesh)));
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
  using BoxesOfRanks = std::vector<std::tuple<int64_t, std::vector<int64_t>, std::vector<int64_t>>>;
  m.def(
      "exchange_boxes",
      [](const std::vector<at::Tensor>& pieces, const BoxesOfRanks& held, const BoxesOfRanks& wanted,
         const c10::intrusive_ptr<Mesh>& mesh, at::ScalarType dtype, c10::Device device) {
        const auto placed = [](const BoxesOfRanks& places) {
          std::vector<RankBox> out;
          for (const auto& [rank, offsets, sizes] : places) {
            out.push_back({rank, box_from({offsets, sizes})});
          }
          return out;
        };
        return exchange(pieces, placed(held), placed(wanted), *mesh, at::TensorOptions(dtype).device(device));
      },
      py::arg("pieces"), py::arg("held"), py::arg("wanted"), py::arg("mesh"), py::arg("dtype"), py::arg("device"),
      py::call_guard<py::gil_scoped_release>());
}

} // namespace shardtensor::bindings
