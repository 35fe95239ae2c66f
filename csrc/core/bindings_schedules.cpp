// The order of tiles, chunks and copies for Python: planning prices it, its checker proves it. What
// kernels find out tile by tile comes here as lists, made in one call.
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "core/gather_schedule.h"
#include "core/scatter_schedule.h"

namespace flux_inductor {
namespace {

namespace py = pybind11;
using Shape = std::array<int, 4>;  // of a tile: m, n, cluster_m, cluster_n

void check_positive(char const* name, int value) {
  if (value < 1) {
    throw std::invalid_argument(std::string(name) + "=" + std::to_string(value) +
                                ": must be at least 1");
  }
}

void check_rank(int world, int rank) {
  check_positive("world", world);
  if (rank < 0 || rank >= world) {
    throw std::invalid_argument("rank=" + std::to_string(rank) + ": must be one of " +
                                std::to_string(world));
  }
}

Tile tile_of(Shape const& shape) {
  for (int size : shape) check_positive("tile", size);
  return {shape[0], shape[1], GatherChunks::kStepDepth, shape[2], shape[3], false};
}

// Rows and columns of clusters in a part.
std::pair<int, int> clusters_of(Shape const& tile, int strips, int rows, int n) {
  TileGrid grid = TileGrid::of(tile_of(tile), 1, 0, strips, rows, n, 1);
  return {grid.cluster_rows(), grid.cluster_columns()};
}

// [first, last) of each chunk of a shard.
std::vector<std::pair<int, int>> cut_rows(int rows, int chunk, int last) {
  check_positive("chunk", chunk);
  Cut cut(rows, chunk, last);
  std::vector<std::pair<int, int>> chunks;
  for (int i = 0; i < cut.chunks(); ++i) chunks.emplace_back(cut.begin(i), cut.end(i));
  return chunks;
}

// The tiles of the blocks of one cluster, without padding; each by a function of its place.
template <class Function>
auto tiles_of_cluster(TileOrder const& order, int index, Function describe) {
  std::vector<decltype(describe(TilePlace{}))> tiles;
  for (int m = 0; m < order.cluster_m(); ++m) {
    for (int n = 0; n < order.cluster_n(); ++n) {
      TilePlace place = order.at(index, m, n);
      if (place.real) tiles.push_back(describe(place));
    }
  }
  return tiles;
}

template <class Function>
auto tiles_of_clusters(TileOrder const& order, Function describe) {
  std::vector<decltype(tiles_of_cluster(order, 0, describe))> clusters;
  for (int index = 0; index < order.clusters(); ++index)
    clusters.push_back(tiles_of_cluster(order, index, describe));
  return clusters;
}

struct GatherView {
  GatherTransfers transfers;
  TileOrder order;
  GatherChunks chunks;  // as this rank receives them
  Tile tile;

  // first row, last row, slices, and how many clusters of its part come before the first one that
  // needs it, of each chunk of a peer's shard
  using Chunk = std::tuple<int, int, int, int>;
  std::vector<Chunk> chunks_of(int source) const {
    Cut const& cut = chunks.cut_of(source);
    std::vector<Chunk> all;
    for (int chunk = 0; chunk < cut.chunks(); ++chunk) {
      int first = cut.begin(chunk);
      all.emplace_back(first, cut.end(chunk), chunks.sliced(source, first) ? chunks.slices() : 1,
                       order.clusters_before(0, first / tile.m));
    }
    return all;
  }

  // The waits of a tile, one after another: first and last signal, and the column of K up to which
  // it may load then.
  using Wait = std::tuple<int, int, int>;
  std::vector<Wait> waits_of(TilePlace const& place) const {
    std::vector<Wait> waits;
    if (place.part == transfers.rank) return waits;
    int first = place.m * tile.m, end = first + tile.m;
    int base = place.part * chunks.signals_per_shard();
    int left = ceil_div(transfers.k, GatherChunks::kStepDepth), done = 0;
    for (int slice = 0; left > 0; ++slice) {
      SignalRange range =
          chunks.signals_of(place.part, first, std::min(end, transfers.rows) - 1, slice);
      int steps = chunks.steps_of_slice(place.part, end - 1, left);
      left -= steps;
      done += steps;
      waits.emplace_back(base + range.first, base + range.last,
                         std::min(done * GatherChunks::kStepDepth, transfers.k));
    }
    return waits;
  }

  auto clusters() const {
    using Described = std::tuple<int, int, int, int, std::vector<Wait>>;
    return tiles_of_clusters(order, [this](TilePlace const& place) {
      return Described(place.part, place.strip, place.m, place.n, waits_of(place));
    });
  }

