"""A mixture-of-experts layer from routing to combination, on grouped products.

``y[t] = sum_j weight[t,j] * w2[e] @ q(silu(gate) * up)`` with ``[gate; up] = w13[e] @ q(x[t])`` and ``e`` the j-th
expert of token t. Both inputs are quantised by the chosen recipe; products are stored in bf16 and combined in
float32.

Not covered: communication between expert-parallel ranks. Each rank computes its own experts; an expert of another rank
contributes zero, and the engine sums over ranks.

NaN in a row or its weight makes the row of its token NaN; NaN logits are chosen first.
Source: vLLM (fused_moe), SGLang (topk); DeepSeek-V3 technical report for the routing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import checks
from .adapters import Inputs, Options
from .checks import FP8
from .errors import OptionError, ShapeError
from .grouped import (
    expert_scales,
    get_mk_alignment_for_contiguous_layout,
    m_grouped_fp8_gemm_nt_contiguous,
    scaled_grouped_mm,
)
from .layout import align
from .quantize import per_token_group_quant_fp8, per_token_group_quant_fp8_packed, scaled_fp8_quant
from .routers import route_experts
from .support import BLOCK
from .verbs import serve, verb

# --- as a contract, and as an operator, calls it -------------------------------------------------------------------


def _routed(verb: Callable[..., tuple[Tensor, Tensor]], inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """Experts and weights of every token, by the router of the call: DeepSeek-V3's (``verb``), Llama 4's, a softmax."""
    top_k, router = options.get("top_k", 8), options.get("router", "deepseek_v3")
    renormalize, factor = bool(options.get("renormalize", False)), options.get("routed_scaling_factor", 1.0)
    if router == "deepseek_v3":
        weights, ids = verb(
            inputs["logits"],
            inputs.get("bias"),
            top_k,
            n_group=options.get("num_expert_group", 1),
            topk_group=options.get("topk_group", 1),
            renormalize=renormalize,
            routed_scaling_factor=factor,
        )
    elif inputs.get("bias") is not None or factor != 1.0 or options.get("num_expert_group", 1) != 1:
        raise OptionError(f"{router} routing takes no bias, no scaling factor and no groups of experts")
    elif router == "llama4" and renormalize:
        raise OptionError("llama4 routing takes no renormalisation")
    elif router == "llama4":
        weights, ids = route_llama4(inputs["logits"], top_k)
    else:
        weights, ids = route_softmax(inputs["logits"], top_k, renormalize=renormalize)
    return {"topk_weights": weights, "topk_ids": ids}


def _block_layer(verb: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """The block-scaled layer, which quantises its own input."""
    blocks = inputs["w13_scale"].dim() == 3
    if "x" not in inputs or not blocks or "a2_scale" in inputs or "a_scale" in inputs or options.get("recipe"):
        raise OptionError("this layer quantises x itself, in groups of 128, against block-scaled weights")
    rounding = options.get("activation_rounding", "EACH")
    if rounding not in ("EACH", "PRODUCT") or options.get("out_dtype", torch.bfloat16) != torch.bfloat16:
        raise OptionError(f"activation_rounding={rounding}: the intermediate is bf16, and so is the output")
    names = ("x", "w13", "w13_scale", "w2", "w2_scale", "topk_weights", "topk_ids")
    return verb(
        *(inputs[n] for n in names),
        limit=options.get("limit"),
        expert_offset=int(str(options.get("first_expert", 0))),
        weight_on_input=bool(options.get("apply_router_weight_on_input", False)),
        round_silu=rounding == "EACH",
        out_dtype=torch.bfloat16,
    )


# --- the verbs -----------------------------------------------------------------------------------------------------


@verb()
def route_llama4(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Top-k on the logits; weights are the sigmoid of the chosen logits and multiply the expert's input.

    Parameters
    ----------
    logits
        ``[T, E]``, any float dtype.

    Returns
    -------
    weights, ids
        float32 and int64 ``[T, top_k]``.
    """
    return route_experts(logits, top_k, by_logit=True)


