#include "dispatch/lists.h"

#include "comm/traced.h"
#include "dispatch/call.h"
#include "dispatch/check.h"
#include "dispatch/errors.h"
#include "dispatch/excluded_keys.h"
#include "dispatch/plain_tensors.h"
#include "dispatch/write_check.h"
#include "tensor/lists.h"
#include "tensor/move.h"
#include "tensor/overlap.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <unordered_map>

namespace shardtensor {

namespace {

using c10::IValue;
using rules::SolutionPtr;
using torch::jit::Stack;

// One index of the lists, followed by the tensors that are not in lists.
struct ListEntry {
  Refs refs;                             // all of index 0, so that the indices share their cache entries
  c10::SmallVector<size_t, 6> positions; // of refs among all refs
  SolutionPtr solution;                  // null: nothing moves
  bool plain = true;
  at::Tensor result;        // if a kernel has made it
  rules::OperandSet copied; // the refs whose local tensors are copies with the same strides as the others
};

// The entries of the lists. Lists of another length than the first (amsgrad's empty one) are passed unchanged.
std::vector<ListEntry> elements_of(const Refs& refs) {
  std::vector<ListEntry> out;
  const auto add = [&refs](ListEntry& e, size_t i) {
    e.refs.push_back(refs[i]);
    e.refs.back().index = std::min<int32_t>(refs[i].index, 0);
    e.positions.push_back(i);
    e.plain &= refs[i].impl == nullptr;
  };
  for (size_t i = 0; i < refs.size(); ++i) {
    if (refs[i].index >= 0) {
      const auto at = static_cast<size_t>(refs[i].index);
      if (out.size() <= at) {
        out.resize(at + 1);
      }
      add(out[at], i);
    }
  }
  for (size_t i = 0; i < refs.size(); ++i) {
    if (refs[i].index < 0) {
      for (auto& e : out) {
        add(e, i);
      }
    }
  }
  return out;
}

// Whether the entry's tensors have one layout, without summands, and one shape: an elementwise op then needs no communication.
bool stays(const ListEntry& e) {
  const Ref* lead = nullptr;
  for (const auto& r : e.refs) {
    if (!r.impl && r.tensor->dim() == 0) {
      continue;
    }
    lead = lead ? lead : &r;
    if (!r.impl || !can_combine_locally(*r.impl, *lead->impl)) {
      return false;
    }
  }
  return lead != nullptr;
}

// Collects the moves of all entries and makes them together.
class MoveQueue {
 public:
  using PutFn = std::function<void(at::Tensor)>; // gets the piece

  void add(MoveRequest request, PutFn put) {
    requests_.push_back(std::move(request));
    puts_.push_back(std::move(put));
  }
  void go() {
    auto pieces = moved_pieces(requests_);
    for (size_t i = 0; i < pieces.size(); ++i) {
      puts_[i](std::move(pieces[i]));
    }
  }

