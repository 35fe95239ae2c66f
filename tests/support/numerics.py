"""Random operands, fp64 references, and the measure of an error."""

import torch


def randoms(
    count: int, shape: tuple[int, ...], dtype: torch.dtype, devices: list[torch.device]
) -> list[torch.Tensor]:
    """`count` fresh tensors, the i-th on the i-th device, of unit variance."""
    return [torch.randn(shape, device=devices[i]).to(dtype) for i in range(count)]


def weight(k: int, n: int, dtype: torch.dtype, device: torch.device, layout: str) -> torch.Tensor:
    """A weight [k, n] that keeps variances, with K contiguous ("k_major") or N ("n_major")."""
    values: torch.Tensor = (torch.randn(n, k, device=device) / k**0.5).to(dtype)
    return values.t() if layout == "k_major" else values.t().contiguous()


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the fp64 reference; NaN stays NaN."""
    difference = result.to(reference.device, torch.float64) - reference
    return float(difference.norm() / reference.norm())


def product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ w + bias in fp64."""
    result = x.double() @ w.double()
    return result if bias is None else result + bias.double()
