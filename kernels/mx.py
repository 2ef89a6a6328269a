"""MX and NVFP4: codes of 8 and 4 bits whose blocks of 32 or 16 share a scale of one byte, and back.

    x ~= value(q) * 2^(byte - 127)            MXFP8 (E4M3, E5M2), MXFP4 (E2M1): blocks of 32
    x ~= value(q) * e4m3(byte) / global       NVFP4 (E2M1): blocks of 16; ``global`` about 2688 / amax of the tensor

Codes of E2M1 lie two in a byte, the even column in the low nibble. Scale bytes are a matrix ``[M, K / block]`` or that
matrix in tiles (:func:`kernels.layout.swizzle_scale`), flat, with zeros in the padding.

``rounding`` says how a shared scale becomes a power of two: ``rceil`` takes the smallest for which nothing saturates
(NVIDIA's recipe), ``floor`` is OCP MX 1.0, ``ceil`` and ``even`` are torchao's. Codes are rounded to nearest with ties
to even and saturate. Under ``rceil`` and NVFP4 a NaN stays in its element (the largest value where the format has no
NaN) and an infinity saturates; under the others either makes its block NaN. Plain torch operations, the same bits on
every device; under ``torch.compile`` each quantiser is one operator, whose products no compiler contracts. Not covered:
scales of a row, blocks of 16x16, experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import checks
from kernels.checks import WIDE
from kernels.errors import OptionError, ShapeError
from kernels.layout import swizzle_scale

MX_BLOCK, NVFP4_BLOCK = 32, 16
LINEAR = "linear"
HEIGHTS = {"128x4": 128, "8x4": 8}
# Largest value, its exponent, and the fraction bits of an element format (OCP Microscaling Formats 1.0, 5.3).
FP8_ELEMENTS = {"e4m3": (448.0, 8, 3, torch.float8_e4m3fn), "e5m2": (57344.0, 15, 2, torch.float8_e5m2)}
FP4_MAX, FP4_EMAX, FP4_FRACTION = 6.0, 2, 1
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MAX = 448.0
NAN_BYTE, INF_BITS = 255, 0x7F800000


@checks.verb
def mxfp8_quantize(
    x: Tensor, layout: str = "128x4", rounding: str = "rceil", element: str = "e4m3"
) -> tuple[Tensor, Tensor]:
    """Quantise a matrix to MXFP8.

    Parameters
    ----------
    x
        ``[M, K]`` bf16, f16 or f32, ``K`` a multiple of 32.
    layout
        ``128x4``, ``8x4`` or ``linear``.
    rounding
        ``rceil``, ``floor``, ``ceil`` or ``even``.
    element
        ``e4m3`` or ``e5m2``.

    Returns
    -------
    q, scale
        ``q [M, K]`` of the element's dtype; ``scale`` uint8, ``[M, K / 32]`` or flat in tiles.

    Raises
    ------
    ShapeError, DtypeError, OptionError
    """
    if element not in FP8_ELEMENTS:
        raise OptionError(f"element={element!r}: there are {', '.join(FP8_ELEMENTS)}")
    if torch.compiler.is_compiling():
        return _compiled("mxfp8_quantize", x, layout, rounding, element)
    top, emax, fraction, dtype = FP8_ELEMENTS[element]
    blocks = _blocks(x, MX_BLOCK)
    byte = _shared_exponent(blocks, rounding, top, emax, fraction)
    scaled = blocks * _power(254 - byte)[..., None]
    q = scaled.clamp(-top, top).masked_fill((byte == NAN_BYTE)[..., None], torch.nan).to(dtype)
    return q.flatten(1), _stored(byte, layout)


@checks.verb
def mxfp4_quantize(x: Tensor, layout: str = "128x4", rounding: str = "rceil") -> tuple[Tensor, Tensor]:
    """Quantise a matrix to MXFP4; parameters as of :func:`mxfp8_quantize`.

    Returns
    -------
    q, scale
        ``q [M, K / 2]`` uint8, two codes each; ``scale`` uint8, ``[M, K / 32]`` or flat in tiles.
    """
    if torch.compiler.is_compiling():
        return _compiled("mxfp4_quantize", x, layout, rounding)
    blocks = _blocks(x, MX_BLOCK)
    byte = _shared_exponent(blocks, rounding, FP4_MAX, FP4_EMAX, FP4_FRACTION)
    return _packed(blocks * _power(254 - byte)[..., None]), _stored(byte, layout)


@checks.verb
def nvfp4_quantize(
    x: Tensor, global_scale: Tensor, layout: str = "128x4", is_global_scale_inversed: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantise a matrix to NVFP4.

    ``scale = E4M3(amax * (global_scale / 6))``, codes of ``x / (scale / global_scale)``. A block of zeros has the scale
    0; so has one whose scale rounds to 0.

    Parameters
    ----------
    x
        ``[M, K]`` bf16, f16 or f32, ``K`` a multiple of 16.
    global_scale
        One float32 value, ``2688 / amax`` of the tensor, or its inverse.
    is_global_scale_inversed
        Whether it is the inverse, which multiplies the codes.

    Returns
    -------
    q, scale
        ``q [M, K / 2]`` uint8, two codes each; ``scale`` uint8 (E4M3), ``[M, K / 16]`` or flat in tiles.
    """
    checks.scalar("global_scale", global_scale)
    checks.same_device(x=x, global_scale=global_scale)
    if torch.compiler.is_compiling():
        return _compiled("nvfp4_quantize", x, global_scale, layout, is_global_scale_inversed)
    blocks, g = _blocks(x, NVFP4_BLOCK), global_scale.reshape(())
    amax, one = _amax(blocks), torch.ones_like(g)
    t = amax * (1.0 / FP4_MAX) / g if is_global_scale_inversed else amax * (g * (1.0 / FP4_MAX))
    scale = torch.where(amax == 0, 0.0, t).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    both = scale.float() * (g if is_global_scale_inversed else one / g)
    inverse = (one / both).clamp(max=torch.finfo(torch.float32).max)
    return _packed(blocks * inverse[..., None]), _stored(scale.view(torch.uint8), layout)


