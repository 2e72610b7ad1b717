#include "rules/registry.h"

#include <c10/util/Exception.h>

namespace shardtensor::rules {

void Registry::add(const char* family, const std::string& op, RuleFn rule, const Options& options) {
  const bool fresh = entries_.emplace(op, Entry{rule, options, family}).second;
  TORCH_INTERNAL_ASSERT(fresh, op, " is named twice");
}

void Registry::add(const char* family, std::initializer_list<const char*> ops, RuleFn rule, Options options) {
  for (const char* op : ops) {
    add(family, std::string(op), rule, options);
  }
}

void Registry::add_forms(const char* family, std::initializer_list<const char*> ops, RuleFn rule, Options options) {
  for (const std::string op : ops) {
    const auto dot = op.find('.');
    const auto name = op.substr(0, dot);
    const auto overload = dot == std::string::npos ? "" : op.substr(dot + 1);
    const auto suffix = overload.empty() ? "" : "." + overload;
    add(family, op, rule, options);
    // Forms of several overloads may share a name (clamp.out, clamp.Tensor's .out); the first one is kept.
    const Entry entry{rule, options, family};
    entries_.emplace(name + "_" + suffix, entry);
    if (overload.empty() || overload == "Tensor" || overload == "self") {
      entries_.emplace(name + ".out", entry);
    }
    if (!overload.empty()) {
      entries_.emplace(name + "." + overload + "_out", entry);
    }
  }
}

const Entry* Registry::find(const std::string& name) const {
  auto it = entries_.find(name);
  return it == entries_.end() ? nullptr : &it->second;
}

const Registry& registry() {
  static const Registry* all = [] {
    auto* r = new Registry();
    register_attention(*r);
    register_convolution(*r);
    register_copies(*r);
    register_embedding(*r);
    register_im2col_distance(*r);
    register_indexing(*r);
    register_joins(*r);
    register_linalg(*r);
    register_losses(*r);
    register_matmul(*r);
    register_normalization(*r);
    register_padding(*r);
    register_pointwise(*r);
    register_pooling(*r);
    register_random(*r);
    register_recurrent(*r);
    register_reductions(*r);
    register_resampling(*r);
    register_sampling(*r);
    register_scans(*r);
    register_softmax(*r);
    register_spectral(*r);
    register_flip_roll_repeat(*r);
    register_view_order(*r);
    register_slice_select_split(*r);
    register_view_reshape(*r);
    register_view_strided(*r);
    register_lists(*r); // last, because it looks up rules of the other files
    return r;
  }();
  return *all;
}

} // namespace shardtensor::rules
