// The cuts of a call's factors, and of the dims that carry them.
#pragma once

#include "rules/resolve/choices.h"

namespace shardtensor::rules {

// A piece of a dim, in units of `each` indices; indices that are left over count to the next piece.
inline Interval in_units(const Interval& piece, int64_t each) {
  const auto start = piece.start / each;
  return {start, (piece.end()) / each - start};
}

// How many indices of the window are below `at`. Symbols are compared, which guards the graph: the result is a number for all
// sizes for which the window is on the same side of `at`.
c10::SymInt window_before(const Dim::SymWindow& window, const c10::SymInt& at);

class FactorCuts {
 public:
  explicit FactorCuts(const Choices& choices)
      : call_(choices.call), rule_(choices.rule), mesh_(choices.call.mesh), choices_(choices.made), cuts_(choices.cuts) {}

  // The cut in units of the factor: null is even in those units.
  Cut factor_cut(int64_t m) const;
  Cut dim_cut(const Dim& dim, int64_t m) const;
  // Whether every piece of operand i along dim d holds whole indices of its factor.
  bool aligned(size_t i, int64_t d, int64_t m) const;
  c10::SymInt factor_size(int64_t f) const;
  // The layout of the factor alone, as if it were dim 0 of a tensor. Windows, inner sizes and halos are computed from it.
  LayoutPtr factor_layout(int64_t f) const;

 private:
  // Whether all pieces of operand i along dim d are equal and hold whole indices of its factor. Asks no rank's size.
  bool even_and_divisible(size_t i, int64_t d) const;
  // The sizes of a cut as a table, even ones too: one row per coordinate of the earlier mesh dims that cut the dim.
  SymSizes piece_sizes(const Layout& layout, int64_t d, const c10::SymInt& size, int64_t m) const;
  // Whether the earlier mesh dims that shard the factor are those that cut the donor's dim. Only then do the rows of the two
  // cuts have the same meaning.
  bool nested_alike(int64_t m) const;
  // Whether some operand has only a part of the factor.
  bool has_windows(int64_t f) const;
  // In numbers, unless it is one of equal pieces of a symbol.
  SymInterval piece_of(const Layout& layout, int64_t d, const c10::SymInt& size, const Coordinate& c, int64_t end) const;
  // A cut of the factor at mesh dim m that keeps the pieces of all operands on their ranks, and is otherwise as even as
  // possible. Null, which is even, if there is none (cat of two tensors with rows on the same ranks).
  Cut cut_around(int64_t m, int64_t f) const;
  // Operand i's pieces stay if each piece j of the factor's interval `whole` begins in [least[j], most[j]]. False: they cannot
  // stay.
  bool bound_boundaries(
      size_t i, int64_t d, int64_t m, Coordinate& c, const SymInterval& whole, SymSizes& least, SymSizes& most) const;
  // The same for a dim that lies at one index of the factor (Dim::at).
  bool bound_holder(
      size_t i, int64_t d, int64_t m, Coordinate& c, const SymInterval& whole, SymSizes& least, SymSizes& most) const;
  // The factor's cut that follows the donor's, if the donor is read through windows.
  Cut cut_of_readers(const Choice& c, int64_t m) const;
  // Whether mesh dim m cuts one of the factors that the dim lies along.
  bool cuts_along(int64_t m, const Dim& dim) const;
  // How many indices of the dim the piece of its factor at mesh dims [0, m] makes.
  c10::SymInt measure(const Layout& layout, const c10::SymInt& size, const Coordinate& c, int64_t m, const Dim& dim) const;
  static c10::SymInt window_count(const Dim::SymWindow& w, const SymInterval& piece);
  // Calls f for each coordinate of the mesh dims before m that cut the dim, as cuts(k) tells.
  template <typename Cuts, typename F>
  void each_row(Cuts cuts, int64_t m, F f) const;

  const Call& call_;
  const Rule& rule_;
  const Mesh& mesh_;
  const c10::SmallVector<Choice, 3>& choices_;
  const c10::SmallVector<Cut, 3>& cuts_;
};

} // namespace shardtensor::rules
