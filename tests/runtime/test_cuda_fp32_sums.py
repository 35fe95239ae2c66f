"""What the CUDA engine's Python half makes of sums in fp32: terms in the result's dtype, and their memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from flux_inductor import ops  # noqa: F401  (registers the ops)
from tests.runtime.cuda_stub import WORLD, stubbed

PLAN = "mesh push chunk=2"


@pytest.fixture(autouse=True)
def _stub() -> Iterator[None]:
    with stubbed():
        yield


def test_terms_are_read_in_fp32() -> None:
    """Converted before they are divided in a mean, so that nothing is rounded twice."""
    x, weight = torch.randn(4, 16).bfloat16(), torch.randn(16, 8).bfloat16()
    exact = x.float() @ weight.float()
    scatter = torch.ops.flux_inductor.matmul_reduce_scatter
    for reduce_op, dtypes in product(("sum", "avg"), product((torch.bfloat16, torch.float32), repeat=2)):
        bias, addend = torch.randn(8).to(dtypes[0]), torch.randn(4, 8).to(dtypes[1])
        result = scatter(x, weight, bias, addend, "0", PLAN, 0, reduce_op, 1.0, out_dtype=torch.float32)
        factor = WORLD if reduce_op == "sum" else 1
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, factor * (exact + bias.float() + addend.float())[:2])
        alone = scatter(x, weight, None, None, "0", PLAN, 0, reduce_op, 1.0, out_dtype=torch.float32)
        torch.testing.assert_close(alone, factor * exact[:2])
