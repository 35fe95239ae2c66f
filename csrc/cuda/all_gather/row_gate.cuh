// Which shard a tile's rows of A belong to, and the wait for the chunks that hold them.
#pragma once

#include "core/gather_chunks.h"
#include "cuda/sync/signals.cuh"
#include "cute/tensor.hpp"

namespace flux_inductor::cuda {

// Where the chunks of A come from, and how to know that they are there: a signal reaches *epoch
// when its chunk, or slice of a chunk, is there. gather_chunks.h says which signal is whose.
struct Gate {
  Epoch const* signals;
  Epoch const* epoch;
  Divider world;
  int rank;
  int rows;  // of a shard, per strip
  GatherChunks chunks;
  WaitLimit limit;
};

// One strip of one rank's shard. The problem's L counts them as they lie in memory: [strips,
// world].
struct ShardStrip {
  int strip;
  int source;
  bool own;

  CUTLASS_DEVICE ShardStrip(Gate const& gate, int l)
      : strip(gate.world.divide(l)),
        source(l - strip * gate.world.value()),
        own(source == gate.rank) {}
};

// Each warp that reads what peers sent has one of its own: a wait that another warp has ended
// orders nothing for this one.
class RowGate {
 public:
  // Returns when rows [first_row, first_row + rows) of a shard may be read by TMA, up to the end of
  // a slice where they were sent in slices; rows over the shard's end count as there, and so does
  // the own shard. By a whole warp.
  CUTLASS_DEVICE void wait_for_rows(Gate const& gate, ShardStrip const& shard, int first_row,
                                    int rows, int slice) {
    if (shard.own || first_row >= gate.rows) return;  // behind the end: padding tile of a cluster
    int last_row = cute::min(first_row + rows, gate.rows) - 1;
    int base = shard.source * gate.chunks.signals_per_shard();
    SignalRange range = gate.chunks.signals_of(shard.source, first_row, last_row, slice);
    int first = base + range.first, last = base + range.last;
    if (first >= first_ready_ && last <= last_ready_) return;
    if (last_ready_ < 0) epoch_ = *gate.epoch;
    for (int signal = first; signal <= last; ++signal) {
      warp_waits_for_signal(gate.signals + signal, epoch_, gate.limit, shard.source, signal - base);
    }
    fence_generic_to_async();
    first_ready_ = first;
    last_ready_ = last;
  }

 private:
  // The signals that were waited for last: tiles swept along N need the same ones again.
  int first_ready_ = 0;
  int last_ready_ = -1;
  Epoch epoch_ = 0;
};

}  // namespace flux_inductor::cuda
