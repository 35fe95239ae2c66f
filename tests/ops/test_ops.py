"""The raw ops: fake kernels agree with real ones, bad input is named before anything is launched."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks

PLAN = "mesh push chunk=3"


def _opcheck(rank: int, world: int) -> None:
    from flux_inductor import ops  # noqa: F401

    torch.manual_seed(rank)
    x = torch.randn(2, 4, 6)
    weights = [torch.randn(6, 5), torch.randn(7, 6).t()]
    fused = torch.ops.flux_inductor
    tests = ("test_schema", "test_faketensor")
    for dim in (0, 1):
        for wanted in (False, True):
            for biases in ([], [torch.randn(5), None]):
                gather = (x, weights, biases, "0", PLAN, dim, wanted)
                torch.library.opcheck(fused.all_gather_matmul.default, gather, test_utils=tests)
    x = torch.randn(2, 4 * world, 6).transpose(0, 1)
    for dim in (0, 1, 2):
        weight = torch.randn(4 * world, 6).t()
        for addend in (None, torch.randn(4 * world, 2, 4 * world)):
            if dim == 1 and world > 2:
                continue
            scatter = (x, weight, torch.randn(4 * world), addend, "0", PLAN, dim, "avg", 0.5)
            torch.library.opcheck(fused.matmul_reduce_scatter.default, scatter, test_utils=tests)


def test_fake_kernels_agree_with_real_ones() -> None:
    run_ranks(_opcheck, 2)


def _bad_input(rank: int, world: int) -> None:
    import flux_inductor
    from flux_inductor import ops  # noqa: F401

    gather = torch.ops.flux_inductor.all_gather_matmul
    scatter = torch.ops.flux_inductor.matmul_reduce_scatter
    x, w = torch.randn(4, 6), torch.randn(6, 8)

    with pytest.raises(ValueError, match=r"shape \(4,\); it needs at least two dims"):
        gather(x[:, 0], [w], [], "0", PLAN, 0, False)
    with pytest.raises(ValueError, match=r"torch\.float64; fused ops take bfloat16, float16 or float32"):
        gather(x.double(), [w.double()], [], "0", PLAN, 0, False)
    with pytest.raises(ValueError, match=r"torch\.int64; fused ops take"):
        gather(x.long(), [w.long()], [], "0", PLAN, 0, False)
    with pytest.raises(ValueError, match=r"torch\.complex64; fused ops take"):
        scatter(x.to(torch.complex64), w.to(torch.complex64), None, None, "0", PLAN, 0, "sum", 1.0)
    with pytest.raises(ValueError, match=r"a weight is torch\.bfloat16 on cpu, x is torch\.float32"):
        gather(x, [w.bfloat16()], [], "0", PLAN, 0, False)
    with pytest.raises(ValueError, match=r"weight of shape \(5, 8\) does not multiply x .* must be \[6, N\]"):
        gather(x, [w[:5]], [], "0", PLAN, 0, False)
    with pytest.raises(ValueError, match="no weight was given"):
        gather(x, [], [], "0", PLAN, 0, False)
    with pytest.raises(ValueError, match=r"gather_dim is 1; .* must be in \[0, 0\]"):
        gather(x, [w], [], "0", PLAN, 1, False)
    with pytest.raises(ValueError, match="2 biases for 1 weights"):
        gather(x, [w], [None, None], "0", PLAN, 0, False)
    with pytest.raises(ValueError, match=r"bias of shape \(7,\) does not fit .* must be \[8\]"):
        gather(x, [w], [torch.randn(7)], "0", PLAN, 0, False)
    with pytest.raises(ValueError, match="plan 'ring push': unknown route 'ring'"):
        gather(x, [w], [], "0", "ring push", 0, False)
    with pytest.raises(ValueError, match=r"dim 0 of the product \(3, 8\) does not divide by the 2 ranks"):
        scatter(x[:3], w, None, None, "0", PLAN, 0, "sum", 1.0)
    with pytest.raises(ValueError, match="reduce_op is 'max'; it must be one of sum, avg"):
        scatter(x, w, None, None, "0", PLAN, 0, "max", 1.0)
    with pytest.raises(ValueError, match=r"scatter_dim is 2; .* must be in \[0, 1\]"):
        scatter(x, w, None, None, "0", PLAN, 2, "sum", 1.0)
    with pytest.raises(ValueError, match=r"addend has shape \(4, 7\); it must have the product's, \(4, 8\)"):
        scatter(x, w, None, torch.randn(4, 7), "0", PLAN, 0, "sum", 1.0)
    with pytest.raises(ValueError, match="nowhere"):
        gather(x, [w], [], "nowhere", PLAN, 0, False)
    only_first = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="rank"):
            flux_inductor.all_gather_matmul(x, w, only_first)
    dist.barrier()
    torch.testing.assert_close(gather(x, [w], [], "0", PLAN, 0, True)[1][4 * rank : 4 * rank + 4], x)


def test_bad_input_is_named_before_anything_is_launched() -> None:
    run_ranks(_bad_input, 2)


def _empty_and_alone(rank: int, world: int) -> None:
    from flux_inductor import ops  # noqa: F401

    gather = torch.ops.flux_inductor.all_gather_matmul
    scatter = torch.ops.flux_inductor.matmul_reduce_scatter
    w = torch.randn(6, 8)
    product, whole = gather(torch.randn(0, 6), [w], [], "0", PLAN, 0, True)
    assert (tuple(product.shape), tuple(whole.shape)) == ((0, 8), (0, 6))
    assert tuple(scatter(torch.randn(0, 6), w, None, None, "0", PLAN, 0, "sum", 1.0).shape) == (0, 8)
    nothing = gather(torch.randn(4, 0), [torch.randn(0, 8)], [torch.ones(8)], "0", PLAN, 0, False)[0]
    torch.testing.assert_close(nothing, torch.ones(4 * world, 8))


def _scaled_by_zero(rank: int, world: int) -> None:
    from flux_inductor import ops  # noqa: F401

    scatter = torch.ops.flux_inductor.matmul_reduce_scatter
    x, w, b = torch.randn(4, 6), torch.randn(6, 8), torch.randn(8)
    x[0, 0] = torch.inf
    for plan in (PLAN, "unfused"):
        for bias in (None, b):
            result = scatter(x, w, bias, None, "0", plan, 0, "sum", 0.0)
            assert bool(result.isnan().all(1)[0]) == (rank == 0), plan


def test_a_scale_of_zero_keeps_nan() -> None:
    run_ranks(_scaled_by_zero, 2)


@pytest.mark.parametrize("world", [1, 2])
def test_empty_inputs_and_a_lone_rank(world: int) -> None:
    run_ranks(_empty_and_alone, world)
