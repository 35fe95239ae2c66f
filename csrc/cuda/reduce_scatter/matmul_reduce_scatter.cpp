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

std::vector<Copy> partial_copies(BoundScatter const& bound, ElementType result) {
  int64_t bytes = bytes_of(result), row = bound.shape.n * bytes;
  int chunks = bound.chunks.per_part();
  std::vector<Copy> copies;
  bound.schedule.each_chunk([&](ScatterChunk const& chunk) {
    int64_t first = chunk.first_row * row + chunk.first_column * bytes;
    int64_t width = (chunk.last_column - chunk.first_column) * bytes;
    Block block{first, first, row, row, width, chunk.last_row - chunk.first_row};
    Awaited tiles{chunk.part * chunks + chunk.index, static_cast<uint32_t>(chunk.tiles)};
    append_copies(copies, {chunk.part, block, tiles, bound.shape.rank * chunks + chunk.index});
  });
  return copies;
}

}  // namespace flux_inductor::cuda
