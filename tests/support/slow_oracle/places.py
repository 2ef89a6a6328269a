"""Layouts by loops over where each element goes, and the integer tables."""

from __future__ import annotations

import math
from fractions import Fraction

from tests.support.slow_oracle.numbers import Array, encode
from tests.support.slow_oracle.products import part

Codes = list[int]


def take(x: Array, order: list[int]) -> Codes:
    """Rows of every matrix of a stack in another order."""
    rows, width = x.shape[-2], x.shape[-1]
    found: Codes = []
    for g in range(len(x.codes) // (rows * width)):
        for r in order:
            start = (g * rows + r) * width
            found += x.codes[start : start + width]
    return found


def exchanged(rows: int) -> list[int]:
    return [*range(rows // 2, rows), *range(rows // 2)]


def alternating(rows: int) -> list[int]:
    order = []
    for i in range(rows // 2):
        order += [i, rows // 2 + i]
    return order


def fragments(rows: int) -> list[int]:
    """In blocks of 32 rows, row ``8 c + d`` comes from ``4 d + c``."""
    order = [0] * rows
    for start in range(0, rows, 32):
        for c in range(4):
            for d in range(8):
                order[start + 8 * c + d] = start + 4 * d + c
    return order


def rotated(first: Array, second: Array, gated: bool) -> dict[str, Codes]:
    rows = first.shape[1]
    order = fragments(rows)
    if gated:
        pairs = alternating(rows)
        order = [pairs[i] for i in order]
    return {"gemm1_weights": take(first, order), "gemm2_weights": take(second, fragments(second.shape[1]))}


def eights(rows: int) -> list[int]:
    """Eight rows of the first half, then eight of the second."""
    order = []
    for start in range(0, rows // 2, 8):
        order += [*range(start, start + 8), *range(rows // 2 + start, rows // 2 + start + 8)]
    return order


def warps(rows: int) -> list[int]:
    """Of 128 rows the first of each run of 32, then the second of each."""
    return [start + 32 * run + at for start in range(0, rows, 128) for at in range(32) for run in range(4)]


def fused_experts(l1: Array, l1_sf: Array, l2: Array, l2_sf: Array, words: bool) -> dict[str, Codes]:
    """The weights of DeepGEMM's fused layer of experts; ``words`` of scales are placed too."""
    turned = eights(l1.shape[1])
    first, second = l1_sf.codes, l2_sf.codes
    if words:
        first = take(l1_sf, [turned[r] for r in warps(l1_sf.shape[1])])
        second = take(l2_sf, warps(l2_sf.shape[1]))
    return {"l1": take(l1, turned), "l1_sf": first, "l2": l2.codes, "l2_sf": second}


def lines(scale: Array, group: int) -> Codes:
    """Scales of 64 rows and 128 columns: 16 bytes hold the scales of every ``folded``-th row."""
    experts, rows, columns = scale.shape
    side, width = 128 // group, 8 if scale.dtype == "bfloat16" else 16
    folded = 64 * side // width
    out = []
    for e in range(experts):
        table = part(scale, e).code_rows()
        for i in range(0, rows, 64):
            for j in range(0, columns, side):
                for f in range(folded):
                    for row in range(i + f, i + 64, folded):
                        out += table[row][j : j + side]
    return out


def from_six_axes(sf: Array) -> Codes:
    """Tile after tile, and in a tile the four rows of a lane, each of four columns."""
    lanes, quarters, rows, inner, columns, count = sf.shape
    out = []
    for g in range(count):
        for mt in range(rows):
            for kt in range(columns):
                for lane in range(lanes):
                    for quarter in range(quarters):
                        for c in range(inner):
                            at = ((lane * quarters + quarter) * rows + mt) * inner + c
                            out.append(sf.codes[(at * columns + kt) * count + g])
    return out


def padded(w13: Array, w2: Array, gated: bool) -> dict[str, Array]:
    """The intermediate size to a multiple of 16 with zeros, the up half in its own place."""
    experts, h, i = w2.shape
    size = -(-i // 16) * 16
    halves = 2 if gated else 1
    first: Codes = []
    second: Codes = []
    for e in range(experts):
        rows = part(w13, e).code_rows()
        for half in range(halves):
            for r in range(size):
                first += rows[half * i + r] if r < i else [0] * h
        for row in part(w2, e).code_rows():
            second += row + [0] * (size - i)
    return {
        "w13": Array(w13.dtype, (experts, halves * size, h), first),
        "w2": Array(w2.dtype, (experts, h, size), second),
    }


def prepared(
    w13: Array, w2: Array, w13_scale: Array, w2_scale: Array, *, block: bool, gated: bool, trtllm: bool
) -> dict[str, Codes]:
    """Pad, exchange, rotate, in this order."""
    if not block:
        made = padded(w13, w2, gated)
        w13, w2 = made["w13"], made["w2"]
    scale = w13_scale.codes
    if gated:
        w13 = Array(w13.dtype, w13.shape, take(w13, exchanged(w13.shape[1])))
        scale = take(w13_scale, exchanged(w13_scale.shape[1])) if block else scale
    found = {"w13": w13.codes, "w2": w2.codes}
    if trtllm and not block:
        made_of = rotated(w13, w2, gated)
        found = {"w13": made_of["gemm1_weights"], "w2": made_of["gemm2_weights"]}
    return found | {"w13_scale": scale, "w2_scale": w2_scale.codes}


def packed_exponents(scale: Array) -> Codes:
    """Exponent bytes of four columns in one int32, the first in the lowest byte."""
    found = []
    for row in scale.code_rows():
        for start in range(0, len(row), 4):
            word = 0
            for i, code in enumerate(row[start : start + 4]):
                assert code % (1 << 23) == 0, "no power of two"
                word |= (code >> 23) << 8 * i
            found.append(word - (1 << 32) if word >> 31 else word)
    return found


def required(scale: Array, mn: int, gran: int, target: str) -> Codes:
    """sm90: as they are; sm100: one row of exponents for every row of the operand."""
    if target == "sm90":
        return scale.codes
    groups = scale.shape[0] if len(scale.shape) == 3 else 1
    rows = [row for g in range(groups) for row in _spread(scale, g, groups, mn, gran)]
    width = scale.shape[-1]
    return packed_exponents(Array(scale.dtype, (len(rows), width), [c for row in rows for c in row]))


def _spread(scale: Array, group: int, groups: int, mn: int, gran: int) -> list[Codes]:
    rows = (part(scale, group) if groups > 1 else scale).code_rows()
    return [rows[m // gran] for m in range(mn)]


def _byte(m: int, c: int, across: int, height: int) -> int:
    """Where scale ``(m, c)`` of one matrix lies, tiles ``across`` of them side by side."""
    inside = m % height
    place = inside * 4 if height == 8 else inside % 32 * 16 + inside // 32 * 4
    return (m // height * across + c // 4) * height * 4 + place + c % 4


def blocked_in_order(scale: Array, order: list[int]) -> Codes:
    """As :func:`blocked`, of the rows in another order."""
    return blocked(Array(scale.dtype, scale.shape, take(scale, order)))


def blocked(scale: Array) -> Codes:
    """Bytes in tiles of 128x4, zeros in the padding."""
    return [code or 0 for code in swizzled(scale, "128x4")]


def from_blocked(memory: Array, rows: int, columns: int, tile: str) -> Codes:
    """The scales by row and column."""
    height = int(tile.partition("x")[0])
    matrices = memory.code_rows() if len(memory.shape) == 2 else [memory.codes]
    found = []
    for matrix in matrices:
        found += [matrix[_byte(m, c, -(-columns // 4), height)] for m in range(rows) for c in range(columns)]
    return found


def of_experts(scale: Array, first: Codes, rows: Codes, placement: str, capacity: int) -> list[int | None]:
    """Bytes of experts in tiles of their own; None in padding and gaps."""
    total, columns = scale.shape
    experts, across, room = len(first), -(-columns // 4), -(-capacity // 128) * 128
    height = experts * room if placement == "masked" else (total + 127 * experts) // 128 * 128
    memory: list[int | None] = [None] * (height * across * 4)
    given, behind = scale.code_rows(), 0
    for i in range(experts):
        start = {"tight": behind, "flashinfer": (first[i] + 127 * i) // 128 * 128, "masked": i * room}[placement]
        behind += -(-rows[i] // 128) * 128
        for m in range(rows[i]):
            for c in range(columns):
                memory[_byte(start + m, c, across, 128)] = given[first[i] + m][c]
    return memory


def of_column_groups(scale: Array, ends: Codes) -> Codes:
    """Bytes of groups of columns in tiles of their own, zeros elsewhere."""
    rows, columns = scale.shape
    height = -(-rows // 128) * 128
    memory, base, first = [0] * (height * (columns + 4 * len(ends))), 0, 0
    given = scale.code_rows()
    for end in ends:
        across = -(-(end - first) // 4)
        for m in range(rows):
            for c in range(first, end):
                memory[base + _byte(m, c - first, across, 128)] = given[m][c]
        base, first = base + height * across * 4, end
    return memory


def padded_tokens(x: Array, ends: Codes, size: int) -> dict[str, Codes]:
    """Rows of groups at multiples of ``size`` rows, zeros elsewhere."""
    given, width = x.code_rows(), x.shape[1]
    height = -(-(len(given) + len(ends) * size) // size) * size
    rows, first, place = [[0] * width for _ in range(height)], 0, 0
    starts, stops = list[int](), list[int]()
    for end in ends:
        starts.append(place)
        for m in range(first, end):
            rows[place + m - first] = given[m]
        while place < starts[-1] + end - first:
            place += size
        stops.append(place)
        first = end
    return {"out": [code for row in rows for code in row], "starts": starts, "ends": stops}


def unpadded_tokens(x: Array, ends: Codes, starts: Codes) -> Codes:
    given, found, first = x.code_rows(), list[int](), 0
    for end, start in zip(ends, starts, strict=True):
        for m in range(first, end):
            found += given[start + m - first]
        first = end
    return found


def packed_groups(scale: Array, ks: Codes, gran: int) -> Codes:
    """Exponent bytes of four K blocks of one group in an int32."""
    given, found, first = scale.code_rows(), [], 0
    for k in ks:
        blocks = -(-k // gran)
        for start in range(0, blocks, 4):
            for column in range(scale.shape[1]):
                word = 0
                for i in range(start, min(start + 4, blocks)):
                    word |= (given[first + i][column] >> 23) << 8 * (i - start)
                found.append(word - (1 << 32) if word >> 31 else word)
        first += blocks
    return found


def swizzled(scale: Array, tile: str) -> list[int | None]:
    """Bytes in tiles; None in the padding."""
    height = int(tile.partition("x")[0])
    matrices = [part(scale, g) for g in range(scale.shape[0])] if len(scale.shape) == 3 else [scale]
    found: list[int | None] = []
    for matrix in matrices:
        rows, columns = matrix.shape
        across = -(-columns // 4)
        memory: list[int | None] = [None] * (-(-rows // height) * height * across * 4)
        for m, row in enumerate(matrix.code_rows()):
            for c, code in enumerate(row):
                inside = m % height
                place = inside * 4 if height == 8 else inside % 32 * 16 + inside // 32 * 4
                memory[(m // height * across + c // 4) * height * 4 + place + c % 4] = code
        found += memory
    return found


def tile_tokens(tokens: int, top_k: int, experts: int) -> int:
    needed = math.floor(Fraction(13, 10) * (tokens * top_k // experts))
    return min(max(next(2**i for i in range(64) if 2**i >= needed), 8), 64)


def route_number(cutlass: int, weights: int, activations: int, per_token: int, rocm: int, rowwise: int) -> int:
    if cutlass:
        return 0
    if weights and activations:
        return 1 if rocm else 2
    return 3 if rowwise and per_token and not weights and not activations else 4


def repeated(scale: Array, widths: Array) -> Codes:
    return [code for code, width in zip(scale.codes, widths.codes, strict=True) for _ in range(width)]


def fnuz(inputs: dict[str, Array]) -> dict[str, Codes]:
    found = {"weight": [0 if code == 0x80 else code for code in inputs["weight"].codes]}
    for name in ("weight_scale", "input_scale"):
        if name in inputs:
            found[name] = [encode(2 * v, "float32") for v in inputs[name].values()]
    return found


def close(x: Array) -> int:
    first, *rest = x.values()
    assert all(isinstance(v, Fraction) for v in (first, *rest))
    return int(all(abs(v - first) <= Fraction("1e-8") + Fraction("1e-5") * abs(v) for v in rest))


def partition_fault(starts: Array, lens: list[int], block: int) -> str | None:
    """Why ``[processors + 1, 2]`` starts split the segments of the requests unevenly or not at all; None if they do."""
    segments = [(b, s) for b, length in enumerate(lens) for s in range((length + 4 * block - 1) // (4 * block))]
    place = {segment: i for i, segment in enumerate(segments)}
    cuts = []
    for b, s in starts.code_rows():
        later = [i for (request, segment), i in place.items() if (request, segment) >= (b, s)]
        cuts.append(min(later, default=len(segments)))
    if cuts[0] != 0 or cuts[-1] != len(segments) or cuts != sorted(cuts):
        return f"processors start at {cuts}"
    shares = [stop - start for start, stop in zip(cuts, cuts[1:], strict=False)]
    return None if max(shares) - min(shares) <= 1 else f"shares {shares}"
