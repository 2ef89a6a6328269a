"""MXFP8 down the columns and in squares, for training, where a matrix and its transpose are multiplied.

    columnwise    blocks of 32 rows of one column; scale bytes of the transpose
    32x32         one scale for 32 rows and 32 columns, so that a weight and its transpose have the same codes

Scale bytes of the columns are the matrix ``[K, M / 32]``, row-major (``linear``) or in tiles, as a product of the
transpose reads them; ``compact`` is its transpose ``[M / 32, K]``. Codes down the columns lie as the transpose does:
``q [M, K]`` is column-major, and ``q.t()`` contiguous. Formulas are those of :mod:`kernels.mx`. Under
``torch.compile`` each quantiser is one operator.

NaN and infinity are as of :mod:`kernels.mx`.
Source: OCP Microscaling Formats 1.0; TransformerEngine, torchao.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .checks import WIDE
from .errors import OptionError, shown
from .layout import swizzle_scale
from .mx import mxfp8_dequantize, mxfp8_quantize
from .mx_blocks import (
    FP8_ELEMENTS,
    LINEAR,
    MX_BLOCK,
    compiled_op,
    power,
    scale_bytes,
    shared_exponent,
    store_scale,
)
from .operators import empty
from .verbs import verb

COMPACT, TILES = "compact", "128x4"
DIRECTIONS = ("rowwise", "columnwise")


# --- as a contract, and as an operator, calls it -------------------------------------------------------------------


def _columns_fake(
    x: Tensor, layout: str = "128x4", rounding: str = "rceil", element: str = "e4m3"
) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    q = empty(k, m, like=x, dtype=FP8_ELEMENTS[element][3])
    if layout == COMPACT:
        return q.t(), empty(m // MX_BLOCK, k, like=x, dtype=torch.uint8)
    return q.t(), scale_bytes(q, MX_BLOCK, layout)


def _squares_fake(
    x: Tensor, layout: str = "128x4", direction: str = "rowwise", element: str = "e4m3"
) -> tuple[Tensor, Tensor]:
    q = empty(*x.shape, like=x, dtype=FP8_ELEMENTS[element][3])
    if direction == DIRECTIONS[0]:
        return q, scale_bytes(x, MX_BLOCK, LINEAR if layout == COMPACT else layout)
    return q, _columns_fake(x, layout)[1]


def _weights_fake(
    x: Tensor, layout: str = "128x4", rounding: str = "rceil", element: str = "e4m3"
) -> tuple[Tensor, Tensor]:
    e, n, k = x.shape
    q = empty(e, k, n, like=x, dtype=FP8_ELEMENTS[element][3])
    if layout == COMPACT:
        return q.mT, empty(e, n // MX_BLOCK, k, like=x, dtype=torch.uint8)
    return q.mT, empty(e, scale_bytes(q[0], MX_BLOCK, layout).shape[0], like=x, dtype=torch.uint8)


# --- the verbs -----------------------------------------------------------------------------------------------------


@verb("cast", outputs=("q", "scale"), fake=_columns_fake)
def mxfp8_quantize_columnwise(
    x: Tensor, layout: str = "128x4", rounding: str = "rceil", element: str = "e4m3"
) -> tuple[Tensor, Tensor]:
    """Quantise a matrix to MXFP8 in blocks of 32 rows.

    Parameters
    ----------
    x
        ``[M, K]`` bf16, f16 or f32, ``M`` a multiple of 32.
    layout
        ``128x4``, ``8x4`` or ``linear``, of the bytes ``[K, M / 32]``; or ``compact``, ``[M / 32, K]``.
    rounding, element
        As of :func:`kernels.mxfp8_quantize`.

    Returns
    -------
    q, scale
        ``q [M, K]`` of the element's dtype, column-major; ``scale`` uint8.

    Raises
    ------
    DtypeError, InputError, LayoutError, ShapeError
    """
    checks.nonempty("x", checks.dtype("x", checks.rank("x", x, 2), *WIDE), 0, 1)
    _rows(x)
    if torch.compiler.is_compiling():
        return compiled_op("mxfp8_quantize_columnwise", x, layout, rounding, element)
    q, scale = mxfp8_quantize(x.t().contiguous(), _plain(layout), rounding, element)
    return q.t(), scale.t().contiguous() if layout == COMPACT else scale


@verb("cast", outputs=("q", "scale"), fake=_weights_fake)
def mxfp8_quantize_3d(
    x: Tensor, layout: str = "128x4", rounding: str = "rceil", element: str = "e4m3"
) -> tuple[Tensor, Tensor]:
    """:func:`mxfp8_quantize_columnwise` of every weight of ``x [E, N, K]``, ``N`` a multiple of 32.

    Returns ``q [E, N, K]``, each weight column-major, and the bytes of each weight by themselves: those of
    ``[K, N / 32]`` in 128x4 tiles, ``[E, ..]``, or ``compact``, ``[E, N / 32, K]``.

    Raises DtypeError, InputError, LayoutError, OptionError, ShapeError.
    """
    e, n, k = checks.nonempty("x", checks.dtype("x", checks.rank("x", x, 3), *WIDE), 0, 1, 2).shape
    checks.multiple("N", n, MX_BLOCK, f"{MX_BLOCK} rows share a scale; pad N")
    if layout not in (TILES, COMPACT):
        raise OptionError(f"layout={shown(layout)}: there are {TILES}, {COMPACT}")
    if torch.compiler.is_compiling():
        return compiled_op("mxfp8_quantize_3d", x, layout, rounding, element)
    q, scale = mxfp8_quantize(x.mT.reshape(e * k, n), LINEAR, rounding, element)
    each = scale.reshape(e, k, n // MX_BLOCK)
    return q.reshape(e, k, n).mT, each.mT.contiguous() if layout == COMPACT else swizzle_scale(each, TILES)


@verb("cast", outputs=("q", "scale"), fake=_squares_fake)
def mxfp8_quantize_2d(
    x: Tensor, layout: str = "128x4", direction: str = "rowwise", element: str = "e4m3"
) -> tuple[Tensor, Tensor]:
    """Quantise a weight to MXFP8, one scale for 32x32 elements.

    Parameters
    ----------
    x
        ``[M, K]`` bf16, f16 or f32, both multiples of 32.
    layout
        Of the bytes ``[M, K / 32]``, or of those of the transpose as for :func:`mxfp8_quantize_columnwise`.
    direction
        ``rowwise`` or ``columnwise``: whose bytes are returned, each 32 times. Codes are the same.
    element
        ``e4m3`` or ``e5m2``.

    Raises
    ------
    DtypeError, InputError, LayoutError, OptionError, ShapeError
    """
    if element not in FP8_ELEMENTS:
        raise OptionError(f"element={shown(element)}: there are {', '.join(FP8_ELEMENTS)}")
    if direction not in DIRECTIONS:
        raise OptionError(f"direction={shown(direction)}: there are {', '.join(DIRECTIONS)}")
    checks.nonempty("x", checks.dtype("x", checks.rank("x", x, 2), *WIDE), 0, 1)
    _rows(x)
    checks.multiple("K", x.shape[1], MX_BLOCK, f"{MX_BLOCK} columns share a scale; pad K")
    if torch.compiler.is_compiling():
        return compiled_op("mxfp8_quantize_2d", x, layout, direction, element)
    top, emax, fraction, dtype = FP8_ELEMENTS[element]
    m, k = x.shape
    squares = x.float().reshape(m // MX_BLOCK, MX_BLOCK, k // MX_BLOCK, MX_BLOCK).transpose(1, 2)
    byte = shared_exponent(squares.flatten(2), "rceil", top, emax, fraction)
    scaled = (squares * power(254 - byte)[..., None, None]).clamp(-top, top)
    q = scaled.to(dtype).transpose(1, 2).reshape(m, k)
    if direction == DIRECTIONS[0]:
        return q, store_scale(byte.repeat_interleave(MX_BLOCK, dim=0), _plain(layout))
    if layout == COMPACT:
        return q, byte.repeat_interleave(MX_BLOCK, dim=1).to(torch.uint8)
    return q, store_scale(byte.t().repeat_interleave(MX_BLOCK, dim=0), layout)


@verb("cast")
def mxfp8_dequantize_columnwise(q: Tensor, scale: Tensor, layout: str = "128x4") -> Tensor:
    """:func:`kernels.mxfp8_dequantize` of codes whose scales are those of 32 rows each; layouts as of the quantiser.

    ``q`` ``[M, K]`` E4M3 or E5M2, ``scale`` ``[K, M / 32]`` uint8, or compact ``[M / 32, K]``, or flat
    in tiles ``[bytes]``. Returns float32 ``[M, K]``.

    Raises DeviceError, DtypeError, InputError, LayoutError, ShapeError.
    """
    checks.dtype("q", checks.rank("q", q, 2), *(record[3] for record in FP8_ELEMENTS.values()))
    checks.same_device(q=q, scale=scale)
    _rows(q)
    if layout == COMPACT:
        checks.operand("scale", scale, (q.shape[0] // MX_BLOCK, q.shape[1]), "a byte for each block", torch.uint8)
        scale = scale.t().contiguous()
    return mxfp8_dequantize(q.t().contiguous(), scale, _plain(layout)).t().contiguous()


def _plain(layout: str) -> str:
    return LINEAR if layout == COMPACT else layout


def _rows(x: Tensor) -> None:
    checks.multiple("M", x.shape[0], MX_BLOCK, f"{MX_BLOCK} rows share a scale; pad M")
