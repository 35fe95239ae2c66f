// The copy-engine transport in the other direction: every rank copies its peers' shards.
#pragma once

#include "all_gather_matmul.h"

namespace flux_inductor::cuda {

// Copies the peers' shards, chunk by chunk, into the gathered tensor: all of rank + 1's first,
// which is multiplied first, then rank + 2's, and so on around the ring. All shards must be in
// place.
//
// A chunk's flag is raised by the stream itself. It cannot be a copy, as signals of pushed chunks
// are: copies inside one device are kernels, which would find no room beside the one that waits
// (rule R2), and a word that is copied from a peer may be an old one (seen on H200: a copy engine
// read a peer's word as it was before the peer's last write, which an acquire had seen).
struct ShardPull {
  void const* shards[kMaxRanks];  // each rank's shard, [strips, rows, k] contiguous
  void* gathered;                 // [strips, world, rows, k]
  uint32_t* flags;                // [world * chunks], zero at the start of the call, then 1
};
void pull_shards(AllGatherMatmul const& problem, ShardPull const& pull, cudaStream_t stream);

// Copies the own shard to [strips, rows, k], `strip_stride` elements from strip to strip.
void copy_own_shard(AllGatherMatmul const& problem, void* to, int64_t strip_stride,
                    cudaStream_t stream);

}  // namespace flux_inductor::cuda
