#include "all_gather_matmul.h"

namespace flux_inductor::cuda {

std::vector<AllGatherMatmulKernel> all_gather_matmul_bf16_k_major();
std::vector<AllGatherMatmulKernel> all_gather_matmul_bf16_n_major();
std::vector<AllGatherMatmulKernel> all_gather_matmul_fp16_k_major();
std::vector<AllGatherMatmulKernel> all_gather_matmul_fp16_n_major();

std::vector<AllGatherMatmulKernel> const& all_gather_matmul_kernels() {
  static std::vector<AllGatherMatmulKernel> const kernels = all_families<AllGatherMatmul>(
      {all_gather_matmul_bf16_k_major, all_gather_matmul_bf16_n_major,
       all_gather_matmul_fp16_k_major, all_gather_matmul_fp16_n_major});
  return kernels;
}

}  // namespace flux_inductor::cuda
