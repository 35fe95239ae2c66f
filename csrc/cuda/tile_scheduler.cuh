// CUTLASS tile schedulers that follow a TileOrder. There are two ways to hand out its tiles.
//
// Fixed: the i-th cluster takes the tiles i, i + clusters, ... That needs no communication, and is
// enough when waits never depend on tiles of this kernel. In all_gather every wait is for a copy
// engine.
//
// Claimed: clusters claim the next tile from a counter in memory. That is needed when other ranks
// wait for tiles (rule R1). Say ranks 0 and 1 each have one cluster that is not resident, because
// another kernel holds its multiprocessors. With fixed shares, the resident clusters of both ranks
// soon wait for tiles of the other rank's absent cluster, for ever. Claimed in order, tiles that
// others wait for are never left behind.
//
// Both derive from CUTLASS's persistent scheduler for the part of its interface that does not deal
// with order.
#pragma once

#include <algorithm>

#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "cutlass/pipeline/pipeline.hpp"
#include "tile_order.h"

namespace flux_inductor::cuda {

using PersistentScheduler = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;
using PersistentArguments = PersistentScheduler::Arguments;
using PersistentParams = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90Params;

struct OrderArguments : PersistentArguments {
  TileOrder order;
  uint32_t* claims = nullptr;  // zero when the kernel starts; only the claiming scheduler uses it
};

struct OrderParams : PersistentParams {
  TileOrder order;
  uint32_t* claims;
};

// What both have in common: from arguments to parameters, the grid, and a place in the order as
// CUTLASS wants it.
class OrderedSchedulerBase : public PersistentScheduler {
 public:
  using Arguments = OrderArguments;
  using Params = OrderParams;

  // The kernel's parameters outlive the scheduler, and stay where they are: a copy would cost
  // registers.
  CUTLASS_DEVICE explicit OrderedSchedulerBase(Params const& params) : params_(params) {}

  template <class ProblemShape, class TileShape, class ClusterShape>
  static Params to_underlying_arguments(ProblemShape shape, TileShape tile, ClusterShape cluster,
                                        cutlass::KernelHardwareInfo const& hardware,
                                        Arguments const& arguments, void* workspace = nullptr,
                                        uint32_t subtiles = 1, uint32_t alignment = 1u) {
    Params params;
    static_cast<PersistentParams&>(params) = PersistentScheduler::to_underlying_arguments(
        shape, tile, cluster, hardware, arguments, workspace, subtiles, alignment);
    params.order = arguments.order;
    params.claims = arguments.claims;
    return params;
  }

  // (cluster_m, cluster_n * clusters): blockIdx.y tells the cluster, as many as fit the
  // multiprocessors we may use.
  template <class ProblemShape, class TileShape, class ClusterShape>
  static dim3 get_grid_shape(Params const& params, ProblemShape, TileShape, ClusterShape,
                             cutlass::KernelHardwareInfo const& hardware,
                             PersistentArguments = {}) {
    TileOrder const& order = params.order;
    int fit = std::min(hardware.sm_count / (order.cluster_m() * order.cluster_n()),
                       hardware.max_active_clusters);
    int clusters = std::max(1, std::min(fit, order.clusters()));
    return dim3(order.cluster_m(), order.cluster_n() * clusters, 1);
  }

 protected:
  CUTLASS_DEVICE static WorkTileInfo work_at(TileOrder const& order, uint32_t index) {
    if (index >= static_cast<uint32_t>(order.clusters())) return WorkTileInfo::invalid_work_tile();
    dim3 cta = cute::block_id_in_cluster();
    TilePlace place = order.at(static_cast<int>(index), cta.x, cta.y);
    return {place.m, place.n, order.block_of(place.part, place.strip), true};
  }

  Params const& params_;
};

class FixedTileScheduler : public OrderedSchedulerBase {
 public:
  CUTLASS_DEVICE explicit FixedTileScheduler(Params const& params)
      : OrderedSchedulerBase(params),
        index_(params.order.cluster_column(blockIdx.y)),
        stride_(params.order.cluster_column(gridDim.y)) {}

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
