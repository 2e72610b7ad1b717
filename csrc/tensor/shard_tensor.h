// The tensor itself: a TensorImpl that holds this rank's piece and the layout, and the one place that makes them.
#pragma once

#include "comm/in_flight.h"
#include "layout/layout.h"

#include "tensor/dim_order.h"
#include "tensor/symbolic.h"
#include "tensor/write_counter.h"

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

struct _typeobject;

namespace shardtensor {

constexpr c10::DispatchKey kKey = c10::DispatchKey::PrivateUse2;
constexpr c10::DispatchKey kAutogradKey = c10::DispatchKey::AutogradPrivateUse2;

// The memory of a view that had to move data: a copy, shared by the views of that view.
struct DetachedView final : c10::intrusive_ptr_target {
  c10::intrusive_ptr<WriteCounter> base_writes; // null: no user can see the base
  std::atomic<uint32_t> seen{0};                // the count of base_writes that the copy is up to date with
  std::function<void()> put_back;               // copies writes back into the base, on all ranks; empty: no write is allowed
};

// The remaining work before an asynchronous piece has its data. The tensor's views and detached copies share it.
class PendingWork final : public c10::intrusive_ptr_target {
 public:
  explicit PendingWork(comm::InFlight rest) : rest_(std::move(rest)) {}
  // Any thread may call it, on any stream, any number of times; an error is raised each time. Releases the GIL. `piece`: what
  // will be used. Returns true once nobody needs to call it any more.
  bool wait(const at::Tensor& piece);

 private:
  std::mutex mutex_;
  comm::InFlight rest_;
  std::exception_ptr error_;
};

// The properties of a ShardTensor with numbers for sizes that are the same on all ranks.
struct GlobalForm {
  LayoutPtr layout;
  Sizes sizes, strides;
  int64_t offset;
  caffe2::TypeMeta dtype;
};

class ShardTensorImpl final : public c10::TensorImpl {
 public:
  // Sets no sizes: call set_sizes() next, or set_sizes_and_strides() if some are symbols.
  ShardTensorImpl(at::Tensor local, LayoutPtr layout, bool traced);
  // A view: under inference mode it is an inference tensor only if its base is one.
  ShardTensorImpl(ImplType view, at::Tensor local, LayoutPtr layout, c10::Storage storage, bool traced, bool inference);
  void set_sizes(c10::IntArrayRef sizes, c10::IntArrayRef strides);

  bool is_symbolic() const {
    return has_symbolic_sizes_strides_;
  }

  // Waits for a pending piece, unless the caller only takes a view of it.
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
  void set_pending(c10::intrusive_ptr<PendingWork> pending);
  // Traced: the local tensor is fake, functional or a proxy, and the tensor has Python's dispatch key instead of ours.
  bool traced() const {
    return traced_;
  }
  // Whether this tensor, or a tensor that it is a view of, comes from a view op that had to move data and so shares no memory
  // with its base. A write to it is copied back, or raises. A second reference to its storage keeps autograd from accumulating
  // gradients in place.
  bool is_detached_view() const {
    return detached_view_;
  }
  // A view of `base` that shares its memory.
  void share_detached_view(const ShardTensorImpl& base) {
    copy_origin(base);
    shared_ = storage();
  }
  // A view of `base` that does not share its memory. `watch`: reading the view raises once the base has been written, since the
  // view has the old values.
  void set_detached_view(const ShardTensorImpl& base, bool watch);
  // Null if it shares memory with every tensor that it is a view of.
  const c10::intrusive_ptr<DetachedView>& detached_view() const {
    return detached_view_;
  }
  // Whether it does not share its base's memory and users can see the base.
  bool watches() const {
    return detached_view_ && detached_view_->base_writes;
  }
  // Shares `other`'s pending work, if its data has not arrived yet.
  void share_pending(const ShardTensorImpl& other) {
    if (C10_UNLIKELY(other.look_first_.load(std::memory_order_relaxed) || pending_)) {
      set_pending(other.pending_);
    }
  }
  // Call it on all ranks after an op has written the tensor: a view that had to move data is copied back into its base.
  void note_write() {
    if (WriteCounter::alive.load(std::memory_order_relaxed) || detached_view_) {
      count_write();
    }
    if (C10_UNLIKELY(layout_->has_partial())) {
      note_write_to_summand();
    }
  }
  // The write counter of its storage. writes() makes one if there is none; known_writes() returns null then.
  c10::intrusive_ptr<WriteCounter> writes() const;
  WriteCounter* known_writes() const;
  // Whether its sum may be kept for its next consumer (tensor/reduced_partials.h). Only if it is an op's result, or a view of
  // one: the pieces of other tensors may be written from outside.
  bool keeps_sums() const {
    return keeps_sums_;
  }
  void let_keep_sums();
  // The same for a summand of no dims that is reduced as soon as it is made: its readers need no other rank, even if its piece
  // counts no writes.
  void read_sums() {
    keeps_sums_ = true;
  }

