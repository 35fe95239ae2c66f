// Compiled once for each line of families.def, since a family takes minutes.
#include "cuda/reduce_scatter/matmul_reduce_scatter.cuh"

namespace flux_inductor::cuda {

template std::vector<MatmulReduceScatterKernel> matmul_reduce_scatter_family<
    ElementType::FLUX_ELEMENT, WeightLayout::FLUX_LAYOUT, ElementType::FLUX_RESULT>();

}  // namespace flux_inductor::cuda
