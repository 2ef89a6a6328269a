"""Any-order bound of an IEEE float32 evaluation of a scaled product.

    |computed - exact| <= ((1 + u)**n - 1) * (|alpha| sum_k |a sa| |b sb| + |bias| + |c|),   u = 2**-24,
    n = K + 4, with a summand c one more, with an alpha two

Each term of the sum meets at most ``K - 1`` additions in any order and any grouping, one rounding of the product (none
is needed for FP8 codes), at most three of the scales (``fl(a sa)``, ``fl(b sb)``, or one multiplication of a partial
sum by each scale and by their rounded product), one of the bias and one of ``c``; an alpha is the rounded product of
two factors and multiplies once, at any place. ``(1 + u)**n - 1 <= n u / (1 - n u)``.
For pure summation Jeannerod and Rump give ``(K - 1) u`` without the denominator; the difference is below ``n**2 u**2``.
An underflowing operation adds at most ``eta = 2**-149``, times the magnitude by which it is later multiplied.

Covers dequantise-then-multiply as well as multiply-then-scale, fused multiply-adds, split K and bf16 *outputs*; not
covered: lower-precision partial sums. Evaluated in tiles of rows and columns.
Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 3.1;
Jeannerod and Rump, SIMAX 34(2), 2013.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.bounds.interval import Interval
from oracle.bounds.product import ETA, FLOAT32_MAX, REACH, U, collapsed
from oracle.numbers.formats import Format, decode, of_dtype
from oracle.numbers.rounding import power_of_two
from oracle.truth.gemm import Decoded, ScaledProduct, zero_nonfinite

NAME = "ieee32.any"
TILE, TILE_ON_DEVICE = 1 << 23, 1 << 26
"""Elements of an operand decoded at once: 64 MiB for each float64 temporary, 512 MiB on a device."""


def ieee32_bound(product: ScaledProduct) -> Interval:
    """The interval of ``product`` under float32 arithmetic in any order; float64 ``[M, N]``, symmetric."""
    return _bound(product, None)


def _bound(product: ScaledProduct, sizes: tuple[Tensor, Tensor] | None) -> Interval:
    extremes = _Extremes.of(product)
    step = max(1, (TILE_ON_DEVICE if product.a.is_cuda else TILE) // product.K)
    if max(product.M, product.N) <= step:
        width, open_ = _tile(product, extremes, sizes)
    else:
        width = torch.empty((product.M, product.N), dtype=torch.float64, device=product.a.device)
        open_ = torch.empty((product.M, product.N), dtype=torch.bool, device=product.a.device)
        for n in range(0, product.N, step):
            columns = product.columns(n, min(product.N, n + step))
            for m in range(0, product.M, step):
                tile = columns.rows(m, min(product.M, m + step))
                at = slice(m, m + step), slice(n, n + step)
                part = sizes and (sizes[0][at[0]], sizes[1][at[1]])
                width[at], open_[at] = _tile(tile, extremes, part)
    return Interval(-width, width, "any-order float32 bound", weak=True, open=open_)


def float64_and_bound(product: ScaledProduct) -> tuple[Tensor, Tensor]:
    """A value of ``product`` by one float64 matrix product and half the width of an interval around it that holds every
    float32 arithmetic in any order, by another one; float64 ``[M, N]`` each.

    A code times its float32 scale has at most 48 significant bits, so that the operands are exact in float64, and the
    float64 sum obeys the bound above with ``2**-53`` for ``u``. Its error is below ``2**-28`` of the float32 width,
    which is widened by ``1 + 2**-26``. Where float32 rounds nothing, float64 does not either, and the width is zero;
    that is asked where all scales are powers of two, by a third product. The width is NaN where an intermediate may
    overflow, the value where an operand is NaN or infinite: nothing is claimed there. Source: derived here.
    """
    a, b = _signed(product.left, product, 1), _signed(product.right, product, product.b_rows)
    value = (a @ b.T) * product.factor
    sizes = a.abs_().nan_to_num_(0.0, 0.0, 0.0), b.abs_().nan_to_num_(0.0, 0.0, 0.0)  # NaN and infinities as zeros
    interval = collapsed(product, _bound(product, sizes), None)
    if product.bias is not None:
        value = value + decode(product.bias)[None, :]
    if product.c is not None:
        value = value + decode(product.c)
    assert interval.open is not None  # of this bound
    return value, torch.where(interval.open, torch.nan, interval.hi * (1 + 2.0**-26))


def near(output: Tensor, value: Tensor, width: Tensor) -> Tensor:
    """Whether elements of ``output [M, N]`` (a float dtype) may be a value within ``width`` of ``value``, float64 ``[M,
    N]``, rounded to nearest: ``|out - value| <= width + ulp(out) / 2``. False where one of them is NaN or infinite.

    The half unit is that of the binade of ``out``, also below a power of two. Source: rounding to nearest (IEEE
    754-2019, 4.3).
    """
    y = decode(output)
    return (y - value).abs() <= width + half_unit(y, of_dtype(output.dtype))


def half_unit(y: Tensor, fmt: Format) -> Tensor:
    """Half the unit in the last place of the binade of ``y``, values of ``fmt``, float64 of any shape; NaN where ``y``
    is NaN or infinite. Source: as for :func:`near`."""
    exponent = (torch.frexp(y)[1] - 1).clamp(min=fmt.emin)
    return torch.where(torch.isfinite(y), power_of_two(exponent - fmt.fraction_bits - 1), torch.nan)


@dataclass(frozen=True)
class _Extremes:
    """Largest magnitudes of the whole product, at least 1 each but for the scales; ``vanishing`` says whether float32
    may round a scale, or a product with one, to zero."""

    code: float
    scale: float
    sigma: float
    vanishing: bool

    @classmethod
    def of(cls, product: ScaledProduct) -> _Extremes:
        a, b = product.left.facts, product.right.facts
        (sa, least_sa), (sb, least_sb) = _range(product.left.scales), _range(product.right.scales)
        vanishing = min(least_sa * least_sb, a.least * least_sa, b.least * least_sb) < ETA
        return cls(max(1.0, a.largest) * max(1.0, b.largest), max(1.0, sa, sb), sa * sb, vanishing)


def _tile(
    product: ScaledProduct, extremes: _Extremes, sizes: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Half the width of the interval, and where it is open; ``sizes`` are the magnitudes of both scaled operands."""
    a, b = sizes or (_scaled(product.left, product, 1), _scaled(product.right, product, product.b_rows))
    n = product.K + 4 + (product.c is not None) + (0 if product.alpha is None else 2)
    alpha = abs(product.factor)
    size = (a @ b.T) * alpha * (1 + product.K * 2.0**-52)
    largest = max(1.0, 1.0 / alpha) if alpha else math.inf  # what alpha makes smaller may overflow before
    gamma = n * U / (1 - n * U)
    if product.bias is not None:
        size = size + zero_nonfinite(decode(product.bias)).abs()[None, :]
    if product.c is not None:
        size = size + zero_nonfinite(decode(product.c)).abs()
    absolute = ETA * n * extremes.code * extremes.scale * max(1.0, alpha)
    width = gamma * size * (1 + 2.0**-20) + absolute
    open_ = (size * largest + width >= REACH) | _reached_by_infinity(product, extremes)
    if max(extremes.sigma, extremes.scale * extremes.code * product.K) * max(1.0, alpha) >= FLOAT32_MAX / 2:
        open_ |= _reach(product) * max(1.0, alpha) * (1 + gamma) >= REACH
    return width, open_


