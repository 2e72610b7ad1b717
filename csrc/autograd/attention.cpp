// scaled_dot_product_attention and its form by matrix products, which torch would decompose. If the sequence is cut, decides by
// cost where queries, keys and values go. Uses dispatch/handler, redistribute/, rules/ops/ring and tensor/.
#include "autograd/functions.h"
#include "autograd/make_formula.h"
#include "dispatch/cache.h"
#include "redistribute/plan.h"
#include "redistribute/watch.h"
#include "rules/ops/ring.h"
#include "tensor/shard_tensor.h"
#include "tensor/symbolic.h"

#include <ATen/ATen.h>
#include <ATen/ops/_scaled_dot_product_attention_math_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/scaled_dot_product_attention_compositeimplicitautograd_dispatch.h>

#include <limits>
#include <unordered_set>

namespace shardtensor {

namespace {

// torch's version makes a plain causal mask.
std::tuple<at::Tensor, at::Tensor> attention_math(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& given_mask,
    double dropout_p,
    bool is_causal,
    const std::optional<at::Tensor>& dropout_mask,
    std::optional<double> scale,
    bool enable_gqa) {
  auto mask = given_mask;
  const auto* impl = as_shard_tensor(query);
  if (is_causal && impl && !(mask && mask->defined())) {
    // The mask is added to the scores: the public op converts a mask of bools, this one does not.
    const auto infinity = std::numeric_limits<double>::infinity();
    const auto later = at::full_symint({query.sym_size(-2), key.sym_size(-2)}, -infinity, impl->local().options()).triu(1);
    mask = from_local(later, Layout::replicated(impl->layout().mesh_ptr()), later.sym_sizes(), later.sym_strides());
    is_causal = false;
  }
  return at::compositeimplicitautograd::_scaled_dot_product_attention_math(
      query, key, value, mask, dropout_p, is_causal, dropout_mask, scale, enable_gqa);
}

// ---- which layouts a cut sequence gets ----

// The layouts that queries, keys and values are moved to.
struct AttentionLayouts {
  LayoutPtr query, key, value;
  const char* why;
};

// Why they move: heads or batches are cut instead of the sequence; or keys and values are gathered.
constexpr const char* kWholeSequences = "attention needs whole sequences";
constexpr const char* kCheaperWhole = "the whole of it costs less than its pieces, one after the other";
constexpr const char* kNoPieces = "it cannot be sent piece by piece, nor cut along another dim";
constexpr const char* kOwnKeys = "each rank attends to its own keys with all queries";

// Costs are in bytes that a rank sends. This many floating-point operations take as long as sending one byte.
constexpr double kFlopsPerByte = 64;

// Decides for one call. If sizes are symbols of a graph, which have no costs, the decision depends on the number of heads, and
// on whether there are so few queries that all ranks' results are smaller than one rank's keys.
class AttentionPlanner {
 public:
  AttentionPlanner(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, bool causal)
      : query_(query), key_(key), value_(value), causal_(causal), sequence_(query.dim() - 2) {}

  // Nothing if the tensors stay where they are: then keys and queries travel piece by piece (rules/ops/ring.h).
  std::optional<AttentionLayouts> decide() const {
    if (!any_cut()) {
      return std::nullopt;
    }
    const AttentionLayouts stay{
        as_shard_tensor(query_)->layout_ptr(), as_shard_tensor(key_)->layout_ptr(), as_shard_tensor(value_)->layout_ptr(), ""};
    const bool travels = query_.dim() == 4 && rules::cut_together(layout(query_), layout(key_), layout(value_), sequence_);
    if (has_symbols(query_) || has_symbols(key_) || has_symbols(value_)) {
      if (auto merged = merging(); merged && are_few_queries()) {
        return merged;
      }
      if (auto places = spread(sequence_ - 1)) {
        return places;
      }
      return travels ? stay : AttentionLayouts{stay.query, whole(key_), whole(value_), kNoPieces};
    }
    std::optional<AttentionLayouts> best;
    double least = std::numeric_limits<double>::infinity();
    const auto offer = [&](std::optional<AttentionLayouts> places, double cost) {
      if (places && cost < least) {
        least = cost;
        best = std::move(places);
      }
    };
    for (int64_t d = sequence_ - 1; d >= 0; --d) {
      auto places = spread(d);
      const auto cost = places ? cost_of_spreading(*places, d) : 0;
      offer(std::move(places), cost);
    }
    const auto gathered = whole(key_), with = whole(value_);
    offer(AttentionLayouts{stay.query, gathered, with, kCheaperWhole}, cost_of_gathering());
    if (travels) {
      offer(stay, cost_of_ring());
    }
    if (auto places = merging()) {
      const auto cost = cost_of_merging(*places);
      offer(std::move(places), cost);
    }
    return best;
  }

