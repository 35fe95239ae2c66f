// The copy-engine transport: chunks move as asynchronous copies on a side stream, each with its
// signal behind it.
//
// A signal is an 8-byte copy of the epoch in device memory: cheaper than a stream memory operation,
// and right when a CUDA graph is replayed. Copies go on while a kernel that waits for them holds
// every SM. The list of a call's copies is made once, when the call is bound.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "core/sm90.h"
#include "cuda/sync/epoch.h"

namespace flux_inductor::cuda {

using sm90::kMaxRanks;

// A matrix that moves, in bytes; places are relative to the buffers of a Push.
struct Block {
  int64_t from, to;
  int64_t from_pitch, to_pitch;  // between rows
  int64_t width, height;
};

// What the stream waits for before a copy: that a counter, which a kernel raises, has got there.
// It cannot hang, since the kernel's own waits end.
struct Awaited {
  int counter;
  uint32_t at_least;  // 0: nothing
};

constexpr int kNoSignal = -1;

struct Copy {
  int peer;  // who gets it
  Block block;
  Awaited awaited;
  int signal;  // in the peer's array, behind the copy; kNoSignal: the next copy is of its chunk
};

// Appends a copy as such that CUDA can make, more than one if need be.
void append_copies(std::vector<Copy>& copies, Copy const& copy);

// The addresses of a call's copies, by peer, as this rank addresses them; own ones are not used.
struct Push {
  void const* from[kMaxRanks];
  void* to[kMaxRanks];
  Epoch* signals[kMaxRanks];
  Epoch const* epoch;
  uint32_t* counters;  // null where no copy waits
};
void push_copies(std::vector<Copy> const& copies, Push const& push, cudaStream_t stream);

}  // namespace flux_inductor::cuda
