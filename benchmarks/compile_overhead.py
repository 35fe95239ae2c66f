"""What the passes cost at compile time: their share of it, and how they grow with the number of layers.

Compiles the training graphs of Llama-like models (DTensor, sequence parallel) for a group of 8 pretended
ranks, forward and backward, with nothing cached, and times the fusion pass within the whole.

    python benchmarks/compile_overhead.py [--layers 4 8 16 32]

Generated kernels are not handed to the C++ compiler: its time would only make the share smaller.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass

# Before torch is imported: nothing comes from a cache, and no worker processes blur the times.
os.environ.update(
    TORCHINDUCTOR_FX_GRAPH_CACHE="0", TORCHINDUCTOR_AUTOGRAD_CACHE="0", TORCHINDUCTOR_COMPILE_THREADS="1"
)

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import flux_inductor.ops  # noqa: F401  (registers the fused ops)
from flux_inductor.options import Options
from flux_inductor.passes.fusion_pass import FusionPass
from flux_inductor.passes.record import CollectiveRecord
from flux_inductor.runtime.detect import topology_of

WORLD, BATCH, LENGTH, HIDDEN, FEED_FORWARD, HEAD = 8, 2, 64, 256, 512, 16


class Layer(nn.Module):
    """A Llama-like block on this rank's part [BATCH, LENGTH / WORLD, HIDDEN] of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(HIDDEN)
        self.attention = Attention()
        self.feed_forward_norm = nn.RMSNorm(HIDDEN)
        self.feed_forward = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return result


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (one(x).view(batch, length, -1, HEAD).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.o(mixed.transpose(1, 2).reshape(batch, length, -1))
        return result


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, FEED_FORWARD, bias=False) for _ in range(2))
        self.down = nn.Linear(FEED_FORWARD, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


def sequence_parallel(layer: Layer, mesh: DeviceMesh) -> nn.Module:
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan = {
        "attention_norm": SequenceParallel(),
        "attention": gather,
        "attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": gather,
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    columns = ("attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up")
    return parallelize_module(layer, mesh, plan | {name: ColwiseParallel() for name in columns})


@dataclass(frozen=True)
class Measurement:
    """One model: seconds of the whole compilation (with one run) and of the passes in it."""

    layers: int
    whole: float
    passes: float
    fused: int
    collectives: int

    @property
    def share(self) -> float:
        return self.passes / self.whole


def measure(layers: int, mesh: DeviceMesh) -> Measurement:
    records: list[CollectiveRecord] = []
    fusion = FusionPass(Options(strategy="always"), None, records.extend, topology_of)
    model = nn.Sequential(*(sequence_parallel(Layer().bfloat16(), mesh) for _ in range(layers)))
    x = torch.randn(BATCH, LENGTH // WORLD, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, options={"post_grad_custom_post_pass": fusion})
    start = time.perf_counter()
    compiled(x).sum().backward()
    whole = time.perf_counter() - start
    return Measurement(layers, whole, fusion.seconds, sum(one.fused for one in records), len(records))


def without_compiler() -> None:
    """Replaces every generated kernel by nothing. What a model computes no longer means anything."""
    AsyncCompile.cpp_pybinding = lambda *_, **__: lambda *_: None  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description="Share of the passes in compile time.")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16, 32])
    layers = parser.parse_args().layers
    os.environ["FLUX_INDUCTOR_ENGINE"] = "reference"  # the only one that pretended ranks can run
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    without_compiler()
    measure(1, mesh)  # imports and first uses
    print("layers   fused      compile s   passes ms   share   passes ms/layer")
    for one in (measure(count, mesh) for count in layers):
        print(
            f"{one.layers:6} {one.fused:4}/{one.collectives:<4} {one.whole:12.1f} {1e3 * one.passes:11.0f} "
            f"{one.share:7.2%} {1e3 * one.passes / one.layers:17.2f}",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
