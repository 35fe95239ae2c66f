"""The fused ops, one file each: what planning knows of an op stands there and nowhere else."""

from flux_inductor.planning.ops.all_gather_matmul import ALL_GATHER_MATMUL
from flux_inductor.planning.ops.matmul_reduce_scatter import MATMUL_REDUCE_SCATTER

OPS = (ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER)

__all__ = ["ALL_GATHER_MATMUL", "MATMUL_REDUCE_SCATTER", "OPS"]
