#include "cuda/all_gather/all_gather_matmul.h"

namespace flux_inductor::cuda {

std::vector<AllGatherMatmulKernel> const& all_gather_matmul_kernels() {
  static std::vector<AllGatherMatmulKernel> const kernels = all_families<AllGatherMatmul>({
#define FLUX_FAMILY(element, layout) \
  &all_gather_matmul_family<ElementType::element, WeightLayout::layout>,
#include "cuda/all_gather/families.def"
#undef FLUX_FAMILY
  });
  return kernels;
}

}  // namespace flux_inductor::cuda
