// The parts of the module flux_inductor._core.cuda.
#pragma once

#include <pybind11/pybind11.h>

namespace flux_inductor::cuda {

void bind_kernels(pybind11::module_& module);
void bind_calls(pybind11::module_& module);
void bind_workspace(pybind11::module_& module);
void bind_testing(pybind11::module_& module);

}  // namespace flux_inductor::cuda
