// The CPU twin of cuda/boxes.cu, whose tests compare with it.
#include "kernels/boxes.h"
#include "kernels/cpu/tile_rows.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch_v2.h>

namespace shardtensor::kernels::cpu {

namespace {

template <typename From, typename To>
void cast_rows(const RowBlock& rows, const From* from, To* to) {
  for (int64_t r = 0; r < rows.count; ++r) {
    for (int64_t i = 0; i < rows.length; ++i) {
      to[i] = static_cast<To>(from[i]);
    }
    from += rows.from_stride;
    to += rows.to_stride;
  }
}

template <typename Use>
void with_float(at::ScalarType type, const Use& use) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type, "cast", [&] { use(scalar_t{}); });
}

template <ReduceOp op, typename T>
void reduce_row(const T* from, int64_t part_stride, int64_t parts, int64_t length, T* to) {
  using A = Accumulator<T>;
  constexpr int64_t kBlock = 512;
  A sum[kBlock];
  for (int64_t begin = 0; begin < length; begin += kBlock) {
    const int64_t n = std::min(kBlock, length - begin);
    const T* part = from + begin;
    for (int64_t i = 0; i < n; ++i) {
      sum[i] = static_cast<A>(part[i]);
    }
    for (int64_t p = 1; p < parts; ++p) {
      part += part_stride;
      for (int64_t i = 0; i < n; ++i) {
        sum[i] = combine(op, sum[i], static_cast<A>(part[i]));
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      to[begin + i] = finish<T>(op, sum[i], parts);
    }
  }
}

template <ReduceOp op, typename T>
void reduce_boxes(const BoxCopies& moves, const T* from, int64_t parts, T* to) {
  for_rows(moves, [&](const RowBlock& rows) {
    for (int64_t r = 0; r < rows.count; ++r) {
      reduce_row<op>(
          from + rows.from + r * rows.from_stride, moves.part_stride, parts, rows.length, to + rows.to + r * rows.to_stride);
    }
  });
}

template <typename T>
void reduce_boxes(const BoxCopies& moves, const T* from, int64_t parts, ReduceOp op, T* to) {
  switch (op) {
    case ReduceOp::Avg:
      return reduce_boxes<ReduceOp::Avg>(moves, from, parts, to);
    case ReduceOp::Product:
      return reduce_boxes<ReduceOp::Product>(moves, from, parts, to);
    case ReduceOp::Min:
      return reduce_boxes<ReduceOp::Min>(moves, from, parts, to);
    case ReduceOp::Max:
      return reduce_boxes<ReduceOp::Max>(moves, from, parts, to);
    case ReduceOp::Band:
      return reduce_boxes<ReduceOp::Band>(moves, from, parts, to);
    case ReduceOp::Bor:
      return reduce_boxes<ReduceOp::Bor>(moves, from, parts, to);
    case ReduceOp::Bxor:
      return reduce_boxes<ReduceOp::Bxor>(moves, from, parts, to);
    default:
      return reduce_boxes<ReduceOp::Sum>(moves, from, parts, to);
  }
}

} // namespace

void move(const BoxCopies& moves, const at::Tensor& from, at::Tensor& to) {
  if (from.scalar_type() == to.scalar_type()) {
    copy_bytes(moves, static_cast<const char*>(from.const_data_ptr()), static_cast<char*>(to.mutable_data_ptr()));
    return;
  }
  with_float(from.scalar_type(), [&](auto f) {
    with_float(to.scalar_type(), [&](auto t) {
      const auto* source = from.const_data_ptr<decltype(f)>();
      auto* target = to.mutable_data_ptr<decltype(t)>();
      for_rows(moves, [&](const RowBlock& rows) { cast_rows(rows, source + rows.from, target + rows.to); });
    });
  });
}

void reduce(const BoxCopies& moves, const at::Tensor& from, int64_t parts, ReduceOp op, at::Tensor& to) {
  AT_DISPATCH_V2(
      to.scalar_type(), "unpack_reduce",
      AT_WRAP([&] { reduce_boxes(moves, from.const_data_ptr<scalar_t>(), parts, op, to.mutable_data_ptr<scalar_t>()); }),
      AT_EXPAND(AT_ALL_TYPES), AT_EXPAND(AT_COMPLEX_TYPES), at::kHalf, at::kBFloat16, at::kBool);
}

} // namespace shardtensor::kernels::cpu
