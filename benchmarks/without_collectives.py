"""A compiled program without its collectives: the time that no overlap can beat.

In place of every collective the pass puts a tensor of the result's shape that is there already. What the
program computes then means nothing; its other kernels are the same.
"""

from __future__ import annotations

import torch
import torch.fx
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

_LIBRARY = torch.library.Library("benchmarks", "DEF")
_results: dict[tuple[tuple[int, ...], torch.dtype, torch.device], Tensor] = {}


def _ready(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Random numbers, made once for each shape: on zeros the program's kernels would be faster."""
    key = shape, like.dtype, like.device
    if key not in _results:
        _results[key] = torch.randn(shape, dtype=torch.float32, device=like.device).to(like.dtype)
    return _results[key]


def check_untouched() -> None:
    """RuntimeError if a program has written into what it was given: then its kernels ran on other numbers."""
    for (shape, *_), tensor in _results.items():
        spread = float(tensor.float().std())
        if not 0.9 < spread < 1.1:
            raise RuntimeError(f"the ready tensor {list(shape)} was written to: deviation {spread:g}")


def _gathered(x: Tensor, world: int) -> Tensor:
    return _ready((x.shape[0] * world, *x.shape[1:]), x)


def _scattered(x: Tensor, world: int) -> Tensor:
    return _ready((x.shape[0] // world, *x.shape[1:]), x)


def _fake_gathered(x: Tensor, world: int) -> Tensor:
    return x.new_empty(x.shape[0] * world, *x.shape[1:])


def _fake_scattered(x: Tensor, world: int) -> Tensor:
    return x.new_empty(x.shape[0] // world, *x.shape[1:])


for _name, _run, _fake in (
    ("gathered", _gathered, _fake_gathered),
    ("scattered", _scattered, _fake_scattered),
):
    _LIBRARY.define(f"{_name}(Tensor x, int world) -> Tensor")
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"benchmarks::{_name}", _fake, lib=_LIBRARY)


class WithoutCollectives(CustomGraphPass):
    """Replaces gathers and reduce-scatters by tensors that are there already."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        functional, ours = torch.ops._c10d_functional, torch.ops.benchmarks
        for node in list(graph.nodes):
            if node.target == functional.wait_tensor.default:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
            elif node.target == functional.all_gather_into_tensor.default:
                node.target, node.args = ours.gathered.default, node.args[:2]
            elif node.target == functional.reduce_scatter_tensor.default:
                x, _, world = node.args[:3]
                node.target, node.args = ours.scattered.default, (x, world)
            elif node.target == functional.all_reduce.default:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)

    def uuid(self) -> object:
        return get_hash_for_files((__file__,))
