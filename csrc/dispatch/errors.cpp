#include "dispatch/errors.h"

#include "dispatch/ahead.h"
#include "dispatch/modes.h"
#include "dispatch/traced.h"

#include <ATen/MemoryOverlap.h>
#include <torch/csrc/autograd/function.h>

#include <set>
#include <sstream>

namespace shardtensor::errors {

namespace {
const std::string& argument_name(const Op& op, int64_t arg) {
  return op.schema().arguments()[arg].name();
}

// An argument whose dtype Options.one_dtype does not allow.
const rules::TensorArg* odd_one(const rules::Options& options, const rules::Call& call) {
  auto wanted = call.tensors[0].dtype;
  bool may_be_float = options.or_float && (wanted == at::kHalf || wanted == at::kBFloat16);
  for (size_t i = 1; i < call.tensors.size(); ++i) {
    const auto& t = call.tensors[i];
    if (options.one_dtype >> t.arg & 1) {
      wanted = may_be_float && t.dtype == at::kFloat ? at::kFloat : wanted;
      may_be_float = false;
      if (t.dtype != wanted) {
        return &t;
      }
    }
  }
  return nullptr;
}
} // namespace

std::string layouts_of(const rules::Call& call) {
  std::ostringstream out;
  for (size_t i = 0; i < call.tensors.size() && i < 8; ++i) {
    const auto& t = call.tensors[i];
    out << (i ? ", " : "") << call.schema.arguments()[t.arg].name();
    if (t.index >= 0) {
      out << "[" << t.index << "]";
    }
    out << ": " << t.sym_sizes() << " " << t.layout->str();
  }
  out << (call.tensors.size() > 8 ? ", ..." : "") << "; rank " << call.mesh.rank();
  return out.str();
}

void call_failed(const Op& op, const Refs& refs, const rules::Solution& solution, c10::Error* error) {
  if (any_traced(refs)) {
    return;
  }
  const auto& mesh = solution.replicated->mesh();
  std::ostringstream out;
  out << "in " << op.name;
  for (size_t i = 0; i < refs.size() && i < 8; ++i) {
    out << (i ? ", " : " on ") << refs[i].tensor->sizes() << " " << (refs[i].impl ? refs[i].impl->layout().str() : "plain");
  }
  out << (refs.size() > 8 ? ", ..." : "") << ", rank " << mesh.rank();
  if (error) {
    error->add_context(out.str());
  }
  uint64_t due = 0; // a sum of no dims would have been reduced at once
  for (const auto& result : solution.results) {
    for (int64_t m = 0; m < mesh.ndim(); ++m) {
      due |= static_cast<uint64_t>(result.sizes.empty() && reduces_ahead() && result.layout->placement(m).is_partial()) << m;
    }
  }
  comm::tell_failure(op.name, mesh, due);
}

std::string plain_tensor_text(const Op& op, int64_t arg, const at::Tensor& t) {
  std::ostringstream out;
  out << op.name << ": argument '" << argument_name(op, arg) << "' is a plain torch.Tensor of sizes " << t.sizes()
      << " among ShardTensors. Distribute it first (shardtensor.distribute_tensor), or allow plain tensors to be taken as "
         "replicated: shardtensor.set_promotion_mode(\"replicate\") or `with shardtensor.implicit_replication():`.";
  if (op.entry) {
    out << op.entry->options.if_plain;
  }
  return out.str();
}

void plain_tensor(const Op& op, int64_t arg, const at::Tensor& t) {
  TORCH_CHECK(false, plain_tensor_text(op, arg, t), " got mixed torch.Tensor and DTensor");
}

void different_meshes(const Op& op, const Layout& a, const Layout& b) {
  const auto &first = a.mesh().description(), &second = b.mesh().description();
  // What differs, if the texts do not.
  const auto what = [&, alike = a.str() == b.str()](const Mesh::Description& d) -> std::string {
    if (!alike) {
      return "";
    }
    return first.ranks == second.ranks ? c10::str(" of groups ", c10::ArrayRef<std::string>(d.groups))
                                       : c10::str(" of ranks ", c10::IntArrayRef(d.ranks));
  };
  TORCH_CHECK(
      false, op.name, ": arguments live on different meshes, ", a.str(), what(first), " and ", b.str(), what(second), "; rank ",
      a.mesh().rank(), ". Redistribute one of them first.");
}

void sizes_differ(const Op& op, const Place& a, const Place& b, const Mesh& mesh) {
  const auto text = [&](const Place& p) {
    return c10::str(
        "'", argument_name(op, p.arg), "' (", p.tensor.sym_size(p.dim), ") at dim ", p.dim, " of sizes ", p.tensor.sym_sizes());
  };
  TORCH_CHECK(
      false, op.name, ": the size of argument ", text(b), " must match the size of argument ", text(a), "; rank ", mesh.rank());
}

void refused(const Op& op, const std::string& why, const rules::Call& call) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.name, ": cannot be done on a ShardTensor: ", why, ". (", layouts_of(call), ")");
}

