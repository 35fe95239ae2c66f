"""The text to learn from: this project's own documentation, as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
FILES = ("README.md", "CHANGELOG.md", "docs/*.md", "LICENSE")


def corpus() -> Tensor:
    """All of the documentation as one int64 tensor of bytes [length]."""
    paths = [path for pattern in FILES for path in sorted(ROOT.glob(pattern))]
    if not paths:
        raise FileNotFoundError(f"no documentation under {ROOT}: run the example from a checkout")
    joined = b"\n".join(path.read_bytes() for path in paths)
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()


def batches(text: Tensor, batch: int, sequence: int, steps: int, seed: int) -> Iterator[Tensor]:
    """`steps` random cuts [batch, sequence + 1] of `text`: inputs and, one byte later, targets.

    The cuts depend on the seed alone, so every rank and every run sees the same ones.
    """
    if len(text) <= sequence + 1:
        raise ValueError(f"the text has {len(text)} bytes; a sequence of {sequence} needs more")
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - sequence - 1, (batch,), generator=generator)
        yield torch.stack([text[start : start + sequence + 1] for start in starts.tolist()])
