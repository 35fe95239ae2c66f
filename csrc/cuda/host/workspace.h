// What one rank has of a group's symmetric memory, and the fused calls that run in it: everything
// that one call puts on its streams.
//
// Calls alternate between two slots of the same size; call_entry.h says how that is made safe where
// the host does not see all calls.
// Every call waits for data of every peer, so when a rank begins call i, it has ended call i - 1,
// hence every peer has begun call i - 1, hence ended call i - 2, the last one that used the same
// slot. The signals are in two sets as well: with one, a fast rank's signal of call i + 1 could
// pass for that of a slower one for call i, whose chunk has the same number.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "cuda/host/bound_calls.h"
#include "cuda/sync/call_entry.h"

namespace flux_inductor::cuda {

// Signals in the symmetric memory that every rank owns, in this order.
struct SymmetricSignals {
  static constexpr int kMeeting = 0;  // one a rank
  static constexpr int kChunks = 16;  // two sets of them, on cache lines of their own
  static int count(int signals) { return kChunks + 2 * signals; }
};

// 32-bit words of the rank's own memory: kReplayed, then the two sets of words of calls.
struct OwnWords {
  static constexpr int kLine = 32;  // of the cache
  static constexpr int kReplayed = 0;
  static constexpr int kSets = kLine;
  // In a set, each on cache lines of its own: the epoch; then, zero when a call begins, the claims,
  // and [world * chunks] counters of tiles stored.
  static constexpr int kEpoch = 0;
  static constexpr int kClaims = kLine;
  static constexpr int kCounters = 2 * kLine;
  static int per_set(int counters) { return kCounters + ceil_div(counters, kLine) * kLine; }
  static int zeroed(int counters) { return kCounters - kClaims + counters; }
  static int count(int counters) { return kSets + 2 * per_set(counters); }
};

// The addresses of a call's tensors.
struct GatherTensors {
  struct Launch {
    void const* weight;
    void const* bias;  // or null
    void* product;
  };
  void const* shard;
  void* kept;  // where the gathered tensor goes, or null
  std::vector<Launch> launches;
};

struct ScatterTensors {
  void const* x;
  void const* weight;
  void const* bias;
  void const* addend;
  void* partials;  // of all peers' parts, [world - 1, strips, rows, n]; not used by stores
  void* result;
};

// How a call went.
enum class Ran : int {
  no = 0,  // an earlier call of the group has failed, so that this one did nothing
  eagerly = 1,
  in_graph = 2,  // it was captured, and runs whenever its graph does
};

class Workspace {
 public:
  struct Memory {
    int world, rank, device;
    std::vector<char*> slots;  // each rank's two slots, as this rank addresses them
    int64_t slot_bytes;
    std::vector<Epoch*> signals;  // each rank's SymmetricSignals, likewise; zero at first
    int signals_per_set;
    uint32_t* own_words;  // zero at first
    int counters;         // in one set
    ErrorRecord* errors;  // pinned host memory
    uint64_t wait_limit_ns;
  };
  explicit Workspace(Memory memory);
  ~Workspace();
  Workspace(Workspace const&) = delete;

  Ran run(GatherCall const& call, GatherTensors const& tensors, cudaStream_t stream);
  Ran run(ScatterCall const& call, ScatterTensors const& tensors, cudaStream_t stream);

  // Whether calls in it belong to a graph: then it must live as long as the graph may.
  bool captured() const { return captured_.any; }

 private:
  // Which slot, signals and own words a call uses.
  struct Turn {
    int index;  // 0 or 1
    bool captured;
  };
  Turn begin(cudaStream_t stream, Op op, int signals_per_rank);
  Ran end(Turn turn, cudaStream_t stream);
  void enter(int turn, bool first_of_graph, Op op, int signals_per_rank, cudaStream_t stream);
  Meeting meeting(int turn, Op op, int signals_per_rank) const;
  WaitLimit limit(Op op) const { return {memory_.wait_limit_ns, memory_.errors, op}; }
  Succession succession(Turn turn, Epoch const* last_copied) const;
  char* slot(int rank, int turn) const { return memory_.slots[rank] + turn * memory_.slot_bytes; }
  Epoch* signals(int rank, int turn) const {
    return memory_.signals[rank] + SymmetricSignals::kChunks + turn * memory_.signals_per_set;
  }
  uint32_t* words(int turn, int which) const {
    return memory_.own_words + OwnWords::kSets + turn * OwnWords::per_set(memory_.counters) + which;
  }
  Epoch* epoch(int turn) const { return reinterpret_cast<Epoch*>(words(turn, OwnWords::kEpoch)); }

  // Calls follow one another on the two slots in turn, serialised across streams: eager ones, and
  // those of the last capture. Each have a copy stream and events of their own, since a stream that
  // is captured can do nothing else before the capture's end.
  //
  // Whoever owns a caller's stream may destroy it after the call, and its handle may then be
  // another's. So the call's end is an event, recorded at once, and `last_id` tells streams apart;
  // only the default stream, which stays, gets its event when another stream needs it.
  struct Sequence {
    unsigned long long capture = 0;  // 0: eager
    bool any = false;
    int turn = 0;
    bool ended_recorded = false;
    unsigned long long last_id = 0;
    cudaStream_t copies = nullptr;
    cudaEvent_t forked = nullptr, joined = nullptr, ended = nullptr;
  };
  Sequence& sequence(Turn turn) { return turn.captured ? captured_ : eager_; }

  Memory memory_;
  bool one_queue_;
  Sequence eager_, captured_;
};

}  // namespace flux_inductor::cuda
