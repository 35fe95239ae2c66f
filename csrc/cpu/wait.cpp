#include "cpu/wait.h"

#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace flux_inductor::cpu {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr int kSpins = 200;                    // about 5 us
constexpr auto kYielding = microseconds(200);  // then sleep
constexpr timespec kSleep{0, 20'000};          // nanoseconds; the kernel adds about 50 us
constexpr auto kHealthPeriod = milliseconds(1);
constexpr auto kInterruptPeriod = milliseconds(50);

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Peers::Peers(int rank, std::vector<std::shared_ptr<Segment>> segments, const std::vector<int>& pids)
    : rank_(rank), segments_(std::move(segments)), pidfds_(segments_.size(), -1) {
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank_) continue;
    pidfds_[peer] = static_cast<int>(syscall(SYS_pidfd_open, pids[peer], 0));
    if (pidfds_[peer] < 0) {
      const int error = errno;
      for (const int fd : pidfds_) {
        if (fd >= 0) close(fd);
      }
      throw std::system_error(error, std::generic_category(),
                              "watching process " + std::to_string(pids[peer]));
    }
  }
}

Peers::~Peers() {
  for (const int fd : pidfds_) {
    if (fd >= 0) close(fd);
  }
}

bool Peers::ended(int peer) const {
  pollfd watched{pidfds_[peer], POLLIN, 0};
  return poll(&watched, 1, 0) == 1;
}

Outcome Peers::failure(Epoch epoch) const {
  for (int peer = 0; peer < world(); ++peer) {
    const Header& header = of(peer).header();
    if (peer == rank_ || header.failed.load(std::memory_order_acquire) == 0) continue;
    const Epoch finished = header.finished.load(std::memory_order_acquire);
    if (!reached(finished, epoch)) {
      return {Verdict::kFailed, peer, epoch, finished, header.failure.get()};
    }
  }
  return {};
}

Outcome Peers::health(Epoch epoch) const {
  Outcome outcome = failure(epoch);
  if (!outcome.ok()) return outcome;
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank_) continue;
    const Header& header = of(peer).header();
    const Epoch finished = header.finished.load(std::memory_order_acquire);
    if (reached(finished, epoch)) continue;
    const bool left = header.gone.load(std::memory_order_acquire) != 0 || ended(peer);
    // It may have finished between the first look and its end.
    if (left && !reached(header.finished.load(std::memory_order_acquire), epoch)) {
      return {Verdict::kLost, peer, epoch, finished, ""};
    }
  }
  return {};
}

Outcome wait(const Signal& signal, Epoch epoch, int peer, const Peers& peers,
             std::chrono::nanoseconds limit, const Interruption& interruption) {
  const auto there = [&] { return reached(signal.load(std::memory_order_acquire), epoch); };
  for (int spin = 0; spin < kSpins; ++spin) {
    if (there()) return {};
    pause_briefly();
  }
  const auto start = Clock::now();
  auto next_health = start + kHealthPeriod;
  auto next_interrupt = start + kInterruptPeriod;
  while (!there()) {
    if (interruption.cancelled != nullptr &&
        interruption.cancelled->load(std::memory_order_relaxed)) {
      return {Verdict::kCancelled, peer, epoch, signal.load(), ""};
    }
    const auto now = Clock::now();
    if (now >= next_health) {
      Outcome outcome = peers.health(epoch);
      if (!outcome.ok() && !there()) return outcome;
      if (now - start > limit) return {Verdict::kTimeout, peer, epoch, signal.load(), ""};
      next_health = now + kHealthPeriod;
    }
    if (interruption.requested && now >= next_interrupt) {
      if (interruption.requested()) return {Verdict::kInterrupted, peer, epoch, signal.load(), ""};
      next_interrupt = now + kInterruptPeriod;
    }
    if (now - start < kYielding) {
      sched_yield();
    } else {
      nanosleep(&kSleep, nullptr);
    }
  }
  return {};
}

}  // namespace flux_inductor::cpu
