"""Numbers whose rounding is known from how they were made, and a check that counts the wrong codes.

Between two neighbouring magnitudes ``a < b`` of a format, with ``m = (a + b) / 2``, six positions decide a
rounding: ``a``, just above ``a``, just below ``m``, ``m``, just above ``m``, just below ``b``. "Just" is one
float64 in a plain number and far less in a pair. What each becomes needs no arithmetic: see :data:`STEP`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oracle.numbers.formats import FP32, Format, decode
from oracle.numbers.rounding import Overflow, Rounding

F64 = torch.float64
TINY = 2.0**-1074

# For each of the six positions: is the upper neighbour taken? None: it is where the lower code is odd.
STEP: dict[Rounding, tuple[bool | None, ...]] = {
    Rounding.NEAREST_EVEN: (False, False, False, None, True, True),
    Rounding.NEAREST_AWAY: (False, False, False, True, True, True),
    Rounding.TOWARD_ZERO: (False, False, False, False, False, False),
    Rounding.AWAY: (False, True, True, True, True, True),
}
# The position of each column: of a pair, hi on a, m or b with lo to a side, then hi beside them with lo back.
PLAIN_COLUMNS = [0, 1, 2, 3, 4, 5]
PAIR_COLUMNS = [0, 1, 2, 3, 4, 5, 1, 2, 4, 5]
MIRROR = {Rounding.UP: Rounding.DOWN, Rounding.DOWN: Rounding.UP}


@dataclass(frozen=True)
class Points:
    """Pairs ``hi + lo`` (``lo`` is zero for plain numbers) and the codes they must become."""

    fmt: Format
    hi: Tensor
    lo: Tensor
    expected: Callable[[Rounding, Overflow], Tensor]


def policies(fmt: Format) -> list[Overflow]:
    """The overflow policies a format can hold."""
    possible = {Overflow.SATURATE: True, Overflow.NAN: fmt.has_nan, Overflow.INF: fmt.has_inf}
    return [overflow for overflow, can in possible.items() if can]


def magnitudes(fmt: Format) -> Tensor:
    """All finite magnitudes of a format up to 16 bits; of a wider one its edges, all binades and a sample."""
    if fmt is not FP32:
        return torch.arange(fmt.max_code + 1)
    generator = torch.Generator().manual_seed(5)
    binades = torch.arange(0, 255)[:, None] << fmt.fraction_bits
    edges = torch.tensor([0, 1, 2, 3, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF])
    sample = torch.randint(0, fmt.max_code, (4000,), generator=generator)
    return torch.from_numpy(np.unique(torch.cat([(binades + edges).flatten(), sample]).numpy()))


def _gaps(fmt: Format, *, pairs: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``hi``, ``lo`` (each ``[gaps, columns]``) and the lower magnitudes ``[gaps]``."""
    below = magnitudes(fmt)
    a = decode(below, fmt)
    above_max = fmt.max_finite + 2.0 ** (fmt.emax - fmt.fraction_bits)
    b = torch.where(below == fmt.max_code, above_max, decode((below + 1).clamp(max=fmt.max_code), fmt))
    m = (a + b) / 2
    zero, infinite = torch.zeros_like(a), torch.full_like(a, math.inf)
    steps = [a, a.nextafter(infinite), m.nextafter(zero), m, m.nextafter(infinite), b.nextafter(zero)]
    if not pairs:
        return torch.stack(steps, -1), torch.zeros(len(a), 6, dtype=F64), below
    steps[1] = torch.where(a == 0, 2.0**-900, steps[1])
    hi = torch.stack([steps[0], steps[0], m, m, m, b, *(steps[i] for i in PAIR_COLUMNS[6:])], -1)
    sign = torch.tensor([0, 1, -1, 0, 1, -1, -1, 1, -1, 1], dtype=F64)
    coarse = (below % 2 == 0)[:, None] & (hi > 0)  # every other gap: nearly half an ulp of hi
    return hi, sign * torch.where(coarse, hi * 2.0**-54, 2.0**-1000), below


