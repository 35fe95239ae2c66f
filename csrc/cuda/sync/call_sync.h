// What every launch of a call is told about its place among the calls.
#pragma once

#include "cuda/sync/epoch.h"
#include "cuda/sync/error_record.h"
#include "cuda/sync/succession.h"

namespace flux_inductor::cuda {

struct CallSync {
  Epoch const* epoch;     // device memory; the value that this call's signals reach
  Succession succession;  // of the last launch; empty for the others
  WaitLimit limit;
};

}  // namespace flux_inductor::cuda
