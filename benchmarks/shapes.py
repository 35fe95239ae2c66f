"""The shapes of the project's goals: M, N, K of the whole product, N and K of one rank's weight."""

from __future__ import annotations

from flux_inductor.planning.problem import Kind

Shape = tuple[int, int, int]

SHAPES: dict[Kind, tuple[Shape, ...]] = {
    "all_gather_matmul": (
        (8192, 6144, 12288),
        (4096, 6144, 12288),
        (2048, 6144, 12288),
        (1024, 6144, 12288),
        (8192, 7168, 8192),
        (4096, 7168, 8192),
        (2048, 7168, 8192),
        (8192, 1280, 8192),
        (4096, 1280, 8192),
        (64, 7168, 8192),
    ),
    "matmul_reduce_scatter": (
        (8192, 12288, 6144),
        (4096, 12288, 6144),
        (2048, 12288, 6144),
        (1024, 12288, 6144),
        (8192, 8192, 3584),
        (4096, 8192, 3584),
        (2048, 8192, 3584),
        (8192, 8192, 1024),
        (4096, 8192, 1024),
        (64, 8192, 3584),
    ),
}