@checks.verb
def mxfp8_dequantize(q: Tensor, scale: Tensor, layout: str = "128x4") -> Tensor:
    """``float32(value(q) * 2^(byte - 127))``; byte 0 is 2^-127, byte 255 NaN.

    Parameters
    ----------
    q
        ``[M, K]`` E4M3 or E5M2, ``K`` a multiple of 32.
    scale
        uint8, as the quantiser gives it; padding is not read.

    Returns
    -------
    Tensor
        ``[M, K]`` float32, infinite where the product is too large.
    """
    checks.dtype("q", checks.rank("q", q, 2), *(record[3] for record in FP8_ELEMENTS.values()))
    m, k = q.shape
    return _times(q.float(), _loaded(scale, m, k, MX_BLOCK, layout).view(torch.float8_e8m0fnu).float())


@checks.verb
def mxfp4_dequantize(q: Tensor, scale: Tensor, layout: str = "128x4") -> Tensor:
    """:func:`mxfp8_dequantize` of codes two in a byte, ``q [M, K / 2]`` uint8."""
    values = _values(q)
    stored = _loaded(scale, values.shape[0], values.shape[1], MX_BLOCK, layout)
    return _times(values, stored.view(torch.float8_e8m0fnu).float())


@checks.verb
def nvfp4_dequantize(q: Tensor, scale: Tensor, global_scale: Tensor, layout: str = "128x4") -> Tensor:
    """``value(q) * (scale * global_scale)`` in float32; ``global_scale`` is amax/2688, it multiplies.

    Parameters
    ----------
    q
        ``[M, K / 2]`` uint8, two codes each.
    scale
        uint8 (E4M3), as the quantiser gives it; padding is not read.
    global_scale
        One float32 value.
    """
    checks.scalar("global_scale", global_scale)
    checks.same_device(q=q, global_scale=global_scale)
    values = _values(q)
    stored = _loaded(scale, values.shape[0], values.shape[1], NVFP4_BLOCK, layout).view(torch.float8_e4m3fn).float()
    return _times(values, stored * global_scale.reshape(()))


def _compiled(name: str, *arguments: object) -> tuple[Tensor, Tensor]:
    """The operator of a quantiser."""
    q, scale = getattr(torch.ops.fp8_kernels, name)(*arguments)
    return q, scale


# --- blocks and scales --------------------------------------------------------------------------------------------


