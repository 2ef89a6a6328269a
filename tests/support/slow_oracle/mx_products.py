"""Products of MX and NVFP4: nibbles, scale bytes out of their memory one by one, fractions, one rounding."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from tests.support.slow_oracle.mx import FP4, power
from tests.support.slow_oracle.numbers import Array, Value, decode, multiply
from tests.support.slow_oracle.products import Rows, scaled, transposed

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
    a: Array, b: Array, a_scale: Array, b_scale: Array, *, width: int, dtype: str, tiles: tuple[str, str], out: str,
    alpha: Value = Fraction(1), bias: list[Value] | None = None,
) -> list[int]:  # fmt: skip
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
    return dense(
        i["a"], i["b"], i["a_descale"], i["b_descale"], width=16 if two_levels else 32,
        dtype=E4M3 if two_levels else "e8m0", tiles=(tile, "128x4"), out=str(o["out_dtype"]), alpha=alpha,
    )  # fmt: skip


def scaled_mm(i: Inputs, o: Options) -> list[int]:
    """torch's: the recipe by the dtype of the scales."""
    dtype = i["scale_a"].dtype
    tile = "128x4" if o["swizzle"] == "SWIZZLE_32_4_4" else "linear"
    alpha: Value = Fraction(1)
    for side in "ab":
        if f"global_scale_{side}" in i:
            alpha = multiply(alpha, i[f"global_scale_{side}"].values()[0])
    return dense(
        i["mat_a"], i["mat_b"], i["scale_a"], i["scale_b"], width=16 if dtype == E4M3 else 32, dtype=dtype,
        tiles=(tile, tile), out=str(o["out_dtype"]), alpha=alpha, bias=i["bias"].values() if "bias" in i else None,
    )  # fmt: skip
