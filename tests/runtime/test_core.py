"""The compiled core by itself: epochs, signals' places, cuts, sums of partial products, shared memory."""

from __future__ import annotations

import fcntl
import os
import resource
import stat
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flux_inductor import _core

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@st.composite
def operands(draw: st.DrawFn) -> Tensor | None:
    """Few enough that two are often alike."""
    if draw(st.booleans()):
        return None
    shape = draw(st.lists(st.integers(1, 2), max_size=3))
    base = torch.empty(64, dtype=draw(st.sampled_from([torch.float32, torch.int32, torch.float16])))
    strides = [draw(st.sampled_from([1, 4])) for _ in shape]
    return base.as_strided(shape, strides, draw(st.sampled_from([0, 1, 16])))


def properties(operand: Tensor | list[Tensor | None] | None) -> object:
    if isinstance(operand, list):
        return [properties(each) for each in operand]
    if operand is None:
        return None
    aligned = operand.data_ptr() % _core.ALIGNMENT == 0
    return tuple(operand.shape), operand.stride(), operand.dtype, aligned


several = st.lists(st.one_of(operands(), st.lists(operands(), max_size=2)), max_size=3)


@given(several, several)
def test_descriptions_are_alike_for_like_operands_alone(left: list[Any], right: list[Any]) -> None:
    assert _core.describe(*left) == _core.describe(*left)
    assert (_core.describe(*left) == _core.describe(*right)) == (properties(left) == properties(right))


def test_operands_that_cannot_be_described() -> None:
    for operand in (torch.eye(2).to_sparse(), [torch.empty(2, device="meta")], 3):
        with pytest.raises(ValueError, match=r"cannot use this operand \(.+\); pass dense tensors"):
            _core.describe(operand)  # type: ignore[arg-type]
    freed = torch.ones(4, 4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="memory was freed"):
        _core.describe([freed])
    assert _core.describe(torch.empty(0, 4)) == _core.describe(torch.ones(0, 4))


@given(seen=st.integers(0, 2**32 - 1), ahead=st.integers(-(2**31), 2**31 - 1))
def test_an_epoch_is_reached_by_itself_and_half_the_count_after_it(seen: int, ahead: int) -> None:
    assert _core.testing.reached(seen, (seen - ahead) % 2**32) == (ahead >= 0)


@given(world=st.integers(2, 9), chunks=st.integers(1, 7))
def test_signals_of_a_call_have_words_of_their_own(world: int, chunks: int) -> None:
    layout = _core.SignalLayout(world, chunks)
    pairs = [(peer, chunk) for peer in range(world) for chunk in range(chunks)]
    words = [layout.arrived(*pair) for pair in pairs] + [layout.ready(*pair) for pair in pairs]
    assert sorted(words) == list(range(layout.count))


@given(st.integers(0, 40), st.integers(1, 50), st.integers(0, 50))
def test_chunks_cover_a_shard_once_and_in_order(rows: int, chunk: int, last: int) -> None:
    made = _core.cut_rows(rows, chunk, last)
    assert [row for first, end in made for row in range(first, end)] == list(range(rows))
    sizes = [end - first for first, end in made]
    if last and rows:
        assert sizes.pop() == min(last, rows)
    assert all(size == chunk for size in sizes[:-1])
    assert all(0 < size <= chunk for size in sizes)


def test_uneven_chunks() -> None:
    def sizes(*arguments: int) -> list[int]:
        return [end - first for first, end in _core.cut_rows(*arguments)]

    assert sizes(4096, 2560, 1536) == [2560, 1536]
    assert sizes(4096, 1000, 512) == [1000, 1000, 1000, 584, 512]
    assert sizes(300, 64, 200) == [64, 36, 200]
    assert sizes(300, 64, 400) == [300]


def test_only_the_shard_that_a_rank_needs_last_is_cut_unevenly_and_sliced() -> None:
    schedule = _core.GatherSchedule(3, 1, 1, 10, 1, 192, (4, 1, 1, 1), 1, 6, last=3, slices=2)
    even, ends = [(0, 6), (6, 10)], [(0, 6), (6, 7), (7, 10)]
    assert [chunk[:2] for chunk in schedule.chunks(2)] == even
    assert [chunk[:2] for chunk in schedule.chunks(0)] == ends
    to_rank_2 = [(0, 6, 0, 192), (6, 7, 0, 192), (7, 10, 0, 128), (7, 10, 128, 192)]
    assert [copy[1:5] for copy in schedule.copies() if copy[0] == 2] == to_rank_2
    assert [copy[1:5] for copy in schedule.copies() if copy[0] == 0] == [(0, 6, 0, 192), (6, 10, 0, 192)]


def test_slices_that_k_has_no_steps_for_are_not_sent() -> None:
    """Five steps of 64 in four slices would be two each, which are three slices."""
    schedule = _core.GatherSchedule(2, 0, 1, 100, 64, 320, (64, 64, 1, 1), 1, 100, slices=4)
    assert [slices for _, _, slices, _ in schedule.chunks(1)] == [3]
    assert len(schedule.copies()) == 3


@pytest.mark.parametrize("sizes", [(0, 0), (2, 2), (2, -1)])
def test_an_order_of_ranks_that_do_not_exist_is_an_error(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"world=0: must be at least 1|rank=-?\d: must be one of 2"):
        _core.GatherSchedule(*sizes, 1, 10, 1, 1, (1, 1, 1, 1), 1, 1)
    with pytest.raises(ValueError, match="sweep=0: must be at least 1"):
        _core.ScatterSchedule(2, 0, 1, 10, 1, (1, 1, 1, 1), 0, 1)
    with pytest.raises(ValueError, match="chunk=0: must be at least 1"):
        _core.cut_rows(10, 0)


