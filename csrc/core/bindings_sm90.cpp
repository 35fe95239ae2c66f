// What planning knows of the sm_90 kernels, and of elements, on every machine.
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings.h"
#include "core/element_type.h"
#include "core/sm90.h"

namespace flux_inductor {
namespace {

namespace py = pybind11;

template <class Tiles>
std::vector<std::string> texts(Tiles const& tiles) {
  std::vector<std::string> all;
  for (Tile const& tile : tiles) all.push_back(to_string(tile));
  return all;
}

}  // namespace

void bind_sm90(py::module_& module) {
  py::dict bytes;
  for (ElementType type : kElementTypes) bytes[name_of(type)] = bytes_of(type);
  module.attr("ELEMENT_BYTES") = bytes;

  auto sm90 = module.def_submodule("sm90", "The sm_90 kernels as data.");
  sm90.attr("MOST_RANKS") = sm90::kMaxRanks;
  sm90.attr("GRANULE") = sm90::kGranule;
  sm90.attr("GATHER_TILES") = texts(sm90::kGatherTiles);
  sm90.attr("SCATTER_TILES") = texts(sm90::kScatterTiles);
  sm90.attr("SCATTER_FP32_TILES") = texts(sm90::kScatterFp32Tiles);
  py::dict buffers;
  for (Tile const& tile : sm90::kGatherTiles)
    buffers[py::str(to_string(tile))] = sm90::keeping_buffer(tile);
  sm90.attr("KEEPING_BUFFERS") = buffers;
}

}  // namespace flux_inductor
