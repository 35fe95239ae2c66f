// CUTLASS's TMA + wgmma mainloop, with the rows of A gathered from several ranks. The producer warp
// waits for a tile's chunks before its first load; where the rows arrive in slices of K, it loads a
// slice as soon as that is there, so that most of the tile is multiplied before its last bytes
// arrive. Rows of the own shard are read from the input itself through a second descriptor, with no
// wait and no local copy. The multiplication is untouched, so the result is that of the plain
// kernel to the bit.
#pragma once

#include "cuda/all_gather/row_gate.cuh"
#include "cute/tensor.hpp"

namespace flux_inductor::cuda {

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

  // The first tiles are of the own shard.
  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    Base::prefetch_tma_descriptors(params.own);
    Base::prefetch_tma_descriptors(params);
  }

  template <class TensorA, class TensorB, class KTileIterator, class BlockCoord>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState state,
                           cute::tuple<TensorA, TensorB> const& inputs, BlockCoord const& coord,
                           KTileIterator k_tile, int k_tiles, int thread, uint32_t block_rank,
                           TensorStorage& storage) {
    for (int slice = 0;; ++slice) {
      int steps = load_slice(params, pipeline, state, inputs, coord, k_tile, k_tiles, slice, thread,
                             block_rank, storage);
      k_tiles -= steps;
      if (k_tiles == 0) return;
      state.advance(steps);
      for (int i = 0; i < steps; ++i) ++k_tile;
    }
  }

 private:
  static constexpr int kTileRows = cute::size<0>(typename Base::TileShape{});
  static_assert(cute::size<2>(typename Base::TileShape{}) == GatherChunks::kStepDepth);

  // As many steps of the mainloop as the next wait is good for: all, where nothing comes in slices.
  template <class TensorA, class TensorB, class KTileIterator, class BlockCoord>
  CUTLASS_DEVICE int load_slice(Params const& params, MainloopPipeline pipeline,
                                PipelineState state, cute::tuple<TensorA, TensorB> const& inputs,
                                BlockCoord const& coord, KTileIterator k_tile, int k_tiles,
                                int slice, int thread, uint32_t block_rank,
                                TensorStorage& storage) {
    auto [m, n, k, l] = coord;
    ShardStrip shard(params.gate, l);
    row_gate_.wait_for_rows(params.gate, shard, m * kTileRows, kTileRows, slice);
    int steps = params.gate.chunks.steps_of_slice(shard.source, (m + 1) * kTileRows - 1, k_tiles);
    typename Base::Params const& operands =
        shard.own ? params.own : static_cast<typename Base::Params const&>(params);
    Base::load(operands, pipeline, state, inputs,
               cute::make_coord(m, n, k, shard.own ? shard.strip : l), k_tile, steps, thread,
               block_rank, storage);
    return steps;
  }

  RowGate row_gate_;
};

}  // namespace flux_inductor::cuda