  // Reading symbolic sizes as numbers adds a guard to the graph: it then holds only for these numbers.
  c10::IntArrayRef sizes_custom() const override;
  int64_t size_custom(int64_t d) const override;
  c10::IntArrayRef strides_custom() const override;
  int64_t numel_custom() const override;
  int64_t storage_offset_custom() const override;
  // The sizes as numbers, without a guard: only for choices that are correct for any sizes.
  c10::IntArrayRef sizes_hint() const;

  GlobalForm form() const;
  bool has(const GlobalForm& form) const;
  // Python's spec of the layout, sizes and strides, kept with the tensor; null if they have changed since.
  void* cached_spec() const;
  void cache_spec(std::shared_ptr<void> object);

  // In a graph: the local tensor after an earlier move to `layout`; undefined if there was none, or if this tensor was written
  // since.
  at::Tensor moved_to(const Layout& layout) const;
  void keep_moved(const LayoutPtr& layout, at::Tensor local) const;

  // A null storage, made at the first call: most tensors never need one. TensorImpl calls has_storage() before it reads its
  // own.
  const c10::Storage& storage() const override;
  bool has_storage() const override {
    return storage();
  }
  void share_storage(const ShardTensorImpl& other);
  // Shares the kept sums of `other`, of which this tensor is a view on all ranks.
  void share_sums(const ShardTensorImpl& other);
  bool shares_storage(const ShardTensorImpl& other) const {
    return has_storage_ && other.has_storage_ && storage_.unsafeGetStorageImpl() == other.storage_.unsafeGetStorageImpl();
  }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version, bool allow_change) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version, bool allow_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& impl) override;

 private:
  const char* tensorimpl_type_name() const override {
    return "ShardTensorImpl";
  }

  void look(bool to_view) const;
  void check_not_old() const;
  void count_write();
  void note_write_to_summand();
  void copy_origin(const ShardTensorImpl& other);

  struct CachedSpec {
    std::shared_ptr<void> object;
    GlobalForm of;
  };
  struct GraphMove {
    LayoutPtr layout;
    at::Tensor local;
    uint64_t writes; // writes to this tensor before the move
  };
  uint64_t writes_before() const;
  struct GraphState {
    Sizes sizes, strides, hint; // numbers of the symbols
    std::vector<GraphMove> moved;
  };
  GraphState& in_graph() const;

  at::Tensor local_;
  LayoutPtr layout_;
  bool traced_;
  mutable std::unique_ptr<GraphState> in_graph_; // null for eager tensors
  std::unique_ptr<CachedSpec> cached_spec_;
  mutable std::atomic<bool> has_storage_{false};
  c10::intrusive_ptr<DetachedView> detached_view_;
  mutable std::atomic<bool> look_first_{false}; // detached_view_, or local_ is pending
  c10::intrusive_ptr<PendingWork> pending_;     // not dropped when it is done: another thread may be inside wait()
  c10::Storage shared_;
  bool keeps_sums_ = false;
};

// Null if the tensor is not a ShardTensor.
inline ShardTensorImpl* as_shard_tensor(const at::TensorBase& t) {
  constexpr c10::DispatchKeySet functional(c10::DispatchKey::Functionalize); // a wrapper with its tensor's keys
  auto* impl = t.unsafeGetTensorImpl();
  if ((impl->key_set() & (c10::DispatchKeySet(kKey) | functional)) == c10::DispatchKeySet(kKey)) {
    return static_cast<ShardTensorImpl*>(impl);
  }
  return impl->key_set().has(c10::DispatchKey::Python) ? dynamic_cast<ShardTensorImpl*>(impl) : nullptr;
}
// Raises a TypeError that names `what` if the tensor is not a ShardTensor.
ShardTensorImpl& shard_tensor(const at::TensorBase& t, const char* what);

// The only way to make a ShardTensor. `base`: the tensor whose (null) storage a view shares; a `moved` view has one of its own.
// Does not check the local sizes: callers have computed or checked them.
at::Tensor wrap(
    at::Tensor local,
    LayoutPtr layout,
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    const ShardTensorImpl* base = nullptr,
    int64_t offset = 0,
    bool moved = false);

// The same if sizes, strides or offset may be symbols. Without symbols it is wrap().
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
