#include "kernels/boxes.h"

#include "comm/bytes.h"
#include "comm/tensor_kind.h"
#include "kernels/box_copies.h"
#include "kernels/traced.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

namespace shardtensor::kernels {

namespace {

using TableWords = c10::SmallVector<int64_t, 512>;

// One end of a move.
struct CopySide {
  const char* name; // of the argument
  const at::Tensor& tensor;
  c10::ArrayRef<Box> boxes;
  bool flat;            // the boxes lie one after the other, ignoring their offsets
  Spacing spacing = {}; // of a flat side
};

// ---- checks

void check_strided(const char* function, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.defined() && tensor.layout() == at::kStrided, "shardtensor: ", function, ": `", name, "` must be a dense tensor");
}

void check_target(const char* function, const char* name, const at::Tensor& target) {
  TORCH_CHECK(
      !target.is_conj() && !target.is_neg(), "shardtensor: ", function, ": `", name,
      "` is written to, and must not be a lazy conjugate or negative");
  TORCH_CHECK(
      at::has_internal_overlap(target) != at::MemOverlap::Yes, "shardtensor: ", function, ": `", name,
      "` is written to, and must not be expanded: several of its elements share memory");
}

void check_boxes(const char* function, const char* name, c10::ArrayRef<Box> boxes, const at::Tensor& tensor) {
  const auto sizes = tensor.sizes();
  for (size_t i = 0; i < boxes.size(); ++i) {
    const auto& box = boxes[i];
    bool inside = box.offsets.size() == sizes.size() && box.sizes.size() == sizes.size();
    for (size_t d = 0; inside && d < sizes.size(); ++d) {
      inside = box.offsets[d] >= 0 && box.sizes[d] >= 0 && box.sizes[d] <= sizes[d] && box.offsets[d] <= sizes[d] - box.sizes[d];
    }
    TORCH_CHECK(
        inside, "shardtensor: ", function, ": box ", i, " of `", name, "`, offsets ", c10::IntArrayRef(box.offsets),
        " and sizes ", c10::IntArrayRef(box.sizes), ", is not within a tensor of sizes ", sizes);
  }
}

using comm::rounded_up;

// Where one box after the other starts in a flat buffer, in elements or in bytes.
class BoxStarts {
 public:
  BoxStarts(const Spacing& spacing, int64_t element)
      : parts_(spacing.parts), start_(spacing.elements * element), element_(element) {}

  int64_t next(int64_t numel) {
    while (left_ == 0 && !parts_.empty()) {
      left_ = parts_.front() * element_;
      parts_ = parts_.slice(1);
      at_ = rounded_up(at_, start_);
    }
    left_ = std::max<int64_t>(left_ - numel, 0);
    return std::exchange(at_, at_ + numel);
  }

