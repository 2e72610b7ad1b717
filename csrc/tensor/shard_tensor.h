// The tensor itself: a TensorImpl that holds this rank's piece and the layout, and the one place that makes them.
// Uses layout/, ATen and, for the Python object that every tensor gets at birth, torch's Python binding.
// Used by rules/, dispatch/, autograd/, bindings/.
#pragma once

#include "layout/layout.h"

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

struct _typeobject;

namespace shardtensor {

constexpr c10::DispatchKey kKey = c10::DispatchKey::PrivateUse2;
constexpr c10::DispatchKey kAutogradKey = c10::DispatchKey::AutogradPrivateUse2;

class ShardTensorImpl final : public c10::TensorImpl {
 public:
  ShardTensorImpl(
      at::Tensor local, LayoutPtr layout, c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::Storage storage, bool traced);
  // A view: under inference mode it is an inference tensor only if its base is one.
  ShardTensorImpl(
      ImplType view,
      at::Tensor local,
      LayoutPtr layout,
      c10::IntArrayRef sizes,
      c10::IntArrayRef strides,
      c10::Storage storage,
      bool traced);

  const at::Tensor& local() const {
    return local_;
  }
  const Layout& layout() const {
    return *layout_;
  }
  const LayoutPtr& layout_ptr() const {
    return layout_;
  }
  void set_local(at::Tensor local);
  // Traced: the local tensor is fake, functional or a proxy, and the key set is Python's (DESIGN 2).
  bool traced() const {
    return traced_;
  }
  // A view op that had to move data made this tensor, or one that it is a view of: it does not share memory with its base, so
  // writing to it is refused. A second reference to its storage keeps autograd from adding gradients up inside it.
  bool broken_view() const {
    return broken_view_;
  }
  void set_broken_view() {
    broken_view_ = true;
    shared_ = storage_;
  }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version, bool allow_change) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version, bool allow_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& impl) override;

 private:
  void init(c10::IntArrayRef sizes, c10::IntArrayRef strides);
  const char* tensorimpl_type_name() const override {
    return "ShardTensorImpl";
  }

  at::Tensor local_;
  LayoutPtr layout_;
  bool traced_;
  bool broken_view_ = false;
  c10::Storage shared_;
};

// Null where the tensor is not ours.
inline ShardTensorImpl* as_shard_tensor(const at::TensorBase& t) {
  auto* impl = t.unsafeGetTensorImpl();
  if (impl->key_set().has(kKey)) {
    return static_cast<ShardTensorImpl*>(impl);
  }
  return impl->key_set().has(c10::DispatchKey::Python) ? dynamic_cast<ShardTensorImpl*>(impl) : nullptr;
}
// Raises a TypeError that names `what` where the tensor is not ours.
ShardTensorImpl& shard_tensor(const at::TensorBase& t, const char* what);

// The only way to make a ShardTensor. `base`: the tensor whose (null) storage a view shares; a `moved` view has one of its own
// (set_broken_view). No check that the local sizes fit: callers either computed them or have checked.
at::Tensor wrap(
    at::Tensor local,
    LayoutPtr layout,
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    const ShardTensorImpl* base = nullptr,
    int64_t offset = 0,
    bool moved = false);

// Strides of a dense tensor of `sizes` whose dims lie in memory in the order in which `local`'s do.
Sizes strides_like(c10::IntArrayRef sizes, const at::Tensor& local);

// The Python class of every ShardTensor; set at import, and again when its __torch_function__ is switched on or off.
void set_python_class(struct _typeobject* type, bool torch_function_disabled);

} // namespace shardtensor
