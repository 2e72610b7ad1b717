// The one table from aten ops to rules. Uses rule.h. Filled by the families' register functions below, read by dispatch/.
#pragma once

#include "rules/rule.h"

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

// How an op is done.
enum class Way : uint8_t {
  Rule,       // by its rule, on pieces
  Whole,      // so too, though torch would decompose it; its formula for the gradient is in autograd/
  Local,      // so too, and differentiated there: torch's formula cannot be followed on ShardTensors
  Gathered,   // on the whole tensors, on every rank, and differentiated there
  Decomposed, // by its own CompositeExplicit kernel on the global tensors, in terms of ops that have rules
  Each,       // lists of tensors (foreach, fused optimizers): by the rule, one index after the other
  FoundInf,   // GradScaler's check, in dispatch/special.cpp
  Refused,    // not on pieces; `why` tells why, and what to do
};

// Where sizes may be symbols when the op is traced. Elsewhere they are made numbers first.
enum class Symbols : uint8_t {
  None,
  Unrecorded, // where every rank deals with its piece alone, and autograd does not record it
  Apart,      // where every rank deals with its piece alone
  Operands,   // everywhere
  Arguments,  // among the arguments, too: any sizes fit the rule
};

struct Options {
  Way way = Way::Rule;
  const char* why = nullptr;
  Symbols symbols = Symbols::None;
  // What the op's first tensor may hold. The op itself would refuse the rest, but not on a rank whose piece is empty, or where
  // a kernel does its work.
  uint8_t takes = kAllNumbers;
  // Arguments (bits) that must have the first tensor's dtype. Others, too, the op itself would refuse on some ranks alone.
  uint64_t one_dtype = 0;
  // Or all of them float32, where that one is float16 or bfloat16.
  bool or_float = false;
  // Results have the operands' broadcast sizes, so those of out= arguments are known without asking torch.
  bool broadcasts = false;
  // The op's rule uses every operand whole.
  bool whole = false;
  // Arguments (bits) that the op writes though its schema does not say so: native_batch_norm's running statistics.
  uint64_t writes = 0;
  // Of Way::Each: tensors of one layout, without summands, need no rule: nothing moves, and results have the same layout.
  bool elementwise = false;
  // Of Way::Each: the op's kernels walk through the tensors of an index from end to end, so those must lie alike in memory.
  bool dense = false;
  // The op may write one place several times (an expanded argument): it writes the same each time.
  bool repeats = false;
  // What it returns or is given to write may hold anything afterwards.
  bool unwritten = false;
  // Its results' dims lie in another order than they are counted even where those of all operands do not.
  bool asks_order = false;
  // Plain tensors among the arguments count as replicated: torch itself makes them on the way (embedding_bag's offsets).
  bool plain = false;
};

struct Entry {
  RuleFn rule = nullptr;
  Options options;
  const char* family = "";

  // Whether the op brings all of its inputs to every rank, whatever their layouts.
  bool gathers() const {
    return options.whole || rule == replicate || options.way == Way::Gathered;
  }
  // Whether the op is differentiated on the local tensors.
  bool is_local() const {
    return options.way == Way::Local || options.way == Way::Gathered;
  }
};

class Registry {
 public:
  // Names without "aten::", with the overload: "add.Tensor"; our own with "shardtensor::". A name this torch does not have is
  // fine.
  void add(const char* family, std::initializer_list<const char*> ops, RuleFn rule, Options options = {});
  // The same for each op's other forms too: abs, abs_, abs.out; add.Tensor, add_.Tensor, add.out, add.Tensor_out.
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

// One per file of this folder.
void register_attention(Registry&);
void register_convolution(Registry&);
void register_copies(Registry&);
void register_embedding(Registry&);
void register_gathered(Registry&);
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
void register_random(Registry&);
void register_recurrent(Registry&);
void register_reductions(Registry&);
void register_scans(Registry&);
void register_softmax(Registry&);
void register_spectral(Registry&);
void register_turns(Registry&);
void register_view_order(Registry&);
void register_view_parts(Registry&);
void register_view_reshape(Registry&);
void register_view_strided(Registry&);

} // namespace shardtensor::rules
