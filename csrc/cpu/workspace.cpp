#include "cpu/workspace.h"

#include <utility>

namespace flux_inductor::cpu {

Workspace::Workspace(std::shared_ptr<Peers> peers, std::shared_ptr<TransferThread> thread,
                     std::chrono::nanoseconds limit, Epoch epoch, std::function<bool()> on_idle)
    : peers_(std::move(peers)),
      thread_(std::move(thread)),
      limit_(limit),
      epoch_(epoch),
      on_idle_(std::move(on_idle)),
      confirmed_(peers_->world()) {}

void Workspace::begin(const std::string& descriptor) {
  ++epoch_;
  descriptor_ = descriptor;
  confirmed_.assign(confirmed_.size(), false);
  confirmed_[peers_->rank()] = true;
  Header& header = peers_->own().header();
  header.descriptor[parity()].set(descriptor);
  header.began.store(epoch_, std::memory_order_release);
}

Outcome Workspace::confirm(int peer) {
  if (confirmed_[peer]) return {};
  Outcome outcome = wait_for(peers_->of(peer).header().began, peer);
  if (outcome.ok()) outcome = compare(peer);
  confirmed_[peer] = outcome.ok();
  return outcome;
}

Outcome Workspace::confirm_all() {
  for (int peer = 0; peer < peers_->world(); ++peer) {
    Outcome outcome = confirm(peer);
    if (!outcome.ok()) return outcome;
  }
  return {};
}

Outcome Workspace::compare(int peer) const {
  std::string theirs = peers_->of(peer).header().descriptor[parity()].get();
  if (theirs == descriptor_) return {};
  return {Verdict::kMismatch, peer, epoch_, epoch_, std::move(theirs)};
}

void Workspace::start(std::shared_ptr<const Transfers> transfers, std::uint8_t* local,
                      bool record) {
  thread_->start({peers_, std::move(transfers), local, epoch_, limit_, record});
}

void Workspace::raise(int signal) {
  peers_->own().signal(parity(), signal).store(epoch_, std::memory_order_release);
}

Outcome Workspace::wait(int signal, int peer) {
  Outcome outcome = confirm(peer);
  return outcome.ok() ? wait_for(peers_->own().signal(parity(), signal), peer) : outcome;
}

Outcome Workspace::wait_for(const Signal& signal, int peer) {
  const Interruption interruption{&thread_->troubled(), on_idle_};
  Outcome outcome = cpu::wait(signal, epoch_, peer, *peers_, limit_, interruption);
  if (outcome.verdict == Verdict::kCancelled) outcome = thread_->join(on_idle_);
  if (outcome.verdict != Verdict::kFailed) return outcome;
  // A peer has given up, most likely since ranks differ: say so first hand if it can be seen.
  for (int other = 0; other < peers_->world(); ++other) {
    if (!reached(peers_->of(other).header().began.load(std::memory_order_acquire), epoch_))
      continue;
    Outcome mismatch = compare(other);
    if (!mismatch.ok()) return mismatch;
  }
  return outcome;
}

Outcome Workspace::end() {
  Outcome outcome = thread_->join(on_idle_);
  if (outcome.ok()) outcome = confirm_all();
  if (outcome.ok()) outcome = peers_->failure(epoch_);
  if (outcome.ok()) peers_->own().header().finished.store(epoch_, std::memory_order_release);
  return outcome;
}

void Workspace::fail(const std::string& why) {
  thread_->cancel();
  thread_->join({});
  peers_->own().announce_failure(why);
}

void Workspace::leave() { peers_->own().header().gone.store(1, std::memory_order_release); }

}  // namespace flux_inductor::cpu
