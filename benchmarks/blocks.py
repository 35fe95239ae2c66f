"""Llama blocks under tensor parallelism: ours against torch.compile, async TP, and no communication at all.

    python -m benchmarks.blocks [--only 8b 70b 70b-long] [--modes forward training] [--json FILE] [--profile]

Starts one process a GPU. Each program is compiled in four ways: "inductor" (torch.compile as it is), "async
TP" (the same with PyTorch's micro-pipelining pass), "ours" (backend="flux_inductor"), and "compute", which
is "inductor" with every collective replaced by a tensor that is there already. Results, and in training all
gradients, are compared with the eager program before anything is timed. Then the candidates take turns; a
time is the largest over ranks of the medians. "exposed" is the communication that was not hidden, the time
less that of "compute"; "host" is what the CPU needs to queue one call.
With --profile, rank 0 also tells each candidate's device time by kernel, from calls that were not timed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import flux_inductor
from benchmarks.block_profile import profiled
from benchmarks.gpu_timing import host_us, paired
from benchmarks.llama_block import BLOCK_SHAPES, Blocks, BlockShape, parallel_blocks
from benchmarks.versions import versions
from benchmarks.without_collectives import WithoutCollectives, check_untouched
from flux_inductor import backend
from flux_inductor.runtime.torch_private import process_group
from tests.support.gpu_ranks import nccl_group, run_gpu_ranks, why_not
from tests.support.ranks import run_ranks

CANDIDATES = ("inductor", "async TP", "ours", "compute")
MODES = ("forward", "training")
SLEEP_CYCLES = 20_000_000  # for the host to queue a whole program meanwhile
PROFILER_SLEEP_CYCLES = 5 * SLEEP_CYCLES  # the host is slower under the profiler
# Relative to the error of the eager bf16 program, both against the fp32 one.
WORST_ERROR, ERROR_FLOOR = 2.0, 4e-3

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """What all ranks are told."""

    device: str
    shapes: tuple[str, ...]
    modes: tuple[str, ...]
    candidates: tuple[str, ...]
    blocks: int
    rounds: int
    strategy: str
    profile: bool


@dataclass(frozen=True)
class Row:
    """Times of one candidate, in milliseconds. `error` is the largest over ranks, results and gradients."""

    shape: str
    mode: str
    candidate: str
    ms: float
    host_ms: float
    compile_s: float
    error: float
    fused: int
    collectives: int


class Program:
    """Some blocks and their input on this rank."""

    def __init__(self, shape: BlockShape, count: int, mesh: DeviceMesh) -> None:
        self.model = parallel_blocks(shape, count, mesh)
        torch.manual_seed(1 + dist.get_rank())
        size = (shape.batch, shape.length // mesh.size(), shape.dim)
        self.x = torch.randn(size, device=mesh.device_type).bfloat16().requires_grad_()
        self.slope = torch.randn(size, device=mesh.device_type).bfloat16()

    def run(self, call: Callable[[Tensor], Tensor], mode: str) -> Tensor:
        """One call; in training, its gradients replace what was there."""
        if mode == "forward":
            with torch.no_grad():
                return call(self.x)
        self.model.zero_grad(set_to_none=True)
        self.x.grad = None
        result = call(self.x)
        result.backward(self.slope)  # type: ignore[no-untyped-call]
        return result

    def results(self, call: Callable[[Tensor], Tensor], mode: str) -> Results:
        found = {"result": self.run(call, mode).detach()}
        if mode == "training":
            leaves = {**dict(self.model.named_parameters()), "x": self.x}
            found |= {f"gradient of {name}": _local(leaf.grad) for name, leaf in leaves.items()}
        return found

    def exact(self, mode: str) -> Results:
        """The eager program in fp32 on the same numbers."""
        narrow = self.x, self.slope
        self.model.float()
        self.x, self.slope = self.x.detach().float().requires_grad_(), self.slope.float()
        found = self.results(self.model, mode)
        self.model.bfloat16()
        self.x, self.slope = narrow
        return found


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def errors(found: Results, exact: Results) -> dict[str, float]:
    """Norm of the difference over the norm of the exact one, by result; NaN stays NaN."""
    return {name: float((found[name].float() - x).norm() / x.norm()) for name, x in exact.items()}


def check(name: str, found: dict[str, float], eager: dict[str, float]) -> float:
    """The largest error. RuntimeError if one is beyond what bf16 explains."""
    for result, error in found.items():
        limit = max(WORST_ERROR * eager[result], ERROR_FLOOR)
        if not error <= limit:
            raise RuntimeError(f"{name}: the {result} is off by {error:.1e}; at most {limit:.1e} is right")
    return max(found.values())


def compiled(name: str, model: Blocks, strategy: str) -> Callable[[Tensor], Tensor]:
    """The model compiled as the candidate of that name."""
    theirs: dict[str, Any] = {
        "inductor": {},
        "async TP": {"_micro_pipeline_tp": True},
        # Buffers are written once: else the program would write zeros, in time, into what is there already.
        "compute": {
            "post_grad_custom_post_pass": WithoutCollectives(),
            "allow_buffer_reuse": False,
            "inplace_buffers": False,
        },
    }
    whole = partial(torch.compile, model, dynamic=False, fullgraph=True)
    if name == "ours":
        ours: Callable[[Tensor], Tensor] = whole(
            backend=backend.flux_inductor, options={"strategy": strategy}
        )
        return ours
    other: Callable[[Tensor], Tensor] = whole(options=theirs[name])
    return other


def measure(rank: int, world: int, setting: Setting) -> list[Row]:
    """The body of a rank; the rows are the same on all."""
    torch.use_deterministic_algorithms(False)  # no filling of new tensors while the clock runs
    torch._dynamo.config.recompile_limit = 64  # one program, compiled in many ways
    torch._inductor.config.fx_graph_cache = False  # the report shows decisions of this run
    torch._functorch.config.enable_autograd_cache = False
    group = nccl_group(world, seconds=120) if setting.device == "cuda" else "0"
    if "async TP" in setting.candidates:
        _enable_async_tp(group)
    mesh = DeviceMesh.from_group(process_group(group), setting.device, mesh_dim_names=("tp",))
    rows = []
    for shape in setting.shapes:
        for mode in setting.modes:  # torch 2.11 cannot cast parameters once they are compiled for: new ones
            program = Program(BLOCK_SHAPES[shape], setting.blocks, mesh)
            rows += _measure_one(program, shape, mode, group, setting)
            torch._dynamo.reset()
            del program
    return rows


def _enable_async_tp(group: str) -> None:
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer releases need no call
        enable_symm_mem_for_group(group)  # type: ignore[arg-type, unused-ignore]


def _measure_one(program: Program, shape: str, mode: str, group: str, setting: Setting) -> list[Row]:
    _tell(f"\n{shape}, {mode}: {BLOCK_SHAPES[shape]}, {setting.blocks} block(s)")
    exact = program.exact(mode)
    eager = _over_ranks(errors(program.results(program.model, mode), exact))
    calls: dict[str, Callable[[], object]] = {}
    known: dict[str, dict[str, Any]] = {}
    for name in setting.candidates:
        try:
            known[name], calls[name] = _prepared(name, program, mode, exact, eager, setting)
        except Exception as error:
            if name != "async TP":
                raise
            _tell(f"  async TP is left out: {type(error).__name__}: {error}")
    del exact
    times = _timed(calls, group, setting)
    check_untouched()
    rows = [Row(shape, mode, name, *times[name], **known[name]) for name in calls]
    _tell(table(rows))
    if setting.profile:
        for name, call in calls.items():
            spent = profiled(call, process_group(group), setting.device, PROFILER_SLEEP_CYCLES)
            _tell(f"  {name}, {shape}, {mode}, by kernel:\n{spent}")
    return rows


def _prepared(
    name: str, program: Program, mode: str, exact: Results, eager: dict[str, float], setting: Setting
) -> tuple[dict[str, Any], Callable[[], object]]:
    """What is known of a candidate before it is timed, and the candidate, compiled."""
    call = compiled(name, program.model, setting.strategy)
    before, start = len(flux_inductor.report().graphs), time.perf_counter()
    found = program.results(call, mode)
    seconds, error = time.perf_counter() - start, math.nan
    if name != "compute":
        error = check(f"{name}, {mode}", _over_ranks(errors(found, exact)), eager)
    report = flux_inductor.Report(flux_inductor.report().graphs[before:])
    _tell(f"  {name}: compiled in {seconds:.1f} s, error {error:.1e} (eager {max(eager.values()):.1e})")
    if name == "ours":
        _tell(str(report))
    fused = sum(record.fused for record in report.records)
    known = {"compile_s": seconds, "error": error, "fused": fused, "collectives": len(report.records)}
    return known, partial(program.run, call, mode)


def _over_ranks(values: dict[str, float]) -> dict[str, float]:
    """The largest over ranks: so all ranks find the same ones too large."""
    largest = torch.tensor([math.inf if math.isnan(value) else value for value in values.values()])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return dict(zip(values, largest.tolist(), strict=True))


def _timed(
    calls: dict[str, Callable[[], object]], group: str, setting: Setting
) -> dict[str, tuple[float, float]]:
    """Milliseconds of one call, and of the host for it."""
    if setting.device == "cpu":
        return {name: (ms, ms) for name, ms in _paired_on_cpu(calls, setting.rounds).items()}
    times = paired(calls, process_group(group), setting.rounds, sleep_cycles=SLEEP_CYCLES)
    return {name: (us / 1e3, host_us(calls[name], calls=1) / 1e3) for name, us in times.items()}


def _paired_on_cpu(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            spent[name].append((time.perf_counter() - start) * 1e3)
    return _over_ranks({name: statistics.median(times) for name, times in spent.items()})


def _tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def table(rows: list[Row]) -> str:
    """The times of one shape and mode: `speed-up` over "inductor", and what is left of its communication."""
    ms = {row.candidate: row.ms for row in rows}
    base, compute = ms.get("inductor", math.nan), ms.get("compute", math.nan)
    lines = [f"  {'':10}{'ms':>9}{'speed-up':>10}{'exposed ms':>12}{'host ms':>9}{'fused':>9}"]
    for row in rows:
        fused = f"{row.fused}/{row.collectives}" if row.candidate == "ours" else ""
        lines.append(
            f"  {row.candidate:10}{row.ms:9.3f}{base / row.ms:10.3f}{row.ms - compute:12.3f}"
            f"{row.host_ms:9.2f}{fused:>9}"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=sorted(BLOCK_SHAPES), default=["8b", "70b", "70b-long"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--blocks", type=int, default=1, help="blocks in a row")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--strategy", choices=("auto", "always"), default="auto", help="of ours")
    parser.add_argument("--profile", action="store_true", help="also tell device time by kernel")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=600, help="time limit for all of it")
    parser.add_argument("--json", help="write the figures there")
    return parser.parse_args()


def main() -> None:
    options = parse()
    cuda = options.device == "cuda"
    if cuda and why_not(options.world):
        raise SystemExit(f"benchmarks.blocks cannot run here: {why_not(options.world)}")
    wanted = [name for name in options.candidates if cuda or name != "async TP"]  # which needs a GPU
    setting = Setting(
        options.device,
        tuple(options.only),
        tuple(options.modes),
        tuple(wanted),
        options.blocks,
        options.rounds,
        options.strategy,
        options.profile,
    )
    if cuda:
        results = run_gpu_ranks(measure, setting, world=options.world, timeout=options.seconds)
    else:
        results = run_ranks(measure, options.world, setting, timeout=options.seconds)
    if options.json:
        with open(options.json, "w") as file:
            rows = [asdict(row) for row in results[0]]
            json.dump(
                {"versions": versions("blocks"), "setting": asdict(setting), "rows": rows}, file, indent=1
            )


if __name__ == "__main__":
    main()
