"""Products, grouped products and logits: sums of fractions, rounded once."""

from __future__ import annotations

import math
from fractions import Fraction

from tests.support.slow_oracle.numbers import Array, Value, add, array, encode, multiply

Rows = list[list[Value]]


UNIT = 1 << 24  # every 8-bit value is a whole number of 2^-24ths


def whole(row: list[Value]) -> list[int] | None:
    """The values in units of 2^-24; None when one is NaN or infinite."""
    found = [int(v * UNIT) for v in row if isinstance(v, Fraction)]
    if len(found) < len(row):
        return None
    assert all(Fraction(i, UNIT) == v for i, v in zip(found, row, strict=True)), "no 8-bit values"
    return found


def dot(a: list[Value], b: list[Value], left: list[int] | None, right: list[int] | None) -> Value:
    """The exact sum of products, in integers unless something is special."""
    if left is not None and right is not None:
        return Fraction(sum(x * y for x, y in zip(left, right, strict=True)), UNIT * UNIT)
    total: Value = Fraction(0)
    for x, y in zip(a, b, strict=True):
        total = add(total, multiply(x, y))
    return total


def scaled(
    a: Rows,
    b: Rows,
    a_scale: Rows,
    b_scale: Rows,
    *,
    block: int,
    b_rows: int,
    bias: list[Value] | None,
    dtype: str,
    alpha: Value = Fraction(1),
) -> list[int]:
    """Codes of ``alpha sum_k a_scale b_scale a b + bias``; one row of ``a_scale`` serves all rows of ``a``."""
    bare = [multiply(alpha, v) for v in sums(a, b, a_scale, b_scale, block=block, b_rows=b_rows)]
    return [encode(v if bias is None else add(v, bias[at % len(bias)]), dtype) for at, v in enumerate(bare)]


