#include "matmul_reduce_scatter.h"

namespace flux_inductor::cuda {

std::vector<MatmulReduceScatterKernel> matmul_reduce_scatter_bf16_k_major();
std::vector<MatmulReduceScatterKernel> matmul_reduce_scatter_bf16_n_major();
std::vector<MatmulReduceScatterKernel> matmul_reduce_scatter_fp16_k_major();
std::vector<MatmulReduceScatterKernel> matmul_reduce_scatter_fp16_n_major();
std::vector<MatmulReduceScatterKernel> matmul_reduce_scatter_bf16_k_major_fp32();
std::vector<MatmulReduceScatterKernel> matmul_reduce_scatter_bf16_n_major_fp32();
std::vector<MatmulReduceScatterKernel> matmul_reduce_scatter_fp16_k_major_fp32();
std::vector<MatmulReduceScatterKernel> matmul_reduce_scatter_fp16_n_major_fp32();

std::vector<MatmulReduceScatterKernel> const& matmul_reduce_scatter_kernels() {
  static std::vector<MatmulReduceScatterKernel> const kernels = all_families<MatmulReduceScatter>(
      {matmul_reduce_scatter_bf16_k_major, matmul_reduce_scatter_bf16_n_major,
       matmul_reduce_scatter_fp16_k_major, matmul_reduce_scatter_fp16_n_major,
       matmul_reduce_scatter_bf16_k_major_fp32, matmul_reduce_scatter_bf16_n_major_fp32,
       matmul_reduce_scatter_fp16_k_major_fp32, matmul_reduce_scatter_fp16_n_major_fp32});
  return kernels;
}

}  // namespace flux_inductor::cuda
