"""Further forms of MX and NVFP4 in the production layer: the conformance tool's bits on the CPU, sabotage, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import kernels
from kernels import subjects
from kernels.errors import DtypeError, KernelError, OptionError, ShapeError, ValueRangeError
from oracle.routines import get, profiles
from oracle.routines.base import by_name
from oracle.routines.mx.more_cases import GRAMMARS

RUN = {s.contract: s for s in subjects.subjects() if s.contract in GRAMMARS and s.arch == "cpu"}
ORDINARY = ("randn", "fp4ties", "steps", "heavy")


class TestEveryCase:
    """Every quick case is judged right, with the bits of a recipe on ordinary values; a changed output fails."""

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("name", sorted(RUN))
    def test_right(self, name: str) -> None:
        contract = get(name)
        for number, case in enumerate(profiles.cases(name, "quick")):
            inputs, options = case.inputs(), case.call_options()
            made = by_name(RUN[name].run(inputs, options))
            verdict = contract.judge(inputs, made, **options)
            assert not verdict.status.is_failure, f"{case}: {verdict.summary}"
            exact = not name.startswith(("silu", "rms_norm"))  # an exponential, a sum or a root has no one rounding
            if "scale" in made and case.family in ORDINARY and exact:
                assert verdict.matches is not None, f"{case}: {verdict.summary}"
            if number == 0:
                spoiled = {n: (x.contiguous().view(torch.uint8) ^ 0x24).view(x.dtype) for n, x in made.items()}
                assert contract.judge(inputs, spoiled, **options).status.is_failure


X, ONE, CODES = torch.ones(2, 64), torch.ones(1), torch.ones(2, 64).to(torch.float8_e4m3fn)
OFFSETS = torch.tensor([0, 1, 2], dtype=torch.int32)


class TestBadCalls:
    """One typed error that names the value."""

    @pytest.mark.parametrize(
        ("call", "error", "said"),
        [
            (lambda: kernels.mxfp8_quantize_columnwise(X), ShapeError, "M=2"),
            (lambda: kernels.mxfp8_quantize_2d(torch.ones(32, 48)), ShapeError, "K=48"),
            (lambda: kernels.mxfp8_quantize_2d(torch.ones(32, 32), direction="down"), OptionError, "down"),
            (lambda: kernels.mxfp8_dequantize_columnwise(CODES, ONE), ShapeError, "M=2"),
            (lambda: kernels.nvfp4_batched_quantize(X[None], ONE, "linear"), OptionError, "linear"),
            (lambda: kernels.nvfp4_quantize_shuffled(X, ONE), ShapeError, "M=2"),
            (lambda: kernels.silu_and_mul_nvfp4_quantize(X[:, :48], ONE), ShapeError, "2 I=48"),
            (lambda: kernels.transpose_packed_fp4(torch.ones(3, 4, dtype=torch.int8)), ShapeError, "M=3"),
            (lambda: kernels.per_token_cast_to_fp4(X, use_packed_ue8m0=True), OptionError, "use_ue8m0=True"),
            (lambda: kernels.nvfp4_quantize(X, torch.ones(3)), ShapeError, "global_scale"),
            (lambda: kernels.mxfp6_quantize(X, element="e4m3"), OptionError, "e4m3"),
            (lambda: kernels.mxint8_quantize(X[:, :48]), ShapeError, "K=48"),
            (lambda: kernels.per_token_cast_to_fp4(X, gran_k=64), OptionError, "gran_k=64"),
            (lambda: kernels.nvfp4_quantize_2d(X, ONE), ShapeError, "M=2"),
            (lambda: kernels.nvfp4_quantize_4over6(X, ONE, error="max"), OptionError, "max"),
            (lambda: kernels.nvfp4_quantize_stochastic(X, ONE, seed=-1), OptionError, "seed=-1"),
            (lambda: kernels.hadamard_transform(X), DtypeError, "x"),
            (lambda: kernels.nvfp4_quantize_of_fp8(X, ONE), DtypeError, "x"),
            (lambda: kernels.scaled_fp4_experts_quant(X, ONE, OFFSETS), ShapeError, "global_scale"),
            (lambda: kernels.mxfp8_experts_quant(X, OFFSETS, "loose"), OptionError, "loose"),
            (lambda: kernels.mxfp8_grouped_quantize(X[None], OFFSETS), ShapeError, "mask"),
            (lambda: kernels.block_scales_to_mxfp8(CODES, torch.full((2, 1), 3.0)), ValueRangeError, "powers of two"),
            (lambda: kernels.fp8_block_to_mxfp8(CODES, torch.ones(3, 1)), ShapeError, "1x128 or 128x128"),
        ],
    )
    def test_one_typed_error(self, call: Callable[[], object], error: type[KernelError], said: str) -> None:
        with pytest.raises(error, match=said):
            call()
