"""Further forms of MX and NVFP4 element by element: other elements, random bits, transforms, rows, experts, casts."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from tests.support.slow_oracle import quantisers
from tests.support.slow_oracle.mx import (
    E4M3,
    F32,
    FLOAT_MAX,
    FP4,
    Codes,
    _code,
    _negative,
    _packed,
    _stored,
    fp4,
    is_nan,
    power,
    powers,
    shared_byte,
)
from tests.support.slow_oracle.numbers import Array, Value, add, decode, divide, encode, floor_log2, multiply, rounded
from tests.support.slow_oracle.places import fragments, swizzled, take

SIXTH = rounded(Fraction(1, 6), F32)
SIX = {"e3m2": (2, -2, Fraction(28), 4), "e2m3": (3, 0, Fraction(15, 2), 2)}  # fraction bits, emin, largest, emax
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
Block = tuple[int, list[int]]


def _layout(o: dict[str, object]) -> str:
    return str(o.get("layout", "128x4"))


def _flags(x: Array) -> list[bool]:
    """Signs of the codes, zeros' included."""
    if x.dtype == E4M3:
        return [bool(code >> 7) for code in x.codes]
    return [_negative(code, x.dtype) for code in x.codes]


def _amax(values: list[Value]) -> Value:
    return max((abs(v) for v in values if not is_nan(v)), default=Fraction(0))


def _cut(values: list[Value], flags: list[bool], width: int) -> list[tuple[list[Value], list[bool]]]:
    return [(values[i : i + width], flags[i : i + width]) for i in range(0, len(values), width)]


# --- other elements -----------------------------------------------------------------------------------------------


def _six_magnitudes(element: str) -> list[Fraction]:
    fraction, emin, _, _ = SIX[element]
    found = []
    for code in range(32):
        field, rest = code >> fraction, code & (1 << fraction) - 1
        significand = rest + (1 << fraction) * (field > 0)
        found.append(Fraction(significand) * Fraction(2) ** (max(field - 1, 0) + emin - fraction))
    return found


def _nearest(x: Fraction, table: list[Fraction]) -> int:
    distances = [abs(x - v) for v in table]
    near = [code for code, d in enumerate(distances) if d == min(distances)]
    return next((code for code in near if code % 2 == 0), near[0])


