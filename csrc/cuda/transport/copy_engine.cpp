#include "cuda/transport/copy_engine.h"

#include <cuda.h>

#include <algorithm>

#include "cuda/host/launch_error.h"

namespace flux_inductor::cuda {
namespace {

constexpr size_t kElementSize = 2;          // bf16 and fp16; fp32 counts as two
constexpr int64_t kMostPitch = 0x7fffffff;  // bytes between rows of a 2-D copy, by CUDA

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
  if (std::max(to_stride, from_stride) * int64_t(kElementSize) > kMostPitch) {
    for (int64_t row = 0; row < rows; ++row)
      copy_matrix(at(to, row * to_stride), columns, at(from, row * from_stride), columns, columns,
                  1, stream);
    return;
  }
  check_cuda(cudaMemcpy2DAsync(to, to_stride * kElementSize, from, from_stride * kElementSize,
                               columns * kElementSize, rows, cudaMemcpyDeviceToDevice, stream),
             "copy of a chunk");
}

void send_signal(Epoch* signal, Epoch const* epoch, cudaStream_t stream) {
  check_cuda(cudaMemcpyAsync(signal, epoch, sizeof(Epoch), cudaMemcpyDeviceToDevice, stream),
             "copy of a signal");
}

void wait_for_counter(uint32_t* counter, uint32_t at_least, cudaStream_t stream) {
  check_cuda(cuStreamWaitValue32(stream, reinterpret_cast<CUdeviceptr>(counter), at_least,
                                 CU_STREAM_WAIT_VALUE_GEQ),
             "cuStreamWaitValue32");
}

void push_block(AllGatherMatmul const& p, void* gathered, GatherCopy const& block,
                cudaStream_t stream) {
  int64_t first = int64_t(block.first_row) * p.k + block.first_column;
  int64_t rows = block.last_row - block.first_row;
  int64_t from_strip = p.own_strip_stride, to_strip = int64_t(p.world) * p.rows * p.k;
  char* to = at(gathered, int64_t(p.rank) * p.rows * p.k + first);
  char const* from = at(p.own_shard, first);
  int columns = block.last_column - block.first_column;
  if (columns == p.k) {  // a strip's rows are contiguous
    copy_matrix(to, to_strip, from, from_strip, rows * p.k, p.strips, stream);
    return;
  }
  for (int strip = 0; strip < p.strips; ++strip) {
    copy_matrix(at(to, strip * to_strip), p.k, at(from, strip * from_strip), p.k, columns, rows,
                stream);
  }
}

}  // namespace

void push_shard(AllGatherMatmul const& p, ShardPush const& push, cudaStream_t stream) {
  if (p.own_row_stride != p.k)
    throw std::invalid_argument("push_shard: the rows of the shard must be contiguous");
  p.transfers().each_copy([&](GatherCopy const& copy) {
    push_block(p, push.gathered[copy.peer], copy, stream);
    send_signal(push.signals[copy.peer] + copy.signal, p.epoch, stream);
  });
}

Epoch const* last_signal(AllGatherMatmul const& p, ShardPush const& push) {
  int peer = p.transfers().peer(p.world - 1);
  GatherChunks chunks = p.chunks_at(peer);
  int last_row = chunks.cut_of(p.rank).end(chunks.cut_of(p.rank).chunks() - 1) - 1;
  return push.signals[peer] + p.rank * chunks.signals_per_shard() +
         chunks.signal_of(p.rank, last_row, chunks.slices() - 1);
}

void push_partials(MatmulReduceScatter const& p, MatmulReduceScatterKernel const& kernel,
                   PartialsPush const& push, cudaStream_t stream) {
  int64_t elements = bytes_of(kernel.result) / kElementSize, n = p.n * elements;
  ScatterSchedule schedule = p.schedule(kernel.tile);
  int chunks = schedule.chunks(schedule.parts()).per_part();
  schedule.each_chunk([&](ScatterChunk const& chunk) {
    wait_for_counter(p.counters + chunk.part * chunks + chunk.index, chunk.tiles, stream);
    int64_t first = chunk.first_row * n + chunk.first_column * elements;
    copy_matrix(at(push.partials[chunk.part], first), n, at(p.parts[chunk.part], first), n,
                (chunk.last_column - chunk.first_column) * elements,
                chunk.last_row - chunk.first_row, stream);
    send_signal(push.arrived[chunk.part] + p.rank * chunks + chunk.index, p.epoch, stream);
  });
}

}  // namespace flux_inductor::cuda
