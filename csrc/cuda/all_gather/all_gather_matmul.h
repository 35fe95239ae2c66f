// all_gather + matmul: host interface of the kernels.
#pragma once

#include "core/gather_schedule.h"
#include "cuda/gemm/kernel_registry.h"
#include "cuda/sync/error_record.h"
#include "cuda/sync/succession.h"

namespace flux_inductor::cuda {

// product[strip, r * rows + i, :] = shard_of_rank_r[strip, i, :] @ weight + bias, for one weight.
// With several weights on one gather, launch once for each on one stream: later launches find the
// signals raised.
struct AllGatherMatmul {
  int world, rank;
  int strips, rows;  // a shard is [strips, rows, k]
  int n, k;          // multiples of 8
  void const* own_shard;
  int64_t own_row_stride, own_strip_stride;  // elements, multiples of 8
  void const* gathered;  // [strips, world, rows, k] contiguous; the own rows are never read
  void const* weight;
  int64_t weight_stride;  // elements between rows of [n, k] (k_major) or [k, n] (n_major)
  void const* bias;       // [n] or null
  void* product;          // [strips, world * rows, n] contiguous
  // The gathered tensor, [strips, world, rows, k] contiguous, for the kernel to store; or null. On
  // one launch of a call, best the one with the largest n. Needs own_row_stride == k.
  void* kept;
  Epoch const* signals;  // [world * signals_per_shard()]; see gather_chunks.h
  Epoch const* epoch;    // device memory; the value that this call's signals reach
  Succession succession;
  // Of chunks; of the last one of the shard that arrives last, 0: as any other; and in how many
  // slices along K that one is sent.
  int rows_per_chunk, last_rows, slices = 1;
  int group;  // rows of clusters swept together
  int sms;    // to use at most
  uint64_t wait_limit_ns;
  ErrorRecord* errors;

  GatherTransfers transfers() const {
    return {world, rank, rows, k, rows_per_chunk, last_rows, slices};
  }
  GatherChunks chunks_at(int receiver) const { return transfers().chunks_at(receiver); }
};

using AllGatherMatmulKernel = KernelEntry<AllGatherMatmul>;

// One for each line of families.def.
template <ElementType element, WeightLayout layout>
std::vector<AllGatherMatmulKernel> all_gather_matmul_family();

std::vector<AllGatherMatmulKernel> const& all_gather_matmul_kernels();

}  // namespace flux_inductor::cuda
