// What a call holds while it puts its work on the streams, and gives back also when it throws.
#pragma once

#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExt.h>

#include "cuda/host/launch_error.h"

namespace flux_inductor::cuda {

// The workspace's device is the current one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    changed_ = before_ != device;
    if (changed_) check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(DeviceGuard const&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// A named range for profilers.
class Range {
 public:
  explicit Range(char const* name) { nvtxRangePushA(name); }
  ~Range() { nvtxRangePop(); }
  Range(Range const&) = delete;
};

// The copy stream beside the caller's. It is joined also when something is thrown in between, since
// the caller frees what the copies read.
class Fork {
 public:
  Fork(cudaStream_t stream, cudaStream_t copies, cudaEvent_t forked, cudaEvent_t joined)
      : stream_(stream), copies_(copies), joined_(joined) {
    check_cuda(cudaEventRecord(forked, stream_), "cudaEventRecord");
    check_cuda(cudaStreamWaitEvent(copies_, forked, 0), "cudaStreamWaitEvent");
  }
  ~Fork() {
    if (open_) {
      cudaEventRecord(joined_, copies_);
      cudaStreamWaitEvent(stream_, joined_, 0);
    }
  }
  Fork(Fork const&) = delete;

  // A kernel on the caller's stream waits for the copies (succession.h).
  void leave_to_kernel() { open_ = false; }
  void join() {
    open_ = false;
    check_cuda(cudaEventRecord(joined_, copies_), "cudaEventRecord");
    check_cuda(cudaStreamWaitEvent(stream_, joined_, 0), "cudaStreamWaitEvent");
  }

 private:
  cudaStream_t stream_, copies_;
  cudaEvent_t joined_;
  bool open_ = true;
};

// A captured call that fails half-way leaves the words of the next one as they are. So that one
// must begin as the first of a graph does. (After an eager call that failed the group is dead.)
class Unfinished {
 public:
  Unfinished(bool captured, unsigned long long& capture)
      : capture_(captured ? &capture : nullptr) {}
  ~Unfinished() {
    if (capture_ != nullptr) *capture_ = 0;
  }
  Unfinished(Unfinished const&) = delete;
  void finish() { capture_ = nullptr; }

 private:
  unsigned long long* capture_;
};

}  // namespace flux_inductor::cuda
