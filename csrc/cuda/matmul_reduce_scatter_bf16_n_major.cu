#include "matmul_reduce_scatter.cuh"
#include "tile_menu.cuh"

namespace flux_inductor::cuda {

std::vector<MatmulReduceScatterKernel> matmul_reduce_scatter_bf16_n_major() {
  return compile_menu<ResultsLikeOperands, ElementType::bf16, WeightLayout::n_major>(
      MatmulReduceScatterMenu{});
}

}  // namespace flux_inductor::cuda
