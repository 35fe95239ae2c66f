#include "cpu/sum.h"

#include <algorithm>
#include <cstring>

// One binary runs everywhere and still uses wide vectors where there are any.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define FLUX_WIDE_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FLUX_WIDE_VECTORS
#endif
#define FLUX_INLINE inline __attribute__((always_inline))

namespace flux_inductor::cpu {
namespace {

constexpr std::int64_t kBlock = 512;  // elements whose fp32 sums stay in the first-level cache

FLUX_INLINE float as_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

FLUX_INLINE std::uint32_t as_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

struct Bf16 {
  using Storage = std::uint16_t;
  FLUX_INLINE static float load(Storage value) { return as_float(std::uint32_t{value} << 16); }
  FLUX_INLINE static Storage store(float value) {
    const std::uint32_t bits = as_bits(value);
    const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const std::uint32_t quiet_nan = (bits >> 16) | 0x40;
    return static_cast<Storage>((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded);
  }
};

// Written with selects instead of branches and without denormal intermediates, so that compilers
// vectorise it and flush-to-zero mode does not change it.
struct Fp16 {
  using Storage = std::uint16_t;

  FLUX_INLINE static float load(Storage value) {
    const std::uint32_t sign = (std::uint32_t{value} & 0x8000) << 16;
    const std::uint32_t magnitude = std::uint32_t{value} & 0x7fff;
    const std::uint32_t normal = (magnitude << 13) + (112u << 23);  // exponent bias 127 - 15
    const std::uint32_t special = normal + (112u << 23);            // Inf and NaN: exponent 255
    const std::uint32_t small =
        as_bits(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
    const std::uint32_t finite = magnitude < 0x400 ? small : normal;
    return as_float(sign | (magnitude >= 0x7c00 ? special : finite));
  }

  FLUX_INLINE static Storage store(float value) {
    const std::uint32_t sign = (as_bits(value) >> 16) & 0x8000;
    const std::uint32_t magnitude = as_bits(value) & 0x7fffffff;
    const std::uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding 1/2 puts the last bit of the sum where fp16's denormals end, so the addition rounds.
    const std::uint32_t small = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
    const std::uint32_t finite = magnitude < (113u << 23) ? small : normal;
    const std::uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    return static_cast<Storage>(sign | (magnitude >= (143u << 23) ? special : finite));
  }
};

struct Fp32 {
  using Storage = float;
  FLUX_INLINE static float load(Storage value) { return value; }
  FLUX_INLINE static Storage store(float value) { return value; }
};

using Partials = std::vector<const void*>;

// One row; `offset` is where it begins in each partial.
template <class Type>
FLUX_INLINE void sum_row(typename Type::Storage* result, const Partials& partials,
                         std::int64_t offset, std::int64_t width, float scale) {
  using Storage = typename Type::Storage;
  float total[kBlock];
  for (std::int64_t begin = 0; begin < width; begin += kBlock) {
    const std::int64_t size = std::min(kBlock, width - begin);
    Storage* out = result + begin;
    for (std::size_t p = 0; p < partials.size(); ++p) {
      const Storage* next =
          partials[p] == nullptr ? out : static_cast<const Storage*>(partials[p]) + offset + begin;
      if (p == 0) {
        for (std::int64_t i = 0; i < size; ++i) total[i] = Type::load(next[i]);
      } else {
        for (std::int64_t i = 0; i < size; ++i) total[i] += Type::load(next[i]);
      }
    }
    for (std::int64_t i = 0; i < size; ++i) out[i] = Type::store(total[i] * scale);
  }
}

template <class Type>
FLUX_INLINE void sum_rows(void* result, std::int64_t pitch, const Partials& partials,
                          std::int64_t count, std::int64_t width, float scale) {
  if (pitch == width) {
    width *= count;
    count = 1;
  }
  for (std::int64_t row = 0; row < count; ++row) {
    sum_row<Type>(static_cast<typename Type::Storage*>(result) + row * pitch, partials, row * width,
                  width, scale);
  }
}

FLUX_WIDE_VECTORS void sum_bf16(void* result, std::int64_t pitch, const Partials& partials,
                                std::int64_t count, std::int64_t width, float scale) {
  sum_rows<Bf16>(result, pitch, partials, count, width, scale);
}

FLUX_WIDE_VECTORS void sum_fp16(void* result, std::int64_t pitch, const Partials& partials,
                                std::int64_t count, std::int64_t width, float scale) {
  sum_rows<Fp16>(result, pitch, partials, count, width, scale);
}

FLUX_WIDE_VECTORS void sum_fp32(void* result, std::int64_t pitch, const Partials& partials,
                                std::int64_t count, std::int64_t width, float scale) {
  sum_rows<Fp32>(result, pitch, partials, count, width, scale);
}

}  // namespace

void sum(ElementType type, void* result, std::int64_t pitch,
         const std::vector<const void*>& partials, std::int64_t count, std::int64_t width,
         float scale) {
  switch (type) {
    case ElementType::bf16:
      return sum_bf16(result, pitch, partials, count, width, scale);
    case ElementType::fp16:
      return sum_fp16(result, pitch, partials, count, width, scale);
    case ElementType::fp32:
      return sum_fp32(result, pitch, partials, count, width, scale);
  }
}

}  // namespace flux_inductor::cpu
