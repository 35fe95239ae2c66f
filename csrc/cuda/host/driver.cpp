// The functions of the CUDA driver that the core calls, under their own names, so that whoever
// calls them (CuTe does, for TMA descriptors) needs no detour.
//
// They are found at run time, once: linked to libcuda, the module would not load without a driver,
// and CuTe's own search at every call costs several times what it is for.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/host/launch_error.h"

namespace {

template <class Function>
Function* find(char const* name, Function*) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found{};
  flux_inductor::cuda::check_cuda(
      cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &found), name);
  if (address == nullptr) flux_inductor::cuda::check_cuda(cudaErrorNotSupported, name);
  return reinterpret_cast<Function*>(address);
}

}  // namespace

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* address, cuuint64_t const* sizes, cuuint64_t const* strides,
                                cuuint32_t const* box, cuuint32_t const* steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  static auto* const function = find("cuTensorMapEncodeTiled", &cuTensorMapEncodeTiled);
  return function(map, type, rank, address, sizes, strides, box, steps, interleave, swizzle,
                  promotion, fill);
}

CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value,
                             unsigned flags) {
  static auto* const function = find("cuStreamWaitValue32", &cuStreamWaitValue32);
  return function(stream, address, value, flags);
}
