// How the rows of a shard are cut into chunks: equal ones, and a last one that may be of another
// size (gather_chunks.h says what for).
#pragma once

#include "core/divider.h"

namespace flux_inductor {

class Cut {
 public:
  Cut() = default;
  // `last` of 0: none of a size of its own. What is longer than the whole counts as the whole;
  // chunks of no rows do not exist.
  Cut(int total, int before, int last = 0)
      : total_(total),
        last_begin_(last < total ? total - last : 0),
        before_(before),
        before_last_((last_begin_ + before - 1) / before) {}

  FLUX_HOST_DEVICE int chunks() const { return before_last_ + (last_begin_ < total_ ? 1 : 0); }

  // 0 <= row < total
  FLUX_HOST_DEVICE int chunk_of(int row) const {
    return row < last_begin_ ? before_.divide(row) : before_last_;
  }

  // The first row of a chunk; that of chunks() is the total.
  FLUX_HOST_DEVICE int begin(int chunk) const {
    if (chunk < before_last_) return chunk * before_.value();
    return chunk == before_last_ ? last_begin_ : total_;
  }
  FLUX_HOST_DEVICE int end(int chunk) const { return begin(chunk + 1); }

 private:
  int total_ = 0;
  int last_begin_ = 0;  // where the last chunk begins, or the total
  Divider before_;
  int before_last_ = 0;  // chunks
};

}  // namespace flux_inductor
