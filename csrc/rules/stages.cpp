#include "rules/stages.h"

#include "redistribute/redistribute.h"
#include "redistribute/watch.h"
#include "tensor/shard_tensor.h"

namespace shardtensor::rules {

namespace {

at::Tensor with_piece(const at::Tensor& t, at::Tensor local, const LayoutPtr& layout) {
  const auto strides = sym_strides_like(t.sym_sizes(), t);
  return wrap_symbolic(sym_laid(local, order_like(t, t.dim())), layout, t.sym_sizes(), strides);
}

} // namespace

std::vector<at::Tensor> moved(
    const std::string& op,
    const std::string& argument,
    const char* why,
    const std::vector<at::Tensor>& tensors,
    const std::vector<LayoutPtr>& layouts) {
  auto out = tensors;
  std::vector<Moved> moves;
  std::vector<size_t> index;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& self = shard_tensor(tensors[i], op.c_str());
    if (&self.layout() == layouts[i].get()) {
      continue;
    }
    tell_watcher(op, argument, why, self.layout(), *layouts[i], tensors[i]);
    if (self.traced()) {
      auto local = redistribute(self.local(), self.layout(), *layouts[i], tensors[i].sym_sizes());
      out[i] = with_piece(tensors[i], std::move(local), layouts[i]);
    } else {
      const auto sizes = tensors[i].sizes();
      moves.push_back({self.local(), self.layout_ptr(), layouts[i], Sizes(sizes.begin(), sizes.end())});
      index.push_back(i);
    }
  }
  auto locals = redistribute_all(moves);
  for (size_t n = 0; n < index.size(); ++n) {
    out[index[n]] = with_piece(tensors[index[n]], std::move(locals[n]), layouts[index[n]]);
  }
  return out;
}

} // namespace shardtensor::rules
