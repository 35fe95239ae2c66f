"""One pair of collective and matmul, described by its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import sympy

from flux_inductor._core import ELEMENT_BYTES

if TYPE_CHECKING:
    from flux_inductor.planning.ops.op import Op

Split: TypeAlias = Literal["rows", "columns"]
Size: TypeAlias = int | sympy.Expr
Layout: TypeAlias = Literal["k_major", "n_major"]


@dataclass(frozen=True)
class Problem:
    """Sizes of one pair, the same on every rank of the group.

    The whole product has `m` rows. A gather or scatter along an inner dim cuts it into `strips`, each of
    `world` shards of `rows` rows. With split "columns" (a scatter along the last dim) a shard is a range
    of columns instead, and `rows` counts all rows of x.

    Args:
        op: the fused op that would compute it.
        world: ranks of the group.
        columns: N of each weight on this rank; exactly one (the whole N) for matmul_reduce_scatter.
        depth: K on this rank.
        dtype: "bf16", "fp16" or "fp32".
        result: dtype in which matmul_reduce_scatter adds and returns; "": `dtype`. Partials travel in it.
        return_gathered: all_gather_matmul also returns the gathered tensor.
        addend: matmul_reduce_scatter adds another tensor before it reduces.
        layout: "k_major" if every weight [K, N] lies column by column, as in x @ W.t(), else "n_major".
    """

    op: Op
    world: int
    strips: Size
    rows: Size
    columns: tuple[Size, ...]
    depth: Size
    dtype: str
    split: Split = "rows"
    return_gathered: bool = False
    addend: bool = False
    layout: Layout = "k_major"
    result: str = ""

    def __post_init__(self) -> None:
        # Compilers hand over known sizes as sympy integers, too.
        for name in ("strips", "rows", "depth"):
            object.__setattr__(self, name, _plain(getattr(self, name)))
        object.__setattr__(self, "columns", tuple(_plain(size) for size in self.columns))
        assert self.world >= 1, self.world
        assert self.dtype in ELEMENT_BYTES, self.dtype
        assert self.result in ("", self.dtype, "fp32"), self.result
        if self.result == self.dtype:
            object.__setattr__(self, "result", "")
        assert self.columns
        self.op.check(self)
        if self.split == "columns" and isinstance(self.columns[0], int):
            assert self.columns[0] % self.world == 0, (self.columns, self.world)

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the operands."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def result_dtype(self) -> str:
        """Of what is moved and returned."""
        return self.result or self.dtype

    @property
    def result_itemsize(self) -> int:
        """Bytes of one element of what matmul_reduce_scatter moves and returns."""
        return ELEMENT_BYTES[self.result_dtype]

    @property
    def m(self) -> Size:
        """Rows of the whole product."""
        shards = self.world if self.split == "rows" else 1
        return self.strips * shards * self.rows

    @property
    def extent(self) -> Size:
        """What chunks are cut from: rows of one shard (in every strip), or columns of one."""
        if self.split == "rows":
            return self.rows
        columns = self.columns[0]
        return columns // self.world if isinstance(columns, int) else columns / self.world

    @property
    def flops(self) -> Size:
        """Floating point operations of one rank's matmuls."""
        return 2 * self.m * sum(self.columns) * self.depth

    @property
    def shard_bytes(self) -> Size:
        """Bytes that one rank sends to one peer."""
        return self.op.shard_bytes(self)

    @property
    def moved_bytes(self) -> Size:
        """Bytes that one rank receives from all its peers, and sends to them."""
        return (self.world - 1) * self.shard_bytes

    @property
    def symbols(self) -> frozenset[sympy.Symbol]:
        """Sizes that are unknown until the program runs."""
        sizes = (self.strips, self.rows, *self.columns, self.depth)
        free = (size.free_symbols for size in sizes if isinstance(size, sympy.Expr))
        return frozenset().union(*free)


def _plain(size: Size) -> Size:
    return int(size) if isinstance(size, sympy.Integer) else size
