#include "cpu/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>

namespace flux_inductor::cpu {
namespace {

constexpr std::size_t kPage = 4096;

std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

[[noreturn]] void fail(const std::string& what, int error = errno) {
  throw std::system_error(error, std::generic_category(), what);
}

std::uint8_t* map(int fd, std::size_t size) {
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) fail("mapping " + std::to_string(size) + " bytes");
  return static_cast<std::uint8_t*>(base);
}

// Closes a descriptor when an error leaves the function that opened it.
struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
  int release() {
    const int kept = fd;
    fd = -1;
    return kept;
  }
};

}  // namespace

void Header::Text::set(const std::string& text) {
  length = std::min(text.size(), kTextBytes);
  std::memcpy(bytes, text.data(), length);
}

std::string Header::Text::get() const {
  return std::string(bytes, std::min<std::size_t>(length, kTextBytes));
}

void Segment::lay_out(std::size_t signals, std::size_t buffer_bytes) {
  signals_ = signals;
  buffers_offset_ = round_up(sizeof(Header) + 2 * signals * sizeof(Signal), kPage);
  buffer_stride_ = round_up(buffer_bytes, kPage);
  size_ = buffers_offset_ + 2 * buffer_stride_;
}

std::shared_ptr<Segment> Segment::create(std::size_t signals, std::size_t buffer_bytes,
                                         Epoch epoch) {
  std::shared_ptr<Segment> segment(new Segment);
  segment->lay_out(signals, buffer_bytes);
  Descriptor memory{memfd_create("flux_inductor", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
  if (memory.fd < 0) fail("making shared memory");
  if (fchmod(memory.fd, S_IRUSR | S_IWUSR) != 0) fail("restricting shared memory to its owner");
  int error;
  do {
    error = posix_fallocate(memory.fd, 0, static_cast<off_t>(segment->size_));
  } while (error == EINTR);
  if (error != 0) fail("reserving " + std::to_string(segment->size_) + " bytes", error);
  // Nobody, not even this process, can shrink it under a peer's feet.
  if (fcntl(memory.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    fail("sealing shared memory");
  segment->base_ = map(memory.fd, segment->size_);
  segment->fd_ = memory.release();

  Header* header = new (segment->base_) Header{};
  header->signal_count = signals;
  header->buffer_bytes = buffer_bytes;
  header->began.store(epoch, std::memory_order_relaxed);
  header->finished.store(epoch, std::memory_order_relaxed);
  for (std::size_t i = 0; i < 2 * signals; ++i) new (&segment->signal(0, i)) Signal(epoch);
  if (getrandom(&header->token, sizeof header->token, 0) != sizeof header->token)
    fail("drawing a random token");
  return segment;
}

std::shared_ptr<Segment> Segment::open(int pid, int fd, std::uint64_t token) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  Descriptor memory{::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK)};
  if (memory.fd < 0) fail("opening " + path);
  struct stat status{};
  if (fstat(memory.fd, &status) != 0) fail("examining " + path);
  if (!S_ISREG(status.st_mode) || status.st_size < static_cast<off_t>(sizeof(Header))) {
    fail("examining " + path, EBADF);
  }
  std::shared_ptr<Segment> segment(new Segment);
  segment->size_ = static_cast<std::size_t>(status.st_size);
  segment->base_ = map(memory.fd, segment->size_);
  const Header& header = segment->header();
  if (header.token != token) fail("checking the token of " + path, EBADF);
  segment->lay_out(header.signal_count, header.buffer_bytes);
  if (segment->size_ != static_cast<std::size_t>(status.st_size))
    fail("checking the size of " + path, EBADF);
  return segment;
}

void Segment::announce_failure(const std::string& why) {
  header().failure.set(why);
  header().failed.store(1, std::memory_order_release);
}

Segment::~Segment() {
  if (base_ != nullptr) munmap(base_, size_);
  if (fd_ >= 0) close(fd_);
}

}  // namespace flux_inductor::cpu
