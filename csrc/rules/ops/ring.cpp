#include "rules/ops/ring.h"

#include "comm/bytes.h"
#include "comm/comm.h"
#include "comm/tensor_kind.h"
#include "redistribute/redistribute.h"
#include "rules/deferred_op.h"
#include "rules/kernel_utils.h"
#include "rules/pad_empty.h"
#include "tensor/symbolic.h"

#include <ATen/ATen.h>

#include <array>
#include <limits>
#include <map>

namespace shardtensor::rules {

namespace {

// From `from` on, and up to `to`.
Interval between(int64_t from, int64_t to) {
  return {from, std::max<int64_t>(to - from, 0)};
}

// The number of scores that are not masked.
int64_t work(Interval q, Interval k, bool causal) {
  int64_t sum = 0;
  for (const auto& b : blocks_of(q, k, causal)) {
    const auto short_rows = std::min(b.q.length, b.k.length); // of 1, 2, 3, ... keys
    sum += b.causal ? short_rows * (short_rows + 1) / 2 + (b.q.length - short_rows) * b.k.length : b.q.length * b.k.length;
  }
  return sum;
}

} // namespace

bool cut_together(const Layout& q, const Layout& k, const Layout& v, int64_t sequence) {
  bool any = false;
  for (int64_t m = 0; m < q.ndim(); ++m) {
    const auto &of_q = q.placement(m), &of_k = k.placement(m), &of_v = v.placement(m);
    const bool cut = of_q.is_shard(sequence);
    const bool alike = of_k.is_shard(sequence) == cut && of_v.is_shard(sequence) == cut;
    const bool one_run = of_q.split_factor == 1 && of_k.split_factor == 1 && of_v.split_factor == 1;
    if (!alike || (cut && !(one_run && same_cut(k.cut(m), v.cut(m))))) {
      return false;
    }
    any = any || (cut && q.mesh().size(m) > 1);
  }
  return any;
}

bool keys_cut_alone(const Layout& q, const Layout& k, const Layout& v, int64_t sequence) {
  bool any = false;
  for (int64_t m = 0; m < q.ndim(); ++m) {
    const auto &of_q = q.placement(m), &of_k = k.placement(m), &of_v = v.placement(m);
    if (of_k.is_shard(sequence) != of_v.is_shard(sequence)) {
      return false;
    }
    if (of_k.is_shard(sequence)) {
      if (!of_q.is_replicate() || of_k.split_factor != 1 || of_v.split_factor != 1 || !same_cut(k.cut(m), v.cut(m))) {
        return false;
      }
      any = any || q.mesh().size(m) > 1;
    }
  }
  return any;
}

c10::SmallVector<AttentionBlock, 2> blocks_of(Interval q, Interval k, bool causal) {
  c10::SmallVector<AttentionBlock, 2> out;
  const auto add = [&](Interval queries, Interval keys, bool later) {
    if (queries.length > 0 && keys.length > 0) {
      out.push_back({queries, keys, later});
    }
  };
  if (!causal) {
    add(q, k, false);
    return out;
  }
  q = between(std::max(q.start, k.start), q.end()); // queries before all keys see none
  const auto seen = between(k.start, std::min(k.end(), q.end()));
  if (seen.end() <= q.start + 1) {
    add(q, seen, false);
  } else {
    add(q, between(seen.start, q.start), false);
    add(q, between(q.start, seen.end()), true);
  }
  return out;
}

WorkShares::WorkShares(c10::ArrayRef<Interval> queries, c10::ArrayRef<Interval> keys, bool causal, bool balance)
    : queries_(queries.begin(), queries.end()), rows_(queries.size() * queries.size(), 0) {
  const auto n = queries.size();
  if (!balance) {
    return;
  }
  std::vector<int64_t> pairs(n * n), lent(n * n, 0), loads(n, 0);
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < n; ++j) {
      auto& pair = pairs[i * n + j];
      pair = work(queries[i], keys[j], causal);
      lent[i * n + j] = causal && i != j ? pair / 2 : 0; // balances even cuts
      loads[i] += pair - lent[i * n + j];
      loads[j] += lent[i * n + j];
    }
  }
  constexpr int kSweeps = 8;
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    for (size_t i = 0; i < n; ++i) {
      for (size_t j = 0; j < n; ++j) {
        auto& now = lent[i * n + j];
        const auto more = i == j ? 0 : std::clamp((loads[i] - loads[j]) / 2, -now, pairs[i * n + j] - now);
        now += more;
        loads[i] -= more;
        loads[j] += more;
      }
    }
  }
  constexpr int64_t kLeast = 16; // less than one such part is not worth a message
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < n; ++j) {
      const auto pair = pairs[i * n + j], want = lent[i * n + j];
      if (want * kLeast < pair || want == 0) {
        continue;
      }
      int64_t least = 0, most = queries[i].length; // the fewest rows with as much work
      while (least < most) {
        const auto middle = (least + most) / 2;
        const auto got = work({queries[i].end() - middle, middle}, keys[j], causal);
        got < want ? least = middle + 1 : most = middle;
      }
      rows(i, j) = least;
    }
  }
}

