// Scaled dot product attention: batch and heads may be cut, queries too. Keys may be cut together with the queries, where torch's
// kernel gives the logs of the sums (ring.h); or alone: then each rank attends to its own keys, and the results are merged.
#include "rules/kernel_utils.h"
#include "rules/ops/ring.h"
#include "rules/pad_empty.h"
#include "rules/registry.h"
#include "tensor/symbolic.h"

#include <ATen/ATen.h>

#include <limits>

namespace shardtensor::rules {

namespace {

// Each rank would draw its own mask, but a replicated dim needs the same mask on all ranks.
void check_dropout(const Call& call) {
  const auto p = call.arg(call.position("dropout_p")).toDouble();
  for (const auto& t : call.tensors) {
    TORCH_CHECK(
        p == 0.0 || t.layout->is_replicated(), call.schema.name(), ": dropout_p is ", p, " and ",
        call.schema.arguments()[t.arg].name(), " is ", t.layout->str(),
        ", but the fused kernel draws a separate mask on each rank; use dropout_p=0, "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or replicate the inputs");
  }
}

struct Attention {
  Dims query, key, statistics, mask; // the output is like the query, the value like the key

  const Dims& of(const std::string& name) const {
    return name == "key" || name == "value" ? key : name == "logsumexp" || name == "log_sumexp" ? statistics : query;
  }
};

// The query's heads for each of the key's. A graph's symbols stay symbols: it is guarded to have this ratio.
int64_t repeats_of(const TensorArg& query, const TensorArg& key) {
  const auto heads = query.sym_size(1), groups = key.sym_size(1);
  if (heads == groups) {
    return 1;
  }
  const auto ratio = hint_of(heads) / std::max<int64_t>(hint_of(groups), 1);
  return ratio > 1 && heads == groups * ratio ? ratio : std::max<int64_t>(query.size(1) / std::max<int64_t>(key.size(1), 1), 1);
}

// Statistics of the others are padded along s, so that the queries stay whole, except in a ring.
enum class FusedKernel {
  Flash,
  Efficient,
  Cudnn, // its statistics have a last dim of 1
  Other,
};

// For the kernel that runs if only the keys are cut: their factor.
struct KeysFactor {
  int64_t factor;
};

// Attends to this rank's keys, then merges the ranks' results: the mean, weighted by the sums of exponentials.
void merge(KernelRun& run) {
  const auto ranks = run.mesh_dims(kernel_data<KeysFactor>(run.solution).factor);
  const auto mask_at = argument(run, "attn_mask");
  const auto mask = mask_at < 0 ? at::Tensor() : run.arg(mask_at).toOptional<at::Tensor>().value_or(at::Tensor());
  const bool no_keys = is_empty(run.arg(argument(run, "key")).toTensor());
  const auto first = run.base();
  call_op_nonempty(run);
  if (!ranks) {
    return;
  }
  auto out = run.stack[first].toTensor(), log = run.stack[first + 1].toTensor();
  const auto type = out.scalar_type(), of_logs = log.scalar_type();
  out = out.to(accumulate_type(type));
  const auto nothing = -std::numeric_limits<double>::infinity();
  if (no_keys) {
    out = at::zeros_like(out);
    log = at::full_like(log, nothing);
  } else if (mask.defined()) {
    const auto blind = blind_rows(mask);
    out = out.masked_fill(blind.unsqueeze(-1), 0);
    log = log.masked_fill(blind, nothing);
  }
  auto parts = at::cat({out, log.unsqueeze(-1).to(out.scalar_type())}, -1).unsqueeze(0); // one message
  for (int64_t m = 0; m < run.mesh().ndim(); ++m) {
    if (ranks >> m & 1) {
      parts = gather_slices(parts, 0, run.mesh(), m);
    }
  }
  const auto logs = parts.select(-1, parts.size(-1) - 1);
  const auto total = logs.logsumexp({0});
  const auto weights = (logs - total).exp().nan_to_num(0).unsqueeze(-1);
  run.stack[first] = parts.narrow(-1, 0, parts.size(-1) - 1).mul(weights).sum({0}).to(type);
  run.stack[first + 1] = total.to(of_logs);
}

// query [b, h, s, d], key and value [b, h / repeats, t, d]. `alone`: the kernel if the keys are cut alone.
Attention attention_dims(const Call& call, Rule& rule, FusedKernel fused, Kernel kernel, Kernel alone) {
  check_dropout(call);
  const auto& q = call.tensor(call.position("query"));
  const auto& k = call.tensor(call.position("key"));
  const bool causal = call.flag(call.position("is_causal"));
  const auto& v = call.tensor(call.position("value"));
  const bool biased = argument(call, "attn_bias") >= 0 && call.operand(argument(call, "attn_bias")) >= 0;
  const bool ring = fused != FusedKernel::Other && !biased && cut_together(*q.layout, *k.layout, *v.layout, 2) &&
                    q.sym_size(2) > 0 && k.sym_size(2) > 0; // of a bias, kernels want aligned rows
  const bool merges =
      fused == FusedKernel::Flash && !causal && keys_cut_alone(*q.layout, *k.layout, *v.layout, 2) && k.sym_size(2) > 0;
  const Factor queries{
      .whole = fused != FusedKernel::Flash && !ring,
      .kernel = ring || causal,
      .reduce = ReduceOp::Sum, // for the keys' gradients
      .size = ring ? q.sym_size(2) : c10::SymInt(-1)};
  const auto b = rule.reduced(ReduceOp::Sum), h = rule.reduced(ReduceOp::Sum); // for a mask's gradient
  const auto s = rule.factor(queries);
  const auto repeats = repeats_of(q, k);
  Attention a;
  a.query = {Dim(b), Dim(h, repeats), Dim(s), Dim(kNone)};
  // A query reads all keys, or those up to its own place. The number of keys only affects costs, and not if it is a symbol.
  const auto keys = ring ? k.sym_size(2).maybe_as_int().value_or(1) : 0;
  a.key = {
      Dim(b), Dim(h), ring ? rule.windows(s, causal ? Reach{1, 1, -keys, 0} : Reach{0, 1, 0, keys - 1}) : Dim(kNone), Dim(kNone)};
  if (merges) {
    a.key[2] = Dim(rule.factor({.kernel = true, .reduce = ReduceOp::Sum})); // for the queries' gradient
    rule.kernel_data = KeysFactor{a.key[2].factor};
  }
  a.statistics = {Dim(b), Dim(h, repeats), Dim(s)};
  if (fused == FusedKernel::Cudnn) {
    a.statistics.emplace_back(kNone);
  }
  for (const auto& t : call.tensors) {
    const auto& name = call.schema.arguments()[t.arg].name();
    if (name != "attn_mask" && name != "attn_bias") {
      const auto& dims = a.of(name);
      rule.operands.emplace_back(t.dim() == static_cast<int64_t>(dims.size()) ? dims : Dims(t.dim(), Dim(kNone)));
      rule.operands.back().kept_cut = ring;
      continue;
    }
    Dims mask; // right-aligned to [b, h, s, t]
    for (int64_t d = 0; d < t.dim(); ++d) {
      const auto at = d + 4 - t.dim();
      const bool follows = at < 3 && (!t.is_one(d) || q.is_one(at));
      mask.push_back(follows ? a.query[at] : at == 3 && merges && !t.is_one(d) ? a.key[2] : Dim(kNone));
    }
    a.mask = mask;
    rule.operands.emplace_back(mask);
  }
  rule.kernel = queries.kernel ? kernel : merges ? alone : call_op_nonempty;
  rule.always_kernel = queries.kernel;
  rule.kernel_if = queries.kernel ? nullptr : is_empty;
  return a;
}

template <FusedKernel fused>
Rule attention(const Call& call) {
  Rule rule;
  const auto a = attention_dims(call, rule, fused, attend, merge);
  rule.results = {Result(a.query), Result(a.statistics)};
  for (auto& r : rule.results) {
    if (rule.kernel_data.has_value()) {
      r.reduce.emplace(std::nullopt); // merged: the same on all ranks
    }
  }
  return rule; // further results, such as seeds, are whole
}

template <FusedKernel fused>
Rule attention_backward(const Call& call) {
  Rule rule;
  const auto a = attention_dims(call, rule, fused, attend_backward, call_op_nonempty);
  rule.results = {Result(a.query), Result(a.key), Result(a.key), Result(a.mask)};
  rule.linear_in({0});
  return rule;
}

// The choice of an attention kernel must not depend on one rank's piece, so this takes the one that always works.
void choice_kernel(KernelRun& run) {
  run.returns({int64_t{0}}); // SDPBackend::math
}

Rule choice(const Call& call) {
  return unread(call, choice_kernel);
}

} // namespace

void register_attention(Registry& r) {
  r.add("attention", {"_scaled_dot_product_attention_math"}, kAsOtherOps, {.autograd = formulas::attention_math});
  r.add("attention", {"scaled_dot_product_attention"}, kAsOtherOps, {.autograd = formulas::attention});
  const Options rows{.symbols = true, .asks_order = true}; // in memory, the rows of all heads lie side by side
  r.add("attention", {"_fused_sdp_choice"}, choice);
  r.add("attention", {"_scaled_dot_product_cudnn_attention"}, attention<FusedKernel::Cudnn>, rows);
  r.add("attention", {"_scaled_dot_product_cudnn_attention_backward"}, attention_backward<FusedKernel::Cudnn>, rows);
  r.add("attention", {"_scaled_dot_product_efficient_attention"}, attention<FusedKernel::Efficient>, rows);
  r.add("attention", {"_scaled_dot_product_efficient_attention_backward"}, attention_backward<FusedKernel::Efficient>, rows);
  r.add("attention", {"_scaled_dot_product_fused_attention_overrideable"}, attention<FusedKernel::Other>, rows);
  r.add("attention", {"_scaled_dot_product_fused_attention_overrideable_backward"}, attention_backward<FusedKernel::Other>, rows);
  r.add(
      "attention", {"_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"},
      attention<FusedKernel::Flash>, rows);
  r.add(
      "attention", {"_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_flash_attention_for_cpu_backward"},
      attention_backward<FusedKernel::Flash>, rows);
}

} // namespace shardtensor::rules
