// Epochs count the fused calls of a group; a signal holds that of the call that raised it last.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace flux_inductor {

using Epoch = std::uint32_t;

// Whether a signal that shows `seen` says that call `expected` has got there (rule R5).
//
// At least, never equal: a fast peer may be one call ahead. And as a signed difference, so that the
// count may wrap around. Two ranks, 2 calls before the wrap: with plain >=, rank 0 would take rank
// 1's signal 0xffffffff of the last call for an arrival in call 0, and multiply what has not come.
FLUX_HOST_DEVICE inline bool reached(Epoch seen, Epoch expected) {
  return static_cast<std::int32_t>(seen - expected) >= 0;
}

// A signal that a call does not use keeps its old epoch, which half the count later would look like
// the future. So workspaces are made anew, with fresh signals, whenever the epoch passes a multiple
// of this.
constexpr Epoch kRenewal = Epoch{1} << 30;

}  // namespace flux_inductor