at::Tensor blind_rows(const at::Tensor& mask) {
  return (mask.scalar_type() == at::kBool ? mask.logical_not() : mask.isneginf()).all(-1);
}

Interval WorkShares::lent(size_t i, size_t j) const {
  const auto n = rows_[i * queries_.size() + j];
  return {queries_[i].end() - n, n};
}

Interval WorkShares::kept(size_t i, size_t j) const {
  return {queries_[i].start, queries_[i].length - rows_[i * queries_.size() + j]};
}

namespace {

constexpr int64_t kSequence = 2; // of queries, keys and values [batch, heads, sequence, features]

// ---- messages of several tensors ----

class Mailbox {
 public:
  // To and from these global ranks.
  explicit Mailbox(c10::ArrayRef<int64_t> ranks) : ranks_(ranks) {}

  void send(size_t to, const at::Tensor& t) {
    by_rank_[ranks_[to]].sent.push_back(t);
  }
  // `into` has its sizes and dtype at once, and its values after the wait for what start() returns.
  void receive(size_t from, at::Tensor& into) {
    by_rank_[ranks_[from]].received.push_back(&into);
  }

  comm::InFlight start(const Mesh& mesh, const at::TensorOptions& options) {
    std::vector<int64_t> peers, in_sizes, out_sizes;
    for (const auto& [rank, parts] : by_rank_) {
      int64_t in = 0, out = 0;
      for (const auto& t : parts.sent) {
        in += room(t);
      }
      for (const auto* t : parts.received) {
        out += room(*t);
      }
      peers.push_back(rank);
      in_sizes.push_back(in);
      out_sizes.push_back(out);
    }
    const auto bytes = options.dtype(at::kByte);
    auto in = at::empty({c10::sum_integers(in_sizes)}, bytes), out = at::empty({c10::sum_integers(out_sizes)}, bytes);
    int64_t in_at = 0, out_at = 0;
    const auto slot = [](const at::Tensor& buffer, int64_t& at, const at::Tensor& like) {
      auto part = buffer.narrow(0, at, like.numel() * like.element_size()).view(like.scalar_type()).view(like.sizes());
      at += room(like);
      return part;
    };
    for (auto& [rank, parts] : by_rank_) {
      for (const auto& t : parts.sent) {
        slot(in, in_at, t).copy_(t);
      }
      for (auto* t : parts.received) {
        *t = slot(out, out_at, *t);
      }
    }
    return comm::start({
        .kind = comm::CollectiveKind::AllToAll,
        .mesh = MeshPtr::reclaim_copy(&mesh),
        .in = in,
        .out = out,
        .in_sizes = in_sizes,
        .out_sizes = out_sizes,
        .peers = peers,
        .callers = mesh.size(),
    });
  }

 private:
  static int64_t room(const at::Tensor& t) {
    return comm::rounded_up(t.numel() * static_cast<int64_t>(t.element_size()), comm::kStart);
  }

