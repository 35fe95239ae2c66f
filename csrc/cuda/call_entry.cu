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
  if (unknown) meet_ranks(entry.meeting, epoch);
}

__global__ void meet_kernel(Meeting meeting, uint32_t const* epoch) { meet_ranks(meeting, *epoch); }

}  // namespace

void enter_call(CallEntry const& entry, cudaStream_t stream) {
  enter_call_kernel<<<1, 256, 0, stream>>>(entry);
  check_cuda(cudaGetLastError(), "enter_call");
}

void meet(Meeting const& meeting, uint32_t const* epoch, cudaStream_t stream) {
  meet_kernel<<<1, 32, 0, stream>>>(meeting, epoch);
  check_cuda(cudaGetLastError(), "meet");
}

void prepare_call_entry() {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, enter_call_kernel), "cudaFuncGetAttributes");
  check_cuda(cudaFuncGetAttributes(&attributes, meet_kernel), "cudaFuncGetAttributes");
}

}  // namespace flux_inductor::cuda
