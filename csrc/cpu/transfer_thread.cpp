#include "cpu/transfer_thread.h"

#include <signal.h>
#include <unistd.h>

#include <cassert>
#include <cstring>
#include <utility>

namespace flux_inductor::cpu {
namespace {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

void copy(std::uint8_t* target, std::int64_t target_pitch, const std::uint8_t* source,
          std::int64_t source_pitch, std::int64_t count, std::int64_t width) {
  if (target_pitch == width && source_pitch == width) {
    width *= count;
    count = 1;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(target + i * target_pitch, source + i * source_pitch,
                static_cast<std::size_t>(width));
  }
}

TransferThread::TransferThread() : process_(getpid()), gate_(std::make_unique<Gate>()) {
  // Signals such as Ctrl-C are the main thread's business.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread(&TransferThread::run, this);
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

void TransferThread::start(Job job) {
  {
    std::lock_guard<std::mutex> lock(gate_->mutex);
    assert(!pending_);
    job_ = std::move(job);
    pending_ = true;
    outcome_ = {};
    cancelled_.store(false, std::memory_order_relaxed);
    troubled_.store(false, std::memory_order_relaxed);
  }
  gate_->changed.notify_all();
}

Outcome TransferThread::join(const std::function<bool()>& on_idle) {
  std::unique_lock<std::mutex> lock(gate_->mutex);
  const auto ended = [this] { return !pending_; };
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

void TransferThread::run() {
  std::unique_lock<std::mutex> lock(gate_->mutex);
  while (true) {
    gate_->changed.wait(lock, [this] { return pending_ || stopping_; });
    if (!pending_) return;
    const Job job = std::move(job_);
    job_ = {};
    lock.unlock();
    Outcome outcome = carry_out(job);
    lock.lock();
    if (!outcome.ok()) troubled_.store(true, std::memory_order_release);
    outcome_ = std::move(outcome);
    pending_ = false;
    gate_->changed.notify_all();
  }
}

Outcome TransferThread::carry_out(const Job& job) {
  const Peers& peers = *job.peers;
  const int parity = static_cast<int>(job.epoch & 1);
  const bool push = job.transfers->push;
  moved_.clear();
  for (const Transfer& item : job.transfers->items) {
    Segment& remote = peers.of(item.peer);
    if (item.waits_for != Transfer::kNothing) {
      Segment& source = push ? peers.own() : remote;
      const int raiser = push ? peers.rank() : item.peer;
      Outcome outcome = wait(source.signal(parity, item.waits_for), job.epoch, raiser, peers,
                             job.limit, Interruption{&cancelled_, {}});
      if (!outcome.ok()) return outcome;
    }
    const std::int64_t start = job.record ? now_ns() : 0;
    std::uint8_t* local = job.local + item.local_offset;
    std::uint8_t* far = remote.buffer(parity) + item.remote_offset;
    if (push) {
      copy(far, item.remote_pitch, local, item.local_pitch, item.count, item.width);
    } else {
      copy(local, item.local_pitch, far, item.remote_pitch, item.count, item.width);
    }
    Segment& target = push ? remote : peers.own();
    target.signal(parity, item.raises).store(job.epoch, std::memory_order_release);
    if (job.record) moved_.push_back({item.owner, item.chunk, start, now_ns()});
  }
  return {};
}

}  // namespace flux_inductor::cpu
