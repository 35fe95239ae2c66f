// Each engine adds its part to the module flux_inductor._core.
#pragma once

#include <pybind11/pybind11.h>

namespace flux_inductor {

void bind_tensors(pybind11::module_& module);
void bind_schedules(pybind11::module_& module);
void bind_sm90(pybind11::module_& module);
void bind_cpu(pybind11::module_& module);
void bind_testing(pybind11::module_& module);
void bind_cuda(pybind11::module_& module);  // only where FLUX_INDUCTOR_CUDA is 1

}  // namespace flux_inductor
