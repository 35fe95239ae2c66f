#include "cpu/transfer_thread.h"

#include <signal.h>
#include <unistd.h>

#include <cassert>
#include <utility>

namespace flux_inductor::cpu {

TransferThread::TransferThread() : process_(getpid()), gate_(std::make_unique<Gate>()) {
  // Signals such as Ctrl-C are the main thread's business.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread(&TransferThread::serve, this);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

TransferThread::~TransferThread() {
  if (getpid() != process_) {  // a fork's child has this object but not the thread
    thread_.detach();
    gate_.release();
    return;
  }
  cancel();
  {
    std::lock_guard<std::mutex> lock(gate_->mutex);
    stopping_ = true;
  }
  gate_->changed.notify_all();
  thread_.join();
}

void TransferThread::start(std::shared_ptr<TransferRun> run) {
  {
    std::lock_guard<std::mutex> lock(gate_->mutex);
    assert(!run_);
    run_ = std::move(run);
    outcome_ = {};
    cancelled_.store(false, std::memory_order_relaxed);
    troubled_.store(false, std::memory_order_relaxed);
  }
  gate_->changed.notify_all();
}

Outcome TransferThread::join(const std::function<bool()>& on_idle) {
  std::unique_lock<std::mutex> lock(gate_->mutex);
  const auto ended = [this] { return run_ == nullptr; };
  bool interrupted = false;
  while (!gate_->changed.wait_for(lock, std::chrono::milliseconds(50), ended)) {
    if (!on_idle || interrupted) continue;
    lock.unlock();
    interrupted = on_idle();
    lock.lock();
    if (interrupted) cancel();
  }
  Outcome outcome = std::exchange(outcome_, {});
  if (interrupted) outcome = {Verdict::kInterrupted, -1, 0, 0, ""};
  return outcome;
}

void TransferThread::serve() {
  std::unique_lock<std::mutex> lock(gate_->mutex);
  while (true) {
    gate_->changed.wait(lock, [this] { return run_ != nullptr || stopping_; });
    if (run_ == nullptr) return;
    TransferRun& run = *run_;
    lock.unlock();
    Outcome outcome = carry_out(run);
    lock.lock();
    if (!outcome.ok()) troubled_.store(true, std::memory_order_release);
    outcome_ = std::move(outcome);
    run_.reset();
    gate_->changed.notify_all();
  }
}

Outcome TransferThread::carry_out(TransferRun& run) const {
  while (!run.done()) {
    Outcome outcome = run.await(Interruption{&cancelled_, {}});
    if (!outcome.ok()) return outcome;
    run.move();
  }
  return {};
}

}  // namespace flux_inductor::cpu
