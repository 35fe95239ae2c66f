#include "cuda/host/bound_calls.h"

#include <algorithm>
#include <stdexcept>

#include "cuda/host/call_scopes.h"

namespace flux_inductor::cuda {
namespace {

template <class Problem>
int resident_on(int device, KernelEntry<Problem> const& kernel) {
  DeviceGuard guard(device);
  return kernel.prepare();
}

}  // namespace

GatherCall::GatherCall(std::vector<AllGatherMatmulKernel const*> const& kernels,
                       std::vector<GatherShape> const& shapes) {
  if (kernels.empty() || kernels.size() != shapes.size())
    throw std::invalid_argument("GatherCall: one kernel and one shape for each weight");
  for (size_t i = 0; i < kernels.size(); ++i)
    launches_.push_back({kernels[i], {shapes[i], kernels[i]->tile}});
  copies_ = shard_copies(shapes.front());
  auto narrower = [](Launch const& a, Launch const& b) {
    return a.bound.shape.n < b.bound.shape.n;
  };
  keeper_ = std::max_element(launches_.begin(), launches_.end(), narrower) - launches_.begin();
}

ScatterCall::ScatterCall(MatmulReduceScatterKernel const* kernel, ScatterShape const& shape,
                         bool stores, int device)
    : kernel_(kernel),
      stores_(stores),
      stored_(shape, kernel->tile, true, resident_on(device, *kernel)),
      copied_(shape, kernel->tile, false, resident_on(device, *kernel)),
      copies_(partial_copies(copied_, kernel->result)),
      part_bytes_(int64_t(shape.strips) * shape.rows * shape.n * bytes_of(kernel->result)) {}

}  // namespace flux_inductor::cuda
