#include "cpu/transfer_run.h"

#include <cstring>
#include <utility>

namespace flux_inductor::cpu {
namespace {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

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

}  // namespace

TransferRun::TransferRun(std::shared_ptr<const Peers> peers,
                         std::shared_ptr<const Transfers> transfers, std::uint8_t* local,
                         Epoch epoch, std::chrono::nanoseconds limit, bool record)
    : peers_(std::move(peers)),
      transfers_(std::move(transfers)),
      local_(local),
      epoch_(epoch),
      limit_(limit),
      record_(record) {}

const Signal& TransferRun::source() const {
  const Segment& segment = transfers_->push ? peers_->own() : peers_->of(next().peer);
  return segment.signal(epoch_ & 1, next().waits_for);
}

bool TransferRun::ready() const {
  return next().waits_for == Transfer::kNothing ||
         reached(source().load(std::memory_order_acquire), epoch_);
}

Outcome TransferRun::await(const Interruption& interruption) const {
  if (next().waits_for == Transfer::kNothing) return {};
  const int raiser = transfers_->push ? peers_->rank() : next().peer;
  return wait(source(), epoch_, raiser, *peers_, limit_, interruption);
}

void TransferRun::move() {
  const Transfer& item = next();
  const int parity = epoch_ & 1;
  Segment& remote = peers_->of(item.peer);
  const std::int64_t start = record_ ? now_ns() : 0;
  std::uint8_t* near = local_ + item.local_offset;
  std::uint8_t* far = remote.buffer(parity) + item.remote_offset;
  if (transfers_->push) {
    copy(far, item.remote_pitch, near, item.local_pitch, item.count, item.width);
  } else {
    copy(near, item.local_pitch, far, item.remote_pitch, item.count, item.width);
  }
  Segment& target = transfers_->push ? remote : peers_->own();
  target.signal(parity, item.raises).store(epoch_, std::memory_order_release);
  if (record_) moved_.push_back({item.owner, item.chunk, start, now_ns()});
  ++next_;
}

}  // namespace flux_inductor::cpu
