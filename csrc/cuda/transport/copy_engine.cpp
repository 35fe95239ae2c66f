#include "cuda/transport/copy_engine.h"

#include <cuda.h>

#include <algorithm>

#include "cuda/host/launch_error.h"

namespace flux_inductor::cuda {
namespace {

constexpr int64_t kMostPitch = 0x7fffffff;  // bytes between rows of a 2-D copy, by CUDA

void copy_block(void* to, void const* from, Block const& block, cudaStream_t stream) {
  auto* target = static_cast<char*>(to) + block.to;
  auto const* source = static_cast<char const*>(from) + block.from;
  cudaError_t error =
      block.height == 1
          ? cudaMemcpyAsync(target, source, block.width, cudaMemcpyDeviceToDevice, stream)
          : cudaMemcpy2DAsync(target, block.to_pitch, source, block.from_pitch, block.width,
                              block.height, cudaMemcpyDeviceToDevice, stream);
  check_cuda(error, "copy of a chunk");
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

}  // namespace

void append_copies(std::vector<Copy>& copies, Copy const& copy) {
  Block const& block = copy.block;
  if (block.from_pitch == block.width && block.to_pitch == block.width) {
    Copy flat = copy;
    flat.block.width *= block.height;
    flat.block.height = 1;
    copies.push_back(flat);
    return;
  }
  if (block.height == 1 || std::max(block.from_pitch, block.to_pitch) <= kMostPitch) {
    copies.push_back(copy);
    return;
  }
  for (int64_t row = 0; row < block.height; ++row) {
    Block one = block;
    one.from += row * block.from_pitch;
    one.to += row * block.to_pitch;
    one.height = 1;
    bool last = row + 1 == block.height;
    copies.push_back(
        {copy.peer, one, row == 0 ? copy.awaited : Awaited{}, last ? copy.signal : kNoSignal});
  }
}

void push_copies(std::vector<Copy> const& copies, Push const& push, cudaStream_t stream) {
  for (Copy const& copy : copies) {
    if (copy.awaited.at_least > 0)
      wait_for_counter(push.counters + copy.awaited.counter, copy.awaited.at_least, stream);
    copy_block(push.to[copy.peer], push.from[copy.peer], copy.block, stream);
    if (copy.signal != kNoSignal)
      send_signal(push.signals[copy.peer] + copy.signal, push.epoch, stream);
  }
}

}  // namespace flux_inductor::cuda
