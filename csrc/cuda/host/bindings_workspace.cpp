// Python's view of a group's CUDA workspace. Its memory comes as integers, operands as tensors.
#include <pybind11/stl.h>

#include "cuda/host/addresses.h"
#include "cuda/host/bindings_cuda.h"
#include "cuda/host/launch_error.h"
#include "cuda/host/workspace.h"
#include "tensors.h"

namespace flux_inductor::cuda {
namespace {

namespace py = pybind11;
template <class T>
std::vector<T*> pointers(Addresses const& addresses) {
  std::vector<T*> result;
  for (Address address : addresses) result.push_back(pointer<T>(address));
  return result;
}

py::handle item(py::list const& list, size_t i) { return PyList_GET_ITEM(list.ptr(), i); }

template <class T>
T* data_of(py::handle tensor) {
  return pointer<T>(address_of(tensor));
}

CUstream_st* stream_of(py::handle tensor) {
  return static_cast<CUstream_st*>(current_stream(view_of(tensor)));
}

GatherTensors tensors(GatherCall const& call, py::handle x, py::list const& weights,
                      py::list const& biases, py::list const& results) {
  size_t count = call.launches().size();
  bool keeps = results.size() == count + 1;
  if (weights.size() != count || (biases.size() != 0 && biases.size() != count) ||
      (results.size() != count && !keeps)) {
    throw std::invalid_argument("lists of another length than the call was made for");
  }
  GatherTensors all{data_of<void const>(x), nullptr, {}};
  if (keeps) all.kept = data_of<void>(item(results, count));
  all.launches.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    void const* bias = biases.size() == 0 ? nullptr : data_of<void const>(item(biases, i));
    all.launches.push_back(
        {data_of<void const>(item(weights, i)), bias, data_of<void>(item(results, i))});
  }
  return all;
}

Workspace::Memory memory(int world, int rank, int device, Addresses const& slots,
                         int64_t slot_bytes, Addresses const& signals, int signals_per_set,
                         Address own_words, int counters, Address errors, uint64_t wait_limit_ns) {
  return {world,           rank,
          device,          pointers<char>(slots),
          slot_bytes,      pointers<Epoch>(signals),
          signals_per_set, pointer<uint32_t>(own_words),
          counters,        pointer<ErrorRecord>(errors),
          wait_limit_ns};
}

// (op, source, chunk, expected, seen), or None while there is no error.
py::object read_error(Address address) {
  auto const* record = pointer<ErrorRecord const volatile>(address);
  if (record->state != 2) return py::none();
  return py::make_tuple(static_cast<uint32_t>(record->op), static_cast<uint32_t>(record->source),
                        static_cast<uint32_t>(record->chunk), static_cast<Epoch>(record->expected),
                        static_cast<Epoch>(record->seen));
}

// Ends all waits of a rank's kernels: as if one had failed, but for another reason (rule R4).
void end_waits(Address address) {
  auto* record = pointer<ErrorRecord>(address);
  uint32_t none = 0;
  if (!__atomic_compare_exchange_n(&record->state, &none, 1u, false, __ATOMIC_ACQ_REL,
                                   __ATOMIC_ACQUIRE))
    return;
  record->op = record->source = record->chunk = 0;
  record->expected = record->seen = 0;
  __atomic_store_n(&record->state, 2u, __ATOMIC_RELEASE);
}

bool any_capturing(Addresses const& streams) {
  for (Address stream : streams) {
    cudaStreamCaptureStatus status{};
    check_cuda(cudaStreamIsCapturing(stream_at(stream), &status), "cudaStreamIsCapturing");
    if (status != cudaStreamCaptureStatusNone) return true;
  }
  return false;
}

// What this thread does from now on breaks no capture of another thread's.
void allow_beside_captures() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
}

}  // namespace

void bind_workspace(py::module_& m) {
  py::class_<Workspace>(m, "Workspace")
      .def(py::init([](int world, int rank, int device, Addresses const& slots, int64_t slot_bytes,
                       Addresses const& signals, int signals_per_set, Address own_words,
                       int counters, Address errors, uint64_t wait_limit_ns) {
             return std::make_unique<Workspace>(memory(world, rank, device, slots, slot_bytes,
                                                       signals, signals_per_set, own_words,
                                                       counters, errors, wait_limit_ns));
           }),
           py::arg("world"), py::arg("rank"), py::arg("device"), py::arg("slots"),
           py::arg("slot_bytes"), py::arg("signals"), py::arg("signals_per_set"),
           py::arg("own_words"), py::arg("counters"), py::arg("errors"), py::arg("wait_limit_ns"))
      .def_property_readonly("captured", &Workspace::captured)
      // Operands are dense and aligned; the results are the products, then the gathered tensor if
      // it is kept. Both return 0 if the group has failed, 1 for an eager call, 2 for a captured
      // one.
      .def("all_gather_matmul",
           [](Workspace& workspace, GatherCall const& call, py::handle x, py::list const& weights,
              py::list const& biases, py::list const& results) {
             GatherTensors all = tensors(call, x, weights, biases, results);
             CUstream_st* stream = stream_of(x);
             py::gil_scoped_release release;
             return static_cast<int>(workspace.run(call, all, stream));
           })
      .def("matmul_reduce_scatter",
           [](Workspace& workspace, ScatterCall const& call, py::handle x, py::handle weight,
              py::handle bias, py::handle addend, py::handle partials, py::handle result) {
             ScatterTensors all{data_of<void const>(x),    data_of<void const>(weight),
                                data_of<void const>(bias), data_of<void const>(addend),
                                data_of<void>(partials),   data_of<void>(result)};
             CUstream_st* stream = stream_of(x);
             py::gil_scoped_release release;
             return static_cast<int>(workspace.run(call, all, stream));
           });
  m.def("symmetric_signals", &SymmetricSignals::count);
  m.def("own_words", &OwnWords::count);
  m.attr("ERROR_RECORD_BYTES") = sizeof(ErrorRecord);
  m.attr("MEETING_CHUNK") = kMeetingChunk;
  m.attr("OWN_COPIES_CHUNK") = kOwnCopiesChunk;
  m.attr("UNLIKE_CHUNK") = kUnlikeChunk;
  m.def("read_error", &read_error);
  m.def("end_waits", &end_waits);
  m.def("any_capturing", &any_capturing);
  m.def("allow_beside_captures", &allow_beside_captures);
}

}  // namespace flux_inductor::cuda
