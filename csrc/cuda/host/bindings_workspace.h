#pragma once

#include <pybind11/pybind11.h>

namespace flux_inductor::cuda {

// Adds the workspace and its calls to the module of the CUDA kernels.
void bind_workspace(pybind11::module_& module);

}  // namespace flux_inductor::cuda
