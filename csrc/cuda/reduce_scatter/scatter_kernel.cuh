// The kernel of matmul + reduce_scatter: persistent blocks whose warps share the work.
//
//   load      loads operands by TMA, and what is to be added to a tile
//   schedule  claims tiles
//   store     stores finished tiles by TMA and tells the peers; at the end prepares the next call
//   others    one or two warpgroups multiply, by CUTLASS's wgmma mainloop
//
// Timeline of a block. The steps of the mainloop's pipeline carry operands, a block of A and one of
// B each. A tile has K / 64 of them (k), and then steps that carry nothing but their stage (e, for
// an epilogue), for the tile to be put there (tile_buffers.cuh): one for each source, the last of
// which takes the results, too, or one for the results alone.
//
//   load       k k k ... k e k k k ...           waits for free stages
//   multiply     k k k ... k e k k k ...         e: adds the source, writes the results
//   store                      e                 stores them, and frees the stage when it is read
//
// So the tensor cores idle while a tile's results are written to shared memory, not while they
// travel on. In CUTLASS's own kernels, from which this one has its roles and its pipeline, the
// multiplying warps wait for most of that: their buffers are small beside a tile.
//
// Rule R1: scatter_output.cuh. What the store warp needs of a tile is loaded when the load warp has
// left that tile's last step.
#pragma once

#include "cuda/gemm/kernel_traits.cuh"  // before other headers of CuTe, which it configures

#include "cuda/reduce_scatter/claimed_tiles.cuh"
#include "cuda/reduce_scatter/scatter_output.cuh"
#include "cuda/reduce_scatter/tile_buffers.cuh"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/pipeline/sm90_pipeline.hpp"

namespace flux_inductor::cuda {

template <class Config, ElementType result, class Mainloop_>
class ScatterKernel {
  using Result = ElementOf<result>;
  using U = Units<Config, sizeof(Result)>;
  static constexpr int kGroups = Config::tile.m == 64 ? 1 : 2;  // multiply one tile
  static constexpr int kMathThreads = kGroups * cutlass::NumThreadsPerWarpGroup;

 public:
  using Mainloop = Mainloop_;
  using ClusterShape = typename Config::Cluster;
  static constexpr int kStages = Mainloop::DispatchPolicy::Stages;
  static constexpr uint32_t MaxThreadsPerBlock = cutlass::NumThreadsPerWarpGroup + kMathThreads;
  static constexpr uint32_t MinBlocksPerMultiprocessor = 1;

 private:
  using Pipeline = typename Mainloop::MainloopPipeline;
  using State = typename Mainloop::PipelineState;
  using Barrier = cutlass::arch::ClusterBarrier;

  enum Warp { kLoad = 0, kSchedule = 1, kStore = 2 };
  static constexpr int kAsking = 3 + kMathThreads / cutlass::NumThreadsPerWarp;  // for tiles
  static constexpr int kBlocks = cute::size(ClusterShape{});
  static_assert(kBlocks > 1 &&
                    (cute::size<0>(ClusterShape{}) == 1 || cute::size<1>(ClusterShape{}) == 1),
                "CUTLASS counts releases of a stage otherwise for other clusters");

  // What the stages and everything small leave goes to spare buffers: the less of a stage a tile
  // needs, the sooner that is free again.
  static constexpr uint32_t kStageBytes = U::kBytesA + U::kBytesB;
  static constexpr int kSmallThings = 1024;  // barriers, and what aligns buffers
  static constexpr int kLeft = kSharedMemory - kSmallThings - kStages * int(kStageBytes);
  static constexpr int kSpare = std::clamp(kLeft / U::kBytes, 0, U::kCount);
  static constexpr int kBorrowed = U::kCount - kSpare;

 public:
  // Whether there is room for so many stages.
  static constexpr bool kFits = kSpare > 0 && kBorrowed <= U::kInA + U::kInB;

  struct Params {
    cute::Shape<int, int, int, int> shape;  // rows of a part, N, K, parts and strips
    typename Mainloop::Params mainloop;
    float scale;
    Result const* bias;  // [N] or null
    ScatterOutput::Params output;
    ClaimedTiles::Params tiles;
  };

  struct SharedStorage {
    alignas(1024) typename Mainloop::TensorStorage operands;
    alignas(1024) char spare[kSpare][U::kBytes];
    alignas(16) typename Pipeline::SharedStorage loaded;
    Barrier handed;  // a step's stage and the spare buffers, by the multiplying to the store warp
    Barrier spare_free;
    ClaimedTiles::SharedStorage tiles;
  };
  static constexpr int SharedStorageSize = sizeof(SharedStorage);

  static dim3 get_block_shape() { return dim3(MaxThreadsPerBlock, 1, 1); }