@verb()
def route_deepseek_v3(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    *,
    n_group: int,
    topk_group: int,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Sigmoid scores; choice by score plus bias within the best groups.

    ``logits`` ``[T, E]`` bf16, f16 or f32, ``bias`` ``[E]``.

    Groups are ranked by the sum of their best two choices (without a bias: by their best). The bias affects the choice
    only: weights are the scores, renormalised over the chosen experts, times the factor.

    Returns
    -------
    weights, ids
        float32 and int64 ``[T, top_k]``.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError
    """
    experts = checks.rank("logits", logits, 2).shape[1]
    if experts // checks.positive("n_group", n_group) < 2:
        raise OptionError(f"{experts} experts do not form {n_group} groups of at least two")
    return route_experts(
        logits,
        top_k,
        bias=bias,
        n_group=n_group,
        topk_group=topk_group,
        renormalize=renormalize,
        routed_scaling_factor=routed_scaling_factor,
    )


@verb()
def route_softmax(logits: Tensor, top_k: int, *, renormalize: bool = False) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, then top-k; with ``renormalize`` the chosen weights sum to 1.

    ``logits`` ``[T, E]`` bf16, f16 or f32.

    Returns
    -------
    weights, ids
        float32 and int64 ``[T, top_k]``.
    """
    return route_experts(logits, top_k, scoring="softmax", renormalize=renormalize)


serve("moe_routing", "cast", route_deepseek_v3, _routed)


@verb("cast")
def silu_and_mul(x: Tensor, limit: float | None = None, *, round_silu: bool = False) -> Tensor:
    """``silu(gate) * up`` of ``x [..., 2I] = [gate, up]`` in float32, rounded once to the dtype of ``x``.

    With ``limit`` the gate is clamped from above and the up half on both sides first. With ``round_silu`` the
    activation is rounded to the dtype of ``x`` before it is multiplied, as vLLM's kernel does.

    Raises DtypeError, OptionError, ShapeError.
    """
    checks.dtype("x", x, *checks.WIDE)
    if x.dim() < 1 or x.shape[-1] % 2:
        raise ShapeError(f"x has shape {list(x.shape)}; its last axis holds gate and up and must be even")
    if limit is not None:
        checks.number("limit", limit)
    gate, up = x.to(torch.float32).chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    active = torch.nn.functional.silu(gate)
    return ((active.to(x.dtype).to(torch.float32) if round_silu else active) * up).to(x.dtype)


@verb("grouped_contiguous", contracts=("moe_fp8",), adapter=_block_layer)
def moe_block_scaled(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    limit: float | None = None,
    expert_offset: int = 0,
    weight_on_input: bool = False,
    round_silu: bool = False,
    ue8m0: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Block-scaled experts on DeepGEMM's contiguous grouped product.

    ``w13_scale`` ``[E, ceil(2I/128), ceil(H/128)]``, ``w2_scale`` ``[E, ceil(H/128), ceil(I/128)]``; with ``ue8m0``
    also packed (:func:`kernels.grouped.loaded_experts`).

    Parameters
    ----------
    x
        ``[T, H]`` bf16, f16 or f32.
    w13, w2
        ``[E, 2I, H]`` (gate rows first) and ``[E, H, I]`` E4M3, with float32 scales per 128x128 block.
    topk_weights, topk_ids
        ``[T, top_k]`` float32 and integer; ids are global, this rank holds ``[expert_offset, expert_offset + E)``;
        any other id, such as -1, contributes nothing.
    limit, round_silu
        See :func:`silu_and_mul`.
    weight_on_input
        Multiply the input by the routing weight, rounded to its dtype (as vLLM, SGLang and TensorRT-LLM do), instead
        of the output.
    ue8m0
        Inputs are quantised under powers of two, and the scales of the weights are such: DeepGEMM's on Blackwell.
    out_dtype
        The dtype to which the sum over experts, in float32, is rounded; default: that of ``x``.

    Returns
    -------
    Tensor
        ``[T, H]``.
        Of ``out_dtype``.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError
    """
    experts, dtype = operands(x, w13, w2, topk_weights, topk_ids), checks.out_dtype(out_dtype or x.dtype)
    for name, w, scale in (("w13_scale", w13, w13_scale), ("w2_scale", w2, w2_scale)):
        expert_scales(name, scale, *w.shape)
        if scale.dtype is torch.int32 and not ue8m0:
            raise OptionError(f"{name} is packed, which scales of powers of two are; pass ue8m0=True")
    checks.same_device(x=x, w13_scale=w13_scale, w2_scale=w2_scale)
    tile = get_mk_alignment_for_contiguous_layout()
    rows = align(topk_ids.numel() + experts * (tile - 1), tile)
    target, groups, _ = sorted_rows(topk_ids, experts, expert_offset, tile, rows)
    spread = _spread(x, topk_weights, target, rows, weight_on_input)
    hidden = _block_product(spread, w13, w13_scale, groups, ue8m0)
    inner = silu_and_mul(without_padding(hidden, groups), limit, round_silu=round_silu)
    y = _block_product(inner, w2, w2_scale, groups, ue8m0)
    return _combine(y, topk_weights, target, weight_on_input, dtype)


@verb()
def moe_per_token(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    limit: float | None = None,
    expert_offset: int = 0,
    weight_on_input: bool = False,
    round_silu: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Experts with scales per token and per output channel, on ``scaled_grouped_mm``.

    The other operands, and the result, as of :func:`moe_block_scaled`. Returns ``[T, H]`` of ``out_dtype``.

    As :func:`moe_block_scaled` with ``w13_scale [E, 2I]`` and ``w2_scale [E, H]`` float32.

    Raises DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError.
    """
    experts, dtype = operands(x, w13, w2, topk_weights, topk_ids), checks.out_dtype(out_dtype or x.dtype)
    for name, w, scale in (("w13_scale", w13, w13_scale), ("w2_scale", w2, w2_scale)):
        checks.operand(name, scale, (experts, w.shape[1]), "[E, N]", torch.float32)
    checks.same_device(x=x, w13_scale=w13_scale, w2_scale=w2_scale)
    rows = topk_ids.numel()
    target, groups, ends = sorted_rows(topk_ids, experts, expert_offset, 1, rows)
    spread = _spread(x, topk_weights, target, rows, weight_on_input)
    q, scale = scaled_fp8_quant(spread, use_per_token_if_dynamic=True)
    hidden = scaled_grouped_mm(q, w13, scale, w13_scale, ends, check=False)
    inner = silu_and_mul(without_padding(hidden, groups), limit, round_silu=round_silu)
    q, scale = scaled_fp8_quant(inner, use_per_token_if_dynamic=True)
    y = scaled_grouped_mm(q, w2, scale, w2_scale, ends, check=False)
    return _combine(y, topk_weights, target, weight_on_input, dtype)


def operands(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    ids: Tensor,
    inputs: tuple[torch.dtype, ...] = checks.WIDE,
    codes: torch.dtype = FP8,
) -> int:
    """The number of experts, where the operands of a layer fit each other; ``codes`` is the dtype of the weights.

    ``x`` ``[T, H]``, ``w13`` ``[E, 2I, H]``, ``w2`` ``[E, H, I]``, ``weights`` ``[T, top_k]`` float32 and ``ids`` ``[T,
    top_k]`` int32 or int64.

    Raises DeviceError, DtypeError, InputError, LayoutError, ShapeError.
    """
    tokens, hidden = checks.dtype("x", checks.rank("x", x, 2), *inputs).shape
    experts, up, h = checks.dtype("w13", checks.rank("w13", w13, 3), codes).shape
    checks.shape("w2", checks.dtype("w2", checks.rank("w2", w2, 3), codes), (experts, hidden, up // 2), "[E, H, I]")
    if h != hidden or up % 2:
        raise ShapeError(f"w13 {list(w13.shape)} must be [E, 2I, H] with H={hidden}")
    routed(tokens, weights, ids)
    checks.same_device(x=x, w13=w13, w2=w2, topk_weights=weights, topk_ids=ids)
    return experts


def routed(tokens: int, weights: Tensor, ids: Tensor) -> None:
    """Refuse ``weights`` ``[T, top_k]`` that are not float32, and ``ids`` ``[T, top_k]`` that are not int32 or int64.

    Raises DtypeError, InputError, LayoutError, ShapeError.
    """
    checks.dtype("topk_weights", checks.rank("topk_weights", weights, 2), torch.float32)
    checks.dtype("topk_ids", checks.rank("topk_ids", ids, 2), torch.int32, torch.int64)
    if weights.shape != ids.shape or ids.shape[0] != tokens:
        raise ShapeError(
            f"topk_weights {list(weights.shape)} and topk_ids {list(ids.shape)} must be [T={tokens}, top_k]"
        )


def sorted_rows(ids: Tensor, experts: int, offset: int, tile: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows sorted by local expert.

    ``ids`` ``[T, top_k]`` integers. Returns int64 ``[T, top_k]``, int32 ``[rows]`` and int32 ``[experts]``.

    Returns the row of each (token, slot), ``rows`` when its expert is on another rank; the expert of each row, -1 for
    padding; the end of each expert's rows.

    Raises OptionError.
    """
    checks.not_negative("expert_offset", offset)
    local = ids.reshape(-1).long() - offset
    local = torch.where((local >= 0) & (local < experts), local, torch.full_like(local, experts))
    order = local.argsort(stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device).scatter_add_(
        0, local, torch.ones_like(local)
    )
    runs = (counts[:experts] + tile - 1) // tile * tile
    starts = torch.cat([runs.new_zeros(1), runs.cumsum(0)])
    sorted_ids = local[order]
    before = torch.cat([counts.new_zeros(1), counts.cumsum(0)])[sorted_ids]
    row_of = starts[sorted_ids] + torch.arange(len(order), device=ids.device) - before
    row_of = torch.where(sorted_ids < experts, row_of, torch.full_like(row_of, rows))
    target = torch.empty_like(row_of).scatter_(0, order, row_of)
    groups = torch.full((rows + 1,), -1, dtype=torch.int32, device=ids.device)
    groups.scatter_(0, target, torch.where(local < experts, local, torch.full_like(local, -1)).to(torch.int32))
    return target.view(ids.shape), groups[:rows], starts[1:].to(torch.int32)


def _spread(x: Tensor, weights: Tensor, target: Tensor, rows: int, weight_on_input: bool) -> Tensor:
    slots = x.unsqueeze(1).expand(-1, target.shape[1], -1)
    if weight_on_input:
        slots = slots * weights.to(x.dtype).unsqueeze(-1)
    return scattered(slots.reshape(-1, x.shape[1]), target, rows)


def scattered(slots: Tensor, target: Tensor, rows: int) -> Tensor:
    """Row ``i`` of ``slots`` at the place ``target`` of the i-th (token, slot), zeros elsewhere; ``rows`` is no
    place.

    ``slots`` ``[T top_k, C]`` of any dtype, ``target`` ``[T, top_k]`` int64. Returns ``[rows, C]`` of the dtype of
    ``slots``.
    """
    spread = slots.new_zeros(rows + 1, slots.shape[1])
    spread[target.reshape(-1)] = slots
    return spread[:rows]


def gathered(y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """``[T, top_k, H]``, the rows of each token's experts, zeros where one is elsewhere; and where one is here.

    ``y`` ``[R, H]``, ``target`` ``[T, top_k]`` int64. The first result has the dtype of ``y``, the second, ``[T, top_k,
    1]``, is bool.
    """
    padded = torch.cat([y, y.new_zeros(1, y.shape[1])])
    return padded[target.reshape(-1)].view(*target.shape, y.shape[1]), (target < y.shape[0]).unsqueeze(-1)


def _block_product(x: Tensor, w: Tensor, scale: Tensor, groups: Tensor, ue8m0: bool) -> Tensor:
    """Rows quantised in groups of 128, times the weight of their expert, in bf16."""
    if scale.dtype is torch.int32:
        a = per_token_group_quant_fp8_packed(x, BLOCK)
    else:
        a = _quantise_powers(x) if ue8m0 else _quantise_groups(x)
    out = torch.empty(x.shape[0], w.shape[1], dtype=torch.bfloat16, device=x.device)
    m_grouped_fp8_gemm_nt_contiguous(a, (w, scale), out, groups, disable_ue8m0_cast=not ue8m0, check=False)
    return out


def _quantise_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    return per_token_group_quant_fp8(x, BLOCK, column_major_scales=True, tma_aligned_scales=True)


def _quantise_powers(x: Tensor) -> tuple[Tensor, Tensor]:
    return per_token_group_quant_fp8(x, BLOCK, column_major_scales=True, tma_aligned_scales=True, use_ue8m0=True)


def without_padding(y: Tensor, groups: Tensor) -> Tensor:
    """``y`` with zeros in unassigned rows, which a product does not write.

    ``y`` ``[R, C]``, ``groups`` ``[R]`` int32, -1 for none. Returns ``[R, C]`` of the dtype of ``y``.
    """
    return y.masked_fill((groups < 0).unsqueeze(1), 0.0)


def _combine(y: Tensor, weights: Tensor, target: Tensor, weight_on_input: bool, dtype: torch.dtype) -> Tensor:
    parts, here = gathered(y, target)
    factor = torch.ones_like(weights) if weight_on_input else weights
    terms = parts.to(torch.float32) * factor.unsqueeze(-1)
    return torch.where(here, terms, torch.zeros_like(terms)).sum(dim=1).to(dtype)
