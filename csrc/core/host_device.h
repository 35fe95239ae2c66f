// Functions that both the host and CUDA kernels call; an ordinary compiler need not know about it.
#pragma once

#if defined(__CUDACC__)
#define FLUX_HOST_DEVICE __host__ __device__
#else
#define FLUX_HOST_DEVICE
#endif
