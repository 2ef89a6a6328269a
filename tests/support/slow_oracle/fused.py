"""Fused quantisers: the value that a kernel computes, every operation rounded on its own, then its codes and scales.

The sum of a norm is exact here; its root, and silu, are rounded once where their bounds decide it. Another order of
summation gives a neighbouring value. Rows that are not in use are None.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from tests.support.slow_oracle import activations
from tests.support.slow_oracle.layers import silu_times
from tests.support.slow_oracle.numbers import Array, Value, add, decided, decode, divide, encode, multiply, rounded
from tests.support.slow_oracle.quantisers import E4M3, F32, RULES, Rule, code, power_above

BF16 = "bfloat16"
Inputs = dict[str, Array]
Options = dict[str, object]
Codes = list[int | None]
OVERFLOW = Fraction(2) ** 129  # a sum of squares above it is infinite in float32, in any order
FAR = 200  # exp(-200) < 2^-288, which times 2^128 is nothing in float32

# amax and scale let NaN through; a zero scale gives zero codes; NaN is coded 0x7F
GIVEN = RULES["tensor"]
GROUP = Rule(floor=1e-10, nan_in_amax=True, zero_scale_gives_zero=True)
FLOORED = Rule(scale_floor=1 / (448 * 512), nan_in_amax=True, zero_scale_gives_zero=True)


def is_nan(x: Value) -> bool:
    return isinstance(x, float) and math.isnan(x)


def smaller(x: Value, y: Value) -> Value:
    """NaN in, NaN out."""
    return math.nan if is_nan(x) or is_nan(y) else min(x, y)


def larger(x: Value, y: Value) -> Value:
    """NaN in, NaN out."""
    return math.nan if is_nan(x) or is_nan(y) else max(x, y)


def amax(values: list[Value]) -> Value:
    found: Value = Fraction(0)
    for value in values:
        found = larger(found, -value if value < 0 else value)
    return found


def signed(x: Value, negative: bool, dtype: str) -> int:
    """The code of a value; ``negative`` is the sign where it is, or rounds to, zero."""
    made = encode(x, dtype, negative_zero=negative)
    if negative and not is_nan(x) and decode(made, dtype) == 0:
        return 1 << (8 * {F32: 4, E4M3: 1}.get(dtype, 2) - 1)
    return made


def is_negative(raw: int, dtype: str) -> bool:
    return bool(raw >> (8 * {F32: 4}.get(dtype, 2) - 1))


# --- scales --------------------------------------------------------------------------------------------------


def quantised(
    x: Array, columns: int, scale_of: Callable[[list[Value]], Value], rule: Rule = GIVEN
) -> tuple[list[int], list[int]]:
    """Codes and float32 scales of groups of ``columns`` elements."""
    codes, scales = [], []
    for start in range(0, len(x.codes), columns):
        raw = x.codes[start : start + columns]
        s = scale_of([decode(c, x.dtype) for c in raw])
        codes += [code(c, x.dtype, s, None, rule) for c in raw]
        scales.append(encode(s, F32))
    return codes, scales


def given(x: Array, scale: Array) -> list[int]:
    (s,) = scale.values()
    return quantised(x, x.shape[-1], lambda values: s)[0]


def group_scale(power: bool, floor: float = 1e-10) -> Callable[[list[Value]], Value]:
    """``max(amax, floor) / 448``; as a power of two rounded up, where infinity stays what it is."""

    def scale_of(values: list[Value]) -> Value:
        s = rounded(divide(larger(amax(values), rounded(Fraction(floor), F32)), Fraction(448)), F32)
        return power_above(s, GROUP) if power and isinstance(s, Fraction) else s

    return scale_of


def bounded_scale(bound: Array | None, *, of_scale: bool) -> Callable[[list[Value]], Value]:
    """``max(amax / 448, 1 / (448 * 512))`` with an upper bound of amax, or of the scale."""
    top = math.inf if bound is None else bound.values()[0]

    def scale_of(values: list[Value]) -> Value:
        a = amax(values) if of_scale else smaller(amax(values), top)
        s = rounded(divide(a, Fraction(448)), F32)
        return larger(smaller(s, top) if of_scale else s, rounded(Fraction(FLOORED.scale_floor), F32))

    return scale_of


def in_use(x: Array, masked_m: Array) -> list[bool]:
    """For each row of ``[E, T, ...]``."""
    tokens = x.shape[1]
    return [t < count for count in masked_m.codes for t in range(tokens)]


def of_rows(
    x: Array, used: list[bool], make: Callable[[Array], tuple[list[int], list[int]]], width: int, scales: int
) -> dict[str, Codes]:
    """Codes and scales of the rows in use."""
    q: Codes = []
    scale: Codes = []
    for row, wanted in zip(x.code_rows(), used, strict=True):
        made = make(Array(x.dtype, (1, x.shape[-1]), row)) if wanted else ([None] * width, [None] * scales)
        q += made[0]
        scale += made[1]
    return {"q": q, "scale": scale}


# --- silu ----------------------------------------------------------------------------------------------------


def gated(x: Array, rounding: str) -> Array:
    """``silu(gate) * up``, as float32 where nothing is rounded to the dtype of ``x``."""
    dtype, half = F32 if rounding == "none" else x.dtype, x.shape[-1] // 2
    found = []
    for row in x.code_rows():
        for raw in zip(row[:half], row[half:], strict=True):
            gate, up = (decode(c, x.dtype) for c in raw)
            negative = is_negative(raw[0], x.dtype) != is_negative(raw[1], x.dtype)
            if isinstance(gate, Fraction) and isinstance(up, Fraction):
                found.append(signed(silu_and_up(gate, up, dtype, rounding == "each"), negative, dtype))
                continue
            # exp(inf) is infinite and a quotient of infinities NaN; silu of a number has its sign
            silu = math.nan if gate == -math.inf else gate
            found.append(encode(multiply(silu, up), dtype))
    return Array(dtype, (*x.shape[:-1], half), found)


def biased(x: Array, o: Options) -> Array:
    """``g / (1 + exp(-alpha g)) * (u + 1)`` in float32, clamped first."""
    given = {"alpha": rounded(Fraction(float(str(o["gemm1_alpha"]))), F32)}
    if o.get("gemm1_clamp_limit") is not None:
        given["limit"] = rounded(Fraction(float(str(o["gemm1_clamp_limit"]))), F32)
    half, row = x.shape[-1] // 2, activations.Row("silu", beta=1.0)
    numbers = {name: value for name, value in given.items() if isinstance(value, Fraction)}
    pairs = [(g, u) for values in x.rows() for g, u in zip(values[:half], values[half:], strict=True)]
    return Array(F32, (*x.shape[:-1], half), [activations.one(g, u, row, numbers, F32) or 0 for g, u in pairs])


def silu_and_up(gate: Fraction, up: Fraction, dtype: str, twice: bool) -> Value:
    """Far from 0 the exponential has more digits than memory: silu is the gate, less 2^-280 of it, or nothing."""
    if gate < -FAR:
        return Fraction(0)
    if gate > FAR:
        ends = [gate * (1 - Fraction(1, 2**280)), gate]
        if twice:
            ends = [Fraction(rounded(end, dtype)) for end in ends]
        low, high = sorted(end * up for end in ends)
        return decode(decided(low, high, dtype), dtype)
    return decode(silu_times(gate, up, dtype, between=dtype if twice else None), dtype)


def silu_static(i: Inputs, o: Options) -> dict[str, list[int]]:
    return {"q": given(gated(i["x"], str(o.get("rounding", "each"))), i["scale"])}


def silu_blocks(i: Inputs, o: Options) -> dict[str, list[int]]:
    value = gated(i["x"], str(o.get("rounding", "none")))
    q, scale = quantised(value, int(str(o["group_size"])), bounded_scale(i.get("scale_ub"), of_scale=True), FLOORED)
    return {"q": q, "scale": scale}


def silu_masked(i: Inputs, o: Options) -> dict[str, Codes]:
    half, group, rounding = i["x"].shape[-1] // 2, int(str(o["group_size"])), str(o.get("rounding", "each"))
    scale_of = group_scale(bool(o.get("use_ue8m0")))
    return of_rows(
        i["x"],
        in_use(i["x"], i["masked_m"]),
        lambda row: quantised(
            biased(row, o) if o.get("gemm1_alpha") is not None else gated(row, rounding), group, scale_of, GROUP
        ),
        half,
        half // group,
    )


def silu_in_bfloat16(i: Inputs, o: Options) -> dict[str, Codes]:
    """Every step of the quantiser rounded to bfloat16."""

    def make(row: Array) -> tuple[list[int], list[int]]:
        x = gated(row, "each")
        codes, scales = [], []
        for start in range(0, len(x.codes), 128):
            raw = x.codes[start : start + 128]
            values = [decode(c, BF16) for c in raw]
            a = larger(amax(values), rounded(Fraction(1e-10), BF16))
            s = rounded(multiply(a, rounded(Fraction(1, 448), BF16)), BF16)
            inverse = rounded(divide(Fraction(1), s), BF16)
            for c, v in zip(raw, values, strict=True):
                quotient = rounded(multiply(v, inverse), BF16)
                codes.append(0x7F if is_nan(quotient) else signed(quotient, is_negative(c, BF16), E4M3))
            scales.append(encode(s, F32))
        return codes, scales

    half = i["x"].shape[-1] // 2
    return of_rows(i["x"], in_use(i["x"], i["masked_m"]), make, half, half // 128)


# --- groups --------------------------------------------------------------------------------------------------


def masked_groups(i: Inputs, o: Options) -> dict[str, Codes]:
    x, group = i["x"], int(str(o["group_size"]))
    scale_of = group_scale(bool(o.get("use_ue8m0")), float(str(o["eps"])))
    make = lambda row: quantised(row, group, scale_of, GROUP)  # noqa: E731
    return of_rows(x, in_use(x, i["masked_m"]), make, x.shape[-1], x.shape[-1] // group)


def packed_groups(i: Inputs, o: Options) -> dict[str, list[int]]:
    """Exponent bytes of powers of two, four to an int32, the first in the lowest byte; 255 for NaN and infinity."""
    group, width = int(str(o["group_size"])), i["x"].shape[-1]
    q, scale = quantised(i["x"], group, group_scale(True, float(str(o["eps"]))), GROUP)
    words, per = [], width // group
    for start in range(0, len(scale), per):
        row = [c >> 23 & 0xFF for c in scale[start : start + per]]
        row += [0] * (-per % 4)
        words += [int.from_bytes(bytes(row[at : at + 4]), "little", signed=True) for at in range(0, len(row), 4)]
    return {"q": q, "scale": words}


# --- norms ---------------------------------------------------------------------------------------------------


def root_inverse(x: Fraction) -> Value:
    """``1 / sqrt(x)`` rounded once to float32."""
    shift = 4 * 150
    scaled = (x.denominator << shift) // x.numerator
    low = math.isqrt(scaled)
    unit = Fraction(1, 2 ** (shift // 2))
    return decode(decided(low * unit, (low + 1) * unit, F32), F32)


def summed(i: Inputs) -> list[list[tuple[Value, bool]]]:
    """``x [+ residual]`` in float32, each with its sign."""
    x, beside = i["x"], i.get("residual")
    rows = []
    for at, row in enumerate(x.code_rows()):
        found: list[tuple[Value, bool]] = []
        for column, raw in enumerate(row):
            value, negative = decode(raw, x.dtype), is_negative(raw, x.dtype)
            if beside is not None:
                other = beside.codes[at * x.shape[1] + column]
                value = rounded(add(value, decode(other, beside.dtype)), F32)
                negative = negative and is_negative(other, beside.dtype) if value == 0 else value < 0
            found.append((value, negative))
        rows.append(found)
    return rows


def row_factor(values: list[Value], epsilon: Fraction) -> Value:
    """``1 / sqrt(mean(z^2) + epsilon)``; 0 where the mean is infinite."""
    if any(is_nan(v) for v in values):
        return math.nan
    numbers = [v for v in values if isinstance(v, Fraction)]
    total = sum((v * v for v in numbers), Fraction(0))
    if len(numbers) < len(values) or total > OVERFLOW:
        return Fraction(0)
    return root_inverse(total / len(values) + epsilon)


def norm(
    i: Inputs, o: Options, *, sum_in_dtype: bool, rounding: str, root_of_sum: bool = False, silu: bool = False
) -> tuple[Array, list[int]]:
    """The value that is quantised, and the sum in the dtype of ``x``."""
    dtype = i["x"].dtype
    rounding = str(o.get("rounding", rounding))
    held, first = (F32 if rounding == "none" else dtype), (dtype if rounding == "each" else F32)
    epsilon = rounded(Fraction(float(str(o["epsilon"]))), F32)
    assert isinstance(epsilon, Fraction)
    weights = [(decode(c, dtype), is_negative(c, dtype)) for c in i["weight"].codes]
    if (bias := rounded(Fraction(float(str(o.get("weight_bias", 0.0)))), F32)) != 0:
        weights = [(w, w < 0) for w in (rounded(add(w, bias), F32) for w, _ in weights)]
    times = {name: i[name].values()[0] for name in ("in_scale", "out_scale") if name in i}
    found, sums = [], []
    for row in summed(i):
        sums += [signed(z, negative, dtype) for z, negative in row]
        if "in_scale" in times:
            row = [(rounded(multiply(z, times["in_scale"]), F32), negative) for z, negative in row]
        under = [z for z, _ in row]
        if sum_in_dtype:
            row = [(rounded(z, dtype), negative) for z, negative in row]
        r = row_factor(under if root_of_sum else [z for z, _ in row], epsilon)
        for (z, negative), (weight, turned) in zip(row, weights, strict=True):
            normal = rounded(rounded(multiply(z, r), F32), first)
            value = rounded(multiply(normal, weight), F32)
            if "out_scale" in times:
                value = rounded(multiply(value, times["out_scale"]), F32)
            if silu and isinstance(value, Fraction):
                value = silu_and_up(value, Fraction(1), F32, False)
            found.append(signed(rounded(value, held), negative != turned, held))
    return Array(held, i["x"].shape, found), sums


def norm_static(
    *, sum_in_dtype: bool = False, rounding: str = "each"
) -> Callable[[Inputs, Options], dict[str, list[int]]]:
    def run(i: Inputs, o: Options) -> dict[str, list[int]]:
        value, sums = norm(i, o, sum_in_dtype=sum_in_dtype, rounding=rounding)
        return {"q": given(value, i["scale"])} | ({"residual": sums} if "residual" in i else {})

    return run


UNIT = Array(F32, (1,), [0x3F800000])


def reduced(i: Inputs, o: Options) -> dict[str, list[int]]:
    """What follows an all-reduce: the norm is returned too."""
    value, sums = norm(i, o, sum_in_dtype=True, rounding="product")
    if "scale" in i:
        return {"q": given(value, i["scale"]), "residual": sums, "norm": value.codes}
    q, scale = quantised(value, value.shape[1], bounded_scale(None, of_scale=False), FLOORED)
    return {"q": q, "scale": scale, "residual": sums, "norm": value.codes}


def norm_scaled(*, root_of_sum: bool = False, silu: bool = False) -> Callable[[Inputs, Options], dict[str, list[int]]]:
    """A norm that is cast under a scale of 1."""

    def run(i: Inputs, o: Options) -> dict[str, list[int]]:
        how = {"sum_in_dtype": root_of_sum, "root_of_sum": root_of_sum, "silu": silu}
        value, sums = norm(i, o, rounding="none", **how)
        return {"q": given(value, UNIT)} | ({"residual": sums} if "residual" in i else {})

    return run


def layer_norm(i: Inputs, o: Options) -> dict[str, list[int]]:
    """Mean and variance exact, the root rounded once, then each operation in float32."""
    x = i["x"]
    epsilon = rounded(Fraction(float(str(o["epsilon"]))), F32)
    gamma, beta = i["gamma"].values(), i["beta"].values()
    assert isinstance(epsilon, Fraction)
    found = []
    for row in x.rows():
        numbers = [v for v in row if isinstance(v, Fraction)]
        if len(numbers) < len(row):
            found += [encode(math.nan, x.dtype)] * len(row)
            continue
        mean = sum(numbers, Fraction(0)) / len(row)
        r = root_inverse(sum(((v - mean) ** 2 for v in numbers), Fraction(0)) / len(row) + epsilon)
        for v, g, b in zip(numbers, gamma, beta, strict=True):
            normal = rounded(multiply(rounded(v - mean, F32), r), F32)
            value = rounded(rounded(add(rounded(multiply(normal, g), F32), b), F32), x.dtype)
            found.append(encode(value, x.dtype))
    return {"q": given(Array(x.dtype, x.shape, found), i["scale"])}


def norm_groups(i: Inputs, o: Options) -> dict[str, list[int]]:
    """A scale for each row, or for each group of one."""
    value, sums = norm(i, o, sum_in_dtype=False, rounding="each")
    columns = int(str(o.get("group_size", value.shape[1])))
    q, scale = quantised(value, columns, bounded_scale(i.get("scale_ub"), of_scale=False), FLOORED)
    return {"q": q, "scale": scale, "residual": sums}


# --- rotary embeddings ---------------------------------------------------------------------------------------


def rope(i: Inputs, o: Options) -> dict[str, list[int]]:
    """Rotated and plain columns of query and key, times a factor, by an implied scale of 1."""
    found = {}
    cache = i["cos_sin_cache"].rows()
    angles = [cache[position] for position in i["pos_ids"].codes]
    for name in ("q_rope", "k_rope", "q_nope", "k_nope"):
        x = i[name]
        factor = rounded(Fraction(float(str(o.get("quant_scale_q" if name[0] == "q" else "quant_scale_kv", 1.0)))), F32)
        rows = x.rows()
        heads = len(rows) // len(angles)
        made: list[int] = []
        for at, row in enumerate(rows):
            if name.endswith("rope"):
                row = rotated(row, angles[at // heads], bool(o.get("is_neox", True)))
            products = [rounded(multiply(v, factor), F32) for v in row]
            made += [0x7F if is_nan(v) else encode(v, E4M3) for v in products]
        found[name] = made
    return found


def rotated(row: list[Value], angles: list[Value], halves: bool) -> list[Value]:
    """Every pair turned by its angle: two products and their difference or sum."""
    half = len(row) // 2
    found = list(row)
    for pair in range(half):
        first, second = (pair, pair + half) if halves else (2 * pair, 2 * pair + 1)
        cosine, sine = angles[pair], angles[pair + half]
        x, y = row[first], row[second]
        ends = [rounded(multiply(a, b), F32) for a, b in ((x, cosine), (y, sine), (y, cosine), (x, sine))]
        found[first] = rounded(add(ends[0], -ends[1]), F32)
        found[second] = rounded(add(ends[2], ends[3]), F32)
    return found
