"""Faults of casts in scaled products: codes decoded wrongly, results stored wrongly.

Codes that a fault turns into values outside E4M3 are carried as float16, which holds them all; the sum is then
taken in exact arithmetic, since no instruction has such operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from oracle.numbers.formats import decode, of_dtype
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.routines.fault import Call, Change, Family, Fault, Stage, WhyNot, always
from oracle.routines.mutants import Sum
from oracle.routines.products.roles import PRODUCTS, WITH_BIAS, Matrix, matrix, read
from oracle.tensorcore.predict import store
from oracle.truth.gemm import ScaledProduct

E4M3 = torch.float8_e4m3fn
NO_SUBNORMALS = "no operand is subnormal"
NO_NAN = "no operand is NaN"


def _codes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _map(change: Callable[[Tensor], Tensor]) -> Matrix:
    """A change of E4M3 codes (uint8 to uint8)."""

    def apply(call: Call, x: Tensor) -> Tensor:
        return change(_codes(x)).view(x.dtype)

    return apply


def _has(role: str, found: Callable[[Tensor], Tensor], missing: str) -> WhyNot:
    def why_not(call: Call) -> str | None:
        x = matrix(call, role)
        if x.dtype != E4M3:
            return f"{role} is {x.dtype}, not {E4M3}"
        return None if bool(found(_codes(x)).any()) else missing

    return why_not


def _clip(limit: int) -> Callable[[Tensor], Tensor]:
    def change(codes: Tensor) -> Tensor:
        magnitude = codes & 0x7F
        clipped = torch.where(magnitude == 0x7F, magnitude, magnitude.clamp(max=limit))
        return codes & 0x80 | clipped

    return change


def _above(limit: int) -> Callable[[Tensor], Tensor]:
    return lambda codes: ((codes & 0x7F) > limit) & ((codes & 0x7F) != 0x7F)


def _subnormal(codes: Tensor) -> Tensor:
    return ((codes & 0x78) == 0) & ((codes & 0x07) != 0)


def _nan(codes: Tensor) -> Tensor:
    return (codes & 0x7F) == 0x7F


def _nonzero(codes: Tensor) -> Tensor:
    return (codes & 0x7F) != 0


def _as_fnuz(call: Call, x: Tensor) -> Tensor:
    """The bits read as E4M3FNUZ: half the value, 0x80 a NaN, 0x7F and 0xFF finite."""
    return _half(decode(_codes(x), of_dtype(torch.float8_e4m3fnuz)))


def _b_as_fnuz(call: Call, product: ScaledProduct) -> ScaledProduct:
    return replace(product, b=_as_fnuz(call, product.b))


def _as_e5m2(call: Call, x: Tensor) -> Tensor:
    return _codes(x).view(torch.float8_e5m2)


def _nan_as_480(call: Call, x: Tensor) -> Tensor:
    codes = _codes(x)
    sign = 1.0 - 2.0 * (codes >> 7).to(torch.float64)
    return _half(torch.where(_nan(codes), sign * 480.0, decode(x)))


def _normal_formula(call: Call, x: Tensor) -> Tensor:
    """Subnormal codes decoded as (1 + f/8) 2**-7, and zero with them left at zero."""
    codes = _codes(x)
    sign = 1.0 - 2.0 * (codes >> 7).to(torch.float64)
    wrong = sign * (1.0 + (codes & 0x07).to(torch.float64) / 8.0) * 2.0**-7
    return _half(torch.where(_subnormal(codes), wrong, decode(x)))


def _half(values: Tensor) -> Tensor:
    return to_dtype(values, torch.float16, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)


def _byte_pairs(call: Call, x: Tensor) -> Tensor:
    """A tile transposed in units of two bytes: the off-diagonal of every 2 x 2 block of codes is exchanged."""
    codes = _codes(x).clone()
    rows, columns = codes.shape[0] // 2 * 2, codes.shape[1] // 2 * 2
    upper = codes[0:rows:2, 1:columns:2].clone()
    codes[0:rows:2, 1:columns:2] = codes[1:rows:2, 0:columns:2]
    codes[1:rows:2, 0:columns:2] = upper
    return codes.view(x.dtype)


# --- store --------------------------------------------------------------------------------------------------


def _stored(rounding: Rounding, overflow: Overflow = Overflow.INF) -> Change:
    def change(call: Call, acc: Tensor) -> Tensor:
        return _keep_nan(acc, to_dtype(acc.to(torch.float64), call.out_dtype, rounding=rounding, overflow=overflow))

    return change


def _keep_nan(acc: Tensor, out: Tensor) -> Tensor:
    return torch.where(torch.isnan(acc), torch.full_like(out, torch.nan), out)


def _truncated(call: Call, acc: Tensor) -> Tensor:
    """Low bits cut off; infinity stays infinity."""
    cut = to_dtype(acc.to(torch.float64), call.out_dtype, rounding=Rounding.TOWARD_ZERO, overflow=Overflow.SATURATE)
    return torch.where(torch.isfinite(acc), cut, acc.to(call.out_dtype))


def _stochastic(call: Call, acc: Tensor) -> Tensor:
    """Up or down with the probability of the distance, from a fixed stream."""
    down = to_dtype(acc.to(torch.float64), call.out_dtype, rounding=Rounding.DOWN, overflow=Overflow.INF)
    up = to_dtype(acc.to(torch.float64), call.out_dtype, rounding=Rounding.UP, overflow=Overflow.INF)
    low, high = decode(down), decode(up)
    share = torch.where(high > low, (acc.to(torch.float64) - low) / (high - low), torch.zeros_like(low))
    seeded = torch.Generator().manual_seed(7)
    draw = torch.rand(acc.shape, generator=seeded, dtype=torch.float64, device="cpu").to(acc.device)
    return _keep_nan(acc, torch.where(draw < share, up, down))


def _through(dtype: torch.dtype) -> Change:
    def change(call: Call, acc: Tensor) -> Tensor:
        middle = store(acc, dtype)
        return store(middle.to(torch.float32), call.out_dtype)

    return change


def _bits_of_bf16(call: Call, acc: Tensor) -> Tensor:
    return store(acc, torch.bfloat16).view(torch.float16)


def _overflow_nan(call: Call, acc: Tensor) -> Tensor:
    out = store(acc, call.out_dtype)
    return torch.where(torch.isinf(out), torch.full_like(out, torch.nan), out)


def _saturating(call: Call, acc: Tensor) -> Tensor:
    out = store(acc, call.out_dtype)
    limit = torch.finfo(call.out_dtype).max
    return torch.where(torch.isinf(out), torch.sign(out) * limit, out)


def _nan_to_zero(call: Call, acc: Tensor) -> Tensor:
    out = store(acc, call.out_dtype)
    return torch.where(torch.isnan(out), torch.zeros_like(out), out)


def _out(*dtypes: torch.dtype) -> WhyNot:
    def why_not(call: Call) -> str | None:
        return None if call.out_dtype in dtypes else f"the output is {call.out_dtype}"

    return why_not


def _narrow_bias(call: Call) -> str | None:
    if "bias" not in call.inputs:
        return "there is no bias"
    return "a float32 store rounds nothing" if call.out_dtype == torch.float32 else None


def _bias_after(call: Call, total: Sum) -> Tensor:
    """The sum stored in the output dtype, then the bias added in float32; the store rounds a second time."""
    assert total.product.bias is not None
    first = store(total.right(replace(total.product, bias=None)), call.out_dtype)
    return (decode(first) + decode(total.product.bias)[None, :]).to(torch.float32)


def _one(name: str, met_in: str, role: str, change: Matrix, why_not: WhyNot, equivalent: str = "") -> Fault:
    return Fault(name, Family.CAST, met_in, {Stage.READ: read(role, change)}, PRODUCTS, why_not, equivalent)


def _store(name: str, met_in: str, change: Change, why_not: WhyNot = always, equivalent: str = "") -> Fault:
    return Fault(name, Family.CAST, met_in, {Stage.STORE: change}, PRODUCTS, why_not, equivalent)


def faults() -> list[Fault]:
    """The faults of this family, in the order of the facts."""
    exact = "every sum is a value of the output dtype"
    found = [
        _one(
            "A codes saturate at 256",
            "sglang PR 40581",
            "a",
            _map(_clip(0x78)),
            _has("a", _above(0x78), "no code above 256"),
        ),
        _one(
            "A codes saturate at 240",
            "vllm PR 12134",
            "a",
            _map(_clip(0x77)),
            _has("a", _above(0x77), "no code above 240"),
        ),
        _one(
            "A codes read as E4M3FNUZ without doubling the scale",
            "vllm PR 12134",
            "a",
            _as_fnuz,
            _has("a", _nonzero, "every code is zero"),
        ),
        Fault(
            "B codes read as E4M3FNUZ without doubling the scale",
            Family.CAST,
            "vllm PR 12134",
            {Stage.PRODUCT: _b_as_fnuz},
            PRODUCTS,
            _has("b", _nonzero, "every code is zero"),
        ),
        _one("A codes read as E5M2", "vllm PR 12134", "a", _as_e5m2, _has("a", _nonzero, "every code is zero")),
        _one("NaN code of A decoded as 480", "ml_dtypes 400", "a", _nan_as_480, _has("a", _nan, NO_NAN)),
        _one(
            "NaN code of A turned into 448",
            "Model-Optimizer PR 1397",
            "a",
            _map(lambda c: torch.where(_nan(c), c - 1, c)),
            _has("a", _nan, NO_NAN),
        ),
        _one(
            "A subnormals flushed to zero",
            "flashinfer PR 3932",
            "a",
            _map(lambda c: torch.where(_subnormal(c), c & 0x80, c)),
            _has("a", _subnormal, NO_SUBNORMALS),
        ),
        _one(
            "B subnormals flushed to zero",
            "flashinfer PR 3932",
            "b",
            _map(lambda c: torch.where(_subnormal(c), c & 0x80, c)),
            _has("b", _subnormal, NO_SUBNORMALS),
        ),
        _one(
            "A subnormals decoded with the normal formula",
            "Model-Optimizer PR 1397",
            "a",
            _normal_formula,
            _has("a", _subnormal, NO_SUBNORMALS),
        ),
        _one(
            "sign of A lost",
            "flashinfer PR 3932",
            "a",
            _map(lambda c: c & 0x7F),
            _has("a", lambda c: _nonzero(c) & (c >= 0x80), "A is never negative"),
        ),
        _one(
            "B tile transposed by byte pairs",
            "pith-train PR 74",
            "b",
            _byte_pairs,
            _has("b", _nonzero, "every code is zero"),
        ),
        _store(
            "store rounds half away from zero",
            "flashinfer 5128",
            _stored(Rounding.NEAREST_AWAY),
            equivalent="no sum is a tie of the output dtype",
        ),
        _store("store truncates", "H200 mutants", _truncated, _out(torch.bfloat16, torch.float16), exact),
        _store(
            "store rounds stochastically", "flashinfer 5128", _stochastic, _out(torch.bfloat16, torch.float16), exact
        ),
        _store(
            "store through float16", "H200 mutants", _through(torch.float16), _out(torch.bfloat16, torch.float32)
        ),
        _store(
            "store through bfloat16",
            "TensorRT-LLM PR 14464",
            _through(torch.bfloat16),
            _out(torch.float16, torch.float32),
            "every sum is a bfloat16 value",
        ),
        _store(
            "bfloat16 bits in a float16 buffer",
            "FlashInfer 0.6.18 on an H200",
            _bits_of_bf16,
            _out(torch.float16),
            "every sum is zero",
        ),
        _store(
            "overflow stored as NaN",
            "flashinfer PR 3932",
            _overflow_nan,
            _out(torch.float16),
            equivalent="no sum exceeds the output dtype",
        ),
        _store(
            "overflow stored as the largest finite value",
            "flashinfer PR 3932",
            _saturating,
            _out(torch.float16),
            equivalent="no sum exceeds the output dtype",
        ),
        _store("NaN stored as zero", "Model-Optimizer PR 1397", _nan_to_zero, equivalent="no element is NaN"),
        Fault(
            "bias added after the cast",
            Family.CAST,
            "H200 mutants",
            {Stage.SUM: _bias_after},
            WITH_BIAS,
            _narrow_bias,
            "both roundings are exact",
        ),
    ]
    return found
