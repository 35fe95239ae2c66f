#include "cpu/workspace.h"

#include <utility>

namespace flux_inductor::cpu {

Workspace::Workspace(std::shared_ptr<Peers> peers, std::shared_ptr<TransferThread> thread,
                     Epoch epoch, std::int64_t inline_bytes, std::function<bool()> on_idle)
    : peers_(std::move(peers)),
      thread_(std::move(thread)),
      epoch_(epoch),
      inline_bytes_(inline_bytes),
      on_idle_(std::move(on_idle)),
      confirmed_(peers_->world()) {}

void Workspace::begin(const std::string& descriptor, std::chrono::nanoseconds limit) {
  ++epoch_;
  limit_ = limit;
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
  inline_ = transfers->bytes <= inline_bytes_;
  run_ = std::make_shared<TransferRun>(peers_, std::move(transfers), local, epoch_, limit_, record);
  if (inline_) {
    move_what_is_ready();
  } else {
    thread_->start(run_);
  }
}

void Workspace::raise(int signal) {
  peers_->own().signal(parity(), signal).store(epoch_, std::memory_order_release);
  if (inline_) move_what_is_ready();
}

Outcome Workspace::wait(int signal, int peer) {
  const Signal& arrived = peers_->own().signal(parity(), signal);
  Outcome outcome = confirm(peer);
  if (outcome.ok() && inline_) outcome = move_until(&arrived);
  return outcome.ok() ? wait_for(arrived, peer) : outcome;
}

void Workspace::move_what_is_ready() {
  while (!run_->done() && run_->ready()) run_->move();
}

// Makes transfers in their order, waiting for each, until one has raised `arrived`, or all are
// made. A push waits for own signals only, which this thread raises before: all of its are made by
// then.
Outcome Workspace::move_until(const Signal* arrived) {
  while (!run_->done() &&
         (arrived == nullptr || !reached(arrived->load(std::memory_order_acquire), epoch_))) {
    Outcome outcome = run_->await(Interruption{nullptr, on_idle_});
    if (!outcome.ok()) return explain(std::move(outcome));
    run_->move();
  }
  return {};
}

Outcome Workspace::wait_for(const Signal& signal, int peer) {
  const Interruption interruption{&thread_->troubled(), on_idle_};
  Outcome outcome = cpu::wait(signal, epoch_, peer, *peers_, limit_, interruption);
  if (outcome.verdict == Verdict::kCancelled) outcome = thread_->join(on_idle_);
  return explain(std::move(outcome));
}

// When a peer has given up, most likely since ranks differ, says so first hand if it can be seen.
Outcome Workspace::explain(Outcome outcome) const {
  if (outcome.verdict != Verdict::kFailed) return outcome;
  for (int peer = 0; peer < peers_->world(); ++peer) {
    const Header& header = peers_->of(peer).header();
    if (!reached(header.began.load(std::memory_order_acquire), epoch_)) continue;
    Outcome mismatch = compare(peer);
    if (!mismatch.ok()) return mismatch;
  }
  return outcome;
}

Outcome Workspace::end() {
  Outcome outcome = inline_ ? move_until(nullptr) : thread_->join(on_idle_);
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
