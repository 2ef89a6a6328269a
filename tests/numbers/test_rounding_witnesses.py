"""Rounding against independent witnesses: ``fractions``, ``numpy``, ``ml_dtypes`` and ``gfloat``.

Where a witness disagrees, :data:`KNOWN` says where and why; an entry that no longer disagrees fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import gfloat  # type: ignore[import-untyped]
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import formats as gfloat_formats
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from rounding_points import F64, points, policies
from torch import Tensor

from oracle.numbers.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FORMATS,
    FP16,
    FP32,
    MXINT8,
    Format,
    decode,
    decode_scalar,
)
from oracle.numbers.rounding import Overflow, Rounding, encode, encode_pair, encode_scalar, round_to

RNE = Rounding.NEAREST_EVEN
ALL = list(FORMATS.values())
ML_DTYPES = {
    E4M3FN: ml_dtypes.float8_e4m3fn,
    E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    E5M2: ml_dtypes.float8_e5m2,
    E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
    E8M0: ml_dtypes.float8_e8m0fnu,
    E2M1: ml_dtypes.float4_e2m1fn,
    E3M2: ml_dtypes.float6_e3m2fn,
    E2M3: ml_dtypes.float6_e2m3fn,
    BF16: ml_dtypes.bfloat16,
}
NUMPY = {FP16: np.float16, FP32: np.float32}
_P3109 = {info.name: info for info in gfloat_formats.p3109_binary8_formats}
GFLOAT = {
    E4M3FN: gfloat_formats.format_info_ocp_e4m3,
    E4M3FNUZ: _P3109["p3109_k8p4sf"],
    E5M2: gfloat_formats.format_info_ocp_e5m2,
    E5M2FNUZ: _P3109["p3109_k8p3sf"],
    E8M0: gfloat_formats.format_info_ocp_e8m0,
    E2M1: gfloat_formats.format_info_ocp_e2m1,
    E3M2: gfloat_formats.format_info_ocp_e3m2,
    E2M3: gfloat_formats.format_info_ocp_e2m3,
    MXINT8: gfloat_formats.format_info_ocp_int8,
    BF16: gfloat_formats.format_info_bfloat16,
    FP16: gfloat_formats.format_info_binary16,
    FP32: gfloat_formats.format_info_binary32,
}
GFLOAT_MODES = {
    RNE: gfloat.RoundMode.TiesToEven,
    Rounding.NEAREST_AWAY: gfloat.RoundMode.TiesToAway,
    Rounding.TOWARD_ZERO: gfloat.RoundMode.TowardZero,
    Rounding.UP: gfloat.RoundMode.TowardPositive,
    Rounding.DOWN: gfloat.RoundMode.TowardNegative,
}
Where = Callable[[Tensor, Format], Tensor]


pytestmark = pytest.mark.usefixtures("one_thread")


def _twice_rounded(x: Tensor, fmt: Format) -> Tensor:
    """Numbers that rounding to float32 first sends elsewhere."""
    exact = encode(x, fmt, rounding=RNE, overflow=policies(fmt)[-1])
    through = encode(x.float().double(), fmt, rounding=RNE, overflow=policies(fmt)[-1])
    return exact != through


def _tie(x: Tensor, fmt: Format) -> Tensor:
    """Midpoints, or numbers that float32 makes midpoints."""
    single = x.float().double()
    up = round_to(single, fmt, rounding=Rounding.UP, overflow=Overflow.NAN)
    down = round_to(single, fmt, rounding=Rounding.DOWN, overflow=Overflow.NAN)
    last_tie = single == fmt.max_finite * 1.5
    return ((single - down == up - single) & (up > down)) | last_tie


def _below(x: Tensor, fmt: Format) -> Tensor:
    return (x >= 0) & (x < fmt.min_normal)


def _negative(x: Tensor, fmt: Format) -> Tensor:
    return x < 0


def _beyond_the_least(x: Tensor, fmt: Format) -> Tensor:
    return x < -fmt.max_finite


@dataclass(frozen=True)
class Known:
    """Where a witness is known to disagree, and why it does not make the oracle wrong."""

    where: Where
    reason: str


_CAST = Known(_twice_rounded, "casts float64 through float32, so it rounds twice")
KNOWN: Mapping[tuple[str, Format], tuple[Known, ...]] = {
    **{("ml_dtypes", fmt): (_CAST,) for fmt in ML_DTYPES if fmt is not E8M0},
    ("ml_dtypes", E8M0): (
        Known(_tie, "a tie goes up: the parity looked at is that of the significand, always odd"),
        Known(_below, "zero and what lies below 2^-127 become NaN; here the smallest value"),
    ),
    ("gfloat", E8M0): (
        Known(_below, "values below 2^-127 are not raised to the smallest value of the format"),
        Known(_negative, "the sign is not looked at: negative values stay negative; here NaN"),
    ),
    ("gfloat", MXINT8): (Known(_beyond_the_least, "saturates at -2, a code that OCP lets be unused; here -127/64"),),
}


def _same(actual: Tensor, expected: Tensor) -> Tensor:
    """Equal values, NaN with NaN, zeros of one sign."""
    equal = (actual == expected) & (actual.signbit() == expected.signbit())
    return equal | (actual.isnan() & expected.isnan())


def unexplained(witness: str, fmt: Format, x: Tensor, theirs: Tensor, ours: Tensor) -> tuple[Tensor, list[bool]]:
    """Disagreements that no entry of :data:`KNOWN` covers, and whether each entry covers any."""
    differ = ~_same(theirs, ours)
    entries = KNOWN.get((witness, fmt), ())
    covered = [entry.where(x, fmt) for entry in entries]
    used = [bool((differ & mask).any()) for mask in covered]
    for mask in covered:
        differ = differ & ~mask
    return differ, used


def _describe(x: Tensor, theirs: Tensor, ours: Tensor, bad: Tensor) -> str:
    if not bool(bad.any()):
        return "agree"
    i = int(bad.nonzero()[0])
    first = f"{float(x[i]).hex()}: oracle {float(ours[i])}, witness {float(theirs[i])}"
    return f"{int(bad.sum())} disagree; {first}"


def _cast(x: Tensor, dtype: type) -> Tensor:
    """The cast of numpy, and back."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow: NDArray[np.generic] = x.numpy().astype(dtype)
        return torch.from_numpy(narrow.astype(np.float64))


