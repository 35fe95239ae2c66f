// What one rank has of a group's shared memory, and the calls it makes in it.
//
// Two buffers in turn (rule R6). Call i writes into the buffers of parity i: those of the peers
// when it pushes, its own when peers pull from it. Before it ends, every call has seen that each
// peer has begun it (`confirm`), and a rank begins call i - 1 only after it has ended call i - 2.
// So when this rank is in call i it has ended i - 1, hence every peer has begun i - 1, hence ended
// i - 2, the last call that used the same buffers: they are free without any hand-shake. Both ops
// share the buffers, and the argument holds whatever their order. With one buffer, two ranks could
// do this: rank 0 ends call 0 and begins call 1, pushing over the chunk of call 0 that rank 1,
// delayed, is still multiplying.
//
// Two sets of signals in turn, for the same reason: where a word's place means one chunk in call i
// and another in call i + 1. With one set, three ranks could do this: call 0 has one chunk a shard,
// call 1 two. Rank 1 ends call 0 and raises rank 0's words 2 and 3 for the chunks of call 1; rank
// 0, still in call 0, waits in word 2 for rank 2's chunk, sees an epoch that is large enough, and
// multiplies what has not come.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cpu/transfer_run.h"
#include "cpu/transfer_thread.h"
#include "cpu/transfers.h"
#include "cpu/wait.h"

namespace flux_inductor::cpu {

class Workspace {
 public:
  // `epoch` is the last call that ended in the workspace before this one. `on_idle` is called every
  // 50 ms while the caller waits; it returns true to give up.
  Workspace(std::shared_ptr<Peers> peers, std::shared_ptr<TransferThread> thread, Epoch epoch,
            std::int64_t inline_bytes, std::function<bool()> on_idle);

  Epoch epoch() const { return epoch_; }
  int parity() const { return static_cast<int>(epoch_ & 1); }
  const Peers& peers() const { return *peers_; }
  const std::vector<Moved>& moved() const { return run_->moved(); }

  // Begins the next call and tells the peers what it is. Each of its waits may take `limit`.
  void begin(const std::string& descriptor, std::chrono::nanoseconds limit);

  // Waits until `peer` has begun this call too, and compares descriptors (rule R7).
  Outcome confirm(int peer);
  Outcome confirm_all();

  // Begins the transfers. The transfer thread makes them, unless they are of `inline_bytes` at
  // most: then waking it would take longer than copying, and the caller makes each as soon as it
  // can in raise(), wait() and end(). `local` is the address that their local offsets count from;
  // it stays valid until the call has ended.
  void start(std::shared_ptr<const Transfers> transfers, std::uint8_t* local, bool record);

  // Raises an own signal: bytes are ready for the transfer that waits for it.
  void raise(int signal);

  // Waits for a transfer of bytes from `peer` to raise an own signal; the acquire makes them
  // visible.
  Outcome wait(int signal, int peer);

  // Waits for the own transfers, and until every peer has begun this call; then the call has ended,
  // unless a peer reports that it failed there.
  Outcome end();

  // Gives the call up and tells the peers why. No transfer runs after it.
  void fail(const std::string& why);

  // Tells the peers that no call will follow.
  void leave();

 private:
  Outcome wait_for(const Signal& signal, int peer);
  Outcome explain(Outcome outcome) const;
  void move_what_is_ready();
  Outcome move_until(const Signal* arrived);
  Outcome compare(int peer) const;

  std::shared_ptr<Peers> peers_;
  std::shared_ptr<TransferThread> thread_;
  std::chrono::nanoseconds limit_{};
  Epoch epoch_;
  std::int64_t inline_bytes_;
  std::function<bool()> on_idle_;
  std::string descriptor_;
  std::vector<bool> confirmed_;
  std::shared_ptr<TransferRun> run_;
  bool inline_ = false;  // the caller makes the transfers of this call
};

}  // namespace flux_inductor::cpu
