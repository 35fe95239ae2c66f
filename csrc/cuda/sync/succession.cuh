// The device's side of succession.h.
#pragma once

#include "cuda/sync/signals.cuh"
#include "cuda/sync/succession.h"

namespace flux_inductor::cuda {

// By one warp of every block, when it has done all else.
__device__ __forceinline__ void prepare_next_call(Succession const& succession, Epoch const* epoch,
                                                  WaitLimit const& limit, int rank) {
  if (succession.next_epoch == nullptr || (blockIdx.x | blockIdx.y | blockIdx.z) != 0) return;
  Epoch now = *epoch;
  for (int i = threadIdx.x % 32; i < succession.next_count; i += 32) succession.next_words[i] = 0;
  if (threadIdx.x % 32 == 0) {
    *succession.next_epoch = now + 1;
    *succession.replayed = succession.captured;
  }
  if (succession.last_copied != nullptr)
    warp_waits_for_signal(succession.last_copied, now, limit, rank, kOwnCopiesChunk);
}

}  // namespace flux_inductor::cuda
