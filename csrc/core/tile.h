// What one thread block computes, and the cluster of blocks that share loads.
#pragma once

#include <string>

namespace flux_inductor {

struct Tile {
  int m, n, k;
  int cluster_m, cluster_n;
  bool pingpong;

  friend constexpr bool operator==(Tile const& a, Tile const& b) {
    return a.m == b.m && a.n == b.n && a.k == b.k && a.cluster_m == b.cluster_m &&
           a.cluster_n == b.cluster_n && a.pingpong == b.pingpong;
  }
};

// "256x192x64/2x1", with "/pingpong" behind it where that schedule is used: the text of plans.
inline std::string to_string(Tile const& tile) {
  return std::to_string(tile.m) + "x" + std::to_string(tile.n) + "x" + std::to_string(tile.k) +
         "/" + std::to_string(tile.cluster_m) + "x" + std::to_string(tile.cluster_n) +
         (tile.pingpong ? "/pingpong" : "");
}

}  // namespace flux_inductor
