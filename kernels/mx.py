"""MX and NVFP4: codes of 8 and 4 bits whose blocks of 32 or 16 share a scale of one byte, and back.

    x ~= value(q) * 2^(byte - 127)            MXFP8 (E4M3, E5M2), MXFP4 (E2M1): blocks of 32
    x ~= value(q) * e4m3(byte) / global       NVFP4 (E2M1): blocks of 16; ``global`` about 2688 / amax of the tensor

Codes of E2M1 lie two in a byte, the even column in the low nibble. Scale bytes are a matrix ``[M, K / block]`` or that
matrix in tiles (:func:`kernels.layout.swizzle_scale`), flat, with zeros in the padding.

``rounding`` says how a shared scale becomes a power of two: ``rceil`` takes the smallest for which nothing saturates
(NVIDIA's recipe), ``floor`` is OCP MX 1.0, ``ceil`` and ``even`` are torchao's. Codes are rounded to nearest with ties
to even and saturate. Under ``rceil`` and NVFP4 a NaN stays in its element (the largest value where the format has no
NaN) and an infinity saturates; under the others either makes its block NaN. Plain torch operations, the same bits on
every device; under ``torch.compile`` each quantiser is one operator, whose products no compiler contracts. Further
forms (training, rows, experts, other elements, casts) are in :mod:`kernels.mx_forms`, :mod:`kernels.mx_columns` and
:mod:`kernels.mx_experts`.

Source: OCP Microscaling Formats 1.0; FlashInfer and torchao (mx_formats).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .backends.declaration import Blocks
from .errors import OptionError, shown
from .mx_blocks import (
    FP8_ELEMENTS,
    MX_BLOCK,
    NVFP4_BLOCK,
    compiled_op,
    fp4_values,
    load_scale,
    quantised,
    quantised_again,
    scale_bytes,
    times,
)
from .operators import empty
from .verbs import verb

# --- as a contract, and as an operator, calls it -------------------------------------------------------------------


def mxfp8_fake(
    x: Tensor, layout: str = "128x4", rounding: str = "rceil", element: str = "e4m3", alignment: int = MX_BLOCK
) -> tuple[Tensor, Tensor]:
    """Codes and scales of :func:`mxfp8_quantize` without values.

    ``x`` ``[M, K]``; returns dtypes and shapes as of :func:`mxfp8_quantize`: codes ``[M, K]`` and uint8 scales.
    """
    *lead, k = x.shape
    q = empty(*lead, k + -k % alignment, like=x, dtype=FP8_ELEMENTS[element][3])
    return q, scale_bytes(q, MX_BLOCK, layout)


def mxfp4_fake(x: Tensor, layout: str = "128x4", rounding: str = "rceil") -> tuple[Tensor, Tensor]:
    """Codes and scales of :func:`mxfp4_quantize` without values.

    ``x`` ``[M, K]``; returns uint8 ``[M, K / 2]`` and scales as of :func:`mxfp4_quantize`.
    """
    return empty(x.shape[0], x.shape[1] // 2, like=x, dtype=torch.uint8), scale_bytes(x, MX_BLOCK, layout)


def nvfp4_fake(
    x: Tensor, global_scale: Tensor, layout: str = "128x4", is_global_scale_inversed: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes and scales of :func:`nvfp4_quantize` without values.

    ``x`` ``[M, K]``, ``global_scale`` of any shape; returns uint8 ``[M, K / 2]`` and scales as of
    :func:`nvfp4_quantize`.
    """
    return empty(x.shape[0], x.shape[1] // 2, like=x, dtype=torch.uint8), scale_bytes(x, NVFP4_BLOCK, layout)


# --- the verbs -----------------------------------------------------------------------------------------------------


def _run_mxfp8(
    x: Tensor, layout: str = "128x4", rounding: str = "rceil", element: str = "e4m3", alignment: int = MX_BLOCK
) -> tuple[Tensor, Tensor]:
    how = Blocks(element, rounding, layout, False, False)
    return quantised_again("quant_mxfp8", x, how, x.shape[1] + -x.shape[1] % alignment, None)


def _run_mxfp4(x: Tensor, layout: str = "128x4", rounding: str = "rceil") -> tuple[Tensor, Tensor]:
    return quantised_again("quant_mxfp4", x, Blocks("e2m1", rounding, layout, False, False), x.shape[1], None)


def _run_nvfp4(
    x: Tensor, global_scale: Tensor, layout: str = "128x4", is_global_scale_inversed: bool = False
) -> tuple[Tensor, Tensor]:
    if global_scale.numel() > 1:
        checks.shape("global_scale", global_scale, (x.shape[0],), "[1], or [M] for each row")
    how = Blocks("e2m1", "rceil", layout, is_global_scale_inversed, False)
    return quantised_again("quant_nvfp4", x, how, x.shape[1], global_scale)


@verb("quant_mxfp8", outputs=("q", "scale"), fake=mxfp8_fake, run=_run_mxfp8)
def mxfp8_quantize(
    x: Tensor, layout: str = "128x4", rounding: str = "rceil", element: str = "e4m3", alignment: int = MX_BLOCK
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
    alignment
        A multiple of 32: codes and scales are those of as many columns, zeros behind the values.

    Returns
    -------
    q, scale
        ``q [M, K]`` of the element's dtype; ``scale`` uint8, ``[M, K / 32]`` or flat in tiles.

    Raises
    ------
    ShapeError, DtypeError, OptionError, InputError, LayoutError
    """
    if element not in FP8_ELEMENTS:
        raise OptionError(f"element={shown(element)}: there are {', '.join(FP8_ELEMENTS)}")
    checks.rank("x", x, 2)
    checks.multiple("alignment", checks.positive("alignment", alignment), MX_BLOCK, "the elements that share a scale")
    if torch.compiler.is_compiling():
        return compiled_op("mxfp8_quantize", x, layout, rounding, element, alignment)
    columns = x.shape[-1] + -x.shape[-1] % alignment
    return quantised("quant_mxfp8", x, element, rounding=rounding, layout=layout, columns=columns)


@verb("quant_mxfp4", outputs=("q", "scale"), fake=mxfp4_fake, run=_run_mxfp4)
def mxfp4_quantize(x: Tensor, layout: str = "128x4", rounding: str = "rceil") -> tuple[Tensor, Tensor]:
    """Quantise a matrix to MXFP4; parameters as of :func:`mxfp8_quantize`.

    Returns
    -------
    q, scale
        ``q [M, K / 2]`` uint8, two codes each; ``scale`` uint8, ``[M, K / 32]`` or flat in tiles.
    """
    if torch.compiler.is_compiling():
        return compiled_op("mxfp4_quantize", x, layout, rounding)
    return quantised("quant_mxfp4", x, "e2m1", rounding=rounding, layout=layout)


@verb(
    "quant_nvfp4",
    contracts=("nvfp4_quantize", "scaled_fp4_quant"),
    outputs=("q", "scale"),
    fake=nvfp4_fake,
    run=_run_nvfp4,
)
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
        One float32 value, ``2688 / amax`` of the tensor, or ``[M]``, of each row; or the inverses.
    is_global_scale_inversed
        Whether they are the inverses, which multiply the codes.

    Returns
    -------
    q, scale
        ``q [M, K / 2]`` uint8, two codes each; ``scale`` uint8 (E4M3), ``[M, K / 16]`` or flat in tiles.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, ShapeError
    """
    by_row = global_scale.numel() > 1 if isinstance(global_scale, Tensor) else False
    if by_row:
        checks.dtype("global_scale", global_scale, torch.float32)
        checks.shape("global_scale", global_scale, (checks.rank("x", x, 2).shape[0],), "[1], or [M] for each row")
    else:
        checks.scalar("global_scale", global_scale)
    checks.same_device(x=x, global_scale=global_scale)
    if torch.compiler.is_compiling():
        return compiled_op("nvfp4_quantize", x, global_scale, layout, is_global_scale_inversed)
    return quantised(
        "quant_nvfp4", x, "e2m1", layout=layout, global_scale=global_scale, inversed=is_global_scale_inversed
    )


@verb("cast")
def mxfp8_dequantize(q: Tensor, scale: Tensor, layout: str = "128x4") -> Tensor:
    """``float32(value(q) * 2^(byte - 127))``; byte 0 is 2^-127, byte 255 NaN.

    ``scale`` ``[M, K / 32]``, or flat in tiles ``[bytes]``.

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

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, ShapeError
    """
    checks.dtype("q", checks.rank("q", q, 2), *(record[3] for record in FP8_ELEMENTS.values()))
    checks.same_device(q=q, scale=scale)
    m, k = q.shape
    return times(q.float(), load_scale(scale, m, k, MX_BLOCK, layout).view(torch.float8_e8m0fnu).float())


@verb("cast")
def mxfp4_dequantize(q: Tensor, scale: Tensor, layout: str = "128x4") -> Tensor:
    """:func:`mxfp8_dequantize` of codes two in a byte, ``q [M, K / 2]`` uint8.

    ``scale`` ``[M, K / 32]``, or flat in tiles ``[bytes]``.

    Raises DeviceError, InputError.
    """
    checks.same_device(q=q, scale=scale)
    values = fp4_values(q)
    stored = load_scale(scale, values.shape[0], values.shape[1], MX_BLOCK, layout)
    return times(values, stored.view(torch.float8_e8m0fnu).float())


@verb("cast")
def nvfp4_dequantize(q: Tensor, scale: Tensor, global_scale: Tensor, layout: str = "128x4") -> Tensor:
    """``value(q) * (scale * global_scale)`` in float32; ``global_scale`` is amax/2688, it multiplies.

    ``scale`` ``[M, K / 16]``, or flat in tiles ``[bytes]``; ``global_scale`` of any shape with one value. Returns
    float32 ``[M, K]``.

    Parameters
    ----------
    q
        ``[M, K / 2]`` uint8, two codes each.
    scale
        uint8 (E4M3), as the quantiser gives it; padding is not read.
    global_scale
        One float32 value.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, ShapeError
    """
    checks.scalar("global_scale", global_scale)
    checks.same_device(q=q, scale=scale, global_scale=global_scale)
    values = fp4_values(q)
    stored = load_scale(scale, values.shape[0], values.shape[1], NVFP4_BLOCK, layout).view(torch.float8_e4m3fn).float()
    return times(values, stored * global_scale.reshape(()))
