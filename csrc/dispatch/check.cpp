#include "dispatch/check.h"

#include "comm/comm.h"
#include "comm/consensus.h"
#include "comm/counts.h"
#include "comm/desync.h"
#include "comm/error_context.h"
#include "comm/tensor_kind.h"
#include "dispatch/excluded_keys.h"
#include "dispatch/refs.h"
#include "kernels/boxes.h"
#include "tensor/move.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include <sstream>

namespace shardtensor {

namespace {

constexpr int64_t kSampled = 1024; // elements of a piece that are compared

// A piece without values: it is part of a graph, it is fake, or this rank is not in the mesh.
bool passes(const Mesh& mesh, const at::Tensor& local) {
  return !mesh.has_this_rank() || is_recording() || local.is_meta() || local.key_set().has_any(kStandIns);
}

void same(const std::string& call, const Mesh& mesh) {
  const comm::UncountedGuard aside;
  const auto differ = comm::differences(call, mesh, comm::kAllDims);
  TORCH_CHECK(
      differ.empty(), "shardtensor's checking mode: the ranks of ", mesh.str(),
      " run different calls, or one call with different arguments:", differ);
}

uint64_t sum_of(const at::Tensor& local) {
  auto flat = kernels::resolved(local.detach()).reshape(-1);
  if (checking() == CheckingMode::Sampled && flat.numel() > kSampled) {
    flat = flat.slice(0, 0, flat.numel(), flat.numel() / kSampled);
  }
  flat = flat.contiguous().cpu();
  const std::string_view bytes(static_cast<const char*>(flat.const_data_ptr()), flat.nbytes());
  return std::hash<std::string_view>()(bytes);
}

// Describes what is wrong with this rank's piece alone; empty if nothing is wrong.
std::string fault_of(const at::Tensor& t, const ShardTensorImpl& impl) {
  const auto& local = impl.local();
  const auto want = impl.layout().local_sizes(t.sizes());
  if (local.sizes() != c10::IntArrayRef(want)) {
    return c10::str("its piece has sizes ", local.sizes(), ", the layout says ", c10::IntArrayRef(want));
  }
  if (local.scalar_type() != t.scalar_type() || local.device().type() != t.device().type()) {
    return c10::str(
        "its piece is ", local.scalar_type(), " on ", local.device(), ", the tensor ", t.scalar_type(), " on ", t.device());
  }
  if (const auto misfit = impl.layout().misfit(t.sizes()); !misfit.empty()) {
    return misfit;
  }
  const auto strides = t.strides();
  const auto lies = order_of(strides), has = order_of(local.strides());
  const bool tells = std::none_of(want.begin(), want.end(), [](int64_t n) { return n <= 1; });
  const bool spread = std::find(strides.begin(), strides.end(), 0) != strides.end();
  if (tells && !spread && !impl.is_detached_view() && lies != has) {
    return c10::str("its piece has strides ", local.strides(), ", the tensor ", strides);
  }
  return "";
}

// The outcome of a call on this rank.
struct CallOutcome {
  std::string error;                  // the error that it raised
  std::string fault;                  // describes a wrong result
  std::string replicated;             // sizes and layouts of the results that several ranks hold alike
  std::vector<size_t> same;           // by mesh dim: a hash of the pieces that all ranks along it hold alike
  std::vector<uint64_t> drawn_before; // by mesh dim: desync::drawn() before the call; empty for what draws nothing
};

std::vector<uint64_t> drawn(const Mesh& mesh) {
  std::vector<uint64_t> out;
  for (int64_t m = 0; m < mesh.ndim(); ++m) {
    out.push_back(comm::desync::drawn(mesh, m));
  }
  return out;
}

void add_result(CallOutcome& end, const at::Tensor& tensor, bool has_values) {
  const auto* impl = tensor.defined() ? as_shard_tensor(tensor) : nullptr;
  if (!impl || passes(impl->layout().mesh(), impl->local())) {
    return;
  }
  c10::impl::ExcludeDispatchKeyGuard below(kBelow);
  const auto& layout = impl->layout();
  const auto what = c10::str(tensor.sizes(), " ", layout.str());
  if (const auto fault = fault_of(tensor, *impl); !fault.empty() && end.fault.empty()) {
    end.fault = what + ": " + fault;
  }
  end.same.resize(layout.mesh().ndim());
  std::optional<size_t> sum;
  for (int64_t m = 0; has_values && m < layout.mesh().ndim(); ++m) {
    if (layout.placement(m).is_replicate()) {
      if (!sum) {
        sum = sum_of(impl->local());
        end.replicated += (end.replicated.empty() ? "" : " or ") + what;
      }
      end.same[m] = c10::hash_combine(end.same[m], *sum);
    }
  }
}

// Raises on all ranks if one rank raised alone or has a wrong result. Needs one collective along each mesh dim.
void same_end(const std::string& call, const Mesh& mesh, CallOutcome end) {
  const comm::UncountedGuard aside;
  end.same.resize(mesh.ndim());
  int64_t failed = !end.error.empty(), went_on = end.error.empty(), wrong = !end.fault.empty();
  for (int64_t m = 0; m < mesh.ndim(); ++m) {
    const auto same = static_cast<int64_t>(end.same[m] >> 1);
    const auto draws =
        end.drawn_before.empty() ? 0 : static_cast<int64_t>((comm::desync::drawn(mesh, m) - end.drawn_before[m]) >> 1);
    const auto seen = comm::largest<7>(mesh, {failed, went_on, wrong, same, -same, draws, -draws}, uint64_t{1} << m);
    const bool differ = seen[3] != -seen[4] && !seen[0], parted = seen[5] != -seen[6] && !seen[0];
    failed = seen[0], went_on = seen[1], wrong = seen[2] || differ || parted;
    if (parted && end.fault.empty()) {
      end.fault = c10::str(
          "the default random generators of the ranks along mesh dim ", m,
          " differ; seed all ranks alike (shardtensor.random.manual_seed), and draw alike on all ranks");
    }
    if (differ && end.fault.empty()) {
      end.fault = c10::str(
          end.replicated, ": its piece differs from that of another rank along mesh dim ", m, ", although both should be equal");
    }
  }
  if (mesh.ndim() > 1) { // a later mesh dim may have found an error
    const auto seen = comm::largest<3>(mesh, {failed, went_on, wrong}, comm::kAllDims);
    failed = seen[0], went_on = seen[1], wrong = seen[2];
  }
  if (failed && went_on) {
    const auto texts = comm::by_rank(end.error.empty() ? "does not" : "raises: " + end.error, mesh, comm::kAllDims);
    TORCH_CHECK(
        false, "shardtensor's checking mode: ", call, " raises on some ranks of ", mesh.str(), " alone", comm::call_site(), ":",
        texts);
  }
  if (wrong) {
    const auto texts = comm::by_rank(end.fault.empty() ? "nothing is wrong" : end.fault, mesh, comm::kAllDims);
    TORCH_CHECK(false, "shardtensor's checking mode: a result of ", call, " is wrong", comm::call_site(), ":", texts);
  }
}

} // namespace

void set_checking(CheckingMode value) {
  check::g_checking = static_cast<uint8_t>(value);
}
CheckingMode checking() {
  return static_cast<CheckingMode>(check::g_checking.load());
}

namespace check {

void same_call(const std::string& call, const Mesh& mesh, const at::Tensor& local) {
  if (!passes(mesh, local)) {
    same(call, mesh);
  }
}

void result(const std::string& what, const at::Tensor& tensor) {
  const auto& impl = shard_tensor(tensor, "a result");
  if (!passes(impl.layout().mesh(), impl.local())) {
    CallOutcome end;
    add_result(end, tensor, /*has_values=*/true);
    same_end(what, impl.layout().mesh(), std::move(end));
  }
}

namespace {

std::string text_of(const Op& op, const torch::jit::Stack& stack, size_t base, const Refs& refs) {
  std::ostringstream out;
  out << op.name << "(";
  for (size_t i = 0; i < refs.size(); ++i) {
    const auto& r = refs[i];
    out << (i ? ", " : "") << r.tensor->scalar_type() << " " << r.tensor->sizes() << " "
        << (r.impl ? r.impl->layout().str() : "plain");
  }
  for (size_t i = 0; i < op.kinds.size(); ++i) {
    const auto& v = stack[base + i];
    if (op.kinds[i] == ArgKind::Other && (v.isScalar() || v.isList() || v.isString())) {
      out << ", " << op.schema().arguments()[i].name() << "=" << v;
    }
  }
  out << ")";
  return out.str();
}

at::Tensor replicated(const at::Tensor& t) {
  return moved(t, Layout::replicated(as_shard_tensor(t)->layout().mesh_ptr()));
}

bool holds_summands(const c10::IValue& value) {
  const auto* impl = value.isTensor() && value.toTensor().defined() ? as_shard_tensor(value.toTensor()) : nullptr;
  return impl && impl->layout().has_partial();
}

// Rules never read values, so summands are multiplied and divided like any numbers. If a factor is infinite or a divisor is 0,
// the sum can be NaN where the whole result is not. To find this, run the same call on whole operands.
void same_as_whole(const Op& op, RunFn run, torch::jit::Stack args, c10::ArrayRef<c10::IValue> results, const Mesh& mesh) {
  const comm::UncountedGuard aside;
  c10::impl::ExcludeDispatchKeyGuard below(kBelow);
  bool odd = false;
  for (const auto& value : results) {
    odd |= holds_summands(value) && !as_shard_tensor(value.toTensor())->local().isfinite().all().item<bool>();
  }
  if (!comm::largest<1>(mesh, {odd}, comm::kAllDims)[0]) {
    return;
  }
  for (auto& value : args) {
    if (holds_summands(value)) {
      value = replicated(value.toTensor());
    }
  }
  {
    const auto before = g_checking.exchange(0);
    const auto again = c10::make_scope_exit([&] { g_checking = before; });
    run(&args);
  }
  bool lost = false;
  for (size_t i = 0; i < results.size(); ++i) {
    if (holds_summands(results[i])) {
      const auto here = [&](const c10::IValue& value) { return as_shard_tensor(replicated(value.toTensor()))->local().isnan(); };
      lost |= here(results[i]).logical_and(here(args[i]).logical_not()).any().item<bool>();
    }
  }
  TORCH_CHECK(
      !lost, "shardtensor's checking mode: ", op.name, " gives NaN for summands, but not for the whole tensor", comm::call_site(),
      ": a factor is infinite, or a divisor is 0. Redistribute the operand whose placement is Partial before it.");
}

} // namespace

void around(const Op& op, torch::jit::Stack* stack, RunFn run) {
  const auto base = stack->size() - op.kinds.size();
  const auto refs = collect(op, *stack, base);
  MeshPtr mesh;
  std::vector<at::Tensor> written;
  bool alike = true;
  for (const auto& r : refs) {
    if (r.impl) {
      alike &= !mesh || mesh == r.impl->layout().mesh_ptr();
      mesh = r.impl->layout().mesh_ptr();
      alike &= !passes(*mesh, r.impl->local(true));
    }
    if (op.mutated >> r.arg & 1) {
      written.push_back(*r.tensor);
    }
  }
  if (!mesh || !alike) {
    return run(stack);
  }
  same(text_of(op, *stack, base, refs), *mesh);
  const bool has_values = !op.is_view && !(op.entry && op.entry->options.unwritten); // views may be of fresh memory
  torch::jit::Stack given;
  if (!op.mutated && has_values && std::any_of(stack->begin() + static_cast<int64_t>(base), stack->end(), holds_summands)) {
    given.assign(stack->begin() + static_cast<int64_t>(base), stack->end());
  }
  CallOutcome end;
  end.drawn_before = drawn(*mesh);
  std::exception_ptr failed;
  try {
    run(stack);
  } catch (const c10::Error& e) {
    failed = std::current_exception();
    end.error = e.what_without_backtrace();
  } catch (const std::exception& e) {
    failed = std::current_exception();
    end.error = e.what();
  }
  const auto first = stack->size() - op.returns_argument.size();
  if (!failed) {
    for (const auto& t : written) {
      add_result(end, t, has_values);
    }
    for (size_t i = first; i < stack->size(); ++i) {
      if (op.returns_argument[i - first] < 0) {
        each_tensor((*stack)[i], [&](const at::Tensor& t) { add_result(end, t, has_values); });
      }
    }
  }
  same_end(op.name, *mesh, std::move(end));
  if (failed) {
    std::rethrow_exception(failed);
  }
  if (!given.empty()) {
    same_as_whole(op, run, std::move(given), c10::ArrayRef<c10::IValue>(stack->data() + first, stack->size() - first), *mesh);
  }
}

} // namespace check

} // namespace shardtensor
