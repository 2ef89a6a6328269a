"""The activation between two products, or the norm before one, quantised to MXFP8, MXFP4 or NVFP4 as it is computed.

    silu(gate) * up           computed in float32, rounded once to the dtype of ``x``
    rms_norm(x [+ residual])  rounded as ``rounding`` says (:mod:`kernels.fused`)

Codes, scale bytes and layouts are those of :mod:`kernels.mx` of that value. On a GPU each is one kernel. Exponential
and reciprocal square root are the device's.

NaN and infinity are as of :mod:`kernels.mx`; a row of a norm that has one is NaN in every element.
Source: derived in this package from :mod:`kernels.fused` and :mod:`kernels.mx`, of which these are compositions.
FlashInfer has them for NVFP4 and MXFP4 (``rmsnorm_fp4quant``, ``silu_and_mul_nvfp4_quantize``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .adapters import by_name
from .backends.declaration import Blocks
from .errors import OptionError, shown
from .fused import EPSILON, ROUNDINGS, backend_of, check_norm
from .mx import mxfp4_fake, mxfp8_fake, nvfp4_fake
from .mx_blocks import FORMATS, HEIGHTS, LINEAR, quantised
from .operators import empty
from .verbs import serve, verb

ELEMENTS = {"mxfp8": "e4m3", "mxfp4": "e2m1", "nvfp4": "e2m1"}


def _codes(x: Tensor, kind: str, layout: str) -> tuple[Tensor, Tensor]:
    if kind == "nvfp4":
        return nvfp4_fake(x, x, layout)
    return mxfp8_fake(x, layout) if kind == "mxfp8" else mxfp4_fake(x, layout)


def _silu_fake(x: Tensor, kind: str, global_scale: Tensor | None, layout: str) -> tuple[Tensor, Tensor]:
    return _codes(empty(x.shape[0], x.shape[1] // 2, like=x, dtype=x.dtype), kind, layout)


def _norm_fake(
    x: Tensor,
    weight: Tensor,
    kind: str,
    epsilon: float,
    global_scale: Tensor | None,
    residual: Tensor | None,
    layout: str,
    rounding: str,
) -> tuple[Tensor, Tensor, Tensor]:
    z = empty(*(x.shape if residual is not None else (0,)), like=x, dtype=x.dtype)
    return *_codes(x, kind, layout), z


def _checked(x: Tensor, kind: str, global_scale: Tensor | None, layout: str, parts: int) -> None:
    if kind not in ELEMENTS:
        raise OptionError(f"kind={shown(kind)}: there are {', '.join(ELEMENTS)}")
    if layout != LINEAR and layout not in HEIGHTS:
        raise OptionError(f"layout={shown(layout)}: there are {', '.join(HEIGHTS)}, {LINEAR}")
    checks.dtype("x", checks.rank("x", x, 2), *checks.WIDE)
    checks.nonempty("x", x, 0, 1)
    width = FORMATS[kind].width
    checks.multiple("the columns of x", x.shape[1], parts * width, f"{width} values share a scale; pad them")
    if (kind == "nvfp4") != (global_scale is not None):
        raise OptionError(f"kind={shown(kind)}: nvfp4 has a global_scale, 2688 / amax, and the others have none")
    checks.scalar("global_scale", global_scale)
    checks.same_device(x=x, global_scale=global_scale)


@verb(fake=_silu_fake)
def silu_and_mul_block_scaled_quant(
    x: Tensor, kind: str, *, global_scale: Tensor | None = None, layout: str = "128x4"
) -> tuple[Tensor, Tensor]:
    """``silu(gate) * up`` of ``x [M, 2 I] = [gate, up]`` in blocks that share a scale byte.

    Parameters
    ----------
    x
        ``[M, 2 I]`` bf16, f16 or f32, ``I`` a multiple of 32, or of 16 for ``nvfp4``.
    kind
        ``mxfp8`` (E4M3), ``mxfp4`` or ``nvfp4``.
    global_scale
        float32 ``[1]``, 2688 over the amax of the product: of ``nvfp4`` only.
    layout
        ``128x4``, ``8x4`` or ``linear``.

    Returns
    -------
    q, scale
        As of :func:`kernels.mxfp8_quantize`, :func:`kernels.mxfp4_quantize` or :func:`kernels.nvfp4_quantize`: E4M3
        ``[M, I]`` or uint8 ``[M, I / 2]``, and uint8 ``[M, I / 32]``, ``[M, I / 16]`` or flat in tiles.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError
    """
    _checked(x, kind, global_scale, layout, 2)
    if torch.compiler.is_compiling():
        q, scale = torch.ops.fp8_kernels.silu_and_mul_block_scaled_quant(x, kind, global_scale, layout)
        return q, scale
    factor = None if global_scale is None else global_scale.reshape(1)
    return quantised(f"quant_{kind}", x, ELEMENTS[kind], layout=layout, global_scale=factor, gated=True)


for _kind in ("mxfp8", "mxfp4"):
    serve(
        f"silu_and_mul_{_kind}_quantize",
        f"quant_{_kind}",
        silu_and_mul_block_scaled_quant,
        by_name("q", "scale", defaults={"kind": _kind}),
    )


@verb(fake=_norm_fake)
def rms_norm_block_scaled_quant(
    x: Tensor,
    weight: Tensor,
    kind: str,
    epsilon: float = EPSILON,
    *,
    global_scale: Tensor | None = None,
    residual: Tensor | None = None,
    layout: str = "128x4",
    rounding: str = "each",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """RMS norm of ``x`` or ``x + residual``, times ``weight``, in blocks that share a scale byte.

    Parameters
    ----------
    x, residual
        ``[M, H]`` bf16, f16 or f32, ``H`` a multiple of 32, or of 16 for ``nvfp4``; their sum is float32.
    weight
        ``[H]`` of that dtype.
    kind, layout
        As of :func:`silu_and_mul_block_scaled_quant`.
    global_scale
        float32 ``[1]``, 2688 over the amax of the norm: of ``nvfp4`` only.
    epsilon
        What is added to the mean square, between 0 and 1.
    rounding
        ``each`` (the norm, and its product with the weight, are rounded to the dtype of ``x``), ``product`` or
        ``none``.

    Returns
    -------
    q, scale, sum
        As of :func:`silu_and_mul_block_scaled_quant`, ``H`` for ``I``; the sum ``[M, H]`` in the dtype of ``x``, None
        without a residual.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError
    """
    device = check_norm(x, weight, epsilon, residual)
    _checked(x, kind, global_scale, layout, 1)
    if rounding not in ROUNDINGS:
        raise OptionError(f"rounding={shown(rounding)}: there are {', '.join(ROUNDINGS)}")
    if torch.compiler.is_compiling():
        op = torch.ops.fp8_kernels.rms_norm_block_scaled_quant
        q, scale, z = op(x, weight, kind, epsilon, global_scale, residual, layout, rounding)
        return q, scale, z if residual is not None else None
    how = Blocks(ELEMENTS[kind], "rceil", layout, False, False)
    factor = None if global_scale is None else global_scale.reshape(1)
    return backend_of("quant_norm", device, x).norm_blocks(x, weight, residual, epsilon, rounding, how, factor)


for _kind in ELEMENTS:
    serve(
        f"rms_norm_{_kind}_quantize",
        "quant_norm",
        rms_norm_block_scaled_quant,
        by_name("q", "scale", "residual", defaults={"kind": _kind}),
    )
