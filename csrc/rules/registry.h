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

struct Options {
  // What the op's first tensor may hold. The op itself would refuse the rest, but not on a rank whose piece is empty, or where
  // a kernel does its work.
  uint8_t takes = kAllNumbers;
  // Arguments (bits) that must have the first tensor's dtype. Others, too, the op itself would refuse on some ranks alone.
  uint64_t one_dtype = 0;
  // Or all of them float32, where that one is float16 or bfloat16.
  bool or_float = false;
  // Results have the operands' broadcast sizes, so those of out= arguments are known without asking torch.
  bool broadcasts = false;
  // Not a rule: the op's own CompositeExplicit kernel is run on the global tensors, in terms of ops that have rules.
  bool decompose = false;
  // The op decomposes by itself (CompositeImplicit), but is taken whole here. It needs an autograd kernel in autograd/.
  bool composite = false;
  // Differentiated on the local tensors: torch's formula for it cannot be followed on ShardTensors. Without a rule, on gathered
  // ones.
  bool gather = false;
  // The op's rule uses every operand whole.
  bool whole = false;
  // Arguments (bits) that the op writes though its schema does not say so: native_batch_norm's running statistics.
  uint64_t writes = 0;
  // Not a rule: lists of tensors are handled element by element (foreach, fused optimizers).
  bool lists = false;
  // Of those: tensors of one layout, without summands, need no rule: nothing moves, and results have the same layout.
  bool elementwise = false;
  // Lists too: the op's kernels walk through the tensors of an index from end to end, so those must lie alike in memory.
  bool dense = false;
  // Its results' dims lie in another order than they are counted even where those of all operands do not.
  bool asks_order = false;
  // Plain tensors among the arguments count as replicated: torch itself makes them on the way (embedding_bag's offsets).
  bool plain = false;
  // Not a rule: the op cannot be done on pieces; this says why and what to do.
  const char* refuse = nullptr;
};

struct Entry {
  RuleFn rule = nullptr;
  Options options;
  const char* family = "";

  // Whether the op brings all of its inputs to every rank, whatever their layouts.
  bool gathers() const {
    return options.whole || rule == replicate || (options.gather && !rule);
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
void register_pointwise(Registry&);
void register_random(Registry&);
void register_recurrent(Registry&);
void register_reductions(Registry&);
void register_scans(Registry&);
void register_softmax(Registry&);
void register_spectral(Registry&);
void register_views(Registry&);

} // namespace shardtensor::rules
