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
    operands.ptr_A = static_cast<Element const*>(p.x);
    operands.dA = {p.x_row_stride, {}, p.rows * p.x_row_stride};
    operands.ptr_B = static_cast<Element const*>(p.weight);
    operands.dB = weight_stride<layout>(p.weight_stride);
    typename Kernel::Params params{};
    params.shape = {p.rows, p.n, p.k, p.strips * p.world};
    params.mainloop = Kernel::Mainloop::to_underlying_arguments(params.shape, operands, nullptr);
    params.scale = p.scale;
    params.bias = static_cast<ElementOf<result> const*>(p.bias);
    params.output = output(p);
    TileOrder const& order = params.output.order;
    int clusters = order.clusters_at_work(p.sms, resident_clusters<Kernel>());
    TileOrder claims = p.schedule(Config::tile).claims(order, params.output.chunks, clusters);
    params.tiles = {claims, p.claims};
    dim3 grid(order.cluster_m(), order.cluster_n() * clusters, 1);
    launch_kernel<Kernel>(params, grid, stream);
  }

  static ScatterOutput::Params output(MatmulReduceScatter const& p) {
    ScatterOutput::Params output{};
    ScatterSchedule schedule = p.schedule(Config::tile);
    output.order = schedule.parts();
    output.chunks = schedule.chunks(output.order);
    output.rank = p.rank;
    output.counters = p.counters;
    output.arrived = p.arrived;
    output.epoch = p.epoch;
    output.succession = p.succession;
    output.limit = {p.wait_limit_ns, p.errors, Op::matmul_reduce_scatter};
    for (int i = 0; i < p.world; ++i) {
      output.delivered[i] = p.delivered[i];
      output.parts[i] = unit_map<Config, result>(p.parts[i], p.n, p.rows, p.strips);
      if (i != p.rank)
        output.partials[i] = unit_map<Config, result>(p.partials[i], p.n, p.rows, p.strips);
    }
    output.has_addend = p.addend != nullptr;
    if (output.has_addend)
      output.addend = unit_map<Config, result>(p.addend, p.n, p.rows, p.strips * p.world);
    return output;
  }

  static MatmulReduceScatterKernel entry() {
    return {Config::tile,
            type,
            result,
            layout,
            Kernel::SharedStorageSize,
            Kernel::kStages,
            &launch,
            &resident_clusters<Kernel>};
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
