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
// `renewed` is what the region's word said at the start.
__device__ void renew(SignalRegion const& region, uint32_t renewed, uint32_t epoch) {
  if (region.count == 0 || epoch - renewed < kSignalLife) return;
  for (int i = threadIdx.x; i < region.count; i += blockDim.x) region.words[i] = epoch - 1;
  if (threadIdx.x == 0) *region.renewed = epoch;
}

__device__ uint32_t last_renewal(SignalRegion const& region) {
  return region.count > 0 ? *region.renewed : 0;
}

// Every thread reads all that it may need at once, before anything is written: one after another,
// these reads would take longer than all the rest.
__global__ void enter_call_kernel(CallEntry entry) {
  uint32_t epoch = *entry.epoch + 1;
  bool replayed = *entry.replayed != 0;
  uint32_t idle = last_renewal(entry.idle), used = last_renewal(entry.used),
           meetings = last_renewal(entry.meetings);
  __syncthreads();
  if (threadIdx.x == 0) {
    *entry.epoch = epoch;
    *entry.replayed = entry.captured;
  }
  for (int i = threadIdx.x; i < entry.count; i += blockDim.x) entry.words[i] = 0;
  renew(entry.idle, idle, epoch);
  // Whether peers may still use the buffers.
  bool unknown = entry.captured ? entry.first_of_graph : replayed;
  if (unknown) {
    renew(entry.used, used, epoch);
    __syncthreads();
    meet_ranks(entry.meeting, epoch);
  } else {
    renew(entry.meetings, meetings, epoch);
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
