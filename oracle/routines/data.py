"""Test data that is the same on every machine: a counter-based stream and the families built on it.

Every tensor of a case has its own stream, ``Philox4x64(key = sha256(label))``; the only primitive is a uniform
64-bit integer. Everything else is integer arithmetic, exact float64 arithmetic on small dyadic numbers, or
bits chosen directly; no ``log``, ``cos`` or ``pow``, whose last bits differ between platforms. Normal-like
data are sums of twelve uniform 16-bit integers (Irwin-Hall: mean 6, variance 1, support [-6, 6]).

NaN and infinity stand only in the families ``nan`` and ``nanscale``, infinity also where an activation overflows
float16; zero groups in ``zeros`` and ``special``.

Source: Salmon et al. 2011 for Philox4x64, as numpy has it; the families are derived in this file.

Families (what each one is there to expose) stand in :data:`OPERAND_FAMILIES`, :data:`SCALE_RULES`,
:data:`ACTIVATION_FAMILIES` and, for the limits of what a store can hold, :data:`EDGE_FAMILIES`. Not covered: real model
activations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oracle.errors import CaseError
from oracle.numbers.formats import Format, codes_of, decode, from_codes, of_dtype
from oracle.numbers.rounding import Overflow, Rounding, to_dtype

Integers = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]

# Sigma of the normal-like operands: with 3.5 sigma at 448, what a quantiser makes of normal data.
SIGMA = 128.0

# Sums of at most 2**13 units fit the 14-bit (e8m13) accumulator of the narrowest hardware without rounding.
EXACT_BUDGET = 1 << 13

AT_ONCE = 4096  # normals: their words stay in the cache, at half the time of all of them together
SUMS = 12 * 65535  # the largest sum of twelve 16-bit numbers


class Stream:
    """A reproducible stream of uniform 64-bit words named by a label."""

    def __init__(self, label: str) -> None:
        key = np.frombuffer(hashlib.sha256(label.encode()).digest()[:16], dtype="<u8").astype(np.uint64)
        self._bits = np.random.Philox(key=key)

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """The next ``count`` uniform 64-bit words, ``[count]`` uint64."""
        return np.asarray(self._bits.random_raw(count), dtype=np.uint64)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Integers:
        """Uniform integers in ``[low, high)``; the span must be below 2**40 (bias below 2**-24)."""
        if not 0 < high - low < 1 << 40:
            raise ValueError(f"integers needs 0 < high - low < 2**40, got [{low}, {high})")
        words = self.words(int(np.prod(shape))) % np.uint64(high - low)
        return np.asarray(words.astype(np.int64) + low, dtype=np.int64).reshape(shape)

    def signs(self, shape: tuple[int, ...]) -> Integers:
        """Uniform +1 and -1."""
        return 1 - 2 * self.integers(0, 2, shape)

    def sums(self, shape: tuple[int, ...]) -> Integers:
        """Sums of twelve uniform 16-bit numbers, in [0, ``SUMS``]."""
        sums = np.empty(int(np.prod(shape)), dtype=np.int64)
        low, half = np.uint64(0x0000FFFF0000FFFF), np.uint64(32)
        for first in range(0, sums.size, AT_ONCE):
            part = sums[first : first + AT_ONCE]
            words = self.words(3 * part.size)
            both = (words & low) + (words >> np.uint64(16) & low)  # two sums of two in a word
            both = both[0::3] + both[1::3] + both[2::3]
            part[:] = (both >> half) + (both & np.uint64(0xFFFFFFFF))
        return sums.reshape(shape)

    def normals(self, shape: tuple[int, ...]) -> Reals:
        """Irwin-Hall(12) in float64, exact multiples of 2**-16 in [-6, 6], variance 1."""
        return normal_of(self.sums(shape))

    def order(self, count: int, first: int | None = None) -> Integers:
        """A permutation of ``range(count)``, or its ``first`` entries alone."""
        words = self.words(count)
        if first is None or first >= count:
            return np.argsort(words, kind="stable").astype(np.int64)
        least = np.sort(np.argpartition(words, first)[:first])
        return least[np.argsort(words[least], kind="stable")].astype(np.int64)


def normal_of(sums: Integers) -> Reals:
    """The float64 normals of :meth:`Stream.sums`, in their shape."""
    normals = sums - np.float64(SUMS // 2)
    normals /= 65536
    return np.asarray(normals, dtype=np.float64)


def operand(label: str, family: str, rows: int, cols: int, *, dtype: torch.dtype, side: str) -> Tensor:
    """One 8-bit (or bfloat16) matrix operand ``[rows, cols]`` of a family; ``side`` is ``"a"`` or ``"b"``.

    The two sides of one case may differ: outlier columns and spikes sit in ``a``, and ``cancel`` needs ``b``
    to repeat each value twice.
    """
    fmt = of_dtype(dtype)
    rule = EDGE_FAMILIES[family].operand if family in EDGE_FAMILIES else OPERAND_FAMILIES[family]
    return rule(Stream(label), rows, cols, fmt, side)


def scales(label: str, family: str, shape: tuple[int, ...]) -> Tensor:
    """Float32 scales of a family, of the shape ``shape``: distinct and never a power of two, unless the family says
    otherwise."""
    rule = EDGE_FAMILIES[family].scale if family in EDGE_FAMILIES else SCALE_RULES.get(family, _distinct)
    return rule(Stream(label), shape)


def powers_of_two(label: str, shape: tuple[int, ...]) -> Tensor:
    """Float32 powers of two of the shape ``shape``: every exponent byte from 1 to 254 alike."""
    return _float32_bits(Stream(label).integers(1, 255, shape) << 23)


def activations(label: str, family: str, rows: int, cols: int, *, dtype: torch.dtype) -> Tensor:
    """A matrix ``[rows, cols]`` of ``dtype`` (bfloat16, float16, float32) to be quantised, of a family of
    :data:`ACTIVATION_FAMILIES` or :data:`BLOCK_FAMILIES`."""
    values = {**ACTIVATION_FAMILIES, **BLOCK_FAMILIES}[family](Stream(label), rows, cols)
    return to_dtype(torch.from_numpy(values), dtype, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)


def small_integers(label: str, shape: tuple[int, ...], *, bound: int, dtype: torch.dtype) -> Tensor:
    """Uniform integers in ``[-bound, bound]`` as ``dtype`` (exact for bound <= 16 in every 8-bit format)."""
    return _rounded(Stream(label).integers(-bound, bound + 1, shape).astype(np.float64), of_dtype(dtype))


def normal(label: str, shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
    """Normal-like values of variance 1 of the shape ``shape``, rounded to ``dtype``."""
    return _rounded(Stream(label).normals(shape), of_dtype(dtype))


def encoded(values: Reals, dtype: torch.dtype) -> Tensor:
    """Float64 ``values`` of any shape in a one-byte ``dtype``, in the same shape: to nearest even, saturated.

    NaN becomes the format's NaN. Source: :func:`oracle.numbers.rounding.to_dtype`."""
    return _rounded(values, of_dtype(dtype))


