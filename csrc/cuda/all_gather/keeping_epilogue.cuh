// CUTLASS's TMA epilogue, whose otherwise idle load warp stores the gathered tensor for the caller,
// and sees to the next call (succession.h).
//
// Contract. With `kept` null the product is made by the base epilogue alone. Otherwise every
// byte of kept, [strips, world, rows, K], is written exactly once by the launch, with what the
// mainloop multiplies, and is complete when the kernel ends. The products are the same to the bit,
// since mainloop and multiplying warps run the same code.
//
// How. The rows of A of one tile are one contiguous block, in the gathered buffer as in kept. The
// tiles of its row divide it along N: tile n of N copies the n-th of N shares, by bulk copies
// through shared memory, two buffers in turn, so that a load runs beside the store before it.
// Cooperative and pingpong kernels call load() once for every tile, clusters' padding included
// (which owns no share), in the warp that would load a source C, then load_tail(). The multiplying
// warps ask the base's fusion whether there is a source: it says no, so they touch none of the load
// pipeline's barriers, whose states the pingpong kernel advances in registers alone.
//
// Timeline. The load warp starts when the first tile's loads have been issued. From then on nothing
// but the signals holds it up, so it may run ahead of the mainloop, which then finds its rows in
// the L2 cache. It waits for copy engines alone, never for a tile (rule R1).
//
// Rejected: a copy beside the kernel, or pulling into kept and into the buffer, because copies
// inside one GPU need SMs, which the kernel holds (0.04 to 0.3 of the product's time);
// storing the blocks of A from the mainloop's own stages, each by one tile of its row, right before
// the load warp fills the stage again: it reads nothing twice, but holds up the loads (measured:
// 0.01 to 0.03 slower than this, and 0.005 where nothing is kept, by the load warp's registers);
// one column of tiles that copies all, which makes these tiles the last to end.
#pragma once

#include "cuda/all_gather/row_gate.cuh"
#include "cuda/sync/succession.cuh"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/barrier.h"

namespace flux_inductor::cuda {

// What to keep. All addresses and strides are multiples of 16 bytes.
struct Keep {
  char* kept;             // [strips, world, rows, K] contiguous, or null
  char const* gathered;   // the same shape; the own rows are never read
  char const* own_shard;  // [strips, rows, K], each strip contiguous
  int64_t own_strip_bytes;
  int row_bytes;
  Divider n_tiles;
  Gate gate;
};

constexpr int kKeepingBuffers = 2;
constexpr int kCacheLine = 128;  // bytes

// The largest buffers that fit, with their barriers, into `free` bytes of a kernel's shared memory.
// Up to 8 KiB each: that is 16 KiB in flight in every SM.
constexpr int keeping_buffer_bytes(int free) {
  constexpr int kAlignment = 1024;  // of the mainloop's operands, which lie behind the epilogue's
  int barriers = kKeepingBuffers * 8;
  int bytes = (free / kAlignment * kAlignment - barriers) / kKeepingBuffers;
  return bytes < 8192 ? bytes / kCacheLine * kCacheLine : 8192;
}

template <class Base_, int BufferBytes>
class KeepingEpilogue : public Base_ {
 public:
  using Base = Base_;
  using typename Base::LoadPipeline;
  using typename Base::LoadPipelineState;

  static_assert(BufferBytes > 0, "no shared memory is left for the buffers");

  struct TensorStorage : Base::TensorStorage {
    alignas(kCacheLine) char buffers[kKeepingBuffers][BufferBytes];
    uint64_t loaded[kKeepingBuffers];  // barriers: the buffer has been filled
  };

  struct Arguments : Base::Arguments {
    Keep keep;
    Succession succession;
  };
  struct Params : Base::Params {
    Keep keep;
    Succession succession;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& shape, Arguments const& arguments,
                                        void* workspace) {
    return {Base::to_underlying_arguments(shape, arguments, workspace), arguments.keep,
            arguments.succession};
  }

  CUTLASS_DEVICE KeepingEpilogue(Params const& params, TensorStorage& storage)
      : Base(params, storage), keep_(params.keep), succession_(params.succession) {}

  CUTLASS_DEVICE bool is_producer_load_needed() const {
    return keep_.kept != nullptr || succession_.next_epoch != nullptr;
  }

