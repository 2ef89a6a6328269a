"""Blocks that share a scale byte: splitting, shared exponents, scales of two levels, packing, layouts of scale bytes.

What the quantisers of :mod:`kernels.mx` and its neighbours have in common. Plain torch operations, each rounded once in
float32, the same bits on every device.

Sources: OCP Microscaling Formats 1.0; TransformerEngine core_nvfp4.cuh.

NaN: an amax leaves it out under ``rceil`` and for two levels; under the other roundings its block is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from . import checks
from .backends.declaration import Blocks, Matrices
from .checks import WIDE
from .errors import OptionError, ShapeError, shown
from .layout import swizzle_scale
from .routes import dtype_name, route

MX_BLOCK, NVFP4_BLOCK = 32, 16
LINEAR = "linear"
ROUNDINGS = ("rceil", "floor", "ceil", "even")
EVEN_OF_FINITE = "even_of_finite"
"""vLLM's of the rows of experts: ``even`` of an amax without NaN, up to byte 254; under byte 0 every code is 0."""
HEIGHTS = {"128x4": 128, "8x4": 8}
# Largest value, its exponent, and the fraction bits of an element format (OCP Microscaling Formats 1.0, 5.3).
FP8_ELEMENTS = {"e4m3": (448.0, 8, 3, torch.float8_e4m3fn), "e5m2": (57344.0, 15, 2, torch.float8_e5m2)}
FP4_MAX, FP4_EMAX, FP4_FRACTION = 6.0, 2, 1
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MAX = 448.0
NAN_BYTE, INF_BITS = 255, 0x7F800000


class Format(NamedTuple):
    """Codes of a weight and their scales: ``width`` codes of a row share one, ``packed`` lie in a byte."""

    codes: torch.dtype
    scale: torch.dtype
    width: int
    packed: int


FORMATS: Mapping[str, Format] = {
    "mxfp8": Format(torch.float8_e4m3fn, torch.float8_e8m0fnu, MX_BLOCK, 1),
    "mxfp4": Format(torch.uint8, torch.float8_e8m0fnu, MX_BLOCK, 2),
    "nvfp4": Format(torch.uint8, torch.float8_e4m3fn, NVFP4_BLOCK, 2),
}


def compiled_op(name: str, *arguments: object) -> tuple[Tensor, Tensor]:
    """The operator of a quantiser.

    Returns codes ``[M, K]``, or two a byte ``[M, K / 2]``, and uint8 scales.
    """
    q, scale = getattr(torch.ops.fp8_kernels, name)(*arguments)
    return q, scale


def size_of(rows: int, columns: int, tile: str) -> int:
    """Scales that the memory of a matrix holds, padding included."""
    if tile == LINEAR:
        return rows * columns
    height = HEIGHTS[tile]
    return (rows + height - 1) // height * height * ((columns + 3) // 4 * 4)


def scale_bytes(x: Tensor, width: int, layout: str) -> Tensor:
    """Memory for the scale bytes of a matrix ``x``, ``width`` elements each.

    ``x`` ``[M, K]``; returns uint8 ``[M, K / width]`` or flat in tiles, without values.
    """
    m, c = x.shape[0], x.shape[1] // width
    shape = (m, c) if layout == LINEAR else (size_of(m, c, layout),)
    return torch.empty(shape, dtype=torch.uint8, device=x.device)


# --- blocks and scales --------------------------------------------------------------------------------------------