def test_the_module_shares_no_symbol_with_other_libraries() -> None:
    """Those of a static libstdc++ would be taken by torch's libraries where torch is imported later."""
    path = _core.__file__
    assert path is not None
    made = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True)
    assert [line.split()[-1] for line in made.stdout.splitlines()] == ["PyInit__core"]


def test_it_may_be_imported_before_torch() -> None:
    """Nor does it need anyone to tell it how torch lends tensors."""
    code = "from flux_inductor import _core; import torch; print(len(_core.describe(torch.ones(2))))"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.split() == ["24"]


def summed(dtype: str, own: Tensor, partials: list[Tensor], place: int, pitch: int, scale: float) -> Tensor:
    """What _core.sum makes of `own` in memory with rows `pitch` apart, `place`-th among the partials."""
    count, width = own.shape
    memory = torch.full((count, pitch), -7.0, dtype=own.dtype)
    memory[:, :width] = own
    addresses = [partial.data_ptr() for partial in partials]
    addresses.insert(place, 0)
    _core.sum(dtype, memory.data_ptr(), pitch, addresses, count, width, scale)
    assert (memory[:, width:] == -7).all(), "it wrote beyond its rows"
    return memory[:, :width]


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    count=st.integers(1, 4),
    width=st.integers(1, 1100),
    gap=st.integers(0, 3),
    peers=st.integers(1, 7),
    data=st.data(),
)
def test_partials_are_summed_in_fp32_and_rounded_once(
    dtype: str, count: int, width: int, gap: int, peers: int, data: st.DataObject
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    place = data.draw(st.integers(0, peers))
    all_partials = [(torch.randn(count, width) * 50).to(DTYPES[dtype]) for _ in range(peers + 1)]
    own = all_partials[place]
    others = all_partials[:place] + all_partials[place + 1 :]
    total = torch.zeros(count, width)
    for partial in all_partials:
        total += partial
    expected = (total * 0.5).to(DTYPES[dtype])
    assert torch.equal(summed(dtype, own, others, place, width + gap, 0.5), expected)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_16_bit_value_survives_a_sum_with_zero(dtype: str) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(DTYPES[dtype])[None]
    result = summed(dtype, values.clone(), [torch.full_like(values, -0.0)], 0, values.shape[1], 1.0)
    assert torch.equal(result.isnan(), values.isnan())
    known = ~values.isnan()
    assert torch.equal(result[known].view(torch.int16), values[known].view(torch.int16))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_sums_round_to_nearest_even_overflow_to_inf_and_keep_nan(dtype: str) -> None:
    torch.manual_seed(0)
    # fp32 numbers over the whole range, of which bf16 and fp16 must round, overflow or lose every one.
    wide = torch.randint(-(2**31), 2**31 - 1, (4096,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 65504, 65519, 65520, 6e-8, 2.9e-8, 3.1e-8, 0.0])
    a = torch.cat([wide, special]).to(DTYPES[dtype])[None]
    b = a.flip(1).contiguous()
    expected = (a.float() + b.float()).to(DTYPES[dtype])
    result = summed(dtype, a.clone(), [b], 0, a.shape[1], 1.0)
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.nan_to_num(1.0, 2.0, 3.0), expected.nan_to_num(1.0, 2.0, 3.0))


def test_a_segment_is_for_its_owner_only_and_has_no_name() -> None:
    segment = _core.Segment.create(8, 1 << 16, 0)
    status = os.fstat(segment.fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == segment.size
    assert status.st_blocks * 512 >= segment.size, "memory is reserved, so that there is no SIGBUS later"
    assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    assert not any("flux" in name for name in os.listdir("/dev/shm"))


def test_what_one_rank_writes_the_other_reads_in_two_buffers() -> None:
    own = _core.Segment.create(8, 4096, 0)
    peer = _core.Segment.open(os.getpid(), own.fd, own.token)
    for parity in (0, 1):
        memoryview(own.buffer(parity))[:3] = bytes([parity, 2, 3])
    assert [bytes(memoryview(peer.buffer(parity))[:3]) for parity in (0, 1)] == [b"\0\2\3", b"\1\2\3"]


def test_a_buffer_outlives_its_segment() -> None:
    segment = _core.Segment.create(8, 4096, 0)
    view = torch.frombuffer(segment.buffer(0), dtype=torch.uint8)
    descriptor = segment.fd
    del segment
    view.fill_(7)
    assert view.sum() == 7 * 4096
    del view
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_other_memory_is_not_taken_for_a_segment() -> None:
    segment = _core.Segment.create(8, 4096, 0)
    with pytest.raises(OSError, match="checking the token") as wrong_token:
        _core.Segment.open(os.getpid(), segment.fd, segment.token ^ 1)
    assert wrong_token.value.errno == 9
    with pytest.raises(FileNotFoundError):
        _core.Segment.open(os.getpid(), 1_000_000, segment.token)
    with open("/proc/self/status") as other, pytest.raises(OSError, match="/proc/"):
        _core.Segment.open(os.getpid(), other.fileno(), segment.token)


def test_memory_that_cannot_be_had_is_an_error_with_its_size() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match=r"reserving 20\d+ bytes"):
            _core.Segment.create(8, 10_000_000, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_transfer_needs_all_its_fields() -> None:
    with pytest.raises(ValueError, match="11 fields"):
        _core.Transfers(True, [[1, 2, 3]])
