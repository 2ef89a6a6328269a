"""RMS norms to FP4: the sum before the norm, every addition rounded on its own, then the norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from tests.support.slow_oracle.fused import row_factor
from tests.support.slow_oracle.numbers import Array, Value, add, encode, multiply, rounded

F32 = "float32"
Inputs = dict[str, Array]
Options = dict[str, object]
Codes = list[int] | list[int | None]


def term(value: Value, factor: Value, dtype: str) -> Value:
    return rounded(rounded(multiply(value, factor), F32), dtype)


def plus(one: Value, other: Value, dtype: str) -> Value:
    return rounded(rounded(add(one, other), F32), dtype)


def of_experts(i: Inputs, o: Options) -> list[list[Value]]:
    """What the active experts gave, one after the other, then the shared ones."""
    shared, dtype = i["x"].rows(), i["x"].dtype
    flat, factors = i["experts"].values(), i["factors"].rows()
    found = []
    for t, row in enumerate(shared):
        sums: list[Value] = [Fraction(0)] * len(row)
        for a, factor in enumerate(factors):
            first = (a * len(shared) + t) * len(row)
            sums = [plus(s, term(flat[first + c], factor[t], dtype), dtype) for c, s in enumerate(sums)]
        found.append([plus(s, x, dtype) for s, x in zip(sums, row, strict=True)])
    return found


def of_slots(i: Inputs, o: Options) -> list[list[Value]]:
    """The rows of a token's slots, then the routed factor, then the shared experts."""
    rows, dtype, width = i["x"].rows(), i["x"].dtype, i["x"].shape[1]
    factor = rounded(Fraction(float(str(o.get("routed_scaling_factor", 1.0)))), F32)
    per, found = i["slots"].shape[1], []
    for t in range(i["slots"].shape[0]):
        sums: list[Value] = [Fraction(0)] * width
        for j in range(per):
            at = i["slots"].codes[t * per + j]
            if at < 0:
                continue
            weight = i["factors"].values()[t * per + j] if "factors" in i else Fraction(1)
            sums = [plus(s, term(x, weight, dtype), dtype) for s, x in zip(sums, rows[at], strict=True)]
        sums = [rounded(rounded(multiply(s, factor), F32), dtype) for s in sums]
        if "shared" in i:
            sums = [plus(s, x, dtype) for s, x in zip(sums, i["shared"].rows()[t], strict=True)]
        found.append(sums)
    return found


def fp4(
    quantised: Callable[[Inputs, Options], dict[str, Codes]],
    *,
    weight_first: bool = True,
    reduced: Callable[[Inputs, Options], list[list[Value]]] = lambda i, o: i["x"].rows(),
) -> Callable[[Inputs, Options], dict[str, Codes]]:
    """Codes and scales of the norm, and the sum and the norm where the routine returns them."""

    def run(i: Inputs, o: Options) -> dict[str, Codes]:
        dtype, rows = i["x"].dtype, reduced(i, o)
        if "residual" in i:
            rows = [
                [plus(a, b, dtype) for a, b in zip(*pair, strict=True)]
                for pair in zip(rows, i["residual"].rows(), strict=True)
            ]
        epsilon, bias = (rounded(Fraction(float(str(o.get(name, 0.0)))), F32) for name in ("epsilon", "weight_bias"))
        assert isinstance(epsilon, Fraction)
        weights = [rounded(add(w, bias), F32) for w in i["weight"].values()]
        held, values = F32 if weight_first else dtype, []
        for row in rows:
            r = row_factor(row, epsilon)
            for z, w in zip(row, weights, strict=True):
                first, second = (w, r) if weight_first else (r, w)
                product = rounded(multiply(z, first), F32)
                product = rounded(product, dtype) if weight_first else product
                value = rounded(rounded(multiply(product, second), F32), held)
                values.append(encode(value, held, negative_zero=_negative(z) != _negative(w)))
        shape = (len(rows), len(weights))
        found = dict(quantised({**i, "x": Array(held, shape, values)}, o))
        if "residual" in i:
            found["residual"] = [encode(z, dtype) for row in rows for z in row]
        return found | ({} if weight_first else {"norm": values})

    return run


def _negative(x: Value) -> bool:
    return not (isinstance(x, float) and math.isnan(x)) and x < 0
