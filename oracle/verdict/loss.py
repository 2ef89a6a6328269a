"""What a quantisation loses, beside whether it is right: a kernel can be right and its recipe bad.

With ``x`` the values to quantise, ``v`` the values of the codes, ``s`` their scales and ``y = s v``, over all finite
elements of ``x``::

    sqnr        10 log10(sum x^2 / sum (y - x)^2)  in dB
    relative    the largest |y - x| / |x| where neither is 0
    saturated   the share of codes of the largest magnitude for an |x| that rounds beyond it
    zeros       the share of elements that are not 0 and whose y is

No verdict depends on these figures. A NaN or an infinity in ``x`` says nothing; one in ``y`` alone is a loss of
everything (``-inf`` dB, infinite relative error). Zeros that stay zeros lose nothing: a tensor of zeros has ``inf`` dB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.numbers.formats import Format


@dataclass(frozen=True)
class Loss:
    """The loss of one quantisation: ``sqnr`` in dB, ``relative`` the largest relative error of an element that is not
    lost to zero, ``saturated`` and ``zeros`` shares of the elements, 0 to 1."""

    sqnr: float
    relative: float
    saturated: float
    zeros: float

    def __str__(self) -> str:
        return (
            f"loss (changes no verdict): SQNR {self.sqnr:.1f} dB, largest relative error {self.relative:.3g}, "
            f"{share(self.saturated)} saturated, {share(self.zeros)} lost to zero"
        )


class Tally:
    """The loss of a tensor, added up part by part."""

    def __init__(self, fmt: Format) -> None:
        self.largest = fmt.max_finite
        self.beyond = fmt.max_finite + math.ldexp(1.0, fmt.emax - fmt.fraction_bits - 1)
        self.elements = self.saturated = self.zeros = 0
        self.signal = self.noise = self.relative = 0.0
        self.broken = False

    def add(self, x: Tensor, value: Tensor, scale: Tensor) -> None:
        """A part: values, those of their codes and their scales, float64 of one shape."""
        finite = torch.isfinite(x)
        if not bool(finite.all()):
            x, value, scale = x[finite], value[finite], scale[finite]
        if not x.numel():
            return
        self.elements += x.numel()
        y = value * scale
        size, error = x.abs(), (y - x).abs_()
        lost, given = y == 0, x != 0
        self.saturated += int(((value.abs() == self.largest) & (size > scale * self.beyond)).sum())
        self.zeros += int((lost & given).sum())
        noise = float(torch.linalg.vector_norm(error)) ** 2
        if not math.isfinite(noise):
            self.broken = True
            return
        self.noise += noise
        self.signal += float(torch.linalg.vector_norm(size)) ** 2
        error.masked_fill_(lost | ~given, 0.0).div_(size)
        self.relative = max(self.relative, float(error.nan_to_num_(0.0).max()))  # 0 / 0

    def loss(self) -> Loss | None:
        """None without any finite element."""
        if not self.elements:
            return None
        saturated, zeros = self.saturated / self.elements, self.zeros / self.elements
        if self.broken:
            return Loss(-math.inf, math.inf, saturated, zeros)
        return Loss(sqnr(self.signal, self.noise), self.relative, saturated, zeros)


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
