// CUDA errors as exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace flux_inductor::cuda {

inline void check_cuda(cudaError_t error, char const* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace flux_inductor::cuda
