"""Activations a second time: every curve between two fractions, every rounding on its own.

``ROWS`` says what each library does, read off its source: which curve, how a row is split, what is clamped, added and
rounded. The error function is its alternating series, tanh a sigmoid. None where a special value leaves it open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from tests.support.slow_oracle.numbers import Array, Value, decided, encode, multiply, rounded, sigmoid_bounds

F32 = "float32"
Bounds = tuple[Fraction, Fraction]
PI = Fraction(3141592653589793238462643383279502884197169399375105820974944592, 10**63)
ROOT = 10**60
# sqrt(pi), sqrt(1/2), sqrt(2/pi), each a fraction below and one above
ROOT_PI, HALF_ROOT, CURVED = (
    (Fraction(math.isqrt(int(x * ROOT**2)), ROOT), Fraction(math.isqrt(int(x * ROOT**2)) + 1, ROOT))
    for x in (PI, Fraction(1, 2), 2 / PI)
)
TAIL = Fraction(1, 2**280)


@dataclass(frozen=True)
class Row:
    curve: str
    split: str = "halves"
    each: bool = False
    narrow: bool = False
    late: bool = False
    options: tuple[tuple[str, str, float], ...] = ()
    alpha: float = 1.0
    beta: float = 0.0


ROWS = {
    "silu_and_mul_with_clamp": Row(
        "silu",
        each=True,
        narrow=True,
        options=(("limit", "limit", 7.0), ("alpha", "alpha", 1.0), ("beta", "beta", 0.0)),
    ),
    "swigluoai_and_mul": Row(
        "silu", "pairs", options=(("limit", "limit", 7.0), ("alpha", "alpha", 1.702)), alpha=1.702, beta=1.0
    ),
    "swiglu_limit_func": Row("silu", options=(("limit", "swiglu_limit", 0.0),)),
    "swiglustep_and_mul": Row("silu", late=True, options=(("limit", "limit", 7.0),)),
    "situ_and_mul": Row("situ", options=(("alpha", "beta", 4.0), ("linear", "linear_beta", 25.0))),
    "mul_and_silu": Row("silu", "backwards", each=True),
    "gelu_and_mul": Row("gelu", each=True),
    "gelu_tanh_and_mul": Row("gelu_tanh", each=True),
    "silu_no_mul": Row("silu", "whole"),
    "gelu_no_mul": Row("gelu", "whole"),
    "gelu_tanh_no_mul": Row("gelu_tanh", "whole"),
    "relu2_no_mul": Row("relu2", "whole"),
}


def product(*factors: Bounds) -> Bounds:
    """Bounds of a product."""
    low, high = Fraction(1), Fraction(1)
    for a, b in factors:
        ends = [x * y for x in (low, high) for y in (a, b)]
        low, high = min(ends), max(ends)
    return low, high


def exactly(x: Fraction) -> Bounds:
    return x, x


def tanh(z: Bounds) -> Bounds:
    """``2 sigmoid(2 z) - 1``, whose distance from 1 is nothing far out."""
    ends = []
    for x, side in zip(z, (0, 1), strict=True):
        if abs(x) > 200:
            ends.append((1 if x > 0 else -1) * (1 - (TAIL, TAIL**9)[side if x > 0 else 1 - side]))
        else:
            ends.append(2 * sigmoid_bounds(2 * x)[side] - 1)
    return min(ends), max(ends)


def erf(x: Fraction) -> Bounds:
    """The alternating series of ``x / sqrt(2)``, after its largest term; 1 within 2^-280 beyond 20."""
    if abs(x) > 20:
        return (1 - TAIL, 1 - TAIL**9) if x > 0 else (TAIL**9 - 1, TAIL - 1)
    square, total, term, n = x * x / 2, Fraction(0), Fraction(1), 0
    while True:
        added = term / (2 * n + 1)
        total += added if n % 2 == 0 else -added
        n += 1
        term = term * square / n
        if n > square and term < Fraction(1, 2**420):
            break
    series = (total - term, total + term)
    return product(exactly(2 * x), HALF_ROOT, series, (1 / ROOT_PI[1], 1 / ROOT_PI[0]))


def curved(g: Fraction, row: Row, alpha: Fraction) -> Bounds:
    """The curve of a gate between two fractions."""
    if row.curve == "relu2":
        return exactly(max(g, Fraction(0)) ** 2)
    if row.curve == "gelu":
        low, high = erf(g)
        return product(exactly(g / 2), (1 + low, 1 + high))
    if row.curve == "gelu_tanh":
        low, high = tanh(product(CURVED, exactly(g + Fraction(44715, 10**6) * g**3)))
        return product(exactly(g / 2), (1 + low, 1 + high))
    if row.curve == "situ":
        return product(exactly(alpha), tanh(exactly(g / alpha)), squashed(g))
    return product(exactly(g), squashed(alpha * g))


def squashed(x: Fraction) -> Bounds:
    if abs(x) > 200:
        return (1 - TAIL, Fraction(1)) if x > 0 else (Fraction(0), TAIL)
    return sigmoid_bounds(x)


def one(g: Value, u: Value, row: Row, given: dict[str, Fraction], dtype: str) -> int | None:
    """The code of one element."""
    limit = given.get("limit") or None
    if not (isinstance(g, Fraction) and isinstance(u, Fraction)):
        return special(g, u, row, limit is not None, dtype)
    if limit is not None:
        g = g if row.late else min(g, limit)
        g = rounded(g, dtype) if row.narrow else g
        u = min(max(u, -limit), limit)
        assert isinstance(g, Fraction)
    left = curved(g, row, given.get("alpha", Fraction(row.alpha)))
    if limit is not None and row.late:
        left = (min(left[0], limit), min(left[1], limit))
    if row.each:
        code = decided(*left, dtype)
        value = Array(dtype, (1,), [code]).values()[0]
        if not isinstance(value, Fraction):
            return encode(multiply(value, u), dtype)
        left = exactly(value)
    if row.split == "whole":
        return decided(*left, dtype)
    linear = given.get("linear", Fraction(0))
    right = product(exactly(linear), tanh(exactly(u / linear))) if linear > 0 else exactly(u)
    beta = given.get("beta", Fraction(row.beta))
    if beta:
        total = rounded(right[0] + beta, F32)
        assert isinstance(total, Fraction) and right[0] == right[1]
        right = exactly(total)
    return decided(*product(left, right), dtype)


def special(g: Value, u: Value, row: Row, clamped: bool, dtype: str) -> int | None:
    """NaN in, NaN out, without a clamp; of infinities what no device can say otherwise."""
    if clamped or row.curve == "situ":
        return None
    if any(isinstance(v, float) and math.isnan(v) for v in (g, u)):
        return encode(math.nan, dtype)
    if row.curve == "relu2":
        return encode(math.inf if g == math.inf else Fraction(0), dtype)
    if g != math.inf:
        return None
    return encode(g, dtype) if row.split == "whole" else encode(multiply(g, u), dtype)


def activation(name: str, inputs: dict[str, Array], options: dict[str, object]) -> list[int | None]:
    """The outputs of a row's routine."""
    row, x, found = ROWS[name], inputs["x"], list[int | None]()
    given = {}
    for of, option, default in row.options:
        value = rounded(Fraction(float(str(options.get(option, default)))), F32)
        assert isinstance(value, Fraction)
        given[of] = value
    ids = inputs["topk_ids"].codes if "topk_ids" in inputs else [0] * len(x.rows())
    known = inputs["expert_map"].codes if "expert_map" in inputs else None
    for values, expert in zip(x.rows(), ids, strict=True):
        half = len(values) // 2
        pairs = {
            "halves": list(zip(values[:half], values[half:], strict=False)),
            "backwards": list(zip(values[half:], values[:half], strict=False)),
            "pairs": list(zip(values[::2], values[1::2], strict=False)),
            "whole": [(v, Fraction(1)) for v in values],
        }[row.split]
        absent = expert < 0 or (known is not None and known[expert] < 0)
        found += [None if absent else one(g, u, row, given, x.dtype) for g, u in pairs]
    return found
