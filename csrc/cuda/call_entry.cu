#include "call_entry.h"
#include "launch_error.h"
#include "signals.cuh"

namespace flux_inductor::cuda {
namespace {

// By the threads of one warp, one a rank. What this stream did before is visible to whoever meets.
__device__ void meet_ranks(Meeting const& meeting, uint32_t epoch) {
  int peer = threadIdx.x;
  if (peer >= meeting.world || peer == meeting.rank) return;
  store_release_system(meeting.theirs[peer], epoch);
  WaitLimit limit{meeting.wait_limit_ns, meeting.errors, meeting.op};
  wait_for_signal(meeting.ours + peer, epoch, limit, peer, kMeetingChunk);
}

// Signals that calls do not use keep their old epochs, and would look like the future one day.
__device__ void renew(SignalRegion const& region, uint32_t epoch) {
  if (region.count == 0 || epoch - *region.renewed < kSignalLife) return;
  for (int i = threadIdx.x; i < region.count; i += blockDim.x) region.words[i] = epoch - 1;
  __syncthreads();
  if (threadIdx.x == 0) *region.renewed = epoch;
}

__global__ void enter_call_kernel(CallEntry entry) {
  __shared__ uint32_t epoch;
  __shared__ bool unknown;  // whether peers may still use the buffers
  if (threadIdx.x == 0) {
    epoch = *entry.epoch + 1;
    *entry.epoch = epoch;
    unknown = entry.captured ? entry.first_of_graph : *entry.replayed != 0;
    *entry.replayed = entry.captured;
  }
  for (int i = threadIdx.x; i < entry.count; i += blockDim.x) entry.words[i] = 0;
  __syncthreads();
  renew(entry.idle, epoch);
  if (unknown) {
    renew(entry.used, epoch);
    __syncthreads();
    meet_ranks(entry.meeting, epoch);
  } else {
    renew(entry.meetings, epoch);
  }
}

}  // namespace

void enter_call(CallEntry const& entry, cudaStream_t stream) {
  enter_call_kernel<<<1, 256, 0, stream>>>(entry);
  check_cuda(cudaGetLastError(), "enter_call");
}

void prepare_call_entry() {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, enter_call_kernel), "cudaFuncGetAttributes");
}

}  // namespace flux_inductor::cuda
