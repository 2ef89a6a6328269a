"""Int8 a second time: fractions and integers, every float32 operation on its own.

None where a formula in use gives another code, or nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from tests.support.slow_oracle.numbers import Array, Value, add, encode, rounded

F32 = "float32"
Codes = list[int | None]


def number(x: Value) -> Fraction:
    found = rounded(x, F32)
    assert isinstance(found, Fraction)
    return found


def whole(x: Fraction, rule: str) -> int:
    """An integer by a rule: to nearest with ties to even or away from zero, or toward zero."""
    size = abs(x)
    down = size.numerator // size.denominator
    rest = size - down
    if rule == "zero":
        up = False
    elif rule == "away":
        up = rest >= Fraction(1, 2)
    else:
        up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and down % 2 == 1)
    return (down + up) * (-1 if x < 0 else 1)


def clamp(x: int) -> int:
    return max(-128, min(127, x))


def coded(x: Fraction, scale: Fraction, other: Fraction, rule: str, azp: int = 0) -> int | None:
    """The code by every formula in use, or None where they differ."""
    ways = (number(x / scale), number(x * number(1 / scale)), number(x * other))
    found = {clamp(whole(v, rule) + azp) for v in ways}
    return found.pop() if len(found) == 1 else None


def group(values: list[Value], rule: str, floor: float) -> tuple[Codes, int | None]:
    """Codes and the scale of values that share one."""
    if any(isinstance(v, float) for v in values):
        return [None] * len(values), None
    x = [v for v in values if isinstance(v, Fraction)]
    a = max(max(abs(v) for v in x), number(Fraction(floor)))
    scale = number(a / 127)
    if scale == 0:
        return [0] * len(x), 0
    other = rounded(127 / a, F32)
    if not isinstance(other, Fraction) or not isinstance(rounded(1 / scale, F32), Fraction):
        return [None] * len(x), encode(scale, F32)
    return [coded(v, scale, other, rule) for v in x], encode(scale, F32)


def grouped(i: dict[str, Array], width: int, rule: str, floor: float) -> dict[str, Codes]:
    q: Codes = []
    scales: Codes = []
    for row in i["x"].rows():
        for at in range(0, len(row), width):
            codes, scale = group(row[at : at + width], rule, floor)
            q += codes
            scales.append(scale)
    return {"q": q, "scale": scales}


def quantised(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """``scaled_int8_quant``."""
    if "scale" in i:
        s, azp = number(i["scale"].values()[0]), i["azp"].codes[0] if "azp" in i else 0
        q = [None if isinstance(v, float) else coded(v, s, number(1 / s), "even", azp) for v in i["x"].values()]
        return {"q": q}
    if o.get("symmetric", True):
        return grouped(i, i["x"].shape[1], "even", 0.0)
    found: dict[str, Codes] = {"q": [], "scale": [], "azp": []}
    for row in i["x"].rows():
        x = [v for v in row if isinstance(v, Fraction)]
        if len(x) < len(row) or min(x) == max(x):
            found = {
                "q": found["q"] + [None] * len(row),
                "scale": [*found["scale"], None],
                "azp": [*found["azp"], None],
            }
            continue
        s = number(number(max(x) - min(x)) / 255)
        azp = whole(number(-128 - number(min(x) / s)), "even")
        found["q"] += [coded(v, s, number(1 / s), "even", azp) for v in x]
        found["scale"].append(encode(s, F32))
        found["azp"].append(azp)
    return found


def agreed(x: Fraction, top: Fraction, amax: Fraction, code: Callable[[Fraction], int]) -> int | None:
    """The code of ``x top / amax``, or None where a quotient that is two units in the last place off has another."""
    by = number(top / amax)
    found = {code(number(x * by * (1 + Fraction(sign, 2**22)))) for sign in (-1, 0, 1)}
    return found.pop() if len(found) == 1 else None


def scale_of(amax: Fraction, top: Fraction, *, variable: bool) -> int | None:
    """``amax / top``, or None where a product with the rounded inverse of ``top``, or with a neighbour of that, is
    another."""
    found = {encode(number(amax / top), F32), encode(number(amax * number(1 / top)), F32)}
    if variable:
        found |= {encode(number(amax * number(1 / top) * (1 + Fraction(sign, 2**23))), F32) for sign in (-1, 1)}
    return found.pop() if len(found) == 1 else None


def heads(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """SageAttention's ``quant_per_block_int8_cuda`` and its like: ``[B, S, H, D]``."""
    (batch, queries, count, depth), x = i["x"].shape, i["x"].rows()
    rows, whole_rows = int(str(o.get("warp_block_size", o["block_size"]))), int(str(o["block_size"]))
    blocks, times = -(-queries // whole_rows) * (whole_rows // rows), o.get("sm_scale")
    q: Codes = [None] * len(i["x"].codes)
    scales: Codes = []
    for b in range(batch):
        for h in range(count):
            mean = i["mean"].rows()[b * count + h] if "mean" in i else [Fraction(0)] * depth
            for block in range(blocks):
                at = [(b * queries + s) * count + h for s in range(block * rows, min((block + 1) * rows, queries))]
                y = [[number(add(v, -m)) for v, m in zip(x[r], mean, strict=True)] for r in at]  # type: ignore[operator]
                if times is not None:
                    y = [[number(v * number(Fraction(float(str(times))))) for v in row] for row in y]
                amax = max([number(Fraction(1e-7)), *(abs(v) for row in y for v in row)])
                scales.append(scale_of(amax, Fraction(127), variable=False))
                for r, row in zip(at, y, strict=True):
                    codes = [agreed(v, Fraction(127), amax, lambda t: clamp(whole(t, "even"))) for v in row]
                    q[r * depth : (r + 1) * depth] = codes
    return {"q": q, "scale": scales}


def channels(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """``per_channel_fp8``: codes ``[B, D, G, P]``."""
    (batch, keys, count, depth), v = i["v"].shape, i["v"].rows()
    padded, top = -(-keys // 64) * 64, number(Fraction(float(str(o["scale_max"]))))
    order = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
    codes: Codes = [0] * (batch * depth * count * padded)
    scales: Codes = [None] * (batch * count * depth)
    for b in range(batch):
        for g in range(count):
            for d in range(depth):
                x = [v[(b * keys + s) * count + g][d] for s in range(keys)]
                values = [t for t in x if isinstance(t, Fraction)]
                amax = max(abs(t) for t in values)
                if not amax:
                    continue
                scales[(b * count + g) * depth + d] = scale_of(amax, top, variable=True)
                for s, t in enumerate(values):
                    at = ((b * depth + d) * count + g) * padded + s - s % 16 + order.index(s % 16)
                    codes[at] = agreed(t, top, amax, lambda y: encode(y, "float8_e4m3fn", negative_zero=False))
    return {"v_fp8": codes, "v_scale": scales}


def product(i: dict[str, Array], o: dict[str, object]) -> Codes:
    """``cutlass_scaled_mm_azp``: None where a fused last operation rounds otherwise."""
    (m, k), n, dtype = i["a"].shape, i["b"].shape[1], str(o["out_dtype"])
    a, b, sa, sb = i["a"].codes, i["b"].codes, i["scale_a"].values(), i["scale_b"].values()
    found: Codes = []
    for row in range(m):
        for column in range(n):
            total = sum(a[row * k + j] * b[j * n + column] for j in range(k))
            total -= (i["azp"].codes[row] if "azp" in i else 1) * i["azp_adj"].codes[column]
            total = (total + (1 << 31)) % (1 << 32) - (1 << 31)
            part = number(number(Fraction(total)) * number(sb[column % len(sb)]))
            times = number(sa[row % len(sa)]) * part
            bias = i["bias"].values()[column] if "bias" in i else Fraction(0)
            assert isinstance(bias, Fraction)
            ends = {encode(number(times + bias), dtype), encode(number(number(times) + bias), dtype)}
            found.append(ends.pop() if len(ends) == 1 else None)
    return found
