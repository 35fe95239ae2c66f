// How a fused call begins on its stream, and how all ranks meet.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "error_record.h"
#include "kernel_registry.h"

namespace flux_inductor::cuda {

// A barrier of all ranks on their streams. Every rank raises its word in each peer's memory to the
// epoch, and waits until its own words have reached it.
struct Meeting {
  int world, rank;
  uint32_t* theirs[kMaxRanks];  // this rank's word in each rank's memory
  uint32_t const* ours;         // [world]
  uint64_t wait_limit_ns;
  ErrorRecord* errors;
  Op op;  // for the error record
};

// The chunk that an error record names when a rank did not come to a meeting.
inline constexpr uint32_t kMeetingChunk = 0xffffffffu;

// Signals that enter_call() rewrites, with the epoch of the call before, when they have not been
// for kSignalLife calls. Nobody may be writing them meanwhile.
struct SignalRegion {
  uint32_t* words;
  int count;
  uint32_t* renewed;  // the epoch in which they were rewritten last
};

// Rule R5 holds for signals younger than half the count of epochs. The host cannot watch over that,
// since it does not see replays.
inline constexpr uint32_t kSignalLife = 1u << 29;

// The first thing of every fused call, before the copy stream forks off.
//
// Two buffers in turn need no hand-shake as long as calls alternate between them (rule R6). The
// host knows which one an eager call may use, but the buffers of a captured call are fixed, and the
// host does not see replays. So a graph's first call, and the first eager call after a replay,
// start with a meeting: all ranks have then ended whatever they ran before. Without it, with one
// call a graph: rank 0 replays twice, and its second push lands in the buffer that rank 1, delayed,
// is still multiplying in its first replay.
struct CallEntry {
  uint32_t* epoch;     // raised by one, so that eager calls and replays count alike (rule R5)
  uint32_t* replayed;  // whether the last call of the workspace belonged to a graph
  uint32_t* words;     // zeroed: those whose targets depend on the plan, counters and claims
  int count;
  bool captured;  // the call belongs to a graph
  bool first_of_graph;
  Meeting meeting;
  // What is renewed, and why nobody writes it then. A peer writes signals of the next call only
  // after data of this one has reached it, and those of all earlier calls have been waited for: so
  // the set that this call does not use (`idle`) is at rest. So is the other one (`used`) until
  // this rank has come to the meeting, if there is one; calls that use one set again and again have
  // one each. The meeting's own words are at rest in calls without one.
  SignalRegion idle, used, meetings;
};
void enter_call(CallEntry const& entry, cudaStream_t stream);

// Loads the kernel (rule R3).
void prepare_call_entry();

}  // namespace flux_inductor::cuda
