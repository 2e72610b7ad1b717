#include "bindings/bindings.h"

#include "layout/reach.h"
#include "layout/symbolic.h"
#include "redistribute/plan.h"
#include "redistribute/plan_cache.h"
#include "redistribute/route.h"
#include "redistribute/steps.h"
#include "redistribute/transfer.h"

namespace shardtensor::bindings {

namespace {

// A placement as Python passes it: (kind, dim, split_factor, reduce, norm_order).
using PlacementTuple = std::tuple<int, int64_t, int64_t, std::string, double>;

Placement placement_from(const PlacementTuple& t) {
  const auto& [kind, dim, split_factor, reduce, norm_order] = t;
  switch (static_cast<Placement::Kind>(kind)) {
    case Placement::Kind::Replicate:
      return Placement::replicate();
    case Placement::Kind::Shard:
      return Placement::shard(dim, split_factor);
    case Placement::Kind::Partial:
      return Placement::partial(reduce_op_from(reduce), norm_order);
  }
  return {};
}

PlacementTuple tuple_of(const Placement& p) {
  return {static_cast<int>(p.kind), p.dim, p.split_factor, name_of(p.reduce), p.norm_order};
}

std::vector<std::pair<int64_t, int64_t>> pairs(const Intervals& runs) {
  std::vector<std::pair<int64_t, int64_t>> out;
  for (const auto& r : runs) {
    out.emplace_back(r.start, r.length);
  }
  return out;
}

// A cut as Python passes it: the sizes; or, per piece, (size,) if the sizes are symbols of a graph; or, per piece, (size,
// share, per) and (times, up, shift, down) for each quotient, if the sizes are formulas of the extent.
using CutInPython = std::variant<std::vector<int64_t>, std::vector<std::tuple<c10::SymInt>>, std::vector<py::tuple>>;

Cut cut_from(const CutInPython& given) {
  if (const auto* sizes = std::get_if<std::vector<int64_t>>(&given)) {
    return std::make_shared<const PieceSizes>(*sizes);
  }
  auto out = std::make_shared<PieceSizes>();
  if (const auto* symbols = std::get_if<std::vector<std::tuple<c10::SymInt>>>(&given)) {
    for (const auto& [size] : *symbols) {
      out->push_back(0);
      out->symbols.push_back(size);
    }
    return out;
  }
  for (const auto& piece : std::get<std::vector<py::tuple>>(given)) {
    const auto at = [&](size_t i) { return piece[i].cast<int64_t>(); };
    out->push_back(at(0));
    out->shares.push_back(at(1));
    out->per = at(2);
    out->quotients.clear();
    for (size_t i = 3; i < piece.size(); i += 4) {
      out->times.push_back(at(i));
      out->quotients.push_back({at(i + 1), at(i + 2), at(i + 3)});
    }
  }
  return out;
}

// Symbols stay symbols if `traced`; otherwise they become numbers, with a guard.
CutInPython in_python(const PieceSizes& cut, bool traced) {
  if (!cut.symbols.empty()) {
    if (traced) {
      return std::vector<std::tuple<c10::SymInt>>(cut.symbols.begin(), cut.symbols.end());
    }
    const auto numbers = guarded(cut.symbols);
    return std::vector<int64_t>(numbers.begin(), numbers.end());
  }
  if (!cut.follows()) {
    return static_cast<const std::vector<int64_t>&>(cut);
  }
  std::vector<py::tuple> out;
  for (size_t i = 0; i < cut.size(); ++i) {
    py::list piece(py::make_tuple(cut[i], cut.shares[i], cut.per));
    for (size_t k = 0; k < cut.quotients.size(); ++k) {
      const auto& q = cut.quotients[k];
      piece += py::make_tuple(cut.times[i * cut.quotients.size() + k], q.up, q.shift, q.down);
    }
    out.emplace_back(piece);
  }
  return out;
}

template <bool traced>
std::vector<std::optional<CutInPython>> cuts_in_python(const Layout& layout) {
  std::vector<std::optional<CutInPython>> out;
  for (const auto& cut : layout.cuts()) {
    out.push_back(cut ? std::optional(in_python(*cut, traced)) : std::nullopt);
  }
  return out;
}

Coordinate coordinate_or_mine(const Layout& l, const std::optional<std::vector<int64_t>>& c) {
  return c ? Coordinate(c->begin(), c->end()) : l.mesh().coordinate();
}

std::vector<BoxTuple> box_tuples(const std::vector<Box>& boxes) {
  std::vector<BoxTuple> out;
  for (const auto& box : boxes) {
    out.push_back(bindings::tuple_of(box));
  }
  return out;
}

std::vector<std::pair<int64_t, int64_t>> messages(const std::vector<Transfer::Message>& list) {
  std::vector<std::pair<int64_t, int64_t>> out;
  for (const auto& message : list) {
    out.emplace_back(message.rank, message.numel);
  }
  return out;
}

// Bytes that each rank of either mesh sends and receives: {rank: (sent, received)}.
std::map<int64_t, std::pair<int64_t, int64_t>> traffic(const RouteStep& step, const std::vector<int64_t>& sizes, int64_t item) {
  std::map<int64_t, std::pair<int64_t, int64_t>> out;
  for (const auto* layout : {step.before.get(), step.after.get()}) {
    for (auto rank : layout->mesh().description().ranks) {
      const auto t = traffic_of(step, sizes, rank);
      out[rank] = {t.sent * item, t.received * item};
    }
  }
  return out;
}

} // namespace

void register_layout(py::module& m) {
  py::class_<Mesh, c10::intrusive_ptr<Mesh>>(m, "Mesh")
      .def(
          py::init([](std::string device_type, std::vector<int64_t> shape, std::vector<int64_t> ranks,
                      std::vector<std::string> dim_names, std::vector<std::string> groups, int64_t rank, std::string world,
                      std::vector<std::vector<int64_t>> group_ranks) {
            return as_mutable(Mesh::make(
                {std::move(device_type), std::move(shape), std::move(ranks), std::move(dim_names), std::move(groups), rank,
                 std::move(world), std::move(group_ranks)}));
          }),
          py::arg("device_type"), py::arg("shape"), py::arg("ranks"), py::arg("dim_names"), py::arg("groups"), py::arg("rank"),
          py::arg("world") = "", py::arg("group_ranks") = std::vector<std::vector<int64_t>>{})
      .def_property_readonly("id", &Mesh::id)
      .def_property_readonly("shape", [](const Mesh& self) { return self.description().shape; })
      .def_property_readonly("ranks", [](const Mesh& self) { return self.description().ranks; })
      .def_property_readonly("dim_names", [](const Mesh& self) { return self.description().dim_names; })
      .def_property_readonly("groups", [](const Mesh& self) { return self.description().groups; })
      .def_property_readonly("device_type", [](const Mesh& self) { return self.description().device_type; })
      .def_property_readonly("rank", &Mesh::rank)
      .def_property_readonly("world", [](const Mesh& self) { return self.description().world; })
      .def_property_readonly("has_this_rank", &Mesh::has_this_rank)
      .def_property_readonly(
          "coordinate", [](const Mesh& self) { return std::vector<int64_t>(self.coordinate().begin(), self.coordinate().end()); })
      .def("__repr__", &Mesh::str);

  py::class_<Layout, c10::intrusive_ptr<Layout>>(m, "Layout")
      .def(
          py::init([](const c10::intrusive_ptr<Mesh>& mesh, const std::vector<PlacementTuple>& placements,
                      const std::vector<std::optional<CutInPython>>& cuts) {
            Placements p;
            for (const auto& t : placements) {
              p.push_back(placement_from(t));
            }
            Cuts c;
            for (const auto& cut : cuts) {
              c.push_back(cut ? cut_from(*cut) : nullptr);
            }
            return as_mutable(Layout::make(MeshPtr(mesh), std::move(p), std::move(c)));
          }),
          py::arg("mesh"), py::arg("placements"), py::arg("cuts") = std::vector<std::optional<CutInPython>>{})
      .def_property_readonly("id", &Layout::id)
      .def_property_readonly("mesh", [](const Layout& self) { return as_mutable(self.mesh_ptr()); })
      .def_property_readonly(
          "placements",
          [](const Layout& self) {
            std::vector<PlacementTuple> out;
            for (const auto& p : self.placements()) {
              out.push_back(tuple_of(p));
            }
            return out;
          })
      .def_property_readonly("cuts", cuts_in_python<false>)
      .def_property_readonly("traced_cuts", cuts_in_python<true>)
      .def_property_readonly("is_even", &Layout::is_even)
      .def_property_readonly("follows_sizes", &Layout::follows_sizes)
      .def_property_readonly("has_symbols", &Layout::has_symbols)
      .def("settled", [](const Layout& self, const std::vector<int64_t>& sizes) { return as_mutable(self.settled(sizes)); })
      .def_property_readonly("is_replicated", &Layout::is_replicated)
      .def_property_readonly("is_sharded", &Layout::is_sharded)
      .def_property_readonly("has_partial", &Layout::has_partial)
      .def_property_readonly(
          "picked",
          [](const Layout& self) {
            std::vector<int64_t> out;
            for (int64_t m = 0; m < self.ndim(); ++m) {
              if (self.placement(m).picked) {
                out.push_back(m);
              }
            }
            return out;
          })
      .def(
          "picking",
          [](const Layout& self, const std::vector<int64_t>& mesh_dims) {
            auto out = LayoutPtr::reclaim_copy(&self);
            for (const auto m : mesh_dims) {
              out = out->with(m, Placement::partial_of_picked());
            }
            return as_mutable(out);
          })
      .def("sizes_of_equal_pieces", &Layout::sizes_of_equal_pieces<std::vector<int64_t>>, py::arg("local"))
      .def(
          "local_sizes",
          [](const Layout& self, const std::vector<int64_t>& sizes, const std::optional<std::vector<int64_t>>& c) {
            const auto out = c ? self.local_sizes(sizes, Coordinate(c->begin(), c->end())) : self.local_sizes(sizes);
            return std::vector<int64_t>(out.begin(), out.end());
          },
          py::arg("sizes"), py::arg("coordinate") = py::none())
      .def(
          "sym_local_sizes",
          [](const Layout& self, const std::vector<c10::SymInt>& sizes) {
            const auto out = sym_local_sizes(self, sizes);
            return std::vector<c10::SymInt>(out.begin(), out.end());
          },
          py::arg("sizes"))
      .def(
          "intervals",
          [](const Layout& self, int64_t dim, int64_t size, const std::optional<std::vector<int64_t>>& c) {
            return pairs(self.intervals(dim, size, coordinate_or_mine(self, c)));
          },
          py::arg("dim"), py::arg("size"), py::arg("coordinate") = py::none())
      .def(
          "boxes",
          [](const Layout& self, const std::vector<int64_t>& sizes, const std::optional<std::vector<int64_t>>& c) {
            if (!c && !self.mesh().has_this_rank()) {
              return std::vector<BoxTuple>{};
            }
            return box_tuples(self.boxes(sizes, coordinate_or_mine(self, c)));
          },
          py::arg("sizes"), py::arg("coordinate") = py::none())
      .def("misfit", [](const Layout& self, const std::vector<int64_t>& sizes) { return self.misfit(sizes); })
      .def("__eq__", [](const Layout& a, const Layout& b) { return &a == &b; })
      .def("__hash__", [](const Layout& a) { return a.id(); })
      .def("__repr__", &Layout::str);

  m.def(
      "plan",
      [](const c10::intrusive_ptr<Layout>& from, const c10::intrusive_ptr<Layout>& to, double bytes) {
        const auto plan = make_plan(*from, *to, bytes);
        std::vector<std::pair<std::string, int64_t>> steps;
        for (const auto& step : plan.steps) {
          steps.emplace_back(name_of(step.kind), step.mesh_dim);
        }
        return std::make_pair(steps, plan.cost);
      },
      py::arg("source"), py::arg("target"), py::arg("bytes"));
  m.def(
      "route",
      [](const c10::intrusive_ptr<Layout>& from, const c10::intrusive_ptr<Layout>& to, const std::vector<int64_t>& sizes,
         int64_t item) {
        py::list out;
        for (const auto& step : route(*from, *to, sizes, item)) {
          out.append(py::make_tuple(
              name_of(step.kind), step.mesh_dim, as_mutable(step.before), as_mutable(step.after), traffic(step, sizes, item)));
        }
        return out;
      },
      py::arg("source"), py::arg("target"), py::arg("sizes"), py::arg("item"));
  m.def(
      "prepare",
      [](const c10::intrusive_ptr<Layout>& from, const c10::intrusive_ptr<Layout>& to, const std::vector<int64_t>& sizes,
         int64_t item) {
        int64_t peers = 0;
        for (const auto& step : route(*from, *to, sizes, item)) {
          peers = std::max(peers, prepare_step(step, *step.before, *step.after, sizes));
        }
        return peers;
      },
      py::arg("source"), py::arg("target"), py::arg("sizes"), py::arg("item"));
  m.def("kept", &plan_cache_size);
  m.def("alive", [] { return std::make_pair(Layout::count(), Mesh::count()); });
  m.def(
      "transfer_of",
      [](const c10::intrusive_ptr<Layout>& from, const c10::intrusive_ptr<Layout>& to, const std::vector<int64_t>& sizes,
         int64_t rank) {
        const auto t = transfer_of(*from, *to, sizes, rank);
        py::dict out;
        out["sent"] = messages(t.sent);
        out["received"] = messages(t.received);
        out["packed"] = box_tuples(t.packed.all());
        out["unpacked"] = box_tuples(t.unpacked.all());
        out["kept"] = py::make_tuple(box_tuples(t.kept_from), box_tuples(t.kept_to));
        return out;
      },
      py::arg("source"), py::arg("target"), py::arg("sizes"), py::arg("rank"));

  using ReachTuple = std::array<int64_t, 4>; // num, den, first, last
  const auto reach = [](const ReachTuple& line) { return Reach{line[0], line[1], line[2], line[3]}; };
  m.def(
      "reach_mirror",
      [=](const ReachTuple& line) {
        const auto r = mirror(reach(line), -1);
        return ReachTuple{r.num, r.den, r.first, r.last};
      },
      py::arg("line"));
  m.def(
      "reach_read",
      [=](const ReachTuple& line, int64_t start, int64_t length, int64_t size, const std::string& beyond, int64_t operand) {
        auto r = reach(line);
        r.beyond = beyond == "reflect"     ? PaddingMode::Reflect
                   : beyond == "replicate" ? PaddingMode::Replicate
                   : beyond == "circular"  ? PaddingMode::Circular
                                           : PaddingMode::Constant;
        r.operand = operand;
        const auto s = read(r, {start, length}, size);
        return py::make_tuple(s.before, s.inside.start, s.inside.length, s.after);
      },
      py::arg("line"), py::arg("start"), py::arg("length"), py::arg("size"), py::arg("beyond") = "", py::arg("operand") = -1);
  m.def(
      "reach_cut",
      [=](const ReachTuple& line, int64_t cut, int64_t size, int64_t count) {
        return cut_through(reach(line), cut, size, count);
      },
      py::arg("line"), py::arg("cut"), py::arg("size"), py::arg("count"));
}

} // namespace shardtensor::bindings