  struct PeerTensors {
    std::vector<at::Tensor> sent;
    std::vector<at::Tensor*> received;
  };
  c10::ArrayRef<int64_t> ranks_;
  std::map<int64_t, PeerTensors> by_rank_; // in an order that all know
};

// ---- one call ----

// The rows of `t` at the places `at` of the sequence; `t` is a piece that begins at `start`.
at::Tensor rows(const at::Tensor& t, const Interval& at, int64_t start) {
  return at.length == t.size(kSequence) ? t : t.narrow(kSequence, at.start - start, at.length);
}

at::Tensor resized(const at::Tensor& like, int64_t length) {
  auto sizes = like.sizes().vec();
  sizes[kSequence] = length;
  return like.new_empty(sizes);
}

// The sum of parts, each of some rows, in float32 at least.
class RowSum {
 public:
  RowSum(at::Tensor like, int64_t start) : like_(std::move(like)), start_(start) {}

  void add(const at::Tensor& part, const Interval& at) {
    const auto wide = accumulate_type(like_.scalar_type());
    if (!sum_.defined() && at.length == like_.size(kSequence)) {
      sum_ = part.to(wide);
      return;
    }
    if (!sum_.defined()) {
      sum_ = at::zeros(like_.sizes(), like_.options().dtype(wide));
    }
    rows(sum_, at, start_).add_(part);
  }
  at::Tensor get() {
    return sum_.defined() ? sum_.to(like_.scalar_type()) : at::zeros(like_.sizes(), like_.options());
  }

 private:
  at::Tensor like_;
  int64_t start_;
  at::Tensor sum_;
};

// Attention of some queries to one block of keys after the other: the mean of the results, weighted by the sums of exponentials.
class WeightedMean {
 public:
  explicit WeightedMean(const Interval& rows) : rows_(rows) {}

  void add(const at::Tensor& part, const at::Tensor& log_sum, const Interval& at) {
    const auto wide = accumulate_type(part.scalar_type());
    if (!mean_.defined() && at.length == rows_.length) {
      mean_ = part.to(wide);
      log_ = log_sum;
      return;
    }
    if (!mean_.defined()) {
      mean_ = at::zeros(resized(part, rows_.length).sizes(), part.options().dtype(wide));
      log_ = at::full(resized(log_sum, rows_.length).sizes(), -std::numeric_limits<double>::infinity(), log_sum.options());
    }
    const auto before = rows(log_, at, rows_.start);
    const auto now = at::logaddexp(before, log_sum);
    const auto weight = [&](const at::Tensor& log) { return (log - now).exp_().nan_to_num_(0).unsqueeze(-1).to(wide); };
    rows(mean_, at, rows_.start).mul_(weight(before)).addcmul_(part.to(wide), weight(log_sum));
    before.copy_(now);
  }
  const at::Tensor& mean() const {
    return mean_;
  }
  const at::Tensor& log() const {
    return log_;
  }

 private:
  Interval rows_;
  at::Tensor mean_, log_;
};

const KernelRun::OperandInfo& operand_of(const KernelRun& run, const std::string& wanted) {
  size_t nth = 0;
  const auto& arguments = run.op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == wanted) {
      return run.operands[nth];
    }
    const auto& value = run.arg(i);
    nth += value.isTensor() && value.toTensor().defined();
  }
  TORCH_INTERNAL_ASSERT(false, run.op.schema().name(), " has no argument ", wanted);
}

// Undefined if it is None, or if the op has no such argument. The other one: with numbers for symbols.
at::Tensor tensor_in_symbols(const KernelRun& run, const char* name) {
  const auto at = argument(run, name);
  return at < 0 ? at::Tensor() : run.arg(at).toOptional<at::Tensor>().value_or(at::Tensor());
}
at::Tensor tensor_of(const KernelRun& run, const char* name) {
  const auto found = tensor_in_symbols(run, name);
  return found.defined() && has_symbols(found) ? in_numbers(found) : found;
}

// The mesh dims (bits) along which ranks have other pieces of the same sequences.
uint64_t mesh_dims_of_ring(const KernelRun& run) {
  const auto &of_q = *operand_of(run, "query").layout, &of_k = *operand_of(run, "key").layout;
  uint64_t out = 0;
  for (int64_t m = 0; m < of_q.ndim(); ++m) {
    const bool both = of_q.placement(m).is_shard(kSequence) && of_k.placement(m).is_shard(kSequence);
    out |= uint64_t{both && of_q.mesh().size(m) > 1} << m;
  }
  return out;
}

