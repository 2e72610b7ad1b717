// A sharding rule as data, and the view of an op's call that a rule function gets.
//
// A rule names factors. A factor is an index that runs through an op: `mm` is ik,kj->ij, three factors; each dim of each
// operand and result carries one. The placements that an op accepts, the placements of its results and the size of every rank's
// piece follow from that alone. resolve.h derives them for all ops; a rule file only says which dim carries which factor.
#pragma once

#include "layout/reach.h"
#include "layout/symbolic.h"
#include "tensor/dim_order.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <any>
#include <optional>
#include <utility>

namespace shardtensor::rules {

constexpr int16_t kNone = -1;

// A set of operands, any number of them. A literal names the first 64: 0b101.
class OperandSet {
 public:
  OperandSet(uint64_t bits = 0) : words_{bits} {} // NOLINT: the literal is the set
  static OperandSet first(size_t n) {
    OperandSet out;
    for (size_t i = 0; i < n; ++i) {
      out.add(i);
    }
    return out;
  }
  void add(size_t i) {
    words_.resize(std::max(words_.size(), i / 64 + 1), 0);
    words_[i / 64] |= uint64_t{1} << i % 64;
  }
  bool has(size_t i) const {
    return i / 64 < words_.size() && (words_[i / 64] >> i % 64 & 1);
  }
  bool empty() const {
    return words_.size() == 1 && !words_[0]; // operands are never removed
  }

 private:
  c10::SmallVector<uint64_t, 1> words_;
};

// How an index may be treated. By default it may be sharded.
struct Factor {
  // Never sharded: operands that cut it are gathered first.
  bool whole = false;
  // If it is sharded, the rule's kernel replaces the op on the local tensors.
  bool kernel = false;
  // If it is sharded, a result that lacks it holds summands (Partial). Without `reduce`, such a result is Replicate: the kernel
  // must make it whole.
  std::optional<ReduceOp> reduce;
  // The result has one index of it at each element, so only that index's rank has a value (Placement::picked).
  bool picked = false;
  // The order, if `reduce` is Norm.
  double norm_order = 2.0;
  // The number of indices, if no operand dim has all of them (cat: each operand has a window). -1: taken from the operands.
  c10::SymInt size = -1;
};

// One dim of an operand or a result.
struct Dim {
  int16_t factor = kNone; // kNone: the dim stays whole (broadcast, size 1, made by the op)
  // In an operand: each index of the factor reads a run of the dim's indices (a window), Rule::reaches[reach]. If the factor is
  // sharded, each rank gets its piece with a halo, and with cells of padding at the edges of the whole. Then the factor has a
  // size (Factor::size), and its kernel runs. A result's dim has a reach only if it is cut like the operand's
  // (Operand::kept_cut). In a backward rule the factor indexes the input, not the output.
  int16_t reach = kNone;
  c10::SymInt inner = 1; // the dim has `inner` indices for each index of the factor: flattening [a, b] gives {a, inner = b}
  // A dim with only part of the factor: `length` indices start, start + step, ... In a result: a slice. In an operand (cat,
  // padding): the factor is then cut so that the operands' pieces stay on their ranks, if possible.
  struct SymWindow {
    c10::SymInt start;
    int64_t step;
    c10::SymInt length;

    SymWindow(c10::SymInt from, int64_t by, c10::SymInt n) : start(std::move(from)), step(by), length(std::move(n)) {}
  };
  std::optional<SymWindow> window;
  // The dim lies only on the ranks that hold this index of each of these factors, and is empty on others: a row of a cut dim
  // stays at its owner. The dim's own factor may cut it as well. If it has none, `inner` is its size.
  struct FixedIndex {
    int64_t factor;
    c10::SymInt index;
  };
  c10::SmallVector<FixedIndex, 1> at;

  Dim() = default;
  Dim(int64_t f, c10::SymInt inner_size = 1) : factor(static_cast<int16_t>(f)), inner(std::move(inner_size)) {} // NOLINT

