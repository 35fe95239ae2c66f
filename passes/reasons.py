"""Why a collective is left alone: stable codes for programs, sentences for people."""

from __future__ import annotations

from dataclasses import dataclass

# code: (what it means, whether strict=True treats it as an error).
#
# strict catches pairs that the fused ops could express and that something incidental kept apart. It leaves
# in peace what no fused op expresses, what the strategy found slower, and what the user asked for.
CODES: dict[str, tuple[str, bool]] = {
    # No pair, or one that no fused op expresses.
    "other-collective": ("a collective of a kind that is not fused", False),
    "no-matmul": ("no matmul takes the gathered tensor, or makes the scattered one", False),
    "chunk-order": ("shards are put together, or cut, in another order than the ranks'", False),
    "partial": ("only a part of the gathered tensor is multiplied, or of the product scattered", False),
    "contracted": ("the gathered dim is the one that the matmul sums over", False),
    "as-weight": ("the gathered tensor is the matmul's weight, as in sharded-data-parallel programs", False),
    "reduce-op": ("the reduction is neither sum nor avg", False),
    "product-used": ("the product is needed whole elsewhere, and the fused op has no output for it", False),
    "batched-weight": ("every batch entry has a weight of its own", False),
    "factor": ("what scales the tensor between collective and matmul cannot move to an operand", False),
    "matmul-taken": ("the matmul is already part of another fused op", False),
    # A pair, but not one that may be fused here.
    "cast": ("a cast between collective and matmul cannot move to the collective's other side", False),
    "dtype": ("the fused ops take bfloat16, float16 and float32", True),
    "mixed-dtypes": ("the operands differ in dtype or device", True),
    "scaled-addmm": ("addmm with alpha or beta other than 1", True),
    "layouts": ("the gathered tensor is needed in two arrangements at once", True),
    "operand-order": (
        "another operand can only be computed after the gather or a later collective",
        True,
    ),
    "not-divisible": ("a size does not divide by the number of ranks", True),
    "unknown-size": ("a symbolic size does not say what must be known", True),
    "group": ("the process group has no name here, or does not contain this rank", True),
    "one-rank": ("the group has one rank: there is nothing to overlap", False),
    "cpp-wrapper": ("Inductor's option cpp_wrapper is set", True),
    "empty": ("a tensor without elements", False),
    # What the strategy says.
    "topology": ("no fused op for this topology", True),
    "no-schedule": ("no schedule for this plan", True),
    "no-engine": ("no engine executes fused ops on this device", True),
    "kernel": ("the kernels of this device do not take such sizes or dtypes", True),
    "never": ("strategy=never", False),
    "not-profitable": ("predicted to be no faster than collective and matmul apart", False),
    # What ranks find out together when the graph first runs.
    "ranks-differ": ("compiled fused, but runs unfused since another rank cannot fuse it", False),
}


@dataclass(frozen=True)
class Reason:
    """One cause. `code` is a key of CODES, `text` a sentence that names shapes and values."""

    code: str
    text: str

    def __post_init__(self) -> None:
        assert self.code in CODES, self.code

    @property
    def strict(self) -> bool:
        """Whether the option strict=True makes an error of it."""
        return CODES[self.code][1]
