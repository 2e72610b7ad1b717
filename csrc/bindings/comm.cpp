#include "bindings/bindings.h"

#include "comm/comm.h"

namespace shardtensor::bindings {

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
