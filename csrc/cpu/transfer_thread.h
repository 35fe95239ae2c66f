// The thread that moves chunks while its rank multiplies.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "cpu/transfer_run.h"
#include "cpu/wait.h"

namespace flux_inductor::cpu {

class TransferThread {
 public:
  TransferThread();
  ~TransferThread();
  TransferThread(const TransferThread&) = delete;
  TransferThread& operator=(const TransferThread&) = delete;

  // Begins a run. The one before must have been joined.
  void start(std::shared_ptr<TransferRun> run);

  // Waits until the run has ended, and tells how; at once if none was started. `on_idle` is called
  // every 50 ms meanwhile; when it returns true, the run is cancelled.
  Outcome join(const std::function<bool()>& on_idle);

  // Ends the run's waits. join() is still needed.
  void cancel() { cancelled_.store(true, std::memory_order_relaxed); }

  // Set when the run has ended badly, so that its rank does not wait for what will not come.
  const std::atomic<bool>& troubled() const { return troubled_; }

 private:
  void serve();
  Outcome carry_out(TransferRun& run) const;

  // On the heap, since a fork's child must leave it alone: the thread that waits on it is not in
  // the child, and destroying a condition variable waits for its waiters.
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
  };

  const pid_t process_;
  std::unique_ptr<Gate> gate_;
  Outcome outcome_;
  std::shared_ptr<TransferRun> run_;  // until it has ended
  bool stopping_ = false;
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> troubled_{false};
  std::thread thread_;
};

}  // namespace flux_inductor::cpu
