"""The backend: torch.compile(model, backend="flux_inductor") is Inductor plus the fusion pass.

torch finds `flux_inductor` through the package's entry point, so nothing need be imported. Importing this
module registers the fused ops: a graph that comes from Inductor's cache contains them, though the pass that
put them there does not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx

from flux_inductor import ops  # noqa: F401  (registers the fused ops)
from flux_inductor.options import Options, resolve
from flux_inductor.options import options as options_in_context
from flux_inductor.passes.fusion_pass import FusionPass
from flux_inductor.passes.record import CollectiveRecord
from flux_inductor.runtime.detect import publish_host, topology_of
from flux_inductor.runtime.engine import installed
from flux_inductor.runtime.liveness import publish_process
from flux_inductor.tools import kept
from flux_inductor.tools.log import GraphLog

_HOOK = "post_grad_custom_post_pass"


def flux_inductor(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles one graph of Dynamo; torch calls it.

    Args:
        gm: the graph.
        example_inputs: fake tensors and symbolic sizes, one for each of its placeholders.
        mode: torch.compile's mode ("reduce-overhead", ...), which stands for options of Inductor.
        options: ours (see options.py) and Inductor's, mixed.

    Raises:
        ValueError: an unknown or ill-typed option, a bad mode, or with strict=True a pair that can be fused
            but was left.
    """
    ours, theirs = resolve(mode, options)
    graph = GraphLog(to_stderr=ours.report)
    fusion = _Hook(ours, theirs.pop(_HOOK, getattr(inductor_config, _HOOK)), graph.add)
    identity = fusion.uuid()
    with inductor_config.patch(theirs):
        if identity is not None and kept.enabled():
            graph.keep(kept.key_of(gm, example_inputs, sorted(theirs.items()), identity))
    # The patch holds for the backward too, whenever that is compiled.
    compiled = compile_fx(gm, example_inputs, config_patches={**theirs, _HOOK: fusion})
    graph.entered()
    return cast(Callable[..., Any], compiled)


def enable(**values: object) -> None:
    """Adds the fusion pass to every later torch.compile(backend="inductor") of this process.

    For frameworks that call torch.compile themselves; call it before they do. It takes options as
    flux_inductor.options does; another call replaces them. A pass that Inductor had before is run as well.
    A graph that comes from Inductor's cache shows only its executions in the report.

    Raises:
        ValueError: an unknown or ill-typed option, or one of Inductor's own.
    """
    with options_in_context(**values):
        ours, theirs = resolve()
    if theirs:
        raise ValueError(
            f"enable() takes no option of Inductor, such as {min(theirs)}; set torch._inductor.config"
        )
    replaced = getattr(inductor_config, _HOOK)
    setattr(
        inductor_config,
        _HOOK,
        _Hook(ours, replaced, lambda records: GraphLog(to_stderr=ours.report).add(records)),
    )


def disable() -> None:
    """Undoes enable(): Inductor has the pass that it had before. What was compiled meanwhile stays fused."""
    setattr(inductor_config, _HOOK, _without_fusion(getattr(inductor_config, _HOOK)))


class _Hook(FusionPass):
    """The fusion pass as the value of Inductor's hook; it runs the pass whose place it takes."""

    def __init__(
        self, options: Options, replaced: object, on_records: Callable[[list[CollectiveRecord]], None]
    ) -> None:
        self.replaced = _without_fusion(replaced)
        super().__init__(options, self.replaced, on_records, topology_of, installed())

    def uuid(self) -> object:
        # Inductor asks on every rank, also on one that then finds the graph in its cache and never runs the
        # pass: the others may be waiting to hear where this rank is.
        publish_host()
        publish_process()
        return super().uuid()


def _without_fusion(value: object) -> object:
    """What the user has set as Inductor's hook, without our pass, so that none runs twice."""
    if isinstance(value, _Hook):
        return value.replaced
    if isinstance(value, (list, tuple)):
        return type(value)(one for one in value if not isinstance(one, _Hook))
    return value