def split_blocks(x: Tensor, width: int) -> Tensor:
    """Float32 ``[M, K / width, width]``.

    ``x`` ``[M, K]`` bf16, f16 or f32.

    Raises DtypeError, InputError, LayoutError, ShapeError.
    """
    whole_blocks(x, width)
    return x.float().reshape(x.shape[0], x.shape[1] // width, width)


def whole_blocks(x: Tensor, width: int) -> None:
    """Refuse what is no matrix of whole blocks.

    ``x`` ``[M, K]`` bf16, f16 or f32. Raises DtypeError, InputError, LayoutError, ShapeError.
    """
    checks.dtype("x", checks.rank("x", x, 2), *WIDE)
    checks.nonempty("x", x, 0, 1)
    checks.multiple("K", x.shape[1], width, f"{width} elements share a scale; pad K")


def quantised(
    op: str,
    x: Tensor,
    element: str,
    *,
    rounding: str = "rceil",
    layout: str = "128x4",
    columns: int | None = None,
    global_scale: Tensor | None = None,
    inversed: bool = False,
    gated: bool = False,
    matrices: Matrices | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes of a matrix by the backend of the plan.

    Parameters
    ----------
    op
        ``quant_mxfp8``, ``quant_mxfp4`` or ``quant_nvfp4``.
    x
        ``[M, K]`` bf16, f16 or f32, of whole blocks.
    element
        ``e4m3``, ``e5m2`` or ``e2m1``, two codes a byte.
    rounding, layout
        As of :func:`kernels.mxfp8_quantize`; :data:`EVEN_OF_FINITE` too, of ``e2m1``.
    columns
        Of the codes, zeros behind the values; default ``K``.
    gated
        ``x`` is ``[M, 2 K] = [gate, up]``, and :func:`silu_product` of it is quantised.
    global_scale
        float32 ``[1]`` or ``[M]``: blocks of 16 under E4M3 scales (:func:`two_levels`, ``inversed``). None: blocks of
        32 under E8M0 scales.
    matrices
        ``x`` has the rows of several, each with tiles of its own, and a ``global_scale`` for each or for all.

    Returns
    -------
    q, scale
        ``[M, columns]`` E4M3 or E5M2, or uint8 ``[M, columns / 2]``; uint8, ``[M, columns / width]`` or flat in tiles.

    Raises
    ------
    DtypeError, InputError, LayoutError, OptionError, ShapeError
    """
    whole_blocks(x, (MX_BLOCK if global_scale is None else NVFP4_BLOCK) << gated)
    if rounding not in ROUNDINGS and rounding is not EVEN_OF_FINITE:
        raise OptionError(f"rounding={shown(rounding)}: there are {', '.join(ROUNDINGS)}")
    if layout != LINEAR:
        _tile(layout)
    how = Blocks(element, rounding, layout, inversed, gated)
    return quantised_again(op, x, how, columns or x.shape[1] >> gated, global_scale, matrices)


def quantised_again(
    op: str, x: Tensor, how: Blocks, columns: int, global_scale: Tensor | None, matrices: Matrices | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`quantised` of operands and options like those of a call that was checked.

    ``x`` ``[M, K]`` bf16, f16 or f32, of which M may be another; ``global_scale`` float32 ``[1]`` or ``[M]``. Returns
    as of :func:`quantised`.

    Raises ShapeError: there is no row.
    """
    if x.shape[0] == 0:
        checks.nonempty("x", x, 0, 1)
    element, rounding, layout, inversed, gated = how
    own = rounding == "rceil" and element != "e5m2" and not inversed and not gated and matrices is None
    usual = own and (global_scale is None or global_scale.numel() == 1)
    key = ("a_dtype", dtype_name(x.dtype)), ("tiles", layout), ("recipe", "usual" if usual else "other")
    return route(op, x.device, *key).quant_blocks(x, how, columns, global_scale, matrices)


def block_amax(blocks: Tensor) -> Tensor:
    """The largest magnitude of each block, NaN left out.

    ``blocks`` ``[..., C, B]`` float32; returns float32 ``[..., C]``.
    """
    return torch.where(blocks.isnan(), 0.0, blocks).abs().amax(dim=-1)


def shared_exponent(blocks: Tensor, rounding: str, top: float, emax: int, fraction: int) -> Tensor:
    """The scale byte of each block, int32, from the exponent bits of float32 numbers.

    ``blocks`` ``[..., C, B]`` float32; returns int32 ``[..., C]``.

    Raises OptionError.
    """
    if rounding == "rceil":
        bits = (block_amax(blocks) * (1.0 / top)).view(torch.int32)
        tiny = (bits > 1 << 22).int()  # subnormal: above 2^-127 the next byte is 1
        up = (bits >> 23) + (bits & 0x7FFFFF != 0).int()
        return torch.where(bits >> 23 > 0, up, tiny).clamp(max=254)
    bits = blocks.abs().amax(dim=-1).view(torch.int32)
    if rounding == "even":
        rounded = bits + (1 << (22 - fraction))
        bits = torch.where(bits < INF_BITS, rounded, bits)
    elif rounding not in ROUNDINGS:
        raise OptionError(f"rounding={shown(rounding)}: there are {', '.join(ROUNDINGS)}")
    step = (bits & 0x7FFFFF != 0).int() if rounding == "ceil" else 0
    return torch.where(bits < INF_BITS, ((bits >> 23) + step - emax).clamp(0, 254), NAN_BYTE)


def power(byte: Tensor) -> Tensor:
    """``2^(byte - 127)`` for bytes 0 to 254 as float32; what lies below counts as 0.

    ``byte`` int32 of any shape; returns float32 of the same shape.
    """
    byte = byte.clamp(min=0)
    return torch.where(byte == 0, 1 << 22, byte << 23).int().view(torch.float32)


def store_scale(byte: Tensor, layout: str) -> Tensor:
    """Bytes ``[M, C]`` of scales as uint8: as they are, or flat in tiles of the layout.

    ``byte`` ``[M, C]`` integers.
    """
    scale = byte.to(torch.uint8)
    return scale if layout == LINEAR else swizzle_scale(scale, _tile(layout))


def _tile(layout: str) -> str:
    if layout not in HEIGHTS:
        raise OptionError(f"layout={shown(layout)}: there are {', '.join(HEIGHTS)}, {LINEAR}")
    return layout


def load_scale(scale: Tensor, m: int, k: int, width: int, layout: str, name: str = "scale") -> Tensor:
    """The scale bytes ``[M, K / width]`` out of their layout, contiguous.

    ``scale`` ``[M, K / width]`` uint8, or flat in tiles.

    Raises DtypeError, InputError, LayoutError, ShapeError.
    """
    checks.dtype(name, checks.tensor(name, scale), torch.uint8)
    checks.multiple("K", k, width, f"{width} codes share a scale")
    c = k // width
    if layout == LINEAR:
        return checks.shape(name, scale, (m, c), "a byte for each block").contiguous()
    height = HEIGHTS[_tile(layout)]
    down, across, row = -(-m // height), -(-c // 4), min(32, height)
    if tuple(scale.shape) != (down * across * height * 4,):
        raise ShapeError(
            f"{name} has shape {list(scale.shape)}; the {layout} layout of {m} x {c} bytes is "
            f"[{down * across * height * 4}]"
        )
    tiles = scale.reshape(down, across, row, height // row, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * height, across * 4)[:m, :c].contiguous()


def rows_of_scales(m: int, experts: int) -> int:
    """Rows of scale bytes that either placement of ``m`` rows fits into."""
    height = HEIGHTS["128x4"]
    return (m + (height - 1) * experts) // height * height


def expert_places(m: int, matrices: Matrices) -> tuple[Tensor, Tensor]:
    """The matrix of every row (their count for none), and its row of scale bytes, -1 for none.

    ``matrices`` with offsets; returns int64 ``[m]`` each.
    """
    assert matrices.offsets is not None, "the rows of matrices of one height have their places by division"
    height, ends = HEIGHTS["128x4"], matrices.offsets.to(torch.int64)
    row = torch.arange(m, device=ends.device, dtype=torch.int64)
    matrix = torch.searchsorted(ends[1:].contiguous(), row, right=True)
    if matrices.placement == "flashinfer":
        index = torch.arange(len(ends), device=ends.device, dtype=torch.int64)
        start = (ends + (height - 1) * index) // height * height
    else:
        padded = (ends.diff() + height - 1) // height * height
        start = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
    return matrix, torch.where(row < ends[-1], row - ends[matrix] + start[matrix], -1)


def scattered_scales(scale: Tensor, row: Tensor, experts: int) -> Tensor:
    """Scale bytes at their rows, in 128x4 tiles; those of no expert fall into a row that is cut off.

    ``scale`` ``[M, C]`` uint8, ``row`` ``[M]`` int64, -1 for none; returns uint8 ``[bytes]``.
    """
    height = rows_of_scales(scale.shape[0], experts)
    whole = torch.zeros(height + 1, scale.shape[1], dtype=torch.uint8, device=scale.device)
    whole[torch.where(row < 0, height, row)] = scale
    return swizzle_scale(whole[:height])


def times(values: Tensor, scale: Tensor) -> Tensor:
    """Values ``[M, K]`` times a scale for each block of a row.

    ``values`` ``[M, K]`` and ``scale`` ``[M, C]`` float32; returns float32 ``[M, K]``.
    """
    m, c = scale.shape
    return (values.reshape(m, c, -1) * scale[..., None]).reshape(values.shape)


def two_levels(amax: Tensor, g: Tensor, inversed: bool = False) -> tuple[Tensor, Tensor]:
    """E4M3 scale bytes of blocks, and what their values are multiplied by; ``g`` is 2688/amax, or its inverse.

    ``amax`` ``[M, C]`` and ``g``, a scalar or ``[M, 1]``, float32; returns uint8 and float32 ``[M, C]``.

    A block of zeros has the scale 0.
    """
    one = torch.ones_like(g)
    t = amax * (1.0 / FP4_MAX) / g if inversed else amax * (g * (1.0 / FP4_MAX))
    return e4m3_scale(torch.where(amax == 0, 0.0, t), g if inversed else one / g)


def e4m3_scale(t: Tensor, decode: Tensor) -> tuple[Tensor, Tensor]:
    """``t`` as E4M3 bytes, and ``1 / (scale * decode)``, finite.

    ``t`` ``[M, C]`` and ``decode``, a scalar or ``[M, 1]``, float32; returns uint8 and float32 ``[M, C]``.
    """
    scale = t.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    both = scale.float() * decode
    inverse = (torch.ones_like(both) / both).clamp(max=torch.finfo(torch.float32).max)
    return scale.view(torch.uint8), inverse


def silu_product(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``x [.., 2 I] = [gate, up]`` in float32, rounded once to the dtype of ``x``."""
    gate, up = x.float().chunk(2, dim=-1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(x.dtype)


# --- four bits ----------------------------------------------------------------------------------------------------


def pack(codes: Tensor) -> Tensor:
    """Codes ``[..., C, B]`` two in a byte: ``[..., C * B / 2]``, the even column in the low nibble.

    ``codes`` ``[..., C, B]`` uint8; returns uint8.
    """
    flat = codes.flatten(-2)
    return flat[..., ::2] | flat[..., 1::2] << 4


def pack_nearest(scaled: Tensor) -> Tensor:
    """The nearest codes of ``[..., C, B]``, ties to even, two in a byte.

    ``scaled`` ``[..., C, B]`` float32; returns uint8 ``[..., C B / 2]``.
    """
    return pack(fp4_codes(scaled))


def fp4_codes(scaled: Tensor) -> Tensor:
    """The nearest codes of E2M1, uint8 of any shape, ties to even; NaN is the largest value.

    ``scaled`` float32 of any shape.
    """
    magnitude = scaled.abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for low, value in enumerate(FP4_VALUES[:-1]):
        middle = (value + FP4_VALUES[low + 1]) / 2
        code += magnitude >= middle if low % 2 else magnitude > middle
    return torch.where(scaled.isnan(), 7, code | torch.signbit(scaled).to(torch.uint8) << 3).to(torch.uint8)


def fp4_values(q: Tensor) -> Tensor:
    """The float32 values of packed codes ``[M, K / 2]``.

    ``q`` ``[M, K / 2]`` uint8.

    Raises DtypeError, InputError, LayoutError, ShapeError.
    """
    checks.dtype("q", checks.rank("q", q, 2), torch.uint8)
    return fp4_decoded(torch.stack([q & 0xF, q >> 4], dim=-1).flatten(1))


def fp4_decoded(code: Tensor) -> Tensor:
    """The float32 values of codes of E2M1, one each.

    ``code`` uint8 of any shape; returns float32 of the same shape.
    """
    codes = code.int()
    exponent, fraction = codes >> 1 & 3, codes & 1  # no table: one on the device would have to be copied there first
    halves = (fraction + 2 * (exponent > 0).int()) << (exponent - 1).clamp(min=0)
    return torch.where(codes > 7, -halves.float(), halves.float()) * 0.5
