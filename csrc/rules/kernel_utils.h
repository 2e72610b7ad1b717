// Functions for rule kernels: reductions of a piece that may be empty, small reductions over ranks, results into out=
// arguments.
#pragma once

#include "rules/rule.h"
#include "rules/solution.h" // Solution, which has the rule's data for its kernel

#include <vector>

namespace shardtensor::rules {

// An argument's position by its name in the schema, or -1.
int64_t argument(const Call& call, const char* name);
int64_t argument(const KernelRun& run, const char* name);

// Appends the out= arguments as operands with the results' dims: they are written under the results' layouts.
void add_outputs(const Call& call, Rule& rule);
// The bits of `operands` and of every out= argument.
OperandSet with_outputs(const Call& call, OperandSet operands);

// The rule of an op that only moves values: the operands and the one result have one shape. The dims in `mask` are whole.
Rule whole_along(const Call& call, uint64_t mask);

// The rule of an op whose results do not depend on the operands' values: `kernel` makes them.
Rule unread(const Call& call, Kernel kernel);

// Returns the results, or writes them into the arguments that the schema says are returned (in-place, out=).
void return_results(const KernelRun& run, const std::vector<at::Tensor>& results);

// For kernels that work along one dim.
struct WorkDim {
  int64_t dim;
};

// For kernels of products with a bias: the factor that is summed over.
struct ContractedFactor {
  int64_t factor;
};
// If that factor is sharded, one rank along it adds the bias, which is argument `arg`.
void add_bias_once(const KernelRun& run, size_t arg, int64_t contracted);

// The mesh dims (bits) that shard any of the factors in `factors` (bit f: factor f).
constexpr uint64_t kAllFactors = ~uint64_t{0};
uint64_t mesh_dims_of(const KernelRun& run, uint64_t factors);

// `t` reduced over the ranks along the mesh dims; the result is the same on each. May write into `t`.
at::Tensor over_ranks(const at::Tensor& t, const KernelRun& run, uint64_t mesh_dims, ReduceOp op);

// Gathers every piece's `mine`, one slice per rank along the mesh dim, joined along `dim` in the pieces' order.
at::Tensor gather_slices(const at::Tensor& mine, int64_t dim, const Mesh& mesh, int64_t mesh_dim);

// amax or amin of a piece, keeping the dims; the neutral value if the piece is empty along `dims`.
at::Tensor extreme(const at::Tensor& piece, c10::IntArrayRef dims, ReduceOp op);

// The factor that a norm of this order sums over.
Factor normed(double order);

// The indices of operand i along `dim` that this rank holds.
SymInterval mine(const KernelRun& run, size_t i, int64_t dim);

// Indices into a piece; those of elements that other ranks hold are `otherwise`.
struct LocalIndex {
  at::Tensor index, outside; // outside: which of them those are
};
LocalIndex inside(const at::Tensor& index, const SymInterval& piece, const at::Scalar& otherwise = 0);

// The dtype in which sums are held: float for half precision, else the same.
at::ScalarType accumulate_type(at::ScalarType dtype);

// The bits of `mask` below ndim, as dims.
Sizes dims_in(uint64_t mask, int64_t ndim);

at::Tensor squeeze_dims(const at::Tensor& t, c10::IntArrayRef dims, bool keepdim);

c10::SymInt count_along(c10::SymIntArrayRef sizes, c10::IntArrayRef dims);

} // namespace shardtensor::rules
