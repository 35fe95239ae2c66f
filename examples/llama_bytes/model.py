"""A small Llama-style language model over bytes, and its tensor-parallel plan.

Nothing here knows of flux_inductor: this is plain PyTorch with DTensor's `parallelize_module`.
"""

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

BYTES = 256  # the vocabulary: every value of a byte


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. `hidden`, `heads`, `inner` must be divisible by the number of ranks.

    `kv_heads` is the number of keys and values, of which several queries share each; 0: one for each query.
    """

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    inner: int = 768  # width of the feed-forward layer
    kv_heads: int = 0


class Attention(nn.Module):
    """Causal self-attention with rotary position embedding; [batch, sequence, hidden] in and out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size = shape.hidden // shape.heads
        kv_heads = shape.kv_heads or shape.heads
        self.sharing = shape.heads // kv_heads  # queries of one key
        self.query = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.key = nn.Linear(shape.hidden, kv_heads * self.head_size, bias=False)
        self.value = nn.Linear(shape.hidden, kv_heads * self.head_size, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, sequence, _ = x.shape

        def heads(projected: Tensor) -> Tensor:  # as many heads as this rank owns
            return projected.view(batch, sequence, -1, self.head_size).transpose(1, 2)

        query = rotate(heads(self.query(x)), cosine, sine)
        key = self._for_each_query(rotate(heads(self.key(x)), cosine, sine))
        value = self._for_each_query(heads(self.value(x)))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, sequence, -1))
        return out

    def _for_each_query(self, x: Tensor) -> Tensor:
        if self.sharing == 1:
            return x
        batch, heads, sequence, size = x.shape
        wide = x[:, :, None].expand(batch, heads, self.sharing, sequence, size)
        return wide.reshape(batch, -1, sequence, size)


class FeedForward(nn.Module):
    """SwiGLU; [batch, sequence, hidden] in and out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden)
        self.attention = Attention(shape)
        self.feed_norm = nn.RMSNorm(shape.hidden)
        self.feed = FeedForward(shape)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        middle: Tensor = x + self.attention(self.attention_norm(x), cosine, sine)
        out: Tensor = middle + self.feed(self.feed_norm(middle))
        return out


class LanguageModel(nn.Module):
    """Bytes [batch, sequence] of int64 in, logits [batch, sequence, 256] for the next byte out."""

    def __init__(self, shape: Shape, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, BYTES, bias=False)
        cosine, sine = rotation(sequence, shape.hidden // shape.heads)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        self.cosine: Tensor
        self.sine: Tensor
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=shape.hidden**-0.5)

    def forward(self, bytes_: Tensor) -> Tensor:
        x = self.embedding(bytes_)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        logits: Tensor = self.head(self.norm(x))
        return logits


def rotation(sequence: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine [sequence, head_size / 2] of rotary embedding (arXiv 2104.09864)."""
    frequencies = 10000.0 ** (-torch.arange(0, head_size, 2).float() / head_size)
    angles = torch.arange(sequence).float()[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turns the pairs (x[i], x[i + head_size / 2]) of [batch, heads, sequence, head_size]."""
    first, second = x.chunk(2, dim=-1)
    cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def parallelize(model: LanguageModel, mesh: DeviceMesh) -> LanguageModel:
    """Tensor parallelism; between the matmuls each rank owns a part of the sequence."""
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for index in range(len(model.blocks)):
        plan |= {f"blocks.{index}.{name}": style for name, style in block_plan().items()}
    parallelize_module(model, mesh, plan)
    return model


def block_plan() -> dict[str, ParallelStyle]:
    """Of one layer: both halves gather the sequence once, work on their columns, scatter it again."""
    whole = Replicate()
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(whole, None, None)
        ),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "feed_norm": SequenceParallel(),
        "feed": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(whole,)),
        "feed.gate": ColwiseParallel(),
        "feed.up": ColwiseParallel(),
        "feed.down": RowwiseParallel(output_layouts=Shard(1)),
    }
