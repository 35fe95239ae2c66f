// CUTLASS's TMA + wgmma mainloop, with the rows of A gathered from several ranks. The producer warp
// waits for a tile's chunks before its first load; rows of the own shard are read from the input
// itself through a second descriptor, with no wait and no local copy. The multiplication is
// untouched, so the result is that of the plain kernel to the bit.
#pragma once

#include "cute/tensor.hpp"
#include "divider.h"
#include "signals.cuh"

namespace flux_inductor::cuda {

// Where the chunks of A come from, and how to know that they are there. Chunk c of rank r is rows
// [c * rows_per_chunk, (c + 1) * rows_per_chunk) of r's shard, in every strip; its signal is
// signals[r * chunks_per_shard + c], which reaches *epoch when the chunk is there.
struct Gate {
  uint32_t const* signals;
  uint32_t const* epoch;
  Divider world;
  int rank;
  int rows;  // of a shard, per strip
  Divider rows_per_chunk;
  int chunks_per_shard;
  WaitLimit limit;
};

template <class Base_>
class GatedMainloop : public Base_ {
 public:
  using Base = Base_;
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;

  // ptr_A and dA describe the gathered buffer, [strips, world, rows, K].
  struct Arguments : Base::Arguments {
    typename Base::ElementA const* own_shard;
    typename Base::StrideA own_stride;
    Gate gate;
  };
  struct Params : Base::Params {
    typename Base::Params own;
    Gate gate;
  };

  // The problem's L counts strips * world; the own shard has strips alone.
  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& shape, Arguments const& arguments,
                                        void* workspace) {
    auto [m, n, k, l] = shape;
    typename Base::Arguments own = arguments;
    own.ptr_A = arguments.own_shard;
    own.dA = arguments.own_stride;
    Params params;
    static_cast<typename Base::Params&>(params) =
        Base::to_underlying_arguments(shape, arguments, workspace);
    params.own = Base::to_underlying_arguments(
        cute::make_shape(m, n, k, l / arguments.gate.world.value()), own, workspace);
    params.gate = arguments.gate;
    return params;
  }

  template <class ProblemShape>
  static bool can_implement(ProblemShape const& shape, Arguments const& arguments) {
    return Base::can_implement(shape, static_cast<typename Base::Arguments const&>(arguments));
  }

  template <class TensorA, class TensorB, class KTileIterator, class BlockCoord>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState state,
                           cute::tuple<TensorA, TensorB> const& inputs, BlockCoord const& coord,
                           KTileIterator k_tile, int k_tiles, int thread, uint32_t block_rank,
                           TensorStorage& storage) {
    auto [m, n, k, l] = coord;
    int strip = params.gate.world.divide(l);
    int source = l - strip * params.gate.world.value();
    bool own = source == params.gate.rank;
    if (!own) wait_for_rows(params.gate, source, m * kTileRows);
    typename Base::Params const& operands =
        own ? params.own : static_cast<typename Base::Params const&>(params);
    Base::load(operands, pipeline, state, inputs, cute::make_coord(m, n, k, own ? strip : l),
               k_tile, k_tiles, thread, block_rank, storage);
  }

 private:
  static constexpr int kTileRows = cute::size<0>(typename Base::TileShape{});

  CUTLASS_DEVICE void wait_for_rows(Gate const& gate, int source, int first_row) {
    if (first_row >= gate.rows) return;  // padding tile of a cluster
    int last_row = cute::min(first_row + kTileRows, gate.rows) - 1;
    int first = source * gate.chunks_per_shard + gate.rows_per_chunk.divide(first_row);
    int last = source * gate.chunks_per_shard + gate.rows_per_chunk.divide(last_row);
    if (first == first_ready_ && last == last_ready_) return;
    if (first_ready_ < 0) epoch_ = *gate.epoch;
    for (int signal = first; signal <= last; ++signal) {
      warp_waits_for_signal(gate.signals + signal, epoch_, gate.limit, source,
                            signal - source * gate.chunks_per_shard);
    }
    fence_generic_to_async();
    first_ready_ = first;
    last_ready_ = last;
  }

  // The signals that were waited for last: tiles swept along N need the same ones again.
  int first_ready_ = -1;
  int last_ready_ = -1;
  uint32_t epoch_ = 0;
};

}  // namespace flux_inductor::cuda
