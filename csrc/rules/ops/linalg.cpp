// Linear algebra on batches of matrices: the batch may be cut, and the columns of a right-hand side; matrices stay whole.
#include "rules/batched.h"
#include "rules/registry.h"

#include <ATen/ATen.h>

#include <string>

namespace shardtensor::rules {

namespace {

bool flag(const Call& call, const char* name) {
  return call.flag(call.position(name));
}

Rule cross(const Call& call) {
  auto rule = broadcast(call);
  const auto ndim = static_cast<int64_t>(rule.results[0].dims.size());
  rule.factors[call.dim(call.position("dim"), ndim)].whole = true; // factor d is dim d
  return linear(std::move(rule), {0, 1});
}

Rule eigh(const Call& call) {
  return batched(call, flag(call, "compute_v") ? "*..->*.,*.." : "*..->*.,0");
}

// Matrices from LAPACK are stored by columns. torch's meta kernel does not say so.
Rule by_columns(const Call& call, Rule rule, size_t nth) {
  const auto ndim = nth < rule.results.size() ? static_cast<int64_t>(rule.results[nth].dims.size()) : 0;
  if (call.mesh.description().device_type == "cpu" && ndim >= 2) {
    auto& order = rule.results[nth].order.emplace();
    for (int64_t d = 0; d < ndim; ++d) {
      order.push_back(static_cast<int8_t>(d));
    }
    std::swap(order[ndim - 1], order[ndim - 2]);
  }
  return rule;
}

Rule svd(const Call& call) {
  return flag(call, "compute_uv") ? by_columns(call, batched(call, "*..->*..,*.,*.."), 2) : batched(call, "*..->0,*.,0");
}

Rule qr(const Call& call) {
  return batched(call, call.arg(call.position("mode")).toStringRef() == "r" ? "*..->0,*.." : "*..->*..,*..");
}

Rule lu(const Call& call) {
  return batched(call, flag(call, "pivot") ? "*..->*..,*..,*.." : "*..->0,*..,*..");
}

Rule lu_unpack(const Call& call) {
  const bool data = flag(call, "unpack_data"), pivots = flag(call, "unpack_pivots");
  return batched(
      call, data     ? (pivots ? "*..,*.->*..,*..,*.." : "*..,*.->0,*..,*..")
            : pivots ? "*..,*.->*..,0,0"
                     : "*..,*.->0,0,0");
}

Rule lu_solve(const Call& call) {
  return linear(batched(call, flag(call, "left") ? "*..,*.,*.K->*.K" : "*..,*.,*K.->*K."), {2});
}

Rule solve_triangular(const Call& call) {
  return linear(batched(call, flag(call, "left") ? "*..,*.K->*.K" : "*..,*K.->*K."), {1});
}

// torch treats B as a batch of vectors if its sizes are A's without the last dim. A piece of A might match a matrix B by
// accident; one more dim prevents that.
void solve_matrix_kernel(KernelRun& run) {
  run.arg(1) = run.arg(1).toTensor().unsqueeze(0);
  run.call_op();
}

bool takes_vectors(const Call& call) {
  auto a = call.tensors[0].sym_sizes();
  const auto b = call.tensors[1].sym_sizes();
  if (a.empty() || b.size() == 1) {
    return true;
  }
  a.pop_back();
  return a == b;
}

// Not linear in B: some results do not depend on B, so they cannot be summands.
Rule solve(const Call& call) {
  if (takes_vectors(call)) {
    return batched(call, "*..,*.->*.,^..,^.,^");
  }
  auto rule = batched(call, flag(call, "left") ? "*..,*.K->*.K,^..,^.,^" : "*..,*K.->*K.,^..,^.,^");
  rule.kernel = solve_matrix_kernel;
  rule.always_kernel = call.tensors[1].dim() + 1 == call.tensors[0].dim();
  return rule;
}

// The driver decides which results have elements. A rank without columns of b finds no matrix rank and no singular values. With
// the drivers that use singular values, residuals also depend on the matrices' ranks.
Rule lstsq(const Call& call) {
  const auto& a = call.tensors[0];
  TORCH_CHECK(a.dim() >= 2, "torch.linalg.lstsq: input must have at least 2 dimensions.");
  const auto arg = call.position("driver");
  const bool cpu = call.mesh.description().device_type == "cpu";
  const std::string driver = call.has(arg) ? call.arg(arg).toStringRef() : cpu ? "gelsy" : "gels";
  const bool tall = a.sym_size(a.dim() - 2) > a.sym_size(a.dim() - 1), vectors = takes_vectors(call);
  if (driver == "gels") {
    return batched(
        call,
        vectors ? (tall ? "*..,*.->*.,*.,0,0" : "*..,*.->*.,0,0,0") : (tall ? "*..,*.K->*.K,*K,0,0" : "*..,*.K->*.K,0,0,0"));
  }
  if (driver == "gelsy") {
    return batched(call, vectors ? "*..,*.->*.,0,^,0" : "*..,*..->*..,0,^,0");
  }
  return tall ? replicate(call) : batched(call, vectors ? "*..,*.->*.,0,^,^." : "*..,*..->*..,0,^,^.");
}

Rule ormqr(const Call& call) {
  return batched(call, flag(call, "left") ? "*..,*.,*.K->*.K" : "*..,*.,*K.->*K.");
}

} // namespace

void register_linalg(Registry& r) {
  const auto* family = "linalg";
  const Options any{.asks_order = true};
  const Options o{.takes = kWideReals | kWideComplex, .asks_order = true};
  const Options same{.takes = o.takes, .one_dtype = 0b11, .asks_order = true};
  const Options factored{.autograd = formulas::factored, .takes = o.takes, .asks_order = true};
  const Options solving{.autograd = formulas::factored, .symbols = true, .takes = o.takes, .one_dtype = 0b11, .asks_order = true};
  const Options with_pivots{.takes = o.takes, .one_dtype = 0b101, .asks_order = true};
  // Their gradient formulas, or the ops themselves, write into plain tensors.
  Options local{.autograd = formulas::local_autograd, .takes = o.takes, .asks_order = true};
  const auto add = [&](const char* name, RuleFn rule) { r.add(family, {name}, rule, o); };
  r.add(family, {"_linalg_check_errors"}, batch<"*->">);
  r.add(family, {"_linalg_det"}, batch<"*..->*,*..,*.">, factored);
  add("_linalg_eigh", eigh);
  add("_linalg_eigvals", batch<"*..->*.">);
  r.add(family, {"_linalg_slogdet"}, batch<"*..->*,*,*..,*.">, factored);
  r.add(family, {"_linalg_solve_ex"}, solve, solving);
  add("_linalg_svd", svd);
  add("cholesky_inverse", batch<"*..->*..">);
  r.add(family, {"cholesky_solve"}, batch<"*.K,*..->*.K", 0>, same);
  add("geqrf", batch<"*..->*..,*.">);
  add("linalg_cholesky_ex", batch<"*..->*..,*">);
  r.add(family, {"linalg_cross"}, cross, any);
  add("linalg_eig", [](const Call& c) { return by_columns(c, batched(c, "*..->*.,*.."), 1); });
  add("linalg_inv_ex", batch<"*..->*..,*">);
  add("linalg_ldl_factor_ex", batch<"*..->*..,*.,*">);
  r.add(family, {"linalg_ldl_solve"}, batch<"*..,*.,*.K->*.K", 2>, with_pivots);
  r.add(family, {"linalg_lstsq"}, lstsq, same);
  add("linalg_lu", lu);
  add("linalg_lu_factor_ex", batch<"*..->*..,*.,*">);
  r.add(family, {"linalg_lu_solve"}, lu_solve, with_pivots);
  r.add(family, {"linalg_matrix_exp"}, batch<"*..->*..">, local);
  r.add(family, {"linalg_matrix_rank", "linalg_matrix_rank.atol_rtol_float"}, batch<"*..->*">, local);
  r.add(family, {"linalg_matrix_rank.atol_rtol_tensor"}, batch<"*..,*,*->*">, local);
  r.add(family, {"linalg_matrix_rank.tol_tensor"}, batch<"*..,*->*">, local);
  add("linalg_matrix_sqrth", batch<"*..->*..">);
  r.add(family, {"linalg_pinv.atol_rtol_tensor"}, kAsOtherOps);
  add("linalg_polar", batch<"*..->*..,*..">);
  add("linalg_qr", qr);
  add("linalg_solve_triangular", solve_triangular);
  r.add(family, {"lu_unpack"}, lu_unpack, any);
  local.one_dtype = 0b11;
  r.add(family, {"linalg_householder_product"}, batch<"*..,*.->*..">, local);
  local.one_dtype = 0b111;
  r.add(family, {"ormqr"}, ormqr, local);
  r.add(family, {"triangular_solve"}, batch<"*.K,*..->*.K,*..">, same);
}

} // namespace shardtensor::rules
