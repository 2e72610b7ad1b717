#include <torch/csrc/python_headers.h>

#include "tensor/shard_tensor.h"

#include "comm/gil.h"
#include "comm/tensor_kind.h"
#include "tensor/write_counter.h"

#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/pyobject_preservation.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

namespace shardtensor {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IntArrayRef;

PyTypeObject* g_class = nullptr;
PyObject* g_torch_function = nullptr; // torch's disabled implementation, while ours is off

bool needs_tracing(const at::Tensor& local) {
  return local.key_set().has_any(kStandIns);
}

// A lazy conjugate or negative applies to all pieces. The ShardTensor has the same dispatch keys, so that torch treats it like
// its own tensors.
constexpr DispatchKeySet kLazy{DispatchKey::Conjugate, DispatchKey::Negative};

DispatchKeySet keys_for(const at::Tensor& local, bool traced) {
  static const DispatchKeySet cpu = DispatchKeySet({kKey, kAutogradKey, DispatchKey::ADInplaceOrView}) |
                                    c10::getAutocastRelatedKeySetFromBackend(c10::BackendComponent::CPUBit);
  if (!traced && local.device().is_cpu()) {
    return cpu | (local.key_set() & kLazy);
  }
  const auto dense =
      local.device().is_cpu() ? DispatchKey::CPU : c10::computeDispatchKey(local.scalar_type(), at::kStrided, local.device());
  // Autocast depends on the real device; the handler excludes it for the local tensors.
  const auto native = DispatchKeySet({kKey, kAutogradKey, DispatchKey::ADInplaceOrView}) | (local.key_set() & kLazy) |
                      c10::getAutocastRelatedKeySetFromBackend(c10::toBackendComponent(dense));
  // Modes and __torch_dispatch__ run first; __torch_dispatch__ calls the kernel at kKey.
  return traced ? native | DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot}) : native;
}

// Storage with the size of the global tensor that raises when it is read.
c10::Storage null_storage(const at::Tensor& local, IntArrayRef sizes) {
  const auto bytes = static_cast<size_t>(c10::multiply_integers(sizes)) * local.dtype().itemsize();
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, c10::DataPtr(nullptr, local.device()), c10::GetAllocator(local.device().type()),
      /*resizable=*/bytes == 0); // torch resizes an empty one to 0 when it makes a fake copy
  storage->set_throw_on_mutable_data_ptr();
  return c10::Storage(std::move(storage));
}

c10::Storage null_storage(const at::Tensor& local, const c10::SymInt& numel) {
  if (TORCH_GUARD_OR_FALSE(numel.sym_eq(0))) {
    return null_storage(local, IntArrayRef(0));
  }
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), numel * static_cast<int64_t>(local.dtype().itemsize()),
      c10::DataPtr(nullptr, local.device()), nullptr, /*resizable=*/false);
  storage->set_throw_on_mutable_data_ptr();
  return c10::Storage(std::move(storage));
}

// The storage's counter, made at the first call.
c10::intrusive_ptr<WriteCounter> writes_to(c10::StorageImpl& storage) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (auto* known = storage.data_ptr().get_context()) {
    return c10::intrusive_ptr<WriteCounter>::reclaim_copy(static_cast<WriteCounter*>(known));
  }
  auto writes = c10::make_intrusive<WriteCounter>();
  auto held = writes;
  const auto drop = [](void* w) { c10::intrusive_ptr<WriteCounter>::reclaim(static_cast<WriteCounter*>(w)); };
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, held.release(), drop, storage.device()));
  return writes;
}

// Whether autograd is making a leaf's gradient: users may write its piece before they read it.
bool makes_leafs_gradient() {
  const auto node = torch::autograd::get_current_node();
  return node && dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get());
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
PyObject* new_python_object(const at::Tensor& t, bool traced) {
  PyObject* object = THPVariable_Wrap(t, g_class);
  // The class defines __torch_dispatch__ (for traced tensors); a native tensor must not carry the Python key for it.
  t.unsafeGetTensorImpl()->set_python_dispatch(traced);
  return object;
}
#else
// THPVariable_Wrap without its search of the class for __torch_dispatch__, which is a fifth of an op's cost.
PyObject* new_python_object(const at::Tensor& t, bool traced) {
  auto& impl = *t.unsafeGetTensorImpl();
  impl.set_python_dispatch(traced);
  return torch::utils::PyObjectPreservation::get_or_init(impl, [&] {
    PyObject* object = g_class->tp_alloc(g_class, 0);
    TORCH_CHECK(object, "shardtensor: no memory for a tensor's Python object");
    new (&reinterpret_cast<THPVariable*>(object)->cdata) at::Tensor(t);
    return object;
  });
}
#endif

