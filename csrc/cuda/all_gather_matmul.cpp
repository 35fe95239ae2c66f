#include "all_gather_matmul.h"

namespace flux_inductor::cuda {

// One family a translation unit, since each takes minutes to compile.
std::vector<AllGatherMatmulKernel> all_gather_matmul_bf16_k_major();

std::vector<AllGatherMatmulKernel> const& all_gather_matmul_kernels() {
  static std::vector<AllGatherMatmulKernel> const kernels = all_gather_matmul_bf16_k_major();
  return kernels;
}

}  // namespace flux_inductor::cuda
