// What the warps of a reduce_scatter's epilogue need to know about a tile.
#pragma once

#include "cutlass/cutlass.h"
#include "scatter_chunks.h"

namespace flux_inductor::cuda {

// Tiles that a copy waits for are urgent where the link is a bottleneck: all of them, if the plan
// wants the first chunk early; and where parts have few waves of tiles, the last ones of the peers'
// parts, since a delay of theirs is soon a delay of the own part, in which the peers are at the
// same place one part later. Stores to a peer are never urgent: all blocks store together, so that
// they take tens of microseconds, which the next tile hides.
struct ScatteredTile {
  static constexpr int kFewWaves = 4;  // of a part
  static constexpr int kUrgentWaves = 2;

  int part;
  int strip;
  int chunk;
  bool real;    // not a cluster's padding
  bool counts;  // a peer's
  bool urgent;

  template <class Params, class TileCoord>
  CUTLASS_DEVICE ScatteredTile(Params const& params, TileCoord const& coord) {
    auto [m, n, k, l] = coord;
    TileOrder const& order = params.order;
    strip = order.strip_of(l);
    part = order.part_of(l);
    real = m < order.m_tiles() && n < order.n_tiles();
    counts = real && part != params.rank;
    chunk = params.chunks.chunk_of(order, strip, m, n);
    int wave = order.cluster_column(gridDim.y);  // clusters at work
    int index = order.index_of(part, strip, m, n);
    bool last = order.clusters_per_part() <= kFewWaves * wave &&
                index + kUrgentWaves * wave >= order.clusters() - order.clusters_per_part();
    urgent = counts && params.delivered[part] == nullptr && (params.chunks.early() || last);
  }
};

}  // namespace flux_inductor::cuda
