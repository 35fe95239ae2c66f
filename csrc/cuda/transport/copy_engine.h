// The copy-engine transport: chunks move as asynchronous copies on a side stream, each with its
// signal behind it.
//
// A signal is an 8-byte copy of the epoch in device memory: cheaper than a stream memory operation,
// and right when a CUDA graph is replayed. Copies go on while a kernel that waits for them holds
// every SM.
#pragma once

#include "cuda/all_gather/all_gather_matmul.h"
#include "cuda/reduce_scatter/matmul_reduce_scatter.h"

namespace flux_inductor::cuda {

// Sends the own shard, chunk by chunk, into every peer's gathered buffer: all of it to rank - 1
// first, who multiplies it first, then to rank - 2, and so on around the ring. The last peer has no
// other shard to wait for, so that its last chunk may come in slices.
struct ShardPush {
  // Each rank's, as this rank addresses it; the own ones are not used.
  void* gathered[kMaxRanks];
  Epoch* signals[kMaxRanks];
};
void push_shard(AllGatherMatmul const& problem, ShardPush const& push, cudaStream_t stream);
// The signal that is sent last, when all copies have ended.
Epoch const* last_signal(AllGatherMatmul const& problem, ShardPush const& push);

// Sends each chunk of the peers' parts to its owner as soon as its tiles are stored. The stream
// waits for the counters that the kernel raises; it cannot hang, since the kernel's own waits end.
struct PartialsPush {
  // Where each rank takes this rank's partials, and its signals, as this rank addresses them.
  void* partials[kMaxRanks];
  Epoch* arrived[kMaxRanks];
};
void push_partials(MatmulReduceScatter const& problem, MatmulReduceScatterKernel const& kernel,
                   PartialsPush const& push, cudaStream_t stream);

}  // namespace flux_inductor::cuda
