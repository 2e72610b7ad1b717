// The one table from aten ops to rules. Uses rule.h. Filled by the families' register functions below, read by dispatch/.
#pragma once

#include "rules/rule.h"

#include <optional>
#include <string>
#include <unordered_map>

namespace shardtensor::rules {

// Kinds of numbers.
enum Numbers : uint8_t {
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
  Rule,       // by its rule, on pieces
  Whole,      // as Rule, though torch would decompose it; its gradient formula is in autograd/
  Local,      // as Rule, and differentiated on pieces, with its kernel: torch's formula cannot run on ShardTensors
  Decomposed, // by torch's CompositeExplicit kernel, or `in_stages`, on the global tensors, in terms of ops that have rules
  Stages,     // as Rule, or as several calls on the global tensors, where that sends less
  Each,       // lists of tensors (foreach, fused optimizers): by the rule, one index after the other
  FoundInf,   // GradScaler's check, in dispatch/special.cpp
  Refused,    // raises; `why` says why, and what to do
};

struct Options {
  Way way = Way::Rule;
  const char* why = nullptr;
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
  // The calls of Way::Stages, or of Way::Decomposed. Nothing if the rule sends as little, or torch's decomposition is right.
  std::optional<at::Tensor> (*in_stages)(c10::ArrayRef<c10::IValue> arguments) = nullptr;
  // For Way::Each: tensors of one layout, without summands, need no rule: nothing moves, and results have the same layout.
  bool elementwise = false;
  // For Way::Each: the kernel treats all tensors of one list entry as flat memory, so their strides must match.
  bool dense = false;
  // The op may write one memory location several times (an expanded argument), with the same value each time.
  bool repeats = false;
  // Some elements of a result, or of an argument that the op writes, may be uninitialized afterwards.
  bool unwritten = false;
  // Even if all operands are contiguous, the results' strides may have another order; torch's meta kernel is asked.
  bool asks_order = false;
  // Plain tensors among the arguments count as replicated: torch's own code makes them (embedding_bag's offsets).
  bool plain = false;
  // What the error about a plain tensor among the arguments advises besides.
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
};

class Registry {
 public:
  // Names without "aten::", with the overload: "add.Tensor"; our own ops with "shardtensor::". Names that this torch does not
  // have are ignored.
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
void register_grids(Registry&);
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
void register_turns(Registry&);
void register_view_order(Registry&);
void register_view_parts(Registry&);
void register_view_reshape(Registry&);
void register_view_strided(Registry&);

} // namespace shardtensor::rules