  template <class ProblemShape, class TileShape, class TileCoord, class TiledMma>
  CUTLASS_DEVICE LoadPipelineState load(LoadPipeline const&, LoadPipelineState state,
                                        ProblemShape const&, TileShape, TileCoord const& coord,
                                        TiledMma const&, int lane, TensorStorage& storage,
                                        int = -1) {
    if (keep_.kept == nullptr) return state;
    auto [m, n, k, l] = coord;
    int first_row = m * kTileRows;
    if (first_row >= keep_.gate.rows) return state;
    ShardStrip shard(keep_.gate, l);
    row_gate_.wait_for_rows(keep_.gate, shard, first_row, kTileRows,
                            keep_.gate.chunks.slices() - 1);
    if (lane == 0) {
      int rows = cute::min(first_row + kTileRows, keep_.gate.rows) - first_row;
      Share share(rows * keep_.row_bytes, n, keep_.n_tiles);
      int64_t in_strip = int64_t(first_row) * keep_.row_bytes + share.first;
      int64_t in_whole = int64_t(l) * keep_.gate.rows * keep_.row_bytes + in_strip;
      char const* from = shard.own
                             ? keep_.own_shard + shard.strip * keep_.own_strip_bytes + in_strip
                             : keep_.gathered + in_whole;
      copy(from, keep_.kept + in_whole, share.bytes, storage);
    }
    __syncwarp();
    return state;
  }

  CUTLASS_DEVICE LoadPipelineState load_tail(LoadPipeline const&, LoadPipelineState state) {
    wait_for_own_bulk_stores();
    prepare_next_call(succession_, keep_.gate.epoch, keep_.gate.limit, keep_.gate.rank);
    return state;
  }

 private:
  using Barrier = cutlass::arch::ClusterTransactionBarrier;
  static constexpr int kTileRows = cute::size<0>(typename Base::CtaTileMNK{});

  // The bytes of a block that one of its tiles copies: whole lines, but for the block's last ones.
  struct Share {
    int first;
    int bytes;

    CUTLASS_DEVICE Share(int block_bytes, int index, Divider const& count) {
      int lines = (block_bytes + kCacheLine - 1) / kCacheLine;
      int each = count.divide(lines + count.value() - 1) * kCacheLine;
      first = cute::min(index * each, block_bytes);
      bytes = cute::min(each, block_bytes - first);
    }
  };

  // By one thread, and always the same one, since a thread can wait for its own bulk stores alone.
  CUTLASS_DEVICE void copy(char const* from, char* to, int bytes, TensorStorage& storage) {
    if (bytes == 0) return;
    if (piece_ == 0) init_barriers(storage);
    load_piece(storage, piece_, from, bytes);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int done = 0; done < bytes; done += BufferBytes, ++piece_) {
      int next = done + BufferBytes;
      if (next < bytes) load_piece(storage, piece_ + 1, from + next, bytes - next);
      store_piece(storage, piece_, to + done, bytes - done);
    }
  }

  // Nobody else uses the barriers, so that a fence towards the bulk copies is all they need.
  CUTLASS_DEVICE static void init_barriers(TensorStorage& storage) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kKeepingBuffers; ++i) Barrier::init(&storage.loaded[i], 1);
    cutlass::arch::fence_barrier_init();
    cutlass::arch::fence_view_async_shared();
  }

  // The store before last, from the same buffer, must have read it. That is the last one committed.
  CUTLASS_DEVICE static void load_piece(TensorStorage& storage, uint32_t piece, char const* from,
                                        int bytes_left) {
    uint32_t buffer = piece % kKeepingBuffers;
    int bytes = cute::min(bytes_left, BufferBytes);
    cute::tma_store_wait<0>();
    Barrier::arrive_and_expect_tx(&storage.loaded[buffer], bytes);
    cute::SM90_BULK_COPY_G2S::copy(from, &storage.loaded[buffer], storage.buffers[buffer], bytes);
  }

  // Load and store are both of the async proxy: the barrier alone orders them.
  CUTLASS_DEVICE static void store_piece(TensorStorage& storage, uint32_t piece, char* to,
                                         int bytes_left) {
    uint32_t buffer = piece % kKeepingBuffers;
    Barrier::wait(&storage.loaded[buffer], piece / kKeepingBuffers % 2);
    cute::SM90_BULK_COPY_S2G::copy(storage.buffers[buffer], to, cute::min(bytes_left, BufferBytes));
    cute::tma_store_arrive();
  }

  Keep const& keep_;
  Succession const& succession_;
  RowGate row_gate_;
  uint32_t piece_ = 0;  // pieces copied so far
};

}  // namespace flux_inductor::cuda
