// The thread that moves chunks while its rank multiplies.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/transfers.h"
#include "cpu/wait.h"

namespace flux_inductor::cpu {

// When one transfer was made, in nanoseconds of CLOCK_MONOTONIC.
struct Moved {
  int owner;
  int chunk;
  std::int64_t start_ns;
  std::int64_t stop_ns;
};

class TransferThread {
 public:
  TransferThread();
  ~TransferThread();
  TransferThread(const TransferThread&) = delete;
  TransferThread& operator=(const TransferThread&) = delete;

  struct Job {
    std::shared_ptr<const Peers> peers;
    std::shared_ptr<const Transfers> transfers;
    std::uint8_t* local = nullptr;
    Epoch epoch = 0;
    std::chrono::nanoseconds limit{};
    bool record = false;
  };

  // Begins a job. The one before must have been joined.
  void start(Job job);

  // Waits until the job has ended, and tells how; at once if none was started. `on_idle` is called
  // every 50 ms meanwhile; when it returns true, the job is cancelled.
  Outcome join(const std::function<bool()>& on_idle);

  // Ends the job's waits. join() is still needed.
  void cancel() { cancelled_.store(true, std::memory_order_relaxed); }

  // Set when the job has ended badly, so that its rank does not wait for what will not come.
  const std::atomic<bool>& troubled() const { return troubled_; }

  // The transfers of the last job, if it was to record them.
  const std::vector<Moved>& moved() const { return moved_; }

 private:
  void run();
  Outcome carry_out(const Job& job);

  // On the heap, since a fork's child must leave it alone: the thread that waits on it is not in
  // the child, and destroying a condition variable waits for its waiters.
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
  };

  const pid_t process_;
  std::unique_ptr<Gate> gate_;
  Job job_;
  Outcome outcome_;
  bool pending_ = false;  // a job is waiting or being carried out
  bool stopping_ = false;
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> troubled_{false};
  std::vector<Moved> moved_;
  std::thread thread_;
};

}  // namespace flux_inductor::cpu