 private:
  c10::IntArrayRef parts_;
  int64_t start_, element_, at_ = 0, left_ = 0;
};

// The length of a flat buffer that the side's boxes need.
int64_t flat_length(const CopySide& side) {
  return side.spacing.parts.empty() ? numel_of(side.boxes) : length_of(side.spacing);
}

void check_flat(const char* function, const at::Tensor& flat, int64_t needed) {
  TORCH_CHECK(
      flat.dim() == 1 && flat.is_contiguous(), "shardtensor: ", function, ": `flat` must be 1-d and contiguous; it has sizes ",
      flat.sizes(), " and strides ", flat.strides());
  TORCH_CHECK(
      flat.numel() >= needed, "shardtensor: ", function, ": `flat` has ", flat.numel(), " elements where the boxes have ",
      needed);
}

void check_same_device(const char* function, const CopySide& from, const CopySide& to) {
  TORCH_CHECK(
      from.tensor.device() == to.tensor.device(), "shardtensor: ", function, ": `", from.name, "` is on ", from.tensor.device(),
      " and `", to.name, "` on ", to.tensor.device());
  TORCH_CHECK(
      !from.tensor.is_complex() || to.tensor.is_complex(), "shardtensor: ", function, ": `", from.name, "` of ",
      from.tensor.scalar_type(), " cannot be cast to `", to.name, "` of ", to.tensor.scalar_type());
}

// ---- the plan

// Dims [first, last] of the boxes, merged into one.
struct MergedDim {
  int64_t first, last;
  int64_t factor;                 // elements per index of `last`
  int64_t common;                 // the size if all boxes have the same, else -1
  int64_t from_stride, to_stride; // in elements
};
using MergedDims = c10::SmallVector<MergedDim, 5>;

bool skipped(const Box& box) {
  return std::find(box.sizes.begin(), box.sizes.end(), 0) != box.sizes.end();
}

int64_t common_size(c10::ArrayRef<Box> boxes, int64_t dim) {
  int64_t common = -1;
  for (const auto& box : boxes) {
    if (!skipped(box)) {
      if (common >= 0 && common != box.sizes[dim]) {
        return -1;
      }
      common = box.sizes[dim];
    }
  }
  return common;
}

// The outermost dim first. The last one is contiguous on both sides: the `element` units of one value, and the dims that are
// merged with it.
MergedDims merge(const CopySide& from, const CopySide& to, int64_t element) {
  const auto& boxes = from.boxes;
  const auto ndim = static_cast<int64_t>((from.flat ? to : from).tensor.dim());
  MergedDims dims{{ndim, ndim, element, element, 1, 1}};
  for (auto d = ndim - 1; d >= 0; --d) {
    const auto common = common_size(boxes, d);
    if (common == 1) {
      continue;
    }
    const auto from_stride = from.flat ? 0 : from.tensor.stride(d) * element;
    const auto to_stride = to.flat ? 0 : to.tensor.stride(d) * element;
    auto& inner = dims.back();
    const bool joins = inner.common >= 0 && (from.flat || from_stride == inner.from_stride * inner.common) &&
                       (to.flat || to_stride == inner.to_stride * inner.common);
    if (joins) {
      inner.first = d;
      inner.common = common >= 0 ? inner.common * common : -1;
    } else {
      dims.push_back({d, d, 1, common, from_stride, to_stride});
    }
  }
  std::reverse(dims.begin(), dims.end());
  return dims;
}

int64_t size_of(const Box& box, const MergedDim& dim) {
  int64_t size = dim.factor;
  for (auto d = dim.first; d <= dim.last && d < static_cast<int64_t>(box.sizes.size()); ++d) {
    size *= box.sizes[d];
  }
  return size;
}

int64_t start_of(const CopySide& side, const Box& box, int64_t element) {
  int64_t start = 0;
  for (size_t d = 0; d < box.offsets.size(); ++d) {
    start += box.offsets[d] * side.tensor.stride(static_cast<int64_t>(d));
  }
  return start * element;
}

// The low bits of an address, in elements, which limit the width of a unit.
uint64_t address_bits(const at::Tensor& tensor, int64_t element_bytes) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return address % static_cast<uint64_t>(element_bytes) == 0 ? address / static_cast<uint64_t>(element_bytes) : 1;
}

// How to cut the work for a device.
struct Grain {
  int64_t tile_bytes;
  int64_t unit_bytes; // the widest
  int64_t row_bytes;  // a row up to this is not cut
};
constexpr Grain kCuda{1 << 14, 16, 0};

// Tiles of all boxes take turns. Together they fit into a core's L2 cache; if stores bypass the caches, into its L1 cache.
Grain cpu_grain(int64_t boxes, int64_t bytes) {
  const int64_t together = bytes >= kStreamBytes ? 1 << 16 : 1 << 18;
  return {std::max<int64_t>(together / boxes, 1 << 12), 1, 1 << 18};
}

struct CopyPlan {
  BoxCopies moves{};
  TableWords table;
};

// Most tiles first.
void sort_rows(CopyPlan& plan) {
  const int row = plan.moves.row();
  std::vector<int64_t> order(static_cast<size_t>(plan.moves.boxes));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return plan.table[a * row + BoxCopies::kTiles] > plan.table[b * row + BoxCopies::kTiles];
  });
  TableWords sorted;
  sorted.reserve(plan.table.size());
  for (const auto b : order) {
    sorted.append(plan.table.begin() + b * row, plan.table.begin() + (b + 1) * row);
  }
  plan.table = std::move(sorted);
}

