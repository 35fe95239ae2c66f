// Waiting for a signal without holding a core, and without end (rule R4).
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/epoch.h"
#include "cpu/segment.h"

namespace flux_inductor::cpu {

enum class Verdict {
  kArrived,
  kTimeout,      // the signal did not come in time
  kLost,         // the peer's process has ended, or has left the group, before it got that far
  kFailed,       // the peer reports that its call failed
  kMismatch,     // the peer runs another op, other shapes or another plan
  kCancelled,    // this rank's own call failed elsewhere
  kInterrupted,  // the user pressed Ctrl-C
};

// How a wait ended, and if badly, with which peer and what its signal showed.
struct Outcome {
  Verdict verdict = Verdict::kArrived;
  int peer = -1;
  Epoch expected = 0;
  Epoch seen = 0;
  std::string text;  // the peer's failure, or its descriptor

  bool ok() const { return verdict == Verdict::kArrived; }
};

// The ranks of a group as seen from one: their segments and their processes.
class Peers {
 public:
  // `segments` and `pids` by rank; the own entries are included. Throws std::system_error if a
  // process has ended already.
  Peers(int rank, std::vector<std::shared_ptr<Segment>> segments, const std::vector<int>& pids);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  int rank() const { return rank_; }
  int world() const { return static_cast<int>(segments_.size()); }
  Segment& own() const { return *segments_[rank_]; }
  Segment& of(int peer) const { return *segments_[peer]; }

  // Whether call `epoch` can still complete; if not, which peer is to blame. A peer that has
  // finished the call may leave: what it had to give is there.
  Outcome health(Epoch epoch) const;

  // Whether a peer reports that call `epoch` failed, even if all that this rank needs of it is
  // here.
  Outcome failure(Epoch epoch) const;

 private:
  bool ended(int peer) const;

  int rank_;
  std::vector<std::shared_ptr<Segment>> segments_;
  std::vector<int> pidfds_;
};

// Ends waits early.
struct Interruption {
  const std::atomic<bool>* cancelled = nullptr;
  std::function<bool()> requested;  // asked every 50 ms, if set
};

// Waits until `signal` reaches `epoch`. `peer` is the rank that raises it, named when it does not
// come.
//
// Spins for a few microseconds, in which most signals come; then yields, since the rank that is to
// raise it may need this very core; then sleeps. Peers' health is looked at every millisecond.
// Rejected: sleeping on a futex that the raiser wakes. Two and four ranks on two cores, idle and
// loaded, were no faster, since waking takes as long as a nap.
Outcome wait(const Signal& signal, Epoch epoch, int peer, const Peers& peers,
             std::chrono::nanoseconds limit, const Interruption& interruption);

}  // namespace flux_inductor::cpu
