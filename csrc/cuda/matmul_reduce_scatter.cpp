#include "matmul_reduce_scatter.h"

#include <algorithm>

namespace flux_inductor::cuda {

std::vector<MatmulReduceScatterKernel> matmul_reduce_scatter_bf16_k_major();
std::vector<MatmulReduceScatterKernel> matmul_reduce_scatter_bf16_n_major();
std::vector<MatmulReduceScatterKernel> matmul_reduce_scatter_fp16_k_major();
std::vector<MatmulReduceScatterKernel> matmul_reduce_scatter_fp16_n_major();

std::vector<MatmulReduceScatterKernel> const& matmul_reduce_scatter_kernels() {
  static std::vector<MatmulReduceScatterKernel> const kernels = all_families<MatmulReduceScatter>(
      {matmul_reduce_scatter_bf16_k_major, matmul_reduce_scatter_bf16_n_major,
       matmul_reduce_scatter_fp16_k_major, matmul_reduce_scatter_fp16_n_major});
  return kernels;
}

// Peers' parts first, from the right-hand neighbour's on so that no two ranks send to the same rank
// at once; own part last. Copies of what is for a peer begin early then.
TileOrder scatter_order(MatmulReduceScatter const& p, Tile const& tile) {
  return TileOrder({p.world, (p.rank + 1) % p.world, p.strips, ceil_div(p.rows, tile.m),
                    ceil_div(p.n, tile.n), tile.cluster_m, tile.cluster_n, p.group});
}

// Stores have no queue: a tile's leave when it is done, and where those of all multiprocessors
// leave at once, the link holds them up, and idles later. So where they are the transport, the own
// part takes turns with the last peer's. A round behind it, so that partials have had a tile's time
// to arrive; and a chunk behind it, which has one signal for all of its tiles.
TileOrder claim_order(MatmulReduceScatter const& p, TileOrder const& order,
                      ScatterChunks const& chunks, int clusters) {
  return p.stores() ? order.taking_turns(clusters + chunks.clusters(order)) : order;
}

int scatter_chunks_per_part(MatmulReduceScatter const& p, Tile const& tile) {
  return ScatterChunks(scatter_order(p, tile), p.chunk_columns).per_part();
}

std::vector<ScatterChunk> scatter_chunks(MatmulReduceScatter const& p, Tile const& tile) {
  TileOrder order = scatter_order(p, tile);
  ScatterChunks cut(order, p.chunk_columns);
  // Row of the part, seen as [strips * rows, n], at which a row of tiles begins; the last tile of a
  // strip may be short.
  auto row_at = [&](int tiles) {
    return tiles / order.m_tiles() * p.rows + tiles % order.m_tiles() * tile.m;
  };
  std::vector<ScatterChunk> chunks;
  for (int step = 0; step + 1 < p.world; ++step) {
    int part = (p.rank + 1 + step) % p.world;
    for (int index = 0; index < cut.per_part(); ++index) {
      TileBlock block = cut.block_of(order, index);
      chunks.push_back({part, index, row_at(block.first_m), row_at(block.last_m),
                        block.first_n * tile.n, std::min(p.n, block.last_n * tile.n),
                        block.tiles()});
    }
  }
  return chunks;
}

}  // namespace flux_inductor::cuda
