// Packs the parts of a tensor that is cut along one dim into a flat buffer, and unpacks them. The parts are whole in the other
// dims. Adjacent parts of one width have one description and are one copy.
#pragma once

#include "kernels/boxes.h"
#include "layout/layout.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <vector>

namespace shardtensor {

Box box_in(c10::IntArrayRef sizes);
// One box for each of the `runs` along tensor dim `dim`.
std::vector<Box> boxes_along(c10::IntArrayRef sizes, int64_t dim, c10::ArrayRef<Interval> runs);

// Parts of one dim; each row stands for adjacent parts of equal width. They do not depend on the sizes of the other dims, nor
// on the size of this dim if the cut lists its sizes.
class ChunkRuns {
 public:
  struct ChunkRun {
    int64_t start, width, count;
  };

  void reserve(int64_t parts) {
    rows_.reserve(parts);
  }
  // The next part.
  void add(const Interval& run) {
    if (run.length == 0) {
      return;
    }
    ++count_;
    length_ += run.length;
    if (!rows_.empty()) {
      auto& last = rows_.back();
      if (last.width == run.length && last.start + last.width * last.count == run.start) {
        ++last.count;
        return;
      }
    }
    rows_.push_back({run.start, run.length, 1});
  }
  // `count` parts of equal width, next to each other.
  void add(int64_t start, int64_t width, int64_t count) {
    if (width && count) {
      count_ += count;
      length_ += width * count;
      rows_.push_back({start, width, count});
    }
  }

  const std::vector<ChunkRun>& all() const {
    return rows_;
  }
  // How many parts are not empty, and their length in all.
  int64_t count() const {
    return count_;
  }
  int64_t length() const {
    return length_;
  }
  size_t weight() const {
    return 1 + rows_.size() / 4;
  }

 private:
  std::vector<ChunkRun> rows_;
  int64_t count_ = 0, length_ = 0;
};

class PackedChunks {
 public:
  PackedChunks() = default;
  // `rows`: parts of dim `dim` of a tensor of these sizes.
  PackedChunks(c10::IntArrayRef sizes, int64_t dim, std::shared_ptr<const ChunkRuns> rows);

  int64_t numel() const;
  // How many of them are not empty.
  int64_t count() const {
    return rows_ ? rows_->count() : 0;
  }
  size_t weight() const {
    return boxes_ ? static_cast<size_t>(count()) : 1;
  }

  // pack() copies into a new flat tensor, unpack() out of one that holds only these parts. `spacing`: of the parts for each
  // rank.
  at::Tensor pack(const at::Tensor& source, const kernels::Spacing& spacing) const;
  void unpack(const at::Tensor& flat, at::Tensor& target, const kernels::Spacing& spacing) const;

 private:
  // Made by the first call that needs them, on whichever thread.
  struct LazyBoxes {
    std::once_flag once;
    std::vector<Box> all;
  };
  std::vector<Box> as_boxes() const;
  const std::vector<Box>& boxes() const;
  at::Tensor stacked(const at::Tensor& t, const ChunkRuns::ChunkRun& row) const;

  Sizes sizes_;
  int64_t dim_ = 0;
  std::shared_ptr<const ChunkRuns> rows_;
  std::shared_ptr<LazyBoxes> boxes_; // null: copies row by row
};

} // namespace shardtensor