  CUTLASS_DEVICE void operator()(Params const& params, char* shared) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(shared);
    int group = cutlass::canonical_warp_group_idx();
    int warp = cutlass::canonical_warp_idx_sync();
    if (warp == kLoad && cute::elect_one_sync()) {
      Mainloop::prefetch_tma_descriptors(params.mainloop);
      ScatterOutput::prefetch_tma_descriptors(params.output);
    }
    ClaimedTiles tiles(params.tiles, storage.tiles, warp == kSchedule);
    Pipeline pipeline = make_pipeline(storage, group, warp);
    if (warp == kSchedule && cute::elect_one_sync()) init_barriers(storage);
    cutlass::arch::fence_barrier_init();
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();

    if (group > 0) {
      if constexpr (kGroups > 1) cutlass::arch::warpgroup_reg_alloc<232>();
      multiply(params, storage, pipeline, tiles);
      return;
    }
    if constexpr (kGroups > 1) cutlass::arch::warpgroup_reg_dealloc<40>();
    if (warp == kLoad) load(params, storage, pipeline, tiles);
    if (warp == kSchedule) tiles.schedule();
    if (warp == kStore) store(params, storage, tiles);
#endif
  }

 private:
  CUTLASS_DEVICE static Pipeline make_pipeline(SharedStorage& storage, int group, int warp) {
    typename Pipeline::Params p;
    if (group > 0) p.role = Pipeline::ThreadCategory::Consumer;
    if (warp == kLoad) p.role = Pipeline::ThreadCategory::Producer;
    p.is_leader = threadIdx.x % cutlass::NumThreadsPerWarpGroup == 0;
    p.num_consumers = kMathThreads;
    p.transaction_bytes = kStageBytes;
    return Pipeline(storage.loaded, p, ClusterShape{});
  }

  CUTLASS_DEVICE static void init_barriers(SharedStorage& storage) {
    storage.handed.init(kMathThreads / cutlass::NumThreadsPerWarp);
    storage.spare_free.init(1);
    ClaimedTiles::init(storage.tiles, kAsking);
  }

  CUTLASS_DEVICE static int operand_steps(Params const& params) {
    return ceil_div(cute::get<2>(params.shape), 64);
  }
  CUTLASS_DEVICE static int own_steps(int sources) { return sources > 1 ? sources : 1; }

  // A unit of the tile that has a step's stage.
  CUTLASS_DEVICE static char* unit_at(SharedStorage& storage, int stage, int unit) {
    if (unit >= kBorrowed) return storage.spare[unit - kBorrowed];
    char* a = reinterpret_cast<char*>(&storage.operands.smem_A) + stage * U::kBytesA;
    char* b = reinterpret_cast<char*>(&storage.operands.smem_B) + stage * U::kBytesB;
    return unit < U::kInA ? a + unit * U::kBytes : b + (unit - U::kInA) * U::kBytes;
  }
  CUTLASS_DEVICE static int row_of(WorkTile const& tile, int unit) {
    return tile.place.m * (U::kDown * U::kRows) + U::first_row(unit);
  }
  CUTLASS_DEVICE static int column_of(WorkTile const& tile, int unit) {
    return tile.place.n * (U::kAcross * U::kColumns) + U::first_column(unit);
  }

  CUTLASS_DEVICE static void load(Params const& params, SharedStorage& storage, Pipeline& pipeline,
                                  ClaimedTiles& tiles) {
    Mainloop mainloop;
    ScatterOutput output(params.output);
    auto operands = mainloop.load_init(params.shape, params.mainloop);
    int steps = operand_steps(params);
    State state = cutlass::make_producer_start_state<Pipeline>();
    uint32_t lent = 0;
    for (WorkTile tile = tiles.next(); tile.valid; tile = tiles.next()) {
      mainloop.load(params.mainloop, pipeline, state, operands,
                    cute::make_coord(tile.place.m, tile.place.n, cute::_, tile.block),
                    cute::make_coord_iterator(0, steps), steps, cutlass::canonical_lane_idx(),
                    cute::block_rank_in_cluster(), storage.operands);
      state.advance(steps);
      int sources = output.sources(tile);
      for (int i = 0; i < own_steps(sources); ++i, ++state, ++lent) {
        BlockOf source{};
        if (sources > 0) source = output.source(tile, i);
        if (cute::elect_one_sync()) lend_stage(storage, pipeline, state, lent, tile, source);
      }
    }
    mainloop.load_tail(pipeline, state);
  }

