"""Layers of experts whose weights have a scale for each block of a row: MXFP8, MXFP4, NVFP4, and MXFP8 by MXFP4.

    xq    codes and scales of the input, of NVFP4 under a global scale of each expert
    h     = alpha1[e] * (xq @ w13[e].T) + b1[e]                    rounded to bf16
    act   = silu(gate) * up, or with gates (gpt-oss and its like)
            g / (1 + exp(-alpha g)) * (u + beta), g = min(gate, limit), u = min(max(up, -limit), limit)
                                                                   in float32, rounded to bf16
    y     = alpha2[e] * (quantised(act) @ w2[e].T) + b2[e]
    out   = the sum over the experts of a token of weight * y, as ``combine`` of the row says

One row for each pipeline, as :mod:`kernels.moe_pipelines` has them for FP8; the first four are this layer's own.
Products are those of FlashInfer's placement (:func:`kernels.mx_products.grouped_product`), whose rows begin at
multiples of 4. With a bias, and where the intermediate stays in float32, a product is written in float32 and rounded
behind it; on Blackwell, whose libraries write bf16, one with a bias is rounded before it as well.

Not covered: weights with inputs in bf16, routing inside the layer, communication between ranks.

NaN in a row or its weight makes the row of its token NaN; codes of four bits have no NaN.
Source: FlashInfer (``cutlass_fused_moe``, CuTe DSL), vLLM (``cutlass_moe_fp4``, ``cutlass_moe_mxfp4``), gpt-oss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import checks
from . import platform as machines
from .adapters import Adapter, Inputs, Options
from .errors import InputError, OptionError, ShapeError, shown
from .layout import align, swizzle_scale
from .moe_layer import routed, scattered, sorted_rows, without_padding
from .moe_pipelines import EARLY, combined, slots, way_of
from .mx_blocks import FORMATS, size_of
from .mx_experts import mxfp4_experts_quant, mxfp8_experts_quant, scaled_fp4_experts_quant
from .mx_products import grouped_product
from .operators import empty
from .support import BLACKWELL
from .verbs import serve, verb

TILE, PLACEMENT = 4, "flashinfer"
"""What the rows of an expert begin at a multiple of; where its scales lie."""


@dataclass(frozen=True)
class MxPipeline:
    """One layer: the formats of inputs and weights (:data:`kernels.mx_blocks.FORMATS`) and the ways to combine, the
    usual one first. ``wide``: the first product and the activation stay in float32."""

    inputs: str
    weights: str
    combine: tuple[str, ...] = ("stored",)
    up_first: bool = False
    wide: bool = False


_FUSED, _CUTE = ("atomic", "stored"), ("atomic", "weighted")
MX_PIPELINES: Mapping[str, MxPipeline] = {
    "mxfp8": MxPipeline("mxfp8", "mxfp8"),
    "mxfp4": MxPipeline("mxfp4", "mxfp4"),
    "mxfp8_mxfp4": MxPipeline("mxfp8", "mxfp4"),
    "nvfp4": MxPipeline("nvfp4", "nvfp4"),
    "cutlass_moe_fp4": MxPipeline("nvfp4", "nvfp4", ("scaled",)),
    "cutlass_moe_mxfp4": MxPipeline("mxfp4", "mxfp4", ("scaled",)),
    "cutlass_fused_moe_nvfp4": MxPipeline("nvfp4", "nvfp4", _FUSED, up_first=True),
    "cutlass_fused_moe_mxfp8_mxfp4": MxPipeline("mxfp8", "mxfp4", _FUSED, up_first=True),
    "cutlass_fused_moe_mxfp8": MxPipeline("mxfp8", "mxfp8", _FUSED, up_first=True),
    "cute_dsl_fused_moe_nvfp4": MxPipeline("nvfp4", "nvfp4", _CUTE, up_first=True, wide=True),
    "cute_dsl_fused_moe_mxfp8_mxfp4": MxPipeline("mxfp8", "mxfp4", _CUTE, up_first=True, wide=True),
}  # fmt: skip  # a table, one row a line
OWN = ("mxfp8", "mxfp4", "mxfp8_mxfp4", "nvfp4")
"""The rows that no library has: products in bf16, weighted and added in float32, rounded once."""


# --- as a contract, and as an operator, calls it -------------------------------------------------------------------


def _by(pipeline: str) -> Adapter:
    def run(verb: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
        arguments: dict[str, Any] = {**inputs, **options}
        arguments["expert_offset"] = arguments.pop("first_expert", 0)
        if "combine" in arguments:
            arguments["combine"] = arguments["combine"].lower()
        return verb(**arguments, pipeline=pipeline)

    return run


def _layer_fake(x: Tensor, *_: object, out_dtype: torch.dtype | None = None, **__: object) -> Tensor:
    dtype = next((value for value in _ if isinstance(value, torch.dtype)), out_dtype)
    return empty(*x.shape, like=x, dtype=dtype or x.dtype)


# --- the verb ------------------------------------------------------------------------------------------------------


@verb(fake=_layer_fake)
def moe_mx_experts(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    pipeline: str,
    a1_gscale: Tensor | None = None,
    a2_gscale: Tensor | None = None,
    alpha1: Tensor | None = None,
    alpha2: Tensor | None = None,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    gates: Tensor | None = None,
    expert_map: Tensor | None = None,
    expert_offset: int = 0,
    combine: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The experts of a layer by one of :data:`MX_PIPELINES`.

    ``expert_map`` ``[E_global]`` integers.

    Parameters
    ----------
    x
        ``[T, H]`` bf16, f16 or f32.
    w13, w2
        ``[E, 2I, H]`` (gate rows first, or up rows where the row says so) and ``[E, H, I]`` E4M3, or uint8 of two codes
        each. Rows may be longer than ``H`` and ``I``: the codes behind are zeros.
    w13_scale, w2_scale
        uint8 (E8M0 for 32 columns, E4M3 for 16 of NVFP4): row by row ``[E, N, K/width]``, or each weight flat in 128x4
        tiles ``[E, bytes]``, which no call lays out again.
    topk_weights, topk_ids
        ``[T, top_k]`` float32 and integer; ids are global; -1 and experts of other ranks contribute nothing.
    a1_gscale, a2_gscale
        ``[E]`` float32 of NVFP4, 2688/amax of the input and of the intermediate of each expert; of no other row.
    alpha1, alpha2
        ``[E]`` float32, by which the products are multiplied; None for 1.
    b1, b2
        ``[E, 2I]``, in the order of ``w13``, and ``[E, H]`` bf16, f16 or f32; None for 0.
    gates
        ``[E, 3]`` float32: alpha, beta and limit of each expert's activation; None for ``silu(gate) * up``.
    expert_map
        Local expert of each global one, or -1; else this rank holds ``expert_offset`` and those after it.
    combine
        Another way of the row to weight and add; None: the usual one.
    out_dtype
        The dtype of a sum in float32; default: that of ``x``. Ways that add in bf16 give bf16.

    Returns
    -------
    Tensor
        ``[T, H]``; no tokens give no rows.

    Raises
    ------
    OptionError, ShapeError, DtypeError, DeviceError, InputError, LayoutError
    """
    if is_compiling():
        out: Tensor = torch.ops.fp8_kernels.moe_mx_experts(
            x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, pipeline, a1_gscale, a2_gscale, alpha1, alpha2,
            b1, b2, gates, expert_map, expert_offset, combine, out_dtype,
        )  # fmt: skip  # the arguments of the verb
        return out
    row = mx_row_of(pipeline)
    tokens, hidden = checks.dtype("x", checks.rank("x", x, 2), *checks.WIDE).shape
    routed(tokens, topk_weights, topk_ids)
    experts, inner = _weights(row, hidden, (w13, w13_scale), (w2, w2_scale))
    _beside(row, experts, hidden, inner, (a1_gscale, a2_gscale), (alpha1, alpha2), (b1, b2), gates)
    given = {"alpha1": alpha1, "alpha2": alpha2, "b1": b1, "b2": b2, "gates": gates, "expert_map": expert_map}
    given |= {"a1_gscale": a1_gscale, "a2_gscale": a2_gscale, "topk_weights": topk_weights, "topk_ids": topk_ids}
    checks.same_device(x=x, w13=w13, w13_scale=w13_scale, w2=w2, w2_scale=w2_scale, **given)
    way = way_of(row.combine, combine, topk_ids.shape[1])
    dtype = checks.out_dtype(out_dtype or x.dtype)
    if not tokens:
        return x.new_zeros(x.shape, dtype=dtype)
    ids = topk_ids.long()
    if expert_map is not None:
        ids = torch.where(ids >= 0, checks.rank("expert_map", expert_map, 1).long()[ids.clamp(min=0)], -1)
    rows = align(ids.numel() + experts * (TILE - 1), TILE)
    target, groups, ends = sorted_rows(ids, experts, expert_offset, TILE, rows)
    starts, of = torch.nn.functional.pad(ends, (1, 0)), groups.clamp(min=0).long()
    h = _product(row, slots(x, target, rows), (w13, w13_scale), starts, (a1_gscale, alpha1, b1), of, row.wide)
    act = _activated(without_padding(h, groups), None if gates is None else gates[of], row)
    y = _product(row, act, (w2, w2_scale), starts, (a2_gscale, alpha2, b2), of, way in EARLY)
    if way in EARLY:
        y = y.to(torch.float32) * scattered(topk_weights.reshape(-1, 1), target, rows)
    return combined(y.to(torch.bfloat16), topk_weights, target, way, dtype)