 private:
  const Layout& layout(const at::Tensor& t) const {
    return as_shard_tensor(t)->layout();
  }

  // Whether mesh dim m cuts the keys or the values along the sequence.
  bool cuts(int64_t m) const {
    return layout(key_).mesh().size(m) > 1 &&
           (layout(key_).placement(m).is_shard(sequence_) || layout(value_).placement(m).is_shard(sequence_));
  }
  bool any_cut() const {
    return layout(key_).any_mesh_dim([&](int64_t m) { return cuts(m); });
  }

  // All three cut along dim d instead of the sequence; nothing if there are too few indices, so that some ranks would be idle.
  std::optional<AttentionLayouts> spread(int64_t d) const {
    const auto count = key_.sym_size(d), more = query_.sym_size(d);
    if (count == 0 || (more != count && more % count != 0) || value_.sym_size(d) != count) {
      return std::nullopt; // broadcast
    }
    AttentionLayouts out{along(query_, d, count), along(key_, d, count), along(value_, d, count), kWholeSequences};
    return divides_evenly(count, *out.key, d) || imbalance(*out.key, d, count.guard_int(__FILE__, __LINE__)) <= 1.5
               ? std::optional(out)
               : std::nullopt;
  }

  // Queries whole along the mesh dims that cut the keys; the ranks' results are merged (rules/ops/attention.cpp).
  std::optional<AttentionLayouts> merging() const {
    auto queries = layout(query_).with_where(
        [&](int64_t m) { return layout(key_).placement(m).is_shard(sequence_); }, Placement::replicate());
    AttentionLayouts out{
        std::move(queries), as_shard_tensor(key_)->layout_ptr(), as_shard_tensor(value_)->layout_ptr(), kOwnKeys};
    const bool fits = query_.dim() == 4 && !causal_ && rules::keys_cut_alone(*out.query, *out.key, *out.value, sequence_);
    return fits ? std::optional(out) : std::nullopt;
  }

  // Adds one guard to a graph: the graph then serves all lengths with the same answer.
  bool are_few_queries() const {
    const auto ranks = layout(key_).ranks_where([&](int64_t m) { return cuts(m); });
    return query_.sym_size(1) * query_.sym_size(-2) * (ranks * ranks) <= key_.sym_size(1) * key_.sym_size(-2);
  }

  // Whether a symbol is cut into equal pieces.
  static bool divides_evenly(const c10::SymInt& count, const Layout& layout, int64_t d) {
    return count.is_symbolic() && layout.is_even() && divides(layout.pieces_of(d), count);
  }

  // The layout of `t` with dim d in place of the cut sequence, its `count` groups of indices spread as evenly as possible.
  LayoutPtr along(const at::Tensor& t, int64_t d, const c10::SymInt& symbol) const {
    auto to = as_shard_tensor(t)->layout_ptr();
    const auto pieces = to->ranks_where([&](int64_t m) { return cuts(m) || to->placement(m).is_shard(d); });
    bool nested = symbol.is_symbolic() && divides(pieces, symbol); // then all cuts are even
    const auto count = nested ? 1 : symbol.guard_int(__FILE__, __LINE__);
    const auto group = nested ? 1 : t.sym_size(d).guard_int(__FILE__, __LINE__) / count;
    for (int64_t m = 0; m < to->ndim(); ++m) {
      if (cuts(m)) {
        to = to->with(m, Placement::shard(d), nested ? nullptr : evenly(count, to->mesh().size(m), group));
      } else if (nested && to->placement(m).is_shard(d)) {
        to = to->with(m, to->placement(m));
      }
      nested = nested || to->placement(m).is_shard(d);
    }
    return to;
  }

  static Cut evenly(int64_t count, int64_t pieces, int64_t group) {
    std::vector<int64_t> sizes;
    for (int64_t i = 0; i < pieces; ++i) {
      sizes.push_back(((i + 1) * count / pieces - i * count / pieces) * group);
    }
    return std::make_shared<const PieceSizes>(std::move(sizes));
  }

