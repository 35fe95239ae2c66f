// What the kernels of both ops have in common: element types, strides, tile configurations, and the
// launch.
#pragma once

#include <array>
#include <atomic>

// Without it, CuTe multiplies tiles of 160 or 224 columns in steps of 32.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
// Without it, CUTLASS looks up the driver's function for every TMA descriptor; see driver.cpp.
#define CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL
#include "core/gather_chunks.h"
#include "cuda/gemm/kernel_registry.h"
#include "cuda/host/launch_error.h"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

namespace flux_inductor::cuda {

// TileM x TileN x 64 per thread block; clusters of ClusterM x ClusterN blocks share loads by
// multicast. Cooperative: two warpgroups halve one tile (one has a tile of 64 rows). Pingpong: each
// has its own, one multiplies while the other stores.
template <int TileM, int TileN, int ClusterM, int ClusterN, bool Pingpong = false>
struct TileConfig {
  static constexpr Tile tile{TileM, TileN, GatherChunks::kStepDepth, ClusterM, ClusterN, Pingpong};
  using Shape = cute::Shape<cute::Int<TileM>, cute::Int<TileN>, cute::_64>;
  using Cluster = cute::Shape<cute::Int<ClusterM>, cute::Int<ClusterN>, cute::_1>;
  using KernelSchedule =
      std::conditional_t<Pingpong, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                         std::conditional_t<TileM == 64, cutlass::gemm::KernelTmaWarpSpecialized,
                                            cutlass::gemm::KernelTmaWarpSpecializedCooperative>>;
  using EpilogueSchedule = std::conditional_t<Pingpong, cutlass::epilogue::TmaWarpSpecialized,
                                              cutlass::epilogue::TmaWarpSpecializedCooperative>;
};

template <ElementType type>
using ElementOf = std::conditional_t<
    type == ElementType::fp32, float,
    std::conditional_t<type == ElementType::bf16, cutlass::bfloat16_t, cutlass::half_t>>;

// [M, K, L] and [M, N, L], rows contiguous. L runs over strips and ranks.
using RowStride = cute::Stride<int64_t, cute::_1, int64_t>;
// [N, K, L] with the same weight for every L: K contiguous (x @ w.t() of a weight [N, K]) or N
// contiguous (x @ w).
template <WeightLayout layout>
using WeightStride =
    std::conditional_t<layout == WeightLayout::k_major, cute::Stride<int64_t, cute::_1, cute::_0>,
                       cute::Stride<cute::_1, int64_t, cute::_0>>;

template <WeightLayout layout>
WeightStride<layout> weight_stride(int64_t leading) {
  if constexpr (layout == WeightLayout::k_major) {
    return cute::make_stride(leading, cute::_1{}, cute::_0{});
  } else {
    return cute::make_stride(cute::_1{}, leading, cute::_0{});
  }
}

// Stages: CUTLASS's StageCount or StageCountAutoCarveout.
template <class Config, ElementType type, WeightLayout layout, class Stages>
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, ElementOf<type>, RowStride, 8,
    ElementOf<type>, WeightStride<layout>, 8, float, typename Config::Shape,
    typename Config::Cluster, Stages, typename Config::KernelSchedule>::CollectiveOp;

inline constexpr int kSharedMemory = cutlass::gemm::collective::detail::sm90_smem_capacity_bytes;

// How every grid of a kernel is launched, but for its size and stream.
template <class Kernel>
struct LaunchConfig : cudaLaunchConfig_t {
  LaunchConfig() : cudaLaunchConfig_t{} {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {cute::size<0>(typename Kernel::ClusterShape{}),
                              cute::size<1>(typename Kernel::ClusterShape{}), 1};
    blockDim = Kernel::get_block_shape();
    dynamicSmemBytes = Kernel::SharedStorageSize;
    attrs = &cluster;
    numAttrs = 1;
  }
  LaunchConfig(LaunchConfig const&) = delete;

  cudaLaunchAttribute cluster{};
};

// Loads the kernel and lets it use its shared memory. Must run before any kernel of the group waits
// for signals: a first load beside a spinning kernel can wedge the context (rule R3). Returns how
// many clusters are resident at once.
template <class Kernel>
int prepare_kernel() {
  auto* function = cutlass::device_kernel<Kernel>;
  check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Kernel::SharedStorageSize),
             "cudaFuncSetAttribute");
  LaunchConfig<Kernel> config;
  config.gridDim = {config.cluster.val.clusterDim.x, config.cluster.val.clusterDim.y, 1};
  int clusters = 0;
  check_cuda(cudaOccupancyMaxActiveClusters(&clusters, function, &config),
             "cudaOccupancyMaxActiveClusters");
  return clusters;
}

// prepare_kernel() once per device and process; later calls read the remembered answer.
template <class Kernel>
int resident_clusters() {
  constexpr int kMaxDevices = 64;
  static std::array<std::atomic<int>, kMaxDevices> known{};
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  int clusters = known[device].load(std::memory_order_acquire);
  if (clusters == 0)
    known[device].store(clusters = prepare_kernel<Kernel>(), std::memory_order_release);
  return clusters;
}

// CUTLASS's own launcher (GemmUniversalAdapter::run) sets attributes of the kernel every time. A
// programmatic launch, beside the end of the kernel before, would save 1 us at most, and nothing
// where the copy stream forks off between the two.
template <class Kernel>
void launch_kernel(typename Kernel::Params const& params, dim3 grid, cudaStream_t stream) {
  LaunchConfig<Kernel> config;
  config.gridDim = grid;
  config.stream = stream;
  void* parameters[] = {const_cast<typename Kernel::Params*>(&params)};
  auto* function = reinterpret_cast<void const*>(cutlass::device_kernel<Kernel>);
  check_cuda(cudaLaunchKernelExC(&config, function, parameters), "launch of a fused kernel");
}

}  // namespace flux_inductor::cuda
