#include "dispatch/special.h"

#include "comm/comm.h"
#include "dispatch/call.h"
#include "redistribute/redistribute.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardtensor {

namespace {

using c10::IValue;
using torch::jit::Stack;

// What becomes of one tensor of the lists.
struct Item {
  at::Tensor local;
  LayoutPtr layout; // what `local` has; null: plain
  bool moved = false;
};

// One index of the lists, with the tensors that are not in lists behind.
struct Element {
  Refs refs;
  c10::SmallVector<size_t, 6> positions; // of refs among all refs
};

// Where nothing needs to move: one layout without summands, one shape.
const LayoutPtr* common_layout(const Element& e) {
  const LayoutPtr* layout = nullptr;
  c10::IntArrayRef sizes;
  for (const auto& r : e.refs) {
    if (!r.impl) {
      if (r.tensor->dim() == 0) {
        continue;
      }
      return nullptr;
    }
    if (!layout) {
      layout = &r.impl->layout_ptr();
      sizes = r.tensor->sizes();
    } else if (r.impl->layout_ptr() != *layout || r.tensor->sizes() != sizes) {
      return nullptr;
    }
  }
  return layout && !(*layout)->has_partial() ? layout : nullptr;
}

bool is_plain(const Element& e) {
  return std::none_of(e.refs.begin(), e.refs.end(), [](const Ref& r) { return r.impl != nullptr; });
}

// The elements of the lists, and how many there are. Lists of another length than the first (amsgrad's empty one) are passed
// as they are.
std::vector<Element> elements_of(const Refs& refs) {
  std::vector<Element> out;
  for (size_t i = 0; i < refs.size(); ++i) {
    if (refs[i].index >= 0) {
      const auto at = static_cast<size_t>(refs[i].index);
      if (out.size() <= at) {
        out.resize(at + 1);
      }
      out[at].refs.push_back(refs[i]);
      out[at].positions.push_back(i);
    }
  }
  for (size_t i = 0; i < refs.size(); ++i) {
    if (refs[i].index < 0) {
      for (auto& e : out) {
        e.refs.push_back(refs[i]);
        e.positions.push_back(i);
      }
    }
  }
  return out;
}

// The op's lists with local tensors in them; the wrappers' own lists stay alive in `kept`.
void put_local(Stack& stack, size_t base, const Refs& refs, std::vector<Item>& items, std::vector<IValue>& kept) {
  for (size_t i = 0; i < refs.size();) {
    auto& slot = stack[base + refs[i].arg];
    kept.push_back(std::move(slot));
    if (refs[i].index < 0) {
      slot = items[i++].local;
      continue;
    }
    const auto arg = refs[i].arg;
    c10::List<at::Tensor> list;
    for (; i < refs.size() && refs[i].arg == arg; ++i) {
      list.push_back(items[i].local);
    }
    slot = std::move(list);
  }
}

void handle_lists(const Op& op, Stack* stack_ptr) {
  auto& stack = *stack_ptr;
  const auto base = stack.size() - op.kinds.size();
  const auto refs = collect(op, stack, base);
  const auto elements = elements_of(refs);

  c10::impl::ExcludeDispatchKeyGuard below(kBelow);
  std::vector<Item> items(refs.size());
  for (size_t i = 0; i < refs.size(); ++i) {
    items[i].local = refs[i].impl ? refs[i].impl->local() : *refs[i].tensor;
    items[i].layout = refs[i].impl ? refs[i].impl->layout_ptr() : LayoutPtr();
  }
  std::vector<LayoutPtr> result_layouts(elements.size());
  for (size_t n = 0; n < elements.size(); ++n) {
    const auto& e = elements[n];
    check_plain(op, is_plain(e) ? Refs() : e.refs);
    if (const auto* layout = common_layout(e)) {
      result_layouts[n] = *layout;
      continue;
    }
    if (is_plain(e)) {
      continue; // a plain tensor among ShardTensors' lists stays one
    }
    const auto solution = find_solution(op, stack, base, e.refs);
    result_layouts[n] = solution->results.empty() ? solution->replicated : solution->results[0].layout;
    for (size_t k = 0; k < e.refs.size(); ++k) {
      const auto& need = solution->operands[k];
      auto& item = items[e.positions[k]];
      if (!need || !item.layout || item.layout == need) {
        TORCH_CHECK(
            !need || !need->is_sharded() || e.refs[k].tensor->dim() == 0 || item.layout, op.name,
            ": a plain tensor of one dim or more meets a sharded one in a list; distribute it first");
        continue;
      }
      item.local = redistribute(item.local, *item.layout, *need, e.refs[k].tensor->sizes());
      if (item.local.is_alias_of(e.refs[k].impl->local()) && (op.mutated >> e.refs[k].arg & 1)) {
        item.local = item.local.clone();
      }
      item.layout = need;
      item.moved = true;
    }
  }
  std::vector<IValue> kept;
  put_local(stack, base, refs, items, kept);
  op.handle.callBoxed(stack_ptr);
  for (size_t i = 0; i < refs.size(); ++i) {
    if (items[i].moved && (op.mutated >> refs[i].arg & 1)) {
      auto local = refs[i].impl->local();
      local.copy_(redistribute(items[i].local, *items[i].layout, refs[i].impl->layout(), refs[i].tensor->sizes()));
    }
  }
  if (op.schema().returns().empty()) {
    return;
  }
  auto results = stack.back().toTensorList();
  c10::List<at::Tensor> out;
  out.reserve(results.size());
  for (size_t n = 0; n < results.size(); ++n) {
    auto local = results.extract(n);
    if (!result_layouts[n]) {
      out.push_back(std::move(local));
      continue;
    }
    Sizes sizes(local.sizes().begin(), local.sizes().end());
    if (result_layouts[n]->is_sharded()) {
      const auto& first = elements[n].refs[0];
      sizes.assign(first.tensor->sizes().begin(), first.tensor->sizes().end());
    }
    const auto strides = strides_like(sizes, local);
    out.push_back(wrap(std::move(local), result_layouts[n], sizes, strides));
  }
  stack.back() = std::move(out);
}

// GradScaler's check: a bad value in any rank's piece is everybody's.
void handle_found_inf(const Op& op, Stack* stack_ptr) {
  auto& stack = *stack_ptr;
  const auto base = stack.size() - op.kinds.size();
  const auto refs = collect(op, stack, base);
  c10::impl::ExcludeDispatchKeyGuard below(kBelow);
  std::vector<MeshPtr> meshes;
  const auto local_of = [&](const at::Tensor& t) {
    const auto* impl = as_shard_tensor(t);
    if (!impl) {
      return t;
    }
    const auto& mesh = impl->layout().mesh_ptr();
    if (std::find(meshes.begin(), meshes.end(), mesh) == meshes.end()) {
      meshes.push_back(mesh);
    }
    return impl->local();
  };
  std::vector<at::Tensor> gradients;
  for (const auto& r : refs) {
    if (r.index >= 0) {
      gradients.push_back(local_of(*r.tensor));
    }
  }
  auto found = local_of(stack[base + 1].toTensor());
  const auto scale = local_of(stack[base + 2].toTensor());
  at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, scale);
  for (const auto& mesh : meshes) {
    for (int64_t m = 0; m < mesh->ndim(); ++m) {
      comm::all_reduce(found, *mesh, m, ReduceOp::Max);
    }
  }
  stack.erase(stack.begin() + static_cast<int64_t>(base), stack.end());
}

} // namespace

void handle_specially(const Op& op, Stack* stack) {
  if (op.entry->options.decompose) {
    op.handle.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
  } else if (op.name == "aten::_amp_foreach_non_finite_check_and_unscale_") {
    handle_found_inf(op, stack);
  } else {
    handle_lists(op, stack);
  }
}

} // namespace shardtensor
