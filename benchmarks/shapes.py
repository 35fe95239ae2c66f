"""Shapes to measure: M rows of the whole product, N and K of one rank's weight."""

from __future__ import annotations

Shape = tuple[int, int, int]

# The shapes of the project's goals.
SHAPES: dict[str, tuple[Shape, ...]] = {
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

# Of GPT-3's feed-forward layer under tensor parallelism of 8, as the FLUX paper measures it.
PAPER_ROWS = (64, 512, 1024, 2048, 4096, 8192, 16384)
LLAMA_ROWS = (2048, 8192)


def paper_shapes(world: int) -> dict[str, tuple[Shape, ...]]:
    """The paper's shapes, and those of Llama-70B (gate and up, QKV; down, output) cut over `world` ranks."""
    gathers = [(m, 49152 // 8, 12288) for m in PAPER_ROWS]
    scatters = [(m, 12288, 49152 // 8) for m in PAPER_ROWS]
    gathers += [(m, n // world, 8192) for n in (2 * 28672, 8192 + 2 * 1024) for m in LLAMA_ROWS]
    scatters += [(m, 8192, k // world) for k in (28672, 8192) for m in LLAMA_ROWS]
    return {"all_gather_matmul": tuple(gathers), "matmul_reduce_scatter": tuple(scatters)}
