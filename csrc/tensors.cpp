#include "tensors.h"

#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"

namespace flux_inductor {
namespace {

namespace py = pybind11;

constexpr uint32_t kMajorVersion = 1;
constexpr int kAlignment = 16;  // bytes; what TMA asks of addresses

// DLPack 1's DLPackExchangeAPI; the functions that are not called here have no type.
struct ExchangeTable {
  uint32_t major, minor;
  ExchangeTable const* older;
  void (*allocate)();
  void (*lend_managed)();
  void (*adopt)();
  int (*lend)(void* tensor, TensorView* view);
  int (*current_stream)(int32_t device_type, int32_t device_index, void** stream);
};

ExchangeTable const* table = nullptr;

void use_exchange_table(py::capsule const& capsule) {
  ExchangeTable const* offered = capsule.get_pointer<ExchangeTable const>();
  while (offered != nullptr && offered->major != kMajorVersion) offered = offered->older;
  if (offered == nullptr) {
    throw std::runtime_error(
        "this torch lends tensors by another major version of DLPack than 1; install torch 2.11 to "
        "2.14");
  }
  table = offered;
}

// Whoever uses a tensor first need not have told of the table.
ExchangeTable const& exchange() {
  if (table == nullptr) {
    use_exchange_table(
        py::module_::import("torch").attr("Tensor").attr("__dlpack_c_exchange_api__"));
  }
  return *table;
}

enum Kind : uint64_t { kNone, kTensor, kList };

// One word of what a tensor is, then its sizes and strides; so no two descriptions of different
// operands are alike.
void describe_tensor(PyObject* tensor, std::vector<uint64_t>& words) {
  TensorView view = view_of(tensor);
  if (view.data == nullptr && !view.empty()) {
    throw std::invalid_argument(
        "a fused op cannot use an operand whose memory was freed, as sharded training frees "
        "parameters between their uses; restore it before the call");
  }
  uint64_t aligned = view.address() % kAlignment == 0;
  words.push_back(kTensor | aligned << 2 | uint64_t(view.dims) << 3 |
                  uint64_t(view.type_code) << 10 | uint64_t(view.type_bits) << 18 |
                  uint64_t(view.type_lanes) << 26 | uint64_t(view.device_type) << 42 |
                  uint64_t(view.device_index) << 50);
  for (int dim = 0; dim < view.dims; ++dim) {
    words.push_back(view.sizes[dim]);
    words.push_back(view.strides[dim]);
  }
}

void describe(PyObject* operand, std::vector<uint64_t>& words) {
  if (operand == Py_None) {
    words.push_back(kNone);
  } else if (PyList_CheckExact(operand)) {
    Py_ssize_t size = PyList_GET_SIZE(operand);
    words.push_back(kList | uint64_t(size) << 2);
    for (Py_ssize_t i = 0; i < size; ++i) describe(PyList_GET_ITEM(operand, i), words);
  } else {
    describe_tensor(operand, words);
  }
}

// A plain C function, since pybind11 would cost as much as what it does.
PyObject* describe_all(PyObject*, PyObject* const* operands, Py_ssize_t count) {
  thread_local std::vector<uint64_t> words;
  words.clear();
  try {
    for (Py_ssize_t i = 0; i < count; ++i) describe(operands[i], words);
  } catch (py::error_already_set const& error) {
    std::string why = error.what();
    PyErr_Format(PyExc_ValueError,
                 "a fused op cannot use this operand (%s); pass dense tensors of bfloat16, float16 "
                 "or float32 on the CPU or a CUDA device",
                 why.substr(0, why.find('\n')).c_str());
    return nullptr;
  } catch (std::invalid_argument const& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
  } catch (std::bad_alloc const&) {
    return PyErr_NoMemory();
  } catch (std::exception const& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<char const*>(words.data()),
                                   words.size() * sizeof(uint64_t));
}

PyMethodDef functions[] = {
    {"describe", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(describe_all)),
     METH_FASTCALL,
     "What distinguishes these operands, each a tensor, None or a list of them, to a bound call."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

TensorView view_of(py::handle tensor) {
  TensorView view;
  if (exchange().lend(tensor.ptr(), &view) != 0) throw py::error_already_set();
  return view;
}

void* current_stream(TensorView const& tensor) {
  void* stream = nullptr;
  if (exchange().current_stream(tensor.device_type, tensor.device_index, &stream) != 0) {
    throw py::error_already_set();
  }
  return stream;
}

void bind_tensors(py::module_& m) {
  m.def("use_exchange_table", &use_exchange_table);
  m.attr("ALIGNMENT") = kAlignment;
  if (PyModule_AddFunctions(m.ptr(), functions) != 0) throw py::error_already_set();
}

}  // namespace flux_inductor
