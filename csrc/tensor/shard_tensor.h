// The tensor itself: a TensorImpl that holds this rank's piece and the layout, and the one place that makes them.
#pragma once

#include "layout/layout.h"

#include "tensor/order.h"
#include "tensor/symbolic.h"

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>

struct _typeobject;

namespace shardtensor {

constexpr c10::DispatchKey kKey = c10::DispatchKey::PrivateUse2;
constexpr c10::DispatchKey kAutogradKey = c10::DispatchKey::AutogradPrivateUse2;

// Counts the writes to a tensor and its views. Made when a view op has to copy what it views, so that the copy can tell that it
// has become old; it sits in the storage that they share.
struct Writes final : c10::intrusive_ptr_target {
  Writes() {
    ++alive;
  }
  ~Writes() override {
    --alive;
  }
  std::atomic<uint32_t> count{0};
  static inline std::atomic<int64_t> alive{0}; // nobody looks for writes while it is 0
};

// The memory of a view that had to move data: a copy, which the views of that view share.
struct Copied final : c10::intrusive_ptr_target {
  c10::intrusive_ptr<Writes> base_writes; // null: the base is one that nobody can look at
  std::atomic<uint32_t> seen{0};          // how many of them the copy has in it
  std::function<void()> put_back;         // brings what was written here to the base, on all ranks; empty: no write is allowed
};

// A piece that is on its way: what is left to do before its data is used. Its tensor's views and detached copies share it.
class Pending final : public c10::intrusive_ptr_target {
 public:
  explicit Pending(std::function<void()> finish) : finish_(std::move(finish)) {}
  // Any thread, any number of times; an error is raised each time. Lets go of the GIL.
  void wait();

 private:
  std::mutex mutex_;
  std::function<void()> finish_;
  std::exception_ptr error_;
};

class ShardTensorImpl final : public c10::TensorImpl {
 public:
  ShardTensorImpl(at::Tensor local, LayoutPtr layout, c10::IntArrayRef sizes, c10::IntArrayRef strides, bool traced);
  // A view: under inference mode it is an inference tensor only if its base is one.
  ShardTensorImpl(
      ImplType view,
      at::Tensor local,
      LayoutPtr layout,
      c10::IntArrayRef sizes,
      c10::IntArrayRef strides,
      c10::Storage storage,
      bool traced,
      bool inference);

  // Traced, with symbols among its global sizes.
  ShardTensorImpl(
      at::Tensor local,
      LayoutPtr layout,
      c10::SymIntArrayRef sizes,
      c10::SymIntArrayRef strides,
      const c10::SymInt& offset,
      bool traced);

  bool is_symbolic() const {
    return has_symbolic_sizes_strides_;
  }

  // Waits for a pending piece, unless only a view of it is taken.
  const at::Tensor& local(bool to_view = false) const {
    if (C10_UNLIKELY(look_first_.load(std::memory_order_acquire))) {
      look(to_view);
    }
    return local_;
  }
  const Layout& layout() const {
    return *layout_;
  }
  const LayoutPtr& layout_ptr() const {
    return layout_;
  }
  void set_local(at::Tensor local);
  void set_pending(c10::intrusive_ptr<Pending> pending);
  // Traced: the local tensor is fake, functional or a proxy, and the key set is Python's (DESIGN 2).
  bool traced() const {
    return traced_;
  }
  // A view op that had to move data made this tensor, or one that it is a view of: it does not share memory with its base. What
  // is written to it is put back, or the write is refused. A second reference to its storage keeps autograd from adding gradients
  // up inside it.
  bool broken_view() const {
    return copied_;
  }
  // A view of `base` that shares its memory.
  void share_copied(const ShardTensorImpl& base) {
    copy_origin(base);
    shared_ = storage();
  }
  // A view of `base` that does not. `watch`: reading it raises once the base has been written, for it would show the old values.
  void set_copied(const ShardTensorImpl& base, bool watch);
  // Null where it shares memory with all that it is a view of.
  const c10::intrusive_ptr<Copied>& copied() const {
    return copied_;
  }
  // Whether a base that may still be seen has other memory.
  bool watches() const {
    return copied_ && copied_->base_writes;
  }
  // The data may still be on its way, as `other`'s.
  void share_pending(const ShardTensorImpl& other) {
    if (C10_UNLIKELY(other.look_first_.load(std::memory_order_relaxed) || pending_)) {
      set_pending(other.pending_);
    }
  }
  // An op has written it. A copy is put back into its base: all ranks come here.
  void note_write() {
    if (Writes::alive.load(std::memory_order_relaxed) || copied_) {
      count_write();
    }
  }

