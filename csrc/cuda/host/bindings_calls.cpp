// Python's view of bound calls. A shape's names are those of its members.
#include <pybind11/stl.h>

#include "cuda/host/bindings_cuda.h"
#include "cuda/host/bound_calls.h"

namespace flux_inductor::cuda {

namespace py = pybind11;

void bind_calls(py::module_& m) {
  py::class_<GatherShape>(m, "GatherShape")
      .def(py::init([](int world, int rank, int strips, int rows, int n, int k,
                       int64_t own_row_stride, int64_t own_strip_stride, int64_t weight_stride,
                       int rows_per_chunk, int last_rows, int slices, int group, int sms) {
             return GatherShape{world,
                                rank,
                                strips,
                                rows,
                                n,
                                k,
                                own_row_stride,
                                own_strip_stride,
                                weight_stride,
                                rows_per_chunk,
                                last_rows,
                                slices,
                                group,
                                sms};
           }),
           py::kw_only(), py::arg("world"), py::arg("rank"), py::arg("strips"), py::arg("rows"),
           py::arg("n"), py::arg("k"), py::arg("own_row_stride"), py::arg("own_strip_stride"),
           py::arg("weight_stride"), py::arg("rows_per_chunk"), py::arg("last_rows"),
           py::arg("slices"), py::arg("group"), py::arg("sms"));
  py::class_<ScatterShape>(m, "ScatterShape")
      .def(
          py::init([](int world, int rank, int strips, int rows, int n, int k, int64_t x_row_stride,
                      int64_t weight_stride, float scale, int group, int chunk_columns, int sms) {
            return ScatterShape{world,         rank,  strips, rows,          n,  k, x_row_stride,
                                weight_stride, scale, group,  chunk_columns, sms};
          }),
          py::kw_only(), py::arg("world"), py::arg("rank"), py::arg("strips"), py::arg("rows"),
          py::arg("n"), py::arg("k"), py::arg("x_row_stride"), py::arg("weight_stride"),
          py::arg("scale"), py::arg("group"), py::arg("chunk_columns"), py::arg("sms"));
  py::class_<GatherCall>(m, "GatherCall")
      .def(py::init<std::vector<AllGatherMatmulKernel const*> const&,
                    std::vector<GatherShape> const&>(),
           py::arg("kernels"), py::arg("shapes"))
      .def_property_readonly("signals_per_shard", &GatherCall::signals_per_shard);
  py::class_<ScatterCall>(m, "ScatterCall")
      .def(py::init<MatmulReduceScatterKernel const*, ScatterShape const&, bool, int>(),
           py::arg("kernel"), py::arg("shape"), py::arg("stores"), py::arg("device"))
      .def_property_readonly("chunks_per_part", &ScatterCall::chunks_per_part);
}

}  // namespace flux_inductor::cuda
