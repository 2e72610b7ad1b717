#include "redistribute/chunk_packing.h"

#include "comm/tensor_kind.h"
#include "kernels/traced.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <utility>

namespace shardtensor {

namespace {

constexpr int64_t kFewParts = 16; // up to this number, copying boxes is cheaper than copying views
constexpr size_t kFewRows = 4;

} // namespace

Box box_in(c10::IntArrayRef sizes) {
  Box box;
  box.offsets.assign(sizes.size(), 0);
  box.sizes.assign(sizes.begin(), sizes.end());
  return box;
}

std::vector<Box> boxes_along(c10::IntArrayRef sizes, int64_t dim, c10::ArrayRef<Interval> runs) {
  std::vector<Box> out(runs.size(), box_in(sizes));
  for (size_t i = 0; i < runs.size(); ++i) {
    out[i].offsets[dim] = runs[i].start;
    out[i].sizes[dim] = runs[i].length;
  }
  return out;
}

PackedChunks::PackedChunks(c10::IntArrayRef sizes, int64_t dim, std::shared_ptr<const ChunkRuns> rows)
    : sizes_(sizes.begin(), sizes.end()), dim_(dim), rows_(std::move(rows)) {
  if (count() <= kFewParts || rows_->all().size() > kFewRows) {
    boxes_ = std::make_shared<LazyBoxes>();
  }
}

int64_t PackedChunks::numel() const {
  int64_t n = rows_ ? rows_->length() : 0;
  for (size_t d = 0; d < sizes_.size(); ++d) {
    n *= static_cast<int64_t>(d) == dim_ ? 1 : sizes_[d];
  }
  return n;
}

std::vector<Box> PackedChunks::as_boxes() const {
  std::vector<Box> out;
  if (numel() == 0) {
    return out;
  }
  out.assign(count(), box_in(sizes_));
  auto box = out.begin();
  for (const auto& row : rows_->all()) {
    for (int64_t i = 0; i < row.count; ++i, ++box) {
      box->offsets[dim_] = row.start + i * row.width;
      box->sizes[dim_] = row.width;
    }
  }
  return out;
}

const std::vector<Box>& PackedChunks::boxes() const {
  std::call_once(boxes_->once, [&] { boxes_->all = as_boxes(); });
  return boxes_->all;
}

// The row's parts as a tensor with one more dim, which counts the parts.
at::Tensor PackedChunks::stacked(const at::Tensor& t, const ChunkRuns::ChunkRun& row) const {
  auto sizes = t.sizes().vec(), strides = t.strides().vec();
  const auto stride = strides[dim_];
  sizes[dim_] = row.width;
  sizes.insert(sizes.begin(), row.count);
  strides.insert(strides.begin(), row.width * stride);
  return t.as_strided(sizes, strides, t.storage_offset() + row.start * stride);
}

at::Tensor PackedChunks::pack(const at::Tensor& source, const kernels::Spacing& spacing) const {
  if (is_traced(source)) {
    return kernels::traced::packed(source, as_boxes());
  }
  auto out = at::empty({kernels::length_of(spacing)}, source.options());
  if (boxes_ || out.numel() > numel()) { // rows have no gaps
    kernels::pack(source, boxes_ ? boxes() : as_boxes(), out, spacing);
    return out;
  }
  int64_t at = 0;
  for (const auto& row : rows_->all()) {
    const auto view = stacked(source, row);
    auto flat = out.narrow(0, std::exchange(at, at + view.numel()), view.numel());
    kernels::pack(view, {box_in(view.sizes())}, flat);
  }
  return out;
}

void PackedChunks::unpack(const at::Tensor& flat, at::Tensor& target, const kernels::Spacing& spacing) const {
  if (boxes_ || flat.numel() > numel() || is_traced(target)) {
    kernels::unpack(flat, boxes_ ? boxes() : as_boxes(), target, spacing);
    return;
  }
  int64_t at = 0;
  for (const auto& row : rows_->all()) {
    auto view = stacked(target, row);
    kernels::unpack(flat.narrow(0, std::exchange(at, at + view.numel()), view.numel()), {box_in(view.sizes())}, view);
  }
}

} // namespace shardtensor
