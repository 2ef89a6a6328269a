"""Fused quantisers: the activation between two products, or the norm before one, quantised as it is computed.

    silu(gate) * up          static, in groups of a row, in groups of the rows that experts use
    rms_norm(x [+ residual]) static, per token, in groups of a row
    rope(q), rope(k)         times a given factor, with the columns that are not rotated

``rounding`` says where the value is rounded to the dtype of ``x`` before it is quantised: ``each`` (after every step,
as vLLM's unfused operators store it), ``product`` (once) or ``none`` (float32 until the cast). Scales multiply on
dequantisation. Divisions of the quantiser are IEEE divisions; exponential and reciprocal square root are the device's.

NaN and infinity: a NaN makes its group NaN (scale and codes), an infinity gives an infinite scale. Rows that are not in
use are not written. Not covered: GELU, LayerNorm, E5M2, in-place residuals (they are returned).

Source: vLLM (csrc/quantization/fused_kernels), SGLang (ep_moe kernels), FlashInfer (norm, rope).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import checks, context
from .adapters import Inputs, Options, Outputs, by_name
from .backends.declaration import Backend
from .checks import FP8, WIDE
from .errors import OptionError, ShapeError, shown
from .operators import empty, lanes
from .quantize import GROUP_EPS, floor
from .routes import dtype_name, route
from .support import BLOCK
from .verbs import verb

ROUNDINGS = ("each", "product", "none")
SCALE_FLOOR = 1.0 / (448.0 * 512.0)
"""vLLM's floor of a scale per token or block (quantization/utils.cuh min_scaling_factor)."""
EPSILON = 1e-6
"""What is added to the mean square of a row."""


# --- what runs after the checks, and on the fast path for repeated calls --------------------------------------------


def _run_silu(x: Tensor, scale: Tensor, *, rounding: str = "each") -> Tensor:
    return backend_of("quant_gated", x.device, x).gated_static(x, scale.reshape(1), rounding)


def _run_silu_block(
    x: Tensor,
    group_size: int = BLOCK,
    *,
    scale_ub: Tensor | None = None,
    is_scale_transposed: bool = False,
    rounding: str = "none",
) -> tuple[Tensor, Tensor]:
    run = backend_of("quant_gated", x.device, x, group_size)
    return run.gated_group(x, group_size, rounding, 0.0, SCALE_FLOOR, scale_ub, False, is_scale_transposed, None)


def _run_silu_masked(
    x: Tensor, masked_m: Tensor, *, group_size: int = BLOCK, use_ue8m0: bool = False, rounding: str = "each"
) -> tuple[Tensor, Tensor]:
    run = backend_of("quant_gated", x.device, x, group_size)
    return run.gated_group(x, group_size, rounding, GROUP_EPS, 0.0, None, use_ue8m0, False, masked_m)


def _run_silu_bf16(x: Tensor, masked_m: Tensor) -> tuple[Tensor, Tensor]:
    return backend_of("quant_gated", x.device, x).gated_group_bf16(x, GROUP_EPS, masked_m)


