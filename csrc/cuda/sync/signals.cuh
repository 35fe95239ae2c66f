// Signals between ranks as the kernels see them: a bounded wait, and the raising of counters and
// signals.
#pragma once

#include <cstdint>

#include "cuda/sync/epoch.h"
#include "cuda/sync/error_record.h"

namespace flux_inductor::cuda {

__device__ __forceinline__ uint32_t load_acquire_system(uint32_t const* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ Epoch load_acquire_system(Epoch const* address) {
  Epoch value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_system(Epoch* address, Epoch value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void add_release_system(uint32_t* address, uint32_t value) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Among the threads of one GPU. Returns what was there before.
__device__ __forceinline__ uint32_t add_acquire_release_device(uint32_t* address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}

// Among the threads of one block; addresses in its shared memory.
__device__ __forceinline__ uint32_t load_acquire_block(uint32_t address) {
  uint32_t value;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ void add_release_block(uint32_t address, uint32_t value) {
  asm volatile("red.release.cta.shared::cta.add.u32 [%0], %1;" ::"r"(address), "r"(value)
               : "memory");
}

// Orders the generic proxy's accesses (a signal just acquired) with those of the async proxy (the
// TMA that follows).
__device__ __forceinline__ void fence_generic_to_async() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Waits until all groups of bulk stores that this thread has committed, but for the latest ones,
// are complete and visible. Not the .read form: that one only says that shared memory may be
// reused.
template <int latest = 0>
__device__ __forceinline__ void wait_for_own_bulk_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(latest) : "memory");
}

__device__ __forceinline__ uint64_t global_nanoseconds() {
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}

// A wait has failed, this one or another one of the group: the kernel traps, so that nothing queued
// behind it reads what it would have stored (rule R4). The context is lost by that.
//
// Not before the record is complete, also where another thread writes it: a trap stops all of them.
__device__ inline void end_failed_wait(WaitLimit const& limit, uint32_t source, uint32_t chunk,
                                       Epoch expected, Epoch seen) {
  ErrorRecord* record = limit.record;
  if (atomicCAS_system(&record->state, 0u, 1u) == 0u) {
    record->op = static_cast<uint32_t>(limit.op);
    record->source = source;
    record->chunk = chunk;
    record->expected = expected;
    record->seen = seen;
    __threadfence_system();
    atomicExch_system(&record->state, 2u);
    __threadfence_system();
  }
  while (load_acquire_system(&record->state) != 2u) __nanosleep(1000);
  __trap();
}

// The rest of the wait, when the signal was not there at the first look. Returns when it is; traps
// when the limit has passed or another wait of the group has failed.
//
// The record is in host memory and must be looked at seldom: read at the pace of the signal by
// every SM, it keeps the copy engine from its work, which then takes a hundred times
// longer.
__device__ __forceinline__ void wait_slowly(Epoch const* signal, Epoch expected,
                                            WaitLimit const& limit, uint32_t source,
                                            uint32_t chunk) {
  constexpr uint64_t kNanosecondsBetweenLooks = 1000000;
  uint64_t start = global_nanoseconds();
  uint64_t look = start + kNanosecondsBetweenLooks;
  Epoch seen;
  while ((seen = load_acquire_system(signal)) < expected) {
    __nanosleep(50);
    uint64_t now = global_nanoseconds();
    if (now < look) continue;
    look = now + kNanosecondsBetweenLooks;
    bool late = now - start > limit.nanoseconds;
    if (late || load_acquire_system(&limit.record->state) != 0u)
      end_failed_wait(limit, source, chunk, expected, seen);
  }
}

// One thread waits for a signal to reach `expected`; what its sender wrote before it is then
// visible to the thread.
__device__ __forceinline__ void wait_for_signal(Epoch const* signal, Epoch expected,
                                                WaitLimit const& limit, uint32_t source,
                                                uint32_t chunk) {
  if (load_acquire_system(signal) < expected) wait_slowly(signal, expected, limit, source, chunk);
}

// A whole warp waits, one lane looks. What the sender wrote is then visible to TMA operations of
// the warp, too, that it starts after fence_generic_to_async().
__device__ __forceinline__ void warp_waits_for_signal(Epoch const* signal, Epoch expected,
                                                      WaitLimit const& limit, uint32_t source,
                                                      uint32_t chunk) {
  if (threadIdx.x % 32 == 0) wait_for_signal(signal, expected, limit, source, chunk);
  __syncwarp();
}

}  // namespace flux_inductor::cuda
