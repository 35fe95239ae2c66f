"""Llama blocks in plain PyTorch, tensor-parallel by DTensor's sequence-parallel plan (torchtitan's)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from examples.llama_bytes.model import rotate, rotation


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


class Attention(nn.Module):
    """Causal attention with grouped queries and rotary position embedding."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.head_size = shape.dim // shape.heads
        self.queries_per_key = shape.heads // shape.kv_heads
        narrow = shape.kv_heads * self.head_size
        self.wq = nn.Linear(shape.dim, shape.dim, bias=False)
        self.wk = nn.Linear(shape.dim, narrow, bias=False)
        self.wv = nn.Linear(shape.dim, narrow, bias=False)
        self.wo = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def heads(projected: Tensor) -> Tensor:  # as many as this rank owns
            return projected.view(batch, length, -1, self.head_size).transpose(1, 2)

        query = rotate(heads(self.wq(x)), cosine, sine)
        key = self._repeated(rotate(heads(self.wk(x)), cosine, sine))
        value = self._repeated(heads(self.wv(x)))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))
        return result

    def _repeated(self, x: Tensor) -> Tensor:
        batch, heads, length, size = x.shape
        wide = x[:, :, None].expand(batch, heads, self.queries_per_key, length, size)
        return wide.reshape(batch, -1, length, size)


class FeedForward(nn.Module):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.dim, shape.inner, bias=False)
        self.w2 = nn.Linear(shape.inner, shape.dim, bias=False)
        self.w3 = nn.Linear(shape.dim, shape.inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return result


class Block(nn.Module):
    """One pre-norm layer; between its halves a rank owns a part of the sequence."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.dim)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        middle: Tensor = x + self.attention(self.attention_norm(x), cosine, sine)
        result: Tensor = middle + self.feed_forward(self.ffn_norm(middle))
        return result


class Blocks(nn.Module):
    """Some blocks in a row, on this rank's [batch, length / ranks, dim]."""

    def __init__(self, shape: BlockShape, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(shape) for _ in range(count))
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
        parallelize_module(layer, mesh, _plan())
    return model


def _plan() -> dict[str, ParallelStyle]:
    whole = Replicate()
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(whole, None, None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(whole,)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
