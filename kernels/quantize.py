"""Quantisation to E4M3: what an engine calls on activations and weights.

``scale`` always multiplies on dequantisation (``x ~= scale * q``); no function returns a reciprocal. Every
quantiser rounds to nearest with ties to even and saturates at +-448. Formulas follow the routines that inference
engines publish (vLLM ``scaled_fp8_quant`` and ``per_token_group_quant_fp8``; DeepGEMM's casts; FlashInfer's
internal quantiser). Division is IEEE division on every backend, so that all backends give the same bits.

NaN and infinity: a NaN makes its group NaN (scale and codes), an infinity gives an infinite scale; a group of zeros
gives codes 0. :func:`flashinfer_quantize_1x128` differs, as its documentation states.

Fused projections (QKV, gate and up) are stored as shards with a scalar scale each; kernels take one scale for all, or
one per channel: the last functions of this file convert such weights and scales.

Not covered: E5M2, the FNUZ formats as a quantisation target, stochastic rounding; block scales of shards, biases.

Source: vLLM (csrc/quantization), DeepGEMM (deep_gemm/utils/math.py), FlashInfer (fp8_blockscale_gemm), as above.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import checks, formulas
from .adapters import Inputs, Options, by_name
from .checks import FP8, WIDE
from .errors import InputError, LayoutError, OptionError, ShapeError, shown
from .operators import empty, lanes
from .routes import dtype_name, route
from .support import BLOCK
from .verbs import verb

GROUP_EPS = 1e-10
"""Floor of the amax of a group (vLLM's and SGLang's default)."""
FLOAT32_LEAST, FLOAT32_MAX = 2.0**-149, (2.0 - 2.0**-23) * 2.0**127
"""The floors of an amax that float32 can hold (IEEE 754 binary32)."""
CAST_FLOOR = 1e-4
"""Floor of the amax in DeepGEMM's casts."""
UNLOADED = torch.finfo(FP8).min
"""A weight scale that no checkpoint has set (vLLM's sentinel)."""


# --- as a contract, and as an operator, calls it -------------------------------------------------------------------


def _scaled_operator(
    x: Tensor,
    scale: Tensor | None,
    num_token_padding: int | None,
    scale_ub: Tensor | None,
    use_per_token_if_dynamic: bool,
) -> tuple[Tensor, Tensor]:
    q, s = scaled_fp8_quant(
        x,
        scale,
        num_token_padding=num_token_padding,
        scale_ub=scale_ub,
        use_per_token_if_dynamic=use_per_token_if_dynamic,
    )
    return q, s if scale is None else s.clone()  # an operator's result may not be its argument


def _scaled_fake(
    x: Tensor, scale: Tensor | None, padding: int | None, scale_ub: Tensor | None, per_token: bool
) -> tuple[Tensor, Tensor]:
    symbolic: Any = torch  # its symbolic functions have no types
    rows = x.shape[0] if padding is None else symbolic.sym_max(x.shape[0], padding)
    q = empty(rows, x.shape[1], like=x, dtype=FP8)
    if scale is not None:
        return q, torch.empty_like(scale)
    return q, empty(*((rows, 1) if per_token else (1,)), like=x, dtype=torch.float32)


