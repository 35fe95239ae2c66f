"""Groups come and go, grow, stand side by side and are called from several threads."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from flux_inductor import _core
from flux_inductor.planning.plan import Plan
from flux_inductor.runtime import cpu_group, groups
from flux_inductor.runtime.cpu import CpuEngine
from flux_inductor.runtime.cpu_group import CpuGroup
from flux_inductor.runtime.groups import group_size, name_of, state_of
from tests.support.engines import all_gather_matmul, matmul_reduce_scatter
from tests.support.ranks import run_ranks

WORLD = "0"
PLANS = (Plan("mesh", "push", 3), Plan("mesh", "pull", 3))


def exchange(rank: int, world: int, group: str, rows: int = 6) -> None:
    """Both ops in both directions, with results that show whose data they hold."""
    weight = torch.eye(4)
    for plan in PLANS:
        x = torch.full((rows, 4), float(rank + 1))
        (whole,) = all_gather_matmul(CpuEngine(), x, [weight], [], group, plan, 0, False)
        expected = torch.arange(1.0, world + 1).repeat_interleave(rows)
        assert torch.equal(whole, expected[:, None].expand(-1, 4)), (group, plan)
        y = torch.full((rows * world, 4), float(rank + 1))
        part = matmul_reduce_scatter(CpuEngine(), y, weight, None, None, group, plan, 0, "sum", 1.0)
        assert torch.equal(part, torch.full((rows, 4), world * (world + 1) / 2)), (group, plan)


def open_things() -> tuple[int, int, int]:
    """Descriptors, threads and mappings of segments that this process has."""
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:flux_inductor" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mapped


def remade(rank: int, world: int) -> None:
    """Groups destroyed and made anew: none reads another's keys, nothing is left open."""
    counts = []
    for turn in range(6):
        group = dist.new_group(timeout=timedelta(seconds=30))
        name = name_of(group)
        exchange(rank, world, name, rows=6 + turn)
        assert groups.workspace_bytes() >= state_of(name, CpuGroup).workspace_bytes > 0
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        with pytest.raises(ValueError, match=f"no process group '{name}'"):
            group_size(name)
        counts.append(open_things())
    assert counts[1] == counts[-1], counts
    assert counts[-1][2] == 0


def remade_world(rank: int, world: int) -> None:
    """The default group, too, whose name stays the same."""
    exchange(rank, world, WORLD)
    store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    for turn in range(3):
        dist.barrier()
        dist.destroy_process_group()
        fresh = PrefixStore(f"again {turn}", store)
        dist.init_process_group("gloo", store=fresh, rank=rank, world_size=world)
        exchange(rank, world, name_of(None), rows=3 + turn)


def modes(rank: int, world: int) -> None:
    """What a group keeps was made in inference mode, with another default device, and serves without."""
    group = name_of(dist.new_group())
    with torch.inference_mode(), torch.device("meta"):
        x, weight = torch.ones(6, 4, device="cpu"), torch.ones(4, 4, device="cpu")
        for plan in PLANS:
            all_gather_matmul(CpuEngine(), x, [weight], [], group, plan, 0, False)
            matmul_reduce_scatter(CpuEngine(), x, weight, None, None, group, plan, 0, "sum", 1.0)
    exchange(rank, world, group)


def two_dims(rank: int, world: int) -> None:
    """A 2 x 2 mesh: rows, columns and all four, in turns."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    row, column = rank // 2, rank % 2
    for turn in range(4):
        exchange(column, 2, name_of(mesh.get_group("tp")), rows=3 + turn)
        exchange(rank, 4, WORLD)
        exchange(row, 2, name_of(mesh.get_group("dp")), rows=9 - turn)
    tp = state_of(name_of(mesh.get_group("tp")), CpuGroup)
    assert tp is state_of(name_of(mesh.get_group("tp")), CpuGroup)
    assert tp is not state_of(name_of(mesh.get_group("dp")), CpuGroup)


def growing(rank: int, world: int) -> None:
    """The workspace holds two buffers of the largest call so far, and never shrinks."""
    group = name_of(dist.new_group())
    sizes = []
    for rows in (8, 4096, 16, 8192):
        exchange(rank, world, group, rows)
        sizes.append(state_of(group, CpuGroup).workspace_bytes)
    assert sizes[1] == sizes[2] < sizes[3]
    gathered = world * 8192 * 4 * 4
    assert gathered < sizes[3] < 2 * gathered
    assert open_things()[2] > 0


def wrapping(rank: int, world: int) -> None:
    """Epochs wrap around, to zero and to negative, and are renewed in time."""
    usual = cpu_group.FIRST_EPOCH
    for first in (2**32 - 9, 2**31 - 9):
        assert first % _core.EPOCH_RENEWAL == _core.EPOCH_RENEWAL - 9
        cpu_group.FIRST_EPOCH = first
        group = name_of(dist.new_group())
        meetings = []
        for _ in range(4):
            exchange(rank, world, group)
            meetings.append(state_of(group, CpuGroup)._generation._meetings)
        assert meetings[-1] - meetings[0] == 1, "made anew once, with fresh signals"
    cpu_group.FIRST_EPOCH = usual


def threaded(rank: int, world: int) -> None:
    """Two threads, each with its own group, and one group under a lock."""
    names = [name_of(dist.new_group()) for _ in range(2)]
    failures: list[BaseException] = []

    def work(group: str) -> None:
        try:
            for _ in range(20):
                exchange(rank, world, group)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures

    # One group: a call begins only after the other thread's has ended, whichever comes first.
    state = state_of(names[0], CpuGroup)
    entered = threading.Event()

    def enter() -> None:
        work(names[0])
        entered.set()

    with state.lock:
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.2)
    thread.join()
    assert entered.is_set()
    assert not failures, failures


def forked(rank: int, world: int) -> None:
    """A fork's child may end like any process: the peers do not take its end for the rank's."""
    group = name_of(dist.new_group())
    exchange(rank, world, group)
    child = os.fork()
    if child == 0:
        groups.close_all()  # as at the end of an interpreter
        groups._inherited.clear()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.barrier()
    exchange(rank, world, group)


def on_two(rank: int, world: int) -> None:
    remade(rank, world)
    growing(rank, world)
    wrapping(rank, world)
    modes(rank, world)
    threaded(rank, world)
    forked(rank, world)
    remade_world(rank, world)


def test_groups_on_two_ranks() -> None:
    run_ranks(on_two, 2, timeout=120)


def test_two_dimensional_mesh() -> None:
    run_ranks(two_dims, 4, timeout=120)


ENDING = """
    import torch, torch.distributed as dist
    from flux_inductor.planning.plan import Plan
    from flux_inductor.runtime.cpu import CpuEngine
    from tests.support.engines import all_gather_matmul

    store = dist.FileStore("{store}", 2)
    dist.init_process_group("gloo", store=store, rank={rank}, world_size=2)
    x, plan = torch.ones(8, 4), Plan("mesh", "pull", 2)
    for _ in range(50):
        all_gather_matmul(CpuEngine(), x, [torch.ones(4, 4)], [], "0", plan, 0, True)
    print("done", flush=True)
"""


def test_ranks_may_end_without_destroying_their_groups(tmp_path: os.PathLike[str]) -> None:
    """Each ends as soon as its own last call has; the other completes its last call all the same."""
    store = os.path.join(tmp_path, "store")
    programs = [textwrap.dedent(ENDING.format(store=store, rank=rank)) for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for program in programs
    ]
    for process in processes:
        output, messages = process.communicate(timeout=60)
        assert process.returncode == 0, messages
        assert output == "done\n"
        assert "terminate" not in messages