for _name, _row in MX_PIPELINES.items():
    if _name not in OWN:
        serve(_name, "mx_product", moe_mx_experts, _by(_name))


# --- products ---------------------------------------------------------------------------------------------------------


def _product(
    row: MxPipeline,
    x: Tensor,
    weight: tuple[Tensor, Tensor],
    starts: Tensor,
    own: tuple[Tensor | None, Tensor | None, Tensor | None],
    of: Tensor,
    wide: bool,
) -> Tensor:
    """Rows quantised, times the weight of their expert, and its bias: bf16, or float32 where it is asked for."""
    (codes, scale), (gscale, alpha, bias) = weight, own
    form = FORMATS[row.weights]
    if behind := codes.shape[2] * form.packed - x.shape[1]:
        x = torch.nn.functional.pad(x, (0, behind))
    if gscale is not None:
        q, s = scaled_fp4_experts_quant(x, gscale, starts, PLACEMENT)
    else:
        q, s = (mxfp8_experts_quant if row.inputs == "mxfp8" else mxfp4_experts_quant)(x, starts, PLACEMENT)
    tiles = scale if scale.dim() == 2 else swizzle_scale(scale)
    library = x.device.type != "cpu" and machines.current_machine().sm in BLACKWELL
    dtype = torch.float32 if wide or bias is not None and not library else torch.bfloat16
    y = grouped_product((q, s), (codes, tiles), starts, form.scale, dtype, alpha, TILE)
    if bias is not None:
        y = y.to(torch.float32) + bias.to(torch.float32)[of]
    return y if wide else y.to(torch.bfloat16)


