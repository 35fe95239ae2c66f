// How a call's kernel makes everything ready for the call that follows, so that a call begins with
// its kernel and its copies alone.
//
// A call needs an epoch, and counters and claims that are zero. Calls have two sets of these words
// in turn, as they have two slots (workspace.h). The kernel of a call writes the other set: whoever
// used that ended before this kernel began. A kernel of its own at the start of every call, which
// is the plain way, costs the caller's stream 2 to 5 us: the kernel itself, and the gap before the
// next one, which a fork of the copy stream in between makes longer.
//
// The kernel of an all_gather also waits until the call's own copies have left, in the place of an
// event behind them that the caller's stream would wait for: 1 to 2 us where calls follow one
// another. So when the kernel has ended, the call has (rule R8). That of a reduce_scatter must not,
// since its copies are queued behind it (workspace.cpp).
#pragma once

#include "cuda/sync/epoch.h"

namespace flux_inductor::cuda {

struct Succession {
  Epoch* next_epoch;     // null: another launch of the same call sees to all of this
  uint32_t* next_words;  // counters and claims, side by side
  int next_count;
  uint32_t* replayed;  // whether the last call of the workspace belonged to a graph
  bool captured;       // this one does
  // The last of the call's own copies: the signal that it writes, in a peer's memory. Null: nothing
  // is to be waited for.
  Epoch const* last_copied;
};

// The chunk that an error record names when the rank's own copies did not end.
inline constexpr uint32_t kOwnCopiesChunk = 0xfffffffeu;

}  // namespace flux_inductor::cuda
