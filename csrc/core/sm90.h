// The sm_90 kernels as data, for planning and the kernels alike: limits, and the tiles that each
// family is compiled for. Which tile a call uses is decided by the plan.
#pragma once

#include <array>

#include "core/gather_chunks.h"
#include "core/tile.h"

namespace flux_inductor::sm90 {

inline constexpr int kMaxRanks = 8;  // whose memory one kernel can address
// Elements, of which strides of operands are multiples: TMA wants rows of whole 16 bytes.
inline constexpr int kGranule = 8;

constexpr Tile tile(int m, int n, bool pingpong = false) {
  return {m, n, GatherChunks::kStepDepth, 2, 1, pingpong};
}

// Large tiles need the fewest bytes for each operation, small ones fill the last wave; widths
// between powers of two suit the N of common layers. Of tiles that the timeline finds equal, the
// first is taken.
inline constexpr std::array kGatherTiles{tile(256, 192), tile(128, 256),       tile(256, 128),
                                         tile(128, 192), tile(128, 128, true), tile(64, 256, true),
                                         tile(256, 160), tile(128, 224),       tile(128, 160)};
// No pingpong tiles: that hides the end of a tile, which scatter_kernel.cuh makes short, at the
// price of smaller tiles. Measured, no shape was faster with them. Nor 128 x 224, which lost 10 %
// to 128 x 256 where its waves promised a gain.
inline constexpr std::array kScatterTiles{tile(256, 192), tile(128, 256), tile(256, 128),
                                          tile(128, 192), tile(128, 128), tile(64, 256)};
// Results in fp32: a tile takes twice the room, and stages of the mainloop go for it: large tiles
// would be left with three.
inline constexpr std::array kScatterFp32Tiles{tile(128, 192), tile(128, 128)};

// Bytes of each of the two buffers through which an SM stores a gathered tensor that is kept: what
// the mainloop's stages leave of its shared memory. keeping_epilogue.cuh computes them.
constexpr int keeping_buffer(Tile const& of) {
  if (of == tile(256, 160)) return 896;
  if (of == tile(128, 192)) return 4992;
  return 8192;
}

}  // namespace flux_inductor::sm90
