// The end of a matmul_reduce_scatter: the partial products of all ranks become one result.
#pragma once

#include <cstdint>
#include <vector>

#include "core/element_type.h"

namespace flux_inductor::cpu {

// result = scale * (partials[0] + partials[1] + ...), added in fp32 in that order and rounded once
// to nearest even. Each partial is `count` rows of `width` elements without gaps; the result's rows
// are `pitch` elements apart. A null partial stands for what the result holds before: the own
// product.
void sum(ElementType type, void* result, std::int64_t pitch,
         const std::vector<const void*>& partials, std::int64_t count, std::int64_t width,
         float scale);

}  // namespace flux_inductor::cpu
