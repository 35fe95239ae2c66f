"""Llama blocks at the sizes of real models, tensor-parallel by DTensor's sequence-parallel plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from examples.llama_bytes.model import Block, Shape, block_plan, rotation


@dataclass(frozen=True)
class BlockShape:
    """Sizes of a whole block and of its input [batch, length, dim]."""

    dim: int
    heads: int
    kv_heads: int
    inner: int  # width of the feed-forward layer
    batch: int
    length: int


BLOCK_SHAPES = {
    "8b": BlockShape(4096, 32, 8, 14336, batch=2, length=4096),
    "70b": BlockShape(8192, 64, 8, 28672, batch=1, length=4096),
    "70b-long": BlockShape(8192, 64, 8, 28672, batch=1, length=8192),
    "tiny": BlockShape(64, 4, 2, 128, batch=2, length=32),  # to try the benchmark itself
}


class Blocks(nn.Module):
    """Some blocks in a row, on this rank's [batch, length / ranks, dim]."""

    def __init__(self, shape: BlockShape, count: int) -> None:
        super().__init__()
        sizes = Shape(
            hidden=shape.dim, heads=shape.heads, inner=shape.inner, kv_heads=shape.kv_heads, layers=count
        )
        self.layers = nn.ModuleList(Block(sizes) for _ in range(count))
        cosine, sine = rotation(shape.length, shape.dim // shape.heads)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        self.cosine: Tensor
        self.sine: Tensor

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        return x


def parallel_blocks(shape: BlockShape, count: int, mesh: DeviceMesh) -> Blocks:
    """Blocks in bf16 with the same random weights on every run, cut over the mesh."""
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        model = Blocks(shape, count).bfloat16()
    for layer in model.layers:
        parallelize_module(layer, mesh, block_plan())
    return model
