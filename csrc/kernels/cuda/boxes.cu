// The twin of cpu/boxes.cpp. Compiled with -fmad=false: the same roundings as on the host.
#include "kernels/box_copies.h"
#include "kernels/boxes.h"
#include "kernels/cuda/launch.cuh"

#include <ATen/Dispatch.h>
#include <ATen/Dispatch_v2.h>

#include <algorithm>
#include <limits>

namespace shardtensor::kernels::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4; // units that a thread loads before it stores the first
constexpr int64_t kArgumentBytes = 4096;
constexpr int64_t kWords =
    (kArgumentBytes - 64 - static_cast<int64_t>(sizeof(BoxCopies))) / static_cast<int64_t>(sizeof(int64_t));

// If the table fits, it is part of the kernel's arguments: no copy to the device, and a CUDA graph can hold it.
struct KernelArgument {
  BoxCopies moves; // its table is null if `words` holds the table
  int64_t words[kWords];
};

// One block per tile; `work` is called with the tile by all of its threads.
template <typename Work>
__global__ void __launch_bounds__(kThreads) tiles_kernel(const __grid_constant__ KernelArgument argument, const Work work) {
  __shared__ Tile tile;
  const int64_t* table = argument.moves.table ? argument.moves.table : argument.words;
  for (int64_t i = blockIdx.x; i < argument.moves.tiles; i += gridDim.x) {
    if (threadIdx.x == 0) {
      locate(argument.moves, table, i, tile);
    }
    __syncthreads();
    work(tile);
    __syncthreads(); // before the next tile overwrites it
  }
}

template <typename T, int kLength>
struct alignas(sizeof(T) * kLength) Unit {
  T v[kLength];
};

// The places of a thread's units of a tile, one for each turn of the block, in elements.
struct AnyUnits {
  const Tile& tile;
  uint32_t k;
  int64_t from = 0, to = 0;

  __device__ explicit AnyUnits(const Tile& t) : tile(t), k(threadIdx.x) {
    locate_unit(tile, k, from, to);
  }

  __device__ void next() {
    k += blockDim.x;
    locate_unit(tile, k, from, to);
  }
};

// For at most two dims, and rows of less than 2^31 units: after the first division, distances are constant.
struct EvenUnits {
  uint32_t k;
  int64_t from = 0, to = 0;
  int64_t left;      // units from here to the row's end
  int64_t row, turn; // units of a row; units of a turn beyond whole rows
  int64_t from_turn, to_turn;
  int64_t from_row, to_row; // from a row's end to the next one's start

  __device__ explicit EvenUnits(const Tile& tile) : k(threadIdx.x) {
    locate_unit(tile, k, from, to);
    const int last = tile.ndim - 1, outer = last > 0 ? last - 1 : 0;
    row = tile.size[last];
    const auto short_row = static_cast<uint32_t>(row);
    left = row - (static_cast<uint32_t>(tile.at[last]) + k) % short_row;
    const int64_t rows = blockDim.x / short_row;
    turn = blockDim.x % short_row;
    from_turn = rows * tile.from_stride[outer] + turn * tile.from_stride[last];
    to_turn = rows * tile.to_stride[outer] + turn * tile.to_stride[last];
    from_row = tile.from_stride[outer] - row * tile.from_stride[last];
    to_row = tile.to_stride[outer] - row * tile.to_stride[last];
  }

  __device__ void next() {
    k += blockDim.x;
    from += from_turn;
    to += to_turn;
    left -= turn;
    if (left <= 0) {
      left += row;
      from += from_row;
      to += to_row;
    }
  }
};

// Loads kInFlight units of each thread, then stores them: load(from) returns the unit for store(to, unit).
template <typename Held, typename Units, typename Load, typename Store>
__device__ __forceinline__ void for_units_of(const Tile& tile, const Load& load, const Store& store) {
  const auto count = static_cast<uint32_t>(tile.count);
  for (Units unit(tile); unit.k < count;) {
    Held held[kInFlight];
    int64_t to[kInFlight];
    const auto first = unit.k;
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (unit.k < count) {
        held[j] = load(unit.from);
        to[j] = unit.to;
      }
      unit.next();
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (first + j * blockDim.x < count) {
        store(to[j], held[j]);
      }
    }
  }
}

template <typename Held, typename Load, typename Store>
__device__ __forceinline__ void for_units(const Tile& tile, const Load& load, const Store& store) {
  if (tile.ndim > 2 || tile.size[tile.ndim - 1] >> 31) {
    for_units_of<Held, AnyUnits>(tile, load, store);
  } else {
    for_units_of<Held, EvenUnits>(tile, load, store);
  }
}

struct CopyBytes {
  const char* from;
  char* to;

  __device__ void operator()(const Tile& tile) const {
    switch (tile.width) {
      case 4:
        return copy<uint4>(tile);
      case 3:
        return copy<uint2>(tile);
      case 2:
        return copy<uint32_t>(tile);
      case 1:
        return copy<uint16_t>(tile);
      default:
        return copy<uint8_t>(tile);
    }
  }

  template <typename Bytes>
  __device__ __forceinline__ void copy(const Tile& tile) const {
    for_units<Bytes>(
        tile, [&](int64_t at) { return *reinterpret_cast<const Bytes*>(from + at); },
        [&](int64_t at, const Bytes& bytes) { *reinterpret_cast<Bytes*>(to + at) = bytes; });
  }
};

template <typename From, typename To>
struct Cast {
  static constexpr int kWidest = 16 / std::max(sizeof(From), sizeof(To));
  const From* from;
  To* to;

