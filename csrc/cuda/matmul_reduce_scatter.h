// matmul + reduce_scatter: host interface of the kernels.
#pragma once

#include "error_record.h"
#include "kernel_registry.h"
#include "scatter_chunks.h"
#include "succession.h"

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
  void const* bias;       // [n] or null
  void const* addend;     // [strips, world * rows, n] contiguous or null
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
  int group;            // rows of clusters swept together
  int chunk_columns;    // columns of clusters in a chunk
  int multiprocessors;  // to use at most
  uint64_t wait_limit_ns;
  ErrorRecord* errors;

  // Whether the kernel's stores are the transport.
  bool stores() const { return delivered[(rank + 1) % world] != nullptr; }
};

// A chunk of the partial product for one peer, as whoever moves it needs it: a block of the part
// seen as a matrix [strips * rows, n], complete when its counter reaches `tiles`.
struct ScatterChunk {
  int part;
  int index;  // its counter and signal: counters[part * chunks_per_part + index]
  int first_row, last_row;
  int first_column, last_column;
  int tiles;
};

using MatmulReduceScatterKernel = KernelEntry<MatmulReduceScatter>;

std::vector<MatmulReduceScatterKernel> const& matmul_reduce_scatter_kernels();

// Part by part; and that in which a kernel of so many clusters claims tiles.
TileOrder scatter_order(MatmulReduceScatter const& problem, Tile const& tile);
TileOrder claim_order(MatmulReduceScatter const& problem, TileOrder const& order,
                      ScatterChunks const& chunks, int clusters);
int scatter_chunks_per_part(MatmulReduceScatter const& problem, Tile const& tile);
// All chunks of the peers' parts, in the order in which the kernel completes them.
std::vector<ScatterChunk> scatter_chunks(MatmulReduceScatter const& problem, Tile const& tile);

}  // namespace flux_inductor::cuda
