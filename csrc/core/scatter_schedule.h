// matmul + reduce_scatter on one rank: the order in which its tiles are claimed, and the chunks of
// the partial products for its peers. Kernels, launchers, copy engine, planning and its checker
// share this one description.
//
// Parts begin with the right-hand neighbour's, so that no two ranks send to the same one at once;
// the own part comes last. So what is for a peer leaves early, and own tiles, the only ones that
// wait, wait for what every rank has begun (rule R1; scatter_output.cuh has the argument,
// planning's checker the proof).
#pragma once

#include "core/scatter_chunks.h"
#include "core/tile.h"
#include "core/tile_order.h"

namespace flux_inductor {

// A chunk of the partial product for one peer, as whoever moves it needs it: a block of the part
// seen as a matrix [strips * rows, n], complete when its counter reaches `tiles`.
struct ScatterChunk {
  int part;
  int index;  // its counter and signal: counters[part * chunks_per_part + index]
  int first_row, last_row;
  int first_column, last_column;
  int tiles;
};

struct ScatterSchedule {
  int world, rank;
  int strips, rows;  // of a part
  int n;
  Tile tile;
  int group;          // rows of clusters swept together
  int chunk_columns;  // columns of clusters in a chunk
  bool stores;        // the kernel's stores are the transport

  // Part by part.
  TileOrder parts() const {
    return TileOrder(TileGrid::of(tile, world, (rank + 1) % world, strips, rows, n, group));
  }
  ScatterChunks chunks(TileOrder const& parts) const { return ScatterChunks(parts, chunk_columns); }

  // In which a kernel of so many clusters claims tiles.
  //
  // Stores have no queue: a tile's leave when it is done, and where those of all SMs
  // leave at once, the link holds them up, and idles later. So where they are the transport, the
  // own part takes turns with the last peer's. A round behind it, so that partials have had a
  // tile's time to arrive; and a chunk behind it, which has one signal for all of its tiles.
  TileOrder claims(TileOrder const& parts, ScatterChunks const& chunks, int clusters) const {
    bool turns = stores && world > 1;
    return turns ? parts.taking_turns(clusters + chunks.most_clusters(parts)) : parts;
  }

  // All chunks of the peers' parts, in the order in which the kernel completes them.
  template <class Function>
  void each_chunk(Function function) const {
    TileOrder order = parts();
    ScatterChunks cut = chunks(order);
    // Row of the part at which a row of tiles begins; the last tile of a strip may be short.
    auto row_at = [&](int tiles) {
      return tiles / order.m_tiles() * rows + tiles % order.m_tiles() * tile.m;
    };
    for (int step = 0; step + 1 < world; ++step) {
      int part = (order.first_part() + step) % world;
      for (int index = 0; index < cut.per_part(); ++index) {
        TileBlock block = cut.block_of(order, index);
        function(ScatterChunk{part, index, row_at(block.first_m), row_at(block.last_m),
                              block.first_n * tile.n, std::min(n, block.last_n * tile.n),
                              block.tiles()});
      }
    }
  }
};

}  // namespace flux_inductor
