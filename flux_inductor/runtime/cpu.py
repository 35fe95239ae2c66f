"""The CPU engine: ranks of one host share memory; a thread moves chunks while the caller multiplies them.

Both ops follow the schedule of planning/schedule.py. The rules that make the exchange safe are in
docs/protocol.md, their proofs beside the code in csrc/cpu.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from flux_inductor.planning.ops import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from flux_inductor.planning.ops.call import Call
from flux_inductor.planning.ops.op import Op
from flux_inductor.planning.plan import Plan
from flux_inductor.runtime import engine
from flux_inductor.runtime.bound import Run
from flux_inductor.runtime.cpu_gather import gather
from flux_inductor.runtime.cpu_group import CpuGroup, RanksApart
from flux_inductor.runtime.cpu_scatter import scatter
from flux_inductor.runtime.groups import state_of
from flux_inductor.runtime.reference import ReferenceEngine

logger = logging.getLogger("flux_inductor.runtime")


_FUSED: Mapping[Op, Run] = {ALL_GATHER_MATMUL: gather, MATMUL_REDUCE_SCATTER: scatter}


class CpuEngine:
    """See `engine.Engine`.

    Plans are made for ranks that can share memory. Those of a graph that comes from Inductor's cache may meet
    others: there, calls run unfused. All ranks learn it alike, in the first call.
    """

    name = "cpu"

    def __init__(self) -> None:
        self._unfused = ReferenceEngine("unfused")

    def bind(self, call: Call, operands: Sequence[Any], group: str, plan: Plan) -> Run:
        unfused = self._unfused.bind(call, operands, group, plan)
        return partial(self._run, call, plan, state_of(group, CpuGroup), unfused)

    def _run(self, call: Call, plan: Plan, state: CpuGroup, unfused: Run, *operands: Any) -> Any:
        """One call. After any exception, also before it begins, the group is dead on all ranks (rule R9)."""
        try:
            if not state.apart:
                return _FUSED[call.op](state, call, plan, *operands)
        except RanksApart:
            logger.warning(
                "group %r runs its fused ops unfused: %s. Their plans were made for ranks of one host; if "
                "they came from Inductor's cache, clear it (TORCHINDUCTOR_CACHE_DIR) to plan anew",
                state.name,
                state.apart,
            )
        except BaseException as error:
            state.fail(error)
            raise
        engine.count_as(call.op, self, self._unfused)
        return unfused(*operands)
