#include "all_gather_matmul.h"

namespace flux_inductor::cuda {

// One family a translation unit, since each takes minutes to compile.
std::vector<AllGatherMatmulKernel> all_gather_matmul_bf16_k_major();
std::vector<AllGatherMatmulKernel> all_gather_matmul_bf16_n_major();
std::vector<AllGatherMatmulKernel> all_gather_matmul_fp16_k_major();
std::vector<AllGatherMatmulKernel> all_gather_matmul_fp16_n_major();

namespace {

std::vector<AllGatherMatmulKernel> all_families() {
  std::vector<AllGatherMatmulKernel> kernels;
  for (auto family : {all_gather_matmul_bf16_k_major, all_gather_matmul_bf16_n_major,
                      all_gather_matmul_fp16_k_major, all_gather_matmul_fp16_n_major}) {
    auto menu = family();
    kernels.insert(kernels.end(), menu.begin(), menu.end());
  }
  return kernels;
}

}  // namespace

std::vector<AllGatherMatmulKernel> const& all_gather_matmul_kernels() {
  static std::vector<AllGatherMatmulKernel> const kernels = all_families();
  return kernels;
}

}  // namespace flux_inductor::cuda
