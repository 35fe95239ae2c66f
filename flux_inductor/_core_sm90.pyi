"""`_core.sm90`: the sm_90 kernels as data (csrc/core/sm90.h), on every machine."""

MOST_RANKS: int
GRANULE: int  # elements
# As text, in order of preference.
GATHER_TILES: list[str]
SCATTER_TILES: list[str]
SCATTER_FP32_TILES: list[str]
KEEPING_BUFFERS: dict[str, int]  # by tile, bytes
