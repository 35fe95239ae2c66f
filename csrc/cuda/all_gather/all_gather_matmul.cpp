#include "cuda/all_gather/all_gather_matmul.h"

#include <stdexcept>

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

std::vector<Copy> shard_copies(GatherShape const& shape) {
  constexpr int64_t kBytes = bytes_of(ElementType::bf16);  // and of fp16
  if (shape.own_row_stride != shape.k)
    throw std::invalid_argument("shard_copies: the rows of the shard must be contiguous");
  int64_t row = shape.k * kBytes, shard = shape.rows * row;
  int64_t from_strip = shape.own_strip_stride * kBytes, to_strip = shape.world * shard;
  std::vector<Copy> copies;
  shape.transfers().each_copy([&](GatherCopy const& chunk) {
    int64_t from = chunk.first_row * row + chunk.first_column * kBytes;
    int64_t to = shape.rank * shard + from, height = chunk.last_row - chunk.first_row;
    if (chunk.last_column - chunk.first_column == shape.k) {  // a strip's rows are contiguous
      Block block{from, to, from_strip, to_strip, height * row, shape.strips};
      append_copies(copies, {chunk.peer, block, {}, chunk.signal});
      return;
    }
    int64_t width = (chunk.last_column - chunk.first_column) * kBytes;
    for (int strip = 0; strip < shape.strips; ++strip) {
      Block block{from + strip * from_strip, to + strip * to_strip, row, row, width, height};
      bool last = strip + 1 == shape.strips;
      append_copies(copies, {chunk.peer, block, {}, last ? chunk.signal : kNoSignal});
    }
  });
  return copies;
}

}  // namespace flux_inductor::cuda
