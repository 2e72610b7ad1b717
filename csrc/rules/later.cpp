#include "rules/later.h"

#include "redistribute/redistribute.h"
#include "tensor/shard_tensor.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <bit>

namespace shardtensor::rules {

namespace {

// A graph's op takes lists of integers, so a call is written as one. Every argument and result begins with its kind.
enum Kind : int64_t { kNothing, kTensor, kInteger, kFlag, kIntegers, kFlags };

class Writer {
 public:
  void number(int64_t n) {
    list.push_back(n);
  }
  void numbers(c10::IntArrayRef all) {
    number(static_cast<int64_t>(all.size()));
    list.insert(list.end(), all.begin(), all.end());
  }
  // Its names are written by names_of().
  void mesh(const Mesh::Description& d) {
    numbers(d.shape);
    numbers(d.ranks);
    number(d.rank);
    number(static_cast<int64_t>(d.groups.size()));
    number(static_cast<int64_t>(d.group_ranks.size()));
    for (const auto& ranks : d.group_ranks) {
      numbers(ranks);
    }
  }
  void layout(const Layout& layout, c10::IntArrayRef sizes) {
    const auto settled = layout.settled(sizes);
    number(settled->ndim());
    for (int64_t m = 0; m < settled->ndim(); ++m) {
      const auto& p = settled->placement(m);
      const auto& cut = settled->cut(m);
      numbers(
          {static_cast<int64_t>(p.kind), static_cast<int64_t>(p.reduce), p.dim, p.split_factor,
           std::bit_cast<int64_t>(p.norm_order)});
      number(cut != nullptr);
      numbers(cut ? c10::IntArrayRef(*cut) : c10::IntArrayRef());
    }
  }
  void argument(const c10::IValue& value) {
    if (value.isInt() || value.isSymInt()) {
      number(kInteger);
      number(value.toSymInt().guard_int(__FILE__, __LINE__));
    } else if (value.isBool()) {
      number(kFlag);
      number(value.toBool());
    } else if (value.isIntList() || value.isSymIntList()) {
      number(kIntegers);
      numbers(guarded(value.toSymIntVector()));
    } else if (value.isBoolList()) {
      std::vector<int64_t> flags;
      for (const bool flag : value.toBoolList()) {
        flags.push_back(flag);
      }
      number(kFlags);
      numbers(flags);
    } else {
      TORCH_INTERNAL_ASSERT(value.isNone() || value.isTensor(), "put_off: an argument of kind ", value.tagKind());
      number(kNothing);
    }
  }

  std::vector<int64_t> list;
};

std::vector<std::string> names_of(const Mesh::Description& d) {
  std::vector<std::string> names{d.device_type, d.world};
  names.insert(names.end(), d.groups.begin(), d.groups.end());
  names.insert(names.end(), d.dim_names.begin(), d.dim_names.end());
  return names;
}

class Reader {
 public:
  explicit Reader(c10::IntArrayRef list) : list_(list) {}

  bool more() const {
    return at_ < list_.size();
  }
  int64_t number() {
    return list_[at_++];
  }
  c10::IntArrayRef numbers() {
    const auto n = static_cast<size_t>(number());
    at_ += n;
    return list_.slice(at_ - n, n);
  }
  // Equal meshes are one object, so this is the mesh of the eager tensors. Others may have the same groups, in another order.
  MeshPtr mesh(const c10::List<std::string>& names) {
    Mesh::Description d;
    d.shape = numbers().vec();
    d.ranks = numbers().vec();
    d.rank = number();
    const auto first = names.begin(), groups = first + 2, end = groups + number();
    for (auto n = number(); n > 0; --n) {
      d.group_ranks.push_back(numbers().vec());
    }
    d.device_type = *first;
    d.world = *(first + 1);
    d.groups.assign(groups, end);
    d.dim_names.assign(end, names.end());
    return Mesh::make(std::move(d));
  }
  LayoutPtr layout(const MeshPtr& mesh) {
    Placements placements;
    Cuts cuts;
    for (auto n = number(); n > 0; --n) {
      const auto p = numbers();
      placements.push_back(
          {static_cast<Placement::Kind>(p[0]), static_cast<ReduceOp>(p[1]), static_cast<int16_t>(p[2]),
           static_cast<int32_t>(p[3]), std::bit_cast<double>(p[4])});
      const bool uneven = number();
      const auto sizes = numbers();
      cuts.push_back(uneven ? std::make_shared<const PieceSizes>(sizes.vec()) : nullptr);
    }
    return mesh ? Layout::make(mesh, std::move(placements), std::move(cuts)) : LayoutPtr();
  }
  c10::IValue argument(int64_t kind) {
    switch (kind) {
      case kInteger:
        return number();
      case kFlag:
        return static_cast<bool>(number());
      case kIntegers:
        return c10::List<int64_t>(numbers());
      case kFlags: {
        c10::List<bool> flags;
        for (const auto flag : numbers()) {
          flags.push_back(static_cast<bool>(flag));
        }
        return flags;
      }
      default:
        return {};
    }
  }

