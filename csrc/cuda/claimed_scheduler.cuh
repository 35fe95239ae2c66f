// The claiming tile scheduler and its pipeline; tile_scheduler.cuh says why it exists.
//
// CUTLASS's cooperative and pingpong kernels have a scheduler warp for dynamic schedulers. Here the
// one of the cluster's first block claims a tile and sends the number to every block of the
// cluster. In the cooperative kernel the pipeline has one stage: a tile is claimed when the
// cluster's warps have taken up the one before, hence while that one is being multiplied, which is
// early enough. In the pingpong kernel each of the two multiplying warpgroups takes up every other
// claim. There it must have two stages, one for each of them: a warpgroup that skips a claim cannot
// tell the barrier's phase of the claim before from that of the claim after.
#pragma once

#include "cute/arch/cluster_sm90.hpp"
#include "cutlass/arch/barrier.h"
#include "tile_scheduler.cuh"

namespace flux_inductor::cuda {

// A number that the scheduler warps hand to all warps of a cluster.
struct ClaimSlot {
  cutlass::arch::ClusterTransactionBarrier full;
  uint32_t claim;

  // By the scheduler warp of every block; the first block calls `get` for what it sends.
  template <class Get>
  CUTLASS_DEVICE void send(Get get) {
    if (cutlass::canonical_lane_idx() == 0) {
      full.arrive_and_expect_tx(sizeof(uint32_t));
      if (cute::block_rank_in_cluster() == 0) {
        uint32_t next = get();
        dim3 cluster = cute::cluster_shape();
        for (uint32_t block = 0; block < cluster.x * cluster.y; ++block) {
          cute::store_shared_remote(next, cute::cast_smem_ptr_to_uint(&claim),
                                    cute::cast_smem_ptr_to_uint(&full), block);
        }
      }
    }
    __syncwarp();
  }

  CUTLASS_DEVICE uint32_t receive(uint32_t phase) {
    full.wait(phase);
    return *const_cast<uint32_t volatile*>(&claim);
  }
};

template <uint32_t Stages_>
class ClaimPipeline {
 public:
  static constexpr uint32_t Stages = Stages_;
  using PipelineState = cutlass::PipelineState<Stages>;
  enum class ThreadCategory { NonParticipant, Producer, Consumer, ProducerConsumer };
  struct Params {  // CUTLASS's kernels fill these in; only the number of consumers is of use here
    ThreadCategory role = ThreadCategory::NonParticipant;
    uint32_t producer_blockid = 0;
    uint32_t producer_arv_count = 0;
    uint32_t consumer_arv_count = 0;  // threads of one block that take up one claim
    uint32_t transaction_bytes = 0;
  };
  struct SharedStorage {
    ClaimSlot first;  // the cluster's first claim
    ClaimSlot next[Stages];
    cutlass::arch::ClusterBarrier
        empty[Stages];  // those of the cluster's first block count warps of the whole cluster
  };

  CUTLASS_DEVICE ClaimPipeline(SharedStorage& storage, Params const& params) : storage_(storage) {
    if (cutlass::canonical_warp_idx_sync() == 0 && cute::elect_one_sync()) {
      dim3 cluster = cute::cluster_shape();
      storage_.first.full.init(1);
      for (uint32_t stage = 0; stage < Stages; ++stage) {
        storage_.next[stage].full.init(1);
        storage_.empty[stage].init(params.consumer_arv_count / cutlass::NumThreadsPerWarp *
                                   cluster.x * cluster.y);
      }
    }
    cutlass::arch::fence_barrier_init();
  }

  // By every warp that takes up the claim, the scheduler's among them.
  CUTLASS_DEVICE uint32_t consume(PipelineState state) {
    uint32_t claim = storage_.next[state.index()].receive(state.phase());
    __syncwarp();
    if (cutlass::canonical_lane_idx() == 0) storage_.empty[state.index()].arrive(0u);
    return claim;
  }

  // The first block of a cluster must not exit while others may still arrive at its barrier.
  CUTLASS_DEVICE void producer_tail(PipelineState state) {
    if (cute::block_rank_in_cluster() != 0) return;
    for (uint32_t stage = 0; stage < Stages; ++stage, ++state)
      storage_.empty[state.index()].wait(state.phase());
  }

  // The pingpong kernel wraps these around store_invalid_response(), which does it all.
  CUTLASS_DEVICE void producer_acquire(PipelineState) {}
  CUTLASS_DEVICE void producer_commit(PipelineState) {}

