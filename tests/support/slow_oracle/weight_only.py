"""Weight-only products a second time: bits of words as Python integers, weights and sums as fractions.

None where the arithmetics in use give other codes.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from tests.support.slow_oracle.numbers import Array, Value, decode, encode, rounded

Codes = list[int | None]
WIDTHS = {"uint4": (4, 0), "uint4b8": (4, 8), "uint8": (8, 0), "uint8b128": (8, 128)}
E2M1 = [Fraction(x) / 2 for x in (0, 1, 2, 3, 4, 6, 8, 12)]
E2M1 += [-x for x in E2M1]


def number(x: Value, dtype: str) -> Value:
    return rounded(x, dtype)


def finite(x: Value) -> Fraction:
    assert isinstance(x, Fraction)
    return x


def stream(words: list[int], bits: int) -> list[int]:
    """Fields of one long integer, least bits first."""
    whole = sum((w & 0xFFFFFFFF) << 32 * i for i, w in enumerate(words))
    return [whole >> bits * i & (1 << bits) - 1 for i in range(len(words) * 32 // bits)]


def word(fields: list[int], bits: int) -> int:
    """Fields of one word, as int32."""
    found = sum(f << bits * i for i, f in enumerate(fields))
    return found - (1 << 32) if found >> 31 else found


def columns(x: Array) -> list[list[int]]:
    rows = x.code_rows()
    return [[row[j] for row in rows] for j in range(x.shape[1])]


def awq(x: Array, bits: int = 4) -> list[list[int]]:
    """Rows of codes."""
    where = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}[bits]
    return [[(w >> bits * at) & (1 << bits) - 1 for w in row for at in where] for row in x.code_rows()]


def turned(rows: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def product(
    a: list[list[Value]], w: list[list[Fraction]], steps: list[tuple[str, str, list[Fraction]]], dtype: str
) -> Codes:
    """Rows of ``a`` times columns of ``w``: every step by its word, dtype and factors (by row where it begins so)."""
    found: Codes = []
    for i, row in enumerate(a):
        for j, column in enumerate(w):
            if any(isinstance(v, float) for v in row):
                found.append(None)
                continue
            x: Value = sum((finite(v) * u for v, u in zip(row, column, strict=True)), Fraction(0))
            if steps[0][0] != "store":
                x = number(x, "float32")
            for name, of, by in steps:
                if isinstance(x, float):
                    break
                factor = by[i if name == "row" else j % len(by)] if by else Fraction(1)
                x = number(x + factor if name == "plus" else x * factor, of)
            found.append(encode(x, dtype))
    return found


def scale_rows(x: Array) -> list[list[Value]]:
    """Those of E8M0 are powers of two."""
    if x.dtype != "float8_e8m0fnu":
        return x.rows()
    return [[Fraction(2) ** (c - 127) for c in row] for row in x.code_rows()]


def weight(q: Fraction, z: Fraction, s: Fraction, dtype: str) -> Fraction:
    return finite(number((q - z) * s, dtype))


def scaled(
    codes: list[list[Fraction]], scale: Array, zero: list[list[int]] | None, dtype: str, index: Array | None
) -> list[list[Fraction]]:
    """Columns of weights of rows ``[K][N]`` of codes."""
    k, groups, s = len(codes), scale.shape[0], scale_rows(scale)
    found = []
    for j in range(len(codes[0])):
        column = []
        for i in range(k):
            g = index.codes[i] if index else i * groups // k
            z = Fraction(zero[g][j]) if zero else Fraction(0)
            column.append(weight(codes[i][j], z, finite(s[g][j]), dtype))
        found.append(column)
    return found


def dequantised(i: dict[str, Array], o: dict[str, object]) -> Codes:
    q = [[Fraction(c) for c in row] for row in awq(i["qweight"])]
    w = scaled(q, i["scales"], awq(i["zeros"]), i["scales"].dtype, None)
    return [encode(w[j][k], i["scales"].dtype) for k in range(len(q)) for j in range(len(q[0]))]


def awq_gemm(i: dict[str, Array], o: dict[str, object]) -> Codes:
    t = i["input"].dtype
    q = [[Fraction(c) for c in row] for row in awq(i["qweight"])]
    w = scaled(q, i["scales"], awq(i["qzeros"]), t, None)
    return product(i["input"].rows(), w, [("store", t, [])], t)


def gptq_gemm(i: dict[str, Array], o: dict[str, object]) -> Codes:
    bit = int(str(o["bit"]))
    q = turned([stream(column, bit) for column in columns(i["b_q_weight"])])
    more = 0 if o.get("use_v2_format") else 1
    zero = [[z + more for z in stream(row, bit)] for row in i["b_gptq_qzeros"].code_rows()]
    codes = [[Fraction(c) for c in row] for row in q]
    w = scaled(codes, i["b_gptq_scales"], zero, "float16", i.get("g_idx"))
    return product(i["a"].rows(), w, [("store", "float16", [])], "float16")


def code(c: int, name: str) -> Fraction:
    if name == "float4_e2m1f":
        return E2M1[c]
    if name == "float8_e4m3fn":
        return finite(decode(c, name))
    return Fraction(c - WIDTHS[name][1])


def marlin_gemm(i: dict[str, Array], o: dict[str, object]) -> Codes:
    name, t = str(o["b_type"]), i["a"].dtype
    codes = [[code(c, name) for c in row] for row in i["b_q"].code_rows()]
    zero = i["b_zeros"].code_rows() if "b_zeros" in i else None
    scales, eight = i["b_scales"], "8" in name.replace("b8", "")
    behind = scales.shape[0] == 1 and scales.dtype == t and name != "uint8"
    steps: list[tuple[str, str, list[Fraction]]] = []
    store: list[tuple[str, str, list[Fraction]]] = [("store", t, [])]
    if "global_scale" in i:
        steps.append(("times", "float32", [finite(v) for v in i["global_scale"].values()]))
    if behind:
        one = ("times", "float32" if eight else t, [finite(v) for v in scales.values()])
        steps, store = ([*steps, one], store) if eight else (steps, [*store, one])
    steps += store
    if "b_bias" in i:
        steps.append(("plus", t, [finite(v) for v in i["b_bias"].values()]))
    if behind:
        w = turned([[c - (zero[0][j] if zero else 0) for j, c in enumerate(row)] for row in codes])  # type: ignore[misc]
    else:
        w = scaled(codes, scales, zero, t, i.get("g_idx"))  # type: ignore[assignment]
    return product(i["a"].rows(), w, steps, t)  # type: ignore[arg-type]


def machete_mm(i: dict[str, Array], o: dict[str, object]) -> Codes:
    name, t = str(o["b_type"]), i["a"].dtype
    q, s = i["b_q"].code_rows(), i["b_group_scales"].rows()
    z = i["b_group_zeros"].rows() if "b_group_zeros" in i else None
    w = []
    for j in range(len(q[0])):
        column = []
        for k in range(len(q)):
            g = k * len(s) // len(q)
            one = finite(number(code(q[k][j], name) * finite(s[g][j]), t))
            column.append(finite(number(one + finite(z[g][j]), t)) if z else one)
        w.append(column)
    steps: list[tuple[str, str, list[Fraction]]] = []
    for key, kind in (("b_channel_scales", "times"), ("a_token_scales", "row")):
        if key in i:
            steps.append((kind, "float32", [finite(v) for v in i[key].values()]))
    return product(i["a"].rows(), w, [*steps, ("store", t, [])], t)


def mm_bf16_fp4(i: dict[str, Array], o: dict[str, object]) -> Codes:
    s = i["b_descale"].rows()
    nibbles = [[c >> 4 * h & 15 for c in row for h in (0, 1)] for row in i["b"].code_rows()]
    w = [[E2M1[c] * finite(s[j][k // 16]) for k, c in enumerate(row)] for j, row in enumerate(nibbles)]
    alpha = [("times", "float32", [finite(v) for v in i["alpha"].values()])] if "alpha" in i else []
    return product(i["a"].rows(), w, [*alpha, ("store", "bfloat16", [])], "bfloat16")


# --- experts ------------------------------------------------------------------------------------------------


def part(x: Array, at: int) -> Array:
    """One of the first axis."""
    size = len(x.codes) // x.shape[0]
    return Array(x.dtype, x.shape[1:] or (1,), x.codes[at * size : (at + 1) * size])


def marlin_expert(i: dict[str, Array], o: dict[str, object], token: int, expert: int, w: Value | None) -> Codes:
    names = ("b_q", "b_scales", "b_zeros", "global_scale", "b_bias")
    row = part(i["a"], token)
    each = {n: part(i[n], expert) for n in names if n in i}
    found = marlin_gemm({"a": Array(row.dtype, (1, *row.shape), row.codes), **each}, o)
    if w is None:
        return found
    t, made = row.dtype, []
    for c in found:
        value = None if c is None else decode(c, t)
        made.append(encode(number(value * finite(number(w, t)), t), t) if isinstance(value, Fraction) else c)
    return made  # type: ignore[return-value]


def wna16_expert(i: dict[str, Array], o: dict[str, object], token: int, expert: int, w: Value | None) -> Codes:
    bit, t = int(str(o["bit"])), i["input"].dtype
    q, s = part(i["b_qweight"], expert).code_rows(), part(i["b_scales"], expert).rows()
    z = part(i["b_qzeros"], expert).code_rows() if "b_qzeros" in i else None
    columns_of = []
    for n, row in enumerate(q):
        codes = [c >> 4 * h & 15 for c in row for h in (0, 1)] if bit == 4 else row
        column = []
        for k, c in enumerate(codes):
            g = k * len(s[n]) // len(codes)
            zero = 8 if bit == 4 else 128
            if z:
                zero = z[n // 2][g] >> n % 2 * 4 & 15 if bit == 4 else z[n][g]
            column.append(weight(Fraction(c), Fraction(zero), finite(s[n][g]), t))
        columns_of.append(column)
    steps: list[tuple[str, str, list[Fraction]]] = [("times", "float32", [finite(w)])] if w is not None else []
    return product([part(i["input"], token).values()], columns_of, [*steps, ("store", t, [])], t)


def experts(i: dict[str, Array], o: dict[str, object], one: Callable[..., Codes]) -> Codes:
    found: Codes = []
    top = i["topk_ids"].shape[1]
    weights = i["topk_weights"].values() if "topk_weights" in i else None
    for at, expert in enumerate(i["topk_ids"].codes):
        found += one(i, o, at // top, expert, weights[at] if weights else None)
    return found


# --- layouts ------------------------------------------------------------------------------------------------


def shuffled(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    bit, found = int(str(o["bit"])), []
    for column in columns(i["q_weight"]):
        codes = stream(column, bit)
        codes = [codes[p] for p in i["q_perm"].codes] if "q_perm" in i else codes
        made: list[int] = []
        if bit == 3:
            for at in range(0, len(codes), 32):
                for w in range(3):
                    total = 0
                    for c in range(10):
                        total |= codes[at + 10 * w + c] << c // 2 * 3 + c % 2 * 16
                    total |= (codes[at + 30] >> w & 1) << 15 | (codes[at + 31] >> w & 1) << 31
                    made.append(word([total], 32))
        else:
            n = 32 // bit
            order = [*range(0, n, 2), *range(1, n, 2)] if bit < 8 else list(range(n))
            made = [word([codes[at + c] for c in order], bit) for at in range(0, len(codes), n)]
        found.append(made)
    return {"q_weight": [c for row in turned(found) for c in row]}


def repacked(i: dict[str, Array], o: dict[str, object], awq_words: bool) -> Codes:
    bits, eight = int(str(o["num_bits"])), bool(o.get("is_a_8bit"))
    x = i["b_q_weight"]
    q = awq(x, bits) if awq_words else turned([stream(column, bits) for column in columns(x)])
    q = [q[p] for p in i["perm"].codes] if "perm" in i else q
    tall, wide, found = (32, 32, []) if eight else (16, 64, [])
    for top in range(0, len(q), tall):
        for left in range(0, len(q[0]), wide):
            for thread in range(32):
                for warp in range(4):
                    if eight:
                        n = left + warp // 2 * 16 + warp % 2 * 8 + thread // 4
                        v = [q[top + thread % 4 * 4 + r][n] for r in (0, 1, 2, 3, 16, 17, 18, 19)]
                        order = (0, 4, 1, 5, 2, 6, 3, 7) if bits == 4 else tuple(range(8))
                    else:
                        n = left + warp * 16 + thread // 4
                        v = [q[top + thread % 4 * 2 + r][n + c] for c in (0, 8) for r in (0, 1, 8, 9)]
                        order = (0, 2, 4, 6, 1, 3, 5, 7) if bits == 4 else (0, 2, 1, 3, 4, 6, 5, 7)
                    fields = [v[c] for c in order]
                    found += [word(fields[at : at + 32 // bits], bits) for at in range(0, 8, 32 // bits)]
    return found  # type: ignore[return-value]


def of_threads(row: list[int], grouped: bool) -> list[int]:
    if grouped:
        return [row[at + i + 8 * j] for at in range(0, len(row), 64) for i in range(8) for j in range(8)]
    pairs = (0, 1, 8, 9, 16, 17, 24, 25)
    return [row[at + 2 * i + j] for at in range(0, len(row), 32) for i in range(4) for j in pairs]


def scales(i: dict[str, Array], o: dict[str, object]) -> Codes:
    group = int(str(o.get("group_size", -1)))
    grouped = group != -1 and group < int(str(o.get("size_k", 128))) and not o.get("is_a_8bit")
    return [c for row in i["s"].code_rows() for c in of_threads(row, grouped)]


def zeros(i: dict[str, Array], o: dict[str, object]) -> Codes:
    bits, found = int(str(o["num_bits"])), []
    rows = i["zp"].code_rows() if "zp" in i else awq(i["q_zp_packed"], bits)
    order = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}[bits]
    for row in rows:
        placed, n = of_threads(row, True), 32 // bits
        for at in range(0, len(placed), n):
            each = placed[at : at + n]
            found.append(word(each if o.get("is_a_8bit") else [each[c] for c in order], bits))
    return found  # type: ignore[return-value]


def nvfp4_scales(i: dict[str, Array], o: dict[str, object]) -> dict[str, Codes]:
    rows = [[finite(v) for v in row] for row in i["marlin_scales"].rows()]
    top, factor = max(v for row in rows for v in row), Fraction(int(str(o.get("scale_factor", 0))) or 1)
    if not o.get("scale_factor") and not o.get("a_half"):
        while top and top * factor * 2 <= 448:
            factor *= 2
    found: Codes = []
    for row in rows:
        for at in range(0, len(row), 4):
            for c in (0, 2, 1, 3):
                half = row[at + c] * factor * 128
                found.append(encode(half, "float16") << 1 >> 8 & 0xFF if half >= 2 else 0)
    return {"out": found, "factor": [encode(factor, "float32")]}


def powers(i: dict[str, Array], o: dict[str, object]) -> Codes:
    found: Codes = []
    for row in i["marlin_scales"].rows():
        for at in range(0, len(row), 4):
            for c in (0, 1, 2, 3) if o.get("is_a_8bit") else (0, 2, 1, 3):
                value, code = finite(row[at + c]), 127 + (6 if o.get("is_a_8bit") else 0)
                while value != 1:
                    value, code = (value / 2, code + 1) if value > 1 else (value * 2, code - 1)
                found.append(code)
    return found


def exponent_bias(i: dict[str, Array], o: dict[str, object]) -> Codes:
    t = i["scales"].dtype
    return [encode(number(finite(v) * 2 ** (120 if t == "bfloat16" else 8), t), t) for v in i["scales"].values()]


def packed_fp8(i: dict[str, Array], o: dict[str, object]) -> Codes:
    first = o.get("size_k_first", True)
    lines = columns(i["fp8_tensor"]) if first else i["fp8_tensor"].code_rows()
    found = [[word(line[at : at + 4], 8) for at in range(0, len(line), 4)] for line in lines]
    return [c for row in (turned(found) if first else found) for c in row]


ROUTINES = {
    "awq_dequantize": dequantised,
    "awq_gemm": awq_gemm,
    "gptq_gemm": gptq_gemm,
    "marlin_gemm": marlin_gemm,
    "machete_mm": machete_mm,
    "mm_bf16_fp4": mm_bf16_fp4,
    "moe_wna16_marlin_gemm": lambda i, o: experts(i, o, marlin_expert),
    "moe_wna16_gemm": lambda i, o: experts(i, o, wna16_expert),
    "gptq_shuffle": shuffled,
    "gptq_marlin_repack": lambda i, o: repacked(i, o, awq_words=False),
    "awq_marlin_repack": lambda i, o: repacked(i, o, awq_words=True),
    "marlin_permute_scales": scales,
    "marlin_permute_bias": lambda i, o: of_threads(i["s"].codes, False),
    "marlin_zero_points": zeros,
    "awq_to_marlin_zero_points": zeros,
    "nvfp4_marlin_process_scales": nvfp4_scales,
    "mxfp4_marlin_process_scales": powers,
    "fp8_fused_exponent_bias_into_scales": exponent_bias,
    "pack_fp8_to_int32": packed_fp8,
}
