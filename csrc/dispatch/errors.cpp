#include "dispatch/errors.h"

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
  // Names the difference, if the texts of the two meshes are equal.
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

void sizes_differ(const Op& op, const ArgumentDim& a, const ArgumentDim& b, const Mesh& mesh) {
  const auto text = [&](const ArgumentDim& p) {
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

} // namespace shardtensor::errors
