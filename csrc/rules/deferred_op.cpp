#include "rules/deferred_op.h"

#include "tensor/move.h"
#include "tensor/symbolic.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>

namespace shardtensor::rules {

namespace {

// An op of a graph takes lists of integers, so a call is written as two lists: numbers, and sizes, which may be symbols. Every
// argument and result begins with its kind.
enum ValueKind : int64_t { kNothing, kTensor, kInteger, kReal, kFlag, kIntegers, kFlags };

class CallWriter {
 public:
  void number(int64_t n) {
    list.push_back(n);
  }
  void real(double x) {
    number(std::bit_cast<int64_t>(x));
  }
  void numbers(c10::IntArrayRef all) {
    number(static_cast<int64_t>(all.size()));
    list.insert(list.end(), all.begin(), all.end());
  }
  void order(const DimOrder& order) {
    numbers(Sizes(order.begin(), order.end()));
  }
  // names_of() writes its names.
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
  void layout(const Layout& given, c10::SymIntArrayRef whole) {
    const auto settled = in_symbols(given, whole) ? LayoutPtr::reclaim_copy(&given) : given.settled(guarded(whole));
    number(settled->ndim());
    for (int64_t m = 0; m < settled->ndim(); ++m) {
      const auto& p = settled->placement(m);
      const auto& cut = settled->cut(m);
      numbers(
          {static_cast<int64_t>(p.kind), static_cast<int64_t>(p.reduce), p.picked, p.dim, p.split_factor,
           std::bit_cast<int64_t>(p.norm_order)});
      number(cut ? static_cast<int64_t>(cut->size()) : -1);
      if (!cut) {
        continue;
      }
      const SymSplit split(*settled, m, whole[p.dim]);
      for (size_t i = 0; i < cut->size(); ++i) {
        sizes.push_back(cut->follows() ? split(static_cast<int64_t>(i)).length : c10::SymInt((*cut)[i]));
      }
    }
  }
  void add(c10::SymIntArrayRef more) {
    sizes.insert(sizes.end(), more.begin(), more.end());
  }
  void argument(const c10::IValue& value) {
    if (value.isInt() || value.isSymInt()) {
      number(kInteger);
      number(value.toSymInt().guard_int(__FILE__, __LINE__));
    } else if (value.isDouble() || value.isSymFloat()) {
      number(kReal);
      real(value.toSymFloat().guard_float(__FILE__, __LINE__));
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
      TORCH_INTERNAL_ASSERT(value.isNone() || value.isTensor(), "defer_call: an argument of kind ", value.tagKind());
      number(kNothing);
    }
  }

  std::vector<int64_t> list;
  SymSizes sizes;

 private:
  // Whether pieces that depend on the sizes can be written as symbols.
  static bool in_symbols(const Layout& layout, c10::SymIntArrayRef whole) {
    for (int64_t m = 0; m < layout.ndim(); ++m) {
      const auto& cut = layout.cut(m);
      if (cut && cut->follows() && (is_nested(layout, m) || !SymSplit(layout, m, whole[layout.placement(m).dim]))) {
        return false;
      }
    }
    return true;
  }
};

std::vector<std::string> names_of(const Mesh::Description& d) {
  std::vector<std::string> names{d.device_type, d.world};
  names.insert(names.end(), d.groups.begin(), d.groups.end());
  names.insert(names.end(), d.dim_names.begin(), d.dim_names.end());
  return names;
}

class CallReader {
 public:
  CallReader(c10::IntArrayRef list, c10::SymIntArrayRef sizes) : list_(list), sizes_(sizes) {}

