// The oracle for cuda/boxes.cu.
#include "kernels/moves.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch_v2.h>
#include <ATen/Parallel.h>

#include <cstring>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace shardtensor::kernels::cpu {

namespace {

constexpr int64_t kParallelBytes = 1 << 18; // less is not worth waking a thread
constexpr int64_t kStreamBytes = 4 << 20;   // less may stay in a cache until it is used

// Rows of a box that lie at even distances; all in elements.
struct Rows {
  int64_t from, to;
  int64_t count;
  int64_t length;
  int64_t from_stride, to_stride;
};

// Calls use(Rows) for all of a tile: a part of a row at either end, and between them as many rows at once as there are.
template <typename Use>
void for_rows(const Tile& tile, const Use& use) {
  const int last = tile.ndim - 1;
  const int outer = last > 0 ? last - 1 : 0;
  int64_t at[kMaxDims];
  std::copy_n(tile.at, tile.ndim, at);
  int64_t from = tile.from, to = tile.to;
  for (int64_t left = tile.count; left > 0;) {
    const int64_t whole = tile.size[last];
    Rows rows{from, to, 1, std::min(left, whole - at[last]), tile.from_stride[outer], tile.to_stride[outer]};
    if (last > 0 && rows.length == whole) {
      rows.count = std::min(left / whole, tile.size[outer] - at[outer]);
    }
    use(rows);
    left -= rows.count * rows.length;
    // To the start of the next row.
    from -= at[last];
    to -= at[last];
    at[last] = 0;
    int64_t carry = rows.count;
    for (int d = outer; d >= 0 && carry > 0 && left > 0; --d) {
      at[d] += carry;
      from += carry * tile.from_stride[d];
      to += carry * tile.to_stride[d];
      carry = 0;
      if (at[d] == tile.size[d]) {
        from -= at[d] * tile.from_stride[d];
        to -= at[d] * tile.to_stride[d];
        at[d] = 0;
        carry = 1;
      }
    }
  }
}

template <typename Use>
void for_tiles(
    const Moves& moves, const Use& use, void (*end_of_range)() = [] {}) {
  const int64_t grain = std::max<int64_t>(1, kParallelBytes * moves.tiles / moves.bytes);
  at::parallel_for(0, moves.tiles, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Tile tile;
      locate(moves, moves.table, i, tile);
      for_rows(tile, use);
    }
    end_of_range();
  });
}

// ---- copies of bytes

template <size_t kLength>
void copy_short(const Rows& rows, const char* from, char* to) {
  for (int64_t r = 0; r < rows.count; ++r) {
    std::memcpy(to, from, kLength);
    from += rows.from_stride;
    to += rows.to_stride;
  }
}

// Steps of 16 bytes; the last one overlaps.
void copy_medium(const Rows& rows, const char* from, char* to) {
  for (int64_t r = 0; r < rows.count; ++r) {
    for (int64_t i = 0; i + 16 < rows.length; i += 16) {
      std::memcpy(to + i, from + i, 16);
    }
    std::memcpy(to + rows.length - 16, from + rows.length - 16, 16);
    from += rows.from_stride;
    to += rows.to_stride;
  }
}

void copy_any(const Rows& rows, const char* from, char* to) {
  for (int64_t r = 0; r < rows.count; ++r) {
    std::memcpy(to, from, static_cast<size_t>(rows.length));
    from += rows.from_stride;
    to += rows.to_stride;
  }
}

void copy_cached(const Rows& rows, const char* from, char* to) {
  switch (rows.length) {
    case 1:
      return copy_short<1>(rows, from, to);
    case 2:
      return copy_short<2>(rows, from, to);
    case 4:
      return copy_short<4>(rows, from, to);
    case 8:
      return copy_short<8>(rows, from, to);
    case 16:
      return copy_short<16>(rows, from, to);
    case 32:
      return copy_short<32>(rows, from, to);
    case 64:
      return copy_short<64>(rows, from, to);
    default:
      return rows.length > 16 && rows.length <= 256 ? copy_medium(rows, from, to) : copy_any(rows, from, to);
  }
}

