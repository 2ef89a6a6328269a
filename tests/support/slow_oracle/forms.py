"""Forms of products: transposed operands, summands, groups of K, heads, batches, runs, int4 weights."""

from __future__ import annotations

from tests.support.slow_oracle.numbers import Array, add, decode, encode, multiply
from tests.support.slow_oracle.products import Rows, part, scaled, sums, transposed

Inputs = dict[str, Array]
Codes = list[int | None]
E4M3 = "float8_e4m3fn"
NIBBLES = [0, 7, 6, 5, 4, 3, 2, 1, *range(8, 16)]
# CuTe's layout of the left operand of a 64x32 FP8 product over threads and values: extents, strides in m + 64 k
THREADS, VALUES = ((4, 8, 4), (256, 1, 16)), ((4, 2, 2), (64, 8, 1024))


def cute_offset(index: int, layout: tuple[tuple[int, ...], tuple[int, ...]]) -> int:
    """The offset of a linear index, whose first mode runs fastest."""
    offset = 0
    for extent, stride in zip(*layout, strict=True):
        offset += index % extent * stride
        index //= extent
    return offset


def reordered_int4(i: Inputs, _: dict[str, object]) -> list[int]:
    """Words ``[K/8, N]`` of weights, weight by weight where CUTLASS wants it."""
    columns, rows = i["b"].shape
    words = [code for row in zip(*i["b"].code_rows(), strict=True) for code in row]
    found = [0] * len(words)
    for row in range(rows):
        for k in range(8 * columns):
            nibble = NIBBLES[words[row * columns + k // 8] >> 4 * (k % 8) & 15]
            wanted = row % 16 + 64 * (k % 32)
            ((t, v),) = [
                (t, v)
                for t in range(32)
                for v in range(16)
                if cute_offset(t, THREADS) + cute_offset(v, VALUES) == wanted
            ]
            place = 512 * (row // 16 + rows // 16 * (k // 32)) + 16 * t + v
            found[place // 8] |= nibble << 4 * (place % 8)
    signed = [word - (word >> 31 << 32) for word in found]
    return [signed[row * columns + column] for column in range(columns) for row in range(rows)]


def dtype_of(options: dict[str, object]) -> str:
    return str(options["out_dtype"])


def turned(i: Inputs, names: tuple[str, ...]) -> Inputs:
    """Matrices, or stacks of them, with rows and columns exchanged."""
    found = dict(i)
    for name in names:
        x = i[name]
        if len(x.shape) == 2:
            found[name] = transposed(x)
        else:
            parts = [transposed(part(x, g)) for g in range(x.shape[0])]
            found[name] = Array(x.dtype, (x.shape[0], *parts[0].shape), [c for p in parts for c in p.codes])
    return found


def summed(a: Rows, b: Rows, a_scale: Rows, b_scale: Rows, c: Rows | None) -> list[int]:
    """Float32 codes of the product with 1x128 scales on both sides and a summand."""
    bare, n = sums(a, b, a_scale, b_scale, block=128, b_rows=1), len(b)
    return [encode(v if c is None else add(v, c[at // n][at % n]), "float32") for at, v in enumerate(bare)]


def one_by_one(i: Inputs, o: dict[str, object]) -> list[int]:
    names = ("a", "b", "a_scale", "b_scale")
    return summed(*(i[name].rows() for name in names), i["c"].rows() if "c" in i else None)


def k_grouped(i: Inputs, o: dict[str, object]) -> list[int]:
    m, n, start = i["a_scale"].shape[0], i["b_scale"].shape[0], 0
    found: list[int] = []
    values = {side: i[side].values() for side in "ab"}
    for g, k in enumerate(i["ks"].codes):
        sides = []
        for side, rows in (("a", m), ("b", n)):
            flat = values[side][rows * start : rows * (start + k)]
            sides.append([flat[r * k : (r + 1) * k] for r in range(rows)])
        blocks = slice(start // 128, (start + k) // 128)
        scales = [[row[blocks] for row in i[f"{side}_scale"].rows()] for side in "ab"]
        found += summed(sides[0], sides[1], scales[0], scales[1], part(i["c"], g).rows())
        start += k
    return found


def heads(i: Inputs, o: dict[str, object]) -> list[int]:
    """Token by token, head by head."""
    tokens, count, k = i["a"].shape
    n, rows, scales = i["b"].shape[1], i["a"].rows(), i["a_scale"].rows()
    found = [0] * (tokens * count * n)
    for h in range(count):
        own = range(h, tokens * count, count)
        codes = scaled(
            [rows[r] for r in own],
            part(i["b"], h).rows(),
            [scales[r] for r in own],
            part(i["b_scale"], h).rows(),
            block=128,
            b_rows=128,
            bias=None,
            dtype=dtype_of(o),
        )
        for at, r in enumerate(own):
            found[r * n : (r + 1) * n] = codes[at * n : (at + 1) * n]
    return found


def with_gaps(i: Inputs, o: dict[str, object]) -> Codes:
    codes = scaled(
        *(i[name].rows() for name in ("a", "b", "a_scale", "b_scale")),
        block=128,
        b_rows=128,
        bias=None,
        dtype=dtype_of(o),
    )
    left, mid, right = (int(str(o[name])) for name in ("left", "mid", "right"))
    found: Codes = []
    for start in range(0, len(codes), left + right):
        found += [*codes[start : start + left], *[None] * mid, *codes[start + left : start + left + right]]
    return found


def batches(i: Inputs, o: dict[str, object]) -> list[int]:
    found: list[int] = []
    scales = [[i["A_scale"].values()], [i["B_scale"].values()]]
    for g in range(i["A"].shape[0]):
        a, b = part(i["A"], g).rows(), transposed(part(i["B"], g)).rows()
        found += scaled(a, b, *scales, block=len(a[0]), b_rows=len(b), bias=None, dtype=dtype_of(o))
    return found


def groupwise(i: Inputs, o: dict[str, object]) -> list[int]:
    a_scale = i["a_scale"].rows()
    if len(a_scale) < i["a"].shape[0]:
        a_scale = [a_scale[m // 128] for m in range(i["a"].shape[0])]
    rest = i["a"].rows(), i["b"].rows()
    return scaled(*rest, a_scale, i["b_scale"].rows(), block=128, b_rows=128, bias=None, dtype=dtype_of(o))


def runs(i: Inputs, o: dict[str, object]) -> Codes:
    """Rows of every expert's run: scales in blocks, as vectors, of tensors, or one factor for all."""
    if "m_indptr" in i:
        borders = i["m_indptr"].codes
        spans = list(zip(borders, borders[1:], strict=False))
    else:
        counts = [row[0] for row in i["problem_sizes"].code_rows()]
        spans = [(start, start + n) for start, n in zip(i["expert_offsets"].codes, counts, strict=True)]
    weight = i["b_q"] if "b_q" in i else i["b"]
    rows, n = i["a"].rows(), weight.shape[1]
    left = next(i[name] for name in ("a_scale", "scales_a", "alpha", "a_token_scales") if name in i).rows()
    right = next((i[name] for name in ("b_scale", "scales_b", "b_channel_scales") if name in i), None)
    found: Codes = [None] * (len(rows) * n)
    for g, (start, end) in enumerate(spans):
        if end == start:
            continue
        b = decoded(part(i["b_q"], g), part(i["b_group_scales"], g)) if "b_q" in i else part(weight, g).rows()
        block, b_rows = len(rows[0]), n
        scale: Rows = [[decode(0x3F800000, "float32")]]
        if right is not None and len(right.shape) == 3:
            block, b_rows, scale = 128, 128, part(right, g).rows()
        elif right is not None:
            scale = [[v] for v in right.rows()[g]]
            b_rows = n if len(scale) == 1 else 1
        own = left if len(left) == 1 else left[start:end]
        codes = scaled(rows[start:end], b, own, scale, block=block, b_rows=b_rows, bias=None, dtype=dtype_of(o))
        found[start * n : end * n] = codes
    return found


def decoded(q: Array, scales: Array) -> Rows:
    """E4M3 values of int4 weights ``[N, K]`` and their groups' scales ``[K/128, N]``."""
    by_group = scales.rows()
    return [
        [decode(encode(multiply(v, by_group[k // 128][n]), E4M3), E4M3) for k, v in enumerate(row)]
        for n, row in enumerate(q.rows())
    ]


def mixed(i: Inputs, o: dict[str, object]) -> list[int]:
    b = decoded(i["b_q"], i["b_group_scales"])
    sides = i["a_token_scales"].rows(), i["b_channel_scales"].rows()
    return scaled(i["a"].rows(), b, *sides, block=len(b[0]), b_rows=1, bias=None, dtype=dtype_of(o))
