// CUTLASS's TMA epilogue, with the tiles of each part going to that part's own tensor, and the
// other ranks' partial tiles added to the own ones.
//
// A tile of a peer's part is scale * accumulator + bias + addend. It is stored where it leaves for
// the peer; then the counter of its chunk is raised, for whoever moves the chunk. Or, if nobody
// else does, it is stored where the peer wants it, and whoever raises the counter to the chunk's
// number of tiles raises the peer's signal. A tile of the own part is the same plus the peers'
// partials, stored once, as the result.
//
// Partials and addend ("sources") come in through the epilogue's C operand: its producer warp waits
// for the chunk's signal and loads it by TMA, while the tile is still being multiplied. All but the
// last source are added to the accumulator first, one after another in a fixed order; everything is
// fp32 until the one rounding at the end.
//
// The counter can be raised when the tile's stores are complete, which takes a microsecond or two
// after the last one is issued. The cooperative kernel does not wait for that, since its tensor
// cores would idle: the next tile's epilogue raises the counter, before that tile waits for
// anything (rule R1). But where parts have few waves of tiles and chunks are still to be copied,
// the last tiles of the peers' parts are urgent, since a delay of theirs is soon a delay of the own
// part, in which the peers are at the same place one part later; there it waits at once. Stores to
// a peer are never urgent: all blocks store together, so that they take tens of microseconds, which
// the next tile hides; the signal itself takes two. The pingpong kernel always waits at once, in
// store_tail(): its other warpgroup multiplies meanwhile, and may be the one that waits for
// partials next.
//
// A signal that the kernel raises stands for stores of many blocks. For each of them: its bulk
// stores are complete and visible to the thread that waited for them; that thread releases by
// adding to the counter; the thread that adds last acquires from all of them, since additions to
// one word form one chain, and releases to the peer. Causality is transitive over links whose
// scopes hold both of their ends: the GPU for the counter, which its threads alone look at, and the
// system for the signal. So the peer that acquires the signal sees all of the stores, and its TMA
// does after fence_generic_to_async().
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_epilogue.hpp"
#include "matmul_reduce_scatter.h"
#include "scatter_chunks.h"
#include "signals.cuh"

namespace flux_inductor::cuda {

// CollectiveBuilder lets D reuse C's shared memory. Here not every tile has a C, so that they must
// be apart.
template <class Collective, int StoreStages>
struct SeparateBuffers;
template <int StagesC, int StagesD, int Fragment, bool Reuse, bool Delay, class... Rest,
          int StoreStages>
struct SeparateBuffers<
    cutlass::epilogue::collective::CollectiveEpilogue<
        cutlass::epilogue::Sm90TmaWarpSpecialized<StagesC, StagesD, Fragment, Reuse, Delay>,
        Rest...>,
    StoreStages> {
  using type = cutlass::epilogue::collective::CollectiveEpilogue<
      cutlass::epilogue::Sm90TmaWarpSpecialized<2, StoreStages, Fragment, false, false>, Rest...>;
};

template <class Base_>
class ScatterEpilogue : public Base_ {
 public:
  using Base = Base_;
  using typename Base::ElementC;
  using typename Base::ElementD;
  using typename Base::EpilogueTile;
  using typename Base::LoadPipeline;
  using typename Base::LoadPipelineState;
  using typename Base::StorePipeline;
  using typename Base::StorePipelineState;
  using typename Base::TensorStorage;

