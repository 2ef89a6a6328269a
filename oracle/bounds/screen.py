"""Which elements of an output no float32 arithmetic in any order can have given, mostly by one float64 matrix product.

The half width of the interval (:mod:`oracle.bounds.ieee32`) grows with ``S = sum_k |a sa| |b sb|``, a matrix product of
its own. It is computed where it decides something, ``v`` the float64 product and ``half`` half a unit of the output:

    |out - v| <= half + gamma S'        inside: S' is S over the first eighth of K, which is no larger
    |out - v| >  half + w               outside, w the half width of this element alone, from its row and its column

Of what the first line leaves every element is asked by the second one where they are as few as rows and columns
together, so that what is gathered is not larger than the operands. Of more, the worst element of each row is asked, and
one that is outside refuses the output; only where none is does the whole of ``S`` decide.

A truncating accumulator errs by more than float32. Let a chain of ``L`` products have the magnitudes ``T``, ``n`` steps
of ``g`` products, aligned to ``t`` bits with a result of ``to``. Its accumulator is never larger than ``T``, so a step
errs by at most ``(g + 1) 2**-t max(T, 2**m) + 2**-to T``, ``m`` the largest nominal exponent of its products. That of a
product with a subnormal exceeds its magnitude, and it is at least -126, so that ``2**m <= T + d``,
``d = 2**emin_a |b|max + 2**emin_b |a|max + 2**-126``. With the roundings of float32 the error of the whole is at most

    (n ((g + 1) 2**-t + 2**-to + 2 u) + gamma) (1 + gamma) (S + sigma C d),       C chains, sigma the largest scales

This is wide, but costs nothing (:meth:`Screen.reach`): what lies beyond needs no interval of its class.

On a GPU the scaled operands, the comparison of an output of 16 bits, and the sums of single elements are one pass each
over what they read, by Triton (:mod:`oracle.bounds.triton_screen`); elsewhere they are operations of torch, with the
same numbers but for the order of a sum, of which the factor ``1 + K 2**-51`` takes account.

Source: :mod:`oracle.bounds.ieee32`, :mod:`oracle.bounds.chain` (L1 to L3), :mod:`oracle.bounds.product`; derived here.
Not covered: operands or results that are NaN or infinite, sums that may overflow, a summand in bfloat16, and elements
that float32 does not round where all scales are powers of two: :func:`Screen.of` gives None, or they are left to the
whole interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from oracle.bounds import triton_sums
from oracle.bounds.accumulator import Accumulator
from oracle.bounds.ieee32 import float64_and_bound, half_unit
from oracle.bounds.product import ETA, REACH, U
from oracle.numbers.formats import Format, codes_of, decode, from_codes, of_dtype
from oracle.tensorcore.instructions import Sum
from oracle.truth.gemm import Decoded, ScaledProduct, scaled_side

SHARE = 8
"""Of K the part whose magnitudes are summed for the lower bound: an eighth of a product, an eighth of the width."""
GATHERED = 1 << 25  # elements of one operand gathered at a time: 256 MiB
LANES = 1024  # elements of a program
INTERPRETED = 64
"""The most elements for which Triton's interpreter is taken on a CPU; of more, operations of torch are faster."""


@dataclass(frozen=True)
class Outside:
    """Elements ``[P]`` of an output that float32 in any order cannot have given: ``rows`` and ``columns`` (int64), by
    how much more than half a unit each misses the value (``excess``; NaN where the element is NaN or infinite), and the
    magnitudes of its terms (``size``), float64.

    They are some of those elements, not always all; the worst one, by ``excess / size``, comes first.
    """

    rows: Tensor
    columns: Tensor
    excess: Tensor
    size: Tensor


Size = TypeVar("Size", float, Tensor)