void check_taken(const Op& op, const rules::Call& call) {
  const auto dtype = call.tensors[0].dtype;
  const auto numbers = dtype == at::kFloat || dtype == at::kDouble                 ? rules::kWideReals
                       : c10::isFloatingType(dtype)                                ? rules::kNarrowReals
                       : dtype == at::kComplexFloat || dtype == at::kComplexDouble ? rules::kWideComplex
                       : c10::isComplexType(dtype)                                 ? rules::kNarrowComplex
                       : dtype == at::kBool                                        ? rules::kBools
                                                                                   : rules::kIntegers;
  const auto& options = op.entry->options;
  if (const auto* t = odd_one(options, call)) {
    TORCH_CHECK(
        false, op.name, ": expected one dtype, but '", argument_name(op, call.tensors[0].arg), "' has ", dtype, " and '",
        argument_name(op, t->arg), "' has ", t->dtype, " (", layouts_of(call), ")");
  }
  TORCH_CHECK_NOT_IMPLEMENTED(options.takes & numbers, op.name, ": not implemented for '", dtype, "' (", layouts_of(call), ")");
}

const char* why_gathered(const Op& op) {
  return op.entry && op.entry->rule ? "needs whole inputs" : "has no sharding rule";
}

void gathers(const Op& op, const rules::Call& call) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.name, ": ", why_gathered(op),
      ", and strict mode forbids gathering its inputs. Register a rule with "
      "ShardTensor.register_dispatch_handler, redistribute the inputs to Replicate, or leave strict mode. (",
      layouts_of(call), ")");
}

void check_writable(const Op& op, int64_t arg, const at::Tensor& t, const ShardTensorImpl* impl) {
  if (!impl) {
    TORCH_CHECK(
        promotion() == Promotion::Replicate && !at::GradMode::is_enabled(), op.name,
        ": writes a ShardTensor's value into the plain torch.Tensor '", argument_name(op, arg), "' of sizes ", t.sizes(),
        "; pass a ShardTensor there (shardtensor.distribute_tensor), or, under torch.no_grad(), write inside of "
        "shardtensor.implicit_replication(): every rank then writes the whole value");
    return;
  }
  // No user can see the base of a view that autograd made; and a write to a tensor without elements loses nothing.
  TORCH_CHECK(
      !impl->broken_view() || impl->copied()->put_back || t.numel() == 0 ||
          (!impl->watches() && !torch::autograd::get_current_node()),
      op.name, ": argument '", argument_name(op, arg), "' (", impl->layout().str(), ", rank ", impl->layout().mesh().rank(),
      ") comes from a view that had to move data between ranks, so writing to it would not reach the base tensor. Write to the "
      "base tensor, redistribute it before the view, or clone() the view.");
  // The kernel would raise too, but not on a rank with an empty piece.
  TORCH_CHECK(
      at::has_internal_overlap(t) != at::MemOverlap::Yes || (op.entry && op.entry->options.repeats), op.name, ": argument '",
      argument_name(op, arg), "' (", impl->layout().str(), ", rank ", impl->layout().mesh().rank(),
      "): unsupported operation: more than one element of the written-to tensor refers to a single memory location. clone() it "
      "before the write.");
}

namespace {

// The one element of such an argument (fill_'s value, x[mask] = value) is read before anything is written.
bool is_read_first(const Op& op, const Ref& r) {
  return r.tensor->sym_numel() == 1 && argument_name(op, r.arg).rfind("value", 0) == 0;
}

} // namespace

void check_apart(const Op& op, const Refs& refs, size_t written) {
  const auto& w = refs[written];
  for (const auto& r : refs) {
    if (r.impl && w.impl && r.impl != w.impl && w.impl->shares_storage(*r.impl) &&
        at::get_overlap_status(*w.tensor, *r.tensor) == at::MemOverlapStatus::Partial && !is_read_first(op, r)) {
      TORCH_CHECK(
          false, op.name, ": arguments '", argument_name(op, w.arg), "' and '", argument_name(op, r.arg), "' (",
          w.impl->layout().str(), ", rank ", w.impl->layout().mesh().rank(),
          "): unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory "
          "location. clone() one of them before the write.");
    }
  }
}

} // namespace shardtensor::errors
