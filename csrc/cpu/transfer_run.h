// The transfers of one call on their way, one after the other.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
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

// Used by one thread at a time.
class TransferRun {
 public:
  // `local` is the address that local offsets count from. It stays valid until the run is done or
  // given up. `limit` is of one wait.
  TransferRun(std::shared_ptr<const Peers> peers, std::shared_ptr<const Transfers> transfers,
              std::uint8_t* local, Epoch epoch, std::chrono::nanoseconds limit, bool record);

  bool done() const { return next_ == transfers_->items.size(); }

  // Whether the next transfer's bytes are there.
  bool ready() const;

  // Waits for them.
  Outcome await(const Interruption& interruption) const;

  // Makes the next transfer: copies, and raises its signal.
  void move();

  // What was moved so far, if it was to be recorded.
  const std::vector<Moved>& moved() const { return moved_; }

 private:
  const Transfer& next() const { return transfers_->items[next_]; }
  const Signal& source() const;

  std::shared_ptr<const Peers> peers_;
  std::shared_ptr<const Transfers> transfers_;
  std::uint8_t* local_;
  Epoch epoch_;
  std::chrono::nanoseconds limit_;
  bool record_;
  std::size_t next_ = 0;
  std::vector<Moved> moved_;
};

}  // namespace flux_inductor::cpu
