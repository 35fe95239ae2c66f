"""One process plays all ranks of a group on one or two GPUs, on the kernels themselves.

The kernels take rank, world size and addresses, so nothing but the caller knows that the ranks share a
process. Each rank has its own streams, buffers, signals and epoch, and a share of its GPU's SMs:
all kernels must be resident together, since they wait for one another, and some SMs must stay
free, since copies within one GPU need them.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.gpu_kernels import find, kernels, layout_of

FREE_SMS = 20
CLAIM_WORDS = 32  # the counter of claims has a cache line of its own
WAIT_LIMIT_NS = 2_000_000_000
ERROR_FIELDS = ("state", "op", "source", "chunk", "expected", "seen")


def allow_peer_access() -> None:
    """Make this process's GPUs address each other's memory: torch does so at the first copy between them."""
    for source in range(torch.cuda.device_count()):
        for target in range(torch.cuda.device_count()):
            torch.ones(1, device=f"cuda:{source}").to(f"cuda:{target}")


@dataclass
class Rank:
    """One rank's device, streams and words."""

    index: int
    device: torch.device
    sms: int
    words: int
    compute: torch.cuda.Stream = field(init=False)
    transfer: torch.cuda.Stream = field(init=False)

    def __post_init__(self) -> None:
        self.compute = torch.cuda.Stream(self.device)
        self.transfer = torch.cuda.Stream(self.device, priority=-1)
        self.epoch = torch.full((1,), 7, dtype=torch.int64, device=self.device)
        self.signals = torch.zeros(self.words, dtype=torch.int64, device=self.device)
        # Claims first, then counters.
        self.zeroed = torch.zeros(self.words, dtype=torch.int32, device=self.device)
        self.errors = torch.zeros(kernels.ERROR_RECORD_BYTES // 8, dtype=torch.int64).pin_memory()

    @property
    def claims(self) -> int:
        return self.zeroed.data_ptr()

    @property
    def counters(self) -> int:
        return self.zeroed.data_ptr() + 4 * CLAIM_WORDS

    def error(self) -> dict[str, int]:
        fields = [*self.errors[:2].view(torch.int32).tolist(), *self.errors[2:].tolist()]
        return dict(zip(ERROR_FIELDS, fields, strict=True))


class EmulatedGroup:
    """`world` ranks, dealt out to the GPUs in turn."""

    def __init__(self, world: int, words: int = 8192) -> None:
        devices = min(torch.cuda.device_count(), world)
        per_device = -(-world // devices)
        if devices > 1:
            allow_peer_access()
        whole = torch.cuda.get_device_properties(0).multi_processor_count
        share = whole if world == 1 else (whole - (FREE_SMS if per_device > 1 else 0)) // per_device
        self.world = world
        self.ranks = [Rank(i, torch.device("cuda", i % devices), share, words) for i in range(world)]
        for device in range(devices):  # rule R3
            with torch.cuda.device(device):
                for entry in kernels.all_gather_matmul_kernels() + kernels.matmul_reduce_scatter_kernels():
                    entry.prepare()
        torch.cuda.synchronize()

    def alone(self) -> "EmulatedGroup":
        """A group of one rank on the streams of this one's first."""
        group = EmulatedGroup(1)
        group.ranks[0].compute = self.ranks[0].compute
        return group

    def start(self, words: int = 0) -> None:
        """The start of a call on every rank's compute stream, and the fork of its transfer stream."""
        for rank in self.ranks:
            with torch.cuda.device(rank.device):
                with torch.cuda.stream(rank.compute):
                    rank.epoch += 1
                    rank.zeroed[:words] = 0
                rank.transfer.wait_stream(rank.compute)

    def join(self) -> None:
        for rank in self.ranks:
            with torch.cuda.device(rank.device):
                rank.compute.wait_stream(rank.transfer)

    def synchronize(self) -> None:
        for rank in self.ranks:
            torch.cuda.synchronize(rank.device)


def poisoned(shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype or like.dtype, device=like.device)


def delay(rank: Rank, cycles: int, stream: torch.cuda.Stream | None = None) -> None:
    """Hold up a rank's transfers, each rank's for another time, so that chunks arrive in an unusual order.

    Or another stream of the rank.

    Before the rank's kernel is launched: the delay is a kernel too, and would wait for an SM until
    the other gives up waiting (rule R2).
    """
    if cycles:
        with torch.cuda.stream(stream or rank.transfer):
            torch.cuda._sleep(cycles * (1 + rank.index * 7 % 5))


class AllGatherMatmulCall:
    """A prepared call on every rank; shards[r] is [strips, rows, K] on rank r's device.

    With `keep`, the launch of the widest weight stores the gathered tensor, kept[r].
    """

    def __init__(
        self,
        group: EmulatedGroup,
        shards: list[torch.Tensor],
        weights: list[list[torch.Tensor]],
        tile: str,
        rows_per_chunk: int,
        biases: list[list[torch.Tensor | None]] | None = None,
        sweep: int = 4,
        wait_limit_ns: int = WAIT_LIMIT_NS,
        keep: bool = False,
        last_rows: int = 0,
        slices: int = 1,
    ) -> None:
        world = group.world
        strips, rows, k = shards[0].shape
        self.group, self.shards = group, shards
        self.gathered = [poisoned((strips, world, rows, k), s) for s in shards]
        self.kept = [torch.empty_like(g) for g in self.gathered] if keep else []
        widths = [w.shape[1] for w in weights[0]]
        self.products = [[poisoned((strips, world * rows, w.shape[1]), w) for w in ws] for ws in weights]
        self.entries = [find(kernels.all_gather_matmul_kernels(), tile, w) for w in weights[0]]
        self.problems: list[list[Any]] = []
        for rank in group.ranks:
            self.problems.append([])
            for i, weight in enumerate(weights[rank.index]):
                p = kernels.testing.AllGatherMatmul()
                shard, bias = shards[rank.index], biases[rank.index][i] if biases else None
                p.world, p.rank, p.strips, p.rows, p.n, p.k = (
                    world,
                    rank.index,
                    strips,
                    rows,
                    weight.shape[1],
                    k,
                )
                p.own_shard = shard.data_ptr()
                p.own_strip_stride, p.own_row_stride = shard.stride(0), shard.stride(1)
                p.gathered = self.gathered[rank.index].data_ptr()
                p.weight, p.weight_stride = weight.data_ptr(), layout_of(weight)[1]
                p.bias = bias.data_ptr() if bias is not None else 0
                p.kept = self.kept[rank.index].data_ptr() if keep and i == widths.index(max(widths)) else 0
                p.product = self.products[rank.index][i].data_ptr()
                p.signals, p.epoch = rank.signals.data_ptr(), rank.epoch.data_ptr()
                p.rows_per_chunk, p.group, p.sms = rows_per_chunk, sweep, rank.sms
                p.last_rows, p.slices = last_rows, slices
                assert world * kernels.testing.signals_per_shard(p) <= rank.words
                p.wait_limit_ns, p.errors = wait_limit_ns, rank.errors.data_ptr()
                self.problems[-1].append(p)

    def enqueue(self, delay_cycles: int = 0, push: bool = True) -> None:
        group = self.group
        group.start()
        for rank in group.ranks:
            with torch.cuda.device(rank.device):
                delay(rank, delay_cycles)
                if push and group.world > 1:
                    kernels.testing.push_shard(
                        self.problems[rank.index][0],
                        [buffer.data_ptr() for buffer in self.gathered],
                        [other.signals.data_ptr() for other in group.ranks],
                        rank.transfer.cuda_stream,
                    )
        for rank in group.ranks:
            with torch.cuda.device(rank.device):
                for entry, p in zip(self.entries, self.problems[rank.index], strict=True):
                    kernels.testing.launch(entry, p, rank.compute.cuda_stream)
        group.join()

    def run(self, delay_cycles: int = 0, push: bool = True) -> list[list[torch.Tensor]]:
        """The products [strips, world * rows, N] of every rank and weight."""
        for kept in self.kept:
            kept.fill_(torch.nan)
        self.group.synchronize()
        self.enqueue(delay_cycles, push)
        self.group.synchronize()
        return self.products


class MatmulReduceScatterCall:
    """A prepared call on every rank; xs[r] is [strips, world * rows, K] on rank r's device.

    Partials go to their owners by the copy engine ("push") or from the kernel itself ("store"), in the dtype
    of the results: None stands for that of the operands.
    """

    def __init__(
        self,
        group: EmulatedGroup,
        xs: list[torch.Tensor],
        weights: list[torch.Tensor],
        tile: str,
        biases: list[torch.Tensor] | None = None,
        addends: list[torch.Tensor] | None = None,
        scale: float = 1.0,
        sweep: int = 4,
        chunk_columns: int = 4,
        wait_limit_ns: int = WAIT_LIMIT_NS,
        sms: list[int] | None = None,
        direction: str = "push",
        result: torch.dtype | None = None,
    ) -> None:
        world = group.world
        strips, m, k = xs[0].shape
        rows, n = m // world, weights[0].shape[1]
        self.group = group
        self.direction = direction
        self.inputs = [xs, weights, biases, addends]
        shape = (world, strips, rows, n)
        self.parts = [poisoned(shape, x, result) for x in xs]  # the own one is the result
        self.arriving = [poisoned(shape, x, result) for x in xs]
        self.entry = find(kernels.matmul_reduce_scatter_kernels(), tile, weights[0], result)
        self.problems = []
        for rank, x, weight in zip(group.ranks, xs, weights, strict=True):
            p = kernels.testing.MatmulReduceScatter()
            p.world, p.rank, p.strips, p.rows, p.n, p.k = world, rank.index, strips, rows, n, k
            p.x, p.x_row_stride = x.data_ptr(), x.stride(1)
            p.weight, p.weight_stride = weight.data_ptr(), layout_of(weight)[1]
            p.bias = biases[rank.index].data_ptr() if biases else 0
            p.addend = addends[rank.index].data_ptr() if addends else 0
            p.scale = scale
            parts = list(self.parts[rank.index])
            if direction == "store":
                parts = [self.arriving[i][rank.index] for i in range(world)]
                parts[rank.index] = self.parts[rank.index][rank.index]
                p.delivered = [0 if other is rank else other.signals.data_ptr() for other in group.ranks]
            p.parts = [part.data_ptr() for part in parts]
            p.partials = [partial.data_ptr() for partial in self.arriving[rank.index]]
            p.counters, p.claims = rank.counters, rank.claims
            p.arrived, p.epoch = rank.signals.data_ptr(), rank.epoch.data_ptr()
            p.group, p.chunk_columns = sweep, chunk_columns
            p.sms = (sms or [rank.sms] * world)[rank.index]
            p.wait_limit_ns, p.errors = wait_limit_ns, rank.errors.data_ptr()
            self.problems.append(p)
        self.counted = CLAIM_WORDS + world * kernels.testing.chunks_per_part(self.entry, self.problems[0])

    def enqueue(self, delay_cycles: int = 0, absent: tuple[int, ...] = ()) -> None:
        """The call on all ranks but those that never come to it."""
        group = self.group
        group.start(self.counted)
        push = self.direction == "push"
        present = [rank for rank in group.ranks if rank.index not in absent]
        for rank in present:
            with torch.cuda.device(rank.device):
                delay(rank, delay_cycles, rank.transfer if push else rank.compute)
        for rank in present:
            with torch.cuda.device(rank.device):
                kernels.testing.launch(self.entry, self.problems[rank.index], rank.compute.cuda_stream)
        for rank in present if push else ():
            with torch.cuda.device(rank.device):
                kernels.testing.push_partials(
                    self.entry,
                    self.problems[rank.index],
                    [buffer[rank.index].data_ptr() for buffer in self.arriving],
                    [other.signals.data_ptr() for other in group.ranks],
                    rank.transfer.cuda_stream,
                )
        group.join()

    def run(self, delay_cycles: int = 0) -> list[torch.Tensor]:
        """Each rank's rows of the sum, [strips, rows, N]."""
        for buffer in self.parts + self.arriving:
            buffer.fill_(torch.nan)  # the partials of the last run would hide that one is missing
        self.group.synchronize()
        self.enqueue(delay_cycles)
        self.group.synchronize()
        return [self.parts[rank][rank] for rank in range(self.group.world)]
