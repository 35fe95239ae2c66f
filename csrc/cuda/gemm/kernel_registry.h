// What was compiled, as data.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>
#include <vector>

#include "core/element_type.h"
#include "core/tile.h"

namespace flux_inductor::cuda {

enum class WeightLayout : int { k_major = 0, n_major = 1 };

template <class Problem>
struct KernelEntry {
  Tile tile;
  ElementType element;  // bf16 or fp16
  ElementType result;   // that of a scatter's partials, bias and addend, too
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
