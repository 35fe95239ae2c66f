#include "matmul_reduce_scatter.cuh"
#include "tile_menu.cuh"

namespace flux_inductor::cuda {

std::vector<MatmulReduceScatterKernel> matmul_reduce_scatter_bf16_k_major_fp32() {
  return compile_menu<ResultsInFp32, ElementType::bf16, WeightLayout::k_major>(
      MatmulReduceScatterFp32Menu{});
}

}  // namespace flux_inductor::cuda
