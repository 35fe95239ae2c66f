// Chunks of matmul + reduce_scatter: runs of the kernel's schedule that are blocks of the product
// at the same time.
#pragma once

#include <algorithm>

#include "core/tile_order.h"

namespace flux_inductor {

// Tiles [first_m, last_m) x [first_n, last_n) of a part, its strips one below the other. No padding
// of clusters.
struct TileBlock {
  int first_m, last_m;
  int first_n, last_n;

  FLUX_HOST_DEVICE int tiles() const { return (last_m - first_m) * (last_n - first_n); }
};

// A chunk is one group of the TileOrder (rows of clusters swept together), cut along N. So it is
// complete soon after its first tile; whole rows of the product would be complete only at the end
// of the sweep.
class ScatterChunks {
 public:
  ScatterChunks() = default;
  ScatterChunks(TileOrder const& order, int columns_of_chunk)
      : columns_(columns_of_chunk),
        per_group_(ceil_div(order.cluster_columns(), columns_of_chunk)),
        per_part_(per_group_.value() * order.groups()) {}

  FLUX_HOST_DEVICE int per_part() const { return per_part_; }
  // Clusters of a chunk; and at most.
  int clusters(TileOrder const& order, int chunk) const {
    int group = per_group_.divide(chunk);
    int column = (chunk - group * per_group_.value()) * columns_.value();
    return order.rows_of_group(group) *
           std::min(columns_.value(), order.cluster_columns() - column);
  }
  int most_clusters(TileOrder const& order) const { return clusters(order, 0); }
  FLUX_HOST_DEVICE int chunk_of(TileOrder const& order, int strip, int m, int n) const {
    return order.group_of(strip, m) * per_group_.value() + columns_.divide(order.cluster_column(n));
  }
  FLUX_HOST_DEVICE TileBlock block_of(TileOrder const& order, int chunk) const {
    int group = per_group_.divide(chunk);
    int column = (chunk - group * per_group_.value()) * columns_.value();
    int first_n = column * order.cluster_n();
    return {first_m(order, group), first_m(order, group + 1), first_n,
            smaller(first_n + columns_.value() * order.cluster_n(), order.n_tiles())};
  }

 private:
  FLUX_HOST_DEVICE static int smaller(int a, int b) { return a < b ? a : b; }
  // The first row of tiles of a group; that of the number of groups is the part's end.
  FLUX_HOST_DEVICE static int first_m(TileOrder const& order, int group) {
    return smaller(group * order.group() * order.cluster_m(), order.strips() * order.m_tiles());
  }

  Divider columns_;  // of clusters in a chunk
  Divider per_group_;
  int per_part_ = 1;
};

}  // namespace flux_inductor