// Gives a new tensor its Python object at once. Otherwise autograd's detached copies, gradients and saved tensors would
// reach Python as plain torch.Tensor.
void attach_python_object(const at::Tensor& t, bool traced) {
  if (!g_class) {
    return;
  }
  const auto state = PyGILState_Ensure();
  Py_XDECREF(new_python_object(t, traced));
  PyGILState_Release(state);
}

} // namespace

ShardTensorImpl::ShardTensorImpl(at::Tensor local, LayoutPtr layout, bool traced)
    : TensorImpl(keys_for(local, traced), local.dtype(), local.device()),
      local_(std::move(local)),
      layout_(std::move(layout)),
      traced_(traced) {}

ShardTensorImpl::ShardTensorImpl(
    ImplType view, at::Tensor local, LayoutPtr layout, c10::Storage storage, bool traced, bool inference)
    : TensorImpl(
          view,
          std::move(storage),
          inference ? keys_for(local, traced) - c10::autograd_dispatch_keyset_with_ADInplaceOrView : keys_for(local, traced),
          local.dtype()),
      local_(std::move(local)),
      layout_(std::move(layout)),
      traced_(traced),
      has_storage_(true) {}

ShardTensorImpl::GraphState& ShardTensorImpl::in_graph() const {
  if (!in_graph_) {
    in_graph_ = std::make_unique<GraphState>();
  }
  return *in_graph_;
}

IntArrayRef ShardTensorImpl::sizes_custom() const {
  return is_symbolic() ? IntArrayRef(in_graph().sizes = guarded(sym_sizes())) : TensorImpl::sizes_custom();
}

// Only this size becomes a number.
int64_t ShardTensorImpl::size_custom(int64_t d) const {
  return is_symbolic() ? sym_size(d).guard_int(__FILE__, __LINE__) : TensorImpl::size_custom(d);
}

IntArrayRef ShardTensorImpl::strides_custom() const {
  return is_symbolic() ? IntArrayRef(in_graph().strides = guarded(sym_strides())) : TensorImpl::strides_custom();
}

int64_t ShardTensorImpl::numel_custom() const {
  return is_symbolic() ? sym_numel().guard_int(__FILE__, __LINE__) : TensorImpl::numel_custom();
}

int64_t ShardTensorImpl::storage_offset_custom() const {
  return is_symbolic() ? sym_storage_offset().guard_int(__FILE__, __LINE__) : TensorImpl::storage_offset_custom();
}

IntArrayRef ShardTensorImpl::sizes_hint() const {
  if (!is_symbolic()) {
    return sizes_and_strides_.sizes_arrayref();
  }
  return in_graph().hint = hints_of(sym_sizes());
}

void ShardTensorImpl::set_sizes(IntArrayRef sizes, IntArrayRef strides) {
  sizes_and_strides_.set_sizes(sizes);
  sizes_and_strides_.set_strides(strides);
  refresh_numel();
  refresh_contiguous();
}

const c10::Storage& ShardTensorImpl::storage() const {
  if (!has_storage_.load(std::memory_order_acquire)) {
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    if (!has_storage_) {
      const_cast<c10::Storage&>(storage_) =
          is_symbolic() ? null_storage(local_, sym_numel()) : null_storage(local_, sizes_and_strides_.sizes_arrayref());
      has_storage_.store(true, std::memory_order_release);
    }
  }
  return storage_;
}

c10::intrusive_ptr<WriteCounter> ShardTensorImpl::writes() const {
  return writes_to(*storage().unsafeGetStorageImpl());
}

WriteCounter* ShardTensorImpl::known_writes() const {
  return has_storage_ ? static_cast<WriteCounter*>(storage_.unsafeGetStorageImpl()->data_ptr().get_context()) : nullptr;
}

