// all_gather + matmul: the kernel put together, its launcher, and the tiles of a family.
#pragma once

#include <stdexcept>
#include <string>

#include "cuda/gemm/kernel_traits.cuh"  // before other headers of CuTe, which it configures

#include "cuda/all_gather/all_gather_matmul.h"
#include "cuda/all_gather/gated_mainloop.cuh"
#include "cuda/all_gather/keeping_epilogue.cuh"
#include "cuda/all_gather/tile_scheduler.cuh"
#include "cuda/gemm/tile_menu.cuh"

namespace flux_inductor::cuda {

template <class Config, ElementType type, WeightLayout layout>
struct AllGatherMatmulTraits {
  using Element = ElementOf<type>;
  // accumulator + bias; a null bias adds nothing
  using AddBias = cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<cutlass::plus, Element, float,
                                             cutlass::FloatRoundStyle::round_to_nearest>,
      cutlass::epilogue::fusion::Sm90AccFetch,
      cutlass::epilogue::fusion::Sm90RowBroadcast<0, typename Config::Shape, Element, float>>;
  using PlainEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, typename Config::Shape,
      typename Config::Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float, void,
      RowStride, 8, Element, RowStride, 8, typename Config::EpilogueSchedule,
      AddBias>::CollectiveOp;
  using PlainMainloop =
      Mainloop<Config, type, layout,
               cutlass::gemm::collective::StageCountAutoCarveout<
                   static_cast<int>(sizeof(typename PlainEpilogue::SharedStorage)) + 64>>;
  template <class Epilogue>
  using KernelWith = cutlass::gemm::kernel::GemmUniversal<
      cute::Shape<int, int, int, int>, GatedMainloop<PlainMainloop>, Epilogue, FixedTileScheduler>;
  // The buffers of what is kept get the shared memory that the mainloop's stages leave.
  static constexpr int kKeepingBuffer =
      keeping_buffer_bytes(kSharedMemory - KernelWith<PlainEpilogue>::SharedStorageSize);
  static_assert(kKeepingBuffer == sm90::keeping_buffer(Config::tile), "planning counts on it");
  using Epilogue = KeepingEpilogue<PlainEpilogue, kKeepingBuffer>;
  using Kernel = KernelWith<Epilogue>;
  static_assert(Kernel::SharedStorageSize <= kSharedMemory);

  static Gate gate(AllGatherMatmul const& p) {
    GatherShape const& shape = p.bound.shape;
    return {p.sync.signals, p.sync.epoch,   shape.world, shape.rank,
            shape.rows,     p.bound.chunks, p.sync.limit};
  }

  static Keep keep(AllGatherMatmul const& p) {
    constexpr int kBytes = sizeof(Element);
    GatherShape const& shape = p.bound.shape;
    if (p.operands.kept != nullptr && shape.own_row_stride != shape.k) {
      throw std::invalid_argument(
          "kept: the rows of the own shard must be contiguous, but their stride is " +
          std::to_string(shape.own_row_stride) + " at k = " + std::to_string(shape.k) +
          "; pass a contiguous copy of the shard");
    }
    return {static_cast<char*>(p.operands.kept),
            static_cast<char const*>(p.operands.gathered),
            static_cast<char const*>(p.operands.own_shard),
            shape.own_strip_stride * kBytes,
            shape.k * kBytes,
            ceil_div(shape.n, Config::tile.n),
            gate(p)};
  }

  static void launch(AllGatherMatmul const& p, cudaStream_t stream) {
    GatherShape const& shape = p.bound.shape;
    GatherOperands const& operands = p.operands;
    typename Kernel::Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    arguments.problem_shape = {shape.rows, shape.n, shape.k, shape.strips * shape.world};
    auto& mainloop = arguments.mainloop;
    // With one rank there is nothing to gather, and no buffer: any valid address does.
    mainloop.ptr_A =
        static_cast<Element const*>(shape.world > 1 ? operands.gathered : operands.own_shard);
    mainloop.dA = {shape.k, {}, int64_t(shape.rows) * shape.k};
    mainloop.ptr_B = static_cast<Element const*>(operands.weight);
    mainloop.dB = weight_stride<layout>(shape.weight_stride);
    mainloop.own_shard = static_cast<Element const*>(operands.own_shard);
    mainloop.own_stride = {shape.own_row_stride, {}, shape.own_strip_stride};
    mainloop.gate = gate(p);
    auto& epilogue = arguments.epilogue;
    epilogue.thread = {{}, {static_cast<Element const*>(operands.bias)}, {}};
    epilogue.ptr_D = static_cast<Element*>(operands.product);
    epilogue.dD = {shape.n, {}, int64_t(shape.rows) * shape.n};
    epilogue.keep = keep(p);
    epilogue.succession = p.sync.succession;
    arguments.scheduler.order = p.bound.order;
    arguments.hw_info.sm_count = shape.sms;
    arguments.hw_info.max_active_clusters = resident_clusters<Kernel>();
    auto params = Kernel::to_underlying_arguments(arguments, nullptr);
    launch_kernel<Kernel>(params, Kernel::get_grid_shape(params), stream);
  }

  static AllGatherMatmulKernel entry() {
    return {Config::tile, type, type, layout, &launch, &resident_clusters<Kernel>};
  }
};

template <ElementType element, WeightLayout layout, class... Configs>
std::vector<AllGatherMatmulKernel> all_gather_matmul_entries(Menu<Configs...>) {
  return {AllGatherMatmulTraits<Configs, element, layout>::entry()...};
}

template <ElementType element, WeightLayout layout>
std::vector<AllGatherMatmulKernel> all_gather_matmul_family() {
  return all_gather_matmul_entries<element, layout>(AllGatherMatmulMenu{});
}

}  // namespace flux_inductor::cuda