def _reach(product: ScaledProduct) -> Tensor:
    """The largest intermediate before the last scale: ``sa sb``, ``a sa``, ``b sb``, a sum with one of its scales."""
    rows = _scaled(product.left, product, 1).amax(dim=1)[:, None]
    columns = _scaled(product.right, product, product.b_rows).amax(dim=1)[None, :]
    a, b = product.left.number().abs(), product.right.number().abs()
    largest = torch.maximum(rows, columns)
    sums = torch.zeros_like(largest)
    for block, k in product.blocks():
        sa = zero_nonfinite(product.left.scales[:, block]).abs()[:, None]
        sb = zero_nonfinite(product.right.scales[:, block]).abs().repeat_interleave(product.b_rows)[None, : product.N]
        largest = torch.maximum(largest, sa * sb)
        sums = sums + torch.maximum(sa, sb) * (a[:, k] @ b[:, k].T)
    return torch.maximum(largest, sums)


def _reached_by_infinity(product: ScaledProduct, extremes: _Extremes) -> Tensor:
    """Elements with an infinite scale: NaN or infinity, depending on whether codes or partial sums meet it; and those
    with an infinite code whose scales float32 may round to zero first."""
    left, right = product.left, product.right
    rows = torch.isinf(left.scales).any(dim=1)[:, None]
    columns = torch.isinf(right.scales).any(dim=1).repeat_interleave(product.b_rows)[None, : product.N]
    if extremes.vanishing and not left.finite:
        rows = rows | torch.isinf(left.value()).any(dim=1)[:, None]
    if extremes.vanishing and not right.finite:
        columns = columns | torch.isinf(right.value()).any(dim=1)[None, :]
    return (rows | columns).expand(product.M, product.N)


def _scaled(x: Decoded, product: ScaledProduct, rows: int) -> Tensor:
    """``|x|`` times the magnitude of its scale, element by element; every scale row serves ``rows`` rows."""
    return _times(x.number(), zero_nonfinite(x.scales), product.block, rows).abs_()


def _signed(x: Decoded, product: ScaledProduct, rows: int) -> Tensor:
    """``x`` times its scale, element by element; every scale row serves ``rows`` rows."""
    return _times(x.value(), x.scales, product.block, rows)


def _times(values: Tensor, scales: Tensor, block: int, rows: int) -> Tensor:
    """``values [R, K]`` times the scales of their blocks, float64, in new memory; none is copied where blocks divide
    both extents. One row of scales serves all rows."""
    (r, k), shared = values.shape, len(scales) == 1
    group = r if shared else rows
    if k % block == 0 and group and r % group == 0:
        tiles = values.reshape(r // group, group, k // block, block)
        return (tiles * scales[:, None, : k // block, None]).view(r, k)
    wide = scales.repeat_interleave(block, dim=1)[:, :k]
    return values * (wide if shared else wide.repeat_interleave(rows, dim=0)[:r])


def _range(scale: Tensor) -> tuple[float, float]:
    """The largest finite magnitude (0 when there is none) and the smallest one that is not zero (infinity)."""
    size = scale.abs()
    return float(zero_nonfinite(size).max()), float(torch.where(size > 0, size, torch.inf).min())
