// Ops that have no rule, and whose formulas for the gradient, or own bodies, write into plain tensors or read values.
#include "rules/registry.h"

namespace shardtensor::rules {

void register_gathered(Registry& r) {
  Options gather;
  gather.gather = true;
  r.add(
      "gathered",
      {
          "ctc_loss.IntList",
          "ctc_loss.Tensor",
          "linalg_householder_product",
          "linalg_matrix_exp",
          "linalg_matrix_rank",
          "linalg_matrix_rank.atol_rtol_float",
          "linalg_matrix_rank.atol_rtol_tensor",
          "linalg_matrix_rank.tol_tensor",
          "ormqr",
      },
      nullptr, gather);
}

} // namespace shardtensor::rules
