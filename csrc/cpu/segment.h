// One rank's piece of shared memory: a header, and two sets of signals and buffers that calls use
// in turn.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/epoch.h"

namespace flux_inductor::cpu {

using Signal = std::atomic<Epoch>;
static_assert(sizeof(Signal) == 4 && Signal::is_always_lock_free,
              "signals are shared between processes");

// What a rank tells its peers about itself. Only the owner writes.
struct Header {
  static constexpr std::size_t kTextBytes = 2040;

  struct Text {
    std::uint64_t length;
    char bytes[kTextBytes];

    void set(const std::string& text);
    std::string get() const;
  };

  std::uint64_t token;         // random; proves that a peer has opened the right memory
  std::uint64_t signal_count;  // words of one of the two sets
  std::uint64_t buffer_bytes;  // of one of the two buffers
  alignas(64) Signal began;    // the last call that the owner has begun: its descriptor can be read
  alignas(64) Signal finished;  // the last call from whose peers the owner needs nothing any more
  alignas(64) std::atomic<std::uint32_t> gone;  // the owner has left; no call of its will follow
  std::atomic<std::uint32_t> failed;  // the owner's last call failed, for the reason in `failure`
  Text failure;
  Text descriptor[2];  // of the last two calls, by the parity of their epochs (rule R7)
};

// Memory made with memfd_create: it has no name, so nothing stays behind when its processes are
// killed, and no limit such as the size of /dev/shm. Peers open it through /proc/<pid>/fd/<fd>,
// which the kernel grants to the same user only, and check the token. The memory lives until the
// last rank that has mapped it lets go.
class Segment {
 public:
  // Makes one with all its memory reserved, so that there is no SIGBUS later. Signals start at
  // `epoch`. Throws std::system_error.
  static std::shared_ptr<Segment> create(std::size_t signals, std::size_t buffer_bytes,
                                         Epoch epoch);

  // Maps a peer's. Throws std::system_error; EBADF if what is there is not the segment of that
  // token.
  static std::shared_ptr<Segment> open(int pid, int fd, std::uint64_t token);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  Signal& signal(int parity, std::size_t index) const {
    return reinterpret_cast<Signal*>(base_ + sizeof(Header))[parity * signals_ + index];
  }
  std::uint8_t* buffer(int parity) const {
    return base_ + buffers_offset_ + parity * buffer_stride_;
  }

  // Tells the peers that the owner's call has failed.
  void announce_failure(const std::string& why);

  int fd() const { return fd_; }
  std::size_t size() const { return size_; }

 private:
  Segment() = default;
  void lay_out(std::size_t signals, std::size_t buffer_bytes);

  std::uint8_t* base_ = nullptr;
  int fd_ = -1;  // open as long as peers may still have to open it; -1 in a peer's
  std::size_t size_ = 0;
  std::size_t signals_ = 0;  // of one set
  std::size_t buffers_offset_ = 0;
  std::size_t buffer_stride_ = 0;
};

}  // namespace flux_inductor::cpu
