"""The CUDA engine: kernels on the caller's stream, copies on a stream beside it, one call into C++ for both.

What happens on the streams: csrc/cuda/host/workspace.cpp. What ranks do together on the host: cuda_group.py.
A call is bound once to all that depends on its shapes; then it allocates results and passes on tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flux_inductor.planning.ops import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from flux_inductor.planning.ops.call import Call
from flux_inductor.planning.ops.op import Op
from flux_inductor.planning.plan import Plan
from flux_inductor.runtime.bound import Run
from flux_inductor.runtime.cuda_gather import bind_gather
from flux_inductor.runtime.cuda_group import CudaGroup
from flux_inductor.runtime.cuda_prepare import Preparation
from flux_inductor.runtime.cuda_scatter import bind_scatter
from flux_inductor.runtime.groups import state_of

_BINDS: Mapping[Op, Callable[..., Run]] = {
    ALL_GATHER_MATMUL: bind_gather,
    MATMUL_REDUCE_SCATTER: bind_scatter,
}


class CudaEngine:
    """See `engine.Engine`. The ranks of a group are GPUs that can address each other's memory.

    Args:
        group: the kind of state that is kept for a process group.
        prepare: what makes kernels and sizes of a call and a plan.
    """

    name = "cuda"

    def __init__(self, group: type[CudaGroup] = CudaGroup, prepare: Preparation | None = None) -> None:
        self._group = group
        self._prepare = prepare or Preparation()

    def bind(self, call: Call, operands: Sequence[Any], group: str, plan: Plan) -> Run:
        state = state_of(group, self._group)
        state.use(operands[0].device)
        _check_reserve(plan, state.sms)
        return _BINDS[call.op](state, self._prepare, call, plan, *operands)


def _check_reserve(plan: Plan, whole: int) -> None:
    if plan.reserve > whole // 2:
        raise ValueError(
            f"plan '{plan}' leaves {plan.reserve} of {whole} SMs to others; reserve at most {whole // 2}"
        )