// The bits of addresses and strides that limit the width of the units of all boxes.
uint64_t shared_bits(
    const BoxCopies& moves,
    const CopySide& from,
    const CopySide& to,
    const MergedDims& dims,
    int64_t from_bytes,
    int64_t to_bytes) {
  uint64_t bits = address_bits(from.tensor, from_bytes) | address_bits(to.tensor, to_bytes);
  bits |= static_cast<uint64_t>(moves.part_stride);
  for (size_t d = 0; d + 1 < dims.size(); ++d) {
    bits |= static_cast<uint64_t>(dims[d].from_stride) | static_cast<uint64_t>(dims[d].to_stride);
  }
  return bits;
}

// Boxes of about the same size get the same number of tiles, of whole rows if these are short: then tiles of one level are
// neighbours. `largest` box and `full` tile are in elements.
void cut_tiles(CopyPlan& plan, int64_t largest, int64_t full) {
  auto& moves = plan.moves;
  const int row = moves.row();
  const int64_t most = (largest + full - 1) / full;
  bool sorted = true;
  for (int64_t b = 0; b < moves.boxes; ++b) {
    int64_t* box = plan.table.data() + b * row;
    const auto width = box[BoxCopies::kUnits];
    const auto run = box[row - 1] >> width;
    int64_t units = run;
    for (int d = 0; d + 1 < moves.ndim; ++d) {
      units *= box[BoxCopies::kSizes + d];
    }
    const bool alike = (units << width) >= largest / 8;
    const auto tiles = alike ? most : ((units << width) + full - 1) / full;
    auto each = (units + tiles - 1) / tiles;
    each = each >= 4 * run ? each / run * run : each;
    box[BoxCopies::kUnits] = each << 8 | width;
    box[BoxCopies::kTiles] = (units + each - 1) / each;
    sorted = sorted && (b == 0 || box[BoxCopies::kTiles - row] >= box[BoxCopies::kTiles]);
  }
  if (!sorted) {
    sort_rows(plan);
  }
  moves.tiles = number_tiles(plan.table.data(), moves.boxes, row);
}

// `bytes`: elements are bytes, else values. Values are moved one at a time or in the widest unit.
void make_plan(CopyPlan& plan, const CopySide& from, const CopySide& to, bool bytes, int64_t parts) {
  const int64_t from_bytes = bytes ? 1 : static_cast<int64_t>(from.tensor.element_size());
  const int64_t to_bytes = bytes ? 1 : static_cast<int64_t>(to.tensor.element_size());
  const int64_t element = bytes ? static_cast<int64_t>(from.tensor.element_size()) : 1;
  const auto dims = merge(from, to, element);
  TORCH_CHECK(
      dims.size() <= kMaxDims, "shardtensor: boxes of `", (from.flat ? to : from).name, "` have ", dims.size(),
      " dims that are not contiguous; at most ", kMaxDims, " can be copied. Make it contiguous first");
  auto& moves = plan.moves;
  moves.ndim = static_cast<int>(dims.size());
  moves.from_flat = from.flat;
  moves.to_flat = to.flat;
  const auto element_bytes = std::max(from_bytes, to_bytes);
  moves.part_stride = parts > 1 ? numel_of(to.boxes) : 0;
  for (size_t d = 0; d < dims.size(); ++d) {
    moves.from_strides[d] = dims[d].from_stride;
    moves.to_strides[d] = dims[d].to_stride;
  }
  const auto count = static_cast<int64_t>(from.boxes.size());
  const auto grain = for_cuda(from.tensor) ? kCuda : cpu_grain(count, numel_of(from.boxes) * element * element_bytes);
  const auto widest = std::countr_zero(static_cast<uint64_t>(std::max<int64_t>(grain.unit_bytes / element_bytes, 1)));
  const auto bits = shared_bits(moves, from, to, dims, from_bytes, to_bytes);
  BoxStarts starts(from.flat ? from.spacing : to.spacing, element);
  int64_t largest = 0, longest = 0;
  for (size_t i = 0; i < from.boxes.size(); ++i) {
    const auto numel = from.boxes[i].numel() * element;
    if (numel == 0) {
      continue;
    }
    const auto flat_at = starts.next(numel);
    const auto from_at = from.flat ? flat_at : start_of(from, from.boxes[i], element);
    const auto to_at = to.flat ? flat_at : start_of(to, to.boxes[i], element);
    const auto run = size_of(from.boxes[i], dims.back());
    auto width = std::min(widest, std::countr_zero(bits | static_cast<uint64_t>(from_at | to_at | run)));
    width = bytes || width == widest ? width : 0;
    plan.table.append({0, 0, width, from_at, to_at});
    for (const auto& dim : dims) {
      plan.table.push_back(size_of(from.boxes[i], dim));
    }
    largest = std::max(largest, numel);
    longest = std::max(longest, run);
    moves.bytes += numel * element_bytes;
    ++moves.boxes;
  }
  const auto row = std::min(longest, grain.row_bytes / element_bytes);
  cut_tiles(plan, largest, std::max(grain.tile_bytes / element_bytes, row));
  moves.table = plan.table.data();
}

