// Matrix products: factors as in einsum. If the contracted factor is sharded, results hold summands.
#include "rules/kernel_utils.h"
#include "rules/registry.h"
#include "rules/solution.h"

#include <ATen/ATen.h>

namespace shardtensor::rules {

namespace {

// An out= operand has the result's dims, and holds summands if the result does.
void add_summing_out(const Call& call, Rule& rule) {
  if (call.tensors.size() == rule.operands.size()) {
    return;
  }
  for (auto& group : rule.linear) {
    group.operands.add(rule.operands.size());
  }
  rule.operands.emplace_back(rule.results[0].dims);
  rule.operands.back().summand = true;
}

// Whether a factor of the product has more than one index.
bool is_wide(const Call& call, const Rule& rule, int64_t factor) {
  for (size_t i = 1; i < rule.operands.size(); ++i) {
    for (size_t d = 0; d < rule.operands[i].dims.size(); ++d) {
      if (rule.operands[i].dims[d].factor == factor) {
        return !call.tensors[i].is_one(static_cast<int64_t>(d));
      }
    }
  }
  return false;
}

template <Text text>
Rule product(const Call& call) {
  auto rule = notation(text.chars);
  add_summing_out(call, rule);
  return rule;
}

// beta * self + alpha * product. self counts only once, so it holds summands if a contracted factor is sharded. Linear in self
// together with either operand of the product.
template <Text text>
Rule plus_product(const Call& call) {
  auto rule = notation(text.chars);
  rule.operands.insert(rule.operands.begin(), Operand());
  Broadcast out(rule.results[0].dims);
  std::transform(out.dims.begin(), out.dims.end(), out.wide.begin(), [&](const Dim& d) { return is_wide(call, rule, d.factor); });
  rule.operands[0].dims = out.of(call.tensors[0], call.tensors[0].dim());
  rule.operands[0].summand = true;
  rule.linear.clear();
  rule.jointly_linear(0b011);
  rule.jointly_linear(0b101);
  add_summing_out(call, rule);
  return rule;
}

// torch's addmv returns the shape of a broadcast self if the contracted dim is empty; a piece may be empty.
void addmv_kernel(KernelRun& run) {
  run.arg(0) = run.arg(0).toTensor().expand({run.arg(1).toTensor().size(0)});
  run.call_op();
}

Rule addmv(const Call& call) {
  auto rule = plus_product<"ik,k->i">(call);
  rule.kernel = addmv_kernel;
  rule.always_kernel = call.tensors[0].dim() == 0 || call.tensors[0].is_one(0);
  return rule;
}

// gelu or relu needs the whole sum, so there are no summands.
Rule addmm_activation(const Call& call) {
  auto rule = plus_product<"ik,kj->ij">(call);
  for (auto& f : rule.factors) {
    f.whole = f.reduce.has_value();
  }
  rule.linear.clear();
  return rule;
}

// ---- matmul: [..., n, k] x [..., k, m], either one without its n or m, batch dims broadcast ----

struct MatmulDims {
  Dims self, other, out;
};

// Every factor may be summed over, because in the gradients each factor is missing from some result.
MatmulDims matmul_dims(const TensorArg& a, const TensorArg& b, Rule& rule) {
  const auto factor = [&] { return rule.reduced(ReduceOp::Sum); };
  MatmulDims m;
  const auto batch_a = std::max<int64_t>(a.dim() - 2, 0), batch_b = std::max<int64_t>(b.dim() - 2, 0);
  Broadcast all(fresh_dims(rule, std::max(batch_a, batch_b), {.reduce = ReduceOp::Sum}));
  all.widen(a, batch_a);
  all.widen(b, batch_b);
  m.self = all.of(a, batch_a);
  m.other = all.of(b, batch_b);
  m.out = all.dims;
  const auto k = factor();
  if (a.dim() > 1) {
    m.out.emplace_back(factor());
    m.self.push_back(m.out.back());
  }
  m.self.emplace_back(k);
  m.other.emplace_back(k);
  if (b.dim() > 1) {
    m.out.emplace_back(factor());
    m.other.push_back(m.out.back());
  }
  return m;
}

Rule matmul(const Call& call) {
  Rule rule;
  const auto m = matmul_dims(call.tensors[0], call.tensors[1], rule);
  rule.operands.emplace_back(m.self);
  rule.operands.emplace_back(m.other);
  rule.results.emplace_back(m.out);
  rule.linear_in({0, 1});
  add_summing_out(call, rule);
  return rule;
}

// [..., x, y] as [x, rest * y], the batch dims folded into the second.
at::Tensor fold_right(const at::Tensor& t) {
  const auto x = t.size(-2);
  return t.movedim(-2, 0).reshape({x, t.numel() / std::max<int64_t>(x, 1)});
}

at::Tensor times(const at::Tensor& left, const at::Tensor& right, c10::IntArrayRef sizes) {
  // A gradient without batch dims sums over them: one product of folded matrices, not a batch of products and their sum.
  if (sizes.size() == 2 && left.dim() > 2 && left.sizes().slice(0, left.dim() - 2) == right.sizes().slice(0, right.dim() - 2) &&
      left.numel() && right.numel()) {
    return at::mm(fold_right(left), fold_right(right.transpose(-1, -2)).t());
  }
  return at::sum_to(at::matmul(left, right), sizes);
}

// The gradients of this rank's pieces. torch has no kernel of its own for strided tensors.
void matmul_backward_kernel(KernelRun& run) {
  const auto grad = run.arg(0).toTensor(), self = run.arg(1).toTensor(), other = run.arg(2).toTensor();
  const auto mask = run.arg(3).toBoolList();
  const auto a = self.dim() == 1 ? self.unsqueeze(0) : self;
  const auto b = other.dim() == 1 ? other.unsqueeze(1) : other;
  auto g = self.dim() == 1 ? grad.unsqueeze(other.dim() == 1 ? grad.dim() : grad.dim() - 1) : grad;
  g = other.dim() == 1 ? g.unsqueeze(-1) : g;
  at::Tensor grad_self, grad_other;
  if (mask[0]) {
    grad_self = times(g, b.mH(), a.sizes()).reshape(self.sizes());
  }
  if (mask[1]) {
    grad_other = times(a.mH(), g, b.sizes()).reshape(other.sizes());
  }
  run.returns({grad_self, grad_other});
}

Rule matmul_backward(const Call& call) {
  Rule rule;
  const auto m = matmul_dims(call.tensors[1], call.tensors[2], rule);
  rule.operands.emplace_back(m.out);
  rule.operands.emplace_back(m.self);
  rule.operands.emplace_back(m.other);
  rule.results.emplace_back(m.self);
  rule.results.emplace_back(m.other);
  rule.linear_in({0});
  rule.always(matmul_backward_kernel);
  return rule;
}

// ---- linear: x [..., k], weight [o, k] or [k], bias [o] ----

// If the contracted factor is sharded, one rank along it adds the bias.
void linear_kernel(KernelRun& run) {
  add_bias_once(run, 2, kernel_data<ContractedFactor>(run.solution).factor);
  run.call_op();
}

Rule linear(const Call& call) {
  Rule rule;
  const auto& x = call.tensors[0];
  const auto& weight = call.tensors[1];
  const bool biased = call.operand(2) >= 0;
  const auto k = rule.factor({.kernel = biased, .reduce = ReduceOp::Sum});
  auto in = fresh_dims(rule, x.dim() - 1), out = in;
  in.emplace_back(k);
  if (weight.dim() > 1) {
    out.emplace_back(rule.factor());
    rule.operands = {Operand(in), Operand({out.back(), Dim(k)})};
  } else {
    rule.operands = {Operand(in), Operand({Dim(k)})};
  }
  uint64_t bias = 0;
  if (biased) {
    Broadcast to(out);
    for (int64_t d = 0; d < static_cast<int64_t>(out.size()); ++d) {
      to.wide[d] = d + 1 < x.dim() ? !x.is_one(d) : !weight.is_one(0);
    }
    rule.operands.emplace_back(to.of(call.tensors[2], call.tensors[2].dim()));
    rule.kernel = linear_kernel;
    rule.kernel_data = ContractedFactor{k};
    bias = 0b100;
  }
  rule.results.emplace_back(out);
  rule.jointly_linear(0b001 | bias);
  rule.jointly_linear(0b010 | bias);
  return rule;
}

void linear_backward_kernel(KernelRun& run) {
  const auto x = run.arg(0).toTensor(), grad = run.arg(1).toTensor(), weight = run.arg(2).toTensor();
  const auto mask = run.arg(3).toBoolList();
  const auto rows = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
  const auto flat = grad.reshape({rows, weight.size(0)});
  at::Tensor grad_x, grad_weight, grad_bias;
  if (mask[0]) {
    grad_x = at::mm(flat, weight.conj()).view(x.sizes());
  }
  if (mask[1]) {
    grad_weight = at::mm(flat.t(), x.reshape({rows, weight.size(1)}).conj());
  }
  if (mask[2]) {
    grad_bias = flat.sum(0);
  }
  run.returns({grad_x, grad_weight, grad_bias});
}

Rule linear_backward(const Call& call) {
  Rule rule;
  const auto k = rule.reduced(ReduceOp::Sum), o = rule.reduced(ReduceOp::Sum);
  auto in = fresh_dims(rule, call.tensors[0].dim() - 1, {.reduce = ReduceOp::Sum}), out = in;
  in.emplace_back(k);
  out.emplace_back(o);
  rule.operands = {Operand(in), Operand(out), Operand({Dim(o), Dim(k)})};
  rule.results = {Result(in), Result({Dim(o), Dim(k)}), Result({Dim(o)})};
  rule.results[2].same_over = uint64_t{1} << k;
  rule.linear_in({1});
  rule.always(linear_backward_kernel);
  return rule;
}

} // namespace

void register_matmul(Registry& r) {
  const Options any{.takes = kAllNumbers & ~kBools};
  const Options same{.symbols = true, .takes = any.takes, .one_dtype = ~uint64_t{0}};
  Options linears = same, products = same;
  linears.autograd = formulas::linear;
  products.autograd = formulas::matmul;
  r.add("matmul", {"_addmm_activation", "_addmm_activation.out"}, addmm_activation, same);
  r.add("matmul", {"addbmm", "addbmm.out", "addbmm_"}, plus_product<"bik,bkj->ij">, same);
  r.add("matmul", {"addmm", "addmm.out", "addmm_"}, plus_product<"ik,kj->ij">, same);
  r.add("matmul", {"addmm.dtype", "addmm.dtype_out"}, plus_product<"ik,kj->ij">, any);
  r.add("matmul", {"addmv", "addmv.out", "addmv_"}, addmv, same);
  r.add("matmul", {"addr", "addr.out", "addr_"}, plus_product<"i,j->ij">);
  r.add("matmul", {"baddbmm", "baddbmm.out", "baddbmm_"}, plus_product<"bik,bkj->bij">, same);
  r.add("matmul", {"baddbmm.dtype", "baddbmm.dtype_out"}, plus_product<"bik,bkj->bij">, any);
  r.add("matmul", {"bmm", "bmm.out"}, product<"bik,bkj->bij">, same);
  r.add("matmul", {"bmm.dtype", "bmm.dtype_out"}, product<"bik,bkj->bij">, any);
  r.add("matmul", {"dot", "dot.out", "vdot", "vdot.out"}, product<"k,k->">, same);
  r.add("matmul", {"einsum"}, kAsOtherOps, {.autograd = formulas::einsum});
  r.add("matmul", {"linear"}, linear, linears);
  r.add("matmul", {"linear_backward"}, linear_backward, any);
  r.add("matmul", {"matmul", "matmul.out"}, matmul, products);
  r.add("matmul", {"matmul_backward"}, matmul_backward, any);
  r.add("matmul", {"mm", "mm.out"}, product<"ik,kj->ij">, same);
  r.add("matmul", {"mm.dtype", "mm.dtype_out"}, product<"ik,kj->ij">, any);
  r.add("matmul", {"mv", "mv.out"}, product<"ik,k->i">, same);
}

} // namespace shardtensor::rules
