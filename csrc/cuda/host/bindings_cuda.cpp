// Python's view of the CUDA kernels. No check is made here; the runtime passes what it has checked.
#include "cuda/host/bindings_cuda.h"

#include <pybind11/stl.h>

#include "bindings.h"
#include "cuda/all_gather/all_gather_matmul.h"
#include "cuda/reduce_scatter/matmul_reduce_scatter.h"
#include "cuda/sync/call_entry.h"

namespace flux_inductor::cuda {
namespace {

namespace py = pybind11;

template <class Problem>
void bind_menu(py::module_& m, char const* class_name, char const* list_name,
               std::vector<KernelEntry<Problem>> const& (*kernels)()) {
  using Entry = KernelEntry<Problem>;
  py::class_<Entry>(m, class_name)
      .def_property_readonly("tile", [](Entry const& e) { return to_string(e.tile); })
      .def_property_readonly("element", [](Entry const& e) { return name_of(e.element); })
      .def_property_readonly("result", [](Entry const& e) { return name_of(e.result); })
      .def_property_readonly(
          "layout",
          [](Entry const& e) { return e.layout == WeightLayout::k_major ? "k_major" : "n_major"; })
      .def("prepare", [](Entry const& e) { return e.prepare(); });
  m.def(list_name, kernels, py::return_value_policy::reference);
}

}  // namespace

void bind_kernels(py::module_& m) {
  bind_menu(m, "AllGatherMatmulKernel", "all_gather_matmul_kernels", &all_gather_matmul_kernels);
  bind_menu(m, "MatmulReduceScatterKernel", "matmul_reduce_scatter_kernels",
            &matmul_reduce_scatter_kernels);
  m.def("prepare_call_entry", &prepare_call_entry);
}

}  // namespace flux_inductor::cuda

void flux_inductor::bind_cuda(pybind11::module_& module) {
  auto submodule = module.def_submodule("cuda", "The CUDA kernels; addresses are integers.");
  cuda::bind_kernels(submodule);
  cuda::bind_calls(submodule);
  cuda::bind_workspace(submodule);
  auto testing = submodule.def_submodule("testing", "What only tests and benchmarks use.");
  cuda::bind_testing(testing);
}
