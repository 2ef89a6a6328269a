"""Grouped products of a mixture of experts: rows sorted by expert, or a padded batch per expert.

Block scales as in :mod:`kernels.blockscaled`, with a leading group axis on the weight. Padding rows are unspecified in
inputs and outputs and never influence a real row.

NaN in a code or a scale makes every element of its row (or column of the group) NaN; an infinite scale gives infinity
or NaN.
Source: DeepGEMM (csrc/apis/gemm.hpp), torch (``_scaled_grouped_mm``), vLLM (``cutlass_moe_mm``).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import checks, operators
from . import platform as machines
from .adapters import Inputs, Options, int32, out_dtype_of, pairs
from .backends.declaration import Backend
from .blockscaled import block_scale, held, under_powers
from .checks import FP8
from .context import constant
from .errors import LayoutError, NoBackendError, ShapeError
from .formulas import unpack_ue8m0
from .layout import TMA_LANES, align, transform_sf_into_required_layout
from .quantize import ceil_to_ue8m0
from .routes import dtype_name, route
from .support import BLOCK
from .verbs import verb

# --- as a contract, and as an operator, calls it -------------------------------------------------------------------


def _contiguous(verb: Callable[..., None], inputs: Inputs, options: Options) -> Tensor:
    """Padding rows stay zero."""
    a, b = inputs["a"], inputs["b"]
    out = torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype_of(options), device=a.device)
    verb(*pairs(inputs), out, int32(inputs["m_indices"]))
    return out


def _masked_rows(verb: Callable[..., None], inputs: Inputs, options: Options) -> Tensor:
    """Rows past a group's count stay zero."""
    a, b = inputs["a"], inputs["b"]
    out = torch.zeros(*a.shape[:2], b.shape[1], dtype=out_dtype_of(options), device=a.device)
    verb(*pairs(inputs), out, int32(inputs["masked_m"]), options.get("expected_m", a.shape[1]))
    return out