def six(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """MXFP6; what is coded under a NaN scale is unspecified."""
    x, element, mode = i["x"], str(o.get("element", "e3m2")), str(o.get("rounding", "rceil"))
    fraction, _, top, emax = SIX[element]
    table, scale, codes = _six_magnitudes(element), list[int](), list[int | None]()
    for values, flags in _cut(x.values(), _flags(x), 32):
        byte = 255 if any(isinstance(v, float) for v in values) else _six_byte(values, mode, top, emax, fraction)
        scale.append(byte)
        for v, negative in zip(values, flags, strict=True):
            scaled = multiply(abs(v), Fraction(2) ** (127 - byte))
            free = byte == 255 or isinstance(scaled, float)
            codes.append(None if free else _nearest(min(Fraction(scaled), top), table) | negative << 5)
    return {"q": codes, "scale": _stored(scale, (x.shape[0], x.shape[1] // 32), _layout(o))}


def _six_byte(values: list[Value], mode: str, top: Fraction, emax: int, fraction: int) -> int:
    a = Fraction(max(abs(v) for v in values))
    if a == 0:
        return 0
    if mode == "rceil":
        t = Fraction(rounded(multiply(a, rounded(1 / top, F32)), F32))
        exponent = -200 if t == 0 else floor_log2(t) + (Fraction(2) ** floor_log2(t) < t)
        return min(max(exponent + 127, 0), 254)
    k = floor_log2(a)
    k += mode == "ceil" and Fraction(2) ** k < a
    k += mode == "even" and a >= (2 - Fraction(1, 2 ** (fraction + 1))) * Fraction(2) ** k
    return 255 if k > 127 and mode == "even" else max(k - emax + 127, 0)


def int8(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """MXINT8: two's complement of 64 x / scale, ties to even."""
    x, scale, codes = i["x"], list[int](), list[int | None]()
    for values, _ in _cut(x.values(), _flags(x), 32):
        a = Fraction(0) if any(is_nan(v) for v in values) else _amax(values)
        byte = 254 if isinstance(a, float) else 0 if a == 0 else max(floor_log2(a) + 127, 0)
        byte = 255 if any(is_nan(v) for v in values) else byte
        scale.append(byte)
        for v in values:
            if byte == 255:
                codes.append(None)
                continue
            scaled = multiply(v, Fraction(2) ** (127 - byte) * 64)
            whole = (
                round(max(min(scaled, Fraction(127)), Fraction(-127)))
                if isinstance(scaled, Fraction)
                else (127 if scaled > 0 else -127)
            )
            codes.append(whole & 0xFF)
    return {"q": codes, "scale": _stored(scale, (x.shape[0], x.shape[1] // 32), _layout(o))}


def back(i: dict[str, Array], o: dict[str, object], value: Callable[[int], Value]) -> list[int]:
    """Codes one a byte times their scales."""
    q = i["q"]
    rows, columns = q.shape
    scale = [power(byte) for byte in _in_rows(i["scale"], (rows, columns // 32), _layout(o))]
    across = columns // 32
    return [
        encode(multiply(value(code), scale[at // columns * across + at % columns // 32]), F32)
        for at, code in enumerate(q.codes)
    ]


def _in_rows(memory: Array, shape: tuple[int, int], layout: str) -> list[int]:
    """Scale bytes of a layout, row by row."""
    if layout == "linear":
        return memory.codes
    order = swizzled(Array("int64", shape, list(range(shape[0] * shape[1]))), layout)
    where = {place: at for at, place in enumerate(order) if place is not None}
    return [memory.codes[where[place]] for place in range(shape[0] * shape[1])]


def six_value(element: str) -> Callable[[int], Value]:
    """The value of a code of six bits."""
    table = _six_magnitudes(element)
    return lambda code: -table[code & 31] if code & 32 else table[code & 31]


def int8_value(code: int) -> Value:
    """The value of a code of MXINT8."""
    return Fraction(code - 256 if code > 127 else code, 64)


def fp4_cast(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """DeepGEMM's cast: ties toward zero, no -0, NaN 0."""
    x, gran, powers = i["x"], int(str(o.get("gran_k", 128))), bool(o.get("use_ue8m0"))
    scale, codes = list[int](), list[int]()
    for values in x.rows():
        for first in range(0, len(values), gran):
            group = values[first : first + gran]
            nan = any(is_nan(v) for v in group)
            a = math.nan if nan else max(_amax(group), Fraction(rounded(Fraction(1, 10**4), F32)))
            s = rounded(divide(a, Fraction(6)), F32) if not nan else math.nan
            if powers and isinstance(s, float):
                s = Fraction(2) ** 127
            elif powers:
                k = floor_log2(Fraction(s)) + (Fraction(2) ** floor_log2(Fraction(s)) < s)
                s = Fraction(2) ** min(max(k, -126), 127)
            scale.append(encode(s, F32))
            inverse = rounded(divide(Fraction(1), s), F32) if not is_nan(s) else math.nan
            codes += [_toward_zero(rounded(multiply(v, inverse), F32)) for v in group]
    q = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    return {"q": q, "scale": _exponent_words(scale, x.shape[0]) if o.get("use_packed_ue8m0") else scale}


def _exponent_words(scale: list[int], rows: int) -> list[int]:
    """Exponent bytes of float32 codes, four a word of each row, 127 behind the last."""
    across, found = len(scale) // rows, []
    for first in range(0, len(scale), across):
        bytes_ = [code >> 23 for code in scale[first : first + across]] + [127] * (-across % 4)
        found += [sum(byte << 8 * n for n, byte in enumerate(bytes_[at : at + 4])) for at in range(0, len(bytes_), 4)]
    return found


def _toward_zero(x: Value) -> int:
    if is_nan(x):
        return 0
    middles = [(low + high) / 2 for low, high in zip(FP4, FP4[1:], strict=False)]
    code = sum(abs(x) > middle for middle in middles)
    return code | 8 * (x < 0 and code > 0)


def fp4_back(i: dict[str, Array], o: dict[str, object]) -> list[int]:
    """DeepGEMM's inverse: the code 8 is 0."""
    gran, scale, found = int(str(o.get("gran_k", 128))), i["scale"].rows(), list[int]()
    for row, packed in enumerate(i["q"].code_rows()):
        nibbles = [half for byte in packed for half in (byte & 15, byte >> 4 & 15)]
        for k, code in enumerate(nibbles):
            value = -FP4[code & 7] if code & 8 else FP4[code & 7]
            found.append(encode(multiply(value, scale[row][k // gran]), F32))
    return found


# --- NVFP4 ----------------------------------------------------------------------------------------------------------


def _scale(a: Value, g: Value) -> Value:
    """``a (g / 6)`` in float32."""
    return Fraction(0) if a == 0 else rounded(multiply(a, rounded(multiply(g, SIXTH), F32)), F32)


def _byte(t: Value) -> int:
    return 0x7F if is_nan(t) else encode(min(t, Fraction(448)) if isinstance(t, Fraction) else Fraction(448), E4M3)


def _inverse(byte: int, decoding: Value) -> Value:
    both = rounded(multiply(decode(byte, E4M3), decoding), F32)
    inverse = rounded(divide(Fraction(1), both), F32)
    return FLOAT_MAX if isinstance(inverse, float) and inverse > 0 else inverse


def _quotients(values: list[Value], a: Value, inverse: Value) -> list[Value]:
    return [v if is_nan(v) else Fraction(0) if a == 0 else rounded(multiply(v, inverse), F32) for v in values]


def _level(values: list[Value], flags: list[bool], g: Value, a: Value | None = None) -> Block:
    """One block under ``g = 2688/amax``."""
    a = _amax(values) if a is None else a
    byte = _byte(_scale(a, g))
    quotients = _quotients(values, a, _inverse(byte, rounded(divide(Fraction(1), g), F32)))
    return byte, [fp4(v, negative) for v, negative in zip(quotients, flags, strict=True)]


def _published(blocks: list[Block], shape: tuple[int, ...], layout: str) -> dict[str, Codes]:
    codes: list[int | None] = [code for _, found in blocks for code in found]
    return {"q": _packed(codes), "scale": _stored([b for b, _ in blocks], (shape[0], shape[1] // 16), layout)}


def _words(counter: int, seed: int) -> list[int]:
    """Philox4x32-10."""
    c, key = [counter & 0xFFFFFFFF, counter >> 32, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [second >> 32 ^ c[1] ^ key[0], second & 0xFFFFFFFF, first >> 32 ^ c[3] ^ key[1], first & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def stochastic(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """|v| + u step(|v|) in one rounding, truncated."""
    x, g, seed, blocks = i["x"], i["global_scale"].values()[0], int(str(o.get("seed", 0))), list[Block]()
    for number, (values, flags) in enumerate(_cut(x.values(), _flags(x), 16)):
        a = _amax(values)
        byte = _byte(_scale(a, g))
        quotients = _quotients(values, a, _inverse(byte, rounded(divide(Fraction(1), g), F32)))
        words, codes = _words(number, seed), list[int]()
        for k, (v, negative) in enumerate(zip(quotients, flags, strict=True)):
            if isinstance(v, float):
                codes.append(7 if is_nan(v) else 7 | 8 * (v < 0))
                continue
            step = 2 if abs(v) >= 4 else 1 if abs(v) >= 2 else Fraction(1, 2)
            t = rounded(abs(v) + Fraction(words[k // 4] >> 8 * (k % 4) & 0xFF, 256) * step, F32)
            codes.append(max(code for code, value in enumerate(FP4) if value <= t) | 8 * negative)
        blocks.append((byte, codes))
    return _published(blocks, x.shape, _layout(o))


def square(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """One scale for 16x16."""
    x, g = i["x"], i["global_scale"].values()[0]
    blocks, across = _cut(x.values(), _flags(x), 16), x.shape[1] // 16
    tops: dict[tuple[int, int], Value] = {}
    for at, (values, _) in enumerate(blocks):
        key = at // across // 16, at % across
        tops[key] = max(tops.get(key, Fraction(0)), _amax(values))
    found = [_level(v, f, g, tops[at // across // 16, at % across]) for at, (v, f) in enumerate(blocks)]
    return _published(found, x.shape, _layout(o))


def four_over_six(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """The scale of a block or 1.5 times it, by the error summed in the order of K."""
    x, g, found = i["x"], i["global_scale"].values()[0], list[Block]()
    decoding = rounded(divide(Fraction(1), g), F32)
    for values, flags in _cut(x.values(), _flags(x), 16):
        a, made = _amax(values), list[tuple[Value, Block]]()
        base = Fraction(0) if a == 0 else rounded(multiply(rounded(divide(a, Fraction(6)), F32), g), F32)
        for factor in (Fraction(1), Fraction(3, 2)):
            byte = _byte(rounded(multiply(base, factor), F32))
            codes = [fp4(v, n) for v, n in zip(_quotients(values, a, _inverse(byte, decoding)), flags, strict=True)]
            both, error = rounded(multiply(decode(byte, E4M3), decoding), F32), Fraction(0)
            total: Value = error
            for v, code in zip(values, codes, strict=True):
                value = rounded(multiply(-FP4[code & 7] if code & 8 else FP4[code & 7], both), F32)
                difference = rounded(add(value, -v), F32)
                term = rounded(multiply(difference, difference), F32) if o.get("error") == "mse" else abs(difference)
                total = rounded(add(total, term), F32)
            made.append((total, (byte, codes)))
        found.append(made[1][1] if made[1][0] < made[0][0] else made[0][1])
    return _published(found, x.shape, _layout(o))


def hadamard(i: dict[str, Array], o: dict[str, object]) -> list[int]:
    """Exact sums, rounded to bfloat16 once."""
    x, mask = i["x"], o.get("sign_mask")
    signs = SIGNS if mask is None else tuple(-1 if int(str(mask)) >> k & 1 else 1 for k in range(16))
    found = list[int]()
    for values, _ in _cut(x.values(), _flags(x), 16):
        for j in range(16):
            if any(isinstance(v, float) for v in values):
                found.append(encode(math.nan, "bfloat16"))
                continue
            total = sum(v * signs[k] * (-1) ** (k & j).bit_count() for k, v in enumerate(values))
            found.append(encode(Fraction(total) / 4, "bfloat16"))
    return found


def transformed(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """NVFP4 of the transform."""
    made = Array("bfloat16", i["x"].shape, hadamard(i, o))
    return levels({"x": made, "global_scale": i["global_scale"]}, o)


def levels(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """NVFP4 under 2688/amax."""
    x, g = i["x"], i["global_scale"].values()[0]
    return _published([_level(v, f, g) for v, f in _cut(x.values(), _flags(x), 16)], x.shape, _layout(o))


def per_token(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """NVFP4 under the amax of a row times a constant."""
    x, factor, rows, blocks = i["x"], i["global_scale"].values()[0], list[int](), list[Block]()
    across = x.shape[1] // 16
    parts = _cut(x.values(), _flags(x), 16)
    for first in range(0, len(parts), across):
        p = rounded(multiply(_amax([v for values, _ in parts[first : first + across] for v in values]), factor), F32)
        rows.append(encode(p, F32))
        for values, flags in parts[first : first + across]:
            a = _amax(values)
            t = Fraction(0) if a == 0 else rounded(divide(rounded(multiply(a, SIXTH), F32), p), F32)
            byte = _byte(t)
            both = rounded(multiply(decode(byte, E4M3), p), F32)
            quotients = _quotients(values, a, rounded(divide(Fraction(1), both), F32))
            blocks.append((byte, [fp4(v, n) for v, n in zip(quotients, flags, strict=True)]))
    return {**_published(blocks, x.shape, _layout(o)), "row_scale": list(rows)}


def of_fp8(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """NVFP4 of float16(x8 (6 / g))."""
    x, g = i["x"], i["global_scale"].values()[0]
    factor = rounded(multiply(Fraction(6), rounded(divide(Fraction(1), g), F32)), F32)
    halves = [
        encode(rounded(multiply(v, factor), F32), "float16", negative_zero=n)
        for v, n in zip(x.values(), _flags(x), strict=True)
    ]
    return levels({"x": Array("float16", x.shape, halves), "global_scale": i["global_scale"]}, o)


def mxfp4_of_fp8(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """MXFP4 of E4M3 values, which reach neither end of the range of a scale."""
    x, scale, codes = i["x"], list[int](), list[int | None]()
    for values, flags in _cut(x.values(), _flags(x), 32):
        byte = shared_byte(values, "rceil", "e2m1")
        scale.append(byte)
        unit = Fraction(2) ** (127 - byte) if byte else Fraction(1)
        codes += [fp4(multiply(v, unit), n) for v, n in zip(values, flags, strict=True)]
    return {"q": _packed(codes), "scale": _stored(scale, (x.shape[0], x.shape[1] // 32), _layout(o))}


# --- experts --------------------------------------------------------------------------------------------------------


def _rows_of(x: Array, first: int, last: int) -> Array:
    width = x.shape[-1]
    return Array(x.dtype, (last - first, width), x.codes[first * width : last * width])


def _quantised(x: Array, g: Value | None, *, four: bool = False) -> tuple[list[int | None], list[int]]:
    """Codes (bytes) and scale bytes of rows."""
    if g is not None:
        blocks = [_level(v, f, g) for v, f in _cut(x.values(), _flags(x), 16)]
        return list(_packed([c for _, found in blocks for c in found])), [b for b, _ in blocks]
    scale, codes = list[int](), list[int | None]()
    for values, flags in _cut(x.values(), _flags(x), 32):
        if four:
            known = [Fraction(0) if is_nan(v) else v for v in values]
            byte = shared_byte(known, "even", "e2m1")
            scale.append(byte)
            power = Fraction(2) ** (127 - byte) if byte else Fraction(0)
            for v, negative in zip(values, flags, strict=True):
                codes.append(fp4(v if is_nan(v) else multiply(v, power), negative))
            continue
        byte = shared_byte(values, "rceil", "e4m3")
        scale.append(byte)
        for v, negative in zip(values, flags, strict=True):
            scaled = v if is_nan(v) else multiply(v, Fraction(2) ** (127 - byte))
            top = Fraction(448)
            if not is_nan(scaled):
                scaled = (top if scaled > 0 else -top) if isinstance(scaled, float) else max(min(scaled, top), -top)
            codes.append(encode(scaled, E4M3, negative_zero=negative))
    return (list(_packed(codes)) if four else codes), scale


def _tiled(parts: list[tuple[int, list[int]]], height: int, columns: int) -> list[int | None]:
    """Scale bytes at their rows in one tiled matrix, None elsewhere."""
    whole: list[int] = [-1] * (height * columns)
    for row, scale in parts:
        whole[row * columns : row * columns + len(scale)] = scale
    tiled = swizzled(Array("int64", (height, columns), whole), "128x4")
    return [None if byte is None or byte < 0 else byte for byte in tiled]


def masked(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """The first rows of each expert's buffer; the expert is the last axis of every output."""
    x, four = i["x"], "global_scale" in i
    groups, m, k = x.shape
    width, per = k // (2 if four else 1), k // (16 if four else 32)
    up = -(-m // 128) * 128
    q: list[list[int | None]] = []
    memory: list[list[int | None]] = []
    for expert, count in enumerate(i["mask"].codes):
        g = i["global_scale"].values()[expert] if four else None
        codes, scale = _quantised(_rows_of(x, expert * m, expert * m + count), g) if count else ([], [])
        q.append([*codes, *[None] * ((m - count) * width)])
        memory.append(_tiled([(0, scale)], up, per))
    down, across = up // 128, -(-per // 4)
    found: list[int | None] = []
    for row in range(32):
        for four_rows in range(4):
            for tile in range(down):
                for column in range(4):
                    for right in range(across):
                        at = ((tile * across + right) * 32 + row) * 16 + four_rows * 4 + column
                        found += [memory[expert][at] for expert in range(groups)]
    return {"q": [q[e][at] for at in range(m * width) for e in range(groups)], "scale": found}


def contiguous(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """Rows expert by expert, tiles of each where the placement says."""
    x, levels, offsets = i["x"], "global_scale" in i, i["expert_offsets"].codes
    m, k = x.shape
    four = levels or bool(o.get("four"))
    per, experts = k // (16 if levels else 32), len(offsets) - 1
    q: list[int | None] = []
    parts, start = [], 0
    for expert in range(experts):
        first, last = offsets[expert], offsets[expert + 1]
        g = i["global_scale"].values()[expert] if levels else None
        codes, scale = _quantised(_rows_of(x, first, last), g, four=four) if last > first else ([], [])
        q += codes
        parts.append(((first + 127 * expert) // 128 * 128 if o.get("placement") == "flashinfer" else start, scale))
        start += -(-(last - first) // 128) * 128
    q += [None] * ((m - offsets[-1]) * k // (2 if four else 1))
    return {"q": q, "scale": _tiled(parts, (m + 127 * experts) // 128 * 128, per)}


# --- casts ----------------------------------------------------------------------------------------------------------


def _over(scale: Array, shape: tuple[int, ...]) -> list[Value]:
    """Scales of 1x128 or 128x128 blocks over the elements."""
    rows, (m, k) = scale.rows(), shape
    tall = 1 if len(rows) == m else 128
    return [rows[r // tall][c // 128] for r in range(m) for c in range(k)]


def relabelled(i: dict[str, Array], o: dict[str, object]) -> list[int]:
    """The exponents of the scales, for every 32 columns."""
    x = i["x"]
    each = _over(i["scale"], x.shape)[::32]
    return _stored([floor_log2(Fraction(s)) + 127 for s in each], (x.shape[0], x.shape[1] // 32), _layout(o))


def _between(x: Array, scale: list[Value], dtype: str) -> Array:
    values = [rounded(multiply(v, s), F32) for v, s in zip(x.values(), scale, strict=True)]
    codes = [encode(v, dtype, negative_zero=n) for v, n in zip(values, _flags(x), strict=True)]
    return Array(dtype, x.shape, codes)


def requantised(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """Codes times their scales in a dtype, and MXFP8 of that."""
    x = _between(i["x"], _over(i["block_scale"], i["x"].shape), str(o.get("dtype", "bfloat16")))
    codes, scale = _quantised(x, None)
    return {"q": codes, "scale": _stored(scale, (x.shape[0], x.shape[1] // 32), _layout(o))}


def to_blocks(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """MXFP8 times its scales in a dtype, and DeepGEMM's 128x128 cast of that."""
    x = i["x"]
    m, k = x.shape
    bytes_ = _in_rows(i["mx_scale"], (m, k // 32), _layout(o))
    scale = [power(bytes_[r * (k // 32) + c // 32]) for r in range(m) for c in range(k)]
    wide = _between(x, scale, str(o.get("dtype", "bfloat16")))
    q, scales = quantisers.blocks(wide, 128, 128, quantisers.RULES["cast"])
    return {"q": list(q), "scale": list(scales)}


# --- columns and squares --------------------------------------------------------------------------------------------


def _turned(codes: list[int] | Codes, rows: int, columns: int) -> Codes:
    """A matrix ``[rows, columns]`` transposed."""
    return [codes[r * columns + c] for c in range(columns) for r in range(rows)]


def _lying(scale: Codes, m: int, k: int, layout: str) -> list[int]:
    """Bytes ``[k, m / 32]`` of the columns in a layout."""
    whole = [byte or 0 for byte in scale]
    return list(_turned(whole, k, m // 32)) if layout == "compact" else _stored(whole, (k, m // 32), layout)


def columns(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """MXFP8 of the transpose, transposed back."""
    x, layout = i["x"], _layout(o)
    m, k = x.shape
    turned = Array(x.dtype, (k, m), [code or 0 for code in _turned(x.codes, m, k)])
    made = powers({"x": turned}, {**o, "layout": "linear"}, str(o.get("element", "e4m3")))
    return {"q": _turned(made["q"], k, m), "scale": _lying(made["scale"], m, k, layout)}


def columns_of_weights(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """Each weight by itself."""
    x, q, scale = i["x"], list[int | None](), list[int | None]()
    count, n, k = x.shape
    for e in range(count):
        made = columns({"x": Array(x.dtype, (n, k), x.codes[e * n * k : (e + 1) * n * k])}, o)
        q, scale = [*q, *made["q"]], [*scale, *made["scale"]]
    return {"q": q, "scale": scale}


def squares(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """MXFP8 of 32x32, each as one long row."""
    x, layout, element = i["x"], _layout(o), str(o.get("element", "e4m3"))
    m, k = x.shape
    across = k // 32
    q: Codes = [None] * (m * k)
    each = [0] * (m // 32 * across)
    for number in range(len(each)):
        top, left = number // across * 32, number % across * 32
        at = [(top + r) * k + left + c for r in range(32) for c in range(32)]
        values = Array(x.dtype, (1, 1024), [x.codes[place] for place in at])
        byte = shared_byte(values.values(), "rceil", element)
        for place, v, negative in zip(at, values.values(), _flags(values), strict=True):
            q[place] = _code(v, negative, byte, element, "rceil")
        each[number] = byte
    if o.get("direction") == "columnwise":
        return {
            "q": q,
            "scale": _lying([each[c // 32 + down * across] for c in range(k) for down in range(m // 32)], m, k, layout),
        }
    rows = [each[r // 32 * across + c] for r in range(m) for c in range(across)]
    return {"q": q, "scale": _stored(rows, (m, across), "linear" if layout == "compact" else layout)}


def columns_back(i: dict[str, Array], o: dict[str, object]) -> list[int]:
    """Codes times the byte of their 32 rows."""
    q, layout = i["q"], _layout(o)
    m, k = q.shape
    down, memory = m // 32, i["scale"]
    if layout == "compact":
        scale = [power(memory.codes[r * k + c]) for c in range(k) for r in range(down)]
    else:
        scale = [power(byte) for byte in _in_rows(memory, (k, down), layout)]
    return [encode(multiply(v, scale[at % k * down + at // k // 32]), F32) for at, v in enumerate(q.values())]


def nibbles_turned(i: dict[str, Array], o: dict[str, object]) -> list[int]:
    """Codes of four bits, transposed one by one."""
    q = i["q"]
    m, n = q.shape[0], q.shape[1] * 2
    codes = [half for byte in q.codes for half in (byte & 15, byte >> 4 & 15)]
    turned = [codes[r * n + c] for c in range(n) for r in range(m)]
    made = [low | high << 4 for low, high in zip(turned[::2], turned[1::2], strict=True)]
    return [byte - 256 if q.dtype == "int8" and byte > 127 else byte for byte in made]


# --- batches, shuffled rows, silu -----------------------------------------------------------------------------------


def finite(x: Array) -> Array:
    """NaN and infinities count as 0: they stand in unassigned rows."""
    return Array(x.dtype, x.shape, [0 if isinstance(v, float) else c for c, v in zip(x.codes, x.values(), strict=True)])


def batch(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """Each matrix by itself."""
    x, q, scale = i["x"], list[int | None](), list[int | None]()
    count, m, k = x.shape
    for g in range(count):
        own = Array(x.dtype, (m, k), x.codes[g * m * k : (g + 1) * m * k])
        made = levels({"x": own, "global_scale": i["global_scale"]}, o)
        q, scale = [*q, *made["q"]], [*scale, *made["scale"]]
    return {"q": q, "scale": scale}


def shuffled_rows_of(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    """The rows in the order of :func:`fragments`, then NVFP4."""
    x = i["x"]
    moved = Array(x.dtype, x.shape, take(x, fragments(x.shape[0])))
    return levels({"x": moved, "global_scale": i["global_scale"]}, {"layout": "128x4"})