// ---- execution

bool is_float(at::ScalarType t) {
  return t == at::kHalf || t == at::kBFloat16 || t == at::kFloat || t == at::kDouble;
}

void no_kernel(const char* function, const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.is_cpu() || tensor.is_cuda(), "shardtensor: ", function, " on ", tensor.device(),
      "; there are kernels for cpu and cuda");
}

void move(const char* function, const CopySide& from, const CopySide& to) {
  const auto numel = numel_of(from.boxes);
  if (is_traced(to.tensor)) {
    TORCH_INTERNAL_ASSERT(from.spacing.elements == 1 && to.spacing.elements == 1, function, ": gaps in a graph");
    return traced::move(from.tensor, from.boxes, from.flat, to.tensor, to.boxes, to.flat);
  }
  if (numel == 0 || !has_values(to.tensor) || !has_values(from.tensor)) {
    return;
  }
  no_kernel(function, to.tensor);
  const auto from_type = from.tensor.scalar_type(), to_type = to.tensor.scalar_type();
  if (from_type != to_type && !(is_float(from_type) && is_float(to_type))) {
    // A cast without a kernel of ours: torch casts, between two copies.
    const auto& spacing = from.flat ? from.spacing : to.spacing;
    const auto length = flat_length(from.flat ? from : to);
    auto packed = from.tensor;
    if (!from.flat) {
      packed = at::empty({length}, from.tensor.options());
      move(function, from, {"flat", packed, from.boxes, true, spacing});
    }
    packed = packed.narrow(0, 0, length);
    if (to.flat) {
      to.tensor.narrow(0, 0, length).copy_(packed);
    } else {
      const auto cast = packed.to(to_type);
      move(function, {"flat", cast, to.boxes, true, spacing}, to);
    }
    return;
  }
  CopyPlan plan;
  make_plan(plan, from, to, from_type == to_type, 1);
  auto target = to.tensor;
  (for_cuda(target) ? cuda::move : cpu::move)(plan.moves, from.tensor, target);
}

// Between boxes of a tensor and a flat buffer, either way.
void move_flat(const char* function, const CopySide& from, const CopySide& to) {
  const auto& flat = from.flat ? from : to;
  const auto& boxed = from.flat ? to : from;
  check_strided(function, from.name, from.tensor);
  check_strided(function, to.name, to.tensor);
  check_boxes(function, boxed.name, boxed.boxes, boxed.tensor);
  const auto needed = numel_of(flat.boxes);
  TORCH_CHECK(
      flat.spacing.parts.empty() || c10::sum_integers(flat.spacing.parts) == needed, "shardtensor: ", function,
      ": the parts have ", flat.spacing.parts, " elements where the boxes have ", needed);
  check_flat(function, flat.tensor, flat_length(flat));
  check_target(function, to.name, to.tensor);
  check_same_device(function, from, to);
  const auto plain = resolved(from.tensor);
  move(function, {from.name, plain, from.boxes, from.flat, from.spacing}, to);
}

} // namespace

int64_t length_of(const Spacing& spacing) {
  if (spacing.elements == 1) {
    return c10::sum_integers(spacing.parts);
  }
  int64_t n = 0;
  for (const auto part : spacing.parts) {
    n += rounded_up(part, spacing.elements);
  }
  return n;
}

