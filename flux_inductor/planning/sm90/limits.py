"""What the sm_90 kernels cannot do."""

from __future__ import annotations

from flux_inductor._core import sm90
from flux_inductor.planning.problem import Problem

GRANULE, MOST_RANKS = sm90.GRANULE, sm90.MOST_RANKS

# Such kernels are built, and tests/gpu/test_fp32_sums.py calls them with plans by hand.
UNPROVEN = "the kernels that sum partial products in fp32 have not been proven on a GPU yet"


def kernel_limit(problem: Problem) -> str:
    """Why the CUDA kernels cannot run this problem, as a sentence with the sizes; "" if they can.

    Sizes that are unknown until the program runs are taken for suitable; the engine checks them again.
    """
    if problem.dtype == "fp32":
        return "the CUDA kernels multiply bf16 and fp16; fp32 stays unfused"
    if problem.split == "columns":
        return "the CUDA kernels scatter rows; a scatter along the last dim stays unfused"
    if problem.world > MOST_RANKS:
        return f"the CUDA kernels serve at most {MOST_RANKS} ranks; the group has {problem.world}"
    sizes = [("K", problem.depth), *(("N", columns) for columns in problem.columns)]
    for name, size in sizes:
        if isinstance(size, int) and (size % GRANULE or size == 0):
            return f"the CUDA kernels need N and K to be multiples of {GRANULE}; {name} is {size}"
    return ""
