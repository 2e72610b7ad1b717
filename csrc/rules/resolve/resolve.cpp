#include "rules/resolve/resolve.h"

#include "rules/resolve/chooser.h"
#include "rules/resolve/factor_cuts.h"

#include <algorithm>

namespace shardtensor::rules {

namespace {

class Resolver {
 public:
  Resolver(const Call& call, const Rule& rule)
      : call_(call), rule_(rule), mesh_(call.mesh), choices_(call, rule), cutting_(choices_) {}

  c10::intrusive_ptr<Solution> run() {
    decide(true);
    if (!reducible()) {
      decide(false);
    }
    auto s = c10::make_intrusive<Solution>();
    s->factor_mesh_dims.assign(rule_.factors.size(), 0);
    bool kernel = rule_.always_kernel;
    s->runs.assign(rule_.reaches.empty() ? 0 : rule_.factors.size(), std::nullopt);
    for (int64_t m = 0; m < mesh_.ndim(); ++m) {
      const auto& c = choices_.made[m];
      if (c.role == Choice::Role::Shard) {
        s->factor_mesh_dims[c.factor] |= uint64_t{1} << m;
        kernel |= rule_.factors[c.factor].kernel;
        s->shards = true;
      }
    }
    s->kernel_if = kernel ? nullptr : rule_.kernel_if;
    s->kernel = kernel || rule_.kernel_if ? rule_.kernel : nullptr;
    s->put_back = kernel ? rule_.put_back : nullptr;
    s->kernel_data = rule_.kernel_data;
    for (size_t i = 0; i < call_.tensors.size(); ++i) {
      const auto& t = call_.tensors[i];
      auto need = operand_layout(i);
      if (has_halo(i)) {
        need = before_halo(i, *need);
        s->halos.push_back(
            {i, fetch(i, *need), rule_.operands[i].padding.value_or(ReduceOp::Sum), rule_.operands[i].awaited, recut(i)});
        s->moves = true;
        s->operands.push_back(std::move(need));
        continue;
      }
      if (!need || need.get() == t.layout) {
        s->operands.emplace_back();
        continue;
      }
      s->moves = true;
      if (t.mutated) {
        s->write_back.add(i);
      }
      s->operands.push_back(std::move(need));
    }
    for (size_t r = 0; r < rule_.results.size(); ++r) {
      s->results.push_back(result(rule_.results[r]));
    }
    s->geometry = !rule_.results.empty() &&
                  std::all_of(rule_.results.begin(), rule_.results.end(), [](const Result& r) { return r.geometry.has_value(); });
    for (const auto& r : rule_.operands) {
      for (size_t d = 0; d < r.dims.size() && !s->halos.empty(); ++d) {
        if (r.dims[d].reach != kNone && is_sharded(r.dims[d].factor)) {
          const auto f = r.dims[d].factor;
          s->runs[f] = run_at(*cutting_.factor_layout(f), f, mesh_.coordinate());
        }
      }
    }
    s->replicated = Layout::replicated(call_.tensors[0].layout->mesh_ptr());
    s->sizes_arg = rule_.sizes_arg;
    if (s->shards) {
      find_alike(*s);
    }
    s->sized = weighed_ || (call_.reads() & Reads::kSizes);
    return s;
  }

 private:
  void decide(bool summands_pass) {
    choices_.made.clear();
    choices_.cuts.clear();
    for (int64_t m = 0; m < mesh_.ndim(); ++m) {
      choices_.made.push_back(choose(choices_, m, summands_pass, weighed_));
      choices_.cuts.push_back(cutting_.factor_cut(m));
    }
  }

  // Without a kernel, the op itself compares dims that are not sharded, on every rank alike.
  void find_alike(Solution& s) const {
    for (int64_t f = 0; f < static_cast<int64_t>(rule_.factors.size()); ++f) {
      if (!s.factor_mesh_dims[f] && (!s.kernel || rule_.factors[f].whole)) {
        continue;
      }
      std::optional<Solution::MatchedDim> first;
      for (size_t i = 0; i < call_.tensors.size(); ++i) {
        const auto& dims = rule_.operands[i].dims;
        const auto d = dim_of(dims, f);
        if (d < 0 || dims[d].window || !dims[d].at.empty() || dims[d].reach != kNone || call_.tensors[i].output) {
          continue;
        }
        const Solution::MatchedDim here{static_cast<int32_t>(i), static_cast<int16_t>(d), dims[d].inner};
        if (first) {
          s.must_match.emplace_back(*first, here);
        } else {
          first = here;
        }
      }
    }
  }

