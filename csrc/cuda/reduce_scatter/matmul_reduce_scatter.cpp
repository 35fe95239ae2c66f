#include "cuda/reduce_scatter/matmul_reduce_scatter.h"

namespace flux_inductor::cuda {

std::vector<MatmulReduceScatterKernel> const& matmul_reduce_scatter_kernels() {
  static std::vector<MatmulReduceScatterKernel> const kernels = all_families<MatmulReduceScatter>({
#define FLUX_FAMILY(element, layout, result) \
  &matmul_reduce_scatter_family<ElementType::element, WeightLayout::layout, ElementType::result>,
#include "cuda/reduce_scatter/families.def"
#undef FLUX_FAMILY
  });
  return kernels;
}

}  // namespace flux_inductor::cuda