// Counts writes by ops to this tensor, its views and their bases, and to its piece, which to_local() shares.
uint64_t ShardTensorImpl::writes_before() const {
  const auto& version = local_.unsafeGetTensorImpl()->version_counter();
  const uint64_t of_piece = version.enabled() ? version.current_version() : 0;
  return of_piece << 32 | writes()->count.load();
}

// Without a version counter, writes to the piece cannot be noticed; neither can writes of a CUDA graph that is replayed.
void ShardTensorImpl::let_keep_sums() {
  keeps_sums_ = keeps_sums_ || (!local_.is_inference() && !local_.key_set().has_any(kStandIns) && !local_.is_meta() &&
                                !comm::may_be_capturing(local_) && !makes_leafs_gradient());
}

void ShardTensorImpl::share_sums(const ShardTensorImpl& other) {
  keeps_sums_ = other.keeps_sums_ && !makes_leafs_gradient();
}

void ShardTensorImpl::note_write_to_summand() {
  if (C10_UNLIKELY(comm::may_be_capturing(local_))) {
    writes()->keep_no_sums();
  }
}

at::Tensor ShardTensorImpl::moved_to(const Layout& layout) const {
  for (const auto& m : in_graph().moved) {
    if (m.layout.get() == &layout && m.writes == writes_before()) {
      return m.local;
    }
  }
  return {};
}

void ShardTensorImpl::keep_moved(const LayoutPtr& layout, at::Tensor local) const {
  const auto is_it = [&](const GraphMove& m) { return m.layout == layout; };
  auto& moved = in_graph().moved;
  moved.erase(std::remove_if(moved.begin(), moved.end(), is_it), moved.end());
  moved.push_back({layout, std::move(local), writes_before()});
}

GlobalForm ShardTensorImpl::form() const {
  const auto sizes = sizes_and_strides_.sizes_arrayref(), strides = sizes_and_strides_.strides_arrayref();
  return {layout_, {sizes.begin(), sizes.end()}, {strides.begin(), strides.end()}, storage_offset_, data_type_};
}

bool ShardTensorImpl::has(const GlobalForm& form) const {
  return form.layout == layout_ && IntArrayRef(form.sizes) == sizes_and_strides_.sizes_arrayref() &&
         IntArrayRef(form.strides) == sizes_and_strides_.strides_arrayref() && form.offset == storage_offset_ &&
         form.dtype == data_type_;
}

void* ShardTensorImpl::cached_spec() const {
  return cached_spec_ && has(cached_spec_->of) ? cached_spec_->object.get() : nullptr;
}

void ShardTensorImpl::cache_spec(std::shared_ptr<void> object) {
  cached_spec_ = std::make_unique<CachedSpec>(CachedSpec{std::move(object), form()});
}

void ShardTensorImpl::share_storage(const ShardTensorImpl& other) {
  storage_ = other.storage();
  has_storage_ = true;
}

bool PendingWork::wait(const at::Tensor& piece) {
  // The peers may be threads of this process that need the GIL.
  const comm::NoGilGuard released;
  std::lock_guard<std::mutex> lock(mutex_);
  if (rest_) {
    try {
      c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
      return rest_.wait_on_each_stream(piece);
    } catch (...) {
      if (rest_) { // a CUDA graph is being captured: the caller may wait again later
        throw;
      }
      error_ = std::current_exception();
    }
  }
  if (error_) {
    std::rethrow_exception(error_);
  }
  return true;
}

void ShardTensorImpl::set_local(at::Tensor local) {
  local_ = std::move(local);
  key_set_ = (key_set_ - kLazy) | (local_.key_set() & kLazy);
  keeps_sums_ = false;
  pending_.reset();
  look_first_ = is_detached_view();
}

void ShardTensorImpl::set_pending(c10::intrusive_ptr<PendingWork> pending) {
  pending_ = std::move(pending);
  look_first_ = detached_view_ || pending_;
}

void ShardTensorImpl::look(bool to_view) const {
  if (pending_ && !to_view) {
    if (pending_->wait(local_) && !detached_view_) {
      look_first_.store(false, std::memory_order_release);
    }
  }
  if (detached_view_) {
    check_not_old();
  }
}

