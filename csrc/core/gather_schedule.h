// all_gather + matmul on one rank: the order of its tiles, the chunks that they wait for, and the
// copies that it sends. Kernels, launchers, copy engine, planning and its checker share this one
// description.
//
// Parts begin with the own shard, which nobody waits for; then come those of the right-hand
// neighbours, one after another. Copies go to the left-hand neighbours, the nearest first. So in
// phase k every rank sends to its k-th neighbour: no two write to the same one at a time, and
// shards arrive in the order in which they are multiplied.
#pragma once

#include <algorithm>

#include "core/gather_chunks.h"
#include "core/tile.h"
#include "core/tile_order.h"

namespace flux_inductor {

// Rows of a shard, in every strip, and columns of K that one copy moves to a peer; `signal` is the
// place of the copy's signal in the peer's array, [world * signals_per_shard()].
struct GatherCopy {
  int peer;
  int first_row, last_row;
  int first_column, last_column;
  int signal;
};

inline TileOrder gather_order(Tile const& tile, int world, int rank, int strips, int rows, int n,
                              int group) {
  return TileOrder(TileGrid::of(tile, world, rank, strips, rows, n, group));
}

struct GatherTransfers {
  int world, rank;
  int rows, k;  // of a shard, in every strip
  // Of chunks; of the last one of the shard that arrives last, 0: as any other; and in how many
  // slices along K that one is sent.
  int rows_per_chunk, last_rows, slices;

  // Peers in the order in which they are sent to; 1 <= phase < world.
  int peer(int phase) const { return (rank - phase + world) % world; }

  // As a rank sees them, who receives its left-hand neighbour's shard last.
  GatherChunks chunks_at(int receiver) const {
    return GatherChunks(rows, rows_per_chunk, last_rows, slices, k, (receiver + world - 1) % world);
  }

  // All copies of the own shard, in the order in which they are sent.
  template <class Function>
  void each_copy(Function function) const {
    for (int phase = 1; phase < world; ++phase) {
      int target = peer(phase);
      GatherChunks chunks = chunks_at(target);
      Cut const& cut = chunks.cut_of(rank);
      int signals = rank * chunks.signals_per_shard();
      for (int chunk = 0; chunk < cut.chunks(); ++chunk) {
        int first = cut.begin(chunk), last = cut.end(chunk);
        int pieces = chunks.sliced(rank, first) ? chunks.slices() : 1;
        int depth = pieces > 1 ? chunks.steps_per_slice() * GatherChunks::kStepDepth : k;
        for (int piece = 0; piece < pieces; ++piece) {
          function(GatherCopy{target, first, last, piece * depth, std::min(k, (piece + 1) * depth),
                              signals + chunk + piece});
        }
      }
    }
  }
};

}  // namespace flux_inductor