  // Whether no operand and no result would hold summands of two kinds (for example if maxima pass through an op that sums over
  // a sharded dim).
  bool reducible() const {
    for (int64_t m = 1; m < mesh_.ndim(); ++m) {
      for (int64_t k = 0; k < m; ++k) {
        for (size_t i = 0; i < call_.tensors.size(); ++i) {
          if (!choices_.placement_of(i, choices_.made[k]).commutes_with(choices_.placement_of(i, choices_.made[m]))) {
            return false;
          }
        }
        for (const auto& r : rule_.results) {
          if (!choices_.placement_of(r, choices_.made[k]).commutes_with(choices_.placement_of(r, choices_.made[m]))) {
            return false;
          }
        }
      }
    }
    return true;
  }

  LayoutPtr operand_layout(size_t i) const {
    const auto& operand = rule_.operands[i];
    if (operand.free) {
      return nullptr;
    }
    Placements placements;
    Cuts cuts(mesh_.ndim());
    for (int64_t m = 0; m < mesh_.ndim(); ++m) {
      placements.push_back(choices_.placement_of(i, choices_.made[m]));
      if (placements[m].is_shard() && operand.dims[placements[m].dim].reach != kNone) {
        if (operand.kept_cut) {
          cuts[m] = kept_cut(i, m);
        } else {
          placements[m] = Placement::replicate(); // fetch() cuts this dim
        }
      } else if (placements[m].is_shard()) {
        cuts[m] = cutting_.dim_cut(operand.dims[placements[m].dim], m);
      }
    }
    return Layout::make(call_.tensors[i].layout->mesh_ptr(), std::move(placements), std::move(cuts));
  }

  // Operand i's own cut, if it is cut along a dim that is read through windows.
  Cut kept_cut(size_t i, int64_t m) const {
    const auto& have = *call_.tensors[i].layout;
    for (int64_t k = 0; k <= m; ++k) {
      const auto want = choices_.placement_of(i, choices_.made[m]);
      if ((have.placement(k) == want) != (choices_.placement_of(i, choices_.made[k]) == want)) {
        return nullptr; // it is not cut there yet
      }
    }
    return have.cut(m);
  }

  bool is_sharded(int64_t factor) const {
    return std::any_of(choices_.made.begin(), choices_.made.end(), [&](const Choice& c) {
      return c.role == Choice::Role::Shard && c.factor == factor;
    });
  }

  // Whether operand i is read through windows along a sharded factor.
  bool has_halo(size_t i) const {
    const auto& dims = rule_.operands[i].dims;
    return !rule_.operands[i].kept_cut &&
           std::any_of(dims.begin(), dims.end(), [&](const Dim& d) { return d.reach != kNone && is_sharded(d.factor); });
  }

  // If operand i is read with a halo along another dim than the one that is cut: its layout, cut along that dim.
  LayoutPtr recut(size_t i) const {
    const auto& have = *call_.tensors[i].layout;
    auto placements = have.placements();
    bool moves = false;
    for (int64_t m = 0; m < mesh_.ndim(); ++m) {
      const auto want = choices_.placement_of(i, choices_.made[m]);
      if (have.placement(m).is_shard() && want.is_shard() && want.dim != have.placement(m).dim) {
        placements[m] = want;
        moves = true;
      }
    }
    return moves ? Layout::make(have.mesh_ptr(), std::move(placements)) : nullptr;
  }

  // The layout that operand i must have before its halo is fetched: its own, but with summands only if the op takes them, and
  // without strided shards.
  LayoutPtr before_halo(size_t i, const Layout& want) const {
    auto from = LayoutPtr::reclaim_copy(call_.tensors[i].layout);
    for (int64_t m = 0; m < mesh_.ndim(); ++m) {
      const auto p = from->placement(m), w = want.placement(m);
      const bool stays = p.is_partial() || w.is_partial() ? p == w : p.split_factor == 1;
      from = stays ? from : from->with(m, w.is_partial() ? w : Placement::replicate());
    }
    return from;
  }

  // The indices of the factor at a coordinate of the mesh. `cut`: its factor_layout().
  Interval run_at(const Layout& cut, int64_t factor, const Coordinate& at) const {
    return cut.intervals(0, cutting_.factor_size(factor).guard_int(__FILE__, __LINE__), at)[0];
  }

