// Where the signals of one call lie in each rank's array of 32-bit words.
#pragma once

#include <cstdint>

#include "core/epoch.h"

namespace flux_inductor {

// One word for each (rank, chunk) in two blocks. On rank r, with `peer` != r:
//   arrived(peer, chunk)  all_gather: the chunk of peer's shard is here.
//                         reduce_scatter: peer's partial product of the own chunk is here.
//                         Raised by whoever executes the transfer.
//   ready(owner, chunk)   the bytes that a transfer is to take from rank r are written.
//                         all_gather: a chunk of its own shard (owner r).
//                         reduce_scatter: its partial product of owner's chunk.
struct SignalLayout {
  int world;
  int chunks;  // of one shard

  FLUX_HOST_DEVICE int arrived(int peer, int chunk) const { return peer * chunks + chunk; }
  FLUX_HOST_DEVICE int ready(int owner, int chunk) const {
    return (world + owner) * chunks + chunk;
  }
  FLUX_HOST_DEVICE int count() const { return 2 * world * chunks; }
};

}  // namespace flux_inductor
