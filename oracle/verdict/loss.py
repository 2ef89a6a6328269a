"""What a quantisation loses, beside whether it is right: a kernel can be right and its recipe bad.

With ``x`` the values to quantise, ``v`` the values of the codes, ``s`` their scales and ``y = s v``, over all finite
elements of ``x``::

    sqnr        10 log10(sum x^2 / sum (y - x)^2)  in dB
    relative    the largest |y - x| / |x| where neither is 0
    saturated   the share of codes of the largest magnitude for an |x| that rounds beyond it
    zeros       the share of elements that are not 0 and whose y is

No verdict depends on these figures, and none is computed before it is read. A NaN or an infinity in ``x`` says
nothing; one in ``y`` alone is a loss of everything (``-inf`` dB, infinite relative error). Zeros that stay zeros lose
nothing: a tensor of zeros has ``inf`` dB.

Source: the definition of the signal-to-quantisation-noise ratio, here written out.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.numbers.formats import Format


@dataclass(frozen=True)
class Loss:
    """The loss of one quantisation.

    ``sqnr`` in dB, infinite where nothing is lost; ``relative``, the largest relative error of an element that is not
    lost to zero; ``saturated`` and ``zeros``, the shares of the elements, 0 to 1, that are cut to the largest code and
    that are lost to zero. NaN and infinities among what is quantised count nowhere.
    """

    sqnr: float
    relative: float
    saturated: float
    zeros: float

    def __str__(self) -> str:
        return (
            f"loss (changes no verdict): SQNR {self.sqnr:.1f} dB, largest relative error {self.relative:.3g}, "
            f"{share(self.saturated)} saturated, {share(self.zeros)} lost to zero"
        )


COMPILED = 1 << 20  # elements above which a compiled pass gains more than its start takes
SMALL = 2.0**-200  # scales from which squares of errors and of values stay far inside float64


class Tally:
    """Error and loss of a tensor, added up part by part.

    ``ulps``: the largest error in ulps of a code, at ``x / s`` or at the largest code where that is beyond it. It and
    ``error_sqnr`` leave out elements whose scale is 0.
    """

    def __init__(self, fmt: Format) -> None:
        self.fmt = fmt
        self.beyond = fmt.max_finite + math.ldexp(1.0, fmt.emax - fmt.fraction_bits - 1)
        self.elements = self.scaled = self.saturated = self.zeros = 0
        self.signal = self.noise = self.under_zero = self.ulps = self.relative = 0.0
        self.broken = self.coded = False

    def add_rows(self, x: Tensor, codes: Tensor, scale: Tensor, value: Tensor) -> bool:
        """Rows of a matrix by a compiled pass: ``x [R, C]`` of its dtype, ``codes [R, C]`` as uint8, float64
        ``scale [R, G]`` of ``C / G`` elements each, and ``value [256]`` of all codes. False, and nothing is added,
        where the pass is not for these rows: few elements, another device, groups of no multiple of 16, something that
        is NaN or infinite, or no numba."""
        columns, across = x.shape[1], scale.shape[1]
        if x.numel() <= COMPILED or x.device.type != "cpu" or columns % across:
            return False
        if not bool(((scale >= SMALL) & (scale <= 1 / SMALL)).all()):
            return False
        if importlib.util.find_spec("numba") is None:
            return False
        from oracle.verdict.loss_jit import WIDTH, figures  # numba takes a third of a second to import

        if columns // across % WIDTH:
            return False
        rows, own, scales, values = (t.contiguous().numpy() for t in (x.to(torch.float32), codes, scale, value))
        top, least, unit = self.fmt.max_finite, self.fmt.min_normal, math.ldexp(1.0, self.fmt.fraction_bits)
        signal, noise, ulps, relative, *counts = figures(
            rows, own, scales, values, top, self.beyond, least, self.ulps / unit, self.relative
        )
        if not math.isfinite(signal + noise):
            return False
        self.elements, self.scaled = self.elements + x.numel(), self.scaled + x.numel()
        self.signal, self.noise = self.signal + signal, self.noise + noise
        self.ulps, self.relative = ulps * unit, relative
        self.saturated, self.zeros = self.saturated + counts[0], self.zeros + counts[1]
        return True

    def add(self, x: Tensor, value: Tensor, scale: Tensor) -> None:
        """A part: values ``x``, ``value`` those of their codes, ``scale`` their scales, float64 of one shape.

        NaN and infinity are counted as the module says."""
        # a norm is not finite where an element is not, and reads the elements three times faster than isfinite
        norms = (float(torch.linalg.vector_norm(t)) for t in (x, value, scale))
        if all(map(math.isfinite, norms)) and bool(scale.min() > 0):
            self._scaled(x, value, scale)
            return
        finite = torch.isfinite(x)
        coded = torch.isfinite(value)
        known = finite & torch.isfinite(scale)
        regular, empty = known & coded & (scale > 0), known & coded & (scale <= 0)
        self.coded |= bool((known & ~coded & (scale > 0)).any())
        self.broken |= bool((finite & ~(regular | empty)).any())
        self.elements += int((finite & ~regular).sum())
        self._scaled(x[regular], value[regular], scale[regular])
        x, value = x[empty], value[empty]
        self.under_zero += float(torch.linalg.vector_norm(x)) ** 2 if x.numel() else 0.0
        self.zeros += int((x != 0).sum())
        self.saturated += int(((value.abs() == self.fmt.max_finite) & (x != 0)).sum())

    def _scaled(self, x: Tensor, value: Tensor, scale: Tensor) -> None:
        """Finite elements under finite scales above 0."""
        if not x.numel():
            return
        self.elements, self.scaled = self.elements + x.numel(), self.scaled + x.numel()
        due = x / scale
        error, size = (value - due).abs_(), due.abs_()
        self.signal += float(torch.linalg.vector_norm(x)) ** 2
        self.noise += float(torch.linalg.vector_norm(error * scale)) ** 2
        over = size > self.beyond
        if bool(over.any()):
            self.saturated += int((over & (value.abs() == self.fmt.max_finite)).sum())
        lost = value == 0
        zeros = int(torch.count_nonzero(lost))
        unit = size.clamp(max=self.fmt.max_finite).view(torch.int64).bitwise_and_(POWER).view(torch.float64)
        unit.clamp_(min=self.fmt.min_normal)
        self.ulps = max(self.ulps, math.ldexp(float(torch.div(error, unit, out=unit).max()), self.fmt.fraction_bits))
        relative = error.div_(size)
        if zeros:
            self.zeros += int(torch.count_nonzero(lost & (size != 0)))
            relative.masked_fill_(lost, 0.0)
        most = float(relative.max())
        if math.isinf(most):  # a zero that got a value
            most = float(relative.masked_fill_(size == 0, 0.0).max())
        self.relative = max(self.relative, most)

    def error(self) -> tuple[float, float] | None:
        """The largest error in ulps and the SQNR in dB; None without an element under a scale above 0."""
        if self.coded:
            return math.inf, -math.inf
        return (self.ulps, sqnr(self.signal, self.noise)) if self.scaled else None

    def loss(self) -> Loss | None:
        """None without any finite element."""
        if not self.elements:
            return None
        saturated, zeros = self.saturated / self.elements, self.zeros / self.elements
        if self.broken:
            return Loss(-math.inf, math.inf, saturated, zeros)
        signal, noise = self.signal + self.under_zero, self.noise + self.under_zero
        return Loss(sqnr(signal, noise), self.relative, saturated, zeros)


POWER = 0x7FF0_0000_0000_0000  # of a float64 the exponent, which alone is the power of two below it


def sqnr(signal: float, noise: float) -> float:
    """``10 log10(signal / noise)`` of two energies, to a thousandth: infinite without noise, -infinity without signal.

    A thousandth of a decibel is far above what the order of the float64 sums of the energies can change.
    """
    if noise == 0.0:
        return math.inf
    return round(10.0 * math.log10(signal / noise), 3) if signal else -math.inf


def share(part: float) -> str:
    """A share in percent, of three digits."""
    return f"{100 * part:.3g}%"