  // What host and device share.
  struct Common {
    TileOrder order;
    ScatterChunks chunks;
    int rank;
    int rows;  // of a part, per strip
    int n;
    float scale;
    uint32_t* counters;  // [world * chunks_per_part]: tiles stored of each chunk; zero at first
    uint32_t const* arrived;  // [world * chunks_per_part]: signals of each peer's partial chunks
    uint32_t const* epoch;
    // Where the signals of each part's chunks go, [world * chunks_per_part] in its owner's memory;
    // null: they are someone else's business.
    uint32_t* delivered[kMaxRanks];
    WaitLimit limit;
  };
  struct Arguments : Common {
    ElementD const* bias;                 // [n] or null
    ElementC const* addend;               // [strips, world, rows, n] or null
    ElementD* parts[kMaxRanks];           // [strips, rows, n] each: where the tiles of each part go
    ElementC const* partials[kMaxRanks];  // [strips, rows, n] each: where each peer's tiles of the
                                          // own part arrive
  };
  struct Params : Common {
    typename Base::Params part[kMaxRanks];     // how tiles of each part are finished and stored
    typename Base::Params partial[kMaxRanks];  // how each peer's partials are loaded
    typename Base::Params addend;
    bool has_addend;
    uint32_t tma_transaction_bytes;  // for CUTLASS's kernel
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const&, Arguments const& a, void*) {
    int world = a.order.parts();
    auto block = cute::make_shape(a.rows, a.n, 1, a.order.strips());
    Params params{};
    static_cast<Common&>(params) = a;
    params.has_addend = a.addend != nullptr;
    for (int i = 0; i < world; ++i) {
      int sources = (i == a.rank ? world - 1 : 0) + (params.has_addend ? 1 : 0);
      // With several sources, store() scales the accumulator before it adds the first.
      auto part =
          operands(a, nullptr, a.parts[i], sources > 1 ? 1.f : a.scale, sources > 0 ? 1.f : 0.f);
      part.thread.bias_ptr = a.bias;
      params.part[i] = Base::to_underlying_arguments(block, part, nullptr);
      if (i == a.rank) continue;
      params.partial[i] = Base::to_underlying_arguments(block, source(a, a.partials[i]), nullptr);
    }
    if (params.has_addend) {
      auto whole = cute::make_shape(a.rows, a.n, 1, a.order.strips() * world);
      params.addend = Base::to_underlying_arguments(whole, source(a, a.addend), nullptr);
    }
    params.tma_transaction_bytes = params.part[a.rank].tma_transaction_bytes;
    return params;
  }

