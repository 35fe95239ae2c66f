// Adding a loaded source of an epilogue to the accumulators, for tiles that have more than one.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"

namespace flux_inductor::cuda {

// By the multiplying warps, subtile by subtile as Epilogue::load() brings them in; Epilogue is
// CUTLASS's TMA epilogue.
template <class Epilogue, class TileShape, class Engine, class Layout, class TiledMma>
CUTLASS_DEVICE typename Epilogue::LoadPipelineState add_source(
    typename Epilogue::LoadPipeline pipeline, typename Epilogue::LoadPipelineState state,
    cute::Tensor<Engine, Layout>& accumulators, TiledMma mma, int thread,
    typename Epilogue::TensorStorage& storage) {
  using namespace cute;
  using ElementC = typename Epilogue::ElementC;
  using EpilogueTile = typename Epilogue::EpilogueTile;
  using SourceLayout =
      decltype(tile_to_shape(typename Epilogue::SmemLayoutAtomC{},
                             make_shape(size<0>(EpilogueTile{}), size<1>(EpilogueTile{}),
                                        Int<Epilogue::DispatchPolicy::StagesC>{})));
  Tensor staged = as_position_independent_swizzle_tensor(make_tensor(
      make_smem_ptr(storage.collective.smem_C.begin()), SourceLayout{}));  // (EPI_M, EPI_N, STAGE)
  auto atom = make_tiled_copy_C_atom(typename Epilogue::CopyAtomC{}, mma);
  auto store_copy =
      make_tiled_copy_S(Copy_Atom<typename Epilogue::CopyOpR2S, typename Epilogue::ElementD>{},
                        atom)
          .get_slice(thread);
  auto load_copy = make_tiled_copy_S(Copy_Atom<typename Epilogue::CopyOpS2R, ElementC>{}, atom);
  Tensor sums = store_copy.retile_S(accumulators);  // ((COPY, COPY_V), MMA_M, MMA_N)
  Tensor values =
      make_tensor<ElementC>(make_layout(take<0, 3>(shape(store_copy.partition_S(staged)))));
  Tensor from = load_copy.get_slice(thread).partition_S(staged);
  Tensor to = load_copy.get_slice(thread).retile_D(values);

  constexpr int kSubtilesM = size<0>(TileShape{}) / size<0>(EpilogueTile{});
  constexpr int kSubtilesN = size<1>(TileShape{}) / size<1>(EpilogueTile{});
  static_assert(kSubtilesM == decltype(size<1>(sums))::value && decltype(size<2>(sums))::value == 1,
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

}  // namespace flux_inductor::cuda
