// Matrix products: factors as in einsum; the contracted one leaves summands.
#include "rules/registry.h"

namespace shardtensor::rules {

namespace {

Rule mm(const Call&) {
  return notation("ik,kj->ij");
}

Rule bmm(const Call&) {
  return notation("bik,bkj->bij");
}

Rule mv(const Call&) {
  return notation("ik,k->i");
}

Rule dot(const Call&) {
  return notation("k,k->");
}

} // namespace

void register_matmul(Registry& r) {
  Options o;
  o.any_args = true;
  r.add("matmul", {"mm"}, mm, o);
  r.add("matmul", {"bmm"}, bmm, o);
  r.add("matmul", {"mv"}, mv, o);
  r.add("matmul", {"dot", "vdot"}, dot, o);
}

} // namespace shardtensor::rules