  // The work of the busiest rank, as a multiple of the average.
  static double imbalance(const Layout& to, int64_t d, int64_t count) {
    const auto& mesh = to.mesh();
    int64_t most = 0;
    for (int64_t i = 0; i < mesh.size(); ++i) {
      most = std::max(most, to.local_size(d, count, mesh.coordinate_at(i)));
    }
    return static_cast<double>(most) * static_cast<double>(to.pieces_of(d)) / static_cast<double>(count);
  }

  // In a graph a tensor's sizes may still have the form of symbols after these have become numbers.
  static int64_t extent(const at::Tensor& t, int64_t d) {
    return t.sym_size(d).guard_int(__FILE__, __LINE__);
  }
  static int64_t numel(const at::Tensor& t) {
    return t.sym_numel().guard_int(__FILE__, __LINE__);
  }
  static double bytes(const at::Tensor& t) {
    return static_cast<double>(numel(t) * static_cast<int64_t>(t.element_size()));
  }
  static double cost(const Layout& from, const Layout& to, double bytes) {
    return &from == &to ? 0 : plan_for(from, to, bytes)->cost;
  }
  double flops() const {
    const auto pairs =
        static_cast<double>(numel(query_) / std::max<int64_t>(extent(query_, -1), 1)) * static_cast<double>(extent(key_, -2));
    const auto features = static_cast<double>(extent(query_, -1) + extent(value_, -1));
    return 3.5 * 2 * pairs * features * (causal_ ? 0.5 : 1); // forward and backward
  }
  // The cost, in bytes, of the busiest rank's extra work.
  double cost_of_excess(double imbalance) const {
    return (imbalance - 1) * flops() / static_cast<double>(layout(query_).mesh().size()) / kFlopsPerByte;
  }

  // Every tensor that moves in the forward moves back in the backward.
  double cost_of_spreading(const AttentionLayouts& to, int64_t d) const {
    const auto moves =
        cost(layout(query_), *to.query, bytes(query_)) + cost(layout(key_), *to.key, bytes(key_)) +
        cost(layout(value_), *to.value, bytes(value_)) +
        cost(*to.query, layout(query_), bytes(query_) / std::max<double>(extent(query_, -1), 1) * extent(value_, -1));
    return 2 * moves + cost_of_excess(imbalance(*to.key, d, extent(key_, d)));
  }

  // With a causal mask, the rank with the last queries has the most work.
  double cost_of_gathering() const {
    const auto& queries = layout(query_);
    double idle = 1;
    for (int64_t m = 0; m < queries.ndim(); ++m) {
      const auto n = static_cast<double>(queries.mesh().size(m));
      const bool shared = queries.placement(m).is_shard();
      idle *= !cuts(m) ? 1 : !shared ? n : causal_ ? (2 * n - 1) / n : 1;
    }
    return 2 * (cost(layout(key_), *whole(key_), bytes(key_)) + cost(layout(value_), *whole(value_), bytes(value_))) +
           cost_of_excess(idle);
  }

  // Keys and values travel in the forward and again in the backward, and their gradients come back. With a causal mask, half of
  // them do, and some queries (ring.h balances the work). About half of that time is hidden behind computing.
  double cost_of_ring() const {
    double n = 1, others = 1; // ranks of a ring; rings
    for (int64_t m = 0; m < layout(key_).ndim(); ++m) {
      const auto size = static_cast<double>(layout(key_).mesh().size(m));
      n *= cuts(m) ? size : 1;
      others *= !cuts(m) && layout(key_).placement(m).is_shard() ? size : 1;
    }
    const auto keys = 3 * (bytes(key_) + bytes(value_));
    const auto sent = causal_ ? keys / 2 + 1.5 * bytes(query_) : keys;
    return 2 * n * kLatency + sent * (n - 1) / n / others / 2;
  }

  // Each rank's results are gathered, and the queries' gradients added up.
  double cost_of_merging(const AttentionLayouts& to) const {
    double held = bytes(query_), made = bytes(query_) / std::max<double>(extent(query_, -1), 1) * (extent(value_, -1) + 1);
    int64_t ranks = 1;
    for (int64_t m = 0; m < layout(key_).ndim(); ++m) {
      const auto size = layout(key_).mesh().size(m);
      ranks *= cuts(m) ? size : 1;
      held /= to.query->placement(m).is_shard() ? static_cast<double>(size) : 1;
      made /= to.query->placement(m).is_shard() ? static_cast<double>(size) : 1;
    }
    return 2 * cost(layout(query_), *to.query, bytes(query_)) + cost_of(StepKind::AllGather, made, ranks) +
           cost_of(StepKind::AllReduce, held, ranks);
  }