  // peer, rows, columns of K, signal
  auto copies() const {
    std::vector<std::tuple<int, int, int, int, int, int>> all;
    transfers.each_copy([&](GatherCopy const& copy) {
      all.emplace_back(copy.peer, copy.first_row, copy.last_row, copy.first_column,
                       copy.last_column, copy.signal);
    });
    return all;
  }
};

GatherView gather_view(int world, int rank, int strips, int rows, int n, int k, Shape const& shape,
                       int sweep, int chunk, int last, int slices) {
  check_rank(world, rank);
  check_positive("strips", strips);
  check_positive("rows", rows);
  check_positive("n", n);
  check_positive("k", k);
  check_positive("sweep", sweep);
  check_positive("chunk", chunk);
  check_positive("slices", slices);
  Tile tile = tile_of(shape);
  GatherTransfers transfers{world, rank, rows, k, chunk, last, slices};
  return {transfers, gather_order(tile, world, rank, strips, rows, n, sweep),
          transfers.chunks_at(rank), tile};
}

struct ScatterView {
  ScatterSchedule schedule;
  TileOrder parts;
  ScatterChunks chunks;

  std::vector<int> clusters_of_chunks() const {
    std::vector<int> all;
    for (int chunk = 0; chunk < chunks.per_part(); ++chunk)
      all.push_back(chunks.clusters(parts, chunk));
    return all;
  }

  TileOrder claims(int clusters) const { return schedule.claims(parts, chunks, clusters); }

  // part, strip, m, n, chunk of the tiles of every cluster, by the claim that gets it
  auto clusters(int at_once) const {
    using Described = std::tuple<int, int, int, int, int>;
    return tiles_of_clusters(claims(at_once), [this](TilePlace const& place) {
      return Described(place.part, place.strip, place.m, place.n,
                       chunks.chunk_of(parts, place.strip, place.m, place.n));
    });
  }

  // part, index, rows, columns, tiles
  auto parts_of_peers() const {
    std::vector<std::tuple<int, int, int, int, int, int, int>> all;
    schedule.each_chunk([&](ScatterChunk const& chunk) {
      all.emplace_back(chunk.part, chunk.index, chunk.first_row, chunk.last_row, chunk.first_column,
                       chunk.last_column, chunk.tiles);
    });
    return all;
  }
};

ScatterView scatter_view(int world, int rank, int strips, int rows, int n, Shape const& shape,
                         int sweep, int chunk_columns, bool stores) {
  check_rank(world, rank);
  check_positive("strips", strips);
  check_positive("rows", rows);
  check_positive("n", n);
  check_positive("sweep", sweep);
  check_positive("chunk_columns", chunk_columns);
  ScatterSchedule schedule{world,          rank,  strips,        rows,  n,
                           tile_of(shape), sweep, chunk_columns, stores};
  TileOrder parts = schedule.parts();
  return {schedule, parts, schedule.chunks(parts)};
}

}  // namespace

void bind_schedules(py::module_& module) {
  module.def("clusters_of", &clusters_of, py::arg("tile"), py::arg("strips"), py::arg("rows"),
             py::arg("n"));
  module.def("cut_rows", &cut_rows, py::arg("rows"), py::arg("chunk"), py::arg("last") = 0);

  py::class_<GatherView>(module, "GatherSchedule")
      .def(py::init(&gather_view), py::arg("world"), py::arg("rank"), py::arg("strips"),
           py::arg("rows"), py::arg("n"), py::arg("k"), py::arg("tile"), py::arg("sweep"),
           py::arg("chunk"), py::arg("last") = 0, py::arg("slices") = 1)
      .def("chunks", &GatherView::chunks_of, py::arg("source"))
      .def("clusters", &GatherView::clusters)
      .def("copies", &GatherView::copies);

  py::class_<ScatterView>(module, "ScatterSchedule")
      .def(py::init(&scatter_view), py::arg("world"), py::arg("rank"), py::arg("strips"),
           py::arg("rows"), py::arg("n"), py::arg("tile"), py::arg("sweep"),
           py::arg("chunk_columns"), py::arg("stores") = false)
      .def("clusters_of_chunks", &ScatterView::clusters_of_chunks)
      .def(
          "turns",
          [](ScatterView const& view, int at_once) {
            TileOrder claims = view.claims(at_once);
            return std::pair(claims.turns_begin(), claims.turns());
          },
          py::arg("at_once"))
      .def("clusters", &ScatterView::clusters, py::arg("at_once"))
      .def("chunks", &ScatterView::parts_of_peers);
}

}  // namespace flux_inductor