  bool more() const {
    return at_ < list_.size();
  }
  int64_t number() {
    return list_[at_++];
  }
  double real() {
    return std::bit_cast<double>(number());
  }
  c10::IntArrayRef numbers() {
    const auto n = static_cast<size_t>(number());
    at_ += n;
    return list_.slice(at_ - n, n);
  }
  DimOrder order() {
    const auto all = numbers();
    return {all.begin(), all.end()};
  }
  // Equal meshes are one object, so this is the mesh of the eager tensors. Another mesh may have the same groups in another
  // order.
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
  c10::SymIntArrayRef sizes(size_t n) {
    const auto out = sizes_.slice(0, n);
    sizes_ = sizes_.slice(n);
    return out;
  }
  // Without a mesh, only skips the words of the layout.
  LayoutPtr layout(const MeshPtr& mesh) {
    Placements placements;
    Cuts cuts;
    for (auto n = number(); n > 0; --n) {
      const auto p = numbers();
      placements.push_back(
          {static_cast<Placement::Kind>(p[0]), static_cast<ReduceOp>(p[1]), static_cast<bool>(p[2]), static_cast<int16_t>(p[3]),
           static_cast<int32_t>(p[4]), std::bit_cast<double>(p[5])});
      const auto count = number();
      const auto cut = sizes(static_cast<size_t>(std::max<int64_t>(count, 0)));
      if (mesh && count >= 0) {
        const auto pieces = guarded(cut);
        cuts.push_back(std::make_shared<const PieceSizes>(std::vector<int64_t>(pieces.begin(), pieces.end())));
      } else {
        cuts.push_back(nullptr);
      }
    }
    return mesh ? Layout::make(mesh, std::move(placements), std::move(cuts)) : LayoutPtr();
  }
  c10::IValue argument(int64_t kind) {
    switch (kind) {
      case kInteger:
        return number();
      case kReal:
        return real();
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
  c10::SymIntArrayRef sizes_;
  size_t at_ = 0;
};

// With exactly these strides, which the graph expects.
at::Tensor with_strides(const at::Tensor& t, c10::IntArrayRef strides) {
  const auto out = in_dim_order(t, strides);
  return out.strides() == strides ? out : out.as_strided(out.sizes(), strides);
}

std::vector<at::Tensor> make_deferred_call(
    at::TensorList pieces,
    c10::string_view name,
    at::IntArrayRef call,
    c10::SymIntArrayRef sizes,
    at::IntArrayRef results,
    c10::SymIntArrayRef result_sizes,
    const c10::List<std::string>& names) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(std::string(name).c_str(), "");
  torch::jit::Stack stack;
  CallReader in(call, sizes);
  const auto mesh = in.mesh(names);
  for (size_t operand = 0; in.more();) {
    const auto kind = in.number();
    if (kind != kTensor) {
      stack.push_back(in.argument(kind));
      continue;
    }
    auto layout = in.layout(mesh);
    const auto order = in.order();
    const auto& piece = pieces[operand++];
    const auto whole = guarded(in.sizes(piece.sizes().size()));
    auto local = in_dim_order(piece, dense_strides(piece.sizes(), order));
    stack.emplace_back(wrap(std::move(local), std::move(layout), whole, dense_strides(whole, order)));
  }
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(&stack);
  std::vector<at::Tensor> out;
  CallReader made(results, result_sizes);
  for (size_t i = 0; made.more(); ++i) {
    if (made.number() != kTensor) {
      continue;
    }
    made.number(); // the dtype
    const auto want = made.layout(mesh);
    const auto order = made.order();
    const auto& result = stack[i].toTensor();
    auto local = moved_piece({result, want, {}, MovePurpose::Viewing});
    const auto piece = guarded(made.sizes(order.size()));
    TORCH_INTERNAL_ASSERT(
        local.sizes() == c10::IntArrayRef(piece), name, ": the graph expects ", c10::IntArrayRef(piece), ", not ", local.sizes());
    out.push_back(with_strides(local, dense_strides(piece, order)));
  }
  return out;
}

std::vector<at::Tensor> defer_call_meta(
    at::TensorList pieces,
    c10::string_view,
    at::IntArrayRef,
    c10::SymIntArrayRef,
    at::IntArrayRef results,
    c10::SymIntArrayRef result_sizes,
    const c10::List<std::string>&) {
  std::vector<at::Tensor> out;
  CallReader made(results, result_sizes);
  while (made.more()) {
    if (made.number() == kTensor) {
      const auto dtype = static_cast<at::ScalarType>(made.number());
      made.layout(nullptr);
      const auto order = made.order();
      const auto piece = made.sizes(order.size());
      out.push_back(at::empty_strided_symint(piece, dense_strides(piece, order), pieces[0].options().dtype(dtype)));
    }
  }
  return out;
}

TORCH_LIBRARY_FRAGMENT(shardtensor, m) {
  const std::vector<at::Tag> tags{at::Tag::nondeterministic_seeded}; // not to be merged, left out or run again
  m.def(
      "defer_call(Tensor[] pieces, str op, int[] call, SymInt[] sizes, int[] results, SymInt[] result_sizes, str[] names) -> "
      "Tensor[]",
      tags);
}

TORCH_LIBRARY_IMPL(shardtensor, CPU, m) {
  m.impl("defer_call", make_deferred_call);
}
TORCH_LIBRARY_IMPL(shardtensor, CUDA, m) {
  m.impl("defer_call", make_deferred_call);
}
TORCH_LIBRARY_IMPL(shardtensor, Meta, m) {
  m.impl("defer_call", defer_call_meta);
}

// All dims by name, also where they are in the usual order.
DimOrder full(DimOrder order, size_t ndim) {
  for (size_t d = order.size(); d < ndim; ++d) {
    order.push_back(static_cast<int8_t>(d));
  }
  return order;
}

} // namespace

void defer_call(KernelRun& run, const std::vector<std::optional<DeferredResult>>& results) {
  CallWriter call, made;
  call.mesh(run.mesh().description());
  std::vector<at::Tensor> pieces;
  for (size_t i = 0; i < run.op.schema().arguments().size(); ++i) {
    const auto& value = run.arg(i);
    if (!value.isTensor() || !value.toTensor().defined()) {
      call.argument(value);
      continue;
    }
    const auto& piece = value.toTensor();
    const auto& operand = run.operands[pieces.size()];
    call.number(kTensor);
    call.layout(*operand.layout, operand.symbols);
    call.order(order_of(hints_of(piece.sym_strides())));
    call.add(operand.symbols);
    pieces.push_back(piece);
  }
  for (size_t r = 0; r < results.size(); ++r) {
    made.number(results[r] ? kTensor : kNothing);
    if (results[r]) {
      const auto& result = run.solution.results[r];
      auto whole = results[r]->sizes; // stays the piece's where only the local result gives a size
      for (size_t d = 0; d < result.sizes.size(); ++d) {
        const auto& from = result.sizes[d];
        if (from.operand != -1) {
          whole[d] = from.operand >= 0 ? run.operands[from.operand].symbols[from.dim] : from.value;
        }
      }
      made.number(static_cast<int64_t>(results[r]->dtype.value_or(pieces[0].scalar_type())));
      made.layout(*result.layout, whole);
      made.order(full(result.order.value_or(DimOrder()), whole.size()));
      made.add(results[r]->sizes);
    }
  }
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("shardtensor::defer_call", "");
  torch::jit::Stack stack{
      pieces,
      run.op.schema().name(),
      call.list,
      c10::SymIntArrayRef(call.sizes),
      made.list,
      c10::SymIntArrayRef(made.sizes),
      names_of(run.mesh().description())};
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
