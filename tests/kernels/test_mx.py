"""MX and NVFP4 in the production layer: the conformance tool's bits on the CPU, layouts, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kernels
from kernels import subjects
from kernels.mx_blocks import HEIGHTS, LINEAR
from oracle.routines import cases, get, profiles
from oracle.routines.base import by_name

NAMES = tuple(f"{fmt}_{verb}" for fmt in ("mxfp8", "mxfp4", "nvfp4") for verb in ("quantize", "dequantize"))
RUN = {s.contract: s for s in subjects.subjects() if s.contract in NAMES and s.arch == "cpu"}


ORDINARY = ("randn", "fp4ties", "steps", "heavy")
"""Families without NaN, infinity and the ends of the range, of which each library makes something else."""


def values(rows: int = 9, columns: int = 128) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(6)) * torch.arange(1, rows + 1)[:, None]


@pytest.mark.turns(4)
class TestEveryCase:
    """Every quick case: judged right, and where a recipe has its bits, with the bits of a recipe."""

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("name", NAMES)
    def test_right(self, name: str) -> None:
        contract = get(name)
        for case in profiles.cases(name, "quick"):
            inputs, options = case.inputs(), case.call_options()
            verdict = contract.judge(inputs, RUN[name].run(inputs, options), **options)
            assert not verdict.status.is_failure, f"{case}: {verdict.summary}"
            if name.endswith("_quantize") and case.family in ORDINARY:
                assert verdict.matches is not None, f"{case}: {verdict.summary}"

    @pytest.mark.parametrize(
        ("name", "wrong"),
        [
            ("mxfp8_quantize", lambda x: kernels.mxfp8_quantize(x, rounding="floor")),
            ("mxfp8_quantize", lambda x: kernels.mxfp8_quantize(x.clamp(-4, 4))),
            ("mxfp4_quantize", lambda x: (kernels.mxfp4_quantize(x)[0] << 4, kernels.mxfp4_quantize(x)[1])),
            ("mxfp4_quantize", lambda x: (kernels.mxfp4_quantize(x)[0], kernels.mxfp4_quantize(x)[1].flip(0))),
        ],
    )
    def test_sabotaged(self, name: str, wrong: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        x = values()
        q, scale = wrong(x)
        assert get(name).judge({"x": x}, {"q": q, "scale": scale}).status.is_failure


class TestThereAndBack:
    """Quantised and back: within half a step of the element under the scale of its block."""

    @pytest.mark.parametrize("layout", [*HEIGHTS, LINEAR])
    @pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "nvfp4"])
    def test_error(self, fmt: str, layout: str) -> None:
        x = values()
        if fmt == "nvfp4":
            e = 2688 / x.abs().amax().reshape(1)
            back = kernels.nvfp4_dequantize(*kernels.nvfp4_quantize(x, e, layout), 1 / e, layout)
        else:
            quantise, restore = getattr(kernels, f"{fmt}_quantize"), getattr(kernels, f"{fmt}_dequantize")
            back = restore(*quantise(x, layout), layout)
        width = 16 if fmt == "nvfp4" else 32
        amax = x.unflatten(1, (-1, width)).abs().amax(dim=-1).repeat_interleave(width, dim=1)
        assert bool(((back - x).abs() <= amax / (14 if fmt == "mxfp8" else 4.4)).all())
        assert not torch.equal(back, x)

    def test_inverse_is_that_of_the_conformance_tool(self) -> None:
        for name in ("mxfp4_dequantize", "nvfp4_dequantize", "mxfp8_dequantize"):
            case = next(iter(profiles.cases(name, "quick")))
            case = cases.parse(str(case).replace("family=randn", "family=codes"))
            inputs, options = case.inputs(), case.call_options()
            made = RUN[name].run(inputs, options), get(name).reference(inputs, **options)
            mine, theirs = (by_name(result)["out"] for result in made)
            assert torch.equal(mine.nan_to_num(nan=-1.0), theirs.nan_to_num(nan=-1.0))

    def test_strides_of_the_input_are_respected(self) -> None:
        x = values(64, 64)
        for made, plain in zip(kernels.mxfp8_quantize(x.t()), kernels.mxfp8_quantize(x.t().contiguous()), strict=True):
            assert torch.equal(made.view(torch.uint8), plain.view(torch.uint8))


class TestEdges:
    """What the documentation says of NaN, infinity and zeros."""

    def test_nan_and_infinity(self) -> None:
        x = torch.zeros(3, 32)
        x[0, :2], x[1, :2], x[2, 0] = torch.tensor([math.nan, 1.0]), torch.tensor([-math.inf, 1.0]), 2.0**-140
        q, byte = kernels.mxfp8_quantize(x, "linear")
        assert byte.flatten().tolist() == [0x77, 0xFE, 0]
        assert q.view(torch.uint8)[:2, :2].tolist() == [[0x7F, 0x78], [0xFE, 0]]
        for rounding in ("floor", "ceil", "even"):
            q, byte = kernels.mxfp8_quantize(x, "linear", rounding)
            assert byte.flatten().tolist() == [0xFF, 0xFF, 0] and bool(q.float()[:2].isnan().all())
        q, byte = kernels.mxfp4_quantize(x, "linear")
        assert q[:2, 0].tolist() == [0x67, 0x0F] and byte.flatten().tolist() == [0x7D, 0xFE, 0]

    def test_a_tensor_of_zeros(self) -> None:
        """2688/0 is infinite; scales and codes are 0 all the same."""
        q, scale = kernels.nvfp4_quantize(torch.zeros(2, 32), torch.tensor([math.inf]))
        assert not q.any() and not scale.any()
