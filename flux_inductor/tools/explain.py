"""flux_inductor.explain: compiles a function afresh, runs it once, reports what became of its collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from flux_inductor.backend import flux_inductor
from flux_inductor.options import options
from flux_inductor.tools import log
from flux_inductor.tools.report import Report


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """The report of exactly one forward of `fn`, and of its backward if a result requires grad.

    Everything is compiled anew, without Inductor's caches, so that the pass runs; Dynamo is reset for it.
    With a process group every rank must call it, since the collectives really run. The backward goes through
    torch.autograd.grad: no .grad changes. Buffers and random state do change, as in any call.

    Args:
        fn: a function or module, or one that torch.compile(backend="flux_inductor") has returned, or a module
            with such parts; the compiled keep the options that they were compiled with.
        args, kwargs: its arguments.

    Raises:
        ValueError: `fn` was compiled, but with another backend.

    What is not compiled yet takes its options from the context (flux_inductor.options) or the environment.
    """
    torch._dynamo.reset()
    compiled = fn if _is_compiled(fn) else torch.compile(fn, backend=flux_inductor)
    moment = log.mark()
    with options(fx_graph_cache=False, fx_graph_remote_cache=False):
        args, kwargs = tree_map(_without_history, (args, kwargs))
        _backward(compiled(*args, **kwargs))
    if compiled is fn and log.mark()[0] == moment[0]:
        raise ValueError(
            f"{fn} was compiled, but nothing of it with flux_inductor; pass the function itself, or compile "
            'it with torch.compile(backend="flux_inductor")'
        )
    return log.since(moment)


def _is_compiled(fn: object) -> bool:
    if isinstance(fn, nn.Module):
        return any(
            isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
            for module in fn.modules()
        )
    return hasattr(fn, "_torchdynamo_orig_callable")


def _without_history(value: object) -> object:
    """The same data without the history that led to it: the backward must stop here.

    A copy of a leaf, not the leaf itself, since `fn` may change it in place.
    """
    if isinstance(value, Tensor) and not value.is_leaf:
        return value.detach().requires_grad_().clone()
    return value


def _backward(result: object) -> None:
    outputs = [
        value for value in tree_leaves(result) if isinstance(value, Tensor) and value.grad_fn is not None
    ]
    leaves = _leaves_under(outputs)
    if leaves:
        torch.autograd.grad(outputs, leaves, [torch.ones_like(value) for value in outputs], allow_unused=True)


def _leaves_under(outputs: list[Tensor]) -> list[Tensor]:
    """All leaf tensors that the outputs depend on, be they arguments, parameters or captured by a closure."""
    todo = [value.grad_fn for value in outputs]
    seen = set(todo)
    leaves = []
    while todo:
        node = todo.pop()
        assert node is not None
        if hasattr(node, "variable"):  # AccumulateGrad
            leaves.append(node.variable)
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        todo += new
    return leaves
