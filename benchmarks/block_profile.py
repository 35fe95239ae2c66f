"""Where a call's time goes: device time by kernel, with names short enough to compare candidates by."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

CALLS = 3
LARGEST = 18
NAME_WIDTH = 76
_KIND = {"GatedMainloop": "AG", "ScatterKernel": "RS"}
_ELEMENT = {"BF16": "bf16", "F16": "fp16"}
# Long names arrive mangled, so that all is looked for in both spellings. A tile's height is the first number
# after the schedule; its width is that of the instruction, since mangling abbreviates repeated numbers.
_SCHEDULE = re.compile(r"KernelTmaWarpSpecialized(Cooperative|Pingpong|).*?(?:C<(?:\(int\))?|ILi)(\d+)")
_INSTRUCTION = re.compile(r"MMA_64x(\d+)x16_F32(BF16|F16)")
_N_MAJOR = re.compile(r"5MajorE0ELS[0-9A-Z]*_1E|Major\)0, \([\w:]*Major\)1")
_QUALIFIERS = re.compile(r"^void |\(anonymous namespace\)::|\b\w+::")
Times = dict[str, list[float]]  # microseconds of each launch, by kernel


@dataclass(frozen=True)
class Span:
    """One kernel or copy on the device, in microseconds."""

    name: str
    stream: int
    start: float
    end: float


def short_name(name: str) -> str:
    """What kind of kernel it is: "ours AG 256x192 bf16", or the name without qualifiers, cut."""
    if "enter_call_kernel" in name:
        return "ours enter_call"
    kind = next((short for part, short in _KIND.items() if "flux_inductor" in name and part in name), None)
    schedule, instruction = _SCHEDULE.search(name), _INSTRUCTION.search(name)
    if kind is None or schedule is None or instruction is None:
        return _QUALIFIERS.sub("", name)[:NAME_WIDTH]
    width, element = instruction.groups()
    layout = " n_major" if _N_MAJOR.search(name) else ""
    pingpong = " pingpong" if schedule[1] == "Pingpong" else ""
    return f"ours {kind} {schedule[2]}x{width} {_ELEMENT[element]}{layout}{pingpong}"


def by_name(times: Iterable[tuple[str, float]]) -> Times:
    found: Times = defaultdict(list)
    for name, us in times:
        found[name].append(us)
    return found


def idle_share(spans: list[Span], stream: int) -> float:
    """The part of the time from the first start to the last end in which the stream runs nothing."""
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    busy, until = 0.0, first
    for span in sorted((span for span in spans if span.stream == stream), key=lambda span: span.start):
        busy += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return 1 - busy / (last - first)


def table(times: Times, calls: int) -> str:
    """The largest, then the rest in one line, then the sum; everything for one call."""
    order = sorted(times.items(), key=lambda item: -sum(item[1]))
    rest = order[LARGEST:]
    sums = [(f"{len(rest)} others", rest)] if rest else []
    joined = [(name, [us for _, each in of for us in each]) for name, of in [*sums, ("sum", order)]]
    lines = [f"  {'us a call':>11}{'launches':>10}{'us each':>10}  kernel"]
    for name, each in order[:LARGEST] + joined:
        mean = sum(each) / max(len(each), 1)
        lines.append(f"  {sum(each) / calls:11.1f}{len(each) / calls:10.1f}{mean:10.1f}  {name}")
    return "\n".join(lines)


def profiled(call: Callable[[], object], group: dist.ProcessGroup, device: str, sleep_cycles: int) -> str:
    """Profiles some calls of one candidate on this rank. All ranks must call this alike."""
    if device == "cpu":
        return table(_on_cpu(call), CALLS)
    runs = [_on_device(call, group, sleep_cycles) for _ in range(CALLS)]
    idle = sum(idle_share(spans, stream) for spans, stream in runs) / CALLS
    times = by_name((short_name(span.name), span.end - span.start) for spans, _ in runs for span in spans)
    return f"{table(times, CALLS)}\n  compute stream idle: {100 * idle:.1f} % of the time"


def _on_cpu(call: Callable[[], object]) -> Times:
    """The ops of some calls; each without what the ops inside took."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(CALLS):
            call()
    return by_name((op.name[:NAME_WIDTH], op.self_cpu_time_total) for op in found.events() or [])


def _on_device(
    call: Callable[[], object], group: dist.ProcessGroup, sleep_cycles: int
) -> tuple[list[Span], int]:
    """What one call runs, and the compute stream. Devices begin together and asleep, as when timed."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        dist.barrier()  # starting a profiler takes a rank's host up to seconds
        dist.all_reduce(torch.ones(1, device="cuda"), group=group)
        torch.cuda._sleep(sleep_cycles)
        call()
        torch.cuda.synchronize()
    spans = [
        Span(event.name, event.device_resource_id, event.time_range.start, event.time_range.end)
        for event in found.events() or []
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    sleep = next((span for span in spans if "spin_kernel" in span.name), None)
    if sleep is None:
        raise RuntimeError("the profiler recorded no kernels; --profile needs CUPTI and leave to use it")
    return [span for span in spans if span.start >= sleep.end], sleep.stream