def points(fmt: Format, *, pairs: bool = False) -> Points:
    """Every gap of the format with its six positions, and numbers beyond both ends, with both signs.

    NaN is left out where the format has none.
    """
    hi, lo, below = _gaps(fmt, pairs=pairs)
    far = torch.tensor([1.5, 2.0, 2.0**500, 2.0**890], dtype=F64) * 2 * fmt.max_finite
    under = torch.tensor([0.0, TINY, 2.0**-1022, 2.0**-300], dtype=F64)
    under = torch.cat([under, torch.tensor([0.25, 0.5, 0.75, 1 - 2.0**-53], dtype=F64) * fmt.min_normal])
    if fmt.has_zero:
        under = under[:0]  # the first gap begins at zero
    special = torch.tensor([math.inf] + [math.nan] * fmt.has_nan, dtype=F64)
    magnitude = torch.cat([hi.flatten(), far, under, special])
    small = torch.cat([lo.flatten(), torch.zeros(len(magnitude) - lo.numel(), dtype=F64)])
    x = torch.cat([magnitude, -magnitude])

    def expected(rounding: Rounding, overflow: Overflow) -> Tensor:
        halves = []
        for negative in (False, True):
            direction = _direction(rounding, negative=negative)
            odd = below % 2 == 1
            taken = [odd if up is None else torch.full_like(odd, up) for up in STEP[direction]]
            step = torch.stack([taken[i] for i in (PAIR_COLUMNS if pairs else PLAIN_COLUMNS)], -1)
            beyond = torch.full_like(far, fmt.max_code + (direction is not Rounding.TOWARD_ZERO)).long()
            codes = torch.cat([(below[:, None] + step).flatten(), beyond, torch.zeros_like(under).long()])
            if direction is Rounding.TOWARD_ZERO:
                codes.clamp_(max=fmt.max_code)
            codes = torch.cat([codes, torch.full_like(special, fmt.max_code + 1).long()])
            halves.append(_finish(codes, magnitude, fmt, overflow, negative=negative))
        return torch.cat(halves)

    return Points(fmt, x, torch.cat([small, -small]), expected)


def _direction(rounding: Rounding, *, negative: bool) -> Rounding:
    towards = MIRROR.get(rounding, rounding) if negative else rounding
    return {Rounding.UP: Rounding.AWAY, Rounding.DOWN: Rounding.TOWARD_ZERO}.get(towards, towards)


def _finish(codes: Tensor, magnitude: Tensor, fmt: Format, overflow: Overflow, *, negative: bool) -> Tensor:
    """Overflow, sign, and the codes that differ from sign and magnitude."""
    over = codes > fmt.max_code
    chosen = {Overflow.SATURATE: fmt.max_code, Overflow.NAN: fmt.nan_code, Overflow.INF: fmt.inf_code}
    limit = chosen[overflow]
    codes = torch.where(over, -1 if limit is None else limit, codes)
    if negative and not fmt.signed:
        codes[magnitude > 0] = fmt.nan_code or -1
    elif negative:
        sign = torch.full_like(codes, fmt.sign_mask)
        sign[(codes == 0) & (not fmt.has_negative_zero)] = 0
        sign[over & (overflow is Overflow.NAN)] = 0
        codes = -codes & fmt.code_mask if fmt.complement else codes | sign
    if fmt.nan_code is not None:
        codes[magnitude.isnan()] = fmt.nan_code
    return codes


def wrong(actual: Tensor, expected: Tensor, fmt: Format) -> Tensor:
    """Where two tensors of codes differ, bit by bit."""
    return (actual.long() & fmt.code_mask).cpu() != expected


def sentence(bad: Tensor, at: Points, actual: Tensor, expected: Tensor) -> str:
    """What is wrong first, for an assertion."""
    if not bool(bad.any()):
        return "nothing is wrong"
    i = int(bad.nonzero()[0])
    got, right = int(actual[i]) & at.fmt.code_mask, int(expected[i])
    first = f"{float(at.hi[i]).hex()} + {float(at.lo[i]).hex()} became {got:#x} instead of {right:#x}"
    return f"{int(bad.sum())} of {len(bad)} codes of {at.fmt} are wrong; first: {first}"
