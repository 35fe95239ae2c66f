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
// The counter can be raised when the tile's stores are complete, a microsecond or two after the
// last one is issued, and only the thread that issued them can tell. Raising it takes one or two
// more, for its fence. Neither may keep the tensor cores idle. So in the cooperative kernel that
// thread looks when the next tile is multiplied (they are complete by then) and hands over the
// number of tiles whose stores are, in shared memory; the producer warp raises the counter. Only
// the stores of urgent tiles (scattered_tile.cuh) does the thread wait for at once. In the pingpong
// kernel the thread waits and raises in store_tail(), since the other warpgroup multiplies
// meanwhile, and may be the one that waits for partials next.
//
// Rule R1: nobody waits for partials while the block owes a counter. The producer warp of the
// cooperative kernel settles tile j in load(j + 1), so that it never owes more than one. It waits
// for the number there, which needs the multiplying warps of its cluster to reach the start of
// store(j + 1), or store_tail(), and nothing else: the claims of both tiles are taken up, the
// mainloop's own producers load tile j + 1, and the sources of tile j, of a peer's part and hence
// the addend alone, were loaded in load(j) before. Of tile j + 1 it has loaded at most the addend
// by then, or partials that it found there without waiting; those need the start of store(j + 1),
// too, where the number is handed over before any source is waited for.
//
// A signal that the kernel raises stands for stores of many blocks. For each of them: its bulk
// stores are complete and visible to the thread that waited for them; that thread releases by
// handing over the number, which the one that raises the counter acquires; that one releases by
// adding to the counter; the thread that adds last acquires from all of them, since additions to
// one word form one chain, and releases to the peer. Causality is transitive over links whose
// scopes hold both of their ends: the block for the number, the GPU for the counter, which its
// threads alone look at, and the system for the signal. So the peer that acquires the signal sees
// all of the stores, and its TMA does after fence_generic_to_async(). Where a copy engine waits for
// the counter, that one's scope is the system, too, since the engine is no thread of the GPU.
#pragma once

#include "add_source.cuh"
#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_epilogue.hpp"
#include "matmul_reduce_scatter.h"
#include "scattered_tile.cuh"
#include "signals.cuh"
#include "succession.cuh"

namespace flux_inductor::cuda {

template <class Base_, bool Pingpong>
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

  struct TensorStorage : Base::TensorStorage {
    // The block's tiles of peers whose stores are complete. Of cooperative kernels, and written by
    // their storing warp alone.
    alignas(16) uint32_t stored;
  };
  struct SharedStorage {  // what the mainloop must leave room for
    TensorStorage tensors;
    typename Base::PipelineStorage pipeline;
  };

  // What host and device share.
  struct Common {
    TileOrder order;
    ScatterChunks chunks;
    int rank;
    int rows;  // of a part, per strip
    int n;
    float scale;
    uint32_t* counters;    // [world * chunks_per_part]: tiles stored of each chunk; zero at first
    Epoch const* arrived;  // [world * chunks_per_part]: signals of each peer's partial chunks
    Epoch const* epoch;
    // Where the signals of each part's chunks go, [world * chunks_per_part] in its owner's memory;
    // null: they are someone else's business.
    Epoch* delivered[kMaxRanks];
    Succession succession;
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
  // Of what the first tiles are stored with, and the own ones.
  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    Base::prefetch_tma_descriptors(params.part[params.order.first_part()]);
    Base::prefetch_tma_descriptors(params.part[params.rank]);
  }

