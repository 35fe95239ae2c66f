"""Trains the model on one rank: the same loop for eager and compiled code."""

from __future__ import annotations

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


def setting_for(device: str, steps: int) -> Setting:
    """A run that is large enough for fused ops to pay on that device, and small enough to watch."""
    if device == "cpu":
        return Setting(steps=steps)
    shape = Shape(layers=2, hidden=4096, heads=32, inner=11264)
    return Setting(device, shape, batch=8, sequence=1024, steps=steps, rate=3e-4)


@dataclass(frozen=True)
class Run:
    """What one training run gave: a loss for each step, and the seconds that the first one took."""

    losses: tuple[float, ...]
    first_step: float  # with compilation, where there is any


class Trainer:
    """A model with the weights of `setting.seed`, cut over all ranks, and its optimizer."""

    def __init__(
        self, setting: Setting, compiler: Callable[[LanguageModel], Callable[[Tensor], Tensor]]
    ) -> None:
        torch.manual_seed(setting.seed)
        dtype = torch.bfloat16 if setting.device == "cuda" else torch.float32
        with torch.device(setting.device):
            model = LanguageModel(setting.shape, setting.sequence).to(dtype)
        parallelize(model, init_device_mesh(setting.device, (dist.get_world_size(),)))
        self.setting = setting
        self.forward = compiler(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=setting.rate)

    def step(self, cut: Tensor) -> float:
        """Learns to predict each next byte of `cut` [batch, sequence + 1]; the loss in nats per byte."""
        cut = cut.to(self.setting.device)
        logits = self.forward(cut[:, :-1])
        loss = F.cross_entropy(logits.float().reshape(-1, BYTES), cut[:, 1:].reshape(-1))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()  # waits for a GPU: whoever takes the time gets the whole step's


def train(trainer: Trainer, cuts: Iterable[Tensor], label: str) -> Run:
    """One step for each cut. Rank 0 shows a progress bar where standard error is a terminal."""
    quiet = True if dist.get_rank() else None  # None: only on a terminal
    progress = tqdm(cuts, desc=label, total=trainer.setting.steps, unit="step", disable=quiet)
    losses = []
    begin, first = time.perf_counter(), 0.0
    for cut in progress:
        losses.append(trainer.step(cut))
        first = first or time.perf_counter() - begin
        progress.set_postfix(loss=f"{losses[-1]:.3f}")
    return Run(tuple(losses), first)
