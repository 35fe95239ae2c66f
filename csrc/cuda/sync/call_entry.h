// How a fused call begins on its stream where the host does not know what ran before it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/sm90.h"
#include "cuda/sync/epoch.h"
#include "cuda/sync/error_record.h"

namespace flux_inductor::cuda {

// A barrier of all ranks on their streams. Every rank raises its word in each peer's memory to the
// epoch, and waits until its own words have reached it.
//
// A word also says which slot the call uses: twice the epoch, and the slot. Where one rank replays
// a graph and another one makes the same call eagerly, the slots may differ, and each would wait in
// one slot for data that the other sends to the other slot. And an eager call on a rank that has
// never captured does not meet at all: its data come instead. Both are seen here at once.
struct Meeting {
  int world, rank;
  int turn;                        // the slot
  Epoch* theirs[sm90::kMaxRanks];  // this rank's word in each rank's memory
  Epoch const* ours;               // [world]
  Epoch const* arriving[2];        // the first rank's first signal, in each set
  int signals_per_rank;            // of this call
  WaitLimit limit;
};

// The chunk that an error record names when a rank did not come to a meeting.
inline constexpr uint32_t kMeetingChunk = 0xffffffffu;
// And when the rank is in a call that does not fit: of the other slot, or without a meeting.
inline constexpr uint32_t kUnlikeChunk = 0xfffffffdu;

// Two buffers in turn need no hand-shake as long as calls alternate between them (rule R6), and two
// sets of words none as long as each call prepares those of the next (succession.h). The host knows
// which ones an eager call may use, but those of a captured call are fixed, and the host does not
// see replays. So a graph's first call, and the first eager call after a replay, start with a
// meeting: all ranks have then ended whatever they ran before. Without it, with one call a graph:
// rank 0 replays twice, and its second push lands in the buffer that rank 1, delayed, is still
// multiplying in its first replay.
//
// Before the meeting this kernel prepares the call's words, since the call before may have used the
// same ones. The next epoch is then the larger of the two sets', else of the call's own set.
struct CallEntry {
  Epoch* epoch;              // of this call's set
  Epoch const* other_epoch;  // of the other set
  uint32_t* words;           // of this call's set, counters and claims: zeroed
  int count;
  uint32_t const* replayed;  // whether the last call of the workspace belonged to a graph
  bool first_of_graph;       // or an eager call, which meets the others after a replay only
  Meeting meeting;
};
void enter_call(CallEntry const& entry, cudaStream_t stream);

// Loads the kernel (rule R3).
void prepare_call_entry();

}  // namespace flux_inductor::cuda