  LayoutPtr whole(const at::Tensor& t) const {
    return layout(t).whole_along(sequence_);
  }

  const at::Tensor &query_, &key_, &value_;
  bool causal_;
  int64_t sequence_;
};

bool is_placed(const at::Tensor& t, int64_t ndim, const MeshPtr& mesh) {
  const auto* impl = as_shard_tensor(t);
  return impl && t.dim() == ndim && impl->layout().mesh_ptr() == mesh && !t._fw_grad(0).defined();
}

const std::string& name() {
  static const std::string op = "aten::scaled_dot_product_attention";
  return op;
}

at::Tensor moved(const at::Tensor& t, const LayoutPtr& to, const char* argument, const char* why) {
  return as_shard_tensor(t)->layout_ptr() == to ? t : redistribute_for({name(), argument, why}, t, to);
}

thread_local std::unordered_set<int64_t> t_told; // layouts of keys
thread_local int64_t t_told_since = -1;

// Tells observers of a gather, once per layout on this thread, as other ops do once per solution.
void tell_if_gathered(const at::Tensor& key, const AttentionLayouts& places) {
  const auto& have = as_shard_tensor(key)->layout();
  if (places.key->shards(key.dim() - 2) || &have == places.key.get() || places.why == kWholeSequences) {
    return;
  }
  if (t_told_since != times_cleared()) {
    t_told_since = times_cleared();
    t_told.clear();
  }
  if (t_told.insert(have.id()).second) {
    on_gather(name(), places.why, "key: " + have.str());
  }
}

// The layout of the result: that of the queries before they moved.
LayoutPtr home(const at::Tensor& query) {
  const auto& have = as_shard_tensor(query)->layout();
  const auto is_such = [&](int64_t m) { return have.placement(m).is_partial() || have.placement(m).is_shard(query.dim() - 1); };
  return have.with_where(is_such, Placement::replicate());
}

// The number of keys that causal queries see, which is the number of queries; the other keys need not move. Nothing if all keys
// are used.
std::optional<c10::SymInt> count_of_seen(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const auto &queries = query.sym_size(-2), &keys = key.sym_size(-2);
  const auto is_cut = [](const at::Tensor& t) { return as_shard_tensor(t)->layout().shards(t.dim() - 2); };
  const bool fewer = !queries.is_symbolic() && !keys.is_symbolic() && queries < keys && (is_cut(key) || is_cut(value));
  return fewer ? std::optional(queries) : std::nullopt;
}

at::Tensor attention(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale,
    bool enable_gqa) {
  // torch's version makes plain zeros if there are no queries or no keys.
  const bool no_scores = query.sym_numel() == 0 || key.sym_numel() == 0;
  if (no_scores && query.dim() > 1 && query.sym_size(-1) != 0) {
    return std::get<0>(attention_math(query, key, value, {}, 0, false, {}, scale, enable_gqa));
  }
  const auto whole_sequences = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return at::compositeimplicitautograd::scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa);
  };
  const auto* impl = as_shard_tensor(query);
  const bool placed = impl && !no_scores && query.dim() > 2 && is_placed(query, query.dim(), impl->layout().mesh_ptr()) &&
                      is_placed(key, query.dim(), impl->layout().mesh_ptr()) &&
                      is_placed(value, query.dim(), impl->layout().mesh_ptr());
  const auto seen = placed && is_causal ? count_of_seen(query, key, value) : std::nullopt;
  const auto seen_keys = seen ? key.narrow_symint(-2, 0, *seen) : key,
             seen_values = seen ? value.narrow_symint(-2, 0, *seen) : value;
  const auto places = placed ? AttentionPlanner(query, seen_keys, seen_values, is_causal).decide() : std::nullopt;
  if (!places) {
    return whole_sequences(query, seen_keys, seen_values);
  }
  tell_if_gathered(seen_keys, *places);
  const auto q = moved(query, places->query, "query", places->why), k = moved(seen_keys, places->key, "key", places->why),
             v = moved(seen_values, places->value, "value", places->why);
  const auto out = whole_sequences(q, k, v);
  return moved(out, home(query), "output", "it is placed as the queries were");
}

} // namespace

const Formula formulas::attention = formula<&shardtensor::attention>;
const Formula formulas::attention_math = formula<&shardtensor::attention_math>;

} // namespace shardtensor