  __device__ void operator()(const Tile& tile) const {
    tile.width ? cast<kWidest>(tile) : cast<1>(tile);
  }

  template <int kLength>
  __device__ __forceinline__ void cast(const Tile& tile) const {
    using Source = Unit<From, kLength>;
    for_units<Source>(
        tile, [&](int64_t at) { return *reinterpret_cast<const Source*>(from + at); },
        [&](int64_t at, const Source& source) {
          Unit<To, kLength> target;
#pragma unroll
          for (int i = 0; i < kLength; ++i) {
            target.v[i] = static_cast<To>(source.v[i]);
          }
          *reinterpret_cast<Unit<To, kLength>*>(to + at) = target;
        });
  }
};

template <typename T>
struct Reduce {
  static constexpr int kWidest = 16 / sizeof(T);
  const T* from;
  T* to;
  int64_t part_stride;
  int64_t parts;
  ReduceOp op;

  __device__ void operator()(const Tile& tile) const {
    tile.width ? reduce<kWidest>(tile) : reduce<1>(tile);
  }

  template <int kLength>
  __device__ __forceinline__ void reduce(const Tile& tile) const {
    using Values = Unit<T, kLength>;
    using A = Accumulator<T>;
    for (auto k = threadIdx.x; k < static_cast<uint32_t>(tile.count); k += blockDim.x) {
      int64_t at = 0, target = 0;
      locate_unit(tile, k, at, target);
      const T* part = from + at;
      A sum[kLength];
      const Values first = *reinterpret_cast<const Values*>(part);
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        sum[i] = static_cast<A>(first.v[i]);
      }
      for (int64_t p = 1; p < parts; p += kInFlight) {
        Values next[kInFlight];
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
          if (p + j < parts) {
            next[j] = *reinterpret_cast<const Values*>(part + (p + j) * part_stride);
          }
        }
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
          if (p + j < parts) {
#pragma unroll
            for (int i = 0; i < kLength; ++i) {
              sum[i] = combine(op, sum[i], static_cast<A>(next[j].v[i]));
            }
          }
        }
      }
      Values out;
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        out.v[i] = finish<T>(op, sum[i], parts);
      }
      *reinterpret_cast<Values*>(to + target) = out;
    }
  }
};

// Small boxes get small blocks, so that more of them run at once.
unsigned threads_for(const BoxCopies& moves) {
  int64_t units = 1;
  for (int64_t b = 0; b < moves.boxes && units < kThreads; ++b) {
    units = std::max(units, BoxCopies::units(moves.table + b * moves.row()));
  }
  return static_cast<unsigned>(std::min<int64_t>((units + 31) / 32 * 32, kThreads));
}

template <typename Work>
void launch_tiles(const KernelArgument& argument, unsigned threads, const Work& work) {
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(argument.moves.tiles, std::numeric_limits<int32_t>::max()));
  launch<KernelArgument, Work>(tiles_kernel<Work>, blocks, threads, argument, work);
}

template <typename Work>
void run(const BoxCopies& moves, const at::Tensor& to, const Work& work) {
  static_assert(sizeof(KernelArgument) + sizeof(Work) <= kArgumentBytes);
  const DeviceGuard guard(to.device());
  const auto threads = threads_for(moves);
  KernelArgument argument;
  argument.moves = moves;
  const int64_t fits = kWords / moves.row(); // boxes
  if (moves.boxes > fits && !capturing()) {
    const auto table = on_device({moves.table, static_cast<size_t>(moves.boxes * moves.row())}, to.device());
    argument.moves.table = table.const_data_ptr<int64_t>();
    launch_tiles(argument, threads, work);
    return;
  }
  // One launch, except for many boxes in a CUDA graph: a graph must not refer to pinned memory that is reused later.
  argument.moves.table = nullptr;
  for (int64_t b = 0; b < moves.boxes; b += fits) {
    argument.moves.boxes = std::min(fits, moves.boxes - b);
    std::copy_n(moves.table + b * moves.row(), argument.moves.boxes * moves.row(), argument.words);
    argument.moves.tiles = number_tiles(argument.words, argument.moves.boxes, moves.row());
    launch_tiles(argument, threads, work);
  }
}

template <typename Use>
void with_float(at::ScalarType type, const Use& use) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type, "cast", [&] { use(scalar_t{}); });
}

} // namespace

void move(const BoxCopies& moves, const at::Tensor& from, at::Tensor& to) {
  if (from.scalar_type() == to.scalar_type()) {
    run(moves, to, CopyBytes{static_cast<const char*>(from.const_data_ptr()), static_cast<char*>(to.mutable_data_ptr())});
    return;
  }
  with_float(from.scalar_type(), [&](auto f) {
    with_float(to.scalar_type(), [&](auto t) {
      using From = decltype(f);
      using To = decltype(t);
      if constexpr (!std::is_same_v<From, To>) {
        run(moves, to, Cast<From, To>{from.const_data_ptr<From>(), to.mutable_data_ptr<To>()});
      }
    });
  });
}

void reduce(const BoxCopies& moves, const at::Tensor& from, int64_t parts, ReduceOp op, at::Tensor& to) {
  AT_DISPATCH_V2(
      to.scalar_type(), "unpack_reduce", AT_WRAP([&] {
        run(moves, to,
            Reduce<scalar_t>{from.const_data_ptr<scalar_t>(), to.mutable_data_ptr<scalar_t>(), moves.part_stride, parts, op});
      }),
      AT_EXPAND(AT_ALL_TYPES), AT_EXPAND(AT_COMPLEX_TYPES), at::kHalf, at::kBFloat16, at::kBool);
}

} // namespace shardtensor::kernels::cuda