c10::intrusive_ptr<c10::TensorImpl> ShardTensorImpl::shallow_copy_and_detach(
    const c10::VariableVersion& version, bool allow_change) const {
  auto impl = const_cast<ShardTensorImpl*>(this)->is_inference() && !is_symbolic()
                  ? c10::make_intrusive<ShardTensorImpl>(ImplType::VIEW, local_, layout_, storage(), traced_, true)
                  : c10::make_intrusive<ShardTensorImpl>(local_, layout_, traced_);
  if (is_symbolic()) {
    impl->set_sizes_and_strides(sym_sizes(), sym_strides(), sym_storage_offset());
  } else {
    impl->set_sizes(sizes_and_strides_.sizes_arrayref(), sizes_and_strides_.strides_arrayref());
  }
  impl->share_storage(*this);
  impl->copy_origin(*this);
  impl->storage_offset_ = storage_offset_;
  if (!impl->is_inference()) {
    impl->set_version_counter(version);
  }
  impl->set_allow_tensor_metadata_change(allow_change);
  attach_python_object(at::Tensor(impl), traced_);
  return impl;
}

c10::intrusive_ptr<c10::TensorImpl> ShardTensorImpl::shallow_copy_and_detach(
    c10::VariableVersion&& version, bool allow_change) const {
  const c10::VariableVersion& v = version;
  return shallow_copy_and_detach(v, allow_change);
}

void ShardTensorImpl::shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& impl) {
  TensorImpl::shallow_copy_from(impl);
  const auto& other = static_cast<const ShardTensorImpl&>(*impl);
  share_storage(other);
  local_ = other.local_;
  layout_ = other.layout_;
  copy_origin(other);
  shared_ = other.shared_;
}

void ShardTensorImpl::copy_origin(const ShardTensorImpl& other) {
  detached_view_ = other.detached_view_;
  keeps_sums_ = other.keeps_sums_ && !makes_leafs_gradient();
  share_pending(other);
  look_first_ = detached_view_ || pending_;
}

void ShardTensorImpl::set_detached_view(const ShardTensorImpl& base, bool watch) {
  detached_view_ = c10::make_intrusive<DetachedView>();
  if (base.detached_view_) {
    detached_view_->base_writes = base.detached_view_->base_writes;
    detached_view_->seen = base.detached_view_->seen.load();
  } else if (watch) {
    detached_view_->base_writes = writes_to(*base.storage().unsafeGetStorageImpl());
    detached_view_->seen = detached_view_->base_writes->count.load();
  }
  look_first_ = true;
  shared_ = storage();
}

void ShardTensorImpl::check_not_old() const {
  TORCH_CHECK(
      !detached_view_->base_writes || detached_view_->base_writes->count == detached_view_->seen, "a ShardTensor (",
      sizes_and_strides_.sizes_arrayref(), ", ", layout_->str(), ", rank ", layout_->mesh().rank(),
      ") that comes from a view which had to move data between ranks is read after its base tensor was written. It holds the "
      "old values: take the view again, clone() it before the write, or redistribute the base before the view.");
}

void ShardTensorImpl::count_write() {
  if (detached_view_ && detached_view_->put_back) {
    detached_view_->put_back();
  }
  if (watches()) { // autograd counts this as a write to the base, and other copies of the base are now out of date
    detached_view_->seen = ++detached_view_->base_writes->count;
    detached_view_->base_writes
        ->forget_sums(); // on ranks with empty pieces a view may be a copy, and on others it has written the base
  }
  if (auto* writes = known_writes()) {
    ++writes->count;
    writes->forget_sums();
  }
}

ShardTensorImpl& shard_tensor(const at::TensorBase& t, const char* what) {
  auto* impl = t.defined() ? as_shard_tensor(t) : nullptr;
  TORCH_CHECK_TYPE(impl, what, ": expected a ShardTensor, got ", t.defined() ? "a plain torch.Tensor" : "None");
  return *impl;
}

namespace {

// Below autograd a view's piece gets a version counter of its own, which would miss writes.
void share_version(const at::Tensor& view, const at::Tensor& base) {
  auto *of_view = view.unsafeGetTensorImpl(), *of_base = base.unsafeGetTensorImpl();
  if (of_view != of_base && !view.is_inference() && !base.is_inference()) {
    of_view->set_version_counter(of_base->version_counter());
  }
}

} // namespace

