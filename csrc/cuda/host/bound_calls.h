// Fused calls bound to their shapes: orders, chunks and copies are made here, once. What is left
// for each call is addresses (workspace.h).
#pragma once

#include <vector>

#include "cuda/all_gather/all_gather_matmul.h"
#include "cuda/reduce_scatter/matmul_reduce_scatter.h"

namespace flux_inductor::cuda {

// One call of all_gather_matmul: one launch for each weight.
class GatherCall {
 public:
  struct Launch {
    AllGatherMatmulKernel const* kernel;
    BoundGather bound;
  };

  // A kernel and a shape for each weight.
  GatherCall(std::vector<AllGatherMatmulKernel const*> const& kernels,
             std::vector<GatherShape> const& shapes);

  std::vector<Launch> const& launches() const { return launches_; }
  std::vector<Copy> const& copies() const { return copies_; }
  // The launch that stores the gathered tensor, where one is kept: the longest has most room for
  // it.
  size_t keeper() const { return keeper_; }
  int signals_per_shard() const { return launches_.front().bound.chunks.signals_per_shard(); }

 private:
  std::vector<Launch> launches_;
  std::vector<Copy> copies_;
  size_t keeper_;
};

// One call of matmul_reduce_scatter.
class ScatterCall {
 public:
  // `stores`: partials go straight into the peers' slots; otherwise the copy engine moves them.
  // The kernel was prepared on the device.
  ScatterCall(MatmulReduceScatterKernel const* kernel, ScatterShape const& shape, bool stores,
              int device);

  MatmulReduceScatterKernel const& kernel() const { return *kernel_; }
  bool stores() const { return stores_; }
  BoundScatter const& bound(bool stores) const { return stores ? stored_ : copied_; }
  std::vector<Copy> const& copies() const { return copies_; }
  int chunks_per_part() const { return copied_.chunks.per_part(); }
  int64_t part_bytes() const { return part_bytes_; }

 private:
  MatmulReduceScatterKernel const* kernel_;
  bool stores_;
  BoundScatter stored_, copied_;  // by either transport: a captured call may need the other one
  std::vector<Copy> copies_;
  int64_t part_bytes_;
};

}  // namespace flux_inductor::cuda