def _grouped_scaled(verb: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    a, b, scale_a, scale_b, offsets = (inputs[n] for n in ("a", "b", "scale_a", "scale_b", "offsets"))
    return verb(a, b, scale_a, scale_b, int32(offsets), out_dtype_of(options))


# --- the verbs -----------------------------------------------------------------------------------------------------


@verb()
def get_mk_alignment_for_contiguous_layout() -> int:
    """Row alignment of each expert's run: that of the library that serves the product here, else 128.

    On Blackwell scales of powers of two and others have different libraries; a run is aligned for both.
    """
    return _alignment()


@constant
def _alignment() -> int:
    device, found = torch.device(machines.current_machine().device), list[int]()
    for float_scales in (True, False):
        with contextlib.suppress(NoBackendError):  # what multiplies nothing asks for nothing
            found.append(route("grouped_contiguous", device, *held(float_scales)).alignment())
    return math.lcm(*found) if found else BLOCK


@verb("grouped_contiguous", adapter=_contiguous, writes=("out",))
def m_grouped_fp8_gemm_nt_contiguous(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    out: Tensor,
    m_indices: Tensor,
    *,
    disable_ue8m0_cast: bool = True,
    check: bool | None = None,
) -> None:
    """``out[i] = a[i] @ b[m_indices[i]].T`` with block scales; rows with index -1 are padding.

    Parameters
    ----------
    a
        ``(a [M, K] E4M3, a_scale [M, K/128] float32)``, rows sorted by expert, each expert's run starting at a
        multiple of :func:`get_mk_alignment_for_contiguous_layout`.
    b
        ``(b [G, N, K] E4M3, b_scale [G, ceil(N/128), K/128] float32)``.
        Both scales may be packed, int32, as :func:`kernels.per_token_group_quant_fp8_packed` and
        :func:`loaded_experts` give them.
    out
        ``[M, N]`` bf16.
    m_indices
        ``[M]`` int32: the expert of each row, or -1.
    check
        Verify the values of ``m_indices``; see :func:`kernels.checks.values`.

    Raises
    ------
    ValueRangeError, DeviceError, DtypeError, InputError, LayoutError, ShapeError
        An index is outside ``[-1, G)``, or one aligned tile holds rows of two experts (the kernel would use the
        first one's weight for all of them).
    """
    (x, xs), (w, ws) = checks.pair("a", a), checks.pair("b", b)
    m, k = checks.dtype("a", checks.rank("a", x, 2), FP8).shape
    groups, n = _weight(w, ws, k, packed=True)
    blocks = -(-k // BLOCK)
    if isinstance(xs, Tensor) and xs.dtype is torch.int32:
        checks.shape("a_scale", xs, (m, -(-blocks // 4)), "[M, ceil(K/512)], packed")
    else:
        checks.operand("a_scale", xs, (m, blocks), "[M, ceil(K/128)]", torch.float32)
    checks.output("out", out, (m, n), "[M, N]", *checks.WIDE)
    checks.operand("m_indices", m_indices, (m,), "[M]", torch.int32)
    device = checks.same_device(a=x, a_scale=xs, b=w, b_scale=ws, out=out, m_indices=m_indices)
    if is_compiling():
        torch.ops.fp8_kernels.m_grouped_fp8_gemm_nt_contiguous(x, xs, w, ws, out, m_indices, disable_ue8m0_cast, check)
        return
    run = _route("grouped_contiguous", out.device, out.dtype, n, k, groups, disable_ue8m0_cast)
    if m == 0:
        return
    if checks.wanted(check, device):
        _check_indices(check, m_indices, groups, run.alignment() if device.type == "cuda" else 1)
    if not _takes_packed(run):
        xs, ws = (unpack_ue8m0(xs, blocks) if xs.dtype is torch.int32 else xs), block_scale(ws, k)
    run.grouped_contiguous(x, xs, w, ws, out, m_indices.contiguous(), disable_ue8m0_cast)


@verb("grouped_masked", adapter=_masked_rows, writes=("out",))
def fp8_m_grouped_gemm_nt_masked(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    out: Tensor,
    masked_m: Tensor,
    expected_m: int,
    *,
    disable_ue8m0_cast: bool = True,
    check: bool | None = None,
) -> None:
    """``out[g, :masked_m[g]] = a[g, :masked_m[g]] @ b[g].T`` with block scales.

    Parameters
    ----------
    a
        ``(a [G, M, K] E4M3, a_scale [G, M, K/128] float32)``; rows past ``masked_m[g]`` are unspecified.
    b
        ``(b [G, N, K] E4M3, b_scale [G, ceil(N/128), K/128] float32)``.
    out
        ``[G, M, N]`` bf16.
    masked_m
        ``[G]`` int32, from 0 to M.
    expected_m
        A hint: the typical number of rows per group, at least 1.
    check
        Verify the values of ``masked_m``; see :func:`kernels.checks.values`.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError, ValueRangeError
    """
    (x, xs), (w, ws) = checks.pair("a", a), checks.pair("b", b)
    g, m, k = checks.dtype("a", checks.rank("a", x, 3), FP8).shape
    groups, n = _weight(w, ws, k)
    if g != groups:
        raise ShapeError(f"a has {g} groups but b has {groups}")
    checks.operand("a_scale", xs, (g, m, -(-k // BLOCK)), "[G, M, ceil(K/128)]", torch.float32)
    checks.output("out", out, (g, m, n), "[G, M, N]", *checks.WIDE)
    checks.operand("masked_m", masked_m, (g,), "[G]", torch.int32)
    checks.positive("expected_m", expected_m)
    device = checks.same_device(a=x, a_scale=xs, b=w, b_scale=ws, out=out, masked_m=masked_m)
    if is_compiling():
        op = torch.ops.fp8_kernels.fp8_m_grouped_gemm_nt_masked
        op(x, xs, w, ws, out, masked_m, expected_m, disable_ue8m0_cast, check)
        return
    run = _route("grouped_masked", out.device, out.dtype, n, k, groups, disable_ue8m0_cast)
    if m == 0:
        return
    if checks.wanted(check, device):
        checks.within("masked_m", check, masked_m, masked_m, (0, m), f"[0, {m}]")
    run.grouped_masked(x, xs, w, ws, out, masked_m.contiguous(), min(expected_m, m), disable_ue8m0_cast)


@verb("grouped_scaled", adapter=_grouped_scaled, fake=operators.matrix)
def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    check: bool | None = None,
) -> Tensor:
    """Per group ``(a_g @ b_g.T) * scale_a * scale_b``: scales per token and per channel, no alignment of the runs.

    Parameters
    ----------
    a
        ``[M, K]`` E4M3, rows sorted by group.
    b
        ``[G, N, K]`` E4M3.
    scale_a, scale_b
        float32 ``[M, 1]`` and ``[G, N]``.
    offsets
        ``[G]`` int32: where each group's rows end; non-decreasing, the last at most M.

    Returns
    -------
    Tensor
        ``[M, N]``; rows past the last end are unspecified.
        Of ``out_dtype``.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError, ValueRangeError
    """
    m, k = checks.dtype("a", checks.rank("a", a, 2), FP8).shape
    groups, n, k_b = checks.dtype("b", checks.rank("b", b, 3), FP8).shape
    if k != k_b or 0 in (groups, n, k):
        raise ShapeError(f"a {list(a.shape)} and b {list(b.shape)} disagree in K or are empty")
    checks.operand("scale_a", scale_a, (m, 1), "[M, 1]", torch.float32)
    checks.operand("scale_b", scale_b, (groups, n), "[G, N]", torch.float32)
    checks.operand("offsets", offsets, (groups,), "[G]", torch.int32)
    checks.out_dtype(out_dtype)
    device = checks.same_device(a=a, b=b, scale_a=scale_a, scale_b=scale_b, offsets=offsets)
    if is_compiling():
        out: Tensor = torch.ops.fp8_kernels.scaled_grouped_mm(a, b, scale_a, scale_b, offsets, out_dtype, check)
        return out
    run = route(
        "grouped_scaled",
        device,
        ("n", n),
        ("k", k),
        ("groups", groups),
        ("out_dtype", dtype_name(out_dtype)),
        ("a_scale", "token"),
        ("b_scale", "channel"),
    )
    if m == 0:
        return torch.empty(0, n, dtype=out_dtype, device=device)
    if checks.wanted(check, device):
        ends = torch.nn.functional.pad(offsets, (1, 0))
        checks.values(
            "offsets",
            check,
            (ends[1:] >= ends[:-1]).all() & (ends[-1] <= m),
            lambda: f"offsets {offsets.tolist()} must be non-decreasing from 0 to at most M={m}",
        )
    return run.grouped_scaled(a, b, scale_a, scale_b, offsets, out_dtype)


def _route(
    op: str, device: torch.device, dtype: torch.dtype, n: int, k: int, groups: int, float_scales: bool
) -> Backend:
    extents = (("n", n), ("k", k), ("groups", groups), ("out_dtype", dtype_name(dtype)))
    return route(op, device, *extents, *held(float_scales))


def _check_indices(check: bool | None, m_indices: Tensor, groups: int, alignment: int) -> None:
    checks.within("m_indices", check, m_indices, m_indices, (-1, groups - 1), f"[-1, {groups})")
    if alignment == 1:
        return
    padded = torch.nn.functional.pad(m_indices, (0, -m_indices.shape[0] % alignment), value=-1).view(-1, alignment)
    # Within a tile: one expert, then padding only, because the kernel uses the expert of the tile's first row.
    mixed = ((padded != padded[:, :1]) & (padded != -1)).any(dim=1)

    def explain() -> str:
        tile = int(mixed.nonzero()[0])
        return (
            f"rows {tile * alignment}..{tile * alignment + alignment - 1} belong to two experts; "
            f"start each expert's rows at a multiple of {alignment} and fill with -1"
        )

    checks.values("m_indices", check, ~mixed.any(), explain)


def _takes_packed(backend: Backend) -> bool:
    return backend.name == "deep_gemm" and machines.packs_ue8m0()


def loaded_experts(weight: Tensor, weight_scale: Tensor, *, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """:func:`kernels.blockscaled.loaded_weight` of the weights of experts, for the contiguous grouped product.

    ``weight`` ``[E, N, K]`` E4M3, ``weight_scale`` ``[E, ceil(N/128), ceil(K/128)]`` float32. Returns the same tensors
    where nothing is due; with ``ue8m0`` codes under powers of two, and where the plan's product reads packed exponents
    int32 ``[E, N, ceil(K/512)]``, column-major for each expert.
    """
    if not ue8m0 or weight.is_meta or weight_scale.is_meta or weight_scale.dtype is torch.int32:
        return weight, weight_scale
    groups, n, k = weight.shape
    if not torch.equal(ceil_to_ue8m0(weight_scale), weight_scale):
        made = [under_powers(*pair) for pair in zip(weight, weight_scale, strict=True)]
        weight = torch.stack([codes.view(torch.uint8) for codes, _ in made]).view(FP8)
        weight_scale = torch.stack([scale for _, scale in made])
    try:
        packs = _takes_packed(_route("grouped_contiguous", weight.device, torch.bfloat16, n, k, groups, False))
    except NoBackendError:  # the first call says why
        packs = False
    if packs:
        recipe = (1, BLOCK, BLOCK)
        weight_scale = transform_sf_into_required_layout(weight_scale, n, k, recipe, groups, is_sfa=False)
    return weight, weight_scale


def expert_scales(name: str, scale: object, groups: int, n: int, k: int) -> None:
    """Refuse scales that are neither ``[G, ceil(N/128), ceil(K/128)]`` float32 nor packed as of :func:`loaded_experts`.

    Raises DtypeError, InputError, LayoutError, ShapeError.
    """
    blocks = -(-k // BLOCK)
    if not (isinstance(scale, Tensor) and scale.dtype is torch.int32):
        checks.operand(name, scale, (groups, -(-n // BLOCK), blocks), "[G, ceil(N/128), ceil(K/128)]", torch.float32)
        return
    checks.shape(name, scale, (groups, n, -(-blocks // 4)), "[G, N, ceil(K/512)], packed")
    if scale.stride(1) != 1 or (scale.shape[2] > 1 and scale.stride(2) != align(n, TMA_LANES)):
        raise LayoutError(f"{name} has strides {scale.stride()}; packed scales are column-major (loaded_experts)")


def _weight(w: Tensor, ws: Tensor, k: int, packed: bool = False) -> tuple[int, int]:
    groups, n, k_w = checks.dtype("b", checks.rank("b", w, 3), FP8).shape
    if k != k_w or 0 in (groups, n, k):
        raise ShapeError(f"b {list(w.shape)} must be [G, N, K] with K={k} and no empty dimension")
    if packed:
        expert_scales("b_scale", ws, groups, n, k)
    else:
        due = (groups, -(-n // BLOCK), -(-k // BLOCK))
        checks.operand("b_scale", ws, due, "[G, ceil(N/128), ceil(K/128)]", torch.float32)
    return groups, n