def _blocks(x: Tensor, width: int) -> Tensor:
    """Float32 ``[M, K / width, width]``."""
    checks.dtype("x", checks.rank("x", x, 2), *WIDE)
    checks.nonempty("x", x, 0, 1)
    checks.multiple("K", x.shape[1], width, f"{width} elements share a scale; pad K")
    return x.float().reshape(x.shape[0], x.shape[1] // width, width)


def _amax(blocks: Tensor) -> Tensor:
    """The largest magnitude of each block, NaN left out."""
    return torch.where(blocks.isnan(), 0.0, blocks).abs().amax(dim=-1)


def _shared_exponent(blocks: Tensor, rounding: str, top: float, emax: int, fraction: int) -> Tensor:
    """The scale byte of each block, int32, from the exponent bits of float32 numbers."""
    if rounding == "rceil":
        bits = (_amax(blocks) * (1.0 / top)).view(torch.int32)
        tiny = (bits > 1 << 22).int()  # subnormal: above 2^-127 the next byte is 1
        up = (bits >> 23) + (bits & 0x7FFFFF != 0).int()
        return torch.where(bits >> 23 > 0, up, tiny).clamp(max=254)
    bits = blocks.abs().amax(dim=-1).view(torch.int32)
    if rounding == "even":
        rounded = bits + (1 << (22 - fraction))
        bits = torch.where(bits < INF_BITS, rounded, bits)
    elif rounding not in ("floor", "ceil"):
        raise OptionError(f"rounding={rounding!r}: there are rceil, floor, ceil, even")
    step = (bits & 0x7FFFFF != 0).int() if rounding == "ceil" else 0
    return torch.where(bits < INF_BITS, ((bits >> 23) + step - emax).clamp(0, 254), NAN_BYTE)


def _power(byte: Tensor) -> Tensor:
    """``2^(byte - 127)`` for bytes 0 to 254 as float32; what lies below counts as 0."""
    byte = byte.clamp(min=0)
    return torch.where(byte == 0, 1 << 22, byte << 23).int().view(torch.float32)


def _stored(byte: Tensor, layout: str) -> Tensor:
    scale = byte.to(torch.uint8)
    return scale if layout == LINEAR else swizzle_scale(scale, _tile(layout))


def _tile(layout: str) -> str:
    if layout not in HEIGHTS:
        raise OptionError(f"layout={layout!r}: there are {', '.join(HEIGHTS)}, {LINEAR}")
    return layout


def _loaded(scale: Tensor, m: int, k: int, width: int, layout: str) -> Tensor:
    """The scale bytes ``[M, K / width]`` out of their layout, contiguous."""
    checks.dtype("scale", checks.tensor("scale", scale), torch.uint8)
    checks.multiple("K", k, width, f"{width} codes share a scale")
    c = k // width
    if layout == LINEAR:
        return checks.shape("scale", scale, (m, c), "a byte for each block").contiguous()
    height = HEIGHTS[_tile(layout)]
    down, across, row = -(-m // height), -(-c // 4), min(32, height)
    if tuple(scale.shape) != (down * across * height * 4,):
        raise ShapeError(
            f"scale has shape {list(scale.shape)}; the {layout} layout of {m} x {c} bytes is "
            f"[{down * across * height * 4}]"
        )
    tiles = scale.reshape(down, across, row, height // row, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * height, across * 4)[:m, :c].contiguous()


def _times(values: Tensor, scale: Tensor) -> Tensor:
    """Values ``[M, K]`` times a scale for each block of a row."""
    m, c = scale.shape
    return (values.reshape(m, c, -1) * scale[..., None]).reshape(values.shape)


# --- four bits ----------------------------------------------------------------------------------------------------


def _packed(scaled: Tensor) -> Tensor:
    """The nearest codes of E2M1 of ``[M, C, B]``, ties to even, two in a byte: ``[M, C * B / 2]``."""
    magnitude = scaled.abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for low, value in enumerate(FP4_VALUES[:-1]):
        middle = (value + FP4_VALUES[low + 1]) / 2
        code += magnitude >= middle if low % 2 else magnitude > middle
    code = torch.where(scaled.isnan(), 7, code | torch.signbit(scaled).to(torch.uint8) << 3).to(torch.uint8).flatten(1)
    return code[:, ::2] | code[:, 1::2] << 4


def _values(q: Tensor) -> Tensor:
    """The float32 values of packed codes ``[M, K / 2]``."""
    checks.dtype("q", checks.rank("q", q, 2), torch.uint8)
    codes = torch.stack([q & 0xF, q >> 4], dim=-1).flatten(1).int()
    exponent, fraction = codes >> 1 & 3, codes & 1  # no table: one on the device would have to be copied there first
    halves = (fraction + 2 * (exponent > 0).int()) << (exponent - 1).clamp(min=0)
    return torch.where(codes > 7, -halves.float(), halves.float()) * 0.5