// Past the caches: a store that fills a line need not read it first. For what is too large to be found in a cache later on.
void stream_line(char* to, const char* from) {
#ifdef __SSE2__
  for (int i = 0; i < 64; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
#else
  std::memcpy(to, from, 64);
#endif
}

// Before other threads may look.
void end_stream() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

void stream_row(const char* from, char* to, int64_t length) {
  const auto head = std::min<int64_t>(-reinterpret_cast<intptr_t>(to) & 63, length);
  if (head > 0) {
    std::memcpy(to, from, static_cast<size_t>(head));
  }
  int64_t i = head;
  for (; i + 64 <= length; i += 64) {
    stream_line(to + i, from + i);
  }
  if (i < length) {
    std::memcpy(to + i, from + i, static_cast<size_t>(length - i));
  }
}

// Rows of whole lines. Short ones defeat the processor's own prefetching; theirs go to its second cache, as a few rows at a large
// power of two from each other are all that one set of the first can hold.
void stream_lines(const Rows& rows, const char* from, char* to) {
  constexpr int64_t kAhead = 2048;
  const bool next_rows = rows.count > 1 && rows.length <= 2 * kAhead;
  const int64_t ahead = next_rows ? std::max<int64_t>(1, kAhead / rows.length) * rows.from_stride : kAhead;
  for (int64_t r = 0; r < rows.count; ++r) {
    for (int64_t i = 0; i < rows.length; i += 64) {
      const auto next = reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(i + ahead);
      __builtin_prefetch(reinterpret_cast<const char*>(next), /*rw=*/0, /*locality=*/2);
      stream_line(to + i, from + i);
    }
    from += rows.from_stride;
    to += rows.to_stride;
  }
}

void stream_rows(const Rows& rows, const char* from, char* to) {
  if (rows.length % 64 == 0 && reinterpret_cast<uintptr_t>(to) % 64 == 0 && rows.to_stride % 64 == 0) {
    return stream_lines(rows, from, to);
  }
  if (rows.length >= 512) {
    for (int64_t r = 0; r < rows.count; ++r) {
      stream_row(from + r * rows.from_stride, to + r * rows.to_stride, rows.length);
    }
    return;
  }
  if (rows.to_stride != rows.length) {
    copy_cached(rows, from, to);
    return;
  }
  // Short rows, one after the other: put together first.
  alignas(64) char stage[4096];
  const int64_t batch = static_cast<int64_t>(sizeof(stage)) / rows.length;
  for (int64_t r = 0; r < rows.count; r += batch) {
    auto some = rows;
    some.count = std::min(batch, rows.count - r);
    copy_cached(some, from + r * rows.from_stride, stage);
    stream_row(stage, to + r * rows.to_stride, some.count * rows.length);
  }
}

// ---- casts and reductions of values

template <typename From, typename To>
void cast_rows(const Rows& rows, const From* from, To* to) {
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
void reduce_boxes(const Moves& moves, const T* from, int64_t parts, T* to) {
  for_tiles(moves, [&](const Rows& rows) {
    for (int64_t r = 0; r < rows.count; ++r) {
      reduce_row<op>(
          from + rows.from + r * rows.from_stride, moves.part_stride, parts, rows.length, to + rows.to + r * rows.to_stride);
    }
  });
}

template <typename T>
void reduce_boxes(const Moves& moves, const T* from, int64_t parts, ReduceOp op, T* to) {
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

void move(const Moves& moves, const at::Tensor& from, at::Tensor& to) {
  if (from.scalar_type() == to.scalar_type()) {
    const auto* source = static_cast<const char*>(from.const_data_ptr());
    auto* target = static_cast<char*>(to.mutable_data_ptr());
    if (moves.bytes >= kStreamBytes) {
      for_tiles(
          moves, [&](const Rows& rows) { stream_rows(rows, source + rows.from, target + rows.to); }, end_stream);
    } else {
      for_tiles(moves, [&](const Rows& rows) { copy_cached(rows, source + rows.from, target + rows.to); });
    }
    return;
  }
  with_float(from.scalar_type(), [&](auto f) {
    with_float(to.scalar_type(), [&](auto t) {
      const auto* source = from.const_data_ptr<decltype(f)>();
      auto* target = to.mutable_data_ptr<decltype(t)>();
      for_tiles(moves, [&](const Rows& rows) { cast_rows(rows, source + rows.from, target + rows.to); });
    });
  });
}

void reduce(const Moves& moves, const at::Tensor& from, int64_t parts, ReduceOp op, at::Tensor& to) {
  AT_DISPATCH_V2(
      to.scalar_type(), "unpack_reduce",
      AT_WRAP([&] { reduce_boxes(moves, from.const_data_ptr<scalar_t>(), parts, op, to.mutable_data_ptr<scalar_t>()); }),
      AT_EXPAND(AT_ALL_TYPES), AT_EXPAND(AT_COMPLEX_TYPES), at::kHalf, at::kBFloat16, at::kBool);
}

} // namespace shardtensor::kernels::cpu
