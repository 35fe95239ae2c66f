"""What the figures of a benchmark depend on."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, timezone

import torch


def versions(module: str) -> dict[str, str]:
    """Date, versions, devices, commit, and the command, which is that of `benchmarks.<module>`."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    found = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "commit": git.stdout.strip(),
        "command": " ".join(["python", "-m", f"benchmarks.{module}", *sys.argv[1:]]),
    }
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["gpu"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return found
