// CUDA errors as exceptions. The runtime keeps the last error for whoever asks next, which would be
// another library's check behind a kernel of its own: so it is cleared once it has been thrown.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace flux_inductor::cuda {

inline void check_cuda(cudaError_t error, char const* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

inline void check_cuda(CUresult result, char const* what) {
  if (result != CUDA_SUCCESS)
    throw std::runtime_error(std::string(what) + ": CUresult " + std::to_string(result));
}

}  // namespace flux_inductor::cuda