# --- operands -----------------------------------------------------------------------------------------------


def _rounded(values: Reals, fmt: Format) -> Tensor:
    dtype = fmt.torch_dtype
    if dtype is None:
        raise ValueError(f"{fmt.name} has no torch dtype")
    x = torch.from_numpy(np.ascontiguousarray(values))
    return to_dtype(x, dtype, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE)


def _coded(codes: Integers, fmt: Format) -> Tensor:
    return from_codes(torch.from_numpy(codes).to(fmt.storage), fmt)


def _finite_codes(fmt: Format) -> Integers:
    every = np.arange(1 << fmt.bits, dtype=np.int64)
    values = decode(torch.from_numpy(every).to(fmt.storage), fmt).numpy()
    return np.asarray(every[np.isfinite(values)], dtype=np.int64)


def _exact(stream: Stream, rows: int, cols: int, fmt: Format, side: str) -> Tensor:
    """Integers so small that no accumulator rounds: |sum| <= p*p*K <= 2**13; with power-of-two scales."""
    p = max(1, min(4, isqrt(EXACT_BUDGET // cols)))
    return _rounded(stream.integers(-p, p + 1, (rows, cols)).astype(np.float64), fmt)


def _ties(stream: Stream, rows: int, cols: int, fmt: Format, side: str) -> Tensor:
    """Values 1 and 2, thinned so that sums lie near 2**8.6: about half of them are exact bfloat16 ties."""
    ones = stream.integers(1, 3, (rows, cols))
    keep = stream.integers(0, cols, (rows, cols)) < 171 if side == "a" else np.True_
    return _rounded((ones * keep).astype(np.float64), fmt)


def _randn(stream: Stream, rows: int, cols: int, fmt: Format, side: str) -> Tensor:
    """What a quantiser makes of normal data; the tails saturate."""
    if rows * cols < SUMS >> 4 or fmt.bits > 8:  # smaller matrices take less time than the table, which is kept
        return _rounded(stream.normals((rows, cols)) * SIGMA, fmt)
    return from_codes(torch.from_numpy(_rounded_normals(fmt).take(stream.sums((rows, cols)))), fmt)


@lru_cache(maxsize=4)
def _rounded_normals(fmt: Format) -> npt.NDArray[np.uint8]:
    """The code of every normal times ``SIGMA``, by the sum that it is made of: all at once, at the price of a matrix of
    as many elements."""
    every = _rounded(normal_of(np.arange(SUMS + 1)) * SIGMA, fmt)
    return np.asarray(codes_of(every).view(torch.uint8).numpy())


def _positive(stream: Stream, rows: int, cols: int, fmt: Format, side: str) -> Tensor:
    """Never negative, so that truncation in the accumulator shows as a bias."""
    return _rounded(np.abs(stream.normals((rows, cols))) * SIGMA, fmt)


def _codes(stream: Stream, rows: int, cols: int, fmt: Format, side: str) -> Tensor:
    """Every finite code equally often, -0 and subnormals included."""
    finite = _finite_codes(fmt)
    picked = finite[stream.integers(0, len(finite), (rows, cols))]
    flat = picked.reshape(-1)
    head = min(len(finite), flat.size)
    flat[stream.order(flat.size, head)] = finite[:head]
    return _coded(picked, fmt)


def _heavy(stream: Stream, rows: int, cols: int, fmt: Format, side: str) -> Tensor:
    """P(|x| > 2**k) ~ 2**-k, a Cauchy-like tail: few products dominate, the rest falls below the alignment."""
    words = stream.integers(1, 1 << 16, (rows, cols))
    lowest_bit = words & -words
    significand = 1.0 + stream.integers(0, 8, (rows, cols)) / 8.0
    values = stream.signs((rows, cols)) * significand * lowest_bit / 64.0
    return _rounded(values, fmt)


def _outlier(stream: Stream, rows: int, cols: int, fmt: Format, side: str) -> Tensor:
    """Ordinary data with columns of K that are 32 times larger, as attention sinks make them."""
    values = stream.normals((rows, cols)) * 8.0
    if side == "a":
        values[:, stream.order(cols)[: max(1, cols // 64)]] *= 32.0
    return _rounded(values, fmt)


def _subnormal(stream: Stream, rows: int, cols: int, fmt: Format, side: str) -> Tensor:
    """Mostly subnormal codes and zeros of both signs, with one element in sixteen normal."""
    tiny = stream.integers(0, 1 << fmt.fraction_bits, (rows, cols))
    normal = _finite_codes(fmt)
    normal = normal[normal < 1 << (fmt.bits - 1)]
    some = stream.integers(0, 16, (rows, cols)) == 0
    magnitude = np.where(some, normal[stream.integers(0, len(normal), (rows, cols))], tiny)
    sign = stream.integers(0, 2, (rows, cols)) << (fmt.bits - 1)
    return _coded(magnitude | sign, fmt)


def _zeros(stream: Stream, rows: int, cols: int, fmt: Format, side: str) -> Tensor:
    """Ordinary data with whole zero groups of 128, a zero row of -0, and scattered +-0."""
    values = stream.normals((rows, cols)) * SIGMA
    values *= stream.integers(0, 8, (rows, cols)) != 0
    groups = -(-cols // 128)
    dead = np.repeat(stream.integers(0, 4, (rows, groups)) == 0, 128, axis=1)[:, :cols]
    values[dead] = 0.0
    if side == "a" and rows > 1:
        values[stream.integers(0, rows, (1,))[0], :] = -0.0
    return _rounded(values, fmt)


def _spike(stream: Stream, rows: int, cols: int, fmt: Format, side: str) -> Tensor:
    """One large among 31 tiny in every group of 32 of ``a``: whatever lies below the alignment is cut off."""
    tiny = stream.integers(1, 8, (rows, cols)) * stream.signs((rows, cols)) / 512.0
    if side == "b":
        return _rounded(tiny * 512.0, fmt)
    where = stream.integers(0, 32, (rows, -(-cols // 32)))
    spike = np.arange(cols)[None, :] % 32 == np.repeat(where, 32, axis=1)[:, :cols]
    return _rounded(np.where(spike, stream.signs((rows, cols)) * 448.0, tiny), fmt)


def _cancel(stream: Stream, rows: int, cols: int, fmt: Format, side: str) -> Tensor:
    """Large terms that cancel between the two halves of every 128 block, leaving a small remainder."""
    values = stream.normals((rows, cols)) * SIGMA
    column = np.arange(cols)
    partner = column - 64
    second = (column % 128 >= 64) & (partner >= 0)
    if side == "b":
        values[:, second] = values[:, partner[second]]
    else:
        values[:, second] = -values[:, partner[second]] * 0.9375
    return _rounded(values, fmt)


def _nan(stream: Stream, rows: int, cols: int, fmt: Format, side: str) -> Tensor:
    """Ordinary data with a few special codes in some rows: every NaN (and inf) code of the format."""
    values = _rounded(stream.normals((rows, cols)) * SIGMA, fmt)
    every = np.arange(1 << fmt.bits, dtype=np.int64)
    finite = set(_finite_codes(fmt).tolist())
    special = [code for code in every.tolist() if code not in finite]
    count = max(1, rows // 8) if side == "a" else 1
    at = stream.integers(0, rows, (count,)), stream.integers(0, cols, (count,))
    codes = values.view(torch.uint8 if fmt.bits == 8 else torch.int16).to(torch.int64).numpy().copy()
    codes[at] = [special[i % len(special)] for i in range(count)]
    return _coded(codes, fmt)


Operand = Callable[[Stream, int, int, Format, str], Tensor]
OPERAND_FAMILIES: Mapping[str, Operand] = {
    "exact": _exact,
    "ties": _ties,
    "codes": _codes,
    "randn": _randn,
    "positive": _positive,
    "heavy": _heavy,
    "outlier": _outlier,
    "subnormal": _subnormal,
    "zeros": _zeros,
    "spike": _spike,
    "cancel": _cancel,
    "nan": _nan,
    "wide": _randn,
    "nanscale": _randn,
}


# --- scales -------------------------------------------------------------------------------------------------


def _distinct(stream: Stream, shape: tuple[int, ...]) -> Tensor:
    """Every scale its own significand, none a power of two, over four binades around 2**-8."""
    return _scale_bits(stream, shape, low=-10, high=-6)


def _wide(stream: Stream, shape: tuple[int, ...]) -> Tensor:
    """Distinct scales over 36 binades: the largest block hides the others."""
    return _scale_bits(stream, shape, low=-24, high=12)


def _powers(stream: Stream, shape: tuple[int, ...]) -> Tensor:
    """Powers of two, 2**-3 to 1: every product with an exact operand stays exact."""
    exponents = stream.integers(-3, 1, shape)
    return _float32_bits((exponents + 127) << 23)


def _nan_scale(stream: Stream, shape: tuple[int, ...]) -> Tensor:
    """Distinct scales of which one is NaN (or, on a second entry, +inf)."""
    result = _distinct(stream, shape)
    flat = result.reshape(-1)
    places = stream.order(flat.numel()).tolist()
    if len(places) > 1:
        flat[places[0]] = float("nan")
    if len(places) > 3:
        flat[places[1]] = float("inf")
    return result


def _scale_bits(stream: Stream, shape: tuple[int, ...], *, low: int, high: int) -> Tensor:
    fraction = _fractions(stream, shape)
    return _with_fraction(stream.integers(low, high, shape), fraction)


def _fractions(stream: Stream, shape: tuple[int, ...]) -> Integers:
    """The 23 fraction bits of as many float32 as the shape has elements, all different and none zero."""
    count = int(np.prod(shape))
    step = (1 << 23) // (count + 1)
    if step < 4:
        raise CaseError(f"{count} scales cannot all have their own 23-bit significand; use a smaller shape")
    return ((stream.order(count) + 1) * step + stream.integers(1, step, (count,)) // 2).reshape(shape)


def _with_fraction(exponent: Integers, fraction: Integers) -> Tensor:
    return _float32_bits(((exponent + 127) << 23) | fraction)


def _float32_bits(bits: Integers) -> Tensor:
    return torch.from_numpy(bits.astype(np.int32)).view(torch.float32)


SCALE_RULES: Mapping[str, Callable[[Stream, tuple[int, ...]], Tensor]] = {
    "exact": _powers,
    "ties": _powers,
    "wide": _wide,
    "nanscale": _nan_scale,
}


# --- edges of what a store can hold, and of what a scale can be -------------------------------------------------

# A float32 sum in [2**128 (1 - 2**-9), 2**128 (1 - 2**-20)) overflows bfloat16 but no float32 intermediate, which alone
# would leave the result open: two scales of 2**64 (1 - d) with d in [2**-13, 2**-12) times a sum of 1 lie in it.
ABOVE_BF16 = 64
DEAD = -77  # 2**-77 = 6.6e-24: block scales of experts that got no token (flashinfer 2595, vllm 31394)


def _one_hot(stream: Stream, rows: int, cols: int, fmt: Format, side: str) -> Tensor:
    """One +-1 in each row of ``a`` (in row 0 the last of K), ``b`` all +-1: every sum is +-1 whatever K is."""
    values = stream.signs((rows, cols)).astype(np.float64)
    if side == "a":
        where = stream.integers(0, cols, (rows, 1))
        where[0] = cols - 1
        values *= np.arange(cols)[None, :] == where
    return _rounded(values, fmt)


def _below_one(stream: Stream, rows: int, cols: int, fmt: Format, side: str) -> Tensor:
    """Ordinary data within [-1, 1]: the error of an underflowing float32 operation is not multiplied by a code."""
    return _rounded(np.clip(stream.normals((rows, cols)) / 4.0, -1.0, 1.0), fmt)


def _near_overflow(stream: Stream, shape: tuple[int, ...]) -> Tensor:
    """2**64 (1 - d), and for some entries 2**63, 2**-48 and 2**-49: results on both sides of the largest bfloat16 and
    of the largest float16; the first entry is of the largest kind."""
    kinds = np.array([ABOVE_BF16, ABOVE_BF16, ABOVE_BF16, 63, -48, -49], dtype=np.int64)
    exponent = kinds[stream.integers(0, len(kinds), shape)]
    exponent.reshape(-1)[0] = ABOVE_BF16
    return _with_fraction(exponent - 1, (1 << 23) - stream.integers(1 << 11, 1 << 12, shape))


def _near_underflow(stream: Stream, shape: tuple[int, ...]) -> Tensor:
    """Around 2**-65: two of them times sums near 1 are subnormal in bfloat16 and float32."""
    return _scale_bits(stream, shape, low=-66, high=-64)


def _near_underflow16(stream: Stream, shape: tuple[int, ...]) -> Tensor:
    """Around 2**-9: two of them times sums near 1 are subnormal in float16."""
    return _scale_bits(stream, shape, low=-11, high=-8)


def _small_scales(stream: Stream, shape: tuple[int, ...]) -> Tensor:
    """From 1e-38 to 1, the last row near 1e-23; alone, near 1e-14."""
    return _spread(stream, shape, sign=-1)


def _large_scales(stream: Stream, shape: tuple[int, ...]) -> Tensor:
    """From 1 to 1e38, the last row near 1e23; alone, near 1e14. Small and large ones do not meet in one call: the
    error that float32 may make of the small ones would hide them."""
    return _spread(stream, shape, sign=1)


def _spread(stream: Stream, shape: tuple[int, ...], *, sign: int) -> Tensor:
    """Distinct scales with one exponent for each row, since blocks of K of very different scales would hide each other.

    One row in four has any exponent of float32, the others and the first one below 4, the second one 100 or 104: where
    two of the far ones meet, the result overflows or vanishes and shows nothing.
    """
    fraction = _fractions(stream, shape)
    if fraction.size == 1:
        return _with_fraction(sign * stream.integers(32, 49, shape), fraction)
    lead = (*shape[:-1], 1) if np.prod(shape[:-1]) > 1 else shape
    far, near = stream.integers(0, 127, lead), stream.integers(0, 4, lead)
    exponent = np.where(stream.integers(0, 4, lead) == 0, far, near)
    if lead[0] > 1:
        exponent[0] = near[0]
    if lead[0] > 2:
        # A clamp at 1e30 or 1e-30 is seen; 2**101 times a near scale and sums of 2**22 overflows nowhere on the way.
        exponent[1] = 100 if sign > 0 else 104
    exponent[(slice(None), -1) if lead[0] == 1 else -1] = -DEAD  # of the last block of N, which is short
    return _with_fraction(np.broadcast_to(sign * exponent, shape), fraction)


@dataclass(frozen=True)
class EdgeFamily:
    """Data at a limit: how operands and scales are made, and the output dtypes of case ids on which it shows."""

    operand: Operand
    scale: Callable[[Stream, tuple[int, ...]], Tensor]
    stores: tuple[str, ...]


EDGE_FAMILIES: Mapping[str, EdgeFamily] = {
    "overflow": EdgeFamily(_one_hot, _near_overflow, ("bf16", "f16")),
    "underflow": EdgeFamily(_below_one, _near_underflow, ("bf16", "f32")),
    "underflow16": EdgeFamily(_below_one, _near_underflow16, ("f16",)),
    "small": EdgeFamily(_randn, _small_scales, ("bf16", "f32")),
    "large": EdgeFamily(_randn, _large_scales, ("bf16", "f32")),
}


# --- activations: what a quantiser is given -----------------------------------------------------------------


def _x_randn(stream: Stream, rows: int, cols: int) -> Reals:
    """Normal-like, variance 1, a scale of its own for every group of 128."""
    gain = 1.0 + np.repeat(stream.integers(0, 1 << 10, (rows, -(-cols // 128))), 128, axis=1)[:, :cols] / 128.0
    return stream.normals((rows, cols)) * gain


def _x_ties(stream: Stream, rows: int, cols: int) -> Reals:
    """amax = 448 * 2**e, so the scale is a power of two and every other value is a midpoint of two codes."""
    positive = decode(torch.arange(127, dtype=torch.uint8, device="cpu"), of_dtype(torch.float8_e4m3fn)).numpy()
    middle = (positive[:-1] + positive[1:]) / 2.0
    values = middle[stream.integers(0, len(middle), (rows, cols))] * stream.signs((rows, cols))
    values[:, ::32] = 448.0
    gain = (1 << stream.integers(0, 13, (rows, 1))) / 64.0
    return np.asarray(values * gain, dtype=np.float64)


def _x_amax(stream: Stream, rows: int, cols: int) -> Reals:
    """The groups' amax walks through all 128 bfloat16 significands; the rest is uniform below it."""
    groups = -(-cols // 128)
    index = (np.arange(rows * groups).reshape(rows, groups) * 5 + stream.integers(0, 128, (1,))[0]) % 128
    top = np.repeat(1.0 + index / 128.0, 128, axis=1)[:, :cols]
    values = top * stream.integers(-127, 128, (rows, cols)) / 128.0
    values[:, ::128] = top[:, ::128] * stream.signs((rows, groups))
    return values


def _x_outlier(stream: Stream, rows: int, cols: int) -> Reals:
    """One large value in a few rows only, late in every 128 x 128 block: a partial amax scan misses it."""
    values = stream.normals((rows, cols))
    late = np.arange(rows) % 128 >= min(96, rows - 1)
    values[late, :: max(1, min(cols, 67))] *= 64.0
    return values


def _x_heavy(stream: Stream, rows: int, cols: int) -> Reals:
    """Magnitudes over 32 binades."""
    words = stream.integers(1, 1 << 32, (rows, cols))
    return stream.normals((rows, cols)) * (words & -words) / 65536.0


def _x_special(stream: Stream, rows: int, cols: int) -> Reals:
    """Rows of zeros, of -0, of subnormals, of 2**100, of 2**-40, and ordinary rows with +-0 scattered."""
    values = stream.normals((rows, cols))
    values[stream.integers(0, 8, (rows, cols)) == 0] = 0.0
    for row, factor in enumerate((0.0, -0.0, 2.0**-130, 2.0**100, 2.0**-40)):
        values[row::8] = np.abs(values[row::8]) * factor if factor == 0.0 else values[row::8] * factor
    return values


def _x_nan(stream: Stream, rows: int, cols: int) -> Reals:
    """NaN, inf and -inf, each alone in a row, next to ordinary rows."""
    values = stream.normals((rows, cols))
    for row, special in enumerate((np.nan, np.inf, -np.inf)):
        values[row::5, stream.integers(0, cols, (1,))[0]] = special
    return values


def _x_range(stream: Stream, rows: int, cols: int) -> Reals:
    """Groups at both ends of the exponents: 448/amax overflows, 1/amax is subnormal, with zeros beside them."""
    values = np.clip(stream.normals((rows, cols)), -1.0, 1.0)
    values[stream.integers(0, 8, (rows, cols)) == 0] = 0.0
    for row, exponent in enumerate((-126, -122, -118, 126, 127)):
        values[row::6] *= 2.0**exponent
    return values


ACTIVATION_FAMILIES: Mapping[str, Callable[[Stream, int, int], Reals]] = {
    "randn": _x_randn,
    "ties": _x_ties,
    "amax": _x_amax,
    "outlier": _x_outlier,
    "heavy": _x_heavy,
    "special": _x_special,
    "range": _x_range,
    "nan": _x_nan,
}


# --- activations for blocks of 16 and 32 ------------------------------------------------------------------------

_FP4 = np.array([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0])


def _x_fp4_ties(stream: Stream, rows: int, cols: int) -> Reals:
    """amax = 6 * 2**e in every block of 16, the rest values of E2M1 and midpoints of two: ties wherever scales are
    powers of two, and an amax at which an approximate reciprocal of 6 may step."""
    blocks = -(-cols // 16)
    values = _FP4[stream.integers(0, len(_FP4), (rows, blocks * 16))]
    values[:, ::16] = 6.0
    exponent = np.repeat(stream.integers(-3, 4, (rows, -(-blocks // 2))), 32, axis=1)[:, : blocks * 16]
    return np.asarray((values * stream.signs(values.shape) * 2.0**exponent)[:, :cols], dtype=np.float64)


def _x_steps(stream: Stream, rows: int, cols: int) -> Reals:
    """The amax of every block of 16 walks through all 128 bfloat16 significands, at whose places the roundings of a
    shared scale step; the rest lies below it, and half of it is tiny."""
    blocks = -(-cols // 16)
    index = (np.arange(rows * blocks).reshape(rows, blocks) * 37 + stream.integers(0, 128, (1,))[0]) % 128
    top = np.repeat(1.0 + index / 128.0, 16, axis=1)
    values = top * stream.integers(-127, 128, top.shape) / 128.0
    values = np.where(stream.integers(0, 2, top.shape) == 0, values / 64.0, values)
    values[:, ::16] = top[:, ::16] * stream.signs((rows, blocks))
    gain = 2.0 ** stream.integers(-3, 4, (rows, 1))
    return np.asarray(values[:, :cols] * gain, dtype=np.float64)


BLOCK_FAMILIES: Mapping[str, Callable[[Stream, int, int], Reals]] = {"fp4ties": _x_fp4_ties, "steps": _x_steps}
