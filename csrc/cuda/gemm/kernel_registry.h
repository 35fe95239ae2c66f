// What was compiled: the menu of tiles of each kernel family, as data.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "core/tile.h"

namespace flux_inductor::cuda {

inline constexpr int kMaxRanks = 8;  // whose memory one kernel can address

enum class ElementType : int { bf16 = 0, fp16 = 1, fp32 = 2 };  // fp32 of results alone
constexpr int bytes_of(ElementType type) { return type == ElementType::fp32 ? 4 : 2; }
enum class WeightLayout : int { k_major = 0, n_major = 1 };

template <class Problem>
struct KernelEntry {
  Tile tile;
  ElementType element;
  ElementType result;  // that of a scatter's partials, bias and addend, too
  WeightLayout layout;
  void (*launch)(Problem const&, cudaStream_t);
  int (*prepare)();  // loads the kernel; returns the clusters resident at once
};

// Every kernel of an op. Each family has a translation unit of its own, since it takes minutes to
// compile.
template <class Problem>
std::vector<KernelEntry<Problem>> all_families(
    std::initializer_list<std::vector<KernelEntry<Problem>> (*)()> families) {
  std::vector<KernelEntry<Problem>> all;
  for (auto family : families) {
    auto menu = family();
    all.insert(all.end(), menu.begin(), menu.end());
  }
  return all;
}

}  // namespace flux_inductor::cuda