  HaloExchange fetch(size_t i, const Layout& from) const {
    const auto& t = call_.tensors[i];
    const auto& dims = rule_.operands[i].dims;
    const auto plain = operand_layout(i); // whole along the dims that are read through windows
    Sizes sizes;
    std::vector<LayoutPtr> factors; // of those dims
    for (int64_t d = 0; d < t.dim(); ++d) {
      sizes.push_back(t.size(d));
      const bool windows = dims[d].reach != kNone && is_sharded(dims[d].factor);
      factors.push_back(windows ? cutting_.factor_layout(dims[d].factor) : nullptr);
    }
    return HaloExchange(from, sizes, [&](const Coordinate& at) {
      PaddedBox out;
      for (size_t d = 0; d < dims.size(); ++d) {
        if (factors[d]) {
          const auto each = dims[d].inner.guard_int(__FILE__, __LINE__); // a reach counts in units of it
          const auto all = read(rule_.reaches[dims[d].reach], run_at(*factors[d], dims[d].factor, at), sizes[d] / each);
          const Interval inside{all.inside.start * each, all.inside.length * each};
          const bool padded = rule_.operands[i].padding.has_value();
          out.push_back({padded ? all.before * each : 0, inside, padded ? all.after * each : 0});
        } else {
          out.push_back({0, plain->intervals(static_cast<int64_t>(d), sizes[d], at)[0], 0});
        }
      }
      return out;
    });
  }

  // The operand whose order of dims the result of an elementwise op has.
  int64_t like(const Result& r) const {
    const auto same = [](const Dim& a, const Dim& b) {
      return a.factor == b.factor && a.inner == b.inner && !a.window && !b.window && a.at.empty() && b.at.empty() &&
             a.reach == b.reach;
    };
    for (size_t i = 0; i < rule_.operands.size(); ++i) {
      const auto& dims = rule_.operands[i].dims;
      if (std::equal(dims.begin(), dims.end(), r.dims.begin(), r.dims.end(), same)) {
        return static_cast<int64_t>(i);
      }
    }
    return -1;
  }

  Solution::ResultSpec result(const Result& r) const {
    Placements placements;
    Cuts cuts(mesh_.ndim());
    bool sharded = false;
    for (int64_t m = 0; m < mesh_.ndim(); ++m) {
      placements.push_back(choices_.placement_of(r, choices_.made[m]));
      if (placements[m].is_shard()) {
        const auto& dim = r.dims[placements[m].dim];
        cuts[m] = dim.reach == kNone ? cutting_.dim_cut(dim, m) : kept_cut(source_of(dim).operand, m);
        sharded = true;
      }
    }
    Solution::ResultSpec out{
        .layout = Layout::make(call_.tensors[0].layout->mesh_ptr(), std::move(placements), std::move(cuts)),
        .strides = r.strides,
        .order = r.order,
        .like = like(r),
        .geometry = r.geometry};
    if (!r.sizes.empty() || (sharded && r.dims.empty())) {
      for (const auto& size : r.sizes) {
        out.sizes.push_back({-2, 0, size});
      }
    } else if (sharded) {
      for (size_t d = 0; d < r.dims.size(); ++d) {
        const bool cut = out.layout->shards(static_cast<int64_t>(d));
        out.sizes.push_back(cut ? source_of(r.dims[d]) : Solution::SizeSource());
      }
    }
    return out;
  }

  // The operand's dim that has the same size as a sharded dim of a result; if the result's dim has a reach, also the same cut.
  Solution::SizeSource source_of(const Dim& dim) const {
    for (size_t i = 0; i < rule_.operands.size(); ++i) {
      const auto d = dim_of(rule_.operands[i].dims, dim.factor);
      const auto* own = d < 0 ? nullptr : &rule_.operands[i].dims[d];
      if (own && !own->window && own->at.empty() && own->reach == dim.reach && own->inner == dim.inner) {
        return {static_cast<int32_t>(i), static_cast<int16_t>(d), 0};
      }
    }
    TORCH_INTERNAL_ASSERT(dim.reach == kNone, "the rule of ", call_.schema.name(), ": a result has a reach that no operand has");
    return {};
  }

  const Call& call_;
  const Rule& rule_;
  const Mesh& mesh_;
  Choices choices_;
  FactorCuts cutting_;
  bool weighed_ = false;
};

} // namespace

c10::intrusive_ptr<Solution> resolve(const Call& call, const Rule& rule) {
  TORCH_INTERNAL_ASSERT(
      rule.operands.size() == call.tensors.size(), "the rule of ", call.schema.name(), " describes ", rule.operands.size(),
      " operands of ", call.tensors.size());
  for (size_t i = 0; i < rule.operands.size(); ++i) {
    TORCH_INTERNAL_ASSERT(
        rule.operands[i].free || static_cast<int64_t>(rule.operands[i].dims.size()) == call.tensors[i].dim(), "the rule of ",
        call.schema.name(), " describes ", rule.operands[i].dims.size(), " dims of operand ", i, ", which has ",
        call.tensors[i].dim());
  }
  return Resolver(call, rule).run();
}

} // namespace shardtensor::rules