 private:
  SharedStorage& storage_;
};

// CUTLASS's kernels throttle their scheduler warp with a second pipeline. With so few stages there
// is no need.
class NoThrottle {
 public:
  static constexpr uint32_t Stages = 1;
  using PipelineState = cutlass::PipelineState<1>;
  enum class ThreadCategory { NonParticipant, Producer, Consumer, ProducerConsumer };
  struct Params {
    ThreadCategory role = ThreadCategory::NonParticipant;
    uint32_t producer_arv_count = 0;
    uint32_t consumer_arv_count = 0;
    uint32_t dst_blockid = 0;
    int initializing_warp = 0;
  };
  struct SharedStorage {};
  CUTLASS_DEVICE NoThrottle(SharedStorage, Params const&) {}
  CUTLASS_DEVICE void producer_acquire(PipelineState) {}
  CUTLASS_DEVICE void producer_commit(PipelineState) {}
  CUTLASS_DEVICE void consumer_wait(PipelineState) {}
  CUTLASS_DEVICE void consumer_release(PipelineState) {}
};

template <uint32_t Stages>
class ClaimingTileScheduler : public OrderedSchedulerBase {
 public:
  static constexpr bool IsDynamicPersistent = true;
  using Pipeline = ClaimPipeline<Stages>;
  using PipelineState = typename Pipeline::PipelineState;
  using PipelineStorage = typename Pipeline::SharedStorage;
  using ThrottlePipeline = NoThrottle;
  using ThrottlePipelineStorage = NoThrottle::SharedStorage;
  struct CLCResponse {};

  class SharedStorage {
   public:
    CUTLASS_DEVICE PipelineStorage& pipeline() { return storage_; }
    CUTLASS_DEVICE ThrottlePipelineStorage throttle_pipeline() { return {}; }
    CUTLASS_DEVICE PipelineStorage* data() { return &storage_; }

   private:
    alignas(16) PipelineStorage storage_;
  };

  // The first tile, too, must be claimed: a cluster that is not resident yet may hold none. But the
  // kernels ask for it before the cluster's barriers can be used. So it finds its place when it is
  // first asked whether there is one. The number is fetched at once, since that takes as long as
  // the barriers do.
  struct WorkTileInfo : OrderedSchedulerBase::WorkTileInfo {
    PipelineStorage* first_in =
        nullptr;  // where the first claim will come, until it has been taken up
    Params const* params;
    uint32_t first_claim;  // of the thread that sends it

    WorkTileInfo() = default;
    CUTLASS_DEVICE WorkTileInfo(OrderedSchedulerBase::WorkTileInfo const& work)
        : OrderedSchedulerBase::WorkTileInfo(work) {}
    CUTLASS_DEVICE bool is_valid() {
      if (first_in != nullptr) *this = first_work(*params, first_in->first, first_claim);
      return is_valid_tile;
    }
  };

  // CUTLASS's kernels construct one a thread.
  CUTLASS_DEVICE explicit ClaimingTileScheduler(Params const& params)
      : OrderedSchedulerBase(params) {
    if (threadIdx.x == kSchedulerWarp * cutlass::NumThreadsPerWarp &&
        cute::block_rank_in_cluster() == 0)
      first_claim_ = atomicAdd(params.claims, 1u);
  }

  CUTLASS_DEVICE void set_data_ptr(PipelineStorage* storage) { storage_ = storage; }

  template <class ClusterShape>
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(ClusterShape) const {
    WorkTileInfo work;
    work.first_in = storage_;
    work.params = &params_;
    work.first_claim = first_claim_;
    return work;
  }

  // By the scheduler warps.
  CUTLASS_DEVICE auto advance_to_next_work(Pipeline&, PipelineState state) {
    send_next(state);
    ++state;
    return state;
  }
  // The pingpong kernel wants one number more, to end its second warpgroup: like every claim behind
  // the last tile, the next one is invalid.
  CUTLASS_DEVICE void store_invalid_response(PipelineState state) { send_next(state); }

  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo, Pipeline& pipeline, PipelineState state) {
    return cute::make_tuple(WorkTileInfo(work_at(params_.order, pipeline.consume(state))), true);
  }
  // CUTLASS calls this one only for tiles that some warpgroups skip, which this scheduler never
  // hands out.
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo work) { return cute::make_tuple(work, false); }

 private:
  static constexpr uint32_t kSchedulerWarp = 1;

  CUTLASS_DEVICE void send_next(PipelineState state) {
    storage_->next[state.index()].send([&] {
      storage_->empty[state.index()].wait(state.phase());
      return atomicAdd(params_.claims, 1u);
    });
  }
  CUTLASS_DEVICE static WorkTileInfo first_work(Params const& params, ClaimSlot& slot,
                                                uint32_t claim) {
    if (threadIdx.x / cutlass::NumThreadsPerWarp == kSchedulerWarp)
      slot.send([&] { return claim; });
    return work_at(params.order, slot.receive(0));
  }

  PipelineStorage* storage_ = nullptr;
  uint32_t first_claim_ = 0;
};

}  // namespace flux_inductor::cuda

namespace cutlass::gemm::kernel::detail {
template <uint32_t ClaimStages, class ArchTag, class TileShape, class ClusterShape, uint32_t Stages>
struct TileSchedulerSelector<flux_inductor::cuda::ClaimingTileScheduler<ClaimStages>, ArchTag,
                             TileShape, ClusterShape, Stages> {
  using Scheduler = flux_inductor::cuda::ClaimingTileScheduler<ClaimStages>;
};
}  // namespace cutlass::gemm::kernel::detail
