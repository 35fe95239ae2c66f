// all_gather + matmul: host interface of the kernels.
//
// product[strip, r * rows + i, :] = shard_of_rank_r[strip, i, :] @ weight + bias, for one weight.
// With several weights on one gather there is a launch for each on one stream: later launches find
// the signals raised.
#pragma once

#include "core/gather_schedule.h"
#include "cuda/gemm/kernel_registry.h"
#include "cuda/sync/call_sync.h"
#include "cuda/transport/copy_engine.h"

namespace flux_inductor::cuda {

// The sizes of one launch, as shapes and plan have them.
struct GatherShape {
  int world, rank;
  int strips, rows;                          // a shard is [strips, rows, k]
  int n, k;                                  // multiples of 8
  int64_t own_row_stride, own_strip_stride;  // elements, multiples of 8
  int64_t weight_stride;  // elements between rows of [n, k] (k_major) or [k, n] (n_major)
  // Of chunks; of the last one of the shard that arrives last, 0: as any other; and in how many
  // slices along K that one is sent.
  int rows_per_chunk, last_rows, slices;
  int group;  // rows of clusters swept together
  int sms;    // to use at most

  GatherTransfers transfers() const {
    return {world, rank, rows, k, rows_per_chunk, last_rows, slices};
  }
};

// A launch but for its addresses: made once, when a call is bound.
struct BoundGather {
  BoundGather(GatherShape const& shape, Tile const& tile)
      : shape(shape),
        order(gather_order(tile, shape.world, shape.rank, shape.strips, shape.rows, shape.n,
                           shape.group)),
        chunks(shape.transfers().chunks_at(shape.rank)) {}

  GatherShape shape;
  TileOrder order;
  GatherChunks chunks;  // as this rank receives them
};

struct GatherOperands {
  void const* own_shard;
  void const* gathered;  // [strips, world, rows, k] contiguous; the own rows are never read
  void const* weight;
  void const* bias;  // [n] or null
  void* product;     // [strips, world * rows, n] contiguous
  // The gathered tensor, [strips, world, rows, k] contiguous, for the kernel to store; or null. On
  // one launch of a call, best the one with the largest n. Needs own_row_stride == k.
  void* kept;
};

struct GatherSync : CallSync {
  Epoch const* signals;  // [world * signals_per_shard()]; see gather_chunks.h
};

// One launch.
struct AllGatherMatmul {
  BoundGather const& bound;
  GatherOperands operands;
  GatherSync sync;
};

using AllGatherMatmulKernel = KernelEntry<AllGatherMatmul>;

// One for each line of families.def.
template <ElementType element, WeightLayout layout>
std::vector<AllGatherMatmulKernel> all_gather_matmul_family();

std::vector<AllGatherMatmulKernel> const& all_gather_matmul_kernels();

// Of the own shard, chunk by chunk, into every peer's gathered buffer: all of it to rank - 1
// first, who multiplies it first, then to rank - 2, and so on around the ring. The last peer has no
// other shard to wait for, so that its last chunk may come in slices. The rows of the shard must be
// contiguous.
std::vector<Copy> shard_copies(GatherShape const& shape);

}  // namespace flux_inductor::cuda