  // All threads construct one before the cluster's first barrier, whose arrival releases nothing by
  // itself; the storing one does again behind it, before it stores its first tile.
  CUTLASS_DEVICE ScatterEpilogue(Params const& params, TensorStorage& storage)
      : Base(params.part[params.rank], storage),
        params_(params),
        stored_(cute::cast_smem_ptr_to_uint(&storage.stored)) {
    if (!Pingpong && threadIdx.x == kStoringThread) {
      atomicExch(&storage.stored, 0u);
      __threadfence_block();
    }
  }

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
    // An urgent tile's stores are complete before the next one is multiplied. The others' are known
    // to be only after that, and the addend should be there by then.
    if (is_urgent(pending_)) settle();
    if (params_.has_addend) load_source(params_.addend, cute::get<3>(coord));
    if (tile.part == params_.rank) {
      if (pending_ != kNothing && !partials_are_there(tile)) settle();
      wait_for_partials(tile);
      for (int distance = 1; distance < params_.order.parts(); ++distance) {
        load_source(params_.partial[peer_at(distance)], tile.strip);
      }
    }
    settle();
    if (!Pingpong && tile.counts) {
      pending_ = pending(tile);
      ++counted_;
    }
    return state;
  }

  CUTLASS_DEVICE LoadPipelineState load_tail(LoadPipeline pipeline, LoadPipelineState state) {
    settle();
    state = Base::load_tail(pipeline, state);
    prepare_next_call(params_.succession, params_.epoch, params_.limit, params_.rank);
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
    bool own = tile.part == params_.rank;
    bool issues_stores = thread < cutlass::NumThreadsPerWarp;
    if (!Pingpong) hand_over();
    if (issues_stores && tile.counts) pending_ = pending(tile);
    int sources = (own ? params_.order.parts() - 1 : 0) + (params_.has_addend ? 1 : 0);
    if (sources > 1) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < cute::size(accumulators); ++i) accumulators(i) *= params_.scale;
      for (int i = 1; i < sources; ++i) {
        load_state = add_source<Base, TileShape>(load_pipeline, load_state, accumulators, mma,
                                                 thread, storage);
      }
    }
    Base epilogue(params_.part[tile.part], storage);
    auto states = epilogue.store(load_pipeline, load_state, store_pipeline, store_state, shape,
                                 tile_shape, cute::make_coord(m, n, k, tile.strip), accumulators,
                                 mma, thread, storage, subtile);
    if (!Pingpong && is_urgent(pending_)) hand_over();
    return states;
  }

  CUTLASS_DEVICE auto store_tail(LoadPipeline load_pipeline, LoadPipelineState load_state,
                                 StorePipeline store_pipeline, StorePipelineState store_state) {
    auto states = Base::store_tail(load_pipeline, load_state, store_pipeline, store_state);
    if constexpr (Pingpong) {
      raise_at_once();
    } else {
      hand_over();
    }
    return states;
  }

 private:
  static constexpr int kStoringThread = cutlass::NumThreadsPerWarpGroup;  // behind the producers

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

  CUTLASS_DEVICE Epoch const* signal_from(int peer, ScatteredTile const& tile) const {
    return params_.arrived + peer * params_.chunks.per_part() + tile.chunk;
  }

  CUTLASS_DEVICE bool partials_are_there(ScatteredTile const& tile) const {
    bool there = true;
    for (int distance = 1; tile.real && distance < params_.order.parts(); ++distance) {
      Epoch const* signal = signal_from(peer_at(distance), tile);
      there = there && load_acquire_system(signal) >= *params_.epoch;
    }
    return __all_sync(0xffffffffu, there);
  }

  CUTLASS_DEVICE void wait_for_partials(ScatteredTile const& tile) {
    if (!tile.real || tile.chunk == ready_chunk_) return;
    Epoch epoch = *params_.epoch;
    for (int distance = 1; distance < params_.order.parts(); ++distance) {
      int peer = peer_at(distance);
      warp_waits_for_signal(signal_from(peer, tile), epoch, params_.limit, peer, tile.chunk);
    }
    fence_generic_to_async();
    ready_chunk_ = tile.chunk;
  }

  // What is to be done for the tile that the warp loaded or stored last, in one number, since
  // registers are short: which counter to raise, and whether that is urgent.
  static constexpr int kNothing = -2;
  CUTLASS_DEVICE int pending(ScatteredTile const& tile) const {
    return (tile.part * params_.chunks.per_part() + tile.chunk) * 2 + (tile.urgent ? 1 : 0);
  }
  CUTLASS_DEVICE static bool is_urgent(int pending) { return pending % 2 != 0; }

  // Storing warp of a cooperative kernel.
  CUTLASS_DEVICE void hand_over() {
    if (pending_ == kNothing) return;
    wait_for_own_bulk_stores();
    __syncwarp();
    if (cute::elect_one_sync()) add_release_block(stored_, 1u);
    pending_ = kNothing;
  }

  // Producer warp of a cooperative kernel.
  CUTLASS_DEVICE void settle() {
    if (pending_ == kNothing) return;
    if (threadIdx.x % cutlass::NumThreadsPerWarp == 0) {
      while (load_acquire_block(stored_) < counted_) __nanosleep(64);
      raise(pending_ / 2);
    }
    __syncwarp();
    pending_ = kNothing;
  }

  // Storing warp of a pingpong kernel.
  CUTLASS_DEVICE void raise_at_once() {
    if (pending_ == kNothing) return;
    wait_for_own_bulk_stores();
    __syncwarp();
    if (cute::elect_one_sync()) raise(pending_ / 2);
    pending_ = kNothing;
  }

  CUTLASS_DEVICE void raise(int counter) const {
    fence_generic_to_async();
    ScatterChunks const& chunks = params_.chunks;
    int part = chunks.part_of(counter);
    Epoch* signals = params_.delivered[part];
    if (signals == nullptr) {
      add_release_system(params_.counters + counter, 1u);
      return;
    }
    int chunk = counter - part * chunks.per_part();
    int stored = static_cast<int>(add_acquire_release_device(params_.counters + counter, 1u)) + 1;
    if (stored == chunks.block_of(params_.order, chunk).tiles())
      store_release_system(signals + params_.rank * chunks.per_part() + chunk, *params_.epoch);
  }

  Params const& params_;
  uint32_t stored_;       // address of TensorStorage::stored
  uint32_t counted_ = 0;  // tiles of peers loaded so far
  int pending_ = kNothing;
  int ready_chunk_ = -1;  // chunk whose partials were waited for last
};

}  // namespace flux_inductor::cuda