  // A stage and the spare buffers for a tile's results, with a source in them or without.
  CUTLASS_DEVICE static void lend_stage(SharedStorage& storage, Pipeline& pipeline, State state,
                                        uint32_t lent, WorkTile const& tile,
                                        BlockOf const& source) {
    storage.spare_free.wait((lent + 1) % 2);
    pipeline.producer_acquire(state);  // which expects the bytes of operands
    auto& loaded = storage.loaded.full_barrier_[state.index()];
    constexpr int kMore = U::kTileBytes - int(kStageBytes);
    if (source.map == nullptr) {
      loaded.complete_transaction(kStageBytes);
      return;
    }
    if constexpr (kMore > 0) loaded.expect_transaction(kMore);
    if constexpr (kMore < 0) loaded.complete_transaction(-kMore);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int unit = 0; unit < U::kCount; ++unit) {
      cute::SM90_TMA_LOAD_3D::copy(source.map, pipeline.producer_get_barrier(state),
                                   static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                   unit_at(storage, state.index(), unit), column_of(tile, unit),
                                   row_of(tile, unit), source.block);
    }
  }

  CUTLASS_DEVICE static void multiply(Params const& params, SharedStorage& storage,
                                      Pipeline& pipeline, ClaimedTiles& tiles) {
    Mainloop mainloop;
    ScatterOutput output(params.output);
    int thread = threadIdx.x - cutlass::NumThreadsPerWarpGroup;
    int steps = operand_steps(params);
    State state;
    for (WorkTile tile = tiles.next(); tile.valid; tile = tiles.next()) {
      auto sums = cute::partition_fragment_C(typename Mainloop::TiledMma{},
                                             cute::take<0, 2>(typename Config::Shape{}));
      mainloop.mma(pipeline, state, sums, steps, thread, storage.operands, params.mainloop);
      mainloop.mma_tail(pipeline, state, steps);
      state.advance(steps);

      TileRegisters<Config, Result, kGroups> registers(thread);
      int column = column_of(tile, 0);
      registers.scale(sums, params.scale);
      if (params.bias != nullptr)
        registers.add_bias(sums, params.bias + column, cute::get<1>(params.shape) - column);
      int sources = output.sources(tile);
      for (int left = own_steps(sources); left > 0; --left, ++state) {
        auto at = [&](int unit) { return unit_at(storage, state.index(), unit); };
        pipeline.consumer_wait(state);
        if (sources > 0) registers.add_source(sums, at);
        if (left == 1) registers.store(sums, at);
        cutlass::arch::fence_view_async_shared();
        __syncwarp();
        if (cutlass::canonical_lane_idx() == 0) storage.handed.arrive();
      }
    }
  }

  CUTLASS_DEVICE static void store(Params const& params, SharedStorage& storage,
                                   ClaimedTiles& tiles) {
    ScatterOutput output(params.output);
    State state;
    uint32_t handed = 0;
    WorkTile tile = tiles.next();
    while (tile.valid) {
      // Asked for at once, since nobody gets a tile behind it before.
      WorkTile next = tiles.next();
      state.advance(operand_steps(params));
      for (int left = own_steps(output.sources(tile)); left > 0; --left, ++state, ++handed) {
        storage.handed.wait(handed % 2);
        __syncwarp();  // no lane may look for this phase when the next but one has begun
        // One lane, and always the same one, since a thread can wait for its own bulk stores alone.
        if (cutlass::canonical_lane_idx() == 0)
          take_back(storage, state.index(), tile, left == 1 ? output.target(tile) : BlockOf{},
                    output.is_far(tile));
        __syncwarp();
      }
      output.stored(tile);
      tile = next;
    }
    output.finish();
  }

  // The stage, then the spare buffers, as soon as the results in them have been read, if there are
  // any: the mainloop lacks the stage.
  CUTLASS_DEVICE static void take_back(SharedStorage& storage, int stage, WorkTile const& tile,
                                       BlockOf const& target, bool far) {
    store_units(storage, stage, tile, target, far, 0, kBorrowed);
    release_stage(storage, stage);
    store_units(storage, stage, tile, target, far, kBorrowed, U::kCount);
    storage.spare_free.arrive();
  }

  // Few at a time: stores that wait for their way hold up the loads behind them, and those to a
  // peer wait for the link. Returns when they have been read.
  CUTLASS_DEVICE static void store_units(SharedStorage& storage, int stage, WorkTile const& tile,
                                         BlockOf const& target, bool far, int first, int end) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int unit = first; target.map != nullptr && unit < end; ++unit) {
      cute::SM90_TMA_STORE_3D::copy(target.map, unit_at(storage, stage, unit),
                                    column_of(tile, unit), row_of(tile, unit), target.block);
      cute::tma_store_arrive();
      far ? wait_for_own_bulk_stores() : wait_for_own_bulk_stores<1>();
    }
    cute::tma_store_wait<0>();
  }

  // In the place of the warpgroups, which release a stage of operands when they have multiplied it:
  // to every block of the cluster, since each loads a share of the others' operands.
  CUTLASS_DEVICE static void release_stage(SharedStorage& storage, int stage) {
    for (int block = 0; block < kBlocks; ++block) {
      for (int group = 0; group < kGroups; ++group)
        storage.loaded.empty_barrier_[stage].arrive(block);
    }
  }
};

}  // namespace flux_inductor::cuda
