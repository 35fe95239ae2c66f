// The tiles each family is compiled for. Which of them a call uses is decided by the plan.
//
// Scatters have no pingpong tiles: that hides the end of a tile, which scatter_kernel.cuh makes
// short, at the price of smaller tiles. Measured, no shape was faster with them.
#pragma once

#include "cuda/gemm/kernel_traits.cuh"

namespace flux_inductor::cuda {

template <class... Configs>
struct Menu {};

// Large tiles need the fewest bytes for each operation, small ones fill the last wave; widths
// between powers of two suit the N of common layers.
using AllGatherMatmulMenu =
    Menu<TileConfig<256, 192, 2, 1>, TileConfig<128, 256, 2, 1>, TileConfig<256, 128, 2, 1>,
         TileConfig<128, 192, 2, 1>, TileConfig<256, 160, 2, 1>, TileConfig<128, 224, 2, 1>,
         TileConfig<128, 160, 2, 1>, TileConfig<128, 128, 2, 1, true>,
         TileConfig<64, 256, 2, 1, true>>;
using MatmulReduceScatterMenu =
    Menu<TileConfig<256, 192, 2, 1>, TileConfig<128, 256, 2, 1>, TileConfig<256, 128, 2, 1>,
         TileConfig<128, 192, 2, 1>, TileConfig<128, 128, 2, 1>, TileConfig<64, 256, 2, 1>>;
// Results in fp32: a tile takes twice the room, and stages of the mainloop go for it: large tiles
// would be left with three.
using MatmulReduceScatterFp32Menu = Menu<TileConfig<128, 192, 2, 1>, TileConfig<128, 128, 2, 1>>;

}  // namespace flux_inductor::cuda
