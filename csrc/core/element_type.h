// What tensors hold.
#pragma once

#include <array>
#include <string>

namespace flux_inductor {

enum class ElementType : int { bf16 = 0, fp16 = 1, fp32 = 2 };

inline constexpr std::array kElementTypes{ElementType::bf16, ElementType::fp16, ElementType::fp32};

constexpr int bytes_of(ElementType type) { return type == ElementType::fp32 ? 4 : 2; }

constexpr char const* name_of(ElementType type) {
  if (type == ElementType::fp32) return "fp32";
  return type == ElementType::bf16 ? "bf16" : "fp16";
}

}  // namespace flux_inductor
