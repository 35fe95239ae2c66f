// Chunks of matmul + reduce_scatter: runs of the kernel's schedule that are blocks of the product
// at the same time.
#pragma once

#include "tile_order.h"

namespace flux_inductor::cuda {

// A chunk is one group of the TileOrder (rows of clusters swept together), cut along N. So it is
// complete soon after its first tile; whole rows of the product would be complete only at the end
// of the sweep.
class ScatterChunks {
 public:
  ScatterChunks() = default;
  ScatterChunks(TileOrder const& order, int columns_of_chunk)
      : columns_(columns_of_chunk),
        per_group_(ceil_div(order.cluster_columns(), columns_of_chunk)),
        per_part_(per_group_ * order.groups()) {}

  FLUX_HOST_DEVICE int columns_of_chunk() const { return columns_.value(); }  // of clusters
  FLUX_HOST_DEVICE int per_group() const { return per_group_; }
  FLUX_HOST_DEVICE int per_part() const { return per_part_; }
  FLUX_HOST_DEVICE int chunk_of(TileOrder const& order, int strip, int m, int n) const {
    return order.group_of(strip, m) * per_group_ + columns_.divide(order.cluster_column(n));
  }

 private:
  Divider columns_;
  int per_group_ = 1;
  int per_part_ = 1;
};

}  // namespace flux_inductor::cuda