class TestLibraries:
    """Every point of every format, in every rounding and policy that the library offers."""

    @pytest.mark.parametrize(("fmt", "dtype"), [*ML_DTYPES.items(), *NUMPY.items()], ids=str)
    def test_casts(self, fmt: Format, dtype: type) -> None:
        """Both libraries round to nearest and overflow to infinity, else NaN, else the largest value."""
        x = points(fmt).hi
        ours = round_to(x, fmt, rounding=RNE, overflow=policies(fmt)[-1])
        witness = "numpy" if fmt in NUMPY else "ml_dtypes"
        theirs = _cast(x, dtype)
        bad, used = unexplained(witness, fmt, x, theirs, ours)
        assert not bad.any(), _describe(x, theirs, ours, bad)
        assert all(used), f"an entry of KNOWN for {witness} and {fmt} matches nothing: remove it"

    @pytest.mark.parametrize("fmt", ALL, ids=str)
    def test_gfloat(self, fmt: Format) -> None:
        """Five roundings, saturating and not (every fifth point above 8 bits)."""
        x = points(fmt).hi[:: 1 if fmt.bits <= 8 else 5]
        used_at_all = [False for _ in KNOWN.get(("gfloat", fmt), ())]
        for rounding, mode in GFLOAT_MODES.items():
            for overflow in {policies(fmt)[0], policies(fmt)[-1]}:
                saturate = overflow is Overflow.SATURATE
                ours = round_to(x, fmt, rounding=rounding, overflow=overflow)
                theirs = torch.from_numpy(gfloat.round_ndarray(GFLOAT[fmt], x.numpy(), mode, saturate))
                bad, used = unexplained("gfloat", fmt, x, theirs, ours)
                assert not bad.any(), f"{rounding.name} {overflow.name}: " + _describe(x, theirs, ours, bad)
                used_at_all = [a or b for a, b in zip(used_at_all, used, strict=True)]
        assert all(used_at_all), f"an entry of KNOWN for gfloat and {fmt} matches nothing: remove it"

    def test_every_entry_is_visited(self) -> None:
        visited = {("ml_dtypes", fmt) for fmt in ML_DTYPES} | {("numpy", fmt) for fmt in NUMPY}
        assert set(KNOWN) <= visited | {("gfloat", fmt) for fmt in GFLOAT}

    @pytest.mark.parametrize("fmt", [E4M3FN, BF16], ids=str)
    def test_a_wrong_rounding_is_not_explained(self, fmt: Format) -> None:
        """The negative test: ties away from zero are covered by no entry; and an idle entry is noticed."""
        x = points(fmt).hi
        ours = round_to(x, fmt, rounding=Rounding.NEAREST_AWAY, overflow=policies(fmt)[-1])
        bad, _ = unexplained("ml_dtypes", fmt, x, _cast(x, ML_DTYPES[fmt]), ours)
        assert bad.any()
        right = round_to(x, fmt, rounding=RNE, overflow=policies(fmt)[-1])
        assert unexplained("ml_dtypes", fmt, x, right, right)[1] == [False]


