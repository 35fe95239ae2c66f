#include "all_gather_matmul.cuh"
#include "tile_menu.cuh"

namespace flux_inductor::cuda {

std::vector<AllGatherMatmulKernel> all_gather_matmul_fp16_k_major() {
  return compile_menu<AllGatherMatmulTraits, ElementType::fp16, WeightLayout::k_major>(
      AllGatherMatmulMenu{});
}

}  // namespace flux_inductor::cuda
