"""The figures of :mod:`oracle.verdict.loss` of many elements in one compiled pass on the CPU.

Of 16 elements at a time, whose scale is one, it adds up the energies and asks whether any could change another figure:
an element that does is rare, and only then are the divisions made that say by how much. Sums are added in an order of
the compiler's, which a thousandth of a decibel does not show; everything else is what the plain definition gives.

Not covered: values, codes or scales that are not finite, scales of 0 (one of the sums is then not finite, or the
caller looks).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba.core import types
from numba.extending import intrinsic

from oracle.tensorcore.cpu_jit import jit

WIDTH = 16  # elements that are taken at a time, of one scale
POWER = np.int64(0x7FF0_0000_0000_0000)  # of a float64 the exponent, which alone is the power of two below it
BELOW = 1.0 - 2.0**-50  # takes a product by a rounded inverse below the quotient, hence no power of two is too large


def _power(typing_context: Any, x: Any, mask: Any) -> Any:
    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], context.get_value_type(types.int64))
        return builder.bitcast(builder.and_(bits, arguments[1]), context.get_value_type(types.float64))

    return types.float64(types.float64, types.int64), lower


masked = intrinsic(_power)


@partial(jit, fastmath={"reassoc"})
def figures(
    x: Any, codes: Any, scale: Any, values: Any, top: float, beyond: float, least: float, ulps: float, relative: float
) -> tuple[float, float, float, float, int, int]:
    """``signal, noise, ulps, relative, saturated, zeros`` of rows: the largest so far of ``ulps`` (of the spacing's
    power of two) and ``relative`` are given, the rest is of these rows alone.

    Parameters
    ----------
    x : float32 ``[R, C]``, codes : uint8 ``[R, C]``, scale : float64 ``[R, G]``, ``C / G`` a multiple of 16
    values : float64, of every code
    top, beyond, least : the largest value, what rounds to the one after it, the smallest normal one
    """
    signal, noise = 0.0, 0.0
    saturated: Any = 0
    zeros: Any = 0
    across = scale.shape[1]
    pieces = x.shape[1] // across // WIDTH
    for i in range(x.shape[0]):
        for g in range(across):
            s = scale[i, g]
            inverse, limit = BELOW / s, beyond * s
            for piece in range(pieces):
                first = (g * pieces + piece) * WIDTH
                row, own = x[i, first : first + WIDTH], codes[i, first : first + WIDTH]
                unit_of_most = ulps * s
                odd = 0
                for j in range(WIDTH):
                    value, due = values[own[j]], np.float64(row[j])
                    error = value * s - due
                    signal += due * due
                    noise += error * error
                    error, size = abs(error), abs(due)
                    quotient = size * inverse
                    unit = masked(quotient if quotient < top else top, POWER)
                    unit = unit if unit > least else least
                    lost = value == 0.0
                    zeros += int(lost & (size > 0.0))
                    larger = (error > relative * size) & (not lost)
                    odd += int(larger | (error > unit_of_most * unit) | (size > limit))
                if odd:
                    for j in range(WIDTH):
                        value, due = values[own[j]], np.float64(row[j])
                        error, size = abs(value * s - due), abs(due)
                        saturated += int((size > limit) & (abs(value) == top))
                        if value != 0.0 and due != 0.0 and error / size > relative:
                            relative = error / size
                        quotient = size / s
                        unit = masked(quotient if quotient < top else top, POWER)
                        unit = unit if unit > least else least
                        if error / (s * unit) > ulps:
                            ulps = error / (s * unit)
    return signal, noise, ulps, relative, saturated, zeros
