// Chunks of matmul + reduce_scatter: runs of the kernel's schedule that are blocks of the product
// at the same time.
#pragma once

#include "cut.h"
#include "tile_order.h"

namespace flux_inductor::cuda {

// Tiles [first_m, last_m) x [first_n, last_n) of a part, its strips one below the other. No padding
// of clusters.
struct TileBlock {
  int first_m, last_m;
  int first_n, last_n;

  FLUX_HOST_DEVICE int tiles() const { return (last_m - first_m) * (last_n - first_n); }
};

// A chunk is one group of the TileOrder (rows of clusters swept together), cut along N. So it is
// complete soon after its first tile; whole rows of the product would be complete only at the end
// of the sweep. Or it is several groups: where the link is the bound, few large copies are best,
// but a small first one, since the link idles until it is multiplied, and a small last one, since
// the own tiles that wait for it should all be multiplied by then.
//
// The first columns of a rank's very first chunk may be a chunk of their own, which the kernel
// stores at the peer: it is ahead of the copy engine, which needs some microseconds to get under
// way. Of the parts that the rank multiplies later, for whose first chunks the link is busy anyhow,
// these columns belong to the first chunk. So numbers of chunks are asked for with `first`: whether
// of the part that its sender multiplies first. The number of the chunk that is ahead is the last
// one of a part; other numbers mean the same chunks in all parts, but for those columns.
class ScatterChunks {
 public:
  ScatterChunks() = default;
  // `groups` is the cut of a part's groups; `early`: whether its first chunk was made small, in
  // order to leave early; `ahead`: columns of clusters of the first chunk that the kernel stores.
  ScatterChunks(TileOrder const& order, int columns_of_chunk, Cut const& groups, bool early,
                int ahead)
      : groups_(groups),
        columns_(columns_of_chunk),
        per_group_(ceil_div(order.cluster_columns(), columns_of_chunk)),
        ahead_(smaller(ahead, smaller(columns_of_chunk, order.cluster_columns()))),
        per_part_(per_group_.value() * groups.chunks() + (ahead_ > 0 ? 1 : 0)),
        early_(early) {}

  FLUX_HOST_DEVICE int per_part() const { return per_part_.value(); }
  FLUX_HOST_DEVICE bool early() const { return early_; }
  FLUX_HOST_DEVICE bool some_ahead() const { return ahead_ > 0; }
  // Of a part, but for the one that is ahead.
  FLUX_HOST_DEVICE int others() const { return per_part() - (some_ahead() ? 1 : 0); }
  FLUX_HOST_DEVICE bool is_ahead(int chunk) const { return chunk == others(); }
  // The number in other parts of what has this one in the first.
  FLUX_HOST_DEVICE int in_later_part(int chunk) const { return is_ahead(chunk) ? 0 : chunk; }
  // Of a counter: those of a part's chunks lie side by side.
  FLUX_HOST_DEVICE int part_of(int counter) const { return per_part_.divide(counter); }
  FLUX_HOST_DEVICE int chunk_of(TileOrder const& order, bool first, int strip, int m, int n) const {
    int column = order.cluster_column(n);
    int chunk =
        groups_.chunk_of(order.group_of(strip, m)) * per_group_.value() + columns_.divide(column);
    return first && chunk == 0 && column < ahead_ ? others() : chunk;
  }
  // May be empty: of the first chunk, if all of it is ahead.
  FLUX_HOST_DEVICE TileBlock block_of(TileOrder const& order, bool first, int chunk) const {
    bool ahead = first && is_ahead(chunk);
    if (ahead) chunk = 0;
    int row = per_group_.divide(chunk);  // of chunks
    int column = (chunk - row * per_group_.value()) * columns_.value();
    int end = column + (ahead ? ahead_ : columns_.value());
    if (first && chunk == 0 && !ahead) column = ahead_;
    return {first_m(order, groups_.begin(row)), first_m(order, groups_.end(row)),
            smaller(column * order.cluster_n(), order.n_tiles()),
            smaller(end * order.cluster_n(), order.n_tiles())};
  }

 private:
  FLUX_HOST_DEVICE static int smaller(int a, int b) { return a < b ? a : b; }
  // The first row of tiles of a group; that of the number of groups is the part's end.
  FLUX_HOST_DEVICE static int first_m(TileOrder const& order, int group) {
    return smaller(group * order.group() * order.cluster_m(), order.strips() * order.m_tiles());
  }

  Cut groups_;
  Divider columns_;  // of clusters in a chunk
  Divider per_group_;
  int ahead_ = 0;  // columns of clusters
  Divider per_part_;
  bool early_ = false;
};

}  // namespace flux_inductor::cuda