def _value(magnitude: int, fmt: Format) -> Fraction:
    """Value of a magnitude, one step beyond the largest included."""
    if magnitude > fmt.max_code:
        return Fraction(fmt.max_finite) + Fraction(2) ** (fmt.emax - fmt.fraction_bits)
    return Fraction(decode_scalar(magnitude, fmt))


def rightly_rounded(x: Fraction, code: int, fmt: Format, rounding: Rounding) -> bool:
    """Whether ``code`` is ``x`` rounded, for ``|x| <= max_finite``: the rule, put to both neighbours."""
    below, above = 0, fmt.max_code
    while above - below > 1:  # largest magnitude not above |x|, by bisection over exact values
        middle = (below + above) // 2
        below, above = (middle, above) if _value(middle, fmt) <= abs(x) else (below, middle)
    if _value(above, fmt) <= abs(x):
        below = above
    if _value(below, fmt) >= abs(x):  # equal, or under the smallest value of a format without zero
        chosen = below
    else:
        to_lower, to_upper = abs(x) - _value(below, fmt), _value(below + 1, fmt) - abs(x)
        outward = {
            Rounding.TOWARD_ZERO: False,
            Rounding.AWAY: True,
            Rounding.UP: x > 0,
            Rounding.DOWN: x < 0,
            Rounding.NEAREST_AWAY: to_upper <= to_lower,
            RNE: to_upper < to_lower or (to_upper == to_lower and below % 2 == 1),
        }[rounding]
        chosen = below + outward
    if fmt.complement:
        return code == (-chosen if x < 0 else chosen) & fmt.code_mask
    sign = fmt.sign_mask if x < 0 and (chosen or fmt.has_negative_zero) else 0
    return code == sign | chosen


@st.composite
def numbers(draw: st.DrawFn, fmt: Format) -> Fraction:
    """Fractions on, beside and far from values and midpoints of a format, within its range."""
    below = draw(st.integers(0, fmt.max_code - 1))
    low, high = _value(below, fmt), _value(below + 1, fmt)
    base = draw(st.sampled_from([low, high, (low + high) / 2, (low * 2 + high) / 3]))
    depth = draw(st.sampled_from([40, 53, 60, 200, 1000]))
    nudge = draw(st.integers(-3, 3)) * (high - low) / Fraction(2) ** depth
    x: Fraction = min(abs(base + nudge), Fraction(fmt.max_finite))
    return -x if fmt.signed and draw(st.booleans()) else x


formats_and_numbers = st.sampled_from(ALL).flatmap(lambda fmt: st.tuples(st.just(fmt), numbers(fmt)))
roundings = st.sampled_from(list(Rounding))