  bool lies_along(int64_t f) const {
    return factor == f || std::any_of(at.begin(), at.end(), [&](const FixedIndex& a) { return a.factor == f; });
  }
};
using Dims = c10::SmallVector<Dim, 5>;

struct Operand {
  Dims dims;
  // The op reads no values of this operand (zeros_like): it never moves, the result is sharded like it, its summands count as
  // whole.
  bool free = false;
  // The op adds this operand to its sum (addmm's self), or writes the sum into it (out=). If a factor that is summed over is
  // sharded, the operand holds summands, like the result.
  bool summand = false;
  // Along dims that are read through windows the operand stays cut as it is: the kernel fetches the indices that a rank reads.
  bool kept_cut = false;
  // If it is read with a halo: the cells beyond the edges hold the neutral value of this reduction. None: there are no such
  // cells.
  std::optional<ReduceOp> padding = ReduceOp::Sum;
  // If it is read with a halo: outside of graphs the kernel gets the piece and fetches the halo itself, so that it can compute
  // while the messages travel.
  bool awaited = false;
  // For a written operand, as Result::reduce: if the operand lacks a sharded factor that reduces, it holds summands.
  std::optional<std::optional<ReduceOp>> reduce;

  Operand() = default;
  Operand(Dims d) : dims(std::move(d)) {} // NOLINT
};

// A view's strides and offset, as multiples of the base's strides.
struct Geometry {
  // The stride of a dim of operand 0, times a number or the size of that dim. Dim -1: the number itself.
  struct Term {
    int64_t dim;
    c10::SymInt times;
    int64_t plus = -1; // of a diagonal: the dim whose stride is added
  };
  static constexpr int64_t kItsSize = -1;
  c10::SmallVector<Term, 5> strides; // one per dim
  c10::SmallVector<Term, 2> offset;  // a sum
  // The strides are those that torch computes for a view of the result's sizes.
  bool reshaped = false;
};

struct Result {
  Dims dims;
  // The global sizes, if the factors do not give them (views). Empty: a sharded dim has the size of the operand dim with the
  // same factor, any other dim the size of the local result.
  SymSizes sizes;
  // Overrides Factor::reduce for this result.
  std::optional<std::optional<ReduceOp>> reduce;
  // The global strides, if the call gives them (new_empty_strided). Empty: dense.
  SymSizes strides;
  // The order of its dims in memory, if torch's meta kernel gives a wrong one.
  std::optional<DimOrder> order;
  // For a view. Without it, the op runs on a meta tensor to find the strides.
  std::optional<Geometry> geometry;
  // Bit f: the result does not depend on factor f, so every rank computes the same even if f is sharded.
  uint64_t same_over = 0;

  Result() = default;
  Result(Dims d, SymSizes s = {}) : dims(std::move(d)), sizes(std::move(s)) {} // NOLINT
  Result(Dims d, c10::IntArrayRef s) : Result(std::move(d), symbols(s)) {}
};

constexpr uint32_t bit(ReduceOp op) {
  return 1u << static_cast<int>(op);
}

// The op is linear in these operands together, with the others fixed: if all of them hold summands, every result does. add: one
// group of both. mul: two groups of one.
struct LinearGroup {
  OperandSet operands;
  // It commutes with every reduction (copies, views), not only with sum and avg.
  bool any_reduction = false;
  // The op moves or casts values, so picked summands pass and stay picked.
  bool moves = false;
  // The op only adds its operands up, so picked summands pass as ordinary summands of a sum.
  bool adds = false;
  // The reductions that it commutes with (bit() of each).
  uint32_t reductions = bit(ReduceOp::Sum) | bit(ReduceOp::Avg);
  // The order, if one of them is Norm.
  double norm_order = 2.0;

  bool passes(const Placement& p) const {
    return any_reduction || (p.picked && (moves || adds)) ||
           (!p.picked && (reductions & bit(p.reduce)) && (p.reduce != ReduceOp::Norm || p.norm_order == norm_order));
  }
};

struct Solution;

// A kernel's view of its call. The kernel replaces the arguments on the stack (local tensors) by the results (local tensors).
struct KernelRun {
  struct OperandInfo {
    const Layout* layout;        // after redistribution
    c10::SymIntArrayRef symbols; // global sizes

