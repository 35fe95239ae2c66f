// The order in which one rank's kernel multiplies its tiles. Plain integers: the kernels, their
// launchers and the tests share this one description.
//
// The whole product is `parts` x `strips` blocks of the same size (a part is a rank's shard of an
// all_gather, or the rows a rank owns of a reduce_scatter), each cut into m_tiles x n_tiles tiles.
// Parts follow one another around the ring of ranks from `first_part` on. Inside a part, `group`
// rows of clusters are swept together along N, so that the tiles in flight share rows of A and
// columns of B in the L2 cache. A group never leaves its part (nor does a chunk, then; rule R1 in
// scatter_output.cuh), and the last group of a part may be smaller.
//
// The last two parts may take turns, cluster by cluster, the last one some clusters behind: `lead`.
//
//   parts 1 2 0, four clusters each, lead 2:   1a 1b 1c 1d  2a 2b  0a 2c 0b 2d  0c 0d
#pragma once

#include <algorithm>

#include "core/divider.h"
#include "core/tile.h"

namespace flux_inductor {

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct TileGrid {
  int parts;
  int first_part;
  int strips;
  int m_tiles;  // of one strip of one part
  int n_tiles;
  int cluster_m;
  int cluster_n;
  int group;

  // Of a product with parts of `strips` x `rows` rows, and `n` columns.
  static TileGrid of(Tile const& tile, int parts, int first_part, int strips, int rows, int n,
                     int group) {
    return {parts,          first_part,     strips, ceil_div(rows, tile.m), ceil_div(n, tile.n),
            tile.cluster_m, tile.cluster_n, group};
  }

  // Rows of clusters run over the strips of a part without a break, so that short strips waste no
  // cluster.
  int cluster_rows() const { return ceil_div(strips * m_tiles, cluster_m); }
  int cluster_columns() const { return ceil_div(n_tiles, cluster_n); }
};

// One tile. Clusters may reach over the end of a part: such padding tiles have real == false and
// coordinates out of the tensors' bounds, where TMA reads zeros and writes nothing.
struct TilePlace {
  int part;
  int strip;
  int m;  // tile row inside the strip
  int n;  // tile column
  bool real;
};

class TileOrder {
 public:
  TileOrder() = default;
  explicit TileOrder(TileGrid const& g)
      : parts_(g.parts),
        first_part_(g.first_part),
        strips_(g.strips),
        m_tiles_(g.m_tiles),
        n_tiles_(g.n_tiles),
        cluster_m_(g.cluster_m),
        cluster_n_(g.cluster_n),
        group_(g.group),
        rows_(g.cluster_rows()),
        columns_(g.cluster_columns()),
        groups_(ceil_div(rows_, g.group)),
        last_group_(rows_ - (groups_ - 1) * g.group),
        per_group_(g.group * columns_),
        per_part_(rows_ * columns_) {}

  // This order, but for the last two parts, which take turns; the last one begins when `lead` of
  // the clusters of the one before it have their places, and stays as far behind.
  TileOrder taking_turns(int lead) const {
    TileOrder order = *this;
    int alone = std::min(lead, clusters_per_part());
    order.turns_begin_ = clusters() - 2 * clusters_per_part() + alone;
    order.turns_ = 2 * (clusters_per_part() - alone);
    return order;
  }