@pytest.mark.turns(4)
class TestFractions:
    """Exact rational arithmetic is the judge."""

    @given(formats_and_numbers, roundings)
    @settings(max_examples=400, deadline=None, derandomize=True)
    def test_the_scalar_definition(self, case: tuple[Format, Fraction], rounding: Rounding) -> None:
        fmt, x = case
        code = encode_scalar(x, fmt, rounding=rounding, overflow=Overflow.SATURATE)
        assert rightly_rounded(x, code, fmt, rounding)
        assert not rightly_rounded(x, code ^ 1, fmt, rounding)

    @given(st.sampled_from(ALL), st.lists(st.floats(width=64), min_size=1, max_size=20), roundings)
    @settings(max_examples=200, deadline=None, derandomize=True)
    def test_any_floats(self, fmt: Format, xs: list[float], rounding: Rounding) -> None:
        """The vector twin is the scalar definition, under every policy."""
        xs = [x for x in xs if fmt.has_nan or not math.isnan(x)]
        for overflow in policies(fmt):
            codes = encode(torch.tensor(xs, dtype=F64), fmt, rounding=rounding, overflow=overflow)
            expected = [encode_scalar(x, fmt, rounding=rounding, overflow=overflow) for x in xs]
            assert [code & fmt.code_mask for code in codes.tolist()] == expected

    @given(st.data(), st.sampled_from(ALL), roundings)
    @settings(max_examples=200, deadline=None, derandomize=True)
    def test_pairs(self, data: st.DataObject, fmt: Format, rounding: Rounding) -> None:
        """The sum as one fraction: hi beside a tie, lo from nearly half an ulp of hi to nothing."""
        case = st.tuples(numbers(fmt), st.integers(-7, 7), st.integers(0, 900))
        cases = data.draw(st.lists(case, min_size=1, max_size=10))
        hi = [float(x) for x, _, _ in cases]
        lo = [math.ldexp(m * 2.0**-56 * (abs(h) or 1.0), -e) for h, (_, m, e) in zip(hi, cases, strict=True)]
        sums = [Fraction(h) + Fraction(t) or math.copysign(0.0, h) for h, t in zip(hi, lo, strict=True)]
        overflow = policies(fmt)[-1]
        head, tail = torch.tensor(hi, dtype=F64), torch.tensor(lo, dtype=F64)
        codes = encode_pair(head, tail, fmt, rounding=rounding, overflow=overflow)
        expected = [encode_scalar(x, fmt, rounding=rounding, overflow=overflow) for x in sums]
        assert [code & fmt.code_mask for code in codes.tolist()] == expected

    @given(st.lists(st.tuples(st.floats(), st.floats()), min_size=1, max_size=20), roundings)
    @settings(max_examples=200, deadline=None, derandomize=True)
    def test_unnormalised_pairs(self, cases: list[tuple[float, float]], rounding: Rounding) -> None:
        """Any two finite numbers, whatever their sizes."""
        cases = [pair for pair in cases if all(map(math.isfinite, pair))] or [(1.0, -1.0)]
        hi, lo = (torch.tensor(part, dtype=F64) for part in zip(*cases, strict=True))
        for fmt in (E5M2, FP16, FP32):
            codes = encode_pair(hi, lo, fmt, rounding=rounding, overflow=Overflow.INF)
            sums = [Fraction(h) + Fraction(t) or math.copysign(0.0, h) for h, t in cases]
            expected = [encode_scalar(x, fmt, rounding=rounding, overflow=Overflow.INF) for x in sums]
            assert [code & fmt.code_mask for code in codes.tolist()] == expected

    def test_random_bits_to_float32(self) -> None:
        """Float64 bit patterns around the range of float32, against the processor's own conversion."""
        generator = torch.Generator().manual_seed(3)
        bits = torch.randint(0, 1 << 52, (300_000,), generator=generator)
        exponent = torch.randint(1023 - 160, 1023 + 130, bits.shape, generator=generator)
        x = (bits | (exponent << 52)).view(F64)
        ours = decode(encode(x, FP32, rounding=RNE, overflow=Overflow.INF), FP32)
        assert _same(_cast(x, np.float32), ours).all()
