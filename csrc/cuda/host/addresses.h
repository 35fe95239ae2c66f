// Addresses and streams, which Python has as integers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace flux_inductor::cuda {

using Address = std::uintptr_t;
using Addresses = std::vector<Address>;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

inline cudaStream_t stream_at(Address stream) { return pointer<CUstream_st>(stream); }

}  // namespace flux_inductor::cuda
