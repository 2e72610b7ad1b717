#include "tensor/lists.h"

#include "tensor/move.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardtensor {

namespace {

bool fits(const at::Tensor& t, const ShardTensorImpl& lead) {
  const auto* impl = as_shard_tensor(t);
  if (!impl) {
    return t.dim() == 0; // a step counter
  }
  return can_combine_locally(*impl, lead) && !impl->is_detached_view() && same_dense_order(impl->local(), lead.local());
}

} // namespace

bool can_combine_locally(const ShardTensorImpl& t, const ShardTensorImpl& lead) {
  return t.layout_ptr() == lead.layout_ptr() && t.sizes() == lead.sizes() && !t.layout().has_partial();
}

bool same_dense_order(const at::Tensor& a, const at::Tensor& b) {
  return (a.is_contiguous() && b.is_contiguous()) || (a.strides() == b.strides() && a.is_non_overlapping_and_dense());
}

Tensors laid_out_like(const Tensors& parameters, const Tensors& gradients) {
  Tensors out = gradients;
  std::vector<MoveRequest> requests;
  std::vector<size_t> index;
  for (size_t n = 0; n < std::min(parameters.size(), gradients.size()); ++n) {
    const auto* p = as_shard_tensor(parameters[n]);
    const auto* g = as_shard_tensor(gradients[n]);
    if (p && g && p->layout_ptr() != g->layout_ptr() && p->sizes() == g->sizes() && &p->layout().mesh() == &g->layout().mesh() &&
        !p->layout().has_partial()) {
      requests.push_back({gradients[n], p->layout_ptr()});
      index.push_back(n);
    }
  }
  auto locals = moved_pieces(requests);
  for (size_t i = 0; i < index.size(); ++i) {
    const auto& p = *as_shard_tensor(parameters[index[i]]);
    auto local = std::move(locals[i]);
    if (!same_dense_order(local, p.local())) {
      local = at::empty_strided(p.local().sizes(), p.local().strides(), local.options()).copy_(local);
    }
    out[index[i]] = wrap(std::move(local), p.layout_ptr(), p.sizes(), p.strides());
  }
  return out;
}

std::optional<std::vector<Tensors>> local_lists(const std::vector<Tensors>& lists, int64_t read_only) {
  const auto& first = lists.at(0);
  for (const auto& list : lists) {
    if (!list.empty() && list.size() != first.size()) {
      return std::nullopt;
    }
    for (size_t n = 0; n < list.size(); ++n) {
      const auto* lead = as_shard_tensor(first[n]);
      if (!lead || !fits(list[n], *lead)) {
        return std::nullopt;
      }
    }
  }
  std::vector<Tensors> out(lists.size());
  for (size_t i = 0; i < lists.size(); ++i) {
    out[i].reserve(lists[i].size());
    for (const auto& t : lists[i]) {
      auto* impl = as_shard_tensor(t);
      out[i].push_back(impl ? impl->local() : t);
      if (impl && static_cast<int64_t>(i) != read_only && !impl->is_inference()) {
        impl->bump_version();
        impl->note_write();
      }
    }
  }
  return out;
}

} // namespace shardtensor
