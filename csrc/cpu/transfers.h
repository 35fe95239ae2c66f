// The transfers of one rank in one call, in the schedule's order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace flux_inductor::cpu {

// `count` runs of `width` bytes, each `pitch` bytes after the one before.
struct Transfer {
  int peer;   // at the other end
  int owner;  // of the chunk
  int chunk;  // index in its owner's shard
  std::int64_t count;
  std::int64_t width;
  std::int64_t local_offset;  // from the address given at the call
  std::int64_t local_pitch;
  std::int64_t remote_offset;  // in the peer's buffer of this call
  std::int64_t remote_pitch;
  int waits_for;  // signal that must have been raised before; kNothing if the bytes are there from
                  // the start
  int raises;     // signal to raise afterwards

  static constexpr int kNothing = -1;
};

// push: from this rank's memory to the peers' buffers; waits for own signals, raises the peer's.
// pull: from the peers' buffers to this rank's memory; waits for the peer's signals, raises own
// ones.
struct Transfers {
  bool push;
  std::int64_t bytes;  // of all items
  std::vector<Transfer> items;
};

}  // namespace flux_inductor::cpu