// The further results of an op besides its output and its logs, such as seeds: from a call with one query and one key.
std::vector<c10::IValue> rest_of(const KernelRun& run) {
  constexpr size_t kOurs = 2;
  const auto& schema = run.op.schema();
  if (schema.returns().size() == kOurs) {
    return {};
  }
  std::vector<c10::IValue> stack;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& t = run.arg(i);
    if (!t.isTensor() || !t.toTensor().defined()) {
      stack.push_back(t);
    } else if (schema.arguments()[i].name() == "attn_mask") {
      stack.emplace_back();
    } else {
      stack.emplace_back(t.toTensor().new_zeros_symint({1, 1, 1, t.toTensor().sym_size(-1)}));
    }
  }
  run.op.callBoxed(&stack);
  return {stack.begin() + kOurs, stack.end()};
}

// The call and all ranks' pieces.
class Ring {
 public:
  explicit Ring(KernelRun& run)
      : q(tensor_of(run, "query")),
        k(tensor_of(run, "key")),
        v(tensor_of(run, "value")),
        causal(run.arg(argument(run, "is_causal")).toBool()),
        run_(run),
        mask_(tensor_of(run, "attn_mask")),
        efficient_(run.op.schema().name().find("efficient") != std::string::npos),
        cudnn_(run.op.schema().name().find("cudnn") != std::string::npos) {
    const auto &of_q = operand_of(run, "query"), &of_k = operand_of(run, "key");
    const auto& mesh = run.mesh();
    const auto around = mesh_dims_of_ring(run);
    for (int64_t i = 0; i < mesh.size(); ++i) {
      const auto at = mesh.coordinate_at(i);
      bool together = true;
      for (int64_t m = 0; m < mesh.ndim(); ++m) {
        together = together && (at[m] == mesh.coordinate()[m] || (around >> m & 1));
      }
      if (!together) {
        continue;
      }
      if (at == mesh.coordinate()) {
        me = ranks.size();
      }
      ranks.push_back(mesh.rank_at(at));
      queries.push_back(of_q.layout->intervals(kSequence, of_q.size(kSequence), at)[0]);
      keys.push_back(of_k.layout->intervals(kSequence, of_k.size(kSequence), at)[0]);
    }
  }

  at::Tensor q, k, v;
  bool causal;
  std::vector<int64_t> ranks; // those that have other pieces of the same sequences, and this one: number `me` among them
  size_t me = 0;
  std::vector<Interval> queries, keys; // theirs

  size_t size() const {
    return ranks.size();
  }
  const Mesh& mesh() const {
    return run_.mesh();
  }
  at::Tensor tensor(const char* name) const {
    return tensor_of(run_, name);
  }
  // A mask has rows for this rank's queries only.
  WorkShares shares() const {
    return {queries, keys, causal, !mask_.defined()};
  }
  // The keys of rank j that these queries see.
  Interval seen(const Interval& at, size_t j) const {
    const auto blocks = blocks_of(at, keys[j], causal);
    return blocks.empty() ? Interval{keys[j].start, 0} : between(blocks.front().k.start, blocks.back().k.end());
  }

  // The logs of the sums, one per row, as a kernel gives them, and as it takes them: the efficient one pads the rows to a
  // multiple of 32, cuDNN's have one column.
  at::Tensor logs(const at::Tensor& given, int64_t rows) const {
    return (cudnn_ ? given.squeeze(-1) : given).narrow(kSequence, 0, rows);
  }
  at::Tensor logs_to_return(const at::Tensor& logs) const {
    return cudnn_ ? logs.unsqueeze(-1) : logs;
  }
  at::Tensor logs_to_take(const at::Tensor& logs) const {
    constexpr int64_t kAligned = 32;
    const auto more = (kAligned - logs.size(kSequence) % kAligned) % kAligned;
    const bool pads = efficient_ && more && !at::hasHIP();
    return logs_to_return(pads ? at::constant_pad_nd(logs, {0, more}, std::numeric_limits<double>::infinity()) : logs)
        .contiguous();
  }
  // The efficient kernel computes the strides of the output from its sizes.
  at::Tensor out_to_take(const at::Tensor& out) const {
    return efficient_ ? out.transpose(1, 2).contiguous().transpose(1, 2) : out;
  }
  at::Tensor upstream() const {
    return tensor(efficient_ ? "grad_out_" : "grad_out");
  }
  // How many gradients the op returns.
  size_t gradients() const {
    return run_.op.schema().returns().size();
  }

