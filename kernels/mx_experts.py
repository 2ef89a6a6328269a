"""MXFP8 and NVFP4 of rows that belong to experts, each with its own 128-row tiles of scale bytes.

Masked forms take a buffer ``[G, M, K]`` of which expert ``i`` has its first ``mask[i]`` rows, and return codes ``[M,
K', G]`` and scales ``[32, 4, M', 4, C', G]`` (a view of ``[G, M', C', 32, 4, 4]``). Contiguous forms take ``[M, K]``
whose rows are one expert's after another's, ``expert_offsets [G + 1]``, and return flat scale bytes of ``floor((M + 127
G) / 128) 128`` rows. Where an expert's tiles start there::

    tight        at the sum of the rows of the experts before it, each padded to 128     vLLM, torchao, PyTorch
    flashinfer   at row floor((offset + 127 i) / 128) 128                                FlashInfer's grouped products

Rows and bytes of no expert are unspecified (here: of whatever the buffer held, and zero). No operation waits for the
device.

NaN and infinity are as of :mod:`kernels.mx`.
Source: FlashInfer (``scaled_fp4_grouped_quantize``), vLLM (``scaled_fp4_experts_quant``), torchao.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .backends.declaration import Matrices
from .checks import WIDE
from .errors import OptionError, ShapeError, shown
from .mx_blocks import EVEN_OF_FINITE, MX_BLOCK, NVFP4_BLOCK, compiled_op, quantised, rows_of_scales
from .operators import empty
from .verbs import verb

HEIGHT = 128
PLACEMENTS = ("tight", "flashinfer")
ROWS = {"mxfp8": ("e4m3", "rceil"), "mxfp4": ("e2m1", EVEN_OF_FINITE), "nvfp4": ("e2m1", "rceil")}
"""Elements of the rows of experts, and how their scales are rounded."""


# --- as a contract, and as an operator, calls it -------------------------------------------------------------------


def _masked_fake(x: Tensor, mask: Tensor, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    (g, m, k), four = x.shape, global_scale is not None
    width, dtype = (NVFP4_BLOCK, torch.uint8) if four else (MX_BLOCK, torch.float8_e4m3fn)
    down, across = (m + HEIGHT - 1) // HEIGHT, (k // width + 3) // 4
    q = empty(g, m, k // 2 if four else k, like=x, dtype=dtype).permute(1, 2, 0)
    return q, empty(g, down, across, 32, 4, 4, like=x, dtype=torch.uint8).permute(3, 4, 1, 5, 2, 0)


def _masked_silu_fake(x: Tensor, mask: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    return _masked_fake(empty(*x.shape[:2], x.shape[2] // 2, like=x, dtype=x.dtype), mask, global_scale)


def _experts_fake(
    x: Tensor, global_scale: Tensor, expert_offsets: Tensor, placement: str = "tight"
) -> tuple[Tensor, Tensor]:
    rows = rows_of_scales(x.shape[0], expert_offsets.shape[0] - 1)
    scale = empty(rows * ((x.shape[1] // NVFP4_BLOCK + 3) // 4 * 4), like=x, dtype=torch.uint8)
    return empty(x.shape[0], x.shape[1] // 2, like=x, dtype=torch.uint8), scale


def _mxfp8_experts_fake(x: Tensor, expert_offsets: Tensor, placement: str = "tight") -> tuple[Tensor, Tensor]:
    rows = rows_of_scales(x.shape[0], expert_offsets.shape[0] - 1)
    scale = empty(rows * ((x.shape[1] // MX_BLOCK + 3) // 4 * 4), like=x, dtype=torch.uint8)
    return empty(*x.shape, like=x, dtype=torch.float8_e4m3fn), scale


def _mxfp4_experts_fake(x: Tensor, expert_offsets: Tensor, placement: str = "tight") -> tuple[Tensor, Tensor]:
    _, scale = _mxfp8_experts_fake(x, expert_offsets, placement)
    return empty(x.shape[0], x.shape[1] // 2, like=x, dtype=torch.uint8), scale


def _silu_experts_fake(
    x: Tensor, global_scale: Tensor, expert_offsets: Tensor, placement: str = "tight"
) -> tuple[Tensor, Tensor]:
    return _experts_fake(_half(x), global_scale, expert_offsets, placement)


def _silu_mxfp4_fake(x: Tensor, expert_offsets: Tensor, placement: str = "tight") -> tuple[Tensor, Tensor]:
    return _mxfp4_experts_fake(_half(x), expert_offsets, placement)


def _half(x: Tensor) -> Tensor:
    return empty(x.shape[0], x.shape[1] // 2, like=x, dtype=x.dtype)


# --- the verbs -----------------------------------------------------------------------------------------------------


@verb("quant_nvfp4", outputs=("q", "scale"), fake=_masked_fake)
def scaled_fp4_grouped_quantize(x: Tensor, mask: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise the first ``mask[i]`` rows of each expert's buffer to NVFP4.

    Parameters
    ----------
    x
        ``[G, M, K]`` bf16, f16 or f32, ``K`` a multiple of 16.
    mask
        int32 ``[G]``; values are not looked at.
    global_scale
        float32 ``[G]``, 2688/amax of each expert.

    Returns
    -------
    q, scale
        ``q [M, K / 2, G]`` uint8; ``scale [32, 4, M', 4, C', G]`` uint8 (E4M3), ``M'`` and ``C'`` tiles down and
        across.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, ShapeError
    """
    g, _, _ = _buffers(x, mask)
    checks.operand("global_scale", global_scale, (g,), "one for each expert", torch.float32)
    checks.same_device(x=x, mask=mask, global_scale=global_scale)
    if torch.compiler.is_compiling():
        return compiled_op("scaled_fp4_grouped_quantize", x, mask, global_scale)
    return _masked("nvfp4", x, global_scale)


