// Where a tile's results lie in shared memory before they are stored, and how registers get there.
//
// They need as much room as one or two stages of the mainloop's pipeline, which has nearly all of
// the shared memory. So they borrow a stage: behind a tile's last step along K comes one step more,
// whose stage the multiplying warps fill with results instead of emptying it; whoever stores them
// hands it back. As much of them as fits has spare buffers, all of a 128x128 tile. So the tensor
// cores idle only while results are written to shared memory, and the next tile's first operands
// are loaded meanwhile. What is to be added to the tile (a source) comes the same way: loaded into
// the borrowed stage and the spare buffers, added, and replaced by the sum in place.
//
// Measured, 128x256 tiles, K = 3584, one H200, in parts of the product's time, beside a kernel that
// adds and stores nothing: CUTLASS's epilogue, through buffers of 8 KB, 0.093; stores from
// registers to memory 0.067, of which 0.025 are the addition's; this 0.046.
#pragma once

#include "cuda/gemm/kernel_traits.cuh"
#include "cute/arch/copy_sm75.hpp"
#include "cute/arch/copy_sm90.hpp"
#include "cute/tensor.hpp"
#include "cutlass/numeric_conversion.h"

namespace flux_inductor::cuda {

// A tile as a grid of units of 64 rows, which one warpgroup has in its registers and one TMA
// operation moves. Rows of a unit are swizzled as TMA does it, so that neither side has bank
// conflicts.
template <class Config, int ElementBytes>
struct Units {
  static constexpr int kRows = 64;
  static constexpr int kPitch = 128;  // bytes, of one swizzled row
  static constexpr int kColumns = kPitch / ElementBytes;
  static constexpr int kBytes = kRows * kPitch;
  static constexpr int kDown = Config::tile.m / kRows;
  static constexpr int kAcross = Config::tile.n / kColumns;
  static constexpr int kCount = kDown * kAcross;
  static constexpr int kTileBytes = kCount * kBytes;
  static_assert(Config::tile.n % kColumns == 0);

  // A stage of the mainloop, whose elements have two bytes, and how many units fit its two parts.
  static constexpr int kBytesA = Config::tile.m * Config::tile.k * 2;
  static constexpr int kBytesB = Config::tile.n * Config::tile.k * 2;
  static constexpr int kInA = kBytesA / kBytes;
  static constexpr int kInB = kBytesB / kBytes;

  CUTLASS_DEVICE static int first_row(int unit) { return unit % kDown * kRows; }
  CUTLASS_DEVICE static int first_column(int unit) { return unit / kDown * kColumns; }
};

// A matrix [blocks, rows, columns] as TMA reads and writes it, unit by unit. Its ends are cut off.
template <class Config, ElementType type>
CUtensorMap unit_map(void const* address, int columns, int rows, int blocks) {
  using U = Units<Config, bytes_of(type)>;
  CUtensorMap map;
  cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows), cuuint64_t(blocks)};
  cuuint64_t row = cuuint64_t(columns) * bytes_of(type);
  cuuint64_t strides[] = {row, row * cuuint64_t(rows)};
  cuuint32_t box[] = {U::kColumns, U::kRows, 1};
  cuuint32_t steps[] = {1, 1, 1};
  constexpr CUtensorMapDataType kTypes[] = {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                            CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                                            CU_TENSOR_MAP_DATA_TYPE_FLOAT32};
  CUresult result =
      cuTensorMapEncodeTiled(&map, kTypes[int(type)], 3, const_cast<void*>(address), sizes, strides,
                             box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check_cuda(result, "cuTensorMapEncodeTiled");
  return map;
}

// What one thread has of a tile, by the layout of wgmma's results (PTX ISA, wgmma.mma_async,
// accumulator D): columns 8 j + 2 (lane % 4) + {0, 1} of rows lane / 4 + {0, 8} of its warp's 16.
// Elements of two bytes: four 8x8 matrices of ldmatrix and stmatrix are 16 columns of that. Of four
// bytes: pairs, in an order in which rows that lie in the same banks take turns.
template <class Config, class Element, int Groups>
class TileRegisters {
  static constexpr bool kWide = sizeof(Element) == 4;

 public:
  using U = Units<Config, sizeof(Element)>;
  static constexpr int kSteps = U::kDown / Groups;  // units below one another, of one warpgroup

  // `thread` among those that multiply the tile.
  CUTLASS_DEVICE explicit TileRegisters(int thread)
      : group_(thread / cutlass::NumThreadsPerWarpGroup),
        pair_(thread % 4 * 2),
        column_(first_column(thread)),
        row_((thread % cutlass::NumThreadsPerWarpGroup / cutlass::NumThreadsPerWarp * 16 +
              (kWide ? thread % cutlass::NumThreadsPerWarp / 4 : thread % 16)) *
             U::kPitch),
        odd_(thread / 4 % 2) {}

