"""The exact value of a scaled FP8 matrix product, and its correct rounding.

    y[m, n] = alpha * sum_b a_scale[m, b] * b_scale[n // b_rows, b] * x_b[m, n]  (+ bias[n])  (+ c[m, n]),
    x_b[m, n] = sum over k in block b of a[m, k] * b[n, k]

Every ``x_b`` is exact in float64: the operands are multiples of a quantum ``q``, so each partial sum in any order
is exact when ``sum |p| <= 2**53 * q_a * q_b`` (for E4M3 every K up to 171,196). The condition is tested on the data,
and operands whose exponents span too much are split into bands that satisfy it, so the sum stays exact for every
format. ``sigma = a_scale * b_scale`` is exact (48 bits); the sum over blocks runs in double-double, and so does its
product with ``alpha``. What that may still miss is tracked per element (``Exact.slack``); where it could change a
rounding, integers decide.

Source: Jeannerod and Rump for the exactness of bounded sums,
Dekker for the pair arithmetic, Boldo and Melquiond for the single rounding (:mod:`oracle.numbers.rounding`).
Not covered: hardware behaviour, tolerances, layouts.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from oracle.errors import ExactnessError, ShapeError
from oracle.numbers.formats import E2M1, Format, NanEncoding, codes_of, decode, from_codes, in_blocks, of_dtype
from oracle.numbers.rounding import Overflow, Rounding, encode_scalar, fast_two_sum, pair_to_dtype, two_prod, two_sum

LONG = 4096  # a sum of this length that fits float64 is worth splitting K for, rather than the exponent range
TILE, TILE_ON_DEVICE = 1 << 21, 1 << 25
"""Elements of one row tile of the result: about 16 MiB for each float64 temporary, 256 MiB on a device."""
KEPT = 1 << 21  # elements of the largest operand whose float64 values are cached: 16 MiB
ABSENT = object()  # in a cache
RESULT = 1 << 16  # elements of the largest result that a product caches: 512 KiB for each float64 tensor
NEARBY = 1 << 24  # multiplications of a small product
BAND, BAND_ON_DEVICE = 1 << 20, 1 << 24  # codes that are looked at together: 8 MiB as integers, 128 MiB
ALL = slice(None)
T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """The range of an operand: ``largest`` finite magnitude (0: none), ``least`` one above zero (infinity: none), and
    ``quantum``, a power of two that divides every finite element (:func:`quantum_of`)."""

    largest: float
    least: float
    quantum: float


@dataclass(frozen=True)
class Decoded:
    """One operand of a product, decoded once: codes ``[R, K]``, their scales, and what follows from them.

    Everything below is computed at its first use and cached, except the float64 values of an operand of more than
    ``KEPT`` elements, which are decoded again at each use. A part (:meth:`select`) shares what its whole has cached.
    The tensors must not be written to afterwards.
    """

    codes: Tensor
    scale: Tensor

    @cached_property
    def fmt(self) -> Format:
        """Of the codes: their dtype's; uint8 holds one code of E2M1 each."""
        return E2M1 if self.codes.dtype is torch.uint8 else of_dtype(self.codes.dtype)

    @cached_property
    def scales(self) -> Tensor:
        """The scales as float64, of the shape of ``scale``, NaN and infinities as they are."""
        return decode(self.scale)

    @cached_property
    def finite_rows(self) -> Tensor:
        """Bool ``[R]``: rows of codes without NaN and infinity."""
        fmt = self.fmt
        if fmt.nan is NanEncoding.NEGATIVE_ZERO:
            return torch.cat([(x != fmt.sign_mask).all(dim=1) for x in self._bands()])
        return torch.cat([(x & fmt.magnitude_mask).amax(dim=1) <= fmt.max_code for x in self._bands()])

    @cached_property
    def finite(self) -> bool:
        """Whether no code is NaN or infinite."""
        return bool(self.finite_rows.all())

    @cached_property
    def facts(self) -> Facts:
        """The range of the finite elements; of codes of at most 16 bits found by counting them."""
        if self.codes.element_size() > 2:
            value = self.value()
        else:
            counts = sum(torch.bincount(band.flatten(), minlength=1 << self.fmt.bits) for band in self._indices())
            assert isinstance(counts, Tensor)
            value = decode(torch.nonzero(counts)[:, 0], self.fmt)
        value = value[torch.isfinite(value)]
        size = value.abs()
        largest = float(size.max()) if size.numel() else 0.0
        least = float(torch.where(size > 0, size, torch.inf).min()) if size.numel() else math.inf
        return Facts(largest, least, quantum_of(value))

    def value(self, k: slice = ALL) -> Tensor:
        """Float64 values of columns ``k``, ``[R, columns]``, NaN and infinities as they are."""
        return self._value[:, k] if self._kept else decode(self.codes[:, k], self.fmt)

    def value_of(self, rows: Tensor) -> Tensor:
        """:meth:`value` of the ``rows`` ``[r]`` (int64), float64 ``[r, K]``; NaN and infinities as they are."""
        return self._value[rows] if "_value" in vars(self) else decode(take_rows(self.codes, rows), self.fmt)

    def number(self, k: slice = ALL) -> Tensor:
        """:meth:`value` with NaN and infinities as zeros: float64 ``[R, columns]``."""
        value = self.value(k)
        return value if self.finite else zero_nonfinite(value)

    def exponent(self) -> Tensor:
        """``max(floor(log2 |x|), emin)`` of :meth:`number`, int64 ``[R, K]``; :data:`NO_EXPONENT` for zeros."""
        return self._exponent if self._kept else exponents(self.number(), self.fmt)

    def select(self, rows: slice | Tensor, scales: slice | Tensor | None) -> Decoded:
        """Some rows of the codes, and some rows of the scales (None: all of them), moved unchanged with what has been
        decoded of them.

        ``rows`` and ``scales`` are slices or int64 ``[rows]``; NaN stays NaN.
        """
        part = Decoded(take_rows(self.codes, rows), self.scale if scales is None else take_rows(self.scale, scales))
        computed: dict[str, Any] = vars(part)
        computed |= {
            name: vars(self)[name][rows] for name in ("_value", "_exponent", "finite_rows") if name in vars(self)
        }
        if "scales" in vars(self):
            computed["scales"] = self.scales if scales is None else self.scales[scales]
        return part

    def to(self, device: torch.device | str) -> Decoded:
        """The same operand on ``device``; itself where it is there."""
        if self.codes.device == torch.device(device):
            return self
        return Decoded(self.codes.to(device), self.scale.to(device))

    def same_memory(self, other: Decoded) -> bool:
        """Whether the codes and the scales of both are the same memory."""
        return same_memory(self.codes, other.codes) and same_memory(self.scale, other.scale)

    def learn(self, other: Decoded) -> None:
        """Take over what ``other`` has cached of codes, and of scales, that are the same tensor here."""
        computed, theirs = vars(self), vars(other)
        of_codes = ("_value", "_exponent", "finite_rows", "finite", "facts") if self.codes is other.codes else ()
        of_scale = ("scales",) if self.scale is other.scale else ()
        computed |= {name: theirs[name] for name in (*of_codes, *of_scale) if name in theirs}

    def decode_once(self) -> None:
        """Decode the codes, if they are few enough to be kept."""
        if self._kept:
            _ = self._value

    @property
    def _kept(self) -> bool:
        return self.codes.numel() <= KEPT or "_value" in vars(self)

    @cached_property
    def _value(self) -> Tensor:
        return decode(self.codes, self.fmt)

    @cached_property
    def _exponent(self) -> Tensor:
        return exponents(self.number(), self.fmt)

    def _indices(self) -> Iterator[Tensor]:
        """The codes as int64, some rows at a time."""
        return (band.to(torch.int64).bitwise_and_(self.fmt.code_mask) for band in self._bands())

    def _bands(self) -> Iterator[Tensor]:
        step = max(1, (BAND_ON_DEVICE if self.codes.is_cuda else BAND) // max(1, self.codes.shape[1]))
        for start in range(0, self.codes.shape[0], step):
            yield codes_of(self.codes[start : start + step], self.fmt)


@lru_cache(maxsize=32)
def code_values(fmt: Format, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """The values of all codes of a format of 8 bits, ``[256]`` of ``dtype``; None of another format, or where ``dtype``
    does not hold one. NaN codes count as held."""
    if fmt.bits != 8:
        return None
    value = decode(torch.arange(1 << fmt.bits, device=device), fmt)
    converted = value.to(dtype)
    return converted if bool(((decode(converted) == value) | torch.isnan(value)).all()) else None


NO_EXPONENT = -(1 << 20)  # of a zero: smaller than any exponent that occurs


def exponents(value: Tensor, fmt: Format) -> Tensor:
    """``max(floor(log2 |x|), emin)`` of float64 values drawn from ``fmt``, int64 of their shape.

    ``value``: finite, any shape (of NaN and infinities the result means nothing); :data:`NO_EXPONENT` for zeros.
    """
    exponent = (torch.frexp(value)[1].to(torch.int64) - 1).clamp(min=fmt.emin)
    return torch.where(value == 0, NO_EXPONENT, exponent)


@dataclass(frozen=True)
class ScaledProduct:
    """Operands of one scaled product; the common form of every GEMM-like contract.

    ``left`` and ``right`` are the operands as records that decode their codes once (:class:`Decoded`).

    Attributes
    ----------
    a, b : Tensor ``[M, K]``, ``[N, K]`` of any float dtype of :mod:`oracle.numbers.formats` (codes), or uint8: one code
        of E2M1 each.
    a_scale : Tensor ``[M, B]`` or ``[1, B]``, float32, E8M0 or E4M3.
    b_scale : Tensor ``[ceil(N / b_rows), B]``, of such a dtype.
    block : length of a K block, ``B = ceil(K / block)``; ``K`` for per-tensor, per-token, per-channel scales.
    b_rows : rows of ``b`` that share one row of ``b_scale``.
    bias : Tensor ``[N]`` or None, any float dtype; added before the output is rounded.
    c : Tensor ``[M, N]`` or None, float32; added last, to the float32 sum (what a weight gradient accumulates into).
        In bfloat16 it is added to the sum as stored in bfloat16.
    alpha : Tensor ``[1]`` or ``[2]`` or None, float32: what the whole sum is multiplied by, a factor or two.
    """

    a: Tensor
    b: Tensor
    a_scale: Tensor
    b_scale: Tensor
    block: int
    b_rows: int
    bias: Tensor | None = None
    c: Tensor | None = None
    alpha: Tensor | None = None

    def __post_init__(self) -> None:
        blocks, groups = -(-self.K // self.block), -(-self.N // self.b_rows)
        if self.b.shape[1] != self.K:
            raise ShapeError(f"b has K={self.b.shape[1]}, a has K={self.K}")
        if tuple(self.a_scale.shape) not in ((self.M, blocks), (1, blocks)):
            raise ShapeError(
                f"a_scale has shape {list(self.a_scale.shape)}; M={self.M}, K={self.K} in blocks of {self.block} "
                f"take [{self.M}, {blocks}] or [1, {blocks}]"
            )
        if tuple(self.b_scale.shape) != (groups, blocks):
            raise ShapeError(
                f"b_scale has shape {list(self.b_scale.shape)}; N={self.N} in groups of {self.b_rows} and K={self.K} "
                f"in blocks of {self.block} take [{groups}, {blocks}]"
            )
        if self.bias is not None and tuple(self.bias.shape) != (self.N,):
            raise ShapeError(f"bias has shape {list(self.bias.shape)}; N={self.N} takes [{self.N}]")
        if self.c is not None and tuple(self.c.shape) != (self.M, self.N):
            raise ShapeError(f"c has shape {list(self.c.shape)}; the product takes [{self.M}, {self.N}]")
        if self.alpha is not None and tuple(self.alpha.shape) not in ((1,), (2,)):
            raise ShapeError(f"alpha has shape {list(self.alpha.shape)}; it is one factor of the whole sum, or two")

    def on_cpu(self) -> ScaledProduct:
        """The product with all tensors on the CPU, in their shapes and dtypes; NaN stays NaN."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: x.cpu() for name, x in named.items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    @property
    def M(self) -> int:
        return self.a.shape[0]

    @property
    def N(self) -> int:
        return self.b.shape[0]

    @property
    def K(self) -> int:
        return self.a.shape[1]

    @property
    def B(self) -> int:
        return self.b_scale.shape[1]

    @cached_property
    def factor(self) -> float:
        """``alpha`` as one number, exact (48 bits); 1 without one."""
        return 1.0 if self.alpha is None else float(decode(self.alpha).prod())

    @cached_property
    def left(self) -> Decoded:
        """``a`` with its scales."""
        return Decoded(self.a, self.a_scale)

    @cached_property
    def right(self) -> Decoded:
        """``b`` with its scales."""
        return Decoded(self.b, self.b_scale)

    def operands_changed(self, other: ScaledProduct) -> tuple[bool, bool] | None:
        """Whether ``other`` has another left and another right operand, in other memory.

        None where it has other extents, blocks, alpha, bias or ``c``."""
        extents = ((x.M, x.N, x.K, x.block, x.b_rows) for x in (self, other))
        if len(set(extents)) > 1 or any(getattr(self, x) is not getattr(other, x) for x in ("alpha", "bias", "c")):
            return None
        return not other.left.same_memory(self.left), not other.right.same_memory(self.right)

    def learn(self, other: ScaledProduct) -> None:
        """Take over what ``other`` has decoded of operands that are the same tensors here."""
        self.left.learn(other.left)
        self.right.learn(other.right)

    def decode_once(self) -> None:
        """Decode both operands, if they are small, so that others may :meth:`learn` their values."""
        for side in (self.left, self.right):
            side.decode_once()

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` computes of this product, cached under ``key`` if the result is small; do not write to it."""
        if self.M * self.N > RESULT:
            return make()
        value: T = self._made.get(key, ABSENT)
        if value is ABSENT:
            value = self._made[key] = make()
        return value

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}

    def to(self, device: torch.device | str) -> ScaledProduct:
        """The same product with its tensors on ``device``."""
        operands: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: x.to(device) for name, x in operands.items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    @cached_property
    def nearby(self) -> ScaledProduct | None:
        """A small product of a device as a copy on the CPU; None for every other product.

        The compiled engines of the CPU are faster than the many operations that the device would take.
        """
        small = self.M * self.N * self.K <= NEARBY and importlib.util.find_spec("numba") is not None
        return self.to("cpu") if self.a.is_cuda and small else None

    def rows(self, start: int, stop: int) -> ScaledProduct:
        """The same product restricted to rows ``start..stop-1`` of ``a``; itself where these are all."""
        return self if start == 0 and stop >= self.M else self._left_part(slice(start, stop))

    def take(self, rows: Tensor) -> ScaledProduct:
        """The same product restricted to the rows of ``a`` listed in ``rows`` (int64 ``[rows]``), moved unchanged."""
        return self._left_part(rows)

    def columns(self, start: int, stop: int) -> ScaledProduct:
        """The same product restricted to rows ``start..stop-1`` of ``b``, each with a scale row of its own."""
        return self._right_part(slice(start, stop), torch.arange(start, stop, device=self.b.device) // self.b_rows)

    def take_columns(self, columns: Tensor) -> ScaledProduct:
        """The same product restricted to the rows of ``b`` listed in ``columns`` (int64 ``[columns]``).

        Each has a scale row of its own; codes and scales are moved unchanged.
        """
        return self._right_part(columns, columns // self.b_rows)

    def _left_part(self, rows: slice | Tensor) -> ScaledProduct:
        left = self.left.select(rows, None if self.a_scale.shape[0] == 1 else rows)
        c = None if self.c is None else self.c[rows]
        part = replace(self, a=left.codes, a_scale=left.scale, c=c)
        vars(part).update(left=left, right=self.right)
        return part

    def _right_part(self, columns: slice | Tensor, groups: Tensor) -> ScaledProduct:
        right = self.right.select(columns, groups)
        bias = None if self.bias is None else self.bias[columns]
        c = None if self.c is None else self.c[:, columns]
        part = replace(self, b=right.codes, b_scale=right.scale, b_rows=1, bias=bias, c=c)
        vars(part).update(left=self.left, right=right)
        return part

    def dequantised(self, dtype: torch.dtype) -> ScaledProduct | None:
        """The same product with the scales multiplied into operands of ``dtype``, of unit scales.

        None where a code times its scale is no value of ``dtype``."""
        sides = []
        for side, rows in ((self.left, 1), (self.right, self.b_rows)):
            scale = side.scales.repeat_interleave(rows, dim=0)[: side.codes.shape[0]]
            value = side.value() * scale.repeat_interleave(self.block, dim=1)[:, : self.K]
            converted = value.to(dtype)
            if not bool(((decode(converted) == value) | torch.isnan(value)).all()):
                return None
            sides.append(converted)
        one = torch.ones((1, 1), dtype=torch.float32, device=self.a.device)
        return replace(self, a=sides[0], b=sides[1], a_scale=one, b_scale=one, block=self.K, b_rows=self.N)

    def widened(self, dtype: torch.dtype) -> ScaledProduct | None:
        """The same product with codes of ``dtype``, scales as they are; None where a code is no value of it."""
        sides = []
        for side in (self.left, self.right):
            table = code_values(side.fmt, dtype, side.codes.device)
            if table is not None:
                codes = side.codes.view(torch.uint8)
                converted = in_blocks(lambda x, t=table: t.index_select(0, x.int()), codes, dtype=dtype)
            else:
                value = side.value()
                converted = value.to(dtype)
                if not bool(((decode(converted) == value) | torch.isnan(value)).all()):
                    return None
            sides.append(converted)
        return replace(self, a=sides[0], b=sides[1])

    def widens(self, dtype: torch.dtype) -> bool:
        """Whether ``dtype`` holds every code of both formats: :meth:`widened` is not None, whatever the codes."""
        return all(code_values(side.fmt, dtype, self.a.device) is not None for side in (self.left, self.right))

    def over(self, ranges: Sequence[tuple[int, int]]) -> ScaledProduct:
        """The sum over some ranges ``[first k, end k)`` of K alone, joined in this order, without alpha, bias, ``c``.

        With several scale blocks every range begins at the border of one, and all but the last end at one.
        """
        ks = torch.cat([torch.arange(*ends, device="cpu") for ends in ranges])
        blocks = ks[:: self.block] // self.block
        if not torch.equal(ks // self.block, blocks.repeat_interleave(self.block)[: len(ks)]):
            raise ShapeError(f"ranges {list(ranges)} cut scale blocks of {self.block}")
        columns, blocks = ks.to(self.a.device), blocks.to(self.a.device)
        a, b = (take_rows(x.t(), columns).t() for x in (self.a, self.b))
        a_scale, b_scale = self.a_scale[:, blocks], self.b_scale[:, blocks]
        block = min(self.block, len(ks))
        return replace(self, a=a, b=b, a_scale=a_scale, b_scale=b_scale, block=block, bias=None, c=None, alpha=None)

    def tiles(self) -> Iterator[tuple[slice, ScaledProduct]]:
        """Row tiles whose result has at most about ``TILE`` elements."""
        step = max(1, (TILE_ON_DEVICE if self.a.is_cuda else TILE) // self.N)
        for start in range(0, self.M, step):
            stop = min(self.M, start + step)
            yield slice(start, stop), self.rows(start, stop)

    def sigma(self, b: int) -> Tensor:
        """``a_scale * b_scale`` of K block ``b`` as float64 ``[M or 1, N]``, exact (48 bits).

        NaN and infinities as IEEE 754.
        """
        columns = self.right.scales[:, b].repeat_interleave(self.b_rows)[: self.N]
        return self.left.scales[:, b, None] * columns[None, :]

    def blocks(self) -> Iterator[tuple[int, slice]]:
        """Every K block and its columns."""
        for block in range(self.B):
            yield block, slice(block * self.block, min(self.K, (block + 1) * self.block))


def magnitudes(product: ScaledProduct) -> Tensor:
    """The sum of the magnitudes of all terms of each element of a product, float64 ``[M, N]``; NaN as IEEE 754."""
    left, right = scaled_operands(product)
    return left.abs() @ right.abs().T * abs(product.factor)


def scaled_operands(product: ScaledProduct) -> tuple[Tensor, Tensor]:
    """The values of both operands times their scales, float64 ``[M, K]`` and ``[N, K]``; NaN as IEEE 754."""
    return scaled_side(product, product.left), scaled_side(product, product.right, product.b_rows)


def scaled_side(product: ScaledProduct, side: Decoded, rows: int = 1) -> Tensor:
    """The values of an operand of a product times its scales, of which each serves so many ``rows``; float64
    ``[R, K]``, NaN as IEEE 754."""
    scales = side.scales if rows == 1 else side.scales.repeat_interleave(rows, dim=0)[: len(side.codes)]
    return scaled_codes(side.value(), scales, product.block)


def scaled_codes(value: Tensor, scales: Tensor, block: int) -> Tensor:
    """``value [R, K]`` times ``scales [R or 1, B]``, each of a ``block`` of columns, float64; NaN as IEEE 754."""
    rows, k = value.shape
    if k % block:
        return value * scales.repeat_interleave(block, dim=1)[:, :k]
    return (value.view(rows, -1, block) * scales[:, :, None]).view(rows, k)


@dataclass(frozen=True)
class Exact:
    """The exact result ``hi + lo`` (float64 ``[M, N]``, ``|lo| <= ulp(hi) / 2``), true within ``slack >= 0``.

    Where an operand or a scale is NaN or infinite, ``hi`` is the IEEE result and ``lo`` and ``slack`` are 0.
    """

    hi: Tensor
    lo: Tensor
    slack: Tensor

    def to(self, device: torch.device | str) -> Exact:
        """The same value with its tensors on ``device``."""
        return Exact(self.hi.to(device), self.lo.to(device), self.slack.to(device))


def exact(product: ScaledProduct) -> Exact:
    """The exact value of every element of ``product`` as a double-double; pure PyTorch, any device.

    Raises ExactnessError: a device's float64 matrix product is not exact where it must be (an emulated one).
    """
    return joined([_exact_tile(tile) for _, tile in product.tiles()])


def rounded(product: ScaledProduct, value: Exact, dtype: torch.dtype) -> Tensor:
    """The exact value rounded once, to nearest even, into ``dtype``, ``[M, N]``; overflow gives infinity (IEEE 754),
    NaN stays NaN.

    Elements whose rounding ``value.slack`` leaves open are decided in rationals.
    """
    rounding, overflow = Rounding.NEAREST_EVEN, Overflow.INF
    out = pair_to_dtype(value.hi, value.lo, dtype, rounding=rounding, overflow=overflow)
    if not bool(value.slack.any()):
        return out
    low = pair_to_dtype(*fast_two_sum(value.hi, value.lo - value.slack), dtype, rounding=rounding, overflow=overflow)
    high = pair_to_dtype(*fast_two_sum(value.hi, value.lo + value.slack), dtype, rounding=rounding, overflow=overflow)
    fmt = of_dtype(dtype)
    for m, n in torch.nonzero((decode(low) != decode(high)) & value.slack.bool()).tolist():
        code = encode_scalar(rational(product, m, n), fmt, rounding=rounding, overflow=overflow)
        out[m, n] = from_codes(torch.tensor(code, dtype=torch.int64, device="cpu"), fmt)
    return out


def nearest(product: ScaledProduct, value: Exact) -> Tensor:
    """The float64 ``[M, N]`` nearest to the exact value; where ``value.slack`` leaves a tie open, rationals decide. NaN
    and infinities stay."""
    out = value.hi + value.lo
    if not bool(value.slack.any()):
        return out
    inf = torch.full_like(out, torch.inf)
    low = value.hi + torch.nextafter(value.lo - value.slack, -inf)
    high = value.hi + torch.nextafter(value.lo + value.slack, inf)
    for m, n in torch.nonzero((low != high) & value.slack.bool()).tolist():
        out[m, n] = float(rational(product, m, n))
    return out


def rational(product: ScaledProduct, m: int, n: int) -> Fraction:
    """Element ``(m, n)`` in rational arithmetic; finite operands only."""
    a, b = decode(product.a[m], product.left.fmt).tolist(), decode(product.b[n], product.right.fmt).tolist()
    left, right = product.left.scales, product.right.scales
    total = Fraction(0)
    for block, k in product.blocks():
        x = sum((Fraction(p) * Fraction(q) for p, q in zip(a[k], b[k], strict=True)), Fraction(0))
        row = 0 if left.shape[0] == 1 else m
        total += Fraction(float(left[row, block])) * Fraction(float(right[n // product.b_rows, block])) * x
    total *= Fraction(product.factor)
    if product.bias is not None:
        total += Fraction(float(decode(product.bias)[n]))
    if product.c is not None:
        total += Fraction(float(product.c[m, n]))
    return total


def block_sums(a: Tensor, b: Tensor, *, quantum: float | None = None) -> Iterator[Tensor]:
    """Float64 tensors ``[M, N]`` whose unevaluated sum is exactly ``a @ b.T``; usually one.

    ``a [M, P]`` and ``b [N, P]`` are float64 without NaN and infinity. ``quantum`` is a power of two that divides every
    product (the formats' smallest subnormals multiplied); when it does not suffice, the data's own is used, then a long
    ``P`` is halved, then the operand of the wider exponent range is split into two bands. Raises ExactnessError: no
    such split makes the sums exact, or a device's float64 matrix product is not exact.
    """
    largest = float(a.abs().max()) * float(b.abs().max())

    def exact_in_float64(length: int, unit: float) -> bool:
        return length * largest <= 2.0**53 * unit

    if quantum is None or not exact_in_float64(a.shape[1], quantum):
        quantum = quantum_of(a) * quantum_of(b)
    if exact_in_float64(a.shape[1], quantum):
        x = a @ b.T
        _check_device_product(x, a, b, quantum)
        yield x
    elif exact_in_float64(LONG, quantum):
        half = a.shape[1] // 2
        yield from block_sums(a[:, :half], b[:, :half])
        yield from block_sums(a[:, half:], b[:, half:])
    else:
        pairs = [(part, b) for part in _bands(a)] if _spread(a) >= _spread(b) else [(a, part) for part in _bands(b)]
        for pair in pairs:
            yield from block_sums(*pair)


def quantum_of_codes(left: Format, right: Format) -> float:
    """A power of two that divides every product of a finite value of ``left`` and one of ``right``."""
    return left.min_subnormal * right.min_subnormal


def _exact_tile(product: ScaledProduct) -> Exact:
    left, right = product.left, product.right
    finite = left.finite and right.finite
    quantum, shape = quantum_of_codes(left.fmt, right.fmt), (product.M, product.N)
    hi, lo, slack = (torch.zeros(shape, dtype=torch.float64, device=product.a.device) for _ in range(3))
    plain = torch.zeros_like(hi)
    for block, k in product.blocks():
        sigma = product.sigma(block).expand(shape)
        if not finite or not bool(torch.isfinite(sigma).all()):
            plain = plain + sigma * (left.value(k) @ right.value(k).T)
            sigma = zero_nonfinite(sigma)
        for x in block_sums(left.number(k), right.number(k), quantum=quantum):
            hi, lo, slack = accumulate(hi, lo, slack, *two_prod(sigma, x))
    if product.alpha is not None:
        return finished(product, overlaid(plain, *fast_two_sum(hi, lo), slack))
    if product.bias is not None:
        bias = decode(product.bias).expand(shape)
        plain = plain + bias
        hi, lo, slack = accumulate(hi, lo, slack, bias, torch.zeros_like(bias))
    value = overlaid(plain, *fast_two_sum(hi, lo), slack)
    return value if product.c is None else with_summand(value, product.c)


def with_summand(value: Exact, c: Tensor) -> Exact:
    """``value + c``, ``c [M, N]`` of any float dtype; NaN and infinities as IEEE 754."""
    summand = decode(c)
    hi, lo, slack = accumulate(value.hi, value.lo, value.slack, summand, torch.zeros_like(summand))
    return overlaid(value.hi + summand, *fast_two_sum(hi, lo), slack)


def finished(product: ScaledProduct, total: Exact) -> Exact:
    """``alpha * total + bias + c`` of a product with an alpha; ``total`` is that of the product without any of these.

    ``alpha`` has 48 bits. Its product with the high word is a pair (:func:`two_prod`), that with the low word is
    rounded: ``slack`` grows by ``2**-53`` of it and of the sum into the low word.
    """
    alpha = torch.full_like(total.hi, product.factor)
    plain, zero = total.hi * alpha, torch.zeros_like(total.hi)
    hi, e = two_prod(alpha, total.hi)
    rest = alpha * total.lo
    lo, slack = e + rest, alpha.abs() * total.slack + (rest.abs() + (e + rest).abs()) * 2.0**-53
    hi, lo = fast_two_sum(hi, lo)
    if product.bias is not None:
        bias = decode(product.bias).expand_as(hi)
        plain = plain + bias
        hi, lo, slack = accumulate(hi, lo, slack, bias, zero)
    value = overlaid(plain, *fast_two_sum(hi, lo), slack * (1 + 2.0**-50))
    return value if product.c is None else with_summand(value, product.c)


def joined(parts: Sequence[Exact]) -> Exact:
    """Exact values of consecutive rows as one."""
    return Exact(*(torch.cat(tensors) for tensors in zip(*((p.hi, p.lo, p.slack) for p in parts), strict=True)))


def overlaid(plain: Tensor, hi: Tensor, lo: Tensor, slack: Tensor) -> Exact:
    """The pair ``hi + lo``, or the IEEE result ``plain`` where that is NaN or infinite: float64 tensors of one shape.

    ``slack`` is of that shape too, and is 0 where ``plain`` is not finite.
    """
    finite = torch.isfinite(plain)
    return Exact(torch.where(finite, hi, plain), *(torch.where(finite, x, 0.0) for x in (lo, slack)))


def zero_nonfinite(x: Tensor) -> Tensor:
    """``x`` of any shape with NaN and infinities replaced by zeros, of the same shape and dtype."""
    return torch.nan_to_num(x, 0.0, 0.0, 0.0)


def accumulate(hi: Tensor, lo: Tensor, slack: Tensor, p: Tensor, pe: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(hi, lo, slack)`` with the pair ``p + pe`` added to ``hi + lo``: float64 tensors of one shape.

    What the low word cannot hold goes, as a magnitude, to ``slack``. Operands are finite: NaN and infinity make NaN in
    ``lo`` and in ``slack``, which :func:`overlaid` replaces.
    """
    hi, e = two_sum(hi, p)
    t, e1 = two_sum(e, pe)
    lo, e2 = two_sum(lo, t)
    return hi, lo, slack + (e1.abs() + e2.abs()) * (1.0 + 2.0**-50)


def quantum_of(x: Tensor) -> float:
    """A power of two that divides every element of the float64 tensor ``x`` of any shape (1.0 when all are zero).
    Elements are finite; NaN and infinity are not detected."""
    nonzero = x[x != 0]
    if nonzero.numel() == 0:
        return 1.0
    # the lowest set bit of an element: its significand as an integer, and the integer's two's complement
    mantissa, exponent = torch.frexp(nonzero)
    integer = (mantissa * 2.0**53).to(torch.int64)
    lowest = torch.frexp((integer & -integer).to(torch.float64))[1].to(torch.int64) - 1
    return float(2.0 ** int((lowest + exponent.to(torch.int64)).min() - 53))


def _spread(x: Tensor) -> float:
    """Largest magnitude over quantum: the integer range that the elements span."""
    return float(x.abs().max()) / quantum_of(x)


def _bands(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` as the sum of its high and its low bits, split at the geometric middle of its integer range."""
    top, bottom = float(x.abs().max()), quantum_of(x)
    middle = bottom * 2.0 ** ((math.frexp(top / bottom)[1] + 1) // 2)
    high = torch.trunc(x / middle) * middle
    low = x - high
    if not bool(high.any()):  # the least bit is always a low one
        raise ExactnessError(
            f"elements up to {top} over a quantum of {bottom} cannot be split further for an exact float64 sum"
        )
    return high, low


def _check_device_product(x: Tensor, a: Tensor, b: Tensor, quantum: float) -> None:
    """Row sums of ``x = a @ b.T`` computed two ways must agree exactly; refuses an emulated float64 product.

    Only off the CPU, where a library may emulate float64 on integer units, and only while the sums are exact.
    """
    if x.device.type == "cpu":
        return
    if x.shape[1] * a.shape[1] * float(a.abs().max()) * float(b.abs().max()) > 2.0**53 * quantum:
        return
    direct = (a * b.sum(dim=0)[None, :]).sum(dim=1)
    if not torch.equal(x.sum(dim=1), direct):
        raise ExactnessError(
            f"the float64 matrix product on {x.device} is not exact (a library may be emulating it); run the "
            "reference on the CPU or force the native float64 path"
        )


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether ``x`` and ``y``, each of any shape and dtype, are the same elements of the same memory; NaN is no value
    here, none is read."""
    facts = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (x, y)]
    return facts[0] == facts[1]


def take_rows(x: Tensor, rows: slice | Tensor) -> Tensor:
    """``x[rows]``: rows of ``x`` ``[R, ...]`` of any dtype, moved unchanged, for float8 tensors too, whose elements
    torch cannot index on every device and in every version.

    ``rows`` is a slice or int64 ``[rows]``; returns ``[rows, ...]`` of the same dtype.
    """
    if isinstance(rows, slice):
        return x[rows]
    if x.element_size() == 1:
        return x.view(torch.uint8).index_select(0, rows).view(x.dtype)
    return x.index_select(0, rows)