 private:
  std::vector<MoveRequest> requests_;
  std::vector<PutFn> puts_;
};

// Moves the tensors of an entry to the layouts of its solution, into `locals`, which has one tensor per ref of the whole call.
void move(const Op& op, const ListEntry& e, MoveQueue& moves, std::vector<at::Tensor>& locals) {
  for (size_t k = 0; k < e.refs.size(); ++k) {
    const auto& ref = e.refs[k];
    if (!e.solution->operands[k]) {
      continue;
    }
    const bool written = op.mutated >> ref.arg & 1;
    MoveRequest request{
        *ref.tensor, e.solution->operands[k], cause_of(op, ref), written ? MovePurpose::Owning : MovePurpose::Reading};
    if (!ref.impl || written) {
      request.from = PieceInLayout{locals[e.positions[k]], ref.impl ? ref.impl->layout_ptr() : e.solution->replicated};
    }
    moves.add(std::move(request), [&to = locals[e.positions[k]]](at::Tensor piece) { to = std::move(piece); });
  }
}

// Replaces the stack's tensors and lists by the local tensors of `refs`, which point elsewhere.
template <typename Local>
void put_local(Stack& stack, size_t base, const Refs& refs, const Local& local) {
  for (size_t i = 0; i < refs.size();) {
    auto& slot = stack[base + refs[i].arg];
    if (refs[i].index < 0) {
      slot = local(i++);
    } else {
      const auto arg = refs[i].arg;
      c10::List<at::Tensor> list;
      for (; i < refs.size() && refs[i].arg == arg; ++i) {
        list.push_back(local(i));
      }
      slot = std::move(list);
    }
  }
}

// Runs a rule's kernel on lists of one entry, for cases that the op itself would refuse, such as the norm of an empty piece.
void run_kernel(const Op& op, const Stack& stack, size_t base, ListEntry& e, const std::vector<at::Tensor>& locals) {
  Stack one(stack.begin() + static_cast<int64_t>(base), stack.end());
  put_local(one, 0, e.refs, [&](size_t k) { return locals[e.positions[k]]; });
  const auto at = after_moves(e.refs, *e.solution);
  rules::KernelRun run{op.handle, one, at, *e.solution};
  errors::while_doing(op, [&] { e.solution->kernel(run); });
  if (!one.empty()) {
    std::vector<at::Tensor> own;
    for (const auto i : e.positions) {
      own.push_back(locals[i]);
    }
    e.result = comm::traced::after(one.back().toTensorList().get(0), own); // the kernel's result may not depend on them
  }
}

// Copies the local tensors of an entry if their strides do not match.
void make_dense(ListEntry& e, std::vector<at::Tensor>& locals) {
  const auto is_one = [&](size_t i) { return locals[i].dim() > 0; };
  const auto lead = std::find_if(e.positions.begin(), e.positions.end(), is_one);
  if (lead == e.positions.end() || std::all_of(e.positions.begin(), e.positions.end(), [&](size_t i) {
        return !is_one(i) || same_dense_order(locals[i], locals[*lead]);
      })) {
    return;
  }
  for (size_t k = 0; k < e.positions.size(); ++k) {
    auto& local = locals[e.positions[k]];
    if (!local.is_contiguous()) {
      local = local.contiguous();
      e.copied.add(k);
    }
  }
}

bool needs_kernel(const ListEntry& e, const std::vector<at::Tensor>& locals) {
  const auto is = e.solution ? e.solution->kernel_if : nullptr;
  return is && std::any_of(e.positions.begin(), e.positions.end(), [&](size_t i) { return is(locals[i]); });
}

// Placeholder for a list entry that another kernel has already computed. Its result is discarded.
at::Tensor nothing(const at::Tensor& local) {
  return at::zeros({1}, local.options());
}

at::Tensor wrap_element(const Op& op, const ListEntry& e, at::Tensor local) {
  if (e.plain) {
    return local; // a plain tensor among ShardTensors' lists stays plain
  }
  if (e.solution) {
    return wrap_result(op, std::move(local), *e.solution, 0, e.refs);
  }
  const auto* lead = std::find_if(e.refs.begin(), e.refs.end(), [](const Ref& r) { return r.impl && r.tensor->dim() > 0; });
  lead = lead == e.refs.end() ? std::find_if(e.refs.begin(), e.refs.end(), [](const Ref& r) { return r.impl; }) : lead;
  return with_piece(*lead->tensor, std::move(local), lead->impl->layout_ptr());
}

void run_lists(const Op& op, Stack* stack_ptr) {
  auto& stack = *stack_ptr;
  const auto base = stack.size() - op.kinds.size();
  // The refs point into a copy of the stack, because they are read after the op has taken its arguments off the stack.
  const Stack arguments(stack.begin() + static_cast<int64_t>(base), stack.end());
  const auto refs = collect(op, arguments, 0);
  auto elements = elements_of(refs);

  c10::impl::ExcludeDispatchKeyGuard below(kBelow);
  std::vector<at::Tensor> locals;
  locals.reserve(refs.size());
  for (const auto& r : refs) {
    locals.push_back(r.impl ? r.impl->local() : *r.tensor);
  }
  MoveQueue moves;
  for (auto& e : elements) {
    if (e.plain) {
      continue;
    }
    check_plain(op, e.refs);
    for (const auto& r : e.refs) {
      // Plain numbers may be written: step counters, which are the same on every rank.
      if ((op.mutated >> r.arg & 1) && (r.impl || r.tensor->dim() > 0)) {
        check_writable(op, r.arg, *r.tensor, r.impl);
      }
    }
    if (!op.entry->options.elementwise || any_symbolic(e.refs) || !stays(e)) {
      e.solution = find_solution(op, stack, base, e.refs);
      check_must_match(op, e.refs, *e.solution);
      move(op, e, moves, locals);
    }
  }
  moves.go();
  for (auto& e : elements) {
    if (e.plain) {
      continue;
    }
    if (op.entry->options.dense) {
      make_dense(e, locals);
    }
    if (needs_kernel(e, locals)) {
      run_kernel(op, stack, base, e, locals);
      for (const auto i : e.positions) {
        locals[i] = nothing(locals[i]);
      }
    }
  }
  put_local(stack, base, refs, [&](size_t i) { return locals[i]; });
  op.handle.callBoxed(stack_ptr);
  MoveQueue back;
  for (const auto& e : elements) {
    for (size_t k = 0; k < e.refs.size(); ++k) {
      const auto& owner = e.refs[k];
      const auto& local = locals[e.positions[k]];
      const auto put = [&owner](const at::Tensor& moved) {
        at::Tensor(owner.impl ? owner.impl->local() : *owner.tensor).copy_(moved);
      };
      if (e.solution && e.solution->write_back.has(k)) {
        const auto& to = owner.impl ? owner.impl->layout_ptr() : e.solution->replicated;
        back.add(
            {*owner.tensor, to, cause_of(op, owner, kWrittenBack), MovePurpose::Reading,
             PieceInLayout{local, e.solution->operands[k]}},
            put);
      } else if (e.copied.has(k) && (op.mutated >> owner.arg & 1)) {
        put(local);
      }
    }
  }
  back.go();
  note_writes(op, refs);
  if (op.schema().returns().empty()) {
    return;
  }
  auto results = stack.back().toTensorList();
  c10::List<at::Tensor> out;
  out.reserve(results.size());
  for (size_t n = 0; n < results.size(); ++n) {
    auto& e = elements[n];
    out.push_back(wrap_element(op, e, e.result.defined() ? std::move(e.result) : results.extract(n)));
  }
  stack.back() = std::move(out);
}

// ---- entries that share memory ----

// Whether an index reads or writes what another index writes.
bool indices_overlap(const Op& op, const Refs& refs) {
  c10::SmallVector<TensorAccess, 16> uses;
  for (const auto& r : refs) {
    if (r.impl && r.index >= 0) {
      uses.push_back({r.tensor, r.impl, (op.mutated >> r.arg & 1) != 0, static_cast<size_t>(r.index)});
    }
  }
  return first_overlap(uses).has_value();
}

// The argument for index n alone, of `count` indices.
IValue only(const Op& op, size_t arg, const IValue& value, int64_t n, int64_t count) {
  if (op.kinds[arg] == ArgKind::TensorList) {
    if (value.isNone()) {
      return value;
    }
    const auto list = value.toTensorList();
    return static_cast<int64_t>(list.size()) == count ? IValue(c10::List<at::Tensor>({list.get(n)})) : value;
  }
  if (op.kinds[arg] == ArgKind::Tensor && op.schema().arguments()[arg].name() == "scalars") {
    return value.toTensor().narrow(0, n, 1); // of addcmul and addcdiv: a number per index
  }
  if (value.isList() && static_cast<int64_t>(value.toListRef().size()) == count) {
    c10::List<IValue> one(value.toList().elementType());
    one.push_back(value.toListRef()[n]);
    return one;
  }
  return value;
}

// Runs one index after the other, as torch does, so that each sees the writes of the earlier ones.
void run_in_order(const Op& op, Stack& stack, int64_t count) {
  const auto base = stack.size() - op.kinds.size();
  c10::List<at::Tensor> results;
  for (int64_t n = 0; n < count; ++n) {
    Stack one;
    for (size_t i = 0; i < op.kinds.size(); ++i) {
      one.push_back(only(op, i, stack[base + i], n, count));
    }
    run_lists(op, &one);
    for (size_t i = 0; i < one.size(); ++i) {
      results.push_back(one[i].toTensorList().get(0));
    }
  }
  const bool returns = !op.schema().returns().empty();
  stack.resize(base);
  if (returns) {
    stack.emplace_back(std::move(results));
  }
}

void run_all(const Op& op, Stack* stack) {
  const auto base = stack->size() - op.kinds.size();
  if (op.mutated && op.kinds[0] == ArgKind::TensorList && op.schema().returns().size() <= 1) {
    const auto count = (*stack)[base].toTensorList().size();
    if (count > 1 && indices_overlap(op, collect(op, *stack, base))) {
      return run_in_order(op, *stack, static_cast<int64_t>(count));
    }
  }
  run_lists(op, stack);
}

} // namespace

void handle_lists(const Op& op, Stack* stack) {
  const auto run = [&](Stack* args) {
    try {
      run_all(op, args);
    } catch (c10::Error& e) {
      e.add_context("in " + op.name);
      throw;
    }
  };
  check::on() ? check::around(op, stack, run) : run(stack);
}

} // namespace shardtensor