def _run_masked(
    x: Tensor, masked_m: Tensor, group_size: int = BLOCK, *, eps: float = GROUP_EPS, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    run = backend_of("quant_gated", x.device, x, group_size)
    return run.gated_group(x, group_size, "plain", eps, 0.0, None, use_ue8m0, False, masked_m)


def _run_static(
    x: Tensor, weight: Tensor, scale: Tensor, epsilon: float = EPSILON, *, rounding: str = "each"
) -> Tensor:
    run = backend_of("quant_norm", x.device, x)
    return run.norm_static(x, weight, None, scale.reshape(1), epsilon, rounding, True)[0]


def _run_added(
    x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, epsilon: float = EPSILON, *, rounding: str = "each"
) -> tuple[Tensor, Tensor]:
    run = backend_of("quant_norm", x.device, x)
    q, z = run.norm_static(x, weight, residual, scale.reshape(1), epsilon, rounding, True)
    assert z is not None
    return q, z


def _run_float(x: Tensor, weight: Tensor, scale: Tensor, epsilon: float = EPSILON) -> Tensor:
    run = backend_of("quant_norm", x.device, x)
    return run.norm_static(x, weight, None, scale.reshape(1), epsilon, "none", False)[0]


def _run_float_added(
    x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, epsilon: float = EPSILON
) -> tuple[Tensor, Tensor]:
    run = backend_of("quant_norm", x.device, x)
    q, z = run.norm_static(x, weight, residual, scale.reshape(1), epsilon, "none", False)
    assert z is not None
    return q, z


def _run_token(
    x: Tensor,
    weight: Tensor,
    epsilon: float = EPSILON,
    *,
    scale_ub: Tensor | None = None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    return backend_of("quant_norm", x.device, x).norm_group(x, weight, residual, epsilon, x.shape[1], scale_ub, False)


def _run_block(
    x: Tensor,
    weight: Tensor,
    epsilon: float = EPSILON,
    group_size: int = BLOCK,
    *,
    scale_ub: Tensor | None = None,
    residual: Tensor | None = None,
    is_scale_transposed: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    run = backend_of("quant_norm", x.device, x, group_size)
    return run.norm_group(x, weight, residual, epsilon, group_size, scale_ub, is_scale_transposed)


# --- as a contract, and as an operator, calls it -------------------------------------------------------------------


def gated_codes(x: Tensor) -> Tensor:
    """The codes of a gated input, without values.

    ``x`` ``[..., 2I]``; returns E4M3 ``[..., I]``.
    """
    return empty(*x.shape[:-1], x.shape[-1] // 2, like=x, dtype=FP8)


def _per_block_fake(
    x: Tensor, group_size: int, scale_ub: Tensor | None, is_scale_transposed: bool, rounding: str
) -> tuple[Tensor, Tensor]:
    groups = x.shape[-1] // 2 // group_size
    if is_scale_transposed:
        return gated_codes(x), lanes(x, groups, 1, torch.float32)
    return gated_codes(x), empty(*x.shape[:-1], groups, like=x, dtype=torch.float32)


def _masked_silu_fake(x: Tensor, masked_m: Tensor, group_size: int, *_: object) -> tuple[Tensor, Tensor]:
    return gated_codes(x), empty(*x.shape[:-1], x.shape[-1] // 2 // group_size, like=x, dtype=torch.float32)


def _masked_groups_fake(x: Tensor, masked_m: Tensor, group_size: int, *_: object) -> tuple[Tensor, Tensor]:
    return _codes_like(x), empty(*x.shape[:-1], x.shape[-1] // group_size, like=x, dtype=torch.float32)


def _codes_like(x: Tensor) -> Tensor:
    return empty(*x.shape, like=x, dtype=FP8)


def _sum_like(x: Tensor, residual: Tensor | None) -> Tensor:
    return empty(*(x.shape if residual is not None else (0,)), like=x, dtype=x.dtype)


def _added_fake(x: Tensor, residual: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _codes_like(x), _sum_like(x, residual)


def _token_fake(
    x: Tensor, weight: Tensor, epsilon: float, scale_ub: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return _codes_like(x), empty(x.shape[0], 1, like=x, dtype=torch.float32), _sum_like(x, residual)


def _block_fake(
    x: Tensor,
    weight: Tensor,
    epsilon: float,
    group_size: int,
    scale_ub: Tensor | None,
    residual: Tensor | None,
    is_scale_transposed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = x.shape[1] // group_size
    plain = empty(x.shape[0], groups, like=x, dtype=torch.float32)
    return _codes_like(x), lanes(x, groups, 1, torch.float32) if is_scale_transposed else plain, _sum_like(x, residual)


def _rope_fake(
    q_rope: Tensor, k_rope: Tensor, q_nope: Tensor, k_nope: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _codes_like(q_rope), _codes_like(k_rope), _codes_like(q_nope), _codes_like(k_nope)


def _with_sum(verb: Callable[..., Any], inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """Without a residual the sum is x itself."""
    q, scale, z = verb(**inputs, **options)
    return {"q": q, "scale": scale, "residual": inputs["x"].clone() if z is None else z}


# --- activations ----------------------------------------------------------------------------------------------------


@verb("quant_gated", outputs=("q",), fake=lambda x, *_: gated_codes(x), run=_run_silu)
def silu_and_mul_quant(x: Tensor, scale: Tensor, *, rounding: str = "each") -> Tensor:
    """``sat(silu(gate) * up / scale)`` of ``x [M, 2I] = [gate, up]``.

    Parameters
    ----------
    x
        ``[M, 2I]`` bf16, f16 or f32.
    scale
        One float32 value.

    Returns
    -------
    Tensor
        ``[M, I]`` E4M3.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, ShapeError
    """
    _gated(x, 2, rounding)
    checks.scalar("scale", scale)
    checks.same_device(x=x, scale=scale)
    if torch.compiler.is_compiling():
        codes: Tensor = torch.ops.fp8_kernels.silu_and_mul_quant(x, scale, rounding)
        return codes
    return _run_silu(x, scale, rounding=rounding)


@verb("quant_gated", outputs=("q", "scale"), fake=_per_block_fake, run=_run_silu_block)
def silu_and_mul_per_block_quant(
    x: Tensor,
    group_size: int = BLOCK,
    *,
    scale_ub: Tensor | None = None,
    is_scale_transposed: bool = False,
    rounding: str = "none",
) -> tuple[Tensor, Tensor]:
    """``silu(gate) * up`` quantised in groups: ``scale = max(min(amax / 448, scale_ub), 1 / (448 * 512))``.

    ``scale_ub`` is a scalar tensor of any shape with one value.

    Parameters
    ----------
    x
        ``[M, 2I]`` bf16, f16 or f32, ``I`` a multiple of ``group_size``.
    scale_ub
        One float32 value that bounds the scale.
    is_scale_transposed
        Strides ``(1, M)`` for the scale.

    Returns
    -------
    q, scale
        ``q [M, I]`` E4M3, ``scale [M, I / group_size]`` float32.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, ShapeError
    """
    _gated(x, 2, rounding, group_size)
    checks.scalar("scale_ub", scale_ub)
    checks.same_device(x=x, scale_ub=scale_ub)
    if torch.compiler.is_compiling():
        op = torch.ops.fp8_kernels.silu_and_mul_per_block_quant
        q, scale = op(x, group_size, scale_ub, is_scale_transposed, rounding)
        return q, scale
    return _run_silu_block(x, group_size, scale_ub=scale_ub, is_scale_transposed=is_scale_transposed, rounding=rounding)


def _plain_silu(verb: Callable[..., Any], inputs: Inputs, options: Options) -> Outputs:
    """By name; SGLang's activation with an alpha and a limit is not here."""
    if given := [name for name in ("gemm1_alpha", "gemm1_clamp_limit") if options.get(name) is not None]:
        raise OptionError(f"{given[0]}={options[given[0]]}: the layer has silu(gate) * up alone")
    return by_name("q", "scale")(verb, inputs, options)


@verb("quant_gated", adapter=_plain_silu, fake=_masked_silu_fake, run=_run_silu_masked)
def silu_and_mul_masked_post_quant(
    x: Tensor, masked_m: Tensor, *, group_size: int = BLOCK, use_ue8m0: bool = False, rounding: str = "each"
) -> tuple[Tensor, Tensor]:
    """``silu(gate) * up`` of the first ``masked_m[e]`` rows of every expert, ``scale = max(amax, 1e-10) / 448``.

    Parameters
    ----------
    x
        ``[E, T, 2I]`` bf16, f16 or f32, ``I`` a multiple of ``group_size``.
    masked_m
        ``[E]`` int32, rows in use; it is not read on the host.
    use_ue8m0
        Round the scale up to a power of two first.

    Returns
    -------
    q, scale
        ``q [E, T, I]`` E4M3, ``scale [E, T, I / group_size]`` float32; rows that are not in use hold anything.
    """
    _gated(x, 3, rounding, group_size)
    _masked(x, masked_m)
    if torch.compiler.is_compiling():
        op = torch.ops.fp8_kernels.silu_and_mul_masked_post_quant
        q, scale = op(x, masked_m, group_size, use_ue8m0, rounding)
        return q, scale
    return _run_silu_masked(x, masked_m, group_size=group_size, use_ue8m0=use_ue8m0, rounding=rounding)


@verb(
    "quant_gated",
    outputs=("q", "scale"),
    fake=lambda x, masked_m: _masked_silu_fake(x, masked_m, BLOCK),
    run=_run_silu_bf16,
)
def persistent_masked_m_silu_mul_quant(x: Tensor, masked_m: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`silu_and_mul_masked_post_quant` whose every step is a bfloat16 operation, in groups of 128.

    ``scale = bf16(max(amax, 1e-10) * bf16(1/448))``, ``q = sat(bf16(value * bf16(1/scale)))``: the scale is 0.2 % low.

    Parameters
    ----------
    x
        ``[E, T, 2I]`` bf16, ``I`` a multiple of 128.
    masked_m
        ``[E]`` int32, rows in use.

    Returns
    -------
    q, scale
        ``q [E, T, I]`` E4M3, ``scale [E, T, I / 128]`` float32 holding bf16 values.

    Raises
    ------
    DtypeError, InputError, LayoutError, ShapeError
    """
    checks.dtype("x", checks.rank("x", x, 3), torch.bfloat16)
    _gated(x, 3, "each", BLOCK)
    _masked(x, masked_m)
    if torch.compiler.is_compiling():
        q, scale = torch.ops.fp8_kernels.persistent_masked_m_silu_mul_quant(x, masked_m)
        return q, scale
    return _run_silu_bf16(x, masked_m)


@verb("quant_gated", outputs=("q", "scale"), fake=_masked_groups_fake, run=_run_masked)
def per_token_group_quant_fp8_masked(
    x: Tensor, masked_m: Tensor, group_size: int = BLOCK, *, eps: float = GROUP_EPS, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """The first ``masked_m[e]`` rows of every expert in groups, ``scale = max(amax, eps) / 448``.

    Parameters
    ----------
    x
        ``[E, T, K]`` bf16, f16 or f32, ``K`` a multiple of ``group_size``.
    masked_m
        ``[E]`` int32, rows in use; it is not read on the host.
    use_ue8m0
        Round the scale up to a power of two first.

    Returns
    -------
    q, scale
        ``q [E, T, K]`` E4M3, ``scale [E, T, K / group_size]`` float32; rows that are not in use hold anything.

    Raises
    ------
    DtypeError, InputError, LayoutError, OptionError, ShapeError
    """
    checks.dtype("x", checks.rank("x", x, 3), *WIDE)
    checks.nonempty("x", x, -1)
    checks.positive("group_size", group_size)
    checks.multiple("K", x.shape[-1], group_size, f"pad K or choose a group_size that divides {x.shape[-1]}")
    floor(eps)
    _masked(x, masked_m)
    if torch.compiler.is_compiling():
        op = torch.ops.fp8_kernels.per_token_group_quant_fp8_masked
        q, scale = op(x, masked_m, group_size, eps, use_ue8m0)
        return q, scale
    return _run_masked(x, masked_m, group_size, eps=eps, use_ue8m0=use_ue8m0)


# --- norms -----------------------------------------------------------------------------------------------------------


@verb("quant_norm", outputs=("q",), fake=lambda x, *_: _codes_like(x), run=_run_static)
def rms_norm_static_fp8_quant(
    x: Tensor, weight: Tensor, scale: Tensor, epsilon: float = EPSILON, *, rounding: str = "each"
) -> Tensor:
    """``sat(T(T(x * rsqrt(mean(x^2) + epsilon)) * weight) / scale)``, ``T`` the dtype of ``x``.

    ``scale`` has any shape of one value.

    With ``rounding="product"`` the norm is not rounded by itself, as in vLLM 0.20.2.

    Parameters
    ----------
    x
        ``[M, H]`` bf16, f16 or f32.
    weight
        ``[H]`` of the dtype of ``x``.
    scale
        One float32 value.

    Returns
    -------
    Tensor
        ``[M, H]`` E4M3.
    """
    return _static("rms_norm_static_fp8_quant", x, None, weight, scale, epsilon, rounding, True)[0]


@verb("quant_norm", outputs=("q", "residual"), fake=_added_fake, run=_run_added)
def fused_add_rms_norm_static_fp8_quant(
    x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, epsilon: float = EPSILON, *, rounding: str = "each"
) -> tuple[Tensor, Tensor]:
    """:func:`rms_norm_static_fp8_quant` of ``z = T(x + residual)``; returns ``q`` and ``z``.

    ``residual`` ``[M, H]`` of the dtype of ``x``; the other operands as of :func:`rms_norm_static_fp8_quant`. Returns
    E4M3 ``[M, H]`` and ``z`` ``[M, H]`` of the dtype of ``x``.
    """
    q, z = _static("fused_add_rms_norm_static_fp8_quant", x, residual, weight, scale, epsilon, rounding, True)
    assert z is not None
    return q, z


@verb("quant_norm", outputs=("q",), fake=lambda x, *_: _codes_like(x), run=_run_float)
def rmsnorm_quant(x: Tensor, weight: Tensor, scale: Tensor, epsilon: float = EPSILON) -> Tensor:
    """:func:`rms_norm_static_fp8_quant` in float32 until the cast, as FlashInfer computes it.

    Operands as of :func:`rms_norm_static_fp8_quant`.
    """
    return _static("rmsnorm_quant", x, None, weight, scale, epsilon, "none", False)[0]


@verb("quant_norm", outputs=("q", "residual"), fake=_added_fake, run=_run_float_added)
def fused_add_rmsnorm_quant(
    x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, epsilon: float = EPSILON
) -> tuple[Tensor, Tensor]:
    """:func:`rmsnorm_quant` of the float32 sum ``x + residual``; returns ``q`` and that sum in the dtype of ``x``.

    ``residual`` ``[M, H]`` of the dtype of ``x``; the other operands as of :func:`rms_norm_static_fp8_quant`.
    """
    q, z = _static("fused_add_rmsnorm_quant", x, residual, weight, scale, epsilon, "none", False)
    assert z is not None
    return q, z


@verb("quant_norm", adapter=_with_sum, fake=_token_fake, run=_run_token)
def rms_norm_dynamic_per_token_quant(
    x: Tensor,
    weight: Tensor,
    epsilon: float = EPSILON,
    *,
    scale_ub: Tensor | None = None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The norm of ``z = x + residual`` (float32), one scale a row: ``max(min(amax, scale_ub) / 448, 1/(448*512))``.

    ``scale_ub`` has any shape of one value.

    Parameters
    ----------
    x
        ``[M, H]`` bf16, f16 or f32.
    weight
        ``[H]`` of the dtype of ``x``.
    scale_ub
        One float32 value that bounds amax.
    residual
        ``[M, H]`` of the dtype of ``x``.

    Returns
    -------
    q, scale, z
        ``q [M, H]`` E4M3, ``scale [M, 1]`` float32, the sum in the dtype of ``x`` (None without a residual).

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError
    """
    check_norm(x, weight, epsilon, residual, scale_ub)
    if torch.compiler.is_compiling():
        op = torch.ops.fp8_kernels.rms_norm_dynamic_per_token_quant
        q, scale, z = op(x, weight, epsilon, scale_ub, residual)
        return q, scale, z if residual is not None else None
    return _run_token(x, weight, epsilon, scale_ub=scale_ub, residual=residual)


@verb("quant_norm", adapter=_with_sum, fake=_block_fake, run=_run_block)
def rms_norm_per_block_quant(
    x: Tensor,
    weight: Tensor,
    epsilon: float = EPSILON,
    group_size: int = BLOCK,
    *,
    scale_ub: Tensor | None = None,
    residual: Tensor | None = None,
    is_scale_transposed: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """:func:`rms_norm_dynamic_per_token_quant` with a scale for each group of a row, ``scale [M, H / group_size]``.

    ``residual`` and the other operands as of :func:`rms_norm_dynamic_per_token_quant`. Returns E4M3 codes, float32
    scales and the sum.

    With ``is_scale_transposed`` the scale has strides ``(1, M)``.

    Raises DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError.
    """
    check_norm(x, weight, epsilon, residual, scale_ub)
    checks.positive("group_size", group_size)
    checks.multiple("H", x.shape[1], group_size, f"choose a group_size that divides {x.shape[1]}")
    if torch.compiler.is_compiling():
        op = torch.ops.fp8_kernels.rms_norm_per_block_quant
        q, scale, z = op(x, weight, epsilon, group_size, scale_ub, residual, is_scale_transposed)
        return q, scale, z if residual is not None else None
    return _run_block(
        x, weight, epsilon, group_size, scale_ub=scale_ub, residual=residual, is_scale_transposed=is_scale_transposed
    )


# --- rotary embeddings -----------------------------------------------------------------------------------------------


@verb("quant_rope", outputs=("q_rope", "k_rope", "q_nope", "k_nope"), fake=_rope_fake)
def rope_quantize_fp8(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor,
    k_nope: Tensor,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool = True,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``sat(rope(x) * quant_scale)`` of the rotated columns and ``sat(x * quant_scale)`` of the others, in E4M3.

    Parameters
    ----------
    q_rope, q_nope
        ``[T, H, D]`` and ``[T, H, N]`` bf16 or f16, D even.
    k_rope, k_nope
        ``[T, G, D]`` and ``[T, G, N]``, or ``[T, D]`` and ``[T, N]`` (MLA), of the same dtype.
    cos_sin_cache
        ``[S, D]`` float32: D/2 cosines, then D/2 sines of each position.
    pos_ids
        ``[T]`` int32 or int64, positions below S (not checked on the host).
    is_neox
        Partners half a head apart; else neighbours.
    quant_scale_q, quant_scale_kv
        Factors: the inverses of the scales that dequantise.

    Returns
    -------
    q_rope, k_rope, q_nope, k_nope
        E4M3 of the same shapes.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError
    """
    checks.dtype("q_rope", checks.rank("q_rope", q_rope, 3), torch.bfloat16, torch.float16)
    for name, x in (("k_rope", k_rope), ("k_nope", k_nope)):
        checks.dtype(name, checks.rank(name, x, 2, 3), q_rope.dtype)
    checks.dtype("q_nope", checks.rank("q_nope", q_nope, 3), q_rope.dtype)
    tokens, heads, depth = q_rope.shape
    checks.multiple("D", depth, 2, "rotated columns come in pairs")
    checks.shape("q_nope", q_nope, (tokens, heads, q_nope.shape[2]), "the heads of q_rope")
    checks.shape("k_rope", k_rope, (tokens, *k_rope.shape[1:-1], depth), "the tokens and columns of q_rope")
    checks.shape("k_nope", k_nope, (*k_rope.shape[:-1], k_nope.shape[-1]), "the heads of k_rope")
    checks.dtype("cos_sin_cache", checks.rank("cos_sin_cache", cos_sin_cache, 2), torch.float32)
    checks.shape("cos_sin_cache", cos_sin_cache, (cos_sin_cache.shape[0], depth), "a cosine and a sine for each pair")
    checks.dtype(
        "pos_ids", checks.shape("pos_ids", pos_ids, (tokens,), "a position for each token"), torch.int32, torch.int64
    )
    device = checks.same_device(
        q_rope=q_rope, k_rope=k_rope, q_nope=q_nope, k_nope=k_nope, cos_sin_cache=cos_sin_cache, pos_ids=pos_ids
    )
    factors = checks.number("quant_scale_q", quant_scale_q), checks.number("quant_scale_kv", quant_scale_kv)
    if torch.compiler.is_compiling():
        op = torch.ops.fp8_kernels.rope_quantize_fp8
        q1, k1, q2, k2 = op(q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, *factors)
        return q1, k1, q2, k2
    run = backend_of("quant_rope", device, q_rope)
    (q1, q2), (k1, k2) = (
        run.rope(rotated, other, cos_sin_cache, pos_ids, is_neox, factor)
        for rotated, other, factor in ((q_rope, q_nope, factors[0]), (k_rope, k_nope, factors[1]))
    )
    return q1, k1, q2, k2


@verb("quant_rope", outputs=("q_rope", "k_rope", "q_nope", "k_nope"))
def mla_rope_quantize_fp8(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor,
    k_nope: Tensor,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool = True,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`rope_quantize_fp8` with one key head without an axis of its own: ``k_rope [T, D]``, ``k_nope [T, N]``.

    The other operands as of :func:`rope_quantize_fp8`. Returns E4M3 of the same shapes.

    Raises InputError, LayoutError, ShapeError.
    """
    checks.rank("k_rope", k_rope, 2)
    checks.rank("k_nope", k_nope, 2)
    return rope_quantize_fp8(
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quant_scale_q, quant_scale_kv
    )


# --- checks ----------------------------------------------------------------------------------------------------------


def backend_of(op: str, device: torch.device, x: Tensor, group: int = BLOCK) -> Backend:
    """The backend of a fused quantiser for rows like those of ``x``, of any rank and dtype; decided once a context."""
    decisions, key = context.current().decisions, (op, device, group, x.dtype, x.shape[-1])
    backend: Backend | None = decisions.get(key)
    if backend is not None:
        return backend
    backend = route(op, device, ("group_size", group), ("a_dtype", dtype_name(x.dtype)), ("k", x.shape[-1]))
    decisions.keep(key, backend)
    return backend


def _gated(x: Tensor, rank: int, rounding: str, group: int | None = None) -> None:
    checks.dtype("x", checks.rank("x", x, rank), *WIDE)
    checks.nonempty("x", x, -1)
    if rounding not in ROUNDINGS:
        raise OptionError(f"rounding={shown(rounding)}: there are {', '.join(ROUNDINGS)}")
    if x.shape[-1] % 2:
        raise ShapeError(f"x has shape {list(x.shape)}; its last axis holds gate and up and must be even")
    if group is not None:
        checks.positive("group_size", group)
        checks.multiple("I", x.shape[-1] // 2, group, f"pad I or choose a group_size that divides {x.shape[-1] // 2}")


def _masked(x: Tensor, masked_m: Tensor) -> torch.device:
    checks.dtype("masked_m", checks.rank("masked_m", masked_m, 1), torch.int32)
    checks.shape("masked_m", masked_m, (x.shape[0],), "rows in use of every expert")
    return checks.same_device(x=x, masked_m=masked_m)


def check_norm(
    x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None, scale_ub: Tensor | None = None
) -> torch.device:
    """The device of checked operands of an RMS norm.

    ``x`` and ``residual`` ``[M, H]``, ``weight`` ``[H]`` of the same dtype; ``scale_ub`` one float32 value.

    Raises DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError.
    """
    checks.dtype("x", checks.rank("x", x, 2), *WIDE)
    checks.nonempty("x", x, 1)
    checks.dtype("weight", checks.rank("weight", weight, 1), x.dtype)
    checks.shape("weight", weight, (x.shape[1],), "one for each column")
    if residual is not None:
        checks.dtype("residual", checks.rank("residual", residual, 2), x.dtype)
        checks.shape("residual", residual, tuple(x.shape), "the shape of x")
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        raise OptionError(f"epsilon must be a float between 0 and 1, got {shown(epsilon)}")
    checks.scalar("scale_ub", scale_ub)
    return checks.same_device(x=x, weight=weight, residual=residual, scale_ub=scale_ub)


def _static(
    name: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    epsilon: float,
    rounding: str,
    rounded_sum: bool,
) -> tuple[Tensor, Tensor | None]:
    device = check_norm(x, weight, epsilon, residual)
    checks.scalar("scale", scale)
    checks.same_device(x=x, scale=scale)
    if rounding not in ROUNDINGS:
        raise OptionError(f"rounding={shown(rounding)}: there are {', '.join(ROUNDINGS)}")
    if torch.compiler.is_compiling():
        op = getattr(torch.ops.fp8_kernels, name)
        options = (epsilon,) if name.endswith("rmsnorm_quant") else (epsilon, rounding)
        if residual is None:
            return op(x, weight, scale, *options), None
        q, z = op(x, residual, weight, scale, *options)
        return q, z
    run = backend_of("quant_norm", device, x)
    return run.norm_static(x, weight, residual, scale.reshape(1), epsilon, rounding, rounded_sum)