  template <class Accumulators>
  CUTLASS_DEVICE static void scale(Accumulators& sums, float factor) {
    if (factor == 1.f) return;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(sums); ++i) sums(i) *= factor;
  }

  // bias: of the tile's first column; `columns` from there on exist.
  template <class Accumulators>
  CUTLASS_DEVICE void add_bias(Accumulators& sums, Element const* bias, int columns) const {
    if (bias == nullptr) return;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Config::tile.n / 8; ++j) {
      if (8 * j + pair_ >= columns) continue;
      Pair pair = pair_at(bias + 8 * j + pair_);
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) sums(step * kPerStep + 4 * j + i) += pair[i % 2];
      }
    }
  }

  // at(unit): its address in shared memory.
  template <class Accumulators, class UnitAt>
  CUTLASS_DEVICE void add_source(Accumulators& sums, UnitAt at) const {
    if constexpr (kWide) {
      for_each_two_pairs(at, [&](int first, int second, float2* place, float2* other) {
        float2 a = *place, b = *other;
        sums(first) += odd_ ? b.x : a.x;
        sums(first + 1) += odd_ ? b.y : a.y;
        sums(second) += odd_ ? a.x : b.x;
        sums(second + 1) += odd_ ? a.y : b.y;
      });
    } else {
      for_each_quad(at, [&](int first, char* place) {
        uint32_t bits[4];
        cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t*>(place), bits[0], bits[1],
                                      bits[2], bits[3]);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 8; ++i) sums(first + i) += to_float(bits[i / 2])[i % 2];
      });
    }
  }

  template <class Accumulators, class UnitAt>
  CUTLASS_DEVICE void store(Accumulators const& sums, UnitAt at) const {
    if constexpr (kWide) {
      for_each_two_pairs(at, [&](int first, int second, float2* place, float2* other) {
        float2 a{sums(first), sums(first + 1)}, b{sums(second), sums(second + 1)};
        *place = odd_ ? b : a;
        *other = odd_ ? a : b;
      });
    } else {
      for_each_quad(at, [&](int first, char* place) {
        uint32_t bits[4];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) bits[i] = rounded(sums(first + 2 * i), sums(first + 2 * i + 1));
        cute::SM90_U32x4_STSM_N::copy(bits[0], bits[1], bits[2], bits[3],
                                      *reinterpret_cast<cute::uint128_t*>(place));
      });
    }
  }

 private:
  using Pair = cutlass::Array<float, 2>;
  static constexpr int kPerStep = Config::tile.n / 2;  // values of a thread

  CUTLASS_DEVICE static Pair pair_at(Element const* place) {
    if constexpr (kWide) {
      float2 pair = __ldg(reinterpret_cast<float2 const*>(place));
      return {pair.x, pair.y};
    } else {
      return to_float(__ldg(reinterpret_cast<uint32_t const*>(place)));
    }
  }
  CUTLASS_DEVICE static Pair to_float(uint32_t bits) {
    return cutlass::NumericArrayConverter<float, Element, 2>::convert(
        reinterpret_cast<cutlass::Array<Element, 2> const&>(bits));
  }
  CUTLASS_DEVICE static uint32_t rounded(float first, float second) {
    auto pair = cutlass::NumericArrayConverter<Element, float, 2>::convert(Pair{first, second});
    return reinterpret_cast<uint32_t const&>(pair);
  }

  // use(first, place): eight values from `first` on, and where their four matrices lie. All loops
  // must be unrolled, since registers have no addresses.
  template <class UnitAt, class Use>
  CUTLASS_DEVICE void for_each_quad(UnitAt at, Use use) const {
    CUTLASS_PRAGMA_UNROLL
    for (int across = 0; across < U::kAcross; ++across) {
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        char* row = at(across * U::kDown + step * Groups + group_) + row_;
        CUTLASS_PRAGMA_UNROLL
        for (int quad = 0; quad < U::kColumns / 16; ++quad) {
          use(step * kPerStep + across * U::kColumns / 2 + quad * 8, row + (column_ ^ (quad * 32)));
        }
      }
    }
  }

  // use(first, second, place, other): two pairs of a row, 16 columns apart, by their first values,
  // and where they lie; where the row is odd, the second one at `place`. In a unit, rows 2 i and
  // 2 i + 1 have the same 32 bytes of eight columns in the same banks, so that without the exchange
  // their accesses would collide. So 16 lanes, four rows, have all banks at a time.
  template <class UnitAt, class Use>
  CUTLASS_DEVICE void for_each_two_pairs(UnitAt at, Use use) const {
    CUTLASS_PRAGMA_UNROLL
    for (int across = 0; across < U::kAcross; ++across) {
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        char* row = at(across * U::kDown + step * Groups + group_) + row_;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) {
          int half = i / 2, j = i % 2;  // 8 rows further down; 8 columns further right
          int first = step * kPerStep + across * U::kColumns / 2 + 4 * j + 2 * half;
          char* place = row + half * 8 * U::kPitch;
          use(first, first + 8, reinterpret_cast<float2*>(place + (column_ ^ (j * 32))),
              reinterpret_cast<float2*>(place + (column_ ^ (j * 32 + 64))));
        }
      }
    }
  }

  // Of the first matrices' row that the lane points at, or of the lane's first pair; 16 bytes at a
  // time are swizzled.
  CUTLASS_DEVICE static int first_column(int thread) {
    int lane = thread % cutlass::NumThreadsPerWarp;
    if constexpr (!kWide) return (lane / 16 ^ lane % 8) * 16;
    int row = lane / 4;
    return (lane % 4 / 2 ^ row) * 16 + lane % 2 * 8 ^ row % 2 * 64;
  }

  int group_;   // warpgroup among those of the tile
  int pair_;    // column of the thread's first two values
  int column_;  // bytes
  int row_;     // bytes
  bool odd_;    // its row
};

}  // namespace flux_inductor::cuda