  FLUX_HOST_DEVICE int parts() const { return parts_.value(); }
  FLUX_HOST_DEVICE int first_part() const { return first_part_; }
  FLUX_HOST_DEVICE int strips() const { return strips_; }
  FLUX_HOST_DEVICE int m_tiles() const { return m_tiles_.value(); }
  FLUX_HOST_DEVICE int n_tiles() const { return n_tiles_; }
  FLUX_HOST_DEVICE int cluster_m() const { return cluster_m_.value(); }
  FLUX_HOST_DEVICE int cluster_n() const { return cluster_n_.value(); }
  FLUX_HOST_DEVICE int group() const { return group_.value(); }
  FLUX_HOST_DEVICE int groups() const { return groups_; }
  FLUX_HOST_DEVICE int cluster_columns() const { return columns_; }
  FLUX_HOST_DEVICE int clusters_per_part() const { return per_part_.value(); }
  FLUX_HOST_DEVICE int clusters() const { return parts_.value() * per_part_.value(); }
  FLUX_HOST_DEVICE int rows_of_group(int g) const { return rows_divider(g).value(); }
  // Clusters of a part that come before the first one of those that hold a row of tiles.
  int clusters_before(int strip, int m) const {
    int row = cluster_row(strip, m);
    int first = group_.divide(row) * group_.value();
    return first * columns_ + row - first;
  }
  // Of the last two parts' turns: the first place, and how many follow.
  int turns_begin() const { return turns_begin_; }
  int turns() const { return turns_; }
  // Clusters to launch: as many as fit the SMs that they may use, and are of use.
  int clusters_at_work(int sms, int resident) const {
    int fit = std::min(sms / (cluster_m() * cluster_n()), resident);
    return std::max(1, std::min(fit, clusters()));
  }

  // Tile of the block (cta_m, cta_n) of the index-th cluster; 0 <= index < clusters().
  FLUX_HOST_DEVICE TilePlace at(int index, int cta_m, int cta_n) const {
    index = part_by_part(index);
    int step = per_part_.divide(index);
    int rest = index - step * per_part_.value();
    int g = per_group_.divide(rest);
    rest -= g * per_group_.value();
    Divider const& rows = rows_divider(g);
    int column = rows.divide(rest);
    int row = g * group_.value() + rest - column * rows.value();
    int flat = row * cluster_m_.value() + cta_m;
    int strip = m_tiles_.divide(flat);
    if (strip >= strips_) strip = strips_ - 1;
    int part = first_part_ + step;
    TilePlace place{part < parts() ? part : part - parts(), strip, flat - strip * m_tiles(),
                    column * cluster_n_.value() + cta_n, true};
    place.real = place.m < m_tiles() && place.n < n_tiles_;
    return place;
  }

  // Parts and strips as one coordinate, the way they lie in memory: [strips, parts].
  FLUX_HOST_DEVICE int block_of(int part, int strip) const { return strip * parts() + part; }
  FLUX_HOST_DEVICE int strip_of(int block) const { return parts_.divide(block); }
  FLUX_HOST_DEVICE int part_of(int block) const { return block - strip_of(block) * parts(); }

  // The group that a row of tiles belongs to.
  FLUX_HOST_DEVICE int group_of(int strip, int m) const {
    return group_.divide(cluster_row(strip, m));
  }
  FLUX_HOST_DEVICE int cluster_column(int n) const { return cluster_n_.divide(n); }

 private:
  // The place that the index-th cluster has where no parts take turns.
  FLUX_HOST_DEVICE int part_by_part(int index) const {
    int turn = index - turns_begin_;
    if (turn < 0 || turn >= turns_) return index;
    if (turn % 2 != 0) return turns_begin_ + turn / 2;
    return clusters() - per_part_.value() + turn / 2;
  }
  FLUX_HOST_DEVICE int cluster_row(int strip, int m) const {
    return cluster_m_.divide(strip * m_tiles() + m);
  }
  FLUX_HOST_DEVICE Divider const& rows_divider(int g) const {
    return g + 1 < groups_ ? group_ : last_group_;
  }

  Divider parts_;
  int first_part_ = 0;
  int strips_ = 1;
  Divider m_tiles_;
  int n_tiles_ = 1;
  Divider cluster_m_;
  Divider cluster_n_;
  Divider group_;  // rows of clusters swept together
  int rows_ = 1;   // of clusters in a part
  int columns_ = 1;
  int groups_ = 1;  // of a part
  Divider last_group_;
  Divider per_group_;  // clusters
  Divider per_part_;
  int turns_begin_ = 0;  // the first place of the last two parts' turns
  int turns_ = 0;
};

}  // namespace flux_inductor
