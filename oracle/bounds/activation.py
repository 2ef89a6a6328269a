"""Which values a device's activation may give: a curve in float32 with its exponential, error function or tanh.

With ``u = 2^-24``, errors before the last rounding, relative to the value unless said otherwise:

    SILU        2^-20, and 2^-22 |alpha x| for negative ``x`` (exponential, its argument, reciprocal); where the
                exponential overflows, the value, below ``128 / alpha * 2^-126``, may be 0
    GELU        1 + erf(z): z errs by 1.5 u of itself, which moves erf by ``0.484 * 1.5 u`` at most; erf by 2 ulps, 2 u,
                or by 20 ulps on a CPU (torch's erf_u20); the sum by u. Together below 24 u, so x/2 times as much, and
                three roundings
    GELU_TANH   1 + tanh(z): z errs by 6 u of itself, which moves tanh by ``0.448 * 6 u`` at most; tanh by 2 ulps, 2 u;
                the sum by u. Together below 8 u = 2^-21, so x/2 times as much, and three roundings
    RELU2       maximum and square of a bfloat16 or float16 value are exact in float32, but for 2^-149 below its range
    SITU        tanh(z): z by 2 u, tanh by 2 ulps, 4 u, factors 2 u; the sigmoid as in SILU, or as (1 + tanh(x/2)) / 2,
                which errs by 4 u of the other factor
    linear      8 u of up: as tanh in SITU

``up + beta`` is rounded to float32, or not at all where it is fused into the product.

A curve falls before its minimum and rises after it, so its interval over an interval is that of the ends and of the
minimum if it lies between. NaN and infinities have no bounds: callers take them out.

Sources: CUDA C Programming Guide, 17.2 (erff and tanhf 2 ulps); Sleef 3 u10 (1 ulp); torch
ATen/cpu/vec erf_u20 (20 ulps; 11 u met on AVX512); :mod:`oracle.truth.routing` for
the exponential. Not covered: ``tanh.approx``.
"""

from __future__ import annotations

import torch

from oracle.bounds.product import U
from oracle.numbers.rounding import f32
from oracle.truth.activation import Curve, Formula, bounded, curved, lowest
from oracle.truth.routing import DEVICE_ERROR, DEVICE_SLOPE, FLUSH, Span

ROUNDED, BY_ERF, BY_TANH, OF_TANH = 4 * U, 24 * U, 8 * U, 8 * U
"""Three roundings of a product; errors of 1 + erf, of 1 + tanh; relative error of a tanh and its factors."""


def curve_span(x: Span, formula: Formula) -> Span:
    """Bounds of a kernel's curve over an interval of float64 ends of any finite values; float64 of that shape."""
    if formula.curve is Curve.RELU2:
        return Span(curved(x.low, formula) - 2.0**-149, curved(x.high, formula) + 2.0**-149)
    ends = [curved(edge, formula) for edge in (x.low, x.high)]
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    place, least = lowest(formula)
    low = torch.where((x.low <= place) & (x.high >= place), torch.full_like(low, least), low)
    far = torch.maximum(x.low.abs(), x.high.abs())
    if formula.curve in (Curve.GELU, Curve.GELU_TANH):
        absolute = far / 2 * (BY_ERF if formula.curve is Curve.GELU else BY_TANH) + FLUSH
        return Span(low - ROUNDED * low.abs() - absolute, high + ROUNDED * high.abs() + absolute)
    alpha = formula.alpha if formula.curve is Curve.SILU else 1.0
    error = DEVICE_ERROR + DEVICE_SLOPE * (-alpha * x.low).clamp(0.0, 128.0)
    absolute = torch.full_like(low, 128 / min(alpha, 1.0) * FLUSH)
    if formula.curve is Curve.SITU:
        error, absolute = error + OF_TANH, absolute + 4 * U * torch.minimum(far, torch.full_like(far, formula.alpha))
    return Span(low - error * low.abs() - absolute, high + error * high.abs() + absolute)


def up_span(x: Span, formula: Formula) -> Span:
    """Bounds of up as it meets the gate, over an interval of float64 ends; float64 of that shape."""
    low, high = bounded(x.low, formula), bounded(x.high, formula)
    if formula.linear:
        low, high = low - OF_TANH * low.abs(), high + OF_TANH * high.abs()
    if formula.beta:
        low, high = low + formula.beta, high + formula.beta
        low, high = torch.minimum(low, f32(low)), torch.maximum(high, f32(high))
    return Span(low, high)


def is_exact(formula: Formula) -> bool:
    """Whether the product of a stored curve and up is exact before it is rounded: up is a stored value."""
    return not formula.beta and not formula.linear


def product_span(left: Span, up: Span, *, exact: bool) -> Span:
    """Bounds of ``left * up`` in float32, float64 ends; ``exact``: it is not rounded before the caller does."""
    corners = torch.stack([a * b for a in (left.low, left.high) for b in (up.low, up.high)])
    low, high = corners.amin(dim=0), corners.amax(dim=0)
    if exact:
        return Span(low, high)
    return Span(low - 2 * U * low.abs() - 2.0**-148, high + 2 * U * high.abs() + 2.0**-148)
