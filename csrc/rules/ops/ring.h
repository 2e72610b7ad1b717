// Kernels of fused attention whose queries are cut along the sequence. Each rank has some queries and some keys, the pieces of
// two layouts, in any sizes. Blocks of scores are computed by torch's own kernel, and joined by the logs of their sums.
#pragma once

#include "rules/rule.h"

namespace shardtensor::rules {

// Whether queries, keys and values of these layouts can take part: the same mesh dims cut the sequence, which is dim `sequence`,
// into one run of places per rank, and keys and values are cut alike.
bool cut_together(const Layout& q, const Layout& k, const Layout& v, int64_t sequence);

// Whether keys and values of these layouts are cut alike along the sequence, and queries are whole on all ranks that have parts
// of one sequence of keys: each rank can then attend to its own keys.
bool keys_cut_alone(const Layout& q, const Layout& k, const Layout& v, int64_t sequence);

// Rows of a mask that let no key through: torch's kernels return arbitrary values for them.
at::Tensor blind_rows(const at::Tensor& mask);

void attend(KernelRun& run);
void attend_backward(KernelRun& run);

// ---- who computes what: integer arithmetic on every rank's pieces ----

// Queries `q` and keys `k`, by their places in the sequence. Causal: both begin at one place, and no query sees a later key.
struct AttentionBlock {
  Interval q, k;
  bool causal;
};
// The blocks with the scores of queries `q` and keys `k` that count: at most two.
c10::SmallVector<AttentionBlock, 2> blocks_of(Interval q, Interval k, bool causal);

// How the ranks share the work: for some queries of a rank, its last ones, the rank that holds the keys computes the attention.
// These queries travel to the keys, and the results travel back.
class WorkShares {
 public:
  // Gives all ranks the same work, as far as the pieces of queries and keys allow. Without `balance`, no rank computes for
  // others.
  WorkShares(c10::ArrayRef<Interval> queries, c10::ArrayRef<Interval> keys, bool causal, bool balance);

  // The queries of rank i whose attention to the keys of rank j is computed by rank j (lent), and by rank i (kept).
  Interval lent(size_t i, size_t j) const;
  Interval kept(size_t i, size_t j) const;

 private:
  int64_t& rows(size_t i, size_t j) {
    return rows_[i * queries_.size() + j];
  }
  std::vector<Interval> queries_;
  std::vector<int64_t> rows_;
};

} // namespace shardtensor::rules
