// Whole layers: recurrent ones, and the fused encoder layer and attention that modules call in eval mode. The batch may be cut,
// weights stay whole.
#include "rules/kernel_utils.h"
#include "rules/registry.h"

#include <ATen/ATen.h>

namespace shardtensor::rules {

namespace {

// (input, hx, params, ...): input [t, n, in] or [n, t, in], hidden states [layers, n, hidden]; the results have the same dims.
Rule recurrent(const Call& call) {
  Rule rule;
  const bool batch_first = call.flag(call.position("batch_first"));
  const auto n = rule.factor();
  const Dims sequence = batch_first ? Dims{Dim(n), Dim(kNone), Dim(kNone)} : Dims{Dim(kNone), Dim(n), Dim(kNone)};
  const Dims state{Dim(kNone), Dim(n), Dim(kNone)};
  const auto params = call.position("params");
  for (const auto& t : call.tensors) {
    const bool whole = t.arg == params || t.dim() != 3;
    rule.operands.emplace_back(whole ? Dims(t.dim(), Dim(kNone)) : t.arg == 0 ? sequence : state);
  }
  rule.results.assign(call.schema.returns().size(), Result(state));
  rule.results[0].dims = sequence;
  return rule;
}

// Operands of three dims are sequences [n, t, e], a mask of padding (type 1) is [n, t]; results [n, ...].
Rule fused_layer(const Call& call) {
  auto rule = replicate(call);
  const auto n = rule.factor();
  const auto mask = call.position("mask");
  const auto per_sequence = call.integer(call.position("mask_type"), -1) == 1;
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const auto& t = call.tensors[i];
    if (t.arg == mask ? per_sequence || t.dim() > 2 : t.dim() == 3) {
      rule.operands[i].dims[0] = n;
    }
  }
  rule.results.emplace_back(Dims{Dim(n), Dim(kNone), Dim(kNone)});
  return rule;
}

// Its second result: the attention weights, [n, t, t] or [n, h, t, t], or none.
Rule fused_attention(const Call& call) {
  auto rule = fused_layer(call);
  if (call.flag(call.position("need_weights"))) {
    rule.results.push_back(rule.results[0]);
    if (!call.flag(call.position("average_attn_weights"))) {
      rule.results.back().dims.emplace_back(kNone);
    }
  }
  return rule;
}

// Returns false: TransformerEncoder calls this before it makes a nested tensor, which cannot hold ShardTensors.
void left_aligned_kernel(KernelRun& run) {
  run.returns({false});
}

Rule left_aligned(const Call& call) {
  return unread(call, left_aligned_kernel);
}

} // namespace

void register_recurrent(Registry& r) {
  const Options local{
      .autograd = formulas::local_autograd, .plain = true}; // the modules make the first hidden state as a plain tensor
  r.add("recurrent", {"gru.input", "lstm.input", "rnn_relu.input", "rnn_tanh.input"}, recurrent, local);
  r.add("attention", {"_native_multi_head_attention"}, fused_attention);
  r.add("attention", {"_nested_tensor_from_mask_left_aligned"}, left_aligned);
  r.add("attention", {"_transformer_encoder_layer_fwd"}, fused_layer);
}

} // namespace shardtensor::rules
