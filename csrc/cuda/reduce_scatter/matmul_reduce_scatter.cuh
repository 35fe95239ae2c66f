// matmul + reduce_scatter: the kernel put together, its launcher, and the tiles of a family.
#pragma once

#include "cuda/gemm/kernel_traits.cuh"  // before other headers of CuTe, which it configures

#include "cuda/gemm/tile_menu.cuh"
#include "cuda/reduce_scatter/matmul_reduce_scatter.h"
#include "cuda/reduce_scatter/scatter_kernel.cuh"

namespace flux_inductor::cuda {

// Make<stages>, with as many stages as fit.
template <template <int> class Make, int stages = 8, bool fits = Make<stages>::kFits>
struct Deepest : Deepest<Make, stages - 1> {};
template <template <int> class Make, int stages>
struct Deepest<Make, stages, true> {
  using Kernel = Make<stages>;
};

template <class Config, ElementType type, WeightLayout layout, ElementType result>
struct MatmulReduceScatterTraits {
  using Element = ElementOf<type>;
  template <int stages>
  using KernelWith =
      ScatterKernel<Config, result,
                    Mainloop<Config, type, layout, cutlass::gemm::collective::StageCount<stages>>>;
  using Kernel = typename Deepest<KernelWith>::Kernel;
  static_assert(Kernel::SharedStorageSize <= kSharedMemory);

  static void launch(MatmulReduceScatter const& p, cudaStream_t stream) {
    typename Kernel::Mainloop::Arguments operands{};
    ScatterShape const& shape = p.bound.shape;
    operands.ptr_A = static_cast<Element const*>(p.operands.x);
    operands.dA = {shape.x_row_stride, {}, shape.rows * shape.x_row_stride};
    operands.ptr_B = static_cast<Element const*>(p.operands.weight);
    operands.dB = weight_stride<layout>(shape.weight_stride);
    typename Kernel::Params params{};
    params.shape = {shape.rows, shape.n, shape.k, shape.strips * shape.world};
    params.mainloop = Kernel::Mainloop::to_underlying_arguments(params.shape, operands, nullptr);
    params.scale = shape.scale;
    params.bias = static_cast<ElementOf<result> const*>(p.operands.bias);
    params.output = output(p);
    params.tiles = {p.bound.claims, p.sync.claims};
    TileOrder const& order = p.bound.parts;
    dim3 grid(order.cluster_m(), order.cluster_n() * p.bound.clusters, 1);
    launch_kernel<Kernel>(params, grid, stream);
  }

  static ScatterOutput::Params output(MatmulReduceScatter const& p) {
    ScatterShape const& shape = p.bound.shape;
    ScatterOutput::Params output{};
    output.order = p.bound.parts;
    output.chunks = p.bound.chunks;
    output.rank = shape.rank;
    output.counters = p.sync.counters;
    output.arrived = p.sync.arrived;
    output.epoch = p.sync.epoch;
    output.succession = p.sync.succession;
    output.limit = p.sync.limit;
    auto map = [&](void const* address, int blocks) {
      return unit_map<Config, result>(address, shape.n, shape.rows, blocks);
    };
    for (int i = 0; i < shape.world; ++i) {
      output.delivered[i] = p.sync.delivered[i];
      output.parts[i] = map(p.operands.parts[i], shape.strips);
      if (i != shape.rank) output.partials[i] = map(p.operands.partials[i], shape.strips);
    }
    output.has_addend = p.operands.addend != nullptr;
    if (output.has_addend) output.addend = map(p.operands.addend, shape.strips * shape.world);
    return output;
  }

  static MatmulReduceScatterKernel entry() {
    return {Config::tile, type, result, layout, &launch, &resident_clusters<Kernel>};
  }
};

template <ElementType element, WeightLayout layout, ElementType result, class... Configs>
std::vector<MatmulReduceScatterKernel> matmul_reduce_scatter_entries(Menu<Configs...>) {
  return {MatmulReduceScatterTraits<Configs, element, layout, result>::entry()...};
}

template <ElementType element, WeightLayout layout, ElementType result>
std::vector<MatmulReduceScatterKernel> matmul_reduce_scatter_family() {
  using Tiles = std::conditional_t<result == ElementType::fp32, MatmulReduceScatterFp32Menu,
                                   MatmulReduceScatterMenu>;
  return matmul_reduce_scatter_entries<element, layout, result>(Tiles{});
}

}  // namespace flux_inductor::cuda