    // As numbers: a graph's symbols are guarded to be these.
    Sizes sizes() const {
      return guarded(symbols);
    }
    int64_t size(int64_t d) const {
      return symbols[d].guard_int(__FILE__, __LINE__);
    }
    int64_t dim() const {
      return static_cast<int64_t>(symbols.size());
    }
  };
  const c10::OperatorHandle& op;
  std::vector<c10::IValue>& stack;
  c10::ArrayRef<OperandInfo> operands; // tensors in the order of the arguments, lists flattened, None left out
  const Solution& solution;

  const Mesh& mesh() const {
    return operands[0].layout->mesh();
  }
  size_t base() const; // where this op's arguments start on the stack
  c10::IValue& arg(size_t i) const {
    return stack[base() + i];
  }
  // The mesh dims (bits) that shard factor f.
  uint64_t mesh_dims(int64_t factor) const;
  // Drops the arguments and pushes the results.
  void returns(std::vector<c10::IValue> results) const;
  // Runs the op itself on what is on the stack.
  void call_op() const;
};
using Kernel = void (*)(KernelRun&);

// Writes `view` into `piece`. `view` is whole along the mesh dims that cut its base.
using PutBackFn = void (*)(const Solution&, const KernelRun::OperandInfo& base, const at::Tensor& piece, const at::Tensor& view);

using PiecePredicate = bool (*)(const at::Tensor& piece);
// Symbolic sizes are never 0.
inline bool is_empty(const at::Tensor& piece) {
  const auto numel = piece.sym_numel().maybe_as_int();
  return numel && *numel == 0;
}
inline bool is_strided(const at::Tensor& piece) {
  return !piece.is_contiguous();
}

struct Rule {
  c10::SmallVector<Factor, 6> factors;
  c10::SmallVector<Operand, 4> operands;
  c10::SmallVector<Result, 2> results;
  c10::SmallVector<LinearGroup, 2> linear;
  // The argument that lists the sizes of the first result (view, expand, new_zeros). The local op gets the local sizes.
  int16_t sizes_arg = kNone;
  std::vector<Reach> reaches;
  Kernel kernel = nullptr;
  // The kernel runs even if no kernel factor is sharded.
  bool always_kernel = false;
  // The kernel runs only on ranks where this holds for a local tensor; on other ranks the op runs. The kernel must not
  // communicate.
  PiecePredicate kernel_if = nullptr;
  // For a view whose kernel copies: brings writes to the copy back into the base.
  PutBackFn put_back = nullptr;
  // Factors to shard evenly, if an operand is sharded along a whole factor: an exchange of pieces costs less than a gather.
  c10::SmallVector<int64_t, 1> spread;
  // Facts that the rule passes to its kernel, in a struct of the kernel's own; see kernel_data().
  std::any kernel_data;

  int64_t factor(Factor f = {}) {
    factors.push_back(std::move(f));
    return static_cast<int64_t>(factors.size()) - 1;
  }
  // A dim of an operand that is read through windows.
  Dim windows(int64_t factor_, const Reach& reach) {
    Dim dim(factor_);
    dim.reach = static_cast<int16_t>(reaches.size());
    reaches.push_back(reach);
    return dim;
  }
  int64_t whole() {
    Factor f;
    f.whole = true;
    return factor(f);
  }
  int64_t reduced(ReduceOp op) {
    Factor f;
    f.reduce = op;
    return factor(f);
  }
  // `k` runs on every call, not only if a kernel factor is sharded.
  void always(Kernel k) {
    kernel = k;
    always_kernel = true;
  }
  // Linear in each of these operands alone; jointly_linear(): in all of them together.
  void linear_in(std::initializer_list<int> operands_) {
    for (int i : operands_) {
      linear.push_back({OperandSet(uint64_t{1} << i)});
    }
  }
  void jointly_linear(OperandSet operands_) {
    linear.push_back({std::move(operands_)});
  }
  // The op only moves values, so every kind of Partial passes.
  void passes_partial(OperandSet operands_ = 0b1) {
    linear.push_back({.operands = std::move(operands_), .any_reduction = true, .moves = true});
  }
};

// The rule's data for its kernel, to change it.
template <typename T>
T& kernel_data(Rule& rule) {
  auto* found = std::any_cast<T>(&rule.kernel_data);
  TORCH_INTERNAL_ASSERT(found, "the rule's data for its kernel has another type");
  return *found;
}

// Records which facts of a call have been read, apart from those in every cache key: layouts, numbers of dims, which dims have
// size 1, dtypes, orders of dims in memory. The accessors below record them, so an op's key holds exactly what its rule
// depends on.
class Reads {
 public:
  static constexpr uint64_t kSizes = uint64_t{1} << 63;
  static constexpr uint64_t kStrides = uint64_t{1} << 62; // and storage offsets
  static constexpr uint64_t kNumbers = uint64_t{1} << 61; // which numbers are infinite or zero
  static constexpr size_t kMostArgs = 61;
  static constexpr uint64_t arg(size_t i) {
    return uint64_t{1} << i;
  }

