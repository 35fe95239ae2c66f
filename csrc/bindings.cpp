// The Python module flux_inductor._core. It links neither libtorch nor, at run time, a CUDA
// library: tensors come as addresses or through DLPack (tensors.h), and importing it works on a
// machine without a GPU.
#include "bindings.h"

#include <system_error>

namespace py = pybind11;

PYBIND11_MODULE(_core, module) {
  module.doc() = "The compiled core of flux_inductor.";
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const std::system_error& error) {
      const py::tuple arguments = py::make_tuple(error.code().value(), error.what());
      PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
  });
  flux_inductor::bind_tensors(module);
  flux_inductor::bind_schedules(module);
  flux_inductor::bind_sm90(module);
  flux_inductor::bind_cpu(module);
  flux_inductor::bind_testing(module);
#if FLUX_INDUCTOR_CUDA
  flux_inductor::bind_cuda(module);
#endif
}
