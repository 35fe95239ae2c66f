#include "cuda/host/workspace.h"

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include "cuda/host/call_scopes.h"
#include "cuda/host/launch_error.h"

namespace flux_inductor::cuda {
namespace {

constexpr Epoch kFirstEpoch = 1;  // signals are zero before it

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

// Differs for any two streams that the process ever has. A stream that is captured cannot be asked
// for its number, but it cannot be destroyed before the capture's end either: its handle will do.
unsigned long long id_of(cudaStream_t stream, bool captured) {
  unsigned long long id = reinterpret_cast<std::uintptr_t>(stream);
  if (captured) return id;
  check_cuda(cudaStreamGetId(stream, &id), "cudaStreamGetId");
  return id;
}

bool is_default(cudaStream_t stream) { return stream == nullptr || stream == cudaStreamLegacy; }

// Whether all streams share one queue of the device, as Megatron has it.
bool has_one_queue() {
  char const* connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  return connections != nullptr && std::string_view(connections) == "1";
}

// Position of a peer's part among the parts of all peers, as seen by `rank`.
int peer_index(int peer, int rank, int world) { return (peer - rank - 1 + world) % world; }

// The signal that is sent last, when all copies have ended; null if there are none.
Epoch const* last_signal(std::vector<Copy> const& copies, Push const& push) {
  return copies.empty() ? nullptr : push.signals[copies.back().peer] + copies.back().signal;
}

}  // namespace

Workspace::Workspace(Memory memory) : memory_(std::move(memory)), one_queue_(has_one_queue()) {
  DeviceGuard guard(memory_.device);
  int least = 0, greatest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream priorities");
  for (Sequence* each : {&eager_, &captured_}) {
    check_cuda(cudaStreamCreateWithPriority(&each->copies, cudaStreamNonBlocking, greatest),
               "copy stream");
    for (cudaEvent_t* event : {&each->forked, &each->joined, &each->ended})
      check_cuda(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "event");
  }
  for (int turn : {0, 1}) {
    check_cuda(cudaMemcpy(epoch(turn), &kFirstEpoch, sizeof(Epoch), cudaMemcpyHostToDevice),
               "the first epoch");
  }
  // Such a copy may still be on its way, and torch's other streams do not wait for it.
  check_cuda(cudaStreamSynchronize(cudaStreamLegacy), "the first epoch");
}

Workspace::~Workspace() {
  for (Sequence const& each : {eager_, captured_}) {
    for (cudaEvent_t event : {each.forked, each.joined, each.ended}) cudaEventDestroy(event);
    cudaStreamDestroy(each.copies);
  }
}

Meeting Workspace::meeting(int turn, Op op, int signals_per_rank) const {
  Meeting meeting{};
  meeting.world = memory_.world;
  meeting.rank = memory_.rank;
  meeting.turn = turn;
  meeting.signals_per_rank = signals_per_rank;
  for (int set : {0, 1}) meeting.arriving[set] = signals(memory_.rank, set);
  for (int i = 0; i < memory_.world; ++i) {
    meeting.theirs[i] = memory_.signals[i] + SymmetricSignals::kMeeting + memory_.rank;
  }
  meeting.ours = memory_.signals[memory_.rank] + SymmetricSignals::kMeeting;
  meeting.limit = limit(op);
  return meeting;
}

void Workspace::enter(int turn, bool first_of_graph, Op op, int signals_per_rank,
                      cudaStream_t stream) {
  CallEntry entry{};
  entry.epoch = epoch(turn);
  entry.other_epoch = epoch(turn ^ 1);
  entry.words = words(turn, OwnWords::kClaims);
  entry.count = OwnWords::zeroed(memory_.counters);
  entry.replayed = memory_.own_words + OwnWords::kReplayed;
  entry.first_of_graph = first_of_graph;
  entry.meeting = meeting(turn, op, signals_per_rank);
  enter_call(entry, stream);
}

Succession Workspace::succession(Turn turn, Epoch const* last_copied) const {
  int next = turn.index ^ 1;
  return {epoch(next),
          words(next, OwnWords::kClaims),
          OwnWords::zeroed(memory_.counters),
          memory_.own_words + OwnWords::kReplayed,
          turn.captured,
          last_copied};
}

Workspace::Turn Workspace::begin(cudaStream_t stream, Op op, int signals_per_rank) {
  unsigned long long capture = capture_of(stream), id = id_of(stream, capture != 0);
  bool first_of_graph = capture != 0 && capture != captured_.capture;
  Turn mine{0, capture != 0};
  // Eager calls on one side and those of a capture on the other cannot wait for each other; the
  // order of a graph's launch and what is around it is whoever launches it to see to.
  Sequence& sequence = this->sequence(mine);
  if (first_of_graph) {
    sequence.turn = 0;
  } else if (sequence.any && sequence.last_id != id) {
    if (!sequence.ended_recorded)
      check_cuda(cudaEventRecord(sequence.ended, cudaStreamLegacy), "cudaEventRecord");
    check_cuda(cudaStreamWaitEvent(stream, sequence.ended, 0), "cudaStreamWaitEvent");
  }
  mine.index = sequence.turn;
  sequence.turn ^= 1;
  sequence.last_id = id;
  sequence.any = true;
  // Once there is a graph, any eager call may be the first one after a replay.
  if (capture != 0 ? first_of_graph : captured_.any)
    enter(mine.index, first_of_graph, op, signals_per_rank, stream);
  if (first_of_graph) sequence.capture = capture;
  return mine;
}

Ran Workspace::end(Turn turn, cudaStream_t stream) {
  Sequence& sequence = this->sequence(turn);
  sequence.ended_recorded = !is_default(stream);
  if (sequence.ended_recorded)
    check_cuda(cudaEventRecord(sequence.ended, stream), "cudaEventRecord");
  return turn.captured ? Ran::in_graph : Ran::eagerly;
}

Ran Workspace::run(GatherCall const& call, GatherTensors const& tensors, cudaStream_t stream) {
  if (failed(memory_.errors)) return Ran::no;
  Range range("flux_inductor.all_gather_matmul");
  DeviceGuard guard(memory_.device);
  int rank = memory_.rank;
  Turn turn = begin(stream, Op::all_gather_matmul, call.signals_per_shard());
  Unfinished call_in_graph(turn.captured, captured_.capture);
  Sequence const& side = sequence(turn);
  Fork fork(stream, side.copies, side.forked, side.joined);
  Push push{};
  push.epoch = epoch(turn.index);
  for (int i = 0; i < memory_.world; ++i) {
    push.from[i] = tensors.shard;
    push.to[i] = slot(i, turn.index);
    push.signals[i] = signals(i, turn.index);
  }
  push_copies(call.copies(), push, side.copies);

  for (size_t i = 0; i < call.launches().size(); ++i) {
    auto const& [kernel, bound] = call.launches()[i];
    GatherTensors::Launch const& mine = tensors.launches[i];
    void* kept = i == call.keeper() ? tensors.kept : nullptr;
    GatherOperands operands{tensors.shard, slot(rank, turn.index), mine.weight,
                            mine.bias,     mine.product,           kept};
    bool last = i + 1 == call.launches().size();
    Succession next = last ? succession(turn, last_signal(call.copies(), push)) : Succession{};
    GatherSync sync{{epoch(turn.index), next, limit(Op::all_gather_matmul)},
                    signals(rank, turn.index)};
    kernel->launch({bound, operands, sync}, stream);
  }
  if (turn.captured) {  // which must end with all that it forked joined
    fork.join();
  } else {
    fork.leave_to_kernel();
  }
  call_in_graph.finish();
  return end(turn, stream);
}

Ran Workspace::run(ScatterCall const& call, ScatterTensors const& tensors, cudaStream_t stream) {
  if (failed(memory_.errors)) return Ran::no;
  Range range("flux_inductor.matmul_reduce_scatter");
  DeviceGuard guard(memory_.device);
  int world = memory_.world, rank = memory_.rank;
  Turn turn = begin(stream, Op::matmul_reduce_scatter, call.chunks_per_part());
  // With one queue, a replay may have the copies' waits in it before the kernel that they are for:
  // they would wait for ever, and no kernel's limit would end them (rule R4). The order of a
  // graph's branches is CUDA's to choose. So there are no such waits then.
  bool stores = call.stores() || (turn.captured && one_queue_);
  Unfinished call_in_graph(turn.captured, captured_.capture);

  ScatterOperands operands{tensors.x, tensors.weight, tensors.bias, tensors.addend, {}, {}};
  ScatterSync sync{{epoch(turn.index), succession(turn, nullptr), limit(Op::matmul_reduce_scatter)},
                   words(turn.index, OwnWords::kCounters),
                   signals(rank, turn.index),
                   words(turn.index, OwnWords::kClaims),
                   {}};
  Push push{};
  push.epoch = sync.epoch;
  push.counters = sync.counters;
  for (int i = 0; i < world; ++i) {
    if (i == rank) {
      operands.parts[i] = tensors.result;
      continue;
    }
    int64_t offset = peer_index(i, rank, world) * call.part_bytes();
    operands.partials[i] = slot(rank, turn.index) + offset;
    push.to[i] = slot(i, turn.index) + peer_index(rank, i, world) * call.part_bytes();
    push.signals[i] = signals(i, turn.index);
    if (stores) {
      operands.parts[i] = push.to[i];
      sync.delivered[i] = push.signals[i];
    } else {
      operands.parts[i] = static_cast<char*>(tensors.partials) + offset;
    }
    push.from[i] = operands.parts[i];
  }

  MatmulReduceScatter launch{call.bound(stores), operands, sync};
  if (stores) {
    call.kernel().launch(launch, stream);
    call_in_graph.finish();
    return end(turn, stream);
  }
  Sequence const& side = sequence(turn);
  Fork fork(stream, side.copies, side.forked, side.joined);
  // The kernel first: should a copy fail to be queued, nothing waits for ever. Where all streams
  // share one queue of the device (CUDA_DEVICE_MAX_CONNECTIONS=1), waits of the copies would even
  // hold up the kernel that they are for. So the kernel cannot wait for the copies: another thread
  // may keep this one from queueing them, in a call of CUDA's that waits for the kernel.
  call.kernel().launch(launch, stream);
  push_copies(call.copies(), push, side.copies);
  fork.join();
  call_in_graph.finish();
  return end(turn, stream);
}

}  // namespace flux_inductor::cuda