 private:
  c10::IntArrayRef list_;
  size_t at_ = 0;
};

std::vector<at::Tensor> put_off_now(
    at::TensorList pieces,
    c10::string_view name,
    at::IntArrayRef call,
    at::IntArrayRef results,
    const c10::List<std::string>& names) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(std::string(name).c_str(), "");
  torch::jit::Stack stack;
  Reader in(call);
  const auto mesh = in.mesh(names);
  for (size_t operand = 0; in.more();) {
    const auto kind = in.number();
    if (kind != kTensor) {
      stack.push_back(in.argument(kind));
      continue;
    }
    auto layout = in.layout(mesh);
    const auto sizes = in.numbers();
    stack.emplace_back(wrap(pieces[operand++].contiguous(), std::move(layout), sizes, dense_strides(sizes, {})));
  }
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(&stack);
  std::vector<at::Tensor> out;
  Reader made(results);
  for (const auto& value : stack) {
    if (made.number() != kTensor) {
      continue;
    }
    const auto want = made.layout(mesh);
    const auto piece = made.numbers();
    const auto& result = value.toTensor();
    const auto& self = shard_tensor(result, "a graph's result");
    auto local = self.layout_ptr() == want ? self.local() : redistribute(self.local(), self.layout(), *want, result.sizes());
    TORCH_INTERNAL_ASSERT(local.sizes() == piece, name, ": the graph expects ", piece, ", not ", local.sizes());
    out.push_back(local.contiguous());
  }
  return out;
}

std::vector<at::Tensor> put_off_meta(
    at::TensorList pieces, c10::string_view, at::IntArrayRef, at::IntArrayRef results, const c10::List<std::string>&) {
  std::vector<at::Tensor> out;
  Reader made(results);
  while (made.more()) {
    if (made.number() == kTensor) {
      made.layout(nullptr);
      out.push_back(at::empty(made.numbers(), pieces[0].options()));
    }
  }
  return out;
}

TORCH_LIBRARY_FRAGMENT(shardtensor, m) {
  const std::vector<at::Tag> tags{at::Tag::nondeterministic_seeded}; // not to be merged, left out or run again
  m.def("put_off(Tensor[] pieces, str op, int[] call, int[] results, str[] names) -> Tensor[]", tags);
}

TORCH_LIBRARY_IMPL(shardtensor, CPU, m) {
  m.impl("put_off", put_off_now);
}
TORCH_LIBRARY_IMPL(shardtensor, CUDA, m) {
  m.impl("put_off", put_off_now);
}
TORCH_LIBRARY_IMPL(shardtensor, Meta, m) {
  m.impl("put_off", put_off_meta);
}

} // namespace

void put_off(Run& run, const std::vector<std::optional<SymSizes>>& results) {
  Writer call, made;
  call.mesh(run.mesh().description());
  std::vector<at::Tensor> pieces;
  for (size_t i = 0; i < run.op.schema().arguments().size(); ++i) {
    const auto& value = run.arg(i);
    if (!value.isTensor() || !value.toTensor().defined()) {
      call.argument(value);
      continue;
    }
    const auto& operand = run.operands[pieces.size()];
    const auto sizes = operand.sizes();
    call.number(kTensor);
    call.layout(*operand.layout, sizes);
    call.numbers(sizes);
    pieces.push_back(value.toTensor());
  }
  for (size_t r = 0; r < results.size(); ++r) {
    made.number(results[r] ? kTensor : kNothing);
    if (results[r]) {
      const auto& result = run.solution.results[r];
      Sizes sizes;
      for (const auto& from : result.sizes) {
        const auto& size = from.operand >= 0 ? run.operands[from.operand].symbols[from.dim] : from.value;
        sizes.push_back(size.guard_int(__FILE__, __LINE__));
      }
      made.layout(*result.layout, sizes);
      made.numbers(guarded(*results[r]));
    }
  }
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("shardtensor::put_off", "");
  torch::jit::Stack stack{pieces, run.op.schema().name(), call.list, made.list, names_of(run.mesh().description())};
  op.callBoxed(&stack);
  const auto got = stack[0].toTensorVector();
  std::vector<c10::IValue> out;
  size_t nth = 0;
  for (const auto& result : results) {
    out.emplace_back(result ? got[nth++] : at::Tensor());
  }
  run.returns(std::move(out));
}

} // namespace shardtensor::rules
