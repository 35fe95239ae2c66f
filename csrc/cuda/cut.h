// How rows, or groups of rows, are cut into chunks: a first one, a last one, and equal ones
// between. The twin of planning/schedule.py's cut(), which says what uneven chunks are good for.
#pragma once

#include <algorithm>

#include "divider.h"

namespace flux_inductor::cuda {

class Cut {
 public:
  Cut() = default;
  // `first` and `last` of 0: none of a size of its own. What is longer than the whole counts as the
  // whole; chunks of no rows do not exist.
  Cut(int total, int between, int first = 0, int last = 0)
      : total_(total),
        first_(smaller(first, total)),
        body_end_(total - smaller(last, total - first_)),
        between_(between),
        first_chunks_(first_ > 0 ? 1 : 0),
        before_last_(first_chunks_ + (body_end_ - first_ + between - 1) / between) {}

  FLUX_HOST_DEVICE int chunks() const { return before_last_ + (body_end_ < total_ ? 1 : 0); }

  // 0 <= row < total
  FLUX_HOST_DEVICE int chunk_of(int row) const {
    if (row < first_) return 0;
    if (row >= body_end_) return before_last_;
    return first_chunks_ + between_.divide(row - first_);
  }

  // The first row of a chunk; that of chunks() is the total.
  FLUX_HOST_DEVICE int begin(int chunk) const {
    if (chunk < first_chunks_) return 0;
    if (chunk >= before_last_) return chunk == before_last_ ? body_end_ : total_;
    return first_ + (chunk - first_chunks_) * between_.value();
  }
  FLUX_HOST_DEVICE int end(int chunk) const { return begin(chunk + 1); }

  int longest() const {
    return std::max({first_, std::min(between_.value(), body_end_ - first_), total_ - body_end_});
  }

 private:
  FLUX_HOST_DEVICE static int smaller(int a, int b) { return a < b ? a : b; }

  int total_ = 0;
  int first_ = 0;
  int body_end_ = 0;  // where the last chunk begins, or the total
  Divider between_;
  int first_chunks_ = 0;
  int before_last_ = 0;  // chunks
};

}  // namespace flux_inductor::cuda
