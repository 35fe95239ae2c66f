#include "shard_pull.h"

#include <cuda.h>

#include <algorithm>

#include "launch_error.h"
#include "tile_order.h"

namespace flux_inductor::cuda {
namespace {

constexpr int64_t kElementSize = 2;  // bf16 and fp16

template <class Byte>
Byte* at(Byte* base, int64_t elements) {
  return base + elements * kElementSize;
}

// `rows` rows of every strip of a shard; strides in elements from strip to strip.
void copy_rows(AllGatherMatmul const& p, char* to, int64_t to_stride, char const* from,
               int64_t from_stride, int64_t rows, cudaStream_t stream) {
  int64_t width = rows * p.k * kElementSize;
  check_cuda(cudaMemcpy2DAsync(to, to_stride * kElementSize, from, from_stride * kElementSize,
                               width, p.strips, cudaMemcpyDeviceToDevice, stream),
             "copy of a chunk");
}

// cuStreamWriteValue32, found at run time so that the module loads without a driver.
void raise_flag(uint32_t* flag, cudaStream_t stream) {
  using WriteValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
  static WriteValue const write_value = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &function, 12000,
                                                cudaEnableDefault, &found),
               "cuStreamWriteValue32");
    return reinterpret_cast<WriteValue>(function);
  }();
  auto result = write_value(stream, reinterpret_cast<CUdeviceptr>(flag), 1, 0);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("cuStreamWriteValue32: error " + std::to_string(result));
  }
}

}  // namespace

void pull_shards(AllGatherMatmul const& p, ShardPull const& pull, cudaStream_t stream) {
  int chunks = ceil_div(p.rows, p.rows_per_chunk);
  int64_t shard_stride = int64_t(p.rows) * p.k;
  for (int distance = 1; distance < p.world; ++distance) {
    int peer = (p.rank + distance) % p.world;
    auto* shard = static_cast<char const*>(pull.shards[peer]);
    char* place = at(static_cast<char*>(pull.gathered), peer * shard_stride);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      int64_t first = int64_t(chunk) * p.rows_per_chunk;
      int64_t rows = std::min<int64_t>(p.rows_per_chunk, p.rows - first);
      copy_rows(p, at(place, first * p.k), p.world * shard_stride, at(shard, first * p.k),
                shard_stride, rows, stream);
      raise_flag(pull.flags + peer * chunks + chunk, stream);
    }
  }
}

void copy_own_shard(AllGatherMatmul const& p, void* to, int64_t strip_stride, cudaStream_t stream) {
  copy_rows(p, static_cast<char*>(to), strip_stride, static_cast<char const*>(p.own_shard),
            p.own_strip_stride, p.rows, stream);
}

}  // namespace flux_inductor::cuda