  void add(uint64_t what) {
    bits_ |= what;
  }
  uint64_t bits() const {
    return bits_;
  }

 private:
  uint64_t bits_ = 0;
};

// Facts about a number (bits) that a rule may read without needing a solution for each value. Also about a tensor that stands for
// a number of the script.
enum NumberKind : uint32_t { kInfinite = 1, kZero = 2 };
uint32_t kind_of_number(const c10::Scalar& number);
uint32_t kind_of_number(const at::Tensor& t);
uint32_t kind_of_number(const c10::IValue& argument); // or of all numbers in a list together

// One tensor among a call's arguments; lists are flattened, None left out.
class TensorArg {
 public:
  TensorArg(int16_t arg_, int32_t index_, const at::Tensor& tensor, c10::IntArrayRef sizes, const Layout& layout_, Reads& reads)
      : arg(arg_),
        index(index_),
        layout(&layout_),
        dtype(tensor.scalar_type()),
        tensor_(&tensor),
        sizes_(sizes),
        symbolic_(tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()),
        reads_(&reads) {}

  int16_t arg;   // position among the schema's arguments
  int32_t index; // position in its list, or -1
  bool mutated = false;
  bool output = false;  // written and not read
  const Layout* layout; // a plain tensor counts as replicated
  at::ScalarType dtype;
  double bytes = 0; // of the whole, see nominal_bytes(): only for the resolver, which records when they decide

  int64_t dim() const {
    return static_cast<int64_t>(sizes_.size());
  }
  bool is_one(int64_t d) const {
    return symbolic_ ? tensor_->sym_size(d) == 1 : sizes_[d] == 1;
  }
  // As numbers: a graph's symbols are guarded to be these.
  c10::IntArrayRef sizes() const {
    for (int64_t d = 0; symbolic_ && d < dim(); ++d) {
      size(d);
    }
    reads_->add(Reads::kSizes);
    return sizes_;
  }
  int64_t size(int64_t d) const {
    reads_->add(Reads::kSizes);
    return symbolic_ ? tensor_->sym_size(d).guard_int(__FILE__, __LINE__) : sizes_[d];
  }
  c10::SymInt sym_size(int64_t d) const {
    reads_->add(Reads::kSizes);
    return symbolic_ ? tensor_->sym_size(d) : c10::SymInt(sizes_[d]);
  }
  SymSizes sym_sizes() const {
    SymSizes out;
    for (int64_t d = 0; d < dim(); ++d) {
      out.push_back(sym_size(d));
    }
    return out;
  }
  // Whether any of its sizes is a symbol.
  bool has_symbols() const;
  c10::SymInt sym_bytes() const; // for the resolver, as `bytes`
  SymSizes sym_strides() const;
  c10::SymInt sym_offset() const;
  uint32_t kind_of_number() const {
    reads_->add(Reads::kNumbers);
    return rules::kind_of_number(*tensor_);
  }

 private:
  const at::Tensor* tensor_;
  c10::IntArrayRef sizes_;
  bool symbolic_;
  Reads* reads_;
};

// The call that a rule function reads. It cannot read values of tensors, by design.
class Call {
 public:
  Call(const c10::FunctionSchema& schema_, c10::ArrayRef<c10::IValue> args, const Mesh& mesh_)
      : schema(schema_), mesh(mesh_), args_(args) {}
  Call(const Call&) = delete; // its tensors point to its `reads_`
  Call& operator=(const Call&) = delete;

  const c10::FunctionSchema& schema;
  const Mesh& mesh;
  c10::SmallVector<TensorArg, 4> tensors;