  // Runs the op on a block, with these tensors in place of its arguments. Returns its results.
  std::vector<c10::IValue> call(const std::map<std::string, at::Tensor>& tensors, const AttentionBlock& b) const {
    std::vector<c10::IValue> stack;
    const auto& arguments = run_.op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto& name = arguments[i].name();
      const auto found = tensors.find(name);
      if (found != tensors.end()) {
        stack.emplace_back(found->second.defined() ? c10::IValue(not_empty(found->second)) : c10::IValue());
      } else if (name == "is_causal") {
        stack.emplace_back(b.causal);
      } else if (name == "compute_log_sumexp" || name == "compute_logsumexp") {
        stack.emplace_back(true);
      } else if (name == "max_q" || name == "max_k") {
        stack.emplace_back((name == "max_q" ? b.q : b.k).length);
      } else if (name == "attn_mask" && mask_.defined()) {
        const auto mask = mask_of(b);
        stack.emplace_back(mask.dim() == 4 ? not_empty(mask) : mask);
      } else {
        stack.push_back(run_.arg(i));
      }
    }
    run_.op.callBoxed(&stack);
    for (auto& value : stack) {
      if (q.numel() == 0 && value.isTensor() && value.toTensor().dim() > 2) {
        value = as_empty(value.toTensor());
      }
    }
    return stack;
  }

  // Marks the queries that see no key of a block, by the rows of the mask; undefined without a mask.
  at::Tensor blind(const AttentionBlock& b) const {
    return mask_.defined() ? blind_rows(mask_of(b)) : at::Tensor();
  }

 private:
  at::Tensor mask_of(const AttentionBlock& b) const {
    const auto rows = mask_.size(-2) == 1 ? mask_ : mask_.narrow(-2, b.q.start - queries[me].start, b.q.length);
    return rows.size(-1) == 1 ? rows : rows.narrow(-1, b.k.start, b.k.length);
  }

  // The op refuses tensors without a batch or heads. Then no rank of the ring has any.
  static at::Tensor not_empty(const at::Tensor& t) {
    auto sizes = t.sizes().vec();
    if (sizes[0] && sizes[1]) {
      return t;
    }
    sizes[0] = std::max<int64_t>(sizes[0], 1);
    sizes[1] = std::max<int64_t>(sizes[1], 1);
    return t.new_zeros(sizes);
  }
  at::Tensor as_empty(const at::Tensor& t) const {
    return t.narrow(0, 0, std::min(t.size(0), q.size(0))).narrow(1, 0, std::min(t.size(1), q.size(1)));
  }

  KernelRun& run_;
  at::Tensor mask_;
  bool efficient_, cudnn_;
};

// One step of the ring. In step s, rank r sends to rank r + s and receives from rank r - s: keys for the receiver's queries, or
// queries for the receiver's keys. Results go back two messages later: one message is under way while they are computed.
struct RingStep {
  size_t to, from;
  // Keys that this rank sends (for queries that `to` keeps) and receives; queries that it lends and receives.
  Interval keys_out, keys_in, queries_out, queries_in;
};

RingStep step_of(const Ring& ring, const WorkShares& shares, size_t rank, size_t step) {
  const auto n = ring.size();
  RingStep s;
  s.to = (rank + step) % n;
  s.from = (rank + n - step) % n;
  s.keys_out = ring.seen(shares.kept(s.to, rank), rank);
  s.keys_in = ring.seen(shares.kept(rank, s.from), s.from);
  s.queries_out = shares.lent(rank, s.to);
  s.queries_in = shares.lent(s.from, rank);
  return s;
}