  // Whoever reads symbolic sizes as numbers makes the graph hold for these numbers alone: each read is guarded.
  c10::IntArrayRef sizes_custom() const override;
  c10::IntArrayRef strides_custom() const override;
  int64_t numel_custom() const override;
  int64_t storage_offset_custom() const override;
  // The numbers at hand, for choices that are right whatever the sizes: no guard.
  c10::IntArrayRef sizes_hint() const;

  // What Python has made of the layout and the form (a spec), kept with the tensor; null where they have changed since.
  void* kept() const;
  void keep(std::shared_ptr<void> object);

  // A graph's tensor as it has been moved to another layout; undefined if it has not, or has been written since.
  at::Tensor moved_to(const Layout& layout) const;
  void keep_moved(const LayoutPtr& layout, at::Tensor local) const;

  // A null storage, made at the first asking: most tensors live without. TensorImpl asks has_storage() before it reads its own.
  const c10::Storage& storage() const override;
  bool has_storage() const override {
    return storage();
  }
  void share_storage(const ShardTensorImpl& other);
  bool shares_storage(const ShardTensorImpl& other) const {
    return has_storage_ && other.has_storage_ && storage_.unsafeGetStorageImpl() == other.storage_.unsafeGetStorageImpl();
  }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version, bool allow_change) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version, bool allow_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& impl) override;

 private:
  void init(c10::IntArrayRef sizes, c10::IntArrayRef strides);
  const char* tensorimpl_type_name() const override {
    return "ShardTensorImpl";
  }

  void look(bool to_view) const;
  void check_not_old() const;
  void count_write();
  void copy_origin(const ShardTensorImpl& other);

  struct Kept {
    std::shared_ptr<void> object;
    LayoutPtr layout;
    Sizes sizes, strides;
    int64_t offset;
    caffe2::TypeMeta dtype;
  };
  struct Moved {
    LayoutPtr layout;
    at::Tensor local;
    uint64_t writes; // of this tensor before
  };
  uint64_t writes_before() const;
  struct InGraph {
    Sizes sizes, strides, hint; // read off symbols
    std::vector<Moved> moved;
  };
  InGraph& in_graph() const;

  at::Tensor local_;
  LayoutPtr layout_;
  bool traced_;
  mutable std::unique_ptr<InGraph> in_graph_; // no eager tensor has one
  std::unique_ptr<Kept> kept_;
  mutable std::atomic<bool> has_storage_{false};
  c10::intrusive_ptr<Copied> copied_;
  mutable std::atomic<bool> look_first_{false}; // copied_, or local_ is pending
  c10::intrusive_ptr<Pending> pending_;         // stays when it is done: another thread may be in it
  c10::Storage shared_;
};

// Null where the tensor is not ours.
inline ShardTensorImpl* as_shard_tensor(const at::TensorBase& t) {
  constexpr c10::DispatchKeySet functional(c10::DispatchKey::Functionalize); // a wrapper with its tensor's keys
  auto* impl = t.unsafeGetTensorImpl();
  if ((impl->key_set() & (c10::DispatchKeySet(kKey) | functional)) == c10::DispatchKeySet(kKey)) {
    return static_cast<ShardTensorImpl*>(impl);
  }
  return impl->key_set().has(c10::DispatchKey::Python) ? dynamic_cast<ShardTensorImpl*>(impl) : nullptr;
}
// Raises a TypeError that names `what` where the tensor is not ours.
ShardTensorImpl& shard_tensor(const at::TensorBase& t, const char* what);

// The only way to make a ShardTensor. `base`: the tensor whose (null) storage a view shares; a `moved` view has one of its own.
// No check that the local sizes fit: callers either computed them or have checked.
at::Tensor wrap(
    at::Tensor local,
    LayoutPtr layout,
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    const ShardTensorImpl* base = nullptr,
    int64_t offset = 0,
    bool moved = false);

// The same where sizes, strides or offset may be symbols; without symbols it is wrap().
at::Tensor wrap_symbolic(
    at::Tensor local,
    LayoutPtr layout,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef strides,
    const ShardTensorImpl* base = nullptr,
    const c10::SymInt& offset = 0,
    bool moved = false);

// The Python class of every ShardTensor; set at import, and again when its __torch_function__ is switched on or off.
void set_python_class(struct _typeobject* type, bool torch_function_disabled);
struct _typeobject* python_class();
bool torch_function_disabled();

} // namespace shardtensor
