// The one table of ops. An op's entry is the only place that names it: its rule, the calls that it runs as, its autograd formula.
// Uses rule.h. Filled by the families' register functions below, read by dispatch/.
#pragma once

#include "rules/autograd_formulas.h"
#include "rules/rule.h"

#include <optional>
#include <string>
#include <unordered_map>

namespace shardtensor::rules {

// Kinds of numbers.
enum DtypeSet : uint8_t {
  kBools = 1,
  kIntegers = 2,
  kWideReals = 4, // float32, float64
  kNarrowReals = 8,
  kReals = kWideReals | kNarrowReals,
  kWideComplex = 16, // complex64, complex128
  kNarrowComplex = 32,
  kComplex = kWideComplex | kNarrowComplex,
  kAllNumbers = 63,
};

// How an op runs.
enum class Way : uint8_t {
  Rule,    // by its rule, on pieces; without a rule, as other ops
  Lists,   // lists of tensors (foreach, fused optimizers): by the rule, one index after the other
  Refused, // raises; `why` says why, and what to do
};

// In place of a rule: the op runs as other ops, on the global tensors. These are `calls`, else its autograd formula, else torch's
// CompositeExplicit kernel.
constexpr RuleFn kAsOtherOps = nullptr;

// Runs an op as other ops, on the global tensors, below autograd. Undefined: the op returns nothing. None: this call runs by the
// rule.
using CallsFn = std::optional<at::Tensor> (*)(c10::ArrayRef<c10::IValue> arguments);

struct Options {
  Way way = Way::Rule;
  const char* why = nullptr;
  // Of an op with a rule: runs a call as several ops if these send less, and returns None for other calls.
  CallsFn calls = nullptr;
  // The op's kernel at the autograd key, except for out= forms. Without one, torch's formula is used. If torch would decompose
  // the op, its rule is used only if it has a formula, this or torch's.
  Formula autograd = nullptr;
  // The rule takes a graph's symbols for integers among the arguments, and its kernel also for sizes. Without this the graph is
  // guarded to have these numbers.
  bool symbols = false;
  // The dtypes that the op's first tensor may have. torch would reject other dtypes too, but not on a rank with an empty piece,
  // and not if our kernel replaces the op.
  uint8_t takes = kAllNumbers;
  // Bit mask of arguments whose dtype must equal the first tensor's. Without this check only some ranks would raise.
  uint64_t one_dtype = 0;
  // These arguments may also all be float32 if the first tensor is float16 or bfloat16.
  bool or_float = false;
  // Results have the operands' broadcast sizes, so out= arguments can be sized without asking torch.
  bool broadcasts = false;
  // The op's rule uses every operand whole.
  bool whole = false;
  // Bit mask of arguments that the op writes though its schema does not say so: native_batch_norm's running statistics.
  uint64_t writes = 0;
  // For Way::Lists: tensors of one layout, without summands, need no rule: nothing moves, and results have the same layout.
  bool elementwise = false;
  // For Way::Lists: the kernel treats all tensors of one list entry as flat memory, so their strides must match.
  bool dense = false;
  // The op may write one memory location several times (an expanded argument), with the same value each time.
  bool repeats = false;
  // Some elements of a result, or of an argument that the op writes, may be uninitialized afterwards.
  bool unwritten = false;
  // The results' strides may have another order even if all operands are contiguous, so torch's meta kernel is asked.
  bool asks_order = false;
  // Plain tensors among the arguments count as replicated, because torch's own code makes them (embedding_bag's offsets).
  bool plain = false;
  // More advice for the error about a plain tensor among the arguments.
  const char* if_plain = "";
};

struct Entry {
  RuleFn rule = nullptr;
  Options options;
  const char* family = "";

  // Whether the op gathers all of its inputs on every rank, whatever their layouts.
  bool gathers() const {
    return options.whole || rule == replicate;
  }
  bool runs_as_other_ops() const {
    return options.way == Way::Rule && !rule;
  }
  // The formula is its kernel below autograd too, in inference mode.
  bool is_formula() const {
    return runs_as_other_ops() && !options.calls && options.autograd;
  }
};

class Registry {
 public:
  // Names without "aten::", with the overload: "add.Tensor"; our own ops with "shardtensor::". Names that this torch does not
  // have are ignored. A name that is there raises.
  void add(const char* family, std::initializer_list<const char*> ops, RuleFn rule, Options options = {});
  // The same, also for each op's other forms: abs, abs_, abs.out; add.Tensor, add_.Tensor, add.out, add.Tensor_out.
  void add_forms(const char* family, std::initializer_list<const char*> ops, RuleFn rule, Options options = {});
  const Entry* find(const std::string& name) const;
  const std::unordered_map<std::string, Entry>& entries() const {
    return entries_;
  }

 private:
  void add(const char* family, const std::string& op, RuleFn rule, const Options& options);

  std::unordered_map<std::string, Entry> entries_;
};

const Registry& registry();

// One per family, at the end of its file in ops/.
void register_attention(Registry&);
void register_convolution(Registry&);
void register_copies(Registry&);
void register_embedding(Registry&);
void register_im2col_distance(Registry&);
void register_indexing(Registry&);
void register_joins(Registry&);
void register_linalg(Registry&);
void register_lists(Registry&);
void register_losses(Registry&);
void register_matmul(Registry&);
void register_normalization(Registry&);
void register_padding(Registry&);
void register_pointwise(Registry&);
void register_pooling(Registry&);
void register_random(Registry&);
void register_recurrent(Registry&);
void register_reductions(Registry&);
void register_resampling(Registry&);
void register_sampling(Registry&);
void register_scans(Registry&);
void register_softmax(Registry&);
void register_spectral(Registry&);
void register_flip_roll_repeat(Registry&);
void register_view_order(Registry&);
void register_slice_select_split(Registry&);
void register_view_reshape(Registry&);
void register_view_strided(Registry&);

} // namespace shardtensor::rules