// Whether any rank sends queries, or keys if they count, in a step. All ranks of a mesh take part in a call, also those of other
// rings, which are alike.
bool travels(const Ring& ring, const WorkShares& shares, size_t step, bool keys) {
  for (size_t i = 0; i < ring.size(); ++i) {
    const auto s = step_of(ring, shares, i, step);
    if (s.queries_out.length || (keys && s.keys_out.length)) {
      return true;
    }
  }
  return false;
}

// A pass of the ring: `Pass` says what is sent, computed and returned in a step.
template <typename Pass>
void go_round(const Ring& ring, const WorkShares& shares, Pass& pass) {
  const auto n = ring.size();
  const auto mine = [&](size_t step) { return step_of(ring, shares, ring.me, step); };
  for (size_t now = 0; now <= n; ++now) {
    const bool sends = now + 1 < n && travels(ring, shares, now + 1, true);
    const bool returns = now > 1 && travels(ring, shares, now - 1, Pass::kGradients);
    Mailbox mail(ring.ranks);
    if (sends) {
      pass.send(mail, mine(now + 1));
    }
    if (returns) {
      pass.send_back(mail, mine(now - 1));
    }
    auto arrive = sends || returns ? mail.start(ring.mesh(), ring.q.options()) : comm::InFlight();
    if (now < n) {
      pass.work(mine(now));
    }
    arrive.wait();
    if (returns) {
      pass.take_back(mine(now - 1));
    }
    pass.turn();
  }
}

// Tensors sent to the rank that computes the block; undefined ones are not sent.
struct RingMessage {
  at::Tensor k, v;              // keys, for this rank's queries
  at::Tensor q, grad, out, log; // another rank's queries, for this rank's keys
};

class RingPass {
 public:
  RingPass(const Ring& ring, const WorkShares& shares)
      : ring_(ring), shares_(shares), queries_(ring.queries[ring.me]), keys_(ring.keys[ring.me]) {}

  void turn() {
    now_ = std::exchange(next_, {});
  }

 protected:
  void send_keys(Mailbox& mail, const RingStep& s) {
    for (const auto* t : {&ring_.k, &ring_.v}) {
      send_rows(mail, s.to, *t, s.keys_out, keys_.start);
    }
    receive(mail, s.from, s.keys_in, ring_.k, next_.k);
    receive(mail, s.from, s.keys_in, ring_.v, next_.v);
  }
  void send_queries(Mailbox& mail, const RingStep& s, const at::Tensor& t, at::Tensor& into) {
    send_rows(mail, s.to, t, s.queries_out, queries_.start);
    receive(mail, s.from, s.queries_in, t, into);
  }
  static void send_rows(Mailbox& mail, size_t to, const at::Tensor& t, const Interval& at, int64_t start) {
    if (at.length) {
      mail.send(to, rows(t, at, start));
    }
  }
  static void receive(Mailbox& mail, size_t from, const Interval& at, const at::Tensor& like, at::Tensor& into) {
    if (at.length) {
      into = resized(like, at.length);
      mail.receive(from, into);
    }
  }

  const Ring& ring_;
  const WorkShares& shares_;
  Interval queries_, keys_;
  RingMessage now_, next_;
};

class RingForward : public RingPass {
 public:
  static constexpr bool kGradients = false;
  RingForward(const Ring& ring, const WorkShares& shares) : RingPass(ring, shares), mean_(queries_) {}

  void send(Mailbox& mail, const RingStep& s) {
    send_keys(mail, s);
    send_queries(mail, s, ring_.q, next_.q);
  }

  void work(const RingStep& s) {
    if (s.from == ring_.me) {
      attend(mean_, ring_.q, queries_, ring_.k, ring_.v, keys_);
      return;
    }
    if (s.keys_in.length) {
      const auto kept = shares_.kept(ring_.me, s.from);
      attend(mean_, rows(ring_.q, kept, queries_.start), kept, now_.k, now_.v, s.keys_in);
    }
    if (s.queries_in.length) {
      attend(lent_.emplace(s.queries_in), now_.q, s.queries_in, ring_.k, ring_.v, keys_);
    }
  }

