// matmul + reduce_scatter: where tiles go, what is added to them, and what the peers are told.
//
// A tile of a peer's part is scale * accumulator + bias + addend. It is stored where it leaves for
// the peer; then the counter of its chunk is raised, for whoever moves the chunk. Or, if nobody
// else does, it is stored where the peer wants it, and whoever raises the counter to the chunk's
// number of tiles raises the peer's signal. A tile of the own part is the same plus the peers'
// partials, stored once, as the result. The sources, addend first, are added one after another in a
// fixed order; everything is fp32 until the one rounding at the end.
//
// Rule R1: take the first own tile, by its place in the part, that is not done on some rank. It
// waits for tiles of its chunk on the peers. What comes before those in their orders are tiles that
// wait for nothing, and own tiles of earlier places (core/scatter_schedule.h), which are done.
// So each of them is claimed, and done, if no block owes one while it waits with a later tile. None
// does: the load warp waits for partials between the last step of its tile along K and the first
// source; by then it has loaded all that the tiles before need, sources included. So their
// multiplying warps come to their ends, and the store warp stores them and raises their counters.
// It waits for those warps, and for the claim behind its tile, hence for all warps of the cluster
// to have begun with its own. The same holds for the other blocks of the cluster, whose operands
// are loaded in turn: their load warps wait at the same place of the same tile, or behind it.
//
// A signal that the kernel raises stands for stores of many blocks. For each of them: its bulk
// stores are complete and visible to the thread that waited for them; that one releases by adding
// to the counter; the thread that adds last acquires from all of them, since additions to one word
// form one chain, and releases to the peer. Causality is transitive over links whose scopes hold
// both of their ends: the GPU for the counter, which its threads alone look at, and the system for
// the signal. So the peer that acquires the signal sees all of the stores, and its TMA does after
// fence_generic_to_async(). Where a copy engine waits for the counter, that one's scope is the
// system, too, since the engine is no thread of the GPU.
#pragma once

#include "cuda/reduce_scatter/claimed_tiles.cuh"
#include "cuda/reduce_scatter/matmul_reduce_scatter.h"
#include "cuda/sync/signals.cuh"
#include "cuda/sync/succession.cuh"
#include "cute/tensor.hpp"

namespace flux_inductor::cuda {

// A tile's place in a matrix of units: of the output, or of one of its sources.
struct BlockOf {
  CUtensorMap const* map;
  int block;
};

class ScatterOutput {
 public:
  struct Params {
    TileOrder order;
    ScatterChunks chunks;
    int rank;
    bool has_addend;
    uint32_t* counters;    // [world * chunks_per_part]: tiles stored of each chunk; zero at first
    Epoch const* arrived;  // [world * chunks_per_part]: signals of each peer's partial chunks
    Epoch const* epoch;
    // Where the signals of each part's chunks go, [world * chunks_per_part] in its owner's memory;
    // null: they are someone else's business.
    Epoch* delivered[kMaxRanks];
    Succession succession;
    WaitLimit limit;
    CUtensorMap parts[kMaxRanks];     // [strips, rows, n] each: where the tiles of each part go
    CUtensorMap partials[kMaxRanks];  // [strips, rows, n] each: where each peer's tiles of the own
                                      // part arrive
    CUtensorMap addend;               // [strips, world, rows, n]
  };

  // Of what the first tiles are stored with, and the own ones.
  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(&params.parts[params.order.first_part()]);
    cute::prefetch_tma_descriptor(&params.parts[params.rank]);
  }

  CUTLASS_DEVICE explicit ScatterOutput(Params const& params) : params_(params) {}

  CUTLASS_DEVICE BlockOf target(WorkTile const& tile) const {
    return {&params_.parts[tile.place.part], tile.place.strip};
  }

  // Whether the target is a peer's memory.
  CUTLASS_DEVICE bool is_far(WorkTile const& tile) const {
    return params_.delivered[tile.place.part] != nullptr;
  }

  CUTLASS_DEVICE int sources(WorkTile const& tile) const {
    return (is_own(tile) ? params_.order.parts() - 1 : 0) + (params_.has_addend ? 1 : 0);
  }

  // Load warp: may be loaded when this returns. Peers come in the order in which their tiles of the
  // own part arrive: rank - 1 computes them first of all.
  CUTLASS_DEVICE BlockOf source(WorkTile const& tile, int index) {
    if (params_.has_addend && index == 0) return {&params_.addend, tile.block};
    int distance = index + (params_.has_addend ? 0 : 1);
    int peer = params_.rank - distance;
    if (peer < 0) peer += params_.order.parts();
    wait_for_partials(tile, peer);
    return {&params_.partials[peer], tile.place.strip};
  }

  // Store warp, when its first lane has issued the stores.
  CUTLASS_DEVICE void stored(WorkTile const& tile) const {
    if (is_own(tile) || !tile.place.real) return;
    if (cutlass::canonical_lane_idx() == 0) {
      wait_for_own_bulk_stores();
      raise(tile.place.part, chunk_of(tile));
    }
    __syncwarp();
  }

  CUTLASS_DEVICE void finish() const {
    prepare_next_call(params_.succession, params_.epoch, params_.limit, params_.rank);
  }

 private:
  CUTLASS_DEVICE bool is_own(WorkTile const& tile) const { return tile.place.part == params_.rank; }
  CUTLASS_DEVICE int chunk_of(WorkTile const& tile) const {
    return params_.chunks.chunk_of(params_.order, tile.place.strip, tile.place.m, tile.place.n);
  }

  CUTLASS_DEVICE void wait_for_partials(WorkTile const& tile, int peer) {
    if (!tile.place.real) return;  // a cluster's padding
    int chunk = chunk_of(tile);
    int signal = peer * params_.chunks.per_part() + chunk;
    if (signal == ready_) return;
    warp_waits_for_signal(params_.arrived + signal, *params_.epoch, params_.limit, peer, chunk);
    fence_generic_to_async();
    ready_ = signal;
  }

  CUTLASS_DEVICE void raise(int part, int chunk) const {
    fence_generic_to_async();
    ScatterChunks const& chunks = params_.chunks;
    uint32_t* counter = params_.counters + part * chunks.per_part() + chunk;
    Epoch* signals = params_.delivered[part];
    if (signals == nullptr) {
      add_release_system(counter, 1u);
      return;
    }
    int stored = static_cast<int>(add_acquire_release_device(counter, 1u)) + 1;
    if (stored == chunks.block_of(params_.order, chunk).tiles())
      store_release_system(signals + params_.rank * chunks.per_part() + chunk, *params_.epoch);
  }

  Params const& params_;
  int ready_ = -1;  // the signal that was waited for last
};

}  // namespace flux_inductor::cuda
