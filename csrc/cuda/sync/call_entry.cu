#include "cuda/host/launch_error.h"
#include "cuda/sync/call_entry.h"
#include "cuda/sync/signals.cuh"

namespace flux_inductor::cuda {
namespace {

// Whether a peer's data of this call, or a later one, have come though it has not met this rank.
// What it sends, it sends behind its word. (Its first chunk is the one with index 0.)
__device__ bool came_unmet(Meeting const& meeting, int peer, Epoch epoch) {
  int first = peer * meeting.signals_per_rank;
  bool came = load_acquire_system(meeting.arriving[0] + first) >= epoch ||
              load_acquire_system(meeting.arriving[1] + first) >= epoch;
  return came && load_acquire_system(meeting.ours + peer) / 2 < epoch;
}

// By the threads of one warp, one a rank. What this stream did before is visible to whoever meets.
__device__ void meet_ranks(Meeting const& meeting, Epoch epoch) {
  constexpr uint64_t kNanosecondsBetweenLooks = 1000000;
  int peer = threadIdx.x;
  if (peer >= meeting.world || peer == meeting.rank) return;
  Epoch mine = 2 * epoch + meeting.turn, seen;
  store_release_system(meeting.theirs[peer], mine);
  WaitLimit limit = meeting.limit;
  uint64_t start = global_nanoseconds(), look = start + kNanosecondsBetweenLooks;
  while ((seen = load_acquire_system(meeting.ours + peer)) / 2 < epoch) {
    __nanosleep(50);
    uint64_t now = global_nanoseconds();
    if (now < look) continue;
    look = now + kNanosecondsBetweenLooks;
    if (came_unmet(meeting, peer, epoch))
      end_failed_wait(limit, peer, kUnlikeChunk, epoch, seen / 2);
    if (now - start > limit.nanoseconds || load_acquire_system(&limit.record->state) != 0u)
      end_failed_wait(limit, peer, kMeetingChunk, epoch, seen / 2);
  }
  if (seen / 2 == epoch && seen != mine)
    end_failed_wait(limit, peer, kUnlikeChunk, epoch, seen / 2);
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
  void* parameters[] = {const_cast<CallEntry*>(&entry)};
  auto* function = reinterpret_cast<void const*>(enter_call_kernel);
  check_cuda(cudaLaunchKernel(function, 1, 256, parameters, 0, stream), "enter_call");
}

void prepare_call_entry() {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, enter_call_kernel), "cudaFuncGetAttributes");
}

}  // namespace flux_inductor::cuda
