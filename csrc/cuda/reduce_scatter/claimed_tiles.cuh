// Which tile a block of a reduce_scatter multiplies next. All its warps ask, each for itself.
//
// Clusters claim tiles, in the order of a TileOrder, from a counter in memory. That is needed where
// other ranks wait for tiles (rule R1). Say ranks 0 and 1 each have one cluster that is not
// resident, because another kernel holds its SMs. With fixed shares, the resident
// clusters of both ranks soon wait for tiles of the other rank's absent cluster, for ever. Claimed
// in order, tiles that others wait for are never left behind.
//
// The scheduler warp of the cluster's first block claims a tile and sends the number to every block
// of the cluster, when all of the cluster's warps have taken up the number before. That is early
// enough: they do so when they begin with that tile, or earlier.
#pragma once

#include "core/tile_order.h"
#include "cute/arch/cluster_sm90.hpp"
#include "cutlass/arch/barrier.h"

namespace flux_inductor::cuda {

struct WorkTile {
  TilePlace place;
  int block;   // part and strip as one coordinate
  bool valid;  // false behind the last tile
};

class ClaimedTiles {
 public:
  struct Params {
    TileOrder order;
    uint32_t* claims;  // zero when the kernel starts
  };
  struct SharedStorage {
    cutlass::arch::ClusterTransactionBarrier sent;
    cutlass::arch::ClusterBarrier taken;  // the first block's counts warps of the whole cluster
    uint32_t claim;
  };

  // The first number is fetched at once, since that takes as long as the barriers' set-up.
  CUTLASS_DEVICE ClaimedTiles(Params const& params, SharedStorage& storage, bool schedules)
      : params_(params), storage_(storage) {
    if (schedules && sends()) first_ = atomicAdd(params.claims, 1u);
  }

  // By one thread. `warps` of each block ask for tiles, the scheduler's among them.
  CUTLASS_DEVICE static void init(SharedStorage& storage, int warps) {
    dim3 cluster = cute::cluster_shape();
    storage.sent.init(1);
    storage.taken.init(warps * cluster.x * cluster.y);
  }

  CUTLASS_DEVICE WorkTile next() {
    storage_.sent.wait(taken_ % 2);
    uint32_t claim = *const_cast<uint32_t volatile*>(&storage_.claim);
    __syncwarp();
    if (cutlass::canonical_lane_idx() == 0) storage_.taken.arrive(0u);
    ++taken_;
    return tile_at(claim);
  }

  // The scheduler warp's part. The first block of a cluster must not exit while others may still
  // arrive at its barrier.
  CUTLASS_DEVICE void schedule() {
    do send();
    while (next().valid);
    if (cute::block_rank_in_cluster() == 0) wait_until_taken();
  }

 private:
  CUTLASS_DEVICE static bool sends() {
    return cutlass::canonical_lane_idx() == 0 && cute::block_rank_in_cluster() == 0;
  }

  CUTLASS_DEVICE void send() {
    if (cutlass::canonical_lane_idx() == 0) storage_.sent.arrive_and_expect_tx(sizeof(uint32_t));
    if (sends()) {
      if (taken_ > 0) wait_until_taken();
      uint32_t claim = taken_ > 0 ? atomicAdd(params_.claims, 1u) : first_;
      dim3 cluster = cute::cluster_shape();
      for (uint32_t block = 0; block < cluster.x * cluster.y; ++block) {
        cute::store_shared_remote(claim, cute::cast_smem_ptr_to_uint(&storage_.claim),
                                  cute::cast_smem_ptr_to_uint(&storage_.sent), block);
      }
    }
    __syncwarp();
  }
  CUTLASS_DEVICE void wait_until_taken() { storage_.taken.wait((taken_ - 1) % 2); }

  CUTLASS_DEVICE WorkTile tile_at(uint32_t claim) const {
    TileOrder const& order = params_.order;
    if (claim >= static_cast<uint32_t>(order.clusters())) return {{}, 0, false};
    dim3 block = cute::block_id_in_cluster();
    TilePlace place = order.at(static_cast<int>(claim), block.x, block.y);
    return {place, order.block_of(place.part, place.strip), true};
  }

  Params const& params_;
  SharedStorage& storage_;
  uint32_t taken_ = 0;  // claims that this warp has taken up
  uint32_t first_ = 0;  // of the thread that sends it
};

}  // namespace flux_inductor::cuda
