// matmul + reduce_scatter: host interface of the kernels.
#pragma once

#include "core/scatter_schedule.h"
#include "cuda/gemm/kernel_registry.h"
#include "cuda/sync/error_record.h"
#include "cuda/sync/succession.h"

namespace flux_inductor::cuda {

// Each rank computes scale * (x @ weight) + bias + addend of the whole product, [strips, world *
// rows, n]; rank r keeps the sum over ranks of rows [r * rows, (r + 1) * rows) of each strip.
struct MatmulReduceScatter {
  int world, rank;
  int strips, rows;
  int n, k;       // multiples of 8
  void const* x;  // [strips, world * rows, k], strips one after another
  int64_t x_row_stride;
  void const* weight;
  int64_t weight_stride;  // elements between rows of [n, k] (k_major) or [k, n] (n_major)
  // In the dtype of the results, like partials:
  void const* bias;    // [n] or null
  void const* addend;  // [strips, world * rows, n] contiguous or null
  float scale;
  // [strips, rows, n] contiguous each. parts[i], i != rank: where this rank's tiles of part i go,
  // to be moved to rank i; parts[rank]: the result. partials[i], i != rank: where rank i's tiles of
  // this rank's part arrive.
  void* parts[kMaxRanks];
  void const* partials[kMaxRanks];
  // Transport by the kernel's stores: parts[i], i != rank, lies in rank i's memory, and the kernel
  // itself raises delivered[i][rank * chunks_per_part + chunk] there to the epoch. Null: someone
  // else moves the chunks.
  Epoch* delivered[kMaxRanks];
  // [world * chunks_per_part] each: tiles stored of each chunk, zero at the start; and signals that
  // a rank's partials of a chunk are there.
  uint32_t* counters;
  Epoch const* arrived;
  Epoch const* epoch;  // device memory; the value that this call's signals reach
  uint32_t* claims;    // zero at the start
  Succession succession;
  int group;          // rows of clusters swept together
  int chunk_columns;  // columns of clusters in a chunk
  int sms;            // to use at most
  uint64_t wait_limit_ns;
  ErrorRecord* errors;

  // Whether the kernel's stores are the transport.
  bool stores() const { return delivered[(rank + 1) % world] != nullptr; }

  ScatterSchedule schedule(Tile const& tile) const {
    return {world, rank, strips, rows, n, tile, group, chunk_columns, stores()};
  }
};

using MatmulReduceScatterKernel = KernelEntry<MatmulReduceScatter>;

// One for each line of families.def.
template <ElementType element, WeightLayout layout, ElementType result>
std::vector<MatmulReduceScatterKernel> matmul_reduce_scatter_family();

std::vector<MatmulReduceScatterKernel> const& matmul_reduce_scatter_kernels();

}  // namespace flux_inductor::cuda