@verb("quant_nvfp4", outputs=("q", "scale"), fake=_masked_silu_fake)
def silu_and_mul_scaled_nvfp4_experts_quantize(x: Tensor, mask: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`scaled_fp4_grouped_quantize` of ``silu(gate) * up`` of ``x [G, M, 2 I] = [gate, up]``, computed in float32
    and rounded once to the dtype of ``x``; ``I`` is a multiple of 16.

    ``mask`` ``[G]`` int32, ``global_scale`` ``[G]`` float32.

    Raises DeviceError, DtypeError, InputError, LayoutError, ShapeError.
    """
    g, _, c = _buffers(x, mask)
    checks.multiple("2 I", c, 2 * NVFP4_BLOCK, f"{NVFP4_BLOCK} values share a scale; pad I")
    checks.operand("global_scale", global_scale, (g,), "one for each expert", torch.float32)
    checks.same_device(x=x, mask=mask, global_scale=global_scale)
    if torch.compiler.is_compiling():
        return compiled_op("silu_and_mul_scaled_nvfp4_experts_quantize", x, mask, global_scale)
    return _masked("nvfp4", x, global_scale, gated=True)


@verb("quant_mxfp8", outputs=("q", "scale"), fake=_masked_fake)
def mxfp8_grouped_quantize(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise the first ``mask[i]`` rows of each expert's buffer to MXFP8 (E4M3); arguments as above, blocks of 32.

    ``x`` ``[G, M, K]`` bf16, f16 or f32, ``mask`` ``[G]`` int32.

    Returns ``q [M, K, G]`` E4M3 and ``scale [32, 4, M', 4, C', G]`` uint8 (E8M0).

    Raises DeviceError, InputError.
    """
    _buffers(x, mask)
    checks.same_device(x=x, mask=mask)
    if torch.compiler.is_compiling():
        return compiled_op("mxfp8_grouped_quantize", x, mask)
    return _masked("mxfp8", x)


@verb("quant_nvfp4", outputs=("q", "scale"), fake=_experts_fake)
def scaled_fp4_experts_quant(
    x: Tensor, global_scale: Tensor, expert_offsets: Tensor, placement: str = "tight"
) -> tuple[Tensor, Tensor]:
    """Quantise rows that lie expert by expert to NVFP4.

    Parameters
    ----------
    x
        ``[M, K]`` bf16, f16 or f32, ``K`` a multiple of 16.
    global_scale
        float32 ``[G]``, 2688/amax of each expert.
    expert_offsets
        int32 ``[G + 1]``: the first row of each expert, and behind the last one's; values are not looked at.
    placement
        ``tight`` or ``flashinfer``.

    Returns
    -------
    q, scale
        ``q [M, K / 2]`` uint8; ``scale`` uint8 (E4M3), flat, in 128x4 tiles.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, ShapeError
    """
    _check_nvfp4_experts(x, global_scale, expert_offsets, placement)
    if torch.compiler.is_compiling():
        return compiled_op("scaled_fp4_experts_quant", x, global_scale, expert_offsets, placement)
    return expert_rows("nvfp4", x, expert_offsets, placement, global_scale)


@verb("quant_mxfp8", outputs=("q", "scale"), fake=_mxfp8_experts_fake)
def mxfp8_experts_quant(x: Tensor, expert_offsets: Tensor, placement: str = "tight") -> tuple[Tensor, Tensor]:
    """Quantise rows that lie expert by expert to MXFP8 (E4M3, E8M0 scales), in blocks of 32.

    ``x`` ``[M, K]`` bf16, f16 or f32, ``K`` a multiple of 32; ``expert_offsets`` ``[G + 1]`` and ``placement`` as of
    :func:`scaled_fp4_experts_quant`. Returns ``q`` ``[M, K]`` E4M3 and ``scale`` uint8 (E8M0), flat, in 128x4 tiles;
    NaN and infinity as of :func:`kernels.mxfp8_quantize`. Raises ShapeError, DtypeError, OptionError, DeviceError.

    Raises InputError.
    """
    _placed(x, expert_offsets, placement)
    checks.same_device(x=x, expert_offsets=expert_offsets)
    if torch.compiler.is_compiling():
        return compiled_op("mxfp8_experts_quant", x, expert_offsets, placement)
    return expert_rows("mxfp8", x, expert_offsets, placement)


@verb("quant_mxfp4", outputs=("q", "scale"), fake=_mxfp4_experts_fake)
def mxfp4_experts_quant(x: Tensor, expert_offsets: Tensor, placement: str = "tight") -> tuple[Tensor, Tensor]:
    """Quantise rows that lie expert by expert to MXFP4, in blocks of 32.

    A scale is the power of two under the amax, which is rounded to two bits of fraction first; codes under the least
    one are 0. ``x``, ``expert_offsets`` and ``placement`` as of :func:`mxfp8_experts_quant`. Returns ``q`` ``[M, K/2]``
    uint8, two codes each, and ``scale`` uint8 (E8M0), flat, in 128x4 tiles. An infinite amax has byte 254, and NaN,
    which takes no part in it, the largest code.

    Raises DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError.
    """
    _placed(x, expert_offsets, placement)
    checks.same_device(x=x, expert_offsets=expert_offsets)
    if torch.compiler.is_compiling():
        return compiled_op("mxfp4_experts_quant", x, expert_offsets, placement)
    return expert_rows("mxfp4", x, expert_offsets, placement)


@verb("quant_nvfp4", outputs=("q", "scale"), fake=_silu_experts_fake)
def silu_and_mul_scaled_fp4_experts_quant(
    x: Tensor, global_scale: Tensor, expert_offsets: Tensor, placement: str = "tight"
) -> tuple[Tensor, Tensor]:
    """:func:`scaled_fp4_experts_quant` of ``silu(gate) * up`` of ``x [M, 2 I] = [gate, up]``, computed in float32 and
    rounded once to the dtype of ``x``; ``I`` is a multiple of 16.

    ``global_scale`` ``[G]`` float32, ``expert_offsets`` ``[G + 1]`` int32.

    Raises DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError.
    """
    _gated(x, NVFP4_BLOCK)
    if torch.compiler.is_compiling():
        return compiled_op("silu_and_mul_scaled_fp4_experts_quant", x, global_scale, expert_offsets, placement)
    _check_nvfp4_experts(x, global_scale, expert_offsets, placement)
    return expert_rows("nvfp4", x, expert_offsets, placement, global_scale, gated=True)


@verb("quant_mxfp4", outputs=("q", "scale"), fake=_silu_mxfp4_fake)
def silu_and_mul_mxfp4_experts_quant(
    x: Tensor, expert_offsets: Tensor, placement: str = "tight"
) -> tuple[Tensor, Tensor]:
    """:func:`mxfp4_experts_quant` of ``silu(gate) * up`` of ``x [M, 2 I] = [gate, up]``, computed in float32 and
    rounded once to the dtype of ``x``; ``I`` is a multiple of 32.

    ``expert_offsets`` ``[G + 1]`` int32.

    Raises DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError.
    """
    _gated(x, MX_BLOCK)
    if torch.compiler.is_compiling():
        return compiled_op("silu_and_mul_mxfp4_experts_quant", x, expert_offsets, placement)
    _placed(x, expert_offsets, placement)
    checks.same_device(x=x, expert_offsets=expert_offsets)
    return expert_rows("mxfp4", x, expert_offsets, placement, gated=True)


def _gated(x: Tensor, width: int) -> None:
    checks.nonempty("x", checks.dtype("x", checks.rank("x", x, 2), *WIDE), 0, 1)
    checks.multiple("2 I", x.shape[1], 2 * width, f"{width} values share a scale; pad I")


def expert_rows(
    kind: str,
    x: Tensor,
    expert_offsets: Tensor,
    placement: str = "tight",
    global_scale: Tensor | None = None,
    *,
    gated: bool = False,
    columns: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Checked rows that lie expert by expert, quantised.

    Parameters
    ----------
    kind
        ``mxfp8``, ``mxfp4`` or ``nvfp4``, which has a ``global_scale`` ``[G]``, float32.
    x
        ``[M, K]``, or with ``gated`` ``[M, 2 K]``, bf16, f16 or f32.
    expert_offsets, placement
        ``[G + 1]`` int32; as of :func:`scaled_fp4_experts_quant`.
    columns
        As of :func:`kernels.mx_blocks.quantised`.

    Returns
    -------
    q, scale
        Codes ``[M, columns]``, two E2M1 codes a byte, and uint8 scales, flat, in 128x4 tiles.
    """
    element, rounding = ROWS[kind]
    return quantised(
        f"quant_{kind}",
        x,
        element,
        rounding=rounding,
        columns=columns,
        global_scale=global_scale,
        gated=gated,
        matrices=Matrices(expert_offsets.shape[0] - 1, expert_offsets, placement),
    )


def _masked(kind: str, x: Tensor, global_scale: Tensor | None = None, gated: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and bytes of all rows in the views that masked products take."""
    (g, m, _), (element, rounding) = x.shape, ROWS[kind]
    q, scale = quantised(
        f"quant_{kind}",
        x.flatten(0, 1),
        element,
        rounding=rounding,
        global_scale=global_scale,
        gated=gated,
        matrices=Matrices(g),
    )
    tiles = scale.view(g, -(-m // HEIGHT), -1, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)
    return q.view(g, m, q.shape[1]).permute(1, 2, 0), tiles


def _check_nvfp4_experts(x: Tensor, global_scale: Tensor, expert_offsets: Tensor, placement: str) -> None:
    experts = _placed(x, expert_offsets, placement)
    checks.operand("global_scale", global_scale, (experts,), "one for each expert", torch.float32)
    checks.same_device(x=x, expert_offsets=expert_offsets, global_scale=global_scale)


def _buffers(x: Tensor, mask: Tensor) -> tuple[int, int, int]:
    checks.nonempty("x", checks.dtype("x", checks.rank("x", x, 3), *WIDE), 0, 1, 2)
    g, m, k = x.shape
    checks.operand("mask", mask, (g,), "one for each expert", torch.int32)
    return g, m, k


def _placed(x: Tensor, offsets: Tensor, placement: str) -> int:
    """The number of experts of a checked call."""
    checks.nonempty("x", checks.dtype("x", checks.rank("x", x, 2), *WIDE), 0, 1)
    checks.dtype("expert_offsets", checks.rank("expert_offsets", offsets, 1), torch.int32)
    if offsets.shape[0] < 2:
        raise ShapeError(f"expert_offsets has shape {list(offsets.shape)}; pass [G + 1] for G experts")
    if placement not in PLACEMENTS:
        raise OptionError(f"placement={shown(placement)}: there are {', '.join(PLACEMENTS)}")
    return offsets.shape[0] - 1