  void send_back(Mailbox& mail, const RingStep& s) {
    if (s.queries_in.length) {
      mail.send(s.from, lent_->mean().to(ring_.q.scalar_type()));
      mail.send(s.from, lent_->log());
    }
    if (s.queries_out.length) {
      auto sizes = resized(ring_.q, s.queries_out.length).sizes().vec();
      sizes.back() = ring_.v.size(-1);
      part_ = ring_.q.new_empty(sizes);
      sizes.pop_back();
      log_ = ring_.q.new_empty(sizes, at::TensorOptions().dtype(accumulate_type(part_.scalar_type())));
      mail.receive(s.to, part_);
      mail.receive(s.to, log_);
    }
  }
  void take_back(const RingStep& s) {
    if (s.queries_out.length) {
      mean_.add(part_, log_, s.queries_out);
    }
  }

  // In a graph.
  static void defer_call(KernelRun& run) {
    const auto q = tensor_in_symbols(run, "query");
    auto out = q.sym_sizes().vec(), logs = out;
    out.back() = tensor_in_symbols(run, "value").sym_size(-1);
    logs.pop_back();
    const bool cudnn = run.op.schema().name().find("cudnn") != std::string::npos;
    if (cudnn) {
      logs.emplace_back(1);
    }
    const auto rest = rest_of(run);
    rules::defer_call(run, {DeferredResult(std::move(out)), DeferredResult(std::move(logs), accumulate_type(q.scalar_type()))});
    run.stack.insert(run.stack.end(), rest.begin(), rest.end());
  }

  std::vector<c10::IValue> results() {
    if (rest_.empty()) { // the op knows what else it returns
      const auto one = [](const at::Tensor& t) { return resized(t, 1).zero_(); };
      rest_ = ring_.call(
          {{"query", one(ring_.q)}, {"key", one(ring_.k)}, {"value", one(ring_.v)}, {"attn_mask", {}}}, {{0, 1}, {0, 1}, false});
    }
    const auto none = [&](size_t i) { return rest_[i].toTensor().narrow(kSequence, 0, 0); };
    rest_[0] = queries_.length ? mean_.mean().to(ring_.q.scalar_type()) : none(0);
    rest_[1] = queries_.length ? ring_.logs_to_return(mean_.log()) : none(1);
    return std::move(rest_);
  }

 private:
  void attend(
      WeightedMean& mean,
      const at::Tensor& q,
      const Interval& at_q,
      const at::Tensor& k,
      const at::Tensor& v,
      const Interval& at_k) {
    for (const auto& b : blocks_of(at_q, at_k, ring_.causal)) {
      rest_ = ring_.call(
          {{"query", rows(q, b.q, at_q.start)}, {"key", rows(k, b.k, at_k.start)}, {"value", rows(v, b.k, at_k.start)}}, b);
      auto part = rest_[0].toTensor(), log = ring_.logs(rest_[1].toTensor(), b.q.length);
      if (const auto blind = ring_.blind(b); blind.defined()) {
        part = part.masked_fill(blind.unsqueeze(-1), 0);
        log = log.masked_fill(blind, -std::numeric_limits<double>::infinity());
      }
      mean.add(part, log, b.q);
    }
  }

  WeightedMean mean_;
  std::optional<WeightedMean> lent_;
  at::Tensor part_, log_; // of lent queries, on their way back
  std::vector<c10::IValue> rest_;
};

class RingBackward : public RingPass {
 public:
  static constexpr bool kGradients = true;
  RingBackward(const Ring& ring, const WorkShares& shares)
      : RingPass(ring, shares),
        grad_(ring.upstream()),
        out_(ring.tensor("out")),
        log_(ring.logs(ring.tensor("logsumexp"), queries_.length)),
        of_q_(ring.q, queries_.start),
        of_k_(ring.k, keys_.start),
        of_v_(ring.v, keys_.start) {}

  void send(Mailbox& mail, const RingStep& s) {
    send_keys(mail, s);
    send_queries(mail, s, ring_.q, next_.q);
    send_queries(mail, s, grad_, next_.grad);
    send_queries(mail, s, out_, next_.out);
    send_queries(mail, s, log_, next_.log);
  }

