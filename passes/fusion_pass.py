"""The passes as one pass of Inductor: its post_grad_custom_post_pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch._functorch._aot_autograd.logging_utils import get_aot_compilation_context
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from flux_inductor.options import Options
from flux_inductor.passes.cache_key import cache_key
from flux_inductor.passes.decide import Setting, TopologyOf
from flux_inductor.passes.pass_list import PassRun, run_passes
from flux_inductor.passes.reasons import CODES
from flux_inductor.passes.record import CollectiveRecord
from flux_inductor.planning.installed import CPU_ONLY, Installed

logger = logging.getLogger("flux_inductor.passes")

# Exists from torch 2.12 on. A pass of this kind is told whether the graph is for inference.
_InferenceAware: type[Any] = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)


class FusionPass(_InferenceAware):  # type: ignore[misc, valid-type, unused-ignore]
    """Runs the user's pass, then fuses.

    Args:
        chained: what the user has set as Inductor's hook: None, a callable, a CustomGraphPass, or a sequence
            of them. It runs first, so that what it makes is fused too.
        on_records: gets one record for each collective of every graph that is compiled. A graph that comes
            from Inductor's cache does not run the pass.
        topology_of: the topology of a group, by its name and the type of device.
        installed: the engines that there are.
    """

    def __init__(
        self,
        options: Options,
        chained: object,
        on_records: Callable[[list[CollectiveRecord]], None],
        topology_of: TopologyOf,
        installed: Installed = CPU_ONLY,
    ) -> None:
        self._options = options
        self._chained = _as_sequence(chained)
        self._on_records = on_records
        self._setting = Setting(options, topology_of, installed)
        self.runs: list[PassRun] = []
        """What each of our passes has done and taken so far, graph by graph."""

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        """Rewrites the graph in place.

        Raises:
            ValueError: the option strict is set and a pair that could be fused is not; names every one.
        """
        for one in self._chained:
            if _InferenceAware is not CustomGraphPass and isinstance(one, _InferenceAware):
                one(graph, is_inference)
            else:
                one(graph)
        records, runs = run_passes(graph, _graph_name(), self._setting)
        self.runs += runs
        _log_summary(records, sum(run.seconds for run in runs))
        self._on_records(records)
        if self._options.strict:
            _check_strict(records)

    @property
    def seconds(self) -> float:
        """Time that our passes have taken so far, without the user's."""
        return sum(run.seconds for run in self.runs)

    def uuid(self) -> Any | None:
        """A key for Inductor's cache; None, which bypasses it, if a chained pass has none."""
        uuids = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self._chained]
        return (cache_key(self._options, self._setting.installed), tuple(uuids)) if all(uuids) else None


def _as_sequence(chained: object) -> Sequence[Any]:
    if chained is None:
        return ()
    return tuple(chained) if isinstance(chained, (list, tuple)) else (chained,)


def _graph_name() -> str:
    """Such as "forward 0": what AOTAutograd is compiling, and the number that it gave the graph."""
    names, _, _ = get_aot_compilation_context()
    number, _, kind = names[0].partition("_") if names else ("0", "", "inference")
    return f"{kind} {number}"


def _log_summary(records: Sequence[CollectiveRecord], seconds: float) -> None:
    fused = sum(record.fused for record in records)
    logger.debug("fused %d of %d collectives in %.1f ms", fused, len(records), 1e3 * seconds)


def _check_strict(records: Sequence[CollectiveRecord]) -> None:
    missed = [record for record in records if not record.fused and CODES[record.code][1]]
    if missed:
        lines = [f"{one.node} ({one.op} {one.shapes}): {one.reason} [{one.code}]" for one in missed]
        raise ValueError(
            "strict=True, and these pairs of collective and matmul were not fused; change the program as the "
            "reasons say, or set strict=False:\n  " + "\n  ".join(lines)
        )
