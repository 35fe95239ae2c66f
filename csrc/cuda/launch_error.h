// CUDA errors as exceptions.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace flux_inductor::cuda {

inline void check_cuda(cudaError_t error, char const* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

inline void check_cuda(CUresult result, char const* what) {
  if (result != CUDA_SUCCESS)
    throw std::runtime_error(std::string(what) + ": CUresult " + std::to_string(result));
}

}  // namespace flux_inductor::cuda
