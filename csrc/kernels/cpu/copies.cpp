// Copies rows as bytes: through the caches, or past them if the data is too large to stay in a cache.
#include "kernels/cpu/tile_rows.h"

#include <cstring>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace shardtensor::kernels::cpu {

namespace {

// ---- through the caches

template <size_t kLength>
void copy_short(const RowBlock& rows, const char* from, char* to) {
  for (int64_t r = 0; r < rows.count; ++r) {
    std::memcpy(to, from, kLength);
    from += rows.from_stride;
    to += rows.to_stride;
  }
}

// Steps of 16 bytes; the last one overlaps.
void copy_medium(const RowBlock& rows, const char* from, char* to) {
  for (int64_t r = 0; r < rows.count; ++r) {
    for (int64_t i = 0; i + 16 < rows.length; i += 16) {
      std::memcpy(to + i, from + i, 16);
    }
    std::memcpy(to + rows.length - 16, from + rows.length - 16, 16);
    from += rows.from_stride;
    to += rows.to_stride;
  }
}

void copy_any(const RowBlock& rows, const char* from, char* to) {
  for (int64_t r = 0; r < rows.count; ++r) {
    std::memcpy(to, from, static_cast<size_t>(rows.length));
    from += rows.from_stride;
    to += rows.to_stride;
  }
}

void copy_cached(const RowBlock& rows, const char* from, char* to) {
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

// ---- past the caches

#ifdef __x86_64__

constexpr int64_t kLine = 64;

int64_t to_next_line(const char* p) {
  return -reinterpret_cast<intptr_t>(p) & (kLine - 1);
}

// Prefetches the data `ahead` bytes further on into the L2 cache. (Rows whose distance is a large power of two share a set of
// the L1 cache, which holds only a few.) The address may be past the end; that does no harm.
void fetch(const char* from, int64_t ahead) {
  const auto address = reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(ahead);
  __builtin_prefetch(reinterpret_cast<const char*>(address), /*rw=*/0, /*locality=*/2);
}

// Rows of whole cache lines, to the start of lines: a streaming store that fills a line need not read it first.
[[gnu::target("avx")]] void stream_lines(const RowBlock& rows, const char* from, char* to, int64_t ahead) {
  for (int64_t r = 0; r < rows.count; ++r) {
    for (int64_t i = 0; i < rows.length; i += kLine) {
      fetch(from + i, ahead);
      const auto* source = reinterpret_cast<const __m256i*>(from + i);
      auto* target = reinterpret_cast<__m256i*>(to + i);
      const auto low = _mm256_loadu_si256(source), high = _mm256_loadu_si256(source + 1);
      _mm256_stream_si256(target, low);
      _mm256_stream_si256(target + 1, high);
    }
    from += rows.from_stride;
    to += rows.to_stride;
  }
}

// A row with any alignment on both sides.
void stream_row(const char* from, char* to, int64_t length, int64_t ahead) {
  const auto head = std::min(to_next_line(to), length);
  if (head > 0) {
    std::memcpy(to, from, static_cast<size_t>(head));
  }
  const auto lines = (length - head) / kLine * kLine;
  stream_lines({0, 0, 1, lines, 0, 0}, from + head, to + head, ahead);
  const auto done = head + lines;
  if (done < length) {
    std::memcpy(to + done, from + done, static_cast<size_t>(length - done));
  }
}

// One of the tiles that are copied at the same time, a few lines of each in turn.
class Lane {
 public:
  Lane() = default;
  explicit Lane(const TileRows& tile) : tile_(tile) {}

  // One turn; false if nothing was left.
  bool go_on(const char* from, char* to) {
    if (rows_.count == 0 && !begin_rows()) {
      return false;
    }
    from += rows_.from;
    to += rows_.to;
    const bool whole_lines = rows_.length % kLine == 0 && to_next_line(to) == 0 && rows_.to_stride % kLine == 0;
    const bool dense = rows_.to_stride == rows_.length;
    if (whole_lines && rows_.length <= kTurn) {
      const auto rows = some(rows_.length <= kShortTurn ? kShortTurn : kTurn);
      stream_lines(rows, from, to, ahead_);
      leave_behind(rows.count);
    } else if (whole_lines || rows_.length >= (dense ? 2 * kTurn : kTurn)) {
      if (!whole_lines && at_ == 0) {
        // A line that two rows share is read before it is written. Prefetch it early: stores wait for earlier stores.
        __builtin_prefetch(to + rows_.length, /*rw=*/1);
        __builtin_prefetch(to + rows_.to_stride, /*rw=*/1);
      }
      const auto end = std::min(at_ + kTurn + to_next_line(to + at_), rows_.length);
      stream_row(from + at_, to + at_, end - at_, ahead_);
      at_ = end == rows_.length ? 0 : end;
      leave_behind(at_ == 0 ? 1 : 0);
    } else if (dense) {
      const auto rows = some(kStage);
      stream_staged(rows, from, to);
      leave_behind(rows.count);
    } else {
      copy_cached(rows_, from, to);
      leave_behind(rows_.count);
    }
    return true;
  }

 private:
  static constexpr int64_t kTurn = 256, kShortTurn = 128, kStage = 4096, kAhead = 512;

  bool begin_rows() {
    if (!tile_.next(rows_)) {
      return false;
    }
    const bool next_rows = rows_.count > 1 && rows_.length <= 2 * kAhead;
    ahead_ = next_rows ? std::max<int64_t>(1, kAhead / rows_.length) * rows_.from_stride : kAhead;
    return true;
  }

  // The next rows, up to `bytes` in all, but at least one.
  RowBlock some(int64_t bytes) const {
    auto rows = rows_;
    rows.count = std::min(rows.count, std::max<int64_t>(1, bytes / rows.length));
    return rows;
  }

  void leave_behind(int64_t count) {
    rows_.from += count * rows_.from_stride;
    rows_.to += count * rows_.to_stride;
    rows_.count -= count;
  }

  // Rows that are adjacent in the target are first joined in a buffer.
  void stream_staged(const RowBlock& rows, const char* from, char* to) const {
    alignas(kLine) char stage[kStage];
    const auto bytes = rows.count * rows.length;
    __builtin_prefetch(to + bytes, /*rw=*/1);
    for (int64_t r = 0; r < rows.count; ++r) {
      for (int64_t i = 0; i < rows.length; i += kLine) {
        fetch(from + r * rows.from_stride + i, ahead_);
      }
    }
    copy_cached(rows, from, stage);
    stream_row(stage, to, bytes, 0);
  }

  TileRows tile_;
  RowBlock rows_{};   // the current rows that are left
  int64_t at_ = 0;    // bytes of the first of them that are done
  int64_t ahead_ = 0; // bytes
};

// How many tiles take turns, and the distance between their numbers.
struct LaneSchedule {
  int64_t lanes, stride;
};
constexpr int64_t kMostLanes = 32;

// Memory is fastest if a few pages at a time are read, and written, sequentially. Tiles with consecutive numbers are pieces of
// the same rows of the tensor, in different boxes; tiles of consecutive levels belong to the same box.
LaneSchedule turns_of(const BoxCopies& moves) {
  const int64_t boxes = moves.boxes;
  const int64_t row = moves.table[BoxCopies::kSizes + moves.ndim - 1]; // of the first box, which stands for the others
  const bool short_rows = row < 512;
  if (moves.from_flat) {
    return {8, 1};
  }
  if (boxes <= 4 || (short_rows && boxes <= 8)) {
    return {std::max<int64_t>(8, 4 * boxes), 1}; // four levels, all boxes
  }
  constexpr int64_t kLanes = 4;
  return {kLanes, short_rows ? 1 : std::min(boxes, (moves.tiles + kLanes - 1) / kLanes)};
}

void copy_streaming(const BoxCopies& moves, const char* from, char* to) {
  const auto turns = turns_of(moves);
  const auto block = turns.lanes * turns.stride;
  const auto groups = (moves.tiles + block - 1) / block * turns.stride;
  for_parts(moves, groups, [&](int64_t begin, int64_t end) {
    Lane lanes[kMostLanes];
    for (auto group = begin; group < end; ++group) {
      auto tile = group / turns.stride * block + group % turns.stride;
      int64_t n = 0;
      for (; n < turns.lanes && tile < moves.tiles; ++n, tile += turns.stride) {
        lanes[n] = Lane(rows_of(moves, tile));
      }
      for (bool more = true; more;) {
        more = false;
        for (int64_t i = 0; i < n; ++i) {
          more |= lanes[i].go_on(from, to);
        }
      }
    }
    _mm_sfence(); // before other threads may read
  });
}

bool can_stream() {
  return __builtin_cpu_supports("avx");
}

#else

bool can_stream() {
  return false;
}

void copy_streaming(const BoxCopies&, const char*, char*) {}

#endif

} // namespace

void copy_bytes(const BoxCopies& moves, const char* from, char* to) {
  if (moves.bytes >= kStreamBytes && can_stream()) {
    copy_streaming(moves, from, to);
  } else {
    for_rows(moves, [&](const RowBlock& rows) { copy_cached(rows, from + rows.from, to + rows.to); });
  }
}

} // namespace shardtensor::kernels::cpu