  // For the code that describes a call.
  TensorArg& add(int16_t arg, int32_t index, const at::Tensor& tensor, c10::IntArrayRef sizes, const Layout& layout) {
    return tensors.emplace_back(arg, index, tensor, sizes, layout, reads_);
  }
  uint64_t reads() const {
    return reads_.bits();
  }

  const c10::IValue& arg(int64_t i) const {
    reads_.add(Reads::arg(i));
    return args_[i];
  }
  bool has(int64_t i) const {
    return i < static_cast<int64_t>(args_.size()) && !arg(i).isNone();
  }
  // The position of an argument by its name in the schema; raises if there is none.
  int64_t position(const char* name) const;
  int64_t integer(int64_t i) const {
    return arg(i).toSymInt().guard_int(__FILE__, __LINE__);
  }
  int64_t integer(int64_t i, int64_t otherwise) const {
    return has(i) ? integer(i) : otherwise;
  }
  bool flag(int64_t i) const {
    return has(i) && arg(i).toBool();
  }
  // int[] or int; empty where None.
  Sizes ints(int64_t i) const;
  // The same, possibly symbols: for entries that take symbols (Options::symbols).
  SymSizes sym_ints(int64_t i) const;
  // Wrapped into [0, ndim); raises IndexError as torch does.
  int64_t dim(int64_t i, int64_t ndim) const;
  // Bits of NumberKind: of all numbers among the arguments together.
  uint32_t kinds_of_numbers() const;
  // The index in `tensors` of argument `i` (item `index` of it), or -1 if it is None.
  int64_t operand(int64_t i, int64_t index = -1) const;
  const TensorArg& tensor(int64_t i, int64_t index = -1) const;

 private:
  c10::ArrayRef<c10::IValue> args_;
  mutable Reads reads_;
};

using RuleFn = Rule (*)(const Call&);

// ---- building blocks that several families share ----

// "ik,kj->ij": each letter is a factor; a factor that no result has is summed over. Linear in each operand alone.
Rule notation(const char* text);

// A literal as a template argument, for rule functions that differ by a text alone.
template <size_t n>
struct Text {
  constexpr Text(const char (&text)[n]) { // NOLINT: the literal is the text
    std::copy_n(text, n, chars);
  }
  char chars[n]{};
};

// n dims, each with a factor of its own, like `f`.
Dims fresh_dims(Rule& rule, int64_t n, const Factor& f = {});
// The same, but dim `dim` has a factor like `along`; or stays whole.
Dims dims_along(Rule& rule, int64_t n, int64_t dim, const Factor& along);
Dims dims_beside(Rule& rule, int64_t n, int64_t dim);

// Dims that operands broadcast to, aligned at the last.
struct Broadcast {
  explicit Broadcast(Dims dims) : dims(std::move(dims)), wide(this->dims.size(), false) {}

  // Widens the dims to the sizes of an operand's first n dims.
  void widen(const TensorArg& t, int64_t n);
  // The dims of an operand's first n; one of size 1 stays whole where another operand has more.
  Dims of(const TensorArg& t, int64_t n) const;

  Dims dims;
  c10::SmallVector<bool, 8> wide; // whether some operand has more than one index
};

// Broadcasts all operands to one shape; one result per tensor that the op returns. The rule of elementwise ops.
Rule broadcast(const Call& call);
Rule broadcast(const Call& call, size_t operands); // the first ones

// The order of its dims, if it is channels_last or channels_last_3d.
std::optional<DimOrder> channels_last_order(const TensorArg& t);

// Every operand and result whole.
Rule replicate(const Call& call);

// The same rule, linear in each of these operands alone.
Rule linear(Rule rule, std::initializer_list<int> operands);

// Another rule that is linear in the first operand, which in every *_backward is the gradient, if the others are whole.
template <RuleFn rule>
Rule linear_in_first(const Call& call) {
  return linear(rule(call), {0});
}

// Another rule, with a kernel that runs on every call.
template <RuleFn rule_of, Kernel kernel>
Rule always(const Call& call) {
  auto rule = rule_of(call);
  rule.always(kernel);
  return rule;
}

int64_t wrap_dim(int64_t dim, int64_t ndim);

} // namespace shardtensor::rules
