#include "dispatch/write_check.h"

#include "dispatch/modes.h"

#include <ATen/MemoryOverlap.h>
#include <torch/csrc/autograd/function.h>

namespace shardtensor {

namespace {

// True if the op reads this argument of one element (fill_'s value, x[mask] = value) before it writes.
bool is_read_first(const Op& op, const Ref& r) {
  return r.tensor->sym_numel() == 1 && op.schema().arguments()[r.arg].name().rfind("value", 0) == 0;
}

} // namespace

void check_writable(const Op& op, int64_t arg, const at::Tensor& t, const ShardTensorImpl* impl) {
  if (!impl) {
    TORCH_CHECK(
        promotion() == Promotion::Replicate && !at::GradMode::is_enabled(), op.name,
        ": writes a ShardTensor's value into the plain torch.Tensor '", op.schema().arguments()[arg].name(), "' of sizes ",
        t.sizes(),
        "; pass a ShardTensor there (shardtensor.distribute_tensor), or, under torch.no_grad(), write inside of "
        "shardtensor.implicit_replication(): every rank then writes the whole value");
    return;
  }
  // Users cannot see the base of a view that autograd made, and a write to a tensor without elements has no effect.
  TORCH_CHECK(
      !impl->is_detached_view() || impl->detached_view()->put_back || t.numel() == 0 ||
          (!impl->watches() && !torch::autograd::get_current_node()),
      op.name, ": argument '", op.schema().arguments()[arg].name(), "' (", impl->layout().str(), ", rank ",
      impl->layout().mesh().rank(),
      ") comes from a view that had to move data between ranks, so writing to it would not reach the base tensor. Write to the "
      "base tensor, redistribute it before the view, or clone() the view.");
  // The kernel would raise too, but not on a rank with an empty piece.
  TORCH_CHECK(
      at::has_internal_overlap(t) != at::MemOverlap::Yes || (op.entry && op.entry->options.repeats), op.name, ": argument '",
      op.schema().arguments()[arg].name(), "' (", impl->layout().str(), ", rank ", impl->layout().mesh().rank(),
      "): unsupported operation: more than one element of the written-to tensor refers to a single memory location. clone() it "
      "before the write.");
}

void check_no_overlap(const Op& op, const Refs& refs, size_t written) {
  const auto& w = refs[written];
  for (const auto& r : refs) {
    if (r.impl && w.impl && r.impl != w.impl && w.impl->shares_storage(*r.impl) &&
        at::get_overlap_status(*w.tensor, *r.tensor) == at::MemOverlapStatus::Partial && !is_read_first(op, r)) {
      TORCH_CHECK(
          false, op.name, ": arguments '", op.schema().arguments()[w.arg].name(), "' and '",
          op.schema().arguments()[r.arg].name(), "' (", w.impl->layout().str(), ", rank ", w.impl->layout().mesh().rank(),
          "): unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory "
          "location. clone() one of them before the write.");
    }
  }
}

} // namespace shardtensor
