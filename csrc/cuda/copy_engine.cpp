#include "copy_engine.h"

#include <cuda.h>

#include <algorithm>

#include "launch_error.h"

namespace flux_inductor::cuda {
namespace {

constexpr size_t kElementSize = 2;  // bf16 and fp16

char* at(void* base, int64_t elements) {
  return static_cast<char*>(base) + elements * kElementSize;
}
char const* at(void const* base, int64_t elements) {
  return static_cast<char const*>(base) + elements * kElementSize;
}

// A matrix of `rows` x `columns` elements; strides in elements between rows.
void copy_matrix(char* to, int64_t to_stride, char const* from, int64_t from_stride,
                 int64_t columns, int64_t rows, cudaStream_t stream) {
  if (rows == 1 || (to_stride == columns && from_stride == columns)) {
    check_cuda(
        cudaMemcpyAsync(to, from, rows * columns * kElementSize, cudaMemcpyDeviceToDevice, stream),
        "copy of a chunk");
    return;
  }
  check_cuda(cudaMemcpy2DAsync(to, to_stride * kElementSize, from, from_stride * kElementSize,
                               columns * kElementSize, rows, cudaMemcpyDeviceToDevice, stream),
             "copy of a chunk");
}

void send_signal(uint32_t* signal, uint32_t const* epoch, cudaStream_t stream) {
  check_cuda(cudaMemcpyAsync(signal, epoch, sizeof(uint32_t), cudaMemcpyDeviceToDevice, stream),
             "copy of a signal");
}

void wait_for_counter(uint32_t* counter, uint32_t at_least, cudaStream_t stream) {
  auto result = cuStreamWaitValue32(stream, reinterpret_cast<CUdeviceptr>(counter), at_least,
                                    CU_STREAM_WAIT_VALUE_GEQ);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("cuStreamWaitValue32: error " + std::to_string(result));
}

}  // namespace

void push_shard(AllGatherMatmul const& p, ShardPush const& push, cudaStream_t stream) {
  if (p.own_row_stride != p.k)
    throw std::invalid_argument("push_shard: the rows of the shard must be contiguous");
  int chunks = ceil_div(p.rows, p.rows_per_chunk);
  for (int distance = 1; distance < p.world; ++distance) {
    int peer = (p.rank - distance + p.world) % p.world;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      int64_t first = int64_t(chunk) * p.rows_per_chunk;
      int64_t rows = std::min<int64_t>(p.rows_per_chunk, p.rows - first);
      copy_matrix(at(push.gathered[peer], (int64_t(p.rank) * p.rows + first) * p.k),
                  int64_t(p.world) * p.rows * p.k, at(p.own_shard, first * p.k), p.own_strip_stride,
                  rows * p.k, p.strips, stream);
      send_signal(push.signals[peer] + p.rank * chunks + chunk, p.epoch, stream);
    }
  }
}

void push_partials(MatmulReduceScatter const& p, Tile const& tile, PartialsPush const& push,
                   cudaStream_t stream) {
  int chunks = scatter_chunks_per_part(p, tile);
  for (ScatterChunk const& chunk : scatter_chunks(p, tile)) {
    wait_for_counter(p.counters + chunk.part * chunks + chunk.index, chunk.tiles, stream);
    int64_t first = int64_t(chunk.first_row) * p.n + chunk.first_column;
    copy_matrix(at(push.partials[chunk.part], first), p.n, at(p.parts[chunk.part], first), p.n,
                chunk.last_column - chunk.first_column, chunk.last_row - chunk.first_row, stream);
    send_signal(push.arrived[chunk.part] + p.rank * chunks + chunk.index, p.epoch, stream);
  }
}

}  // namespace flux_inductor::cuda
