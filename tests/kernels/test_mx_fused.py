"""Block-scaled quantisers fused with silu and RMS norm: the bits of the quantiser of the value, computed by torch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kernels
from kernels.errors import KernelError

GENERATOR = torch.Generator().manual_seed(4)
X, OTHER = (torch.randn(7, 192, generator=GENERATOR).bfloat16() for _ in range(2))
WEIGHT, FACTOR = torch.rand(192, generator=GENERATOR).bfloat16() + 0.5, torch.tensor([33.0])
LAYOUTS = ("128x4", "8x4", "linear")


def quantised(value: Tensor, kind: str, layout: str) -> tuple[Tensor, Tensor]:
    if kind == "nvfp4":
        return kernels.nvfp4_quantize(value, FACTOR, layout)
    quantise: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
        "mxfp8": kernels.mxfp8_quantize,
        "mxfp4": kernels.mxfp4_quantize,
    }
    return quantise[kind](value, layout)


def same(made: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    pairs = zip(made, right, strict=True)
    return all(a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def factor(kind: str) -> Tensor | None:
    return FACTOR if kind == "nvfp4" else None


def norm(x: Tensor, weight: Tensor, rounding: str, epsilon: float = 1e-6) -> Tensor:
    """As torch's own operator for float32, with the roundings of engines."""
    value = x.float() * torch.rsqrt(x.float().square().mean(1, keepdim=True) + epsilon)
    if rounding == "each":
        value = value.bfloat16().float()
    value = value * weight.float()
    return value if rounding == "none" else value.bfloat16()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4", "nvfp4"])
class TestBits:
    def test_silu(self, kind: str, layout: str) -> None:
        gate, up = X.float().chunk(2, dim=1)
        value = (gate / (1.0 + torch.exp(-gate)) * up).bfloat16()
        made = kernels.silu_and_mul_block_scaled_quant(X, kind, global_scale=factor(kind), layout=layout)
        assert same(made, quantised(value, kind, layout))
        swapped = (up / (1.0 + torch.exp(-up)) * gate).bfloat16()
        assert not same(made, quantised(swapped, kind, layout)), "the negative test"

    @pytest.mark.parametrize("rounding", ["each", "product", "none"])
    def test_norm(self, kind: str, layout: str, rounding: str) -> None:
        options = {"global_scale": factor(kind), "layout": layout, "rounding": rounding}
        q, scale, z = kernels.rms_norm_block_scaled_quant(X, WEIGHT, kind, **options)
        assert z is None and same((q, scale), quantised(norm(X, WEIGHT, rounding), kind, layout))
        assert not same((q, scale), quantised(norm(X, WEIGHT, rounding, 1.0), kind, layout)), "the negative test"

    def test_norm_of_a_sum(self, kind: str, layout: str) -> None:
        """The sum is not rounded before the norm; what is returned is."""
        options = {"global_scale": factor(kind), "layout": layout}
        q, scale, z = kernels.rms_norm_block_scaled_quant(X, WEIGHT, kind, residual=OTHER, **options)
        whole = X.float() + OTHER.float()
        assert z is not None and torch.equal(z, whole.bfloat16())
        assert same((q, scale), quantised(norm(whole, WEIGHT, "each"), kind, layout))


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: kernels.silu_and_mul_block_scaled_quant(X, "mxfp6"), "kind='mxfp6'"),
        (lambda: kernels.silu_and_mul_block_scaled_quant(X, "mxfp8", layout="4x4"), "layout='4x4'"),
        (lambda: kernels.silu_and_mul_block_scaled_quant(X, "nvfp4"), "global_scale"),
        (lambda: kernels.silu_and_mul_block_scaled_quant(X, "mxfp8", global_scale=FACTOR), "global_scale"),
        (lambda: kernels.silu_and_mul_block_scaled_quant(X[:, :160], "mxfp8"), "160"),
        (lambda: kernels.rms_norm_block_scaled_quant(X, WEIGHT[:64], "mxfp8"), "weight"),
        (lambda: kernels.rms_norm_block_scaled_quant(X, WEIGHT, "mxfp8", rounding="twice"), "rounding='twice'"),
        (lambda: kernels.rms_norm_block_scaled_quant(X, WEIGHT, "mxfp8", residual=OTHER[:3]), "residual"),
        (lambda: kernels.rms_norm_block_scaled_quant(X[:0], WEIGHT, "mxfp8"), "x"),
    ],
)
def test_refusals(call: Callable[[], object], names: str) -> None:
    with pytest.raises(KernelError, match=names):
        call()


def test_compiled() -> None:
    """One operator, the bits of eager."""

    def both(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, scale, _ = kernels.rms_norm_block_scaled_quant(x, WEIGHT, "mxfp8")
        return q, scale, *kernels.silu_and_mul_block_scaled_quant(x, "nvfp4", global_scale=FACTOR)

    compiled = torch.compile(both, fullgraph=True, backend="eager")
    assert same(compiled(X), both(X))