class Screen:
    """Made by :meth:`of`; asked of many outputs of one product, from any thread."""

    def __init__(self, product: ScaledProduct, value: Tensor, least: Tensor, scale: float) -> None:
        self._product, self._value, self._least, self._scale = product, value, least, scale

    @classmethod
    def of(cls, product: ScaledProduct) -> Screen | None:
        """The screen of a product; None where one of its values is NaN or infinite, where a float32 intermediate may
        overflow, where a summand is bfloat16, and where float32 may round nothing."""
        summands = [decode(x).abs() for x in (product.bias, product.c) if x is not None and x.numel()]
        if product.M * product.N * product.K == 0 or (product.c is not None and product.c.dtype is torch.bfloat16):
            return None
        alpha, left, right = abs(product.factor), product.left, product.right
        (sa, sb), powers = _of_scales(left, right)
        codes = _largest(left) * _largest(right)
        ends = max(1.0, alpha, 1.0 / alpha if alpha else math.inf)
        most = max(1.0, codes) * product.K * max(1.0, sa) * max(1.0, sb) * ends + sum(float(x.max()) for x in summands)
        if not most < REACH / 2:
            return None
        a, b = _scaled(product, left, 1), _scaled(product, right, product.b_rows)
        value = a @ b.T
        if product.alpha is not None:
            value *= product.factor
        for summand in (product.bias, product.c):
            if summand is not None:
                value += decode(summand)
        k = max(1, product.K // SHARE)
        size = a[:, :k].abs() @ b[:, :k].abs().T
        if not math.isfinite(float(value.sum())):  # asked now: a device is busy with the sums meanwhile
            return None
        each = alpha * (1 - product.K * 2.0**-51)
        if powers:
            rounded = 2.0**24 * left.facts.quantum * right.facts.quantum * sa * sb * alpha
            if not bool((size * each >= rounded).all()):
                return None
        return cls(product, value, size.mul_(each * _gamma(product)), sa * sb * alpha)

    def outside(self, output: Tensor) -> Outside | None:
        """Elements of ``output [M, N]`` (a float dtype) that are outside of the interval, such as NaN and infinities;
        None where all are inside."""
        left, count, worst = self._left(output)
        if not count:
            return None
        most = self._product.M + self._product.N
        if count <= most:
            rows, columns = torch.nonzero(left).T
        else:
            rows, columns = torch.arange(len(worst), device=output.device), worst
        found = self._outside(rows, columns, output)
        if found is None and count > most:
            excess = _excess(output, self._value)
            bad = torch.nonzero(~(excess <= self._widths * (1 + 2.0**-18)))  # and so outside by their own widths too
            rows, columns = bad[:most].T
            found = self._outside(rows, columns, output) if len(bad) else None
        return found

    def _left(self, output: Tensor) -> tuple[Tensor, int, Tensor]:
        """Where the first line of the module leaves an element, bool ``[M, N]``, how many these are, and in each row
        the column of the worst one (int64; for few none need be told)."""
        fmt, (rows, columns) = of_dtype(output.dtype), output.shape
        if (kernels := _kernels(output)) is not None and fmt.bits == 16:
            values, halves = _values_and_half_units(fmt, output.device)
            left = torch.empty(output.shape, dtype=torch.bool, device=output.device)
            counts = torch.empty(rows, dtype=torch.int32, device=output.device)
            worst = torch.empty(rows, dtype=torch.int64, device=output.device)
            codes = codes_of(output.contiguous())
            seen = left.view(torch.int8)
            kernels.beyond[(rows,)](
                codes, values, halves, self._value, self._least, seen, counts, worst, columns, BLOCK=LANES
            )
            return left, int(counts.sum()), worst
        excess = _excess(output, self._value)
        left = ~(excess <= self._least)
        if (count := int(left.sum())) <= rows + columns:
            return left, count, torch.empty(0, dtype=torch.int64, device=output.device)
        ratio = torch.where(left, (excess / self._least).nan_to_num_(torch.inf, torch.inf), -1.0)
        return left, count, ratio.argmax(dim=1)

    def reach(self, size: Size, acc: Accumulator) -> Size:
        """How far a result of ``acc`` lies at most from the value, for elements whose terms have the magnitudes
        ``size`` (a number, or float64 of any shape); infinite for an accumulator that the module's text does not
        bound."""
        p = self._product
        known = acc.kind in (Sum.FUSED, Sum.FUSED_THEN_ADD) and not (acc.scales_inside or acc.flushes or acc.truncates)
        if not known or acc.dequantised is not None or acc.promotion is None:  # no chain is known where K may be cut
            return size + math.inf
        length = min(acc.promotion, p.block, p.K)
        steps = -(-length // acc.length) * -(-acc.length // acc.group)
        each = steps * ((acc.group + 1) * 2.0**-acc.align + 2.0**-acc.out + 2 * U) + _gamma(p)
        d = 2.0**p.left.fmt.emin * _largest(p.right) + 2.0**p.right.fmt.emin * _largest(p.left) + 2.0**-126
        more = self._scale * (-(-p.block // length) * p.B) * d
        return each * (1 + _gamma(p)) * (size + more) + self._absolute

    @cached_property
    def _widths(self) -> Tensor:
        return float64_and_bound(self._product)[1]

    @cached_property
    def _absolute(self) -> float:
        """What operations that underflow add, for the largest codes of the formats and the largest scales."""
        p = self._product
        codes = max(1.0, _largest(p.left)) * max(1.0, _largest(p.right))
        scales = max(1.0, float(p.left.scales.abs().max()), float(p.right.scales.abs().max()))
        return ETA * _terms(p) * codes * scales * max(1.0, abs(p.factor))

    def _outside(self, rows: Tensor, columns: Tensor, output: Tensor) -> Outside | None:
        size, over = self._size(rows, columns), _excess(output[rows, columns], self._value[rows, columns])
        at = torch.nonzero(~(over <= _gamma(self._product) * size * (1 + 2.0**-19) + self._absolute))[:, 0]
        if not len(at):
            return None
        if len(rows) == 1:
            return Outside(rows, columns, over, size)
        ratio = (over[at] / size[at]).nan_to_num_(torch.inf, torch.inf)
        at = at[torch.argsort(ratio, descending=True)]
        return Outside(rows[at], columns[at], over[at], size[at])

    def _size(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The magnitudes of the terms of some elements, float64 ``[P]``."""
        product = self._product
        size = self._terms_of(rows, columns).mul_(abs(product.factor) * (1 + product.K * 2.0**-51))
        if product.bias is not None:
            size += decode(product.bias)[columns].abs()
        if product.c is not None:
            size += decode(product.c)[rows, columns].abs()
        return size

    def _terms_of(self, rows: Tensor, columns: Tensor) -> Tensor:
        """``sum_k |a sa| |b sb|`` of some elements, float64 ``[P]``."""
        product = self._product
        tables = [_table(x) for x in (product.left, product.right)]
        if (kernels := _kernels(rows)) is not None and all(table is not None for table in tables):
            (a, a_scales, *of_a), (b, b_scales, *of_b) = (
                _memory(product.left, 1),
                _memory(product.right, product.b_rows),
            )
            out = torch.empty(len(rows), dtype=torch.float64, device=rows.device)
            extents = of_a[0], of_b[0], product.K, product.B, product.block, of_a[1], of_b[1]
            operands = a, b, *tables, a_scales, b_scales, rows.contiguous(), columns.contiguous()
            kernels.sizes[(len(rows),)](*operands, out, *extents, BLOCK=LANES)
            return out
        parts, step = [], max(1, GATHERED // product.K)
        for m, n in zip(torch.split(rows, step), torch.split(columns, step), strict=True):
            few = product.take(m).left, product.take_columns(n).right
            left, right = (scaled_side(product, x) for x in few)
            parts.append(left.mul_(right).abs_().sum(dim=1))
        return torch.cat(parts)


def _kernels(x: Tensor) -> Any:
    """The kernels, where Triton runs on the memory of ``x`` and is the faster way; else None."""
    if not triton_sums.runs_on(x.device) or (x.device.type == "cpu" and x.numel() > INTERPRETED):
        return None
    from oracle.bounds import triton_screen  # triton is optional

    return triton_screen


def _table(side: Decoded) -> Tensor | None:
    """The values of all codes of an operand of 8 bits, float64 ``[256]``; None of another."""
    known = side.fmt.bits == 8 and side.fmt.torch_dtype is not None
    return _values_and_half_units(side.fmt, side.codes.device)[0] if known else None


def _memory(side: Decoded, rows: int) -> tuple[Tensor, Tensor, int, int]:
    """The bytes of an operand of 8 bits, its scales, the pitch of its rows, and how many of them a scale serves."""
    codes = side.codes if side.codes.stride(1) == 1 else side.codes.contiguous()
    shared = max(1, len(side.codes)) if len(side.scales) == 1 else rows
    return codes_of(codes), side.scales.contiguous(), codes.stride(0), shared


def _scaled(product: ScaledProduct, side: Decoded, rows: int) -> Tensor:
    """An operand times its scales, of which each serves so many ``rows``; float64 ``[R, K]``."""
    kernels, table = _kernels(side.codes), _table(side)
    if kernels is None or table is None:
        return scaled_side(product, side, rows)
    codes, scales, pitch, shared = _memory(side, rows)
    out = torch.empty(side.codes.shape, dtype=torch.float64, device=side.codes.device)
    grid = (-(-product.K // LANES), len(out))
    kernels.scaled[grid](codes, table, scales, out, pitch, product.K, product.B, product.block, shared, BLOCK=LANES)
    return out


def _terms(product: ScaledProduct) -> int:
    """``n`` of :mod:`oracle.bounds.ieee32`."""
    return product.K + 4 + (product.c is not None) + (0 if product.alpha is None else 2)


def _gamma(product: ScaledProduct) -> float:
    return _terms(product) * U / (1 - _terms(product) * U)


def _excess(output: Tensor, value: Tensor) -> Tensor:
    """``|out - value| - ulp(out) / 2``, float64 of the shape of both; NaN where ``output`` is NaN or infinite."""
    fmt = of_dtype(output.dtype)
    if fmt.bits > 16:
        y = decode(output)
        return (y - value).abs_().sub_(half_unit(y, fmt))
    tables = _values_and_half_units(fmt, output.device)
    codes = codes_of(output).reshape(-1).int().bitwise_and_(fmt.code_mask)
    y, half = (table.index_select(0, codes).view(output.shape) for table in tables)
    return y.sub_(value).abs_().sub_(half)


@lru_cache(maxsize=16)
def _values_and_half_units(fmt: Format, device: torch.device) -> tuple[Tensor, Tensor]:
    """The value and half the unit of every code, float64; NaN for codes of no number."""
    y = decode(from_codes(torch.arange(fmt.code_mask + 1, device=device), fmt))
    return y, half_unit(y, fmt)


def _of_scales(left: Decoded, right: Decoded) -> tuple[tuple[float, float], bool]:
    """The largest scale of each operand, and whether all scales are powers of two; a device is waited for once."""
    sides = [x.scales.abs() for x in (left, right)]
    powers = [(torch.frexp(x)[0] == 0.5).all().double() for x in sides]
    a, b, *both = torch.stack([*(x.max() for x in sides), *powers]).tolist()
    return (a, b), all(both)


def _largest(x: Decoded) -> float:
    """A magnitude that no finite code exceeds: of 8 bits and fewer that of the format, without a look at the data."""
    return x.fmt.max_finite if x.fmt.bits <= 8 else x.facts.largest
