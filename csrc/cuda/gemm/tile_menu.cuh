// The tiles of core/sm90.h as types, for which kernels are compiled.
#pragma once

#include <utility>

#include "core/sm90.h"
#include "cuda/gemm/kernel_traits.cuh"

namespace flux_inductor::cuda {

template <class... Configs>
struct Menu {};

template <auto const& tiles, size_t i>
using ConfigOf =
    TileConfig<tiles[i].m, tiles[i].n, tiles[i].cluster_m, tiles[i].cluster_n, tiles[i].pingpong>;

template <auto const& tiles, size_t... i>
Menu<ConfigOf<tiles, i>...> menu_of(std::index_sequence<i...>);

template <auto const& tiles>
using MenuOf = decltype(menu_of<tiles>(std::make_index_sequence<tiles.size()>{}));

using AllGatherMatmulMenu = MenuOf<sm90::kGatherTiles>;
using MatmulReduceScatterMenu = MenuOf<sm90::kScatterTiles>;
using MatmulReduceScatterFp32Menu = MenuOf<sm90::kScatterFp32Tiles>;

}  // namespace flux_inductor::cuda
