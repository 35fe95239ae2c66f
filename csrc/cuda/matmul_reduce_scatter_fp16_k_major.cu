#include "matmul_reduce_scatter.cuh"
#include "tile_menu.cuh"

namespace flux_inductor::cuda {

std::vector<MatmulReduceScatterKernel> matmul_reduce_scatter_fp16_k_major() {
  return compile_menu<ResultsLikeOperands, ElementType::fp16, WeightLayout::k_major>(
      MatmulReduceScatterMenu{});
}

}  // namespace flux_inductor::cuda