def sums(a: Rows, b: Rows, a_scale: Rows, b_scale: Rows, *, block: int, b_rows: int) -> list[Value]:
    """``sum_k a_scale b_scale a b``, row by row."""
    found: list[Value] = []
    left, right = [[[whole(row[i : i + block]) for i in range(0, len(row), block)] for row in x] for x in (a, b)]
    for m, row in enumerate(a):
        scales = a_scale[0] if len(a_scale) == 1 else a_scale[m]
        for n, column in enumerate(b):
            total: Value = Fraction(0)
            for i, start in enumerate(range(0, len(row), block)):
                part = dot(row[start : start + block], column[start : start + block], left[m][i], right[n][i])
                factor = multiply(scales[i], b_scale[n // b_rows][i])
                total = add(total, multiply(factor, part))
            found.append(total)
    return found


def by_shape(a: Array, b: Array, a_scale: Array, b_scale: Array, bias: Array | None, dtype: str) -> list[int]:
    """The product whose kind of scaling follows from the shapes of the scales."""
    m, k = a.shape
    n = b.shape[0]
    blocks = -(-k // 128)
    values, left_rows, right_rows = None if bias is None else bias.values(), a.rows(), b.rows()
    if blocks > 1 and a_scale.shape == (m, blocks) and b_scale.shape == (-(-n // 128), blocks):
        scales = a_scale.rows(), b_scale.rows()
        return scaled(left_rows, right_rows, *scales, block=128, b_rows=128, bias=values, dtype=dtype)
    left, right = [[v] for v in a_scale.values()], [[v] for v in b_scale.values()]
    rows = n if len(right) == 1 else 1
    return scaled(left_rows, right_rows, left, right, block=k, b_rows=rows, bias=values, dtype=dtype)


def transposed(x: Array) -> Array:
    rows = x.code_rows()
    return Array(x.dtype, (x.shape[1], x.shape[0]), [row[i] for i in range(x.shape[1]) for row in rows])


def part(x: Array, index: int) -> Array:
    """One matrix of a stack."""
    size = math.prod(x.shape[1:])
    return Array(x.dtype, x.shape[1:], x.codes[index * size : (index + 1) * size])


def contiguous(a: Array, a_scale: Array, b: Array, b_scale: Array, indices: list[int], dtype: str) -> list[int | None]:
    """Rows of each expert; None where a row is padding."""
    n, rows, scales = b.shape[1], a.rows(), a_scale.rows()
    found: list[int | None] = [None] * (len(indices) * n)
    for expert in sorted({e for e in indices if e >= 0}):
        own = [m for m, e in enumerate(indices) if e == expert]
        weight, weights = part(b, expert).rows(), part(b_scale, expert).rows()
        left, left_scales = [rows[m] for m in own], [scales[m] for m in own]
        codes = scaled(left, weight, left_scales, weights, block=128, b_rows=128, bias=None, dtype=dtype)
        for i, m in enumerate(own):
            found[m * n : (m + 1) * n] = codes[i * n : (i + 1) * n]
    return found


def masked(a: Array, a_scale: Array, b: Array, b_scale: Array, counts: list[int], dtype: str) -> list[int | None]:
    """The first rows of each group; None past them."""
    found: list[int | None] = []
    for g, count in enumerate(counts):
        rows, scales = part(a, g).rows()[:count], part(a_scale, g).rows()[:count]
        weight, weights = part(b, g).rows(), part(b_scale, g).rows()
        if count:
            found += scaled(rows, weight, scales, weights, block=128, b_rows=128, bias=None, dtype=dtype)
        found += [None] * ((a.shape[1] - count) * b.shape[1])
    return found


def runs(a: Array, b: Array, a_scale: Array, b_scale: Array, ends: list[int], dtype: str) -> list[int | None]:
    """Rows up to each end against that expert, one scale for each row and channel; None past the last end."""
    found: list[int | None] = []
    rows, scales, start = a.rows(), a_scale.rows(), 0
    for g, end in enumerate(ends):
        if end > start:
            channels = [[v] for v in b_scale.rows()[g]]
            found += scaled(
                rows[start:end],
                part(b, g).rows(),
                scales[start:end],
                channels,
                block=a.shape[1],
                b_rows=1,
                bias=None,
                dtype=dtype,
            )
        start = end
    return found + [None] * ((a.shape[0] - start) * b.shape[1])


def logits(
    q: Array, k: Array, k_scale: list[Value], weights: Array, start: list[int], stop: list[int], outside: int | None
) -> list[int | None]:
    """``[M, N]`` codes of float32; ``outside`` the window as given."""
    found: list[int | None] = []
    keys = k.rows()
    integers = [whole(key) for key in keys]
    for m in range(q.shape[0]):
        heads, w = part(q, m).rows(), weights.rows()[m]
        own = [whole(head) for head in heads]
        for n, key in enumerate(keys):
            if not start[m] <= n < stop[m]:
                found.append(outside)
                continue
            total: Value = Fraction(0)
            for head, left, factor in zip(heads, own, w, strict=True):
                x = dot(head, key, left, integers[n])
                total = add(total, multiply(factor, max(x, Fraction(0))))
            found.append(encode(multiply(k_scale[n], total), "float32"))
    return found


def paged(q: Array, cache: Array, weights: Array, lens: Array, tables: Array, outside: int | None) -> list[int | None]:
    """Keys and their scales picked byte by byte out of the blocks of each request."""
    requests, tokens, _, d = q.shape
    page = cache.shape[1]
    size = page * cache.shape[3]
    found: list[int | None] = []
    for b in range(requests):
        blocks = tables.code_rows()[b]
        codes: list[int] = []
        scales: list[Value] = []
        for block in blocks:
            raw = bytes(cache.codes[block * size : (block + 1) * size])
            codes += list(raw[: page * d])
            scales += array("float32", (page,), raw[page * d :]).values()
        keys = Array("float8_e4m3fn", (len(scales), d), codes)
        rows = Array(
            weights.dtype,
            (tokens, weights.shape[1]),
            [c for row in weights.code_rows()[b * tokens : (b + 1) * tokens] for c in row],
        )
        # The last of the new tokens sees every key of the request, the one before it all but one.
        stop = [lens.codes[b] - tokens + t + 1 for t in range(tokens)]
        found += logits(part(q, b), keys, scales, rows, [0] * tokens, stop, outside)
    return found
