// What the ranks of a group count their calls with on CUDA (rule R5).
#pragma once

#include <cstdint>

namespace flux_inductor::cuda {

// Epochs count the fused calls of a workspace, eager ones and replays alike. A signal holds that of
// the call that raised it last; it says that call i has got there if it is at least i. At least,
// never equal: a fast peer may be one call ahead. 64 bits never wrap around, so that signals that
// no call has used for long cannot look like the future.
using Epoch = uint64_t;

}  // namespace flux_inductor::cuda
