// What one rank has of a group's symmetric memory, and the fused calls that run in it: everything
// that one call puts on its streams.
//
// Calls alternate between two slots of the same size; call_entry.h says how that is made safe.
// Every call waits for data of every peer, so when a rank begins call i, it has ended call i - 1,
// hence every peer has begun call i - 1, hence ended call i - 2, the last one that used the same
// slot. The signals are in two sets as well: with one, a fast rank's signal of call i + 1 could
// pass for that of a slower one for call i, whose chunk has the same number.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "all_gather_matmul.h"
#include "call_entry.h"
#include "matmul_reduce_scatter.h"

namespace flux_inductor::cuda {

// Words of symmetric memory that every rank owns, in this order, on cache lines of their own.
struct SymmetricWords {
  static constexpr int kEpoch = 0;
  static constexpr int kEntry = 32;    // meeting at the entry, a word a rank
  static constexpr int kSignals = 64;  // two sets of them
  static int count(int signals) { return kSignals + 2 * signals; }
};

// Words of the rank's own memory.
struct OwnWords {
  static constexpr int kReplayed = 0;
  static constexpr int kRenewed = 1;    // when each of three SignalRegions was
  static constexpr int kClaims = 32;    // from here on zeroed at the start of a call
  static constexpr int kCounters = 64;  // [world * chunks]: tiles stored of each
  static int count(int counters) { return kCounters + counters; }
  static int zeroed(int counters) { return kCounters - kClaims + counters; }
};

// One call of all_gather_matmul, without its addresses: one launch for each weight.
struct GatherCall {
  std::vector<std::pair<AllGatherMatmulKernel const*, AllGatherMatmul>> launches;
  int reserve;  // multiprocessors left to other communication

  // The launch that stores the gathered tensor, where one is kept: the longest has most room for
  // it.
  size_t keeper() const;
};
struct GatherOperands {
  struct Launch {
    void const* weight;
    void const* bias;  // or null
    void* product;
  };
  void const* shard;
  void* kept;  // where the gathered tensor goes, or null
  std::vector<Launch> launches;
};

// One call of matmul_reduce_scatter, without its addresses.
struct ScatterCall {
  MatmulReduceScatterKernel const* kernel;
  MatmulReduceScatter problem;
  // Partials go straight into the peers' slots; otherwise the copy engine moves them.
  bool store;
  int reserve;
};
struct ScatterOperands {
  void const* x;
  void const* weight;
  void const* bias;
  void const* addend;
  void* partials;  // of all peers' parts, [world - 1, strips, rows, n]; not used by `store`
  void* result;
};

class Workspace {
 public:
  struct Memory {
    int world, rank, device;
    std::vector<char*> slots;  // each rank's two slots, as this rank addresses them
    int64_t slot_bytes;
    std::vector<uint32_t*>
        words;            // each rank's SymmetricWords, likewise; zero before the first call
    int signals;          // in one set
    uint32_t* own_words;  // zero before the first call
    ErrorRecord* errors;  // pinned host memory
    uint64_t wait_limit_ns;
  };
  explicit Workspace(Memory memory);
  ~Workspace();
  Workspace(Workspace const&) = delete;

  // Both return false, and do nothing, if an earlier call of the group has failed.
  bool run(GatherCall const& call, GatherOperands const& operands, cudaStream_t stream);
  bool run(ScatterCall const& call, ScatterOperands const& operands, cudaStream_t stream);

  // Whether calls in it belong to a graph: then it must live as long as the graph may.
  bool captured() const { return captured_.any; }

 private:
  struct Turn {
    int slot;
    cudaStream_t stream;
  };
  Turn begin(cudaStream_t stream, int counters, Op op);
  Meeting meeting(Op op) const;
  SignalRegion region(uint32_t* words, int count, int index) const;
  char* slot(int rank, int turn) const { return memory_.slots[rank] + turn * memory_.slot_bytes; }
  uint32_t* signals(int rank, int turn) const {
    return memory_.words[rank] + SymmetricWords::kSignals + turn * memory_.signals;
  }
  uint32_t* epoch(int rank) const { return memory_.words[rank] + SymmetricWords::kEpoch; }

  Memory memory_;
  cudaStream_t copies_ = nullptr;
  cudaEvent_t forked_ = nullptr, joined_ = nullptr, ended_ = nullptr;
  int multiprocessors_ = 0;
  // Calls follow one another on the two slots in turn, serialised across streams: eager ones, and
  // those of the last capture.
  struct Sequence {
    unsigned long long capture = 0;  // 0: eager
    bool any = false;
    int turn = 0;
    cudaStream_t last_stream = nullptr;
  };
  Sequence eager_, captured_;
};

}  // namespace flux_inductor::cuda
