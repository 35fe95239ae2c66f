// Division by a number that is fixed before a kernel starts: a multiplication and a shift instead
// of some hundred cycles. The method is that of Granlund and Montgomery, "Division by Invariant
// Integers using Multiplication" (1994), with numerators below 2^31, for which a multiplier of 32
// bits is enough.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace flux_inductor {

class Divider {
 public:
  Divider() : Divider(1) {}
  // NOLINTNEXTLINE: a number and its divider are interchangeable
  Divider(int divisor) : divisor_(divisor) {
    while ((int64_t(1) << shift_) < divisor) ++shift_;
    uint64_t power = uint64_t(1) << (31 + shift_);
    multiplier_ = static_cast<uint32_t>((power + divisor - 1) / divisor);
  }

  FLUX_HOST_DEVICE int value() const { return divisor_; }

  // 0 <= numerator < 2^31
  FLUX_HOST_DEVICE int divide(int numerator) const {
    return static_cast<int>(
        (static_cast<uint64_t>(static_cast<uint32_t>(numerator)) * multiplier_) >> (31 + shift_));
  }

 private:
  int divisor_;
  int shift_ = 0;
  uint32_t multiplier_;
};

}  // namespace flux_inductor