def _activated(h: Tensor, gates: Tensor | None, row: MxPipeline) -> Tensor:
    """``[R, I]`` bf16, float32 of a wide row."""
    gate, up = h.to(torch.float32).chunk(2, dim=1)[:: -1 if row.up_first else 1]
    if gates is None:
        y = torch.nn.functional.silu(gate) * up
    else:
        alpha, beta, limit = gates.unsqueeze(2).unbind(1)
        gate, up = torch.minimum(gate, limit), torch.maximum(torch.minimum(up, limit), -limit)
        y = gate / (1 + torch.exp(-alpha * gate)) * (up + beta)
    return y if row.wide else y.to(torch.bfloat16)


# --- checks -----------------------------------------------------------------------------------------------------------


def mx_row_of(pipeline: str) -> MxPipeline:
    """The row of a name; OptionError names all where there is none."""
    if pipeline not in MX_PIPELINES:
        raise OptionError(f"pipeline={shown(pipeline)}; there are {', '.join(MX_PIPELINES)}")
    return MX_PIPELINES[pipeline]


def _weights(row: MxPipeline, hidden: int, w13: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor]) -> tuple[int, int]:
    """The number of experts and I, of weights that fit the input and their scales."""
    form = FORMATS[row.weights]
    experts, up, _ = checks.dtype("w13", checks.rank("w13", w13[0], 3), form.codes).shape
    if up % 2:
        raise ShapeError(f"w13 {list(w13[0].shape)} has an odd number of rows; it is [E, 2I, H]")
    checks.dtype("w2", checks.rank("w2", w2[0], 3), form.codes)
    for name, (codes, scale), n, least in (("w13", w13, up, hidden), ("w2", w2, hidden, up // 2)):
        k = codes.shape[2] * form.packed
        if tuple(codes.shape[:2]) != (experts, n) or k < least:
            raise ShapeError(
                f"{name} is {list(codes.shape)}; with E={experts}, H={hidden}, I={up // 2} it is [E, {n}, K]"
            )
        checks.multiple(f"K of {name}", k, form.width, "pad the weights with zero codes")
        columns = k // form.width
        if checks.tensor(f"{name}_scale", scale).dim() == 2:
            checks.operand(f"{name}_scale", scale, (experts, size_of(n, columns, "128x4")), "[E, bytes]", torch.uint8)
        else:
            checks.operand(f"{name}_scale", scale, (experts, n, columns), "[E, N, K/width]", torch.uint8)
    return experts, up // 2


def _beside(
    row: MxPipeline,
    experts: int,
    hidden: int,
    inner: int,
    gscales: tuple[Tensor | None, Tensor | None],
    alphas: tuple[Tensor | None, Tensor | None],
    biases: tuple[Tensor | None, Tensor | None],
    gates: Tensor | None,
) -> None:
    """Refuse what does not fit the number of experts, or the row."""
    for number, (gscale, alpha, bias, n) in enumerate(
        zip(gscales, alphas, biases, (2 * inner, hidden), strict=True), 1
    ):
        if (gscale is None) is (row.inputs == "nvfp4"):
            raise InputError(f"a{number}_gscale is of NVFP4 inputs, and of no others; these are {row.inputs}")
        for name, factor in ((f"a{number}_gscale", gscale), (f"alpha{number}", alpha)):
            if factor is not None:
                checks.operand(name, factor, (experts,), "[E]", torch.float32)
        if bias is not None:
            checks.operand(f"b{number}", bias, (experts, n), "[E, N]", *checks.WIDE)
    if gates is not None:
        checks.operand("gates", gates, (experts, 3), "alpha, beta, limit of each expert", torch.float32)
