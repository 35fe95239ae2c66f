"""Trains the model on one rank: the same loop for eager and compiled, with honest times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

from examples.llama_bytes.model import BYTES, LanguageModel, Shape, parallelize

WARM_UP = 3  # steps whose time does not count: compilation, first touches of memory


@dataclass(frozen=True)
class Setting:
    """One training run. The model runs in bfloat16 on "cuda" and in float32 on "cpu"."""

    device: str = "cpu"
    shape: Shape = field(default_factory=Shape)
    batch: int = 4
    sequence: int = 256
    steps: int = 50
    rate: float = 1e-3
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Bytes that one step learns from."""
        return self.batch * self.sequence


@dataclass(frozen=True)
class Run:
    """What one training run gave: a loss for each step, and seconds."""

    losses: tuple[float, ...]
    first_step: float  # with compilation, where there is any
    step: float  # median of the steps after warm-up
    tokens_per_second: float


def build(setting: Setting) -> LanguageModel:
    """The model with the weights of `setting.seed`, cut over all ranks."""
    torch.manual_seed(setting.seed)
    dtype = torch.bfloat16 if setting.device == "cuda" else torch.float32
    model = LanguageModel(setting.shape, setting.sequence).to(setting.device, dtype)
    return parallelize(model, init_device_mesh(setting.device, (dist.get_world_size(),)))


def loss_of(forward: Callable[[Tensor], Tensor], cut: Tensor) -> Tensor:
    """Cross-entropy of predicting each next byte of `cut` [batch, sequence + 1], in nats per byte."""
    logits = forward(cut[:, :-1])
    return F.cross_entropy(logits.float().reshape(-1, BYTES), cut[:, 1:].reshape(-1))


def train(
    model: LanguageModel,
    forward: Callable[[Tensor], Tensor],
    cuts: Iterable[Tensor],
    setting: Setting,
    label: str,
) -> Run:
    """Trains `model` with AdamW, calling it through `forward` (itself, or the compiled one).

    Rank 0 shows a progress bar where standard error is a terminal.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.rate)
    losses, seconds = [], []
    quiet = True if dist.get_rank() else None  # None: only on a terminal
    progress = tqdm(cuts, desc=f"{label:9}", total=setting.steps, unit="step", disable=quiet)
    for cut in progress:
        start = time.perf_counter()
        loss = loss_of(forward, cut.to(setting.device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for a GPU, so the time below is the whole step's
        seconds.append(time.perf_counter() - start)
        progress.set_postfix(loss=f"{losses[-1]:.3f}")
    step = statistics.median(seconds[WARM_UP:] or seconds)
    return Run(tuple(losses), seconds[0], step, setting.tokens / step)
