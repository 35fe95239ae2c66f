// How long a kernel's waits may last, and what it writes when one runs into the limit (rule R4).
#pragma once

#include <cstdint>

namespace flux_inductor::cuda {

enum class Op : uint32_t { all_gather_matmul = 1, matmul_reduce_scatter = 2 };

// Lives in pinned host memory, so that the host can look at it without a synchronisation and also
// when the context is lost. The first wait that fails fills it, and then its kernel traps; so does
// every wait of the group that finds it filled.
struct ErrorRecord {
  uint32_t state;     // 0: no error; 1: being written; 2: complete
  uint32_t op;        // Op
  uint32_t source;    // rank whose chunk did not arrive
  uint32_t chunk;     // which of the part's signals: the chunk, or a slice of the last one
  uint64_t expected;  // epochs
  uint64_t seen;
};

// Every device function of a wait needs these; one copy per kernel, passed by value in its
// parameters.
struct WaitLimit {
  uint64_t nanoseconds;
  ErrorRecord* record;
  Op op;
};

}  // namespace flux_inductor::cuda
