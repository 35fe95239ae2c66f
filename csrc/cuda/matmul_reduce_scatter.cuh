// matmul + reduce_scatter: the kernel put together, and its launcher. Instantiated by
// matmul_reduce_scatter_*.cu.
#pragma once

#include "kernel_traits.cuh"  // before other headers of CuTe, which it configures

#include "claimed_scheduler.cuh"
#include "matmul_reduce_scatter.h"
#include "scatter_epilogue.cuh"

namespace flux_inductor::cuda {

// CollectiveBuilder lets D reuse C's shared memory. Here not every tile has a C, so that they must
// be apart.
template <class Collective, int SourceStages, int StoreStages>
struct SeparateBuffers;
template <int StagesC, int StagesD, int Fragment, bool Reuse, bool Delay, class... Rest,
          int SourceStages, int StoreStages>
struct SeparateBuffers<
    cutlass::epilogue::collective::CollectiveEpilogue<
        cutlass::epilogue::Sm90TmaWarpSpecialized<StagesC, StagesD, Fragment, Reuse, Delay>,
        Rest...>,
    SourceStages, StoreStages> {
  using type = cutlass::epilogue::collective::CollectiveEpilogue<
      cutlass::epilogue::Sm90TmaWarpSpecialized<SourceStages, StoreStages, Fragment, false, false>,
      Rest...>;
};

// The epilogue by the numbers of its buffers for sources and for stores.
template <class Config, ElementType type, WeightLayout layout>
struct ScatterEpilogues {
  using Element = ElementOf<type>;
  using Finish =
      cutlass::epilogue::fusion::LinCombPerColBias<Element, float, Element, Element, float>;
  using Plain = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, typename Config::Shape,
      typename Config::Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float,
      Element, RowStride, 8, Element, RowStride, 8, typename Config::EpilogueSchedule,
      Finish>::CollectiveOp;
  static constexpr int kSubtiles = Plain::get_store_pipe_increment(typename Config::Shape{});

  template <int source_stages, int store_stages>
  using With = ScatterEpilogue<typename SeparateBuffers<Plain, source_stages, store_stages>::type,
                               Config::tile.pingpong>;

  // Whether so many cost the mainloop no stage.
  template <int source_stages, int store_stages>
  static constexpr bool kFree =
      Mainloop<Config, type, layout, With<source_stages, store_stages>>::DispatchPolicy::Stages ==
      Mainloop<Config, type, layout, With<2, 2>>::DispatchPolicy::Stages;
  // Room for a whole tile: what is still on its way to a peer then need not hold up the epilogue.
  // Anything between costs 256x192 more registers than it has.
  static constexpr int kStoreStages = kFree<2, kSubtiles> ? kSubtiles : 2;
  // Two hold up the epilogue of an own tile by a fifth. A pingpong kernel's sources must be whole
  // turns of them.
  static constexpr int kSourceStages =
      kFree<4, kStoreStages> && (!Config::tile.pingpong || kSubtiles % 8 == 0) ? 4 : 2;
  using Fitting = With<kSourceStages, kStoreStages>;
};

template <class Config, ElementType type, WeightLayout layout>
struct MatmulReduceScatterTraits {
  using Element = ElementOf<type>;
  using Epilogue = typename ScatterEpilogues<Config, type, layout>::Fitting;
  // The pingpong kernel advances each warpgroup's state of the source pipeline by one source for
  // every tile of the other warpgroup. Our tiles have none or several, so that the states count
  // wrong. But a state is used as stage and phase alone, which come back after 2 * StagesC
  // subtiles. If a source has a multiple of that, then every source of every tile begins at stage 0
  // in phase 0: for the warp that loads it, for the warpgroup that adds it, and for the barriers,
  // since the warpgroups' epilogues take turns and each takes up all that was loaded for its tile.
  //
  // The rest of that kernel does not count sources. Turns: the claims of a cluster only rise, so a
  // warpgroup that finds none left has no later one coming, and the other one then has its last
  // tile, which waits for turns already given. Stores: each tile's are out of shared memory when
  // its turn ends. Rule R1: a tile's counter is raised before its turn ends, hence before the next
  // tile of the other warpgroup waits for partials.
  static_assert(!Config::tile.pingpong ||
                    Epilogue::get_load_pipe_increment(typename Config::Shape{}) %
                            (2 * Epilogue::DispatchPolicy::StagesC) ==
                        0,
                "a source must be a whole number of turns of its pipeline");
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>,
                                           Mainloop<Config, type, layout, Epilogue>, Epilogue,
                                           ClaimingTileScheduler<Config::tile.pingpong ? 2 : 1>>;
  static_assert(Kernel::SharedStorageSize <=
                    cutlass::gemm::collective::detail::sm90_smem_capacity_bytes,
                "the mainloop's operands are aligned to more than its carve-out counts");

  static void launch(MatmulReduceScatter const& p, cudaStream_t stream) {
    typename Kernel::Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    arguments.problem_shape = {p.rows, p.n, p.k, p.strips * p.world};
    auto& mainloop = arguments.mainloop;
    mainloop.ptr_A = static_cast<Element const*>(p.x);
    mainloop.dA = {p.x_row_stride, {}, p.rows * p.x_row_stride};
    mainloop.ptr_B = static_cast<Element const*>(p.weight);
    mainloop.dB = weight_stride<layout>(p.weight_stride);
    auto& epilogue = arguments.epilogue;
    epilogue.order = scatter_order(p, Config::tile);
    epilogue.chunks = scatter_cut(p, Config::tile);
    epilogue.rank = p.rank;
    epilogue.rows = p.rows;
    epilogue.n = p.n;
    epilogue.scale = p.scale;
    epilogue.counters = p.counters;
    epilogue.arrived = p.arrived;
    epilogue.epoch = p.epoch;
    epilogue.succession = p.succession;
    epilogue.limit = {p.wait_limit_ns, p.errors, Op::matmul_reduce_scatter};
    epilogue.bias = static_cast<Element const*>(p.bias);
    epilogue.addend = static_cast<Element const*>(p.addend);
    for (int i = 0; i < p.world; ++i) {
      epilogue.parts[i] = static_cast<Element*>(p.parts[i]);
      epilogue.partials[i] = static_cast<Element const*>(p.partials[i]);
      epilogue.delivered[i] = p.delivered[i];
    }
    arguments.scheduler.order = epilogue.order;
    arguments.scheduler.claims = p.claims;
    launch_kernel<Kernel>(arguments, p.multiprocessors, stream);
  }

  static MatmulReduceScatterKernel entry() {
    return {Config::tile,
            type,
            layout,
            Kernel::SharedStorageSize,
            Kernel::DispatchPolicy::Stages,
            &launch,
            &resident_clusters<Kernel>};
  }
};

}  // namespace flux_inductor::cuda
