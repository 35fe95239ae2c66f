// A CUTLASS tile scheduler that follows a TileOrder, for all_gather: the i-th cluster takes the
// tiles i, i + clusters, ... That needs no communication, and is enough where waits never depend on
// tiles of this kernel: every wait is for a copy engine. (Those of a reduce_scatter do; see
// claimed_tiles.cuh.)
//
// It derives from CUTLASS's persistent scheduler for the part of its interface that does not deal
// with order.
#pragma once

#include "core/tile_order.h"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "cutlass/pipeline/pipeline.hpp"

namespace flux_inductor::cuda {

using PersistentScheduler = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;
using PersistentArguments = PersistentScheduler::Arguments;
using PersistentParams = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90Params;

struct OrderArguments : PersistentArguments {
  TileOrder order;
};

struct OrderParams : PersistentParams {
  TileOrder order;
};

class FixedTileScheduler : public PersistentScheduler {
 public:
  using Arguments = OrderArguments;
  using Params = OrderParams;

  // The kernel's parameters outlive the scheduler, and stay where they are: a copy would cost
  // registers.
  CUTLASS_DEVICE explicit FixedTileScheduler(Params const& params)
      : params_(params),
        index_(params.order.cluster_column(blockIdx.y)),
        stride_(params.order.cluster_column(gridDim.y)) {}

  template <class ProblemShape, class TileShape, class ClusterShape>
  static Params to_underlying_arguments(ProblemShape shape, TileShape tile, ClusterShape cluster,
                                        cutlass::KernelHardwareInfo const& hardware,
                                        Arguments const& arguments, void* workspace = nullptr,
                                        uint32_t subtiles = 1, uint32_t alignment = 1u) {
    Params params;
    static_cast<PersistentParams&>(params) = PersistentScheduler::to_underlying_arguments(
        shape, tile, cluster, hardware, arguments, workspace, subtiles, alignment);
    params.order = arguments.order;
    return params;
  }

  // (cluster_m, cluster_n * clusters): blockIdx.y tells the cluster.
  template <class ProblemShape, class TileShape, class ClusterShape>
  static dim3 get_grid_shape(Params const& params, ProblemShape, TileShape, ClusterShape,
                             cutlass::KernelHardwareInfo const& hardware,
                             PersistentArguments = {}) {
    TileOrder const& order = params.order;
    int clusters = order.clusters_at_work(hardware.sm_count, hardware.max_active_clusters);
    return dim3(order.cluster_m(), order.cluster_n() * clusters, 1);
  }

  CUTLASS_DEVICE WorkTileInfo get_current_work() const { return work_at(params_.order, index_); }
  CUTLASS_DEVICE void advance_to_next_work(uint32_t count = 1) { index_ += count * stride_; }

  template <class ClusterShape>
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(ClusterShape) const {
    return get_current_work();
  }
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo) {
    advance_to_next_work();
    return cute::make_tuple(get_current_work(), true);
  }
  template <class Pipeline, class State>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo work, Pipeline&, State) {
    return fetch_next_work(work);
  }

 private:
  CUTLASS_DEVICE static WorkTileInfo work_at(TileOrder const& order, uint32_t index) {
    if (index >= static_cast<uint32_t>(order.clusters())) return WorkTileInfo::invalid_work_tile();
    dim3 cta = cute::block_id_in_cluster();
    TilePlace place = order.at(static_cast<int>(index), cta.x, cta.y);
    return {place.m, place.n, order.block_of(place.part, place.strip), true};
  }

  Params const& params_;
  uint32_t index_;
  uint32_t stride_;
};

}  // namespace flux_inductor::cuda

namespace cutlass::gemm::kernel::detail {
template <class ArchTag, class TileShape, class ClusterShape, uint32_t Stages>
struct TileSchedulerSelector<flux_inductor::cuda::FixedTileScheduler, ArchTag, TileShape,
                             ClusterShape, Stages> {
  using Scheduler = flux_inductor::cuda::FixedTileScheduler;
};
}  // namespace cutlass::gemm::kernel::detail
