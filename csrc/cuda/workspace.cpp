#include "workspace.h"

#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <stdexcept>

#include "copy_engine.h"
#include "launch_error.h"

namespace flux_inductor::cuda {
namespace {

constexpr int64_t kElementSize = 2;  // bf16 and fp16
constexpr int kMeetingRegion = 2;    // of signals; 0 and 1 are the two sets

bool failed(ErrorRecord const* record) {
  return *const_cast<uint32_t const volatile*>(&record->state) != 0;
}

// The capture that a stream belongs to; 0 if there is none.
unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  unsigned long long id = 0;
  check_cuda(cudaStreamGetCaptureInfo(stream, &status, &id), "cudaStreamGetCaptureInfo");
  if (status == cudaStreamCaptureStatusInvalidated) {
    throw std::runtime_error(
        "a fused op was called in a CUDA graph capture that has failed before");
  }
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    changed_ = before_ != device;
    if (changed_) check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(DeviceGuard const&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

class Range {
 public:
  explicit Range(char const* name) { nvtxRangePushA(name); }
  ~Range() { nvtxRangePop(); }
  Range(Range const&) = delete;
};

// The copy stream beside the caller's. It is joined also when something is thrown in between, since
// the caller frees what the copies read.
class Fork {
 public:
  Fork(cudaStream_t stream, cudaStream_t copies, cudaEvent_t forked, cudaEvent_t joined)
      : stream_(stream), copies_(copies), joined_(joined) {
    check_cuda(cudaEventRecord(forked, stream_), "cudaEventRecord");
    check_cuda(cudaStreamWaitEvent(copies_, forked, 0), "cudaStreamWaitEvent");
  }
  ~Fork() {
    if (open_) {
      cudaEventRecord(joined_, copies_);
      cudaStreamWaitEvent(stream_, joined_, 0);
    }
  }
  Fork(Fork const&) = delete;

  void join() {
    open_ = false;
    check_cuda(cudaEventRecord(joined_, copies_), "cudaEventRecord");
    check_cuda(cudaStreamWaitEvent(stream_, joined_, 0), "cudaStreamWaitEvent");
  }

 private:
  cudaStream_t stream_, copies_;
  cudaEvent_t joined_;
  bool open_ = true;
};

// Position of a peer's part among the parts of all peers, as seen by `rank`.
int peer_index(int peer, int rank, int world) { return (peer - rank - 1 + world) % world; }

}  // namespace

Workspace::Workspace(Memory memory) : memory_(std::move(memory)) {
  DeviceGuard guard(memory_.device);
  int least = 0, greatest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream priorities");
  check_cuda(cudaStreamCreateWithPriority(&copies_, cudaStreamNonBlocking, greatest),
             "copy stream");
  for (cudaEvent_t* event : {&forked_, &joined_, &ended_}) {
    check_cuda(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "event");
  }
  check_cuda(
      cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, memory_.device),
      "number of multiprocessors");
}

Workspace::~Workspace() {
  for (cudaEvent_t event : {forked_, joined_, ended_}) cudaEventDestroy(event);
  cudaStreamDestroy(copies_);
}

size_t GatherCall::keeper() const {
  auto smaller = [](auto const& a, auto const& b) { return a.second.n < b.second.n; };
  return std::max_element(launches.begin(), launches.end(), smaller) - launches.begin();
}

Meeting Workspace::meeting(Op op) const {
  Meeting meeting{};
  meeting.world = memory_.world;
  meeting.rank = memory_.rank;
  for (int i = 0; i < memory_.world; ++i) {
    meeting.theirs[i] = memory_.words[i] + SymmetricWords::kEntry + memory_.rank;
  }
  meeting.ours = memory_.words[memory_.rank] + SymmetricWords::kEntry;
  meeting.wait_limit_ns = memory_.wait_limit_ns;
  meeting.errors = memory_.errors;
  meeting.op = op;
  return meeting;
}

SignalRegion Workspace::region(uint32_t* words, int count, int index) const {
  return {words, count, memory_.own_words + OwnWords::kRenewed + index};
}

Workspace::Turn Workspace::begin(cudaStream_t stream, int counters, Op op) {
  unsigned long long capture = capture_of(stream);
  bool first_of_graph = capture != 0 && capture != captured_.capture;
  if (first_of_graph) captured_ = {capture};
  // Eager calls on one side and those of a capture on the other cannot wait for each other; the
  // order of a graph's launch and what is around it is whoever launches it to see to.
  Sequence& sequence = capture != 0 ? captured_ : eager_;
  if (sequence.any && sequence.last_stream != stream) {
    check_cuda(cudaEventRecord(ended_, sequence.last_stream), "cudaEventRecord");
    check_cuda(cudaStreamWaitEvent(stream, ended_, 0), "cudaStreamWaitEvent");
  }
  Turn mine{sequence.turn, stream};
  sequence.turn ^= 1;
  sequence.last_stream = stream;
  sequence.any = true;

  CallEntry entry{};
  entry.epoch = epoch(memory_.rank);
  entry.replayed = memory_.own_words + OwnWords::kReplayed;
  entry.words = memory_.own_words + OwnWords::kClaims;
  entry.count = counters > 0 ? OwnWords::zeroed(counters) : 0;
  entry.captured = capture != 0;
  entry.first_of_graph = first_of_graph;
  entry.meeting = meeting(op);
  entry.idle = region(signals(memory_.rank, mine.slot ^ 1), memory_.signals, mine.slot ^ 1);
  entry.used = region(signals(memory_.rank, mine.slot), memory_.signals, mine.slot);
  entry.meetings =
      region(memory_.words[memory_.rank] + SymmetricWords::kEntry, memory_.world, kMeetingRegion);
  enter_call(entry, stream);
  return mine;
}

bool Workspace::run(GatherCall const& call, GatherOperands const& operands, cudaStream_t stream) {
  if (failed(memory_.errors)) return false;
  Range range("flux_inductor.all_gather_matmul");
  DeviceGuard guard(memory_.device);
  int rank = memory_.rank;
  Turn turn = begin(stream, 0, Op::all_gather_matmul);
  Fork fork(stream, copies_, forked_, joined_);
  AllGatherMatmul common = call.launches.front().second;
  common.own_shard = operands.shard;
  common.epoch = epoch(rank);
  ShardPush push{};
  for (int i = 0; i < memory_.world; ++i) {
    push.gathered[i] = slot(i, turn.slot);
    push.signals[i] = signals(i, turn.slot);
  }
  push_shard(common, push, copies_);

  size_t keeper = call.keeper();
  for (size_t i = 0; i < call.launches.size(); ++i) {
    auto const& [kernel, sizes] = call.launches[i];
    AllGatherMatmul problem = sizes;
    problem.own_shard = operands.shard;
    problem.gathered = slot(rank, turn.slot);
    problem.weight = operands.launches[i].weight;
    problem.bias = operands.launches[i].bias;
    problem.product = operands.launches[i].product;
    problem.kept = i == keeper ? operands.kept : nullptr;
    problem.signals = signals(rank, turn.slot);
    problem.epoch = epoch(rank);
    problem.multiprocessors = multiprocessors_ - call.reserve;
    problem.wait_limit_ns = memory_.wait_limit_ns;
    problem.errors = memory_.errors;
    kernel->launch(problem, stream);
  }
  fork.join();
  return true;
}

bool Workspace::run(ScatterCall const& call, ScatterOperands const& operands, cudaStream_t stream) {
  if (failed(memory_.errors)) return false;
  Range range("flux_inductor.matmul_reduce_scatter");
  DeviceGuard guard(memory_.device);
  int world = memory_.world, rank = memory_.rank;
  MatmulReduceScatter problem = call.problem;
  int counters = world * scatter_chunks_per_part(problem, call.kernel->tile);
  Turn turn = begin(stream, counters, Op::matmul_reduce_scatter);

  int64_t part_bytes = int64_t(problem.strips) * problem.rows * problem.n * kElementSize;
  PartialsPush push{};
  for (int i = 0; i < world; ++i) {
    if (i == rank) {
      problem.parts[i] = operands.result;
      continue;
    }
    int64_t offset = peer_index(i, rank, world) * part_bytes;
    problem.partials[i] = slot(rank, turn.slot) + offset;
    push.partials[i] = slot(i, turn.slot) + peer_index(rank, i, world) * part_bytes;
    push.arrived[i] = signals(i, turn.slot);
    if (call.store) {
      problem.parts[i] = push.partials[i];
      problem.delivered[i] = push.arrived[i];
    } else {
      problem.parts[i] = static_cast<char*>(operands.partials) + offset;
    }
  }
  problem.x = operands.x;
  problem.weight = operands.weight;
  problem.bias = operands.bias;
  problem.addend = operands.addend;
  problem.counters = memory_.own_words + OwnWords::kCounters;
  problem.arrived = signals(rank, turn.slot);
  problem.epoch = epoch(rank);
  problem.claims = memory_.own_words + OwnWords::kClaims;
  problem.multiprocessors = multiprocessors_ - call.reserve;
  problem.wait_limit_ns = memory_.wait_limit_ns;
  problem.errors = memory_.errors;

  if (call.store) {
    call.kernel->launch(problem, stream);
    return true;
  }
  Fork fork(stream, copies_, forked_, joined_);
  // The kernel first: should a copy fail to be queued, nothing waits for ever.
  call.kernel->launch(problem, stream);
  push_partials(problem, call.kernel->tile, push, copies_);
  fork.join();
  return true;
}

}  // namespace flux_inductor::cuda
