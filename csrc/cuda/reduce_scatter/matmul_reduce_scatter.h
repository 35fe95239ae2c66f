// matmul + reduce_scatter: host interface of the kernels.
//
// Each rank computes scale * (x @ weight) + bias + addend of the whole product, [strips, world *
// rows, n]; rank r keeps the sum over ranks of rows [r * rows, (r + 1) * rows) of each strip.
#pragma once

#include "core/scatter_schedule.h"
#include "cuda/gemm/kernel_registry.h"
#include "cuda/sync/call_sync.h"
#include "cuda/transport/copy_engine.h"

namespace flux_inductor::cuda {

// The sizes of a launch, as shapes and plan have them.
struct ScatterShape {
  int world, rank;
  int strips, rows;
  int n, k;               // multiples of 8
  int64_t x_row_stride;   // elements
  int64_t weight_stride;  // elements between rows of [n, k] (k_major) or [k, n] (n_major)
  float scale;
  int group;          // rows of clusters swept together
  int chunk_columns;  // columns of clusters in a chunk
  int sms;            // to use at most
};

// A launch but for its addresses: made once, when a call is bound.
struct BoundScatter {
  // `stores`: the kernel's stores are the transport; else the copy engine is. `resident`: clusters
  // that the device holds at once.
  BoundScatter(ScatterShape const& shape, Tile const& tile, bool stores, int resident)
      : shape(shape),
        schedule{shape.world, shape.rank,  shape.strips,        shape.rows, shape.n,
                 tile,        shape.group, shape.chunk_columns, stores},
        parts(schedule.parts()),
        chunks(schedule.chunks(parts)),
        clusters(parts.clusters_at_work(shape.sms, resident)),
        claims(schedule.claims(parts, chunks, clusters)) {}

  ScatterShape shape;
  ScatterSchedule schedule;
  TileOrder parts;
  ScatterChunks chunks;
  int clusters;  // to launch
  TileOrder claims;
};

struct ScatterOperands {
  void const* x;  // [strips, world * rows, k], strips one after another
  void const* weight;
  // In the dtype of the results, like partials:
  void const* bias;    // [n] or null
  void const* addend;  // [strips, world * rows, n] contiguous or null
  // [strips, rows, n] contiguous each. parts[i], i != rank: where this rank's tiles of part i go,
  // to be moved to rank i; parts[rank]: the result. partials[i], i != rank: where rank i's tiles of
  // this rank's part arrive.
  void* parts[kMaxRanks];
  void const* partials[kMaxRanks];
};

struct ScatterSync : CallSync {
  // [world * chunks_per_part] each: tiles stored of each chunk, zero at the start; and signals that
  // a rank's partials of a chunk are there.
  uint32_t* counters;
  Epoch const* arrived;
  uint32_t* claims;  // zero at the start
  // Transport by the kernel's stores: parts[i], i != rank, lies in rank i's memory, and the kernel
  // itself raises delivered[i][rank * chunks_per_part + chunk] there to the epoch. Null: someone
  // else moves the chunks.
  Epoch* delivered[kMaxRanks];
};

struct MatmulReduceScatter {
  BoundScatter const& bound;
  ScatterOperands operands;
  ScatterSync sync;
};

using MatmulReduceScatterKernel = KernelEntry<MatmulReduceScatter>;

// One for each line of families.def.
template <ElementType element, WeightLayout layout, ElementType result>
std::vector<MatmulReduceScatterKernel> matmul_reduce_scatter_family();

std::vector<MatmulReduceScatterKernel> const& matmul_reduce_scatter_kernels();

// Of each chunk of the peers' parts to its owner, as soon as its tiles are stored.
std::vector<Copy> partial_copies(BoundScatter const& bound, ElementType result);

}  // namespace flux_inductor::cuda