at::Tensor wrap(
    at::Tensor local,
    LayoutPtr layout,
    IntArrayRef sizes,
    IntArrayRef strides,
    const ShardTensorImpl* base,
    int64_t offset,
    bool moved) {
  const bool traced = needs_tracing(local);
  if (base && !moved && !traced) {
    share_version(local, base->local(/*to_view=*/true));
  }
  c10::intrusive_ptr<ShardTensorImpl> impl;
  const bool counts_writes = base && base->key_set().has(DispatchKey::ADInplaceOrView);
  const bool inference = base && !counts_writes && const_cast<ShardTensorImpl*>(base)->is_inference();
  if (counts_writes || inference) {
    auto storage = moved ? null_storage(local, sizes) : base->storage();
    impl = c10::make_intrusive<ShardTensorImpl>(
        c10::TensorImpl::VIEW, std::move(local), std::move(layout), std::move(storage), traced, inference);
  } else {
    impl = c10::make_intrusive<ShardTensorImpl>(std::move(local), std::move(layout), traced);
    if (base && !moved) {
      impl->share_storage(*base);
    }
  }
  impl->set_sizes(sizes, strides);
  if (offset) {
    impl->set_storage_offset(offset);
  }
  if (base) {
    impl->share_pending(*base);
  }
  at::Tensor t(std::move(impl));
  attach_python_object(t, traced);
  return t;
}

namespace {

// Replaces symbols that are guarded to be numbers by the numbers: a graph's outputs must not refer to such a symbol.
SymSizes settled(c10::SymIntArrayRef sizes) {
  SymSizes out;
  for (const auto& n : sizes) {
    const auto number = n.maybe_as_int();
    out.push_back(number ? c10::SymInt(*number) : n);
  }
  return out;
}

} // namespace

at::Tensor wrap_symbolic(
    at::Tensor local,
    LayoutPtr layout,
    c10::SymIntArrayRef given_sizes,
    c10::SymIntArrayRef given_strides,
    const ShardTensorImpl* base,
    const c10::SymInt& offset,
    bool moved) {
  const auto sizes = settled(given_sizes), strides = settled(given_strides);
  const auto size_numbers = c10::asIntArrayRefSlowOpt(sizes);
  const auto stride_numbers = c10::asIntArrayRefSlowOpt(strides);
  if (size_numbers && stride_numbers && !offset.is_symbolic()) {
    return wrap(std::move(local), std::move(layout), *size_numbers, *stride_numbers, base, offset.expect_int(), moved);
  }
  const bool traced = needs_tracing(local);
  auto impl = c10::make_intrusive<ShardTensorImpl>(std::move(local), std::move(layout), traced);
  impl->set_sizes_and_strides(sizes, strides, offset);
  if (base && !moved) {
    impl->share_storage(*base);
  }
  at::Tensor t(std::move(impl));
  attach_python_object(t, traced);
  return t;
}

namespace {

#if PY_VERSION_HEX < 0x030D0000
// torch looks up __torch_function__ of every argument by C string; below Python 3.13 that makes a string object and searches
// the class each time. This slot answers at once; Python itself does not use it if tp_getattro is set.
PyObject* attribute(PyObject* self, char* name) {
  if (g_torch_function && std::strcmp(name, "__torch_function__") == 0) {
    return Py_NewRef(g_torch_function);
  }
  PyObject* text = PyUnicode_FromString(name);
  PyObject* value = text ? Py_TYPE(self)->tp_getattro(self, text) : nullptr;
  Py_XDECREF(text);
  return value;
}
#endif

} // namespace

void set_python_class(PyTypeObject* type, bool torch_function_disabled) {
  Py_XINCREF(reinterpret_cast<PyObject*>(type));
  Py_XDECREF(reinterpret_cast<PyObject*>(g_class));
  g_class = type;
  g_torch_function =
      torch_function_disabled ? PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__torch_function__") : nullptr;
#if PY_VERSION_HEX < 0x030D0000
  type->tp_getattr = attribute;
#endif
}

bool torch_function_disabled() {
  return g_torch_function;
}

PyTypeObject* python_class() {
  return g_class;
}

} // namespace shardtensor
