// What only tests use, apart from what the package does.
#include "bindings.h"
#include "core/epoch.h"

namespace py = pybind11;

void flux_inductor::bind_testing(py::module_& module) {
  auto testing = module.def_submodule("testing", "What only tests use.");
  testing.def("reached", &reached, py::arg("seen"), py::arg("expected"));
}
