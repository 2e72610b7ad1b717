#include "rules/rule.h"

#include "comm/tensor_kind.h"
#include "tensor/shard_tensor.h"
#include "tensor/symbolic.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <cmath>
#include <cstring>

namespace shardtensor::rules {

size_t KernelRun::base() const {
  return stack.size() - op.schema().arguments().size();
}

void KernelRun::returns(std::vector<c10::IValue> results) const {
  stack.erase(stack.begin() + static_cast<int64_t>(base()), stack.end());
  for (auto& r : results) {
    stack.push_back(std::move(r));
  }
}

void KernelRun::call_op() const {
  op.callBoxed(&stack);
}

uint32_t kind_of_number(const c10::Scalar& number) {
  if (number.isSymbolic()) {
    return 0;
  }
  const auto value = number.isComplex() ? std::abs(number.toComplexDouble()) : number.toDouble();
  return std::isinf(value) ? kInfinite : value == 0 ? kZero : 0U;
}

uint32_t kind_of_number(const at::Tensor& t) {
  const auto* impl = t.unsafeGetTensorImpl();
  if (!impl->is_wrapped_number() || as_shard_tensor(t) || impl->key_set().has_any(kStandIns) || !impl->device().is_cpu()) {
    return 0;
  }
  switch (t.scalar_type()) { // not item(): modes of torch would see it
    case at::kDouble:
      return kind_of_number(c10::Scalar(*t.const_data_ptr<double>()));
    case at::kLong:
      return kind_of_number(c10::Scalar(*t.const_data_ptr<int64_t>()));
    case at::kComplexDouble:
      return kind_of_number(c10::Scalar(*t.const_data_ptr<c10::complex<double>>()));
    default:
      return 0;
  }
}

uint32_t kind_of_number(const c10::IValue& argument) {
  if (!argument.isList()) {
    return argument.isScalar() ? kind_of_number(argument.toScalar()) : 0;
  }
  uint32_t out = 0;
  for (const auto& item : argument.toListRef()) {
    out |= item.isScalar() ? kind_of_number(item.toScalar()) : 0;
  }
  return out;
}

bool TensorArg::has_symbols() const {
  return shardtensor::has_symbols(*tensor_);
}

c10::SymInt TensorArg::sym_bytes() const {
  return numel_of(tensor_->sym_sizes()) * static_cast<int64_t>(c10::elementSize(dtype));
}

SymSizes TensorArg::sym_strides() const {
  reads_->add(Reads::kStrides);
  return tensor_->sym_strides().vec();
}

c10::SymInt TensorArg::sym_offset() const {
  reads_->add(Reads::kStrides);
  return tensor_->sym_storage_offset();
}

std::optional<DimOrder> channels_last_order(const TensorArg& t) {
  if (t.dim() != 4 && t.dim() != 5) {
    return std::nullopt;
  }
  const auto sizes = t.sym_sizes(), strides = t.sym_strides();
  if (c10::is_channels_last_strides_2d(c10::SymIntArrayRef(sizes), c10::SymIntArrayRef(strides))) {
    return DimOrder({0, 2, 3, 1});
  }
  if (c10::is_channels_last_strides_3d(c10::SymIntArrayRef(sizes), c10::SymIntArrayRef(strides))) {
    return DimOrder({0, 2, 3, 4, 1});
  }
  return std::nullopt;
}

int64_t Call::position(const char* name) const {
  const auto i = schema.argumentIndexWithName(name);
  TORCH_INTERNAL_ASSERT(i.has_value(), schema.name(), " has no argument ", name);
  return *i;
}

uint32_t Call::kinds_of_numbers() const {
  reads_.add(Reads::kNumbers);
  uint32_t out = 0;
  for (const auto& t : tensors) {
    out |= t.kind_of_number();
  }
  for (const auto& value : args_) {
    out |= kind_of_number(value);
  }
  return out;
}

Sizes Call::ints(int64_t i) const {
  return guarded(sym_ints(i));
}

SymSizes Call::sym_ints(int64_t i) const {
  if (!has(i)) {
    return {};
  }
  const auto& v = arg(i);
  return v.isInt() || v.isSymInt() ? SymSizes{v.toSymInt()} : v.toSymIntVector();
}

int64_t wrap_dim(int64_t dim, int64_t ndim) {
  const auto n = std::max<int64_t>(ndim, 1);
  TORCH_CHECK_INDEX(
      dim >= -n && dim < n, "Dimension out of range (expected to be in range of [", -n, ", ", n - 1, "], but got ", dim, ")");
  return dim < 0 ? dim + n : dim;
}

int64_t Call::dim(int64_t i, int64_t ndim) const {
  return wrap_dim(arg(i).toInt(), ndim);
}

int64_t Call::operand(int64_t i, int64_t index) const {
  for (size_t k = 0; k < tensors.size(); ++k) {
    if (tensors[k].arg == i && (index < 0 || tensors[k].index == index)) {
      return static_cast<int64_t>(k);
    }
  }
  return -1;
}

const TensorArg& Call::tensor(int64_t i, int64_t index) const {
  const auto k = operand(i, index);
  TORCH_INTERNAL_ASSERT(k >= 0, schema.name(), ": argument ", i, " is no tensor");
  return tensors[k];
}

Rule notation(const char* text) {
  Rule rule;
  std::array<int16_t, 128> factor_of;
  factor_of.fill(kNone);
  bool in_result = false;
  std::array<bool, 128> kept{};
  Dims dims;
  const auto finish = [&] {
    if (in_result) {
      rule.results.emplace_back(dims);
    } else {
      rule.operands.emplace_back(dims);
    }
    dims.clear();
  };
  for (const char* c = text; *c; ++c) {
    if (*c == ',') {
      finish();
    } else if (std::strncmp(c, "->", 2) == 0) {
      finish();
      in_result = true;
      ++c;
    } else {
      auto& f = factor_of[static_cast<size_t>(*c)];
      if (f == kNone) {
        f = static_cast<int16_t>(rule.factor());
      }
      kept[f] |= in_result;
      dims.emplace_back(f);
    }
  }
  finish();
  for (size_t f = 0; f < rule.factors.size(); ++f) {
    if (!kept[f]) {
      rule.factors[f].reduce = ReduceOp::Sum;
    }
  }
  for (size_t i = 0; i < rule.operands.size(); ++i) {
    rule.linear.emplace_back().operands.add(i);
  }
  return rule;
}

namespace {
int64_t tensors_returned(const c10::FunctionSchema& schema) {
  int64_t n = 0;
  for (const auto& r : schema.returns()) {
    n += r.type()->kind() == c10::TypeKind::TensorType || r.type()->kind() == c10::TypeKind::ListType; // foreach: one per index
  }
  return n;
}
} // namespace

Dims fresh_dims(Rule& rule, int64_t n, const Factor& f) {
  Dims dims;
  for (int64_t d = 0; d < n; ++d) {
    dims.emplace_back(rule.factor(f));
  }
  return dims;
}

Dims dims_along(Rule& rule, int64_t n, int64_t dim, const Factor& along) {
  Dims dims;
  for (int64_t d = 0; d < n; ++d) {
    dims.emplace_back(rule.factor(d == dim ? along : Factor()));
  }
  return dims;
}

Dims dims_beside(Rule& rule, int64_t n, int64_t dim) {
  Dims dims;
  for (int64_t d = 0; d < n; ++d) {
    dims.push_back(d == dim ? Dim(kNone) : Dim(rule.factor()));
  }
  return dims;
}

Rule linear(Rule rule, std::initializer_list<int> operands) {
  rule.linear_in(operands);
  return rule;
}

void Broadcast::widen(const TensorArg& t, int64_t n) {
  auto at = static_cast<int64_t>(dims.size()) - n;
  for (int64_t d = 0; d < n; ++d, ++at) {
    wide[at] = wide[at] || !t.is_one(d);
  }
}

Dims Broadcast::of(const TensorArg& t, int64_t n) const {
  Dims out;
  auto at = static_cast<int64_t>(dims.size()) - n;
  for (int64_t d = 0; d < n; ++d, ++at) {
    out.push_back(at < 0 || (wide[at] && t.is_one(d)) ? Dim(kNone) : dims[at]);
  }
  return out;
}

Rule broadcast(const Call& call) {
  return broadcast(call, call.tensors.size());
}

Rule broadcast(const Call& call, size_t operands) {
  const auto tensors = c10::ArrayRef<TensorArg>(call.tensors).slice(0, operands);
  Rule rule;
  int64_t ndim = 0;
  for (const auto& t : tensors) {
    ndim = std::max(ndim, t.dim());
  }
  Broadcast out(fresh_dims(rule, ndim));
  for (const auto& t : tensors) {
    out.widen(t, t.dim());
  }
  for (const auto& t : tensors) {
    auto dims = out.of(t, t.dim());
    const bool written = t.mutated && !t.output;
    TORCH_CHECK(
        !written || (t.dim() == ndim && std::none_of(dims.begin(), dims.end(), [](const Dim& d) { return d.factor == kNone; })),
        "output with shape ", t.sizes(), " doesn't match the broadcast shape");
    rule.operands.emplace_back(std::move(dims));
  }
  rule.results.resize(tensors_returned(call.schema));
  for (auto& r : rule.results) {
    r.dims = out.dims;
  }
  return rule;
}

Rule replicate(const Call& call) {
  Rule rule;
  for (const auto& t : call.tensors) {
    rule.operands.emplace_back(Dims(t.dim(), Dim(kNone)));
  }
  return rule; // results have no dims listed: they are whole, with the sizes of the local results
}

} // namespace shardtensor::rules
