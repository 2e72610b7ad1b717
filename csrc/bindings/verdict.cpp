#include "bindings/bindings.h"

#include "comm/verdict.h"

#include <pybind11/chrono.h>

namespace shardtensor::bindings {

using namespace comm::desync;
using namespace py::literals;

// For tests/comm/test_verdict.py.
void register_verdict(py::module& m) {
  using State = Report::ReportState;
  py::enum_<State>(m, "ReportState")
      .value("Running", State::Running)
      .value("Failed", State::Failed)
      .value("Ended", State::Ended)
      .value("InCollective", State::InCollective)
      .value("InBarrier", State::InBarrier);
  py::enum_<Verdict>(m, "Verdict")
      .value("MayCome", Verdict::MayCome)
      .value("ComesIfBack", Verdict::ComesIfBack)
      .value("InVain", Verdict::InVain);
  py::class_<Mark>(m, "Mark").def(py::init<int64_t, uint64_t, uint64_t>(), "number"_a = 0, "history"_a = 0, "equal_pieces"_a = 0);
  using Numbers = std::vector<int64_t>;
  py::class_<GroupProgress>(m, "GroupProgress")
      .def(
          py::init<int64_t, bool, Numbers, Numbers, Mark>(), "number"_a = 0, "broken"_a = false, "skipped"_a = Numbers(),
          "back"_a = Numbers(), "mark"_a = Mark());
  using Groups = std::map<std::string, GroupProgress>;
  py::class_<Report>(m, "Report")
      .def(
          py::init<
              State, int64_t, std::string, std::string, std::string, int64_t, uint64_t, uint64_t, int64_t, Numbers, Groups,
              Clock::time_point>(),
          "state"_a, "rank"_a = 0, "text"_a = "", "error"_a = "", "group"_a = "", "number"_a = 0, "facts"_a = 0, "drawn"_a = 0,
          "nth"_a = -1, "absent"_a = Numbers(), "groups"_a = Groups(), "since"_a = 0.0)
      .def("__str__", &Report::str);
  m.def("write_report", &write_report);
  m.def("read_report", &read_report);
  m.def("differ", &differ);
  m.def("wait_for_each_other", &wait_for_each_other);
  m.def("verdict", &verdict);
  m.def("is_back", &is_back);
  m.def("compare_marks", [](const Mark& mine, const Mark& theirs) {
    const auto out = compare(mine, theirs);
    return std::pair(out.collectives_differ, out.pieces_differ);
  });
  m.def("silent", &silent);
  m.def("first_ended", [](c10::IntArrayRef ranks, const std::deque<Report>& news) {
    const auto* gone = first_ended(ranks, news);
    return gone ? std::optional(*gone) : std::nullopt;
  });
}

} // namespace shardtensor::bindings