def _group_operator(x: Tensor, group_size: int, eps: float, layout: str, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    return per_token_group_quant_fp8(
        x,
        group_size,
        eps=eps,
        column_major_scales=layout != "row",
        tma_aligned_scales=layout == "tma",
        use_ue8m0=use_ue8m0,
    )


def _group_fake(x: Tensor, group_size: int, eps: float, layout: str, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    q, groups = torch.empty(x.shape, dtype=FP8, device=x.device), x.shape[-1] // group_size
    if layout == "row":
        return q, empty(*x.shape[:-1], groups, like=x, dtype=torch.float32)
    return q, lanes(x, groups, 4 if layout == "tma" else 1, torch.float32)


def _packed_fake(x: Tensor, group_size: int, eps: float) -> tuple[Tensor, Tensor]:
    words = (x.shape[1] // group_size + 3) // 4
    return torch.empty(x.shape, dtype=FP8, device=x.device), lanes(x, words, 4, torch.int32)


def _as_tensor(verb: Callable[..., bool], inputs: Inputs, options: Options) -> Tensor:
    return torch.tensor(verb(**inputs), dtype=torch.bool, device="cpu")


# --- the verbs -----------------------------------------------------------------------------------------------------


@verb("cast")
def ceil_to_ue8m0(x: Tensor) -> Tensor:
    """Smallest power of two >= \\|x\\| that UE8M0 can hold, by exponent bits.

    Parameters
    ----------
    x
        float32, any shape.

    Returns
    -------
    Tensor
        float32 powers of two, same shape. Exact powers stay. Zero and everything up to ``2**-127`` give
        ``2**-127`` (the smallest UE8M0 value, a float32 subnormal); above ``2**127`` no finite float32 power is
        large enough: ``inf``, as for an infinite input. NaN stays NaN.

    Raises
    ------
    DtypeError, InputError, LayoutError
        ``x`` is not float32.
    """
    return formulas.ceil_to_ue8m0(checks.dtype("x", checks.tensor("x", x), torch.float32))


@verb("quant_tensor", outputs=("q", "scale"), fake=_scaled_fake, operator=_scaled_operator)
def scaled_fp8_quant(
    x: Tensor,
    scale: Tensor | None = None,
    *,
    num_token_padding: int | None = None,
    scale_ub: Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantise a matrix per tensor (static or dynamic) or per token.

    ``scale`` and ``scale_ub`` have any shape of one value.

    Static (``scale`` given): ``q = sat(x / scale)``. Dynamic per tensor: ``scale = amax / 448``. Dynamic per
    token: ``scale[m] = max(min(amax[m], scale_ub) / 448, 1 / (448 * 512))``. Where a scale is 0 the code is 0.

    Parameters
    ----------
    x
        ``[M, K]`` bf16, f16 or f32.
    scale
        One float32 value, or None for dynamic.
    num_token_padding
        The payload gets ``max(M, num_token_padding)`` rows; the extra rows hold the code 0 (and, per token, the
        scale 1) and never influence a real row.
    scale_ub
        One float32 value that bounds the amax per token; only with dynamic per-token quantisation.
    use_per_token_if_dynamic
        One scale per row instead of one for the tensor.

    Returns
    -------
    q, scale
        ``q [max(M, padding), K]`` E4M3; ``scale`` the given tensor, ``[1]``, or ``[max(M, padding), 1]`` float32.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, OptionError, InputError, LayoutError
        ``x`` is no matrix of a wide float dtype, ``scale`` or ``scale_ub`` is not one float32 value, or
        ``scale_ub`` is given where it has no meaning.
    """
    checks.dtype("x", checks.rank("x", x, 2), *WIDE)
    checks.nonempty("x", x, 1)
    checks.scalar("scale", scale)
    checks.scalar("scale_ub", scale_ub)
    device = checks.same_device(x=x, scale=scale, scale_ub=scale_ub)
    if scale_ub is not None and (scale is not None or not use_per_token_if_dynamic):
        raise OptionError(
            "scale_ub bounds dynamic per-token scales only; pass use_per_token_if_dynamic=True and no scale"
        )
    if num_token_padding is not None:
        rows = checks.positive("num_token_padding", num_token_padding)
        checks.room("num_token_padding", rows, rows * x.shape[1])
    if is_compiling():
        op = torch.ops.fp8_kernels.scaled_fp8_quant
        q, s = op(x, scale, num_token_padding, scale_ub, use_per_token_if_dynamic)
        return q, s if scale is None else scale
    per_token = scale is None and use_per_token_if_dynamic
    run = route("quant_token" if per_token else "quant_tensor", device)
    if scale is not None:
        return _pad_rows(run.quant_static(x, scale), num_token_padding, 0.0), scale
    if per_token:
        q, s = run.quant_token(x, scale_ub)
        return _pad_rows(q, num_token_padding, 0.0), _pad_rows(s, num_token_padding, 1.0)
    q, s = run.quant_tensor(x)
    return _pad_rows(q, num_token_padding, 0.0), s


@verb("quant_group", outputs=("q", "scale"), fake=_group_fake, operator=_group_operator)
def per_token_group_quant_fp8(
    x: Tensor,
    group_size: int,
    *,
    eps: float = GROUP_EPS,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    use_ue8m0: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise each row in groups along the last axis.

    ``scale = max(amax, eps) / 448`` per row and group; with ``use_ue8m0`` rounded up to a power of two before the
    payload is quantised; ``q = sat(x / scale)``.

    Parameters
    ----------
    x
        ``[..., K]`` bf16, f16 or f32, ``K`` a multiple of ``group_size``.
    column_major_scales
        Strides ``(1, M)`` for the scale of a matrix (for more axes: the last two are exchanged in memory); the
        logical shape is unchanged.
    tma_aligned_scales
        With column-major: leading stride ``align(M, 4)`` (16 bytes); the lanes between hold 0.
    out
        E4M3 of the shape of ``x``, contiguous, to write the payload into.

    Returns
    -------
    q, scale
        ``q [..., K]`` E4M3 and ``scale [..., K / group_size]`` float32.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, LayoutError, OptionError, InputError
    """
    checks.dtype("x", checks.tensor("x", x), *WIDE)
    if x.dim() < 1:
        raise ShapeError("x must have at least one dimension, got a scalar")
    checks.positive("group_size", group_size)
    checks.nonempty("x", x, -1)
    checks.multiple(
        "K", x.shape[-1], group_size, f"pad the last axis or choose a group_size that divides {x.shape[-1]}"
    )
    floor(eps)
    if tma_aligned_scales and not column_major_scales:
        raise OptionError("tma_aligned_scales needs column_major_scales=True: the alignment is of the leading stride")
    if column_major_scales and x.dim() < 2:
        raise ShapeError("column_major_scales needs at least two dimensions; unsqueeze x")
    if out is not None:
        checks.writable("out", checks.dtype("out", checks.tensor("out", out), FP8))
        checks.shape("out", out, tuple(x.shape), "the shape of x")
        checks.same_device(x=x, out=out)
        if not out.is_contiguous():
            raise LayoutError(f"out must be contiguous, got strides {out.stride()}")
    layout = "row" if not column_major_scales else "tma" if tma_aligned_scales else "col"
    if is_compiling():
        q, scale = torch.ops.fp8_kernels.per_token_group_quant_fp8(x, group_size, eps, layout, use_ue8m0)
        return (q if out is None else out.copy_(q)), scale
    key = (("group_size", group_size), ("a_dtype", dtype_name(x.dtype)), ("ue8m0", use_ue8m0))
    run = route("quant_group", x.device, *key)
    q, scale = run.quant_group(x, group_size, eps, use_ue8m0, layout, out)
    return q, scale


@verb("quant_group_packed", outputs=("q", "scale"), fake=_packed_fake)
def per_token_group_quant_fp8_packed(
    x: Tensor, group_size: int = BLOCK, *, eps: float = GROUP_EPS
) -> tuple[Tensor, Tensor]:
    """:func:`per_token_group_quant_fp8` with UE8M0 scales, four to an int32, as DeepGEMM takes them on sm100.

    Parameters
    ----------
    x
        ``[M, K]`` bf16, f16 or f32, ``K`` a multiple of ``group_size``.

    Returns
    -------
    q, scale
        ``q [M, K]`` E4M3; ``scale [M, ceil(K / group_size / 4)]`` int32, strides ``(1, align(M, 4))``, pad lanes 0.

    Raises
    ------
    DtypeError, InputError, LayoutError, OptionError, ShapeError
    """
    checks.dtype("x", checks.rank("x", x, 2), *WIDE)
    checks.nonempty("x", x, 1)
    checks.positive("group_size", group_size)
    checks.multiple("K", x.shape[1], group_size, f"pad the last axis or choose a group_size that divides {x.shape[1]}")
    floor(eps)
    if is_compiling():
        q, scale = torch.ops.fp8_kernels.per_token_group_quant_fp8_packed(x, group_size, eps)
        return q, scale
    key = (("group_size", group_size), ("a_dtype", dtype_name(x.dtype)), ("k", x.shape[1]))
    run = route("quant_group_packed", x.device, *key)
    q, scale = run.quant_group_packed(x, group_size, eps)
    return q, scale


@verb("cast", outputs=("q", "scale"))
def per_block_cast_to_fp8(
    x: Tensor, block_size: Sequence[int] = (BLOCK, BLOCK), use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """DeepGEMM's weight cast: one scale per block, ragged edges padded with zeros for the amax only.

    ``scale = max(amax, 1e-4) / 448``, ``q = sat(x * (1 / scale))``.

    Parameters
    ----------
    x
        ``[N, K]`` bf16, f16 or f32.

    Returns
    -------
    q, scale
        ``q [N, K]`` E4M3 contiguous, ``scale [ceil(N/128), ceil(K/128)]`` float32.

    Raises
    ------
    OptionError
    """
    _matrix(x)
    rows, cols = (checks.positive("block_size", v) for v in checks.integers("block_size", block_size, 2))
    rows, cols = min(rows, x.shape[0]), min(cols, x.shape[1])  # a larger block holds the same values
    return formulas.cast_blocks(x, rows, cols, CAST_FLOOR, use_ue8m0)


@verb("cast", outputs=("q", "scale"))
def per_token_cast_to_fp8(x: Tensor, use_ue8m0: bool = False, group: int = BLOCK) -> tuple[Tensor, Tensor]:
    """DeepGEMM's activation cast: one scale per row and ``group`` of K (ragged K padded with zeros for the amax).

    Parameters
    ----------
    x
        ``[M, K]`` bf16, f16 or f32.

    Returns
    -------
    q, scale
        ``q [M, K]`` E4M3, ``scale [M, ceil(K / group)]`` float32.

    Raises
    ------
    OptionError
    """
    _matrix(x)
    group = min(checks.positive("group", group), x.shape[1])  # a larger group holds the same values
    return formulas.cast_blocks(x, 1, group, CAST_FLOOR, use_ue8m0)


@verb("cast", outputs=("q", "scale"))
def per_channel_cast_to_fp8(x: Tensor, use_ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """DeepGEMM's cast along M: one scale per column and 128 rows.

    Parameters
    ----------
    x
        ``[M, N]`` bf16, f16 or f32, ``M`` a multiple of 128.

    Returns
    -------
    q, scale
        ``q [M, N]`` E4M3, ``scale [M / 128, N]`` float32.

    Raises
    ------
    ShapeError
    """
    _matrix(x)
    checks.multiple("M", x.shape[0], BLOCK, "pad the rows to whole blocks of 128")
    return formulas.cast_blocks(x, BLOCK, 1, CAST_FLOOR, use_ue8m0)


@verb("cast", outputs=("q", "scale"))
def flashinfer_quantize_1x128(x: Tensor) -> tuple[Tensor, Tensor]:
    """The activation quantiser inside FlashInfer's SM90 block-scaled kernel, with IEEE division.

    ``inv = 448 / amax`` (1 for an all-zero group: scale 1; never infinite), ``q = sat(x * inv)``, stored ``scale =
    1 / inv``. The device divides approximately: its scale lies within 2 ulp of this one, 0 below an amax of 2^-117. NaN
    is left out of the amax and keeps a NaN code; a finite value never becomes one. The shipped kernel makes NaN of
    groups whose amax lies above 2^126, below 2^-126 or, where they hold a zero, below 2^-119; this routine does not.

    Parameters
    ----------
    x
        ``[M, K]`` bf16, f16 or f32, ``K`` a multiple of 128.

    Returns
    -------
    q, scale
        ``q [M, K]`` E4M3; ``scale [K / 128, align(M, 4)]`` float32 contiguous, pad lanes 0.

    Raises
    ------
    ShapeError
    """
    _matrix(x)
    checks.multiple("K", x.shape[1], BLOCK, "the kernel has no K tail; pad K to a multiple of 128")
    q, scale = formulas.flashinfer_blocks(x, 1)
    return q, torch.nn.functional.pad(scale.t(), (0, -x.shape[0] % 4)).contiguous()


@verb("cast", adapter=by_name("q", "scale", renamed={"x": "w"}))
def flashinfer_quantize_128x128(w: Tensor) -> tuple[Tensor, Tensor]:
    """The weight quantiser inside FlashInfer's SM90 block-scaled kernel, as specified (every row is scanned).

    Shipped versions omit rows from the amax scan; this routine does not reproduce that fault.

    Parameters
    ----------
    w
        ``[N, K]`` bf16, f16 or f32, ``K`` a multiple of 128.

    Returns
    -------
    q, scale
        ``q [N, K]`` E4M3; ``scale [ceil(N / 128), K / 128]`` float32.

    Raises
    ------
    ShapeError
    """
    _matrix(w, "w")
    checks.multiple("K", w.shape[1], BLOCK, "the kernel has no K tail; pad K to a multiple of 128")
    return formulas.flashinfer_blocks(w, BLOCK)


@verb("cast")
def per_tensor_dequantize(q: Tensor, inv_scale: float | Tensor) -> Tensor:
    """``float16(q * inv_scale)``: dequantise through float16, as vLLM does (whose name ``inv_scale`` is).

    ``inv_scale`` has any shape of one value.

    The product is taken in float32 and rounded once. Products beyond 65504 become infinite and below ``2**-25``
    zero: a weight with such a scale cannot be dequantised this way.

    Parameters
    ----------
    q
        E4M3, any shape.
    inv_scale
        One float32 value or a Python float.

    Returns
    -------
    Tensor
        float16, the shape of ``q``.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, ShapeError
    """
    checks.dtype("q", checks.tensor("q", q), FP8)
    if isinstance(inv_scale, Tensor):
        checks.scalar("inv_scale", inv_scale)
        checks.same_device(q=q, inv_scale=inv_scale)
        factor = inv_scale.reshape(())
    elif isinstance(inv_scale, int | float) and not isinstance(inv_scale, bool):
        factor = torch.full((), inv_scale, dtype=torch.float32, device=q.device)
    else:
        raise InputError(f"inv_scale must be a float or a tensor of one float32, got {type(inv_scale).__name__}")
    return (q.to(torch.float32) * factor).to(torch.float16)


@verb("cast", adapter=_as_tensor)
def all_close_1d(x: Tensor) -> bool:
    """Whether all entries of a vector are close to the first (rtol 1e-5, atol 1e-8; NaN is close to nothing).

    ``x`` ``[n]`` bf16, f16, f32 or f64.

    An empty vector is close. Other ranks are a :class:`ShapeError`.

    Raises DeviceError, DtypeError, InputError, LayoutError.
    """
    checks.dtype("x", checks.rank("x", x, 1), *WIDE, torch.float64)
    if checks.concrete("x", x).numel() == 0:
        return True
    return bool(torch.isclose(x, x[:1].expand_as(x)).all())


@verb("cast", adapter=by_name(converted={"logical_widths": Tensor.tolist}))
def convert_to_channelwise(weight_scale: Tensor, logical_widths: Sequence[int]) -> Tensor:
    """Repeat each shard's scalar over its rows.

    Parameters
    ----------
    weight_scale
        ``[shards]`` float32.
    logical_widths
        Rows of each shard.

    Returns
    -------
    Tensor
        ``[sum(widths), 1]`` float32.
    """
    widths = _shards(weight_scale, logical_widths)
    return torch.cat([one.expand(rows) for one, rows in zip(weight_scale, widths, strict=True)]).unsqueeze(1)


@verb("cast", adapter=by_name("max_scale", "weight", converted={"logical_widths": Tensor.tolist}))
def requantize_with_max_scale(
    weight: Tensor, weight_scale: Tensor, logical_widths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Requantise fused shards (QKV, gate and up) with one scale, their maximum.

    Each shard is dequantised with its own scale (through float16, :func:`per_tensor_dequantize`) and requantised
    with the maximum. A checkpoint fused on disk has one scale: the last one is ``finfo(float8_e4m3fn).min`` then, and
    the payload is returned unchanged.

    Parameters
    ----------
    weight
        ``[N, K]`` E4M3. Never written to. Rows past the last shard keep their codes.
    weight_scale
        ``[shards]`` float32.

    Returns
    -------
    max_scale, weight
        A float32 scalar and E4M3 ``[N, K]``.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, ShapeError
    """
    checks.dtype("weight", checks.rank("weight", weight, 2), FP8)
    widths = _shards(weight_scale, logical_widths)
    checks.same_device(weight=weight, weight_scale=weight_scale)
    if (rest := weight.shape[0] - sum(widths)) < 0:
        raise ShapeError(f"logical_widths sum to {sum(widths)} but weight has {weight.shape[0]} rows")
    top = checks.concrete("weight_scale", weight_scale).max()
    *parts, last = torch.split(weight, [*widths, rest])
    shards = [
        formulas.divide_and_saturate(per_tensor_dequantize(part, scale), top).view(torch.uint8)
        for part, scale in zip(parts, weight_scale.unbind(), strict=True)
    ]
    fused = torch.cat([*shards, last.view(torch.uint8)])
    whole = torch.where(weight_scale[-1] > UNLOADED, fused, weight.view(torch.uint8))
    return top, whole.view(FP8)


@verb("cast", outputs=("weight", "weight_scale", "input_scale"))
def normalize_e4m3fn_to_e4m3fnuz(
    weight: Tensor, weight_scale: Tensor, input_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Reinterpret E4M3FN codes as E4M3FNUZ (AMD gfx942), doubling the scales: the same bits mean half the value.

    ``weight`` E4M3 of any shape, ``weight_scale`` and ``input_scale`` float32 of any shape.

    Bit pattern 0x80 (-0 in fn, NaN in fnuz) becomes 0; every other code keeps its bits. The fn NaN codes 0x7F and 0xFF
    are finite in fnuz (+-240): a checkpoint with NaN weights must be refused before. Nothing is written in place.

    Returns
    -------
    weight, weight_scale, input_scale
        ``weight`` float8_e4m3fnuz, ``2 * weight_scale``, ``2 * input_scale`` or None.
        Each of the same shape.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError
    """
    checks.dtype("weight", checks.tensor("weight", weight), FP8)
    for name, scale in (("weight_scale", weight_scale), ("input_scale", input_scale)):
        if scale is not None:
            checks.dtype(name, scale, torch.float32)
    checks.same_device(weight=weight, weight_scale=weight_scale, input_scale=input_scale)
    codes = weight.view(torch.uint8)
    codes = torch.where(codes == 0x80, torch.zeros_like(codes), codes)
    doubled = None if input_scale is None else input_scale * 2.0
    return codes.view(torch.float8_e4m3fnuz), weight_scale * 2.0, doubled


def floor(eps: object) -> None:
    """Refuse a floor of amax that float32 cannot hold."""
    if not isinstance(eps, float) or not FLOAT32_LEAST <= eps <= FLOAT32_MAX:
        raise OptionError(f"eps must be a positive finite float that float32 can hold, got {shown(eps)}")


def _matrix(x: object, name: str = "x") -> Tensor:
    t = checks.dtype(name, checks.rank(name, x, 2), *WIDE)
    return checks.nonempty(name, t, 0, 1)


def _pad_rows(t: Tensor, rows: int | None, fill: float) -> Tensor:
    if rows is None or t.shape[0] >= rows:
        return t
    padded = torch.full((rows, t.shape[1]), fill, dtype=torch.float32, device=t.device).to(t.dtype)
    padded[: t.shape[0]] = t
    return padded


def _shards(weight_scale: Tensor, logical_widths: Sequence[int]) -> list[int]:
    checks.dtype("weight_scale", checks.rank("weight_scale", weight_scale, 1), torch.float32)
    widths = [checks.positive("logical_widths", w) for w in checks.integers("logical_widths", logical_widths)]
    checks.room("logical_widths", sum(widths), 4 * sum(widths))
    if not widths or len(widths) != weight_scale.shape[0]:
        raise ShapeError(f"weight_scale has {weight_scale.shape[0]} entries for {len(widths)} shards")
    return widths
