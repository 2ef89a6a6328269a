"""Products at their edges: extents of one, ragged K, scales that are no ordinary numbers, every pair of FP8 formats.

The truth is checked against rational arithmetic, the prediction against the plain definition; truth and prediction are
judged right and identified, and one element moved is noticed wherever it is specified to be a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

import oracle
from oracle.numbers.formats import decode, same_bits
from oracle.routines import get
from oracle.routines.base import Call
from oracle.routines.products.contract import ProductContract
from oracle.tensorcore import predict
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth.gemm import ScaledProduct, rational
from oracle.verdict.compare import Status
from oracle.verdict.products import predict_parts

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FNUZ = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
SHAPES = ((1, 1, 1), (1, 1, 129), (1, 130, 1), (2, 1, 128), (3, 5, 33), (2, 129, 200))
PAIRS = ((E4M3, E4M3), (E5M2, E4M3), (E5M2, E5M2))
Inputs = dict[str, Tensor]

SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "ordinary": lambda s: s,
    "zero": lambda s: s * 0,
    "subnormal": lambda s: s * 2.0**-130,
    "huge": lambda s: s * 2.0**120,
    "negative": lambda s: -s,
    "infinite": lambda s: torch.full_like(s, math.inf),
    "nan": lambda s: torch.full_like(s, math.nan),
    "of every kind": lambda s: s.masked_fill(s > 1, 0.0).masked_fill(s > 1.2, math.inf).masked_fill(s > 1.4, math.nan),
}


class Draw:
    """Operands of one call from one generator; every code of a format, NaN among them, or gaussians."""

    def __init__(self, seed: int, pair: tuple[torch.dtype, torch.dtype], scales: str, *, codes: bool) -> None:
        self.g = torch.Generator().manual_seed(seed)
        self.pair, self.kind, self.codes = pair, SCALES[scales], codes

    def a(self, *shape: int) -> Tensor:
        return self._operand(shape, self.pair[0])

    def b(self, *shape: int) -> Tensor:
        return self._operand(shape, self.pair[1])

    def scale(self, *shape: int) -> Tensor:
        return self.kind(torch.rand(shape, generator=self.g) + 0.5)

    def _operand(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.codes:
            return torch.randint(0, 256, shape, generator=self.g, dtype=torch.uint8).view(dtype)
        return torch.randn(shape, generator=self.g).to(dtype)


def of(k: int) -> int:
    return -(-k // 128)


CALLS: dict[str, Callable[[Draw, int, int, int], Inputs]] = {
    "fp8_gemm_nt": lambda d, m, n, k: {
        "a": d.a(m, k), "a_scale": d.scale(m, of(k)), "b": d.b(n, k), "b_scale": d.scale(of(n), of(k)),
    },
    "fp8_blockscale_gemm_sm90": lambda d, m, n, k: {
        "input": d.a(m, k), "input_scale": d.scale(m, of(k)),
        "weight": d.b(n, k), "weight_scale": d.scale(of(n), of(k)),
    },
    "cutlass_scaled_mm": lambda d, m, n, k: {
        "a": d.a(m, k), "b": d.b(n, k), "a_scale": d.scale(m, 1), "b_scale": d.scale(1, n),
        "bias": torch.randn(n, generator=d.g).to(torch.bfloat16),
    },
    "m_grouped_fp8_gemm_nt_contiguous": lambda d, m, n, k: {
        "a": d.a(m, k), "a_scale": d.scale(m, of(k)), "b": d.b(2, n, k), "b_scale": d.scale(2, of(n), of(k)),
        "m_indices": torch.arange(m, dtype=torch.int32) * 2 // m,
    },
    "fp8_m_grouped_gemm_nt_masked": lambda d, m, n, k: {
        "a": d.a(2, m, k), "a_scale": d.scale(2, m, of(k)), "b": d.b(2, n, k), "b_scale": d.scale(2, of(n), of(k)),
        "masked_m": torch.tensor([m, 0], dtype=torch.int32),
    },
    "scaled_grouped_mm": lambda d, m, n, k: {
        "a": d.a(m, k), "b": d.b(2, n, k), "scale_a": d.scale(m, 1), "scale_b": d.scale(2, n),
        "offsets": torch.tensor([m // 2, m], dtype=torch.int32),
    },
    "torch_per_tensor_w8a8_scaled_mm": lambda d, m, n, k: {
        "qinput": d.a(m, k), "weight": d.b(k, n), "scale_a": d.scale(1), "scale_b": d.scale(1),
    },
    "torch_per_token_w8a8_scaled_mm": lambda d, m, n, k: {
        "qinput": d.a(m, k), "weight": d.b(k, n), "scale_a": d.scale(m, 1), "scale_b": d.scale(1, n),
    },
    "torch_channelwise_w8a8_scaled_mm": lambda d, m, n, k: {
        "qinput": d.a(m, k), "weight": d.b(k, n), "scale_a": d.scale(m, 1), "scale_b": d.scale(n),
    },
    "cutlass_w8a8_scaled_mm": lambda d, m, n, k: {
        "qinput": d.a(m, k), "weight": d.b(k, n), "scale_a": d.scale(1), "scale_b": d.scale(n, 1),
    },
    "rocm_per_tensor_w8a8_scaled_mm": lambda d, m, n, k: {
        "qinput": d.a(m, k), "weight": d.b(k, n), "scale_a": d.scale(1), "scale_b": d.scale(1),
    },
}  # fmt: skip  # a table, one row a line


def drawn(name: str, shape: tuple[int, int, int], scales: str, at: int) -> Inputs:
    """The inputs of one combination: pairs of formats and kinds of codes take turns."""
    pair = (FNUZ[at % 2], FNUZ[at // 2 % 2]) if name.startswith("rocm") else PAIRS[at % 3]
    return CALLS[name](Draw(sum(shape) + at, pair, scales, codes=at % 4 > 1), *shape)


def arch_of(name: str) -> str:
    return "gfx942" if name.startswith("rocm") else "sm90"


def admitted(name: str, inputs: Inputs, arch: str, out_dtype: torch.dtype) -> tuple[str, ...]:
    """The arithmetics that a kernel for this call may use, the usual one first."""
    return get(name).arithmetics(Call(get(name), inputs, arch=arch, out_dtype=out_dtype))


@pytest.mark.turns(4)
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("name", CALLS)
class TestEdges:
    """Every verb answers, and answers right."""

    @pytest.mark.sampled(3)
    def test_verbs_agree(self, name: str, scales: str) -> None:
        arch = arch_of(name)
        for at, shape in enumerate(SHAPES):
            inputs = drawn(name, shape, scales, at)
            dtype = (torch.float32, torch.bfloat16, torch.float16)[at % 3]
            first = admitted(name, inputs, arch, dtype)[0]
            out = oracle.predict(name, inputs, numerics=first, out_dtype=dtype)
            truth = oracle.reference(name, inputs, out_dtype=dtype)
            assert isinstance(out, Tensor) and isinstance(truth, Tensor)
            for right in (out, truth):
                verdict = oracle.judge(name, inputs, right, arch=arch)
                assert not verdict.status.is_failure, (shape, verdict.summary)
            assert not oracle.judge(name, inputs, truth, arch="cpu").status.is_failure
            best = oracle.identify(name, inputs, out, arch=arch)[0]
            assert best.equal == 1

    def test_the_truth_is_rational_arithmetic(self, name: str, scales: str) -> None:
        contract = get(name)
        assert isinstance(contract, ProductContract)
        for at, shape in enumerate(SHAPES[:5]):
            inputs = drawn(name, shape, scales, at)
            truth = oracle.reference(name, inputs)
            assert isinstance(truth, Tensor)
            flat = truth.reshape(-1, truth.shape[-1])
            for part in contract.parts(inputs):
                own = part.of(flat)
                for m in range(min(2, own.shape[0])):
                    for n in range(min(3, own.shape[1])):
                        assert_same(float(own[m, n]), by_hand(part.product, m, n))

    @pytest.mark.sampled(3)
    def test_the_engines_agree(self, name: str, scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
        contract = get(name)
        assert isinstance(contract, ProductContract)
        arch = arch_of(name)
        for at, shape in enumerate(SHAPES):
            inputs = drawn(name, shape, scales, at)
            parts = contract.parts(inputs)
            rows = int(torch.Size(contract.shape(inputs)[:-1]).numel())
            for schedule in admitted(name, inputs, arch, torch.float32):
                fast = predict_parts(parts, rows, get_schedule(schedule), torch.float32)
                with monkeypatch.context() as patch:
                    patch.setattr(predict, "_engine", lambda *arguments: None)
                    plain = predict_parts(parts, rows, get_schedule(schedule), torch.float32)
                assert bool(same_bits(fast, plain).all())


@pytest.mark.turns(4)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CALLS)
def test_one_element_moved_is_noticed(name: str) -> None:
    """The negative test, where the result is a number other than zero."""
    noticed = 0
    for scales in ("ordinary", "negative", "subnormal", "of every kind"):
        for at, shape in enumerate(SHAPES):
            inputs = drawn(name, shape, scales, at)
            truth = oracle.reference(name, inputs, out_dtype=torch.float32)
            assert isinstance(truth, Tensor)
            flat = truth.clone().view(-1)
            numbers = torch.nonzero(torch.isfinite(flat) & (flat.abs() > 2.0**-126))[:, 0]
            if len(numbers) == 0:
                continue
            flat[numbers[0]] *= -1
            verdict = get(name).judge(inputs, flat.view(truth.shape), arch=arch_of(name), numerics=None)
            open_ = verdict.unconstrained > 0 and verdict.status is not Status.FAILED
            assert open_ or verdict.outside == 1, (shape, scales, verdict.summary)
            noticed += not open_
    assert noticed >= 5


def by_hand(product: ScaledProduct, m: int, n: int) -> float | Fraction:
    """The exact value, or what IEEE arithmetic makes of NaN and infinities among the factors and terms."""
    row = 0 if product.a_scale.shape[0] == 1 else m
    scales = decode(product.a_scale[row]), decode(product.b_scale[n // product.b_rows])
    bias = 0.0 if product.bias is None else float(decode(product.bias)[n])
    operands = decode(product.a[m]), decode(product.b[n])
    if all(bool(torch.isfinite(x).all()) for x in (*scales, *operands)):
        return rational(product, m, n)
    total = bias
    for block in range(product.B):
        k = slice(block * product.block, (block + 1) * product.block)
        pairs = zip(operands[0][k].tolist(), operands[1][k].tolist(), strict=True)
        total += float(scales[0][block]) * float(scales[1][block]) * special_sum([x * y for x, y in pairs])
    return total


def assert_same(found: float, due: float | Fraction) -> None:
    if isinstance(due, Fraction):
        assert found == float(due)
    elif math.isnan(due):
        assert math.isnan(found)
    else:
        assert math.isinf(due) and found == due


def special_sum(terms: list[float]) -> float:
    """The sum in any order, as far as NaN and infinities decide it."""
    if any(math.isnan(t) for t in terms) or {math.inf, -math.inf} <= set(terms):
        return math.nan
    return math.fsum(terms)
