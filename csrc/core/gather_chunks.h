// How a shard of all_gather + matmul travels: in chunks of rows, each with a signal behind it.
#pragma once

#include "core/cut.h"
#include "core/tile_order.h"

namespace flux_inductor {

// Of a shard, both included.
struct SignalRange {
  int first, last;
};

// One rank's view of the shards that it gathers. Chunk c of rank r's shard is rows [begin(c),
// end(c)) of r's cut, in every strip; its signal is signals[r * signals_per_shard() + c].
//
// After the last byte of a gather has arrived, the tiles that waited for it remain to be
// multiplied. So the shard that arrives last may end with a chunk of its own size, small enough for
// one round of tiles, that is sent in slices along K: the signal of slice s is that of the chunk
// plus s, and tiles multiply a slice while the next one is on its way. Slices follow one another on
// one stream, so that the last one's signal stands for all of them.
class GatherChunks {
 public:
  static constexpr int kStepDepth = 64;  // of K, in one step of the mainloop

  GatherChunks() = default;
  GatherChunks(int rows, int rows_per_chunk, int last_rows, int slices, int k, int last_source)
      : cut_(rows, rows_per_chunk),
        last_cut_(rows, rows_per_chunk, last_rows),
        last_source_(last_source),
        steps_per_slice_(ceil_div(ceil_div(k, kStepDepth), slices)),
        slices_(ceil_div(ceil_div(k, kStepDepth), steps_per_slice_)) {}

  FLUX_HOST_DEVICE Cut const& cut_of(int source) const {
    return source == last_source_ ? last_cut_ : cut_;
  }
  FLUX_HOST_DEVICE int slices() const { return slices_; }
  FLUX_HOST_DEVICE int steps_per_slice() const { return steps_per_slice_; }
  FLUX_HOST_DEVICE int signals_per_shard() const {
    int last = last_cut_.chunks() + slices_ - 1;
    return last > cut_.chunks() ? last : cut_.chunks();
  }

  // Whether a row, which may lie behind the shard's end, comes in slices.
  FLUX_HOST_DEVICE bool sliced(int source, int row) const {
    return slices_ > 1 && source == last_source_ && row >= last_cut_.begin(last_cut_.chunks() - 1);
  }
  // The signal, among its shard's, of the chunk that holds a row; `slice` counts if it is sliced.
  FLUX_HOST_DEVICE int signal_of(int source, int row, int slice) const {
    int signal = cut_of(source).chunk_of(row);
    return sliced(source, row) ? signal + slice : signal;
  }
  // The signals for which rows [first_row, last_row] wait, up to a slice where they are sliced.
  FLUX_HOST_DEVICE SignalRange signals_of(int source, int first_row, int last_row,
                                          int slice) const {
    return {signal_of(source, first_row, 0), signal_of(source, last_row, slice)};
  }
  // Steps of the mainloop, of those left, for which a tile may load its rows of A once the signals
  // of its rows up to this slice are there: all, where nothing comes in slices. `last_row` of the
  // tile may lie behind the shard's end.
  FLUX_HOST_DEVICE int steps_of_slice(int source, int last_row, int steps_left) const {
    if (!sliced(source, last_row)) return steps_left;
    return steps_per_slice_ < steps_left ? steps_per_slice_ : steps_left;
  }

 private:
  Cut cut_;
  Cut last_cut_;
  int last_source_ = -1;
  int steps_per_slice_ = 1;
  int slices_ = 1;
};

}  // namespace flux_inductor