  void work(const RingStep& s) {
    const RingMessage own{ring_.k, ring_.v, ring_.q, grad_, out_, log_};
    if (s.from == ring_.me) {
      differentiate(own, queries_, own, keys_, of_q_, of_k_, of_v_);
      return;
    }
    if (s.keys_in.length) {
      const auto kept = shares_.kept(ring_.me, s.from);
      auto& k = k_guest_.emplace(now_.k, s.keys_in.start);
      auto& v = v_guest_.emplace(now_.v, s.keys_in.start);
      differentiate(own, kept, now_, s.keys_in, of_q_, k, v);
    }
    if (s.queries_in.length) {
      differentiate(now_, s.queries_in, own, keys_, q_guest_.emplace(now_.q, s.queries_in.start), of_k_, of_v_);
    }
  }

  void send_back(Mailbox& mail, const RingStep& s) {
    if (s.keys_in.length) {
      mail.send(s.from, k_guest_->get());
      mail.send(s.from, v_guest_->get());
    }
    if (s.queries_in.length) {
      mail.send(s.from, q_guest_->get());
    }
    receive(mail, s.to, s.keys_out, ring_.k, back_.k);
    receive(mail, s.to, s.keys_out, ring_.v, back_.v);
    receive(mail, s.to, s.queries_out, ring_.q, back_.q);
  }
  void take_back(const RingStep& s) {
    if (s.keys_out.length) {
      of_k_.add(back_.k, s.keys_out);
      of_v_.add(back_.v, s.keys_out);
    }
    if (s.queries_out.length) {
      of_q_.add(back_.q, s.queries_out);
    }
  }

  // In a graph.
  static void defer_call(KernelRun& run) {
    std::vector<std::optional<DeferredResult>> out(run.op.schema().returns().size()); // no gradient of a mask
    for (size_t i = 0; i < 3; ++i) {
      const auto t = tensor_in_symbols(run, std::array{"query", "key", "value"}[i]);
      out[i].emplace(t.sym_sizes().vec(), t.scalar_type());
    }
    rules::defer_call(run, out);
  }

  std::vector<c10::IValue> results() {
    std::vector<c10::IValue> out{of_q_.get(), of_k_.get(), of_v_.get()};
    out.resize(ring_.gradients(), at::Tensor()); // none of a mask
    return out;
  }

 private:
  // Adds the gradients from the queries of `a` and the keys of `b`.
  void differentiate(
      const RingMessage& a, const Interval& at_q, const RingMessage& b, const Interval& at_k, RowSum& q, RowSum& k, RowSum& v) {
    const auto start = &a == &now_ ? at_q.start : queries_.start;
    for (const auto& block : blocks_of(at_q, at_k, ring_.causal)) {
      const auto of = [&](const at::Tensor& t) { return rows(t, block.q, start); };
      const auto grads = ring_.call(
          {{"grad_out", of(a.grad)},
           {"grad_out_", of(a.grad)},
           {"query", of(a.q)},
           {"key", rows(b.k, block.k, at_k.start)},
           {"value", rows(b.v, block.k, at_k.start)},
           {"out", ring_.out_to_take(of(a.out))},
           {"logsumexp", ring_.logs_to_take(of(a.log))}},
          block);
      q.add(grads[0].toTensor(), block.q);
      k.add(grads[1].toTensor(), block.k);
      v.add(grads[2].toTensor(), block.k);
    }
  }

  at::Tensor grad_, out_, log_;
  RowSum of_q_, of_k_, of_v_;
  std::optional<RowSum> q_guest_, k_guest_, v_guest_;
  RingMessage back_;
};

template <typename Pass>
void run_pass(KernelRun& run) {
  if (!operand_of(run, "query").layout->shards(kSequence)) {
    return call_op_nonempty(run);
  }
  if (mesh_dims_of_ring(run) && is_traced(tensor_in_symbols(run, "query"))) {
    return Pass::defer_call(run); // single messages are no ops of a graph
  }
  const Ring ring(run);
  const auto shares = ring.shares();
  Pass pass(ring, shares);
  go_round(ring, shares, pass);
  run.returns(pass.results());
}

} // namespace

void attend(KernelRun& run) {
  run_pass<RingForward>(run);
}

void attend_backward(KernelRun& run) {
  run_pass<RingBackward>(run);
}

} // namespace shardtensor::rules