  template <class ProblemShape>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&) {
    return 0;
  }
  template <class ProblemShape>
  static cutlass::Status initialize_workspace(ProblemShape const&, Arguments const&, void*,
                                              cudaStream_t, cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }
  template <class ProblemShape>
  static bool can_implement(ProblemShape const&, Arguments const&) {
    return true;
  }
  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    Base::prefetch_tma_descriptors(params.part[params.rank]);
  }

  CUTLASS_DEVICE ScatterEpilogue(Params const& params, TensorStorage& storage)
      : Base(params.part[params.rank], storage), params_(params) {}

  CUTLASS_DEVICE bool is_producer_load_needed() const { return true; }

  // Producer warp: loads the sources of a tile, in the order in which store() adds them.
  template <class ProblemShape, class TileShape, class TileCoord, class TiledMma>
  CUTLASS_DEVICE auto load(LoadPipeline pipeline, LoadPipelineState state,
                           ProblemShape const& shape, TileShape tile_shape, TileCoord const& coord,
                           TiledMma mma, int thread, TensorStorage& storage, int subtile = -1) {
    ScatteredTile tile(params_, coord);
    auto load_source = [&](typename Base::Params const& from, int block) {
      auto [m, n, k, l] = coord;
      Base epilogue(from, storage);
      state = epilogue.load(pipeline, state, shape, tile_shape, cute::make_coord(m, n, k, block),
                            mma, thread, storage, subtile);
    };
    if (params_.has_addend) load_source(params_.addend, cute::get<3>(coord));
    if (tile.part != params_.rank) return state;
    wait_for_partials(tile);
    for (int distance = 1; distance < params_.order.parts(); ++distance) {
      load_source(params_.partial[peer_at(distance)], tile.strip);
    }
    return state;
  }

  template <class ProblemShape, class TileShape, class TileCoord, class Engine, class Layout,
            class TiledMma>
  CUTLASS_DEVICE auto store(LoadPipeline load_pipeline, LoadPipelineState load_state,
                            StorePipeline store_pipeline, StorePipelineState store_state,
                            ProblemShape const& shape, TileShape tile_shape, TileCoord const& coord,
                            cute::Tensor<Engine, Layout> accumulators, TiledMma mma, int thread,
                            TensorStorage& storage, int subtile = -1) {
    auto [m, n, k, l] = coord;
    ScatteredTile tile(params_, coord);
    count_pending();
    bool own = tile.part == params_.rank;
    bool issues_stores = thread < cutlass::NumThreadsPerWarp;
    if (!own && tile.real && issues_stores) pending_ = pending(tile);
    int sources = (own ? params_.order.parts() - 1 : 0) + (params_.has_addend ? 1 : 0);
    if (sources > 1) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < cute::size(accumulators); ++i) accumulators(i) *= params_.scale;
      for (int i = 1; i < sources; ++i) {
        load_state =
            add_source<TileShape>(load_pipeline, load_state, accumulators, mma, thread, storage);
      }
    }
    Base epilogue(params_.part[tile.part], storage);
    auto states = epilogue.store(load_pipeline, load_state, store_pipeline, store_state, shape,
                                 tile_shape, cute::make_coord(m, n, k, tile.strip), accumulators,
                                 mma, thread, storage, subtile);
    if (is_urgent(pending_)) count_pending();
    return states;
  }

  CUTLASS_DEVICE auto store_tail(LoadPipeline load_pipeline, LoadPipelineState load_state,
                                 StorePipeline store_pipeline, StorePipelineState store_state) {
    auto states = Base::store_tail(load_pipeline, load_state, store_pipeline, store_state);
    count_pending();
    return states;
  }

 private:
  static constexpr int kFewWaves = 4;  // of a part
  static constexpr int kUrgentWaves = 2;

  struct ScatteredTile {
    int part;
    int strip;
    int chunk;
    bool real;    // not a cluster's padding
    bool urgent;  // among the last tiles of the peers' parts, and the own tiles need it soon

    template <class TileCoord>
    CUTLASS_DEVICE ScatteredTile(Params const& params, TileCoord const& coord) {
      auto [m, n, k, l] = coord;
      TileOrder const& order = params.order;
      strip = order.strip_of(l);
      part = order.part_of(l);
      real = m < order.m_tiles() && n < order.n_tiles();
      chunk = params.chunks.chunk_of(order, strip, m, n);
      int wave = order.cluster_column(gridDim.y);  // clusters at work
      urgent = params.delivered[part] == nullptr && order.clusters_per_part() <= kFewWaves * wave &&
               order.index_of(part, strip, m, n) + kUrgentWaves * wave >=
                   order.clusters() - order.clusters_per_part();
    }
  };

  static typename Base::Arguments operands(Common const& c, ElementC const* from, ElementD* to,
                                           float alpha, float beta) {
    int64_t block = int64_t(c.rows) * c.n;
    typename Base::Arguments arguments{};
    arguments.thread.alpha = alpha;
    arguments.thread.beta = beta;                   // 0: the tile has no source
    arguments.ptr_C = from != nullptr ? from : to;  // a descriptor needs some valid address
    arguments.dC = {c.n, {}, block};
    arguments.ptr_D = to != nullptr ? to : from;
    arguments.dD = {c.n, {}, block};
    return arguments;
  }
  static typename Base::Arguments source(Common const& c, ElementC const* from) {
    return operands(c, from, nullptr, 1.f, 1.f);
  }

  // Peers in the order in which their tiles of the own part arrive: rank - 1 computes them first of
  // all.
  CUTLASS_DEVICE int peer_at(int distance) const {
    int peer = params_.rank - distance;
    return peer < 0 ? peer + params_.order.parts() : peer;
  }

  CUTLASS_DEVICE void wait_for_partials(ScatteredTile const& tile) {
    if (!tile.real || tile.chunk == ready_chunk_) return;
    uint32_t epoch = *params_.epoch;
    int chunks = params_.chunks.per_part();
    for (int distance = 1; distance < params_.order.parts(); ++distance) {
      int peer = peer_at(distance);
      warp_waits_for_signal(params_.arrived + peer * chunks + tile.chunk, epoch, params_.limit,
                            peer, tile.chunk);
    }
    fence_generic_to_async();
    ready_chunk_ = tile.chunk;
  }

  // What is to be done for a tile when its stores are complete, in one number, since registers are
  // short: which counter to raise, and whether that is urgent.
  static constexpr int kNothing = -2;
  CUTLASS_DEVICE int pending(ScatteredTile const& tile) const {
    return (tile.part * params_.chunks.per_part() + tile.chunk) * 2 + (tile.urgent ? 1 : 0);
  }
  CUTLASS_DEVICE static bool is_urgent(int pending) { return pending % 2 != 0; }

  // Waits for the bulk stores of the tile stored last, and counts the tile.
  CUTLASS_DEVICE void count_pending() {
    if (pending_ == kNothing) return;
    wait_for_own_bulk_stores();
    __syncwarp();
    if (cute::elect_one_sync()) {
      fence_generic_to_async();
      count(pending_ / 2);
    }
    pending_ = kNothing;
  }

  CUTLASS_DEVICE void count(int counter) {
    ScatterChunks const& chunks = params_.chunks;
    int part = chunks.part_of(counter);
    uint32_t* signals = params_.delivered[part];
    if (signals == nullptr) {
      add_release_system(params_.counters + counter, 1u);
      return;
    }
    int chunk = counter - part * chunks.per_part();
    int stored = static_cast<int>(add_acquire_release_device(params_.counters + counter, 1u)) + 1;
    if (stored == chunks.block_of(params_.order, chunk).tiles())
      store_release_system(signals + params_.rank * chunks.per_part() + chunk, *params_.epoch);
  }

  // Adds one loaded source to the accumulators, subtile by subtile as Base::load() brings them in.
  template <class TileShape, class Engine, class Layout, class TiledMma>
  CUTLASS_DEVICE LoadPipelineState add_source(LoadPipeline pipeline, LoadPipelineState state,
                                              cute::Tensor<Engine, Layout>& accumulators,
                                              TiledMma mma, int thread, TensorStorage& storage) {
    using namespace cute;
    using SourceLayout =
        decltype(tile_to_shape(typename Base::SmemLayoutAtomC{},
                               make_shape(size<0>(EpilogueTile{}), size<1>(EpilogueTile{}),
                                          Int<Base::DispatchPolicy::StagesC>{})));
    Tensor staged = as_position_independent_swizzle_tensor(
        make_tensor(make_smem_ptr(storage.collective.smem_C.begin()),
                    SourceLayout{}));  // (EPI_M, EPI_N, STAGE)
    auto atom = make_tiled_copy_C_atom(typename Base::CopyAtomC{}, mma);
    auto store_copy =
        make_tiled_copy_S(Copy_Atom<typename Base::CopyOpR2S, ElementD>{}, atom).get_slice(thread);
    auto load_copy = make_tiled_copy_S(Copy_Atom<typename Base::CopyOpS2R, ElementC>{}, atom);
    Tensor sums = store_copy.retile_S(accumulators);  // ((COPY, COPY_V), MMA_M, MMA_N)
    Tensor values =
        make_tensor<ElementC>(make_layout(take<0, 3>(shape(store_copy.partition_S(staged)))));
    Tensor from = load_copy.get_slice(thread).partition_S(staged);
    Tensor to = load_copy.get_slice(thread).retile_D(values);

    constexpr int kSubtilesM = size<0>(TileShape{}) / size<0>(EpilogueTile{});
    constexpr int kSubtilesN = size<1>(TileShape{}) / size<1>(EpilogueTile{});
    static_assert(
        kSubtilesM == decltype(size<1>(sums))::value && decltype(size<2>(sums))::value == 1,
        "one row of MMA tiles for each row of epilogue subtiles");
    CUTLASS_PRAGMA_UNROLL
    for (int sub_n = 0; sub_n < kSubtilesN; ++sub_n) {
      CUTLASS_PRAGMA_UNROLL
      for (int sub_m = 0; sub_m < kSubtilesM; ++sub_m) {
        pipeline.consumer_wait(state);
        copy(load_copy, from(_, _, _, state.index()), to);
        cutlass::arch::fence_view_async_shared();
        pipeline.consumer_release(state);
        ++state;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < size(values); ++i) {
          sums(sub_n * size(values) + i, sub_m, 0) += static_cast<float>(values(i));
        }
      }
    }
    return state;
  }

  Params const& params_;
  int pending_ = kNothing;  // for the tile stored last
  int ready_chunk_ = -1;    // chunk whose partials were waited for last
};

}  // namespace flux_inductor::cuda