std::vector<at::Tensor> parts_of(const at::Tensor& flat, const Spacing& spacing) {
  std::vector<at::Tensor> out;
  out.reserve(spacing.parts.size());
  int64_t at = 0;
  for (const auto part : spacing.parts) {
    out.push_back(flat.narrow(0, std::exchange(at, at + rounded_up(part, spacing.elements)), part));
  }
  return out;
}

void pack(const at::Tensor& source, c10::ArrayRef<Box> boxes, at::Tensor& flat, const Spacing& spacing) {
  move_flat("pack", {"source", source, boxes, false}, {"flat", flat, boxes, true, spacing});
}

void unpack(const at::Tensor& flat, c10::ArrayRef<Box> boxes, at::Tensor& target, const Spacing& spacing) {
  move_flat("unpack", {"flat", flat, boxes, true, spacing}, {"target", target, boxes, false});
}

void copy(const at::Tensor& source, c10::ArrayRef<Box> from, at::Tensor& target, c10::ArrayRef<Box> to) {
  constexpr auto kName = "copy";
  check_strided(kName, "source", source);
  check_strided(kName, "target", target);
  check_boxes(kName, "source", from, source);
  check_boxes(kName, "target", to, target);
  TORCH_CHECK(from.size() == to.size(), "shardtensor: copy: `from` has ", from.size(), " boxes and `to` has ", to.size());
  for (size_t i = 0; i < from.size(); ++i) {
    TORCH_CHECK(
        from[i].sizes == to[i].sizes, "shardtensor: copy: box ", i, " has sizes ", c10::IntArrayRef(from[i].sizes),
        " in `from` and ", c10::IntArrayRef(to[i].sizes), " in `to`");
  }
  check_target(kName, "target", target);
  check_same_device(kName, {"source", source, from, false}, {"target", target, to, false});
  if (!is_traced(target)) {
    at::assert_no_overlap(target, source);
  }
  const auto plain = resolved(source);
  move(kName, {"source", plain, from, false}, {"target", target, to, false});
}

void unpack_reduce(const at::Tensor& flat, int64_t parts, c10::ArrayRef<Box> boxes, ReduceOp op, at::Tensor& target) {
  constexpr auto kName = "unpack_reduce";
  check_strided(kName, "flat", flat);
  check_strided(kName, "target", target);
  check_boxes(kName, "target", boxes, target);
  TORCH_CHECK(parts > 0, "shardtensor: unpack_reduce: `parts` is ", parts);
  check_flat(kName, flat, numel_of(boxes) * parts);
  check_target(kName, "target", target);
  const auto type = target.scalar_type();
  TORCH_CHECK(
      flat.scalar_type() == type, "shardtensor: unpack_reduce: `flat` has dtype ", flat.scalar_type(), " and `target` ", type);
  const bool bitwise = op == ReduceOp::Band || op == ReduceOp::Bor || op == ReduceOp::Bxor;
  const bool ordered = op == ReduceOp::Min || op == ReduceOp::Max;
  TORCH_CHECK(
      !(bitwise && !c10::isIntegralType(type, true)) && !(ordered && c10::isComplexType(type)),
      "shardtensor: unpack_reduce: `op` ", name_of(op), " is not defined for ", type);
  check_same_device(kName, {"flat", flat, boxes, true}, {"target", target, boxes, false});
  const auto plain = resolved(flat);
  if (is_traced(target)) {
    return traced::reduce(plain, parts, boxes, op, target);
  }
  CopyPlan plan;
  if (numel_of(boxes) == 0) {
    auto nothing = at::empty({0}, type);
    return cpu::reduce(plan.moves, nothing, parts, op, nothing); // raises for an unsupported dtype, like the other ranks
  }
  if (!has_values(target)) {
    return;
  }
  no_kernel(kName, target);
  make_plan(plan, {"flat", plain, boxes, true}, {"target", target, boxes, false}, false, parts);
  (for_cuda(target) ? cuda::reduce : cpu::reduce)(plan.moves, plain, parts, op, target);
}

} // namespace shardtensor::kernels
