// Torch's tensors without libtorch: through the table of C functions that DLPack defines, and that
// the class of tensors carries (torch.Tensor.__dlpack_c_exchange_api__).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace flux_inductor {

// What a tensor is and where it lies, lent as long as the tensor lives. The layout is that of
// DLPack 1's DLTensor.
struct TensorView {
  void* data;
  int32_t device_type, device_index;
  int32_t dims;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t const* sizes;
  int64_t const* strides;
  uint64_t byte_offset;

  bool empty() const {
    for (int dim = 0; dim < dims; ++dim) {
      if (sizes[dim] == 0) return true;
    }
    return false;
  }
  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(data) + byte_offset; }
};

// Throws Python's exception if it is no tensor, or one without strides or an address.
TensorView view_of(pybind11::handle tensor);

// Torch's current stream of the device that a tensor is on.
void* current_stream(TensorView const& tensor);

// The address of an optional tensor: 0 for None.
inline std::uintptr_t address_of(pybind11::handle tensor) {
  return tensor.is_none() ? 0 : view_of(tensor).address();
}

}  // namespace flux_inductor
