// Compiled once for each line of families.def, since a family takes minutes.
#include "cuda/all_gather/all_gather_matmul.cuh"

namespace flux_inductor::cuda {

template std::vector<AllGatherMatmulKernel>
all_gather_matmul_family<ElementType::FLUX_ELEMENT, WeightLayout::FLUX_LAYOUT>();

}  // namespace flux_inductor::cuda
