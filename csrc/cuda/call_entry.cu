#include "call_entry.h"
#include "launch_error.h"
#include "signals.cuh"

namespace flux_inductor::cuda {
namespace {

// By the threads of one warp, one a rank. What this stream did before is visible to whoever meets.
__device__ void meet_ranks(Meeting const& meeting, Epoch epoch) {
  int peer = threadIdx.x;
  if (peer >= meeting.world || peer == meeting.rank) return;
  store_release_system(meeting.theirs[peer], epoch);
  WaitLimit limit{meeting.wait_limit_ns, meeting.errors, meeting.op};
  wait_for_signal(meeting.ours + peer, epoch, limit, peer, kMeetingChunk);
}

__global__ void enter_call_kernel(CallEntry entry) {
  Epoch own = *entry.epoch, other = *entry.other_epoch;
  bool meets = entry.first_of_graph || *entry.replayed != 0;
  Epoch epoch = own > other ? own : other;
  for (int i = threadIdx.x; i < entry.count; i += blockDim.x) entry.words[i] = 0;
  __syncthreads();
  if (threadIdx.x == 0) *entry.epoch = epoch;
  if (meets) meet_ranks(entry.meeting, epoch);
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
