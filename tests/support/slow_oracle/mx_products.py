"""Products of MX and NVFP4: nibbles, scale bytes out of their memory one by one, fractions, one rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction

from tests.support.slow_oracle.mx import FP4, power
from tests.support.slow_oracle.numbers import Array, Value, add, array, decode, encode, multiply
from tests.support.slow_oracle.products import Rows, part, scaled, transposed

E4M3 = "float8_e4m3fn"
Inputs = Mapping[str, Array]
Options = Mapping[str, object]


def values(x: Array) -> Rows:
    """The values of codes: eight bits, or two of four bits in a byte, the low nibble first."""
    if x.dtype != "uint8":
        return x.rows()
    signed = [*FP4, *(-v for v in FP4)]
    return [[signed[nibble] for byte in row for nibble in (byte % 16, byte // 16)] for row in x.code_rows()]


def place(m: int, c: int, columns: int, tile: str) -> int:
    """The byte of row m and column c."""
    if tile == "linear":
        return m * columns + c
    height, across = int(tile.partition("x")[0]), -(-columns // 4)
    inside = m % height * 4 if height == 8 else m % 32 * 16 + m % 128 // 32 * 4
    return (m // height * across + c // 4) * height * 4 + inside + c % 4


def scale_of(byte: int, dtype: str) -> Value:
    return decode(byte, E4M3) if dtype == E4M3 else power(byte)


def scales(memory: Array, dtype: str, rows: range, columns: int, tile: str, start: int = 0) -> Rows:
    """The scales of these rows of a matrix that begins at ``start``."""
    return [[scale_of(memory.codes[start + place(m, c, columns, tile)], dtype) for c in range(columns)] for m in rows]


def dense(
    a: Array,
    b: Array,
    a_scale: Array,
    b_scale: Array,
    *,
    width: int,
    dtype: str,
    tiles: tuple[str, str],
    out: str,
    alpha: Value = Fraction(1),
    bias: list[Value] | None = None,
) -> list[int]:
    """``b`` is ``[K, N]``."""
    left, right = values(a), values(transposed(b))
    columns = -(-len(left[0]) // width)
    sa = scales(a_scale, dtype, range(len(left)), columns, tiles[0])
    sb = scales(b_scale, dtype, range(len(right)), columns, tiles[1])
    return scaled(left, right, sa, sb, block=width, b_rows=1, bias=bias, dtype=out, alpha=alpha)


def mm(i: Inputs, o: Options) -> list[int]:
    """FlashInfer's mm_mxfp8 and mm_fp4."""
    two_levels = bool(o.get("use_nvfp4"))
    tile = "8x4" if o["use_8x4_sf_layout"] else "128x4"
    alpha = i["alpha"].values()[0] if "alpha" in i else Fraction(1)
    found = dense(
        i["a"],
        i["b"],
        i["a_descale"],
        i["b_descale"],
        width=16 if two_levels else 32,
        dtype=E4M3 if two_levels else "e8m0",
        tiles=(tile, "128x4"),
        out=str(o["out_dtype"]),
        alpha=alpha,
    )
    if not o.get("shuffled"):
        return found
    n = i["b"].shape[1]  # row 32 q + 8 r + c of the memory is row 32 q + 4 c + r of the weight
    lies = [32 * (at // 32) + 8 * (at % 4) + at % 32 // 4 for at in range(n)]
    return [found[start + at] for start in range(0, len(found), n) for at in lies]


def scaled_mm(i: Inputs, o: Options) -> list[int]:
    """torch's: the recipe by the dtype of the scales."""
    dtype = i["scale_a"].dtype
    tile = "128x4" if o["swizzle"] == "SWIZZLE_32_4_4" else "linear"
    alpha: Value = Fraction(1)
    for side in "ab":
        if f"global_scale_{side}" in i:
            alpha = multiply(alpha, i[f"global_scale_{side}"].values()[0])
    return dense(
        i["mat_a"],
        i["mat_b"],
        i["scale_a"],
        i["scale_b"],
        width=16 if dtype == E4M3 else 32,
        dtype=dtype,
        tiles=(tile, tile),
        out=str(o["out_dtype"]),
        alpha=alpha,
        bias=i["bias"].values() if "bias" in i else None,
    )


def batched(i: Inputs, o: Options) -> list[int]:
    """``b [B, K, N]``; the scales of all rows as one matrix, or each matrix in tiles of its own."""
    (batch, m, _), n = i["a"].shape, i["b"].shape[2]
    found: list[int] = []
    for g in range(batch):
        left, right = values(part(i["a"], g)), values(transposed(part(i["b"], g)))
        columns = len(left[0]) // 32
        pairs = []
        for name, rows in (("a_scale", m), ("b_scale", n)):
            whole = o["placement"] == "rows"
            own = range(g * rows, g * rows + rows) if whole else range(rows)
            start = 0 if whole else g * room(rows, columns)
            pairs.append(scales(i[name], "e8m0", own, columns, "128x4", start))
        found += scaled(left, right, *pairs, block=32, b_rows=1, bias=None, dtype=str(o["out_dtype"]))
    return found


def room(rows: int, columns: int) -> int:
    """Bytes of a matrix of scales in 128x4 tiles."""
    return -(-rows // 128) * 128 * -(-columns // 4) * 4


def pointed(i: Inputs, o: Options, width: int, dtype: str) -> list[int]:
    """FlashInfer's groups: scales of group g from row floor((first + 127 g) / 128) * 128."""
    bounds, n = i["m_indptr"].codes, i["b"].shape[1]
    left = values(i["a"])
    columns, found = len(left[0]) // width, list[int]()
    for g, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if end > first:
            begin = (first + 127 * g) // 128 * 128
            sa = scales(i["a_scale"], dtype, range(begin, begin + end - first), columns, "128x4")
            sb = scales(i["b_scale"], dtype, range(n), columns, "128x4", g * room(n, columns))
            alpha = i["alpha"].values()[g] if "alpha" in i else Fraction(1)
            right = values(part(i["b"], g))
            found += scaled(
                left[first:end], right, sa, sb, block=width, b_rows=1, bias=None, alpha=alpha, dtype=str(o["out_dtype"])
            )
    return found


def ended(i: Inputs, o: Options) -> list[int | None]:
    """torch's groups, each in tiles of its own; rows past the last end are anything."""
    dtype, n, left = i["scale_a"].dtype, i["mat_b"].shape[1], values(i["mat_a"])
    width = 16 if dtype == E4M3 else 32
    columns, first, start, found = len(left[0]) // width, 0, 0, list[int | None]()
    for g, end in enumerate(i["offs"].codes):
        if end > first:
            sa = scales(i["scale_a"], dtype, range(end - first), columns, "128x4", start)
            sb = scales(i["scale_b"], dtype, range(n), columns, "128x4", g * room(n, columns))
            alpha: Value = Fraction(1)
            if "global_scale_a" in i:
                alpha = multiply(*(i[f"global_scale_{side}"].values()[g] for side in "ab"))
            right = values(part(i["mat_b"], g))
            found += scaled(
                left[first:end], right, sa, sb, block=width, b_rows=1, bias=None, alpha=alpha, dtype=str(o["out_dtype"])
            )
        start, first = start + room(end - first, columns), end
    return found + [None] * ((len(left) - first) * n)


def k_groups(i: Inputs, o: Options) -> list[int | None]:
    """torch's groups of K, the blocks of each in tiles of its own; a group without K is anything."""
    left, right = values(i["mat_a"]), values(i["mat_b"])
    first, starts, found = 0, [0, 0], list[int | None]()
    for end in i["offs"].codes:
        columns = (end - first) // 32
        pairs = []
        for side, (name, rows) in enumerate((("scale_a", len(left)), ("scale_b", len(right)))):
            pairs.append(scales(i[name], "e8m0", range(rows), columns, "128x4", starts[side]))
            starts[side] += room(rows, columns)
        if columns:
            a, b = ([row[first:end] for row in x] for x in (left, right))
            found += scaled(a, b, *pairs, block=32, b_rows=1, bias=None, dtype=str(o["out_dtype"]))
        else:
            found += [None] * (len(left) * len(right))
        first = end
    return found


def mixed(a: Rows, b: Rows, a_scale: Rows, b_scale: Rows, o: Options, c: list[Value] | None = None) -> list[int]:
    """DeepGEMM's: each side with its own length of a scale; ``c`` for every element."""
    of_a, of_b, height = (int(str(o[name])) for name in ("gran_k_a", "gran_k_b", "gran_n"))
    blocks = range(0, len(a[0]), 32)
    sa = [[row[k // of_a] for k in blocks] for row in a_scale]
    sb = [[b_scale[n // height][k // of_b] for k in blocks] for n in range(len(b))]
    return scaled(a, b, sa, sb, block=32, b_rows=1, bias=c, dtype=str(o["out_dtype"]))


def powers(scale: Array) -> Rows:
    """The scales of each row: float32, or four exponents in an int32, the first in the lowest byte."""
    if scale.dtype != "int32":
        return scale.rows()
    return [[power(word >> 8 * i & 255) for word in row for i in range(4)] for row in scale.code_rows()]


def powers_down(scale: Array, ks: list[int], gran: int) -> Rows:
    """The scales ``[K / gran, R]`` of groups of K, of words that end with their group too."""
    if scale.dtype != "int32":
        return scale.rows()
    given, found, first = scale.code_rows(), list[list[Value]](), 0
    for k in ks:
        for block in range(-(-k // gran)):
            found.append([power(word >> 8 * (block % 4) & 255) for word in given[first + block // 4]])
        first += -(-k // (4 * gran))
    return found


def _columns(rows: Rows) -> Rows:
    return [list(column) for column in zip(*rows, strict=True)]


def deep_turned(names: str) -> Callable[[Inputs, Options], list[int | None]]:
    """Dense, with these operands and their scales transposed."""

    def made(i: Inputs, o: Options) -> list[int | None]:
        codes, scale = {name: values(i[name]) for name in "ab"}, {name: powers(i[f"{name}_scale"]) for name in "ab"}
        for name in names:
            codes[name] = _columns(codes[name])
            given = i[f"{name}_scale"]
            k = [4 * int(str(o[f"gran_k_{name}"])) * given.shape[0]]  # whole words
            scale[name] = _columns(powers_down(given, k, int(str(o[f"gran_k_{name}"]))))
        return list(mixed(codes["a"], codes["b"], scale["a"], scale["b"], o))

    return made


def k_groups_turned(i: Inputs, o: Options) -> list[int | None]:
    """Groups of K, which is the first axis of everything; ``c`` of each."""
    gran, first, found = int(str(o["gran_k"])), 0, list[int | None]()
    a, b = (i[name].rows() for name in "ab")
    sa, sb = (powers_down(i[f"{name}_scale"], i["ks"].codes, gran) for name in "ab")
    for g, k in enumerate(i["ks"].codes):
        c = part(i["c"], g)
        if k:
            given = [_columns(x[first : first + k]) for x in (a, b)]
            scale = [_columns(s[first // gran : (first + k) // gran]) for s in (sa, sb)]
            found += mixed(*given, *scale, {**o, "gran_k_a": gran, "gran_k_b": gran, "gran_n": 1}, c.values())
        else:
            found += c.codes
        first += k
    return found


def deep(i: Inputs, o: Options) -> list[int | None]:
    """Dense, contiguous (by the expert of each row, or by ends; weights maybe ``[G, K, N]``) or masked."""
    if "ends" in i:
        owner, begin = [-1] * i["a"].shape[0], 0
        for g, end in enumerate(i["ends"].codes):
            begin = -(-begin // 128) * 128
            owner[begin : max(begin, end)] = [g] * max(0, end - begin)
            begin = end
        i = {**i, "m_indices": Array("int32", (len(owner),), owner)}
    if "m_indices" not in i and "masked_m" not in i:
        c = i["c"].values() if "c" in i else None
        return list(mixed(values(i["a"]), values(i["b"]), powers(i["a_scale"]), powers(i["b_scale"]), o, c))
    n, found = i["b"].shape[1], list[int | None]()
    if "masked_m" in i:
        for g, count in enumerate(i["masked_m"].codes):
            a, b, sa, sb = (part(i[name], g) for name in ("a", "b", "a_scale", "b_scale"))
            if count:
                found += mixed(values(a)[:count], values(b), sa.rows()[:count], sb.rows(), o)
            found += [None] * ((a.shape[0] - count) * n)
        return found
    rows, left = values(i["a"]), i["a_scale"].rows()
    turned = len(values(part(i["b"], 0))[0]) != len(rows[0])
    n = len(values(part(i["b"], 0))[0]) if turned else n
    for m, expert in enumerate(i["m_indices"].codes):
        if expert < 0:
            found += [None] * n
        else:
            right, sb = values(part(i["b"], expert)), part(i["b_scale"], expert).rows()
            right, sb = (_columns(right), _columns(sb)) if turned else (right, sb)
            found += mixed(rows[m : m + 1], right, left[m : m + 1], sb, o)
    return found


# --- FP4 logits -----------------------------------------------------------------------------------------------------


def blocks(codes: Array, words: list[int]) -> Rows:
    """Rows of codes times their scales: byte ``k // 32`` of the row's word, the lowest first."""
    pairs = zip(values(codes), words, strict=True)
    return [[multiply(v, power(word >> 8 * (k // 32) & 255)) for k, v in enumerate(row)] for row, word in pairs]


def logits(
    q: Rows, k: Rows, weights: Rows, start: list[int], stop: list[int], outside: int | None, dtype: str
) -> list[list[int | None]]:
    """``[M, N]`` codes; ``outside`` the window as given. ``q`` is ``[M H, D]``."""
    found = []
    for m, row in enumerate(weights):
        mine = q[m * len(row) : (m + 1) * len(row)]
        made: list[int | None] = []
        for n, key in enumerate(k):
            total: Value = Fraction(0)
            for head, weight in zip(mine, row, strict=True) if start[m] <= n < stop[m] else ():
                x: Value = Fraction(0)
                for left, right in zip(head, key, strict=True):
                    x = add(x, multiply(left, right))
                total = add(total, multiply(weight, x if x != x else max(x, Fraction(0))))
            made.append(encode(total, dtype) if start[m] <= n < stop[m] else outside)
        found.append(made)
    return found


def fp4_logits(i: Inputs, o: Options) -> list[int | None]:
    """Every key a column; or each row from its first key on."""
    dtype, start, stop = str(o["out_dtype"]), i["cu_seqlen_ks"].codes, i["cu_seqlen_ke"].codes
    outside = encode(-math.inf, dtype) if o.get("clean_logits") else None
    q, k = blocks(i["q"], i["q_sf"].codes), blocks(i["k"], i["k_sf"].codes)
    made = logits(q, k, i["weights"].rows(), start, stop, outside, dtype)
    if columns := int(str(o.get("max_seqlen_k", 0))):
        made = [(row[first:] + [None] * columns)[:columns] for row, first in zip(made, start, strict=True)]
    return [code for row in made for code in row]


def fp4_paged(i: Inputs, o: Options) -> list[int | None]:
    """Keys and words picked byte by byte out of the blocks of each request."""
    dtype, (requests, tokens, heads, half) = str(o["out_dtype"]), i["q"].shape
    outside = encode(-math.inf, dtype) if o.get("clean_logits") else None
    page, size = i["kv_cache"].shape[1], i["kv_cache"].shape[1] * i["kv_cache"].shape[3]
    q, weights, found = blocks(i["q"], i["q_sf"].codes), i["weights"].rows(), list[int | None]()
    for b in range(requests):
        codes, words = list[int](), list[int]()
        for block in i["block_tables"].code_rows()[b]:
            raw = bytes(i["kv_cache"].codes[block * size : (block + 1) * size])
            codes += raw[: page * half]
            words += array("int32", (page,), raw[page * half :]).codes
        keys = blocks(Array("uint8", (len(words), half), codes), words)
        mine = slice(b * tokens, (b + 1) * tokens)
        stop = [i["context_lens"].codes[b] - tokens + t + 1 for t in range(tokens)]
        rows = q[mine.start * heads : mine.stop * heads]
        made = logits(rows, keys, weights[mine], [0] * tokens, stop, outside, dtype)
        found += [code for row in made for code in row]
    return found
