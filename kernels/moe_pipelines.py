"""Layers of experts as the libraries compute them: one row for each pipeline, one verb for all.

A row says how the input and the intermediate are quantised, what shares a scale of a weight, where ``silu(gate) * up``
is rounded, and how the outputs of a token's experts are weighted and added (:data:`COMBINE`). The same numbers then
come from whichever backend serves the products. :mod:`kernels.moe_layer` has the layers to use where no library is to
be reproduced.

Not covered: biases, other activations, communication between ranks. Rows whose first product stays in float32, and int4
weights, run where a product gives float32: on the CPU, or (block scales) in Triton.

NaN in a row or its weight makes the row of its token NaN.
Source: vLLM, SGLang, FlashInfer and TensorRT-LLM, as :data:`PIPELINES` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import checks
from .adapters import Adapter, Inputs, Options
from .checks import FP8, FP8_MAX
from .errors import InputError, OptionError
from .fused import persistent_masked_m_silu_mul_quant, silu_and_mul_masked_post_quant
from .grouped import (
    fp8_m_grouped_gemm_nt_masked,
    get_mk_alignment_for_contiguous_layout,
    m_grouped_fp8_gemm_nt_contiguous,
    scaled_grouped_mm,
)
from .layout import align
from .moe_layer import (
    gathered,
    operands,
    route_deepseek_v3,
    scattered,
    silu_and_mul,
    sorted_rows,
    without_padding,
)
from .operators import empty
from .quantize import flashinfer_quantize_1x128, per_token_group_quant_fp8, scaled_fp8_quant
from .support import BLOCK
from .verbs import serve, verb

Quantised = tuple[Tensor, Tensor]
FLOOR = FP8_MAX * 2.0**-126
"""The amax under which TensorRT-LLM's scale is the least normal float32."""


def _static(x: Tensor, scale: Tensor | None) -> Quantised:
    q, s = scaled_fp8_quant(x, scale)
    return q, s.reshape(1, 1)


def _token(x: Tensor, scale: Tensor | None) -> Quantised:
    return scaled_fp8_quant(x, use_per_token_if_dynamic=True)


def _groups(eps: float) -> Callable[[Tensor, Tensor | None], Quantised]:
    return lambda x, scale: per_token_group_quant_fp8(x, BLOCK, eps=eps)


def _flashinfer(x: Tensor, scale: Tensor | None) -> Quantised:
    q, s = flashinfer_quantize_1x128(x)
    return q, s[:, : x.shape[0]].t().contiguous()


QUANTISE: Mapping[str, Callable[[Tensor, Tensor | None], Quantised]] = {
    "static": _static,
    "token": _token,
    "group": _groups(1e-10),
    "deepep": _groups(1e-4),
    "flashinfer": _flashinfer,
    "trtllm": _groups(FLOOR),
}
MASKED: Mapping[str, Callable[[Tensor, Tensor], Quantised]] = {
    "bf16": persistent_masked_m_silu_mul_quant,
    "group": silu_and_mul_masked_post_quant,
}
"""Activation and quantiser of the rows in use, in one kernel."""
COMBINE = ("stored", "weighted", "running", "scaled", "reordered", "atomic")
"""stored: bf16 products, weighted and added in float32. weighted: float32 products weighted, rounded, added in float32.
running: the same, added slot by slot in bf16. scaled, reordered: bf16 products times bf16 weights, rounded, added in
float32 or slot by slot in bf16. atomic: as running; a library adds in any order."""


EARLY = ("weighted", "running", "atomic")
"""Ways in which the weight meets the accumulator."""


@dataclass(frozen=True)
class Pipeline:
    """One layer; see the module's text. ``combine`` has the usual way first; ``hidden`` quantises the first product;
    ``first`` says that it is float32, ``multiplied`` that the intermediate is multiplied, not divided, before its
    cast."""

    weights: str
    quantise: str | None
    requantise: str
    combine: tuple[str, ...] = ("stored",)
    silu: str = "each"
    masked: bool = False
    up_first: bool = False
    multiplied: bool = False
    routed: bool = False
    first: bool = False
    hidden: str | None = None

    @property
    def operation(self) -> str:
        """The operation of the plan that multiplies."""
        grouped = "grouped_masked" if self.masked else "grouped_contiguous"
        return grouped if self.weights == "block" else "grouped_scaled"


_TRITON, _CUTLASS, _FINALIZE = ("weighted", "running"), ("stored", "scaled"), ("atomic", "stored")
PIPELINES: Mapping[str, Pipeline] = {
    "fused_experts_tensor": Pipeline("expert", "static", "static", _TRITON),
    "fused_experts_channel": Pipeline("channel", "token", "token", _TRITON),
    "fused_experts_block": Pipeline("block", "group", "group", _TRITON),
    "deep_gemm_moe": Pipeline("block", "group", "group"),
    "batched_deep_gemm_moe": Pipeline("block", "group", "bf16", masked=True),
    "cutlass_moe_fp8": Pipeline("expert", "static", "static", _CUTLASS),
    "cutlass_moe_fp8_channel": Pipeline("channel", "token", "token", _CUTLASS),
    "cutlass_fused_experts_fp8": Pipeline("block", "group", "group"),
    "deepep_moe_masked": Pipeline("block", "deepep", "group", masked=True),
    "ep_moe_masked": Pipeline("block", "group", "group", ("reordered",), masked=True),
    "cutlass_fused_moe_tensor": Pipeline("expert", None, "static", _FINALIZE, "none", up_first=True, multiplied=True),
    "cutlass_fused_moe_block": Pipeline("block", "flashinfer", "flashinfer", silu="product", up_first=True),
    "cutlass_fused_moe_w4": Pipeline("group", "static", "static", _FINALIZE, "product", up_first=True, multiplied=True),
    "trtllm_fp8_block_scale_moe": Pipeline(
        "block", None, "trtllm", silu="none", up_first=True, routed=True, first=True, hidden="trtllm"
    ),
    "trtllm_fp8_per_tensor_scale_moe": Pipeline(
        "expert", None, "static", silu="none", up_first=True, routed=True, first=True
    ),
}
METHODS = (
    "Default",
    "Renormalize",
    "DeepSeekV3",
    "Llama4",
    "RenormalizeNaive",
    "TopK",
    "SigmoidRenorm",
    "MiniMax2",
    "Sigmoid",
    "TopKSigmoid",
)
"""``RoutingMethodType`` of FlashInfer, by name."""


# --- as a contract, and as an operator, calls it -------------------------------------------------------------------


RENAMED = {
    "a": "x",
    "a_scale": "x_scale",
    "fc2_act_scale": "a2_scale",
    "prequant1": "a1_scale",
    "prequant2": "a2_scale",
    "first_expert": "expert_offset",
    "apply_router_weight_on_input": "weight_on_input",
}
"""Arguments of :func:`moe_experts` whose contract calls them otherwise."""


def _by(pipeline: str) -> Adapter:
    """One pipeline of experts; where the layer routes by itself, its routing before."""

    def run(verb: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
        arguments: dict[str, Any] = {RENAMED.get(key, key): value for key, value in {**inputs, **options}.items()}
        if "logits" in arguments:
            weight_dtype = arguments.pop("weight_dtype", torch.float32)
            names = ("top_k", "n_group", "topk_group", "routed_scaling_factor")
            asked = {key: arguments.pop(key) for key in names if key in arguments}
            method = arguments.pop("routing_method", "DeepSeekV3")
            logits, bias, top_k = arguments.pop("logits"), arguments.pop("bias", None), asked.pop("top_k", 8)
            weights, ids = route_by_method(logits, method, top_k, bias, **asked)
            arguments |= {"topk_weights": weights.to(weight_dtype).to(torch.float32), "topk_ids": ids}
            arguments["weight_on_input"] = method == "Llama4" and "up_scale" in arguments
        elif "combine" in arguments:
            arguments["combine"] = arguments["combine"].lower()
        return verb(**arguments, pipeline=pipeline)

    return run


def _layer_fake(x: Tensor, *_: object, **__: object) -> Tensor:
    return empty(*x.shape, like=x, dtype=torch.bfloat16)


# --- the verbs -----------------------------------------------------------------------------------------------------


@verb()
def route_by_method(
    logits: Tensor,
    method: str,
    top_k: int,
    bias: Tensor | None = None,
    *,
    n_group: int = 1,
    topk_group: int = 1,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Weights float32 and ids int64 ``[T, top_k]`` of ``logits [T, E]`` by one of FlashInfer's routing methods.

    ``bias [E]`` of DeepSeekV3 and MiniMax2 takes part in the choice only; groups and the factor are DeepSeekV3's.

    Raises DtypeError, InputError, LayoutError, OptionError, ShapeError.
    """
    if method not in METHODS:
        raise OptionError(f"routing method {method!r:.80}; there are {', '.join(METHODS)}")
    checks.number("routed_scaling_factor", routed_scaling_factor)
    if method != "DeepSeekV3" and (n_group, topk_group, routed_scaling_factor) != (1, 1, 1.0):
        raise OptionError(f"{method} has neither groups nor a scaling factor; they are DeepSeekV3's")
    if bias is not None and method not in ("DeepSeekV3", "MiniMax2"):
        raise InputError(f"{method} takes no bias; DeepSeekV3 and MiniMax2 do")
    x = checks.dtype("logits", checks.rank("logits", logits, 2), *checks.WIDE).to(torch.float32)
    if checks.positive("top_k", top_k) > x.shape[1]:
        raise OptionError(f"top_k={top_k} exceeds {x.shape[1]} experts")
    if method == "DeepSeekV3" and n_group > 1:
        return route_deepseek_v3(
            logits, bias, top_k, n_group=n_group, topk_group=topk_group, routed_scaling_factor=routed_scaling_factor
        )
    softmax = method in ("Default", "RenormalizeNaive")
    early = method in ("Renormalize", "TopK", "TopKSigmoid", "Llama4")
    scores = x if early else x.softmax(dim=-1) if softmax else x.sigmoid()
    choice = scores if bias is None else scores + bias.to(torch.float32)
    ids = choice.topk(top_k, dim=-1)[1]
    weights = scores.gather(1, ids)
    if method == "Renormalize":
        return weights.softmax(dim=-1), ids
    if method in ("Llama4", "TopKSigmoid"):
        return weights.sigmoid(), ids
    if method in ("DeepSeekV3", "MiniMax2", "RenormalizeNaive", "SigmoidRenorm"):
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-20)
    return weights * routed_scaling_factor, ids


@verb(fake=_layer_fake)
def moe_experts(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    pipeline: str,
    x_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    alpha1: Tensor | None = None,
    alpha2: Tensor | None = None,
    up_scale: Tensor | None = None,
    expert_map: Tensor | None = None,
    expert_offset: int = 0,
    weight_on_input: bool = False,
    combine: str | None = None,
) -> Tensor:
    """The experts of a layer by one of :data:`PIPELINES`.

    ``expert_map`` ``[E_global]`` integers.

    Parameters
    ----------
    x
        ``[T, H]`` bf16; E4M3 for pipelines whose input arrives quantised (with ``x_scale [T, H/128]`` for blocks).
    w13, w2
        ``[E, 2I, H]`` (gate rows first, or up rows where the row says so) and ``[E, H, I]`` E4M3; int8 of -8..7 for
        groups of int4 weights.
    w13_scale, w2_scale
        float32 for each expert ``[E]``, channel ``[E, N]``, block ``[E, N/128, K/128]`` or group ``[E, N, K/128]``.
    topk_weights, topk_ids
        ``[T, top_k]`` float32 and integer; ids are global, the experts of a token differ; -1 and other ranks' experts
        contribute nothing.
    a1_scale, a2_scale
        Static scales ``[1]``, or what multiplies the input (``[H]``) and the intermediate (``[1]``, ``[I]``) before
        the cast in ``cutlass_fused_moe``.
    alpha1, alpha2
        ``[E]`` float32: scales of the products of int4 weights.
    up_scale
        ``[E]`` float32: scale of up rows over that of the intermediate, of TensorRT-LLM's per-tensor layer.
    expert_map
        Local expert of each global one, or -1; else this rank holds ``expert_offset`` and those after it.
    weight_on_input
        The weight, in bf16, multiplies the input instead (one expert for each token); of TensorRT-LLM's per-tensor
        layer, in float32, the first product.
    combine
        Another way of the row to weight and add; None: the usual one.

    Returns
    -------
    Tensor
        ``[T, H]`` bf16; no tokens give no rows.

    Raises
    ------
    OptionError, ShapeError, DtypeError, InputError, ValueRangeError, LayoutError
    """
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.fp8_kernels.moe_experts(
            x,
            w13,
            w13_scale,
            w2,
            w2_scale,
            topk_weights,
            topk_ids,
            pipeline,
            x_scale,
            a1_scale,
            a2_scale,
            alpha1,
            alpha2,
            up_scale,
            expert_map,
            expert_offset,
            weight_on_input,
            combine,
        )
        return out
    row = row_of(pipeline)
    inputs, codes = FP8 if row.quantise is None else torch.bfloat16, torch.int8 if row.weights == "group" else FP8
    operands(x, w13, w2, topk_weights, topk_ids, (inputs,), codes)
    _scales(row, x, {"w13_scale": (w13, w13_scale), "w2_scale": (w2, w2_scale)})
    tokens, top_k = topk_ids.shape
    ways = way_of(row.combine, combine, top_k)
    if weight_on_input and top_k != 1:
        raise OptionError(f"weight_on_input with {top_k} experts for each token; it needs one")
    if not tokens:
        return x.new_zeros(x.shape, dtype=torch.bfloat16)
    ids = topk_ids.long()
    if expert_map is not None:
        ids = torch.where(ids >= 0, checks.rank("expert_map", expert_map, 1).long()[ids.clamp(min=0)], -1)
    layer = _Layer(row, w13, w13_scale, w2, w2_scale, up_scale, (alpha1, alpha2))
    before = row.quantise is None and weight_on_input
    if row.quantise is not None:
        if weight_on_input:
            x = x * topk_weights.to(x.dtype)
        if row.weights == "group":
            x, a1_scale = x * _given("a1_scale", a1_scale), x.new_ones(1, dtype=torch.float32)
        x, x_scale = QUANTISE[row.quantise](x, a1_scale)
    elif x_scale is None:
        x_scale = x.new_ones((1, 1), dtype=torch.float32)
    assert x_scale is not None
    x_scale = x_scale.expand(tokens, -1)
    if before:
        x_scale = x_scale * topk_weights
    factor = torch.ones_like(topk_weights) if weight_on_input else topk_weights
    if row.masked:
        y, target = _by_mask(layer, x, x_scale, ids, expert_offset)
    else:
        y, target = _by_runs(layer, x, x_scale, ids, expert_offset, a2_scale, factor if ways in EARLY else None)
    return combined(y, factor, target, ways)


for _name, _row in PIPELINES.items():
    serve(_name, _row.operation, moe_experts, _by(_name))


# --- products ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """The weights of a layer, gate rows first."""

    row: Pipeline
    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    up_scale: Tensor | None
    alpha: tuple[Tensor | None, Tensor | None]

    def weight(self, which: str) -> tuple[Tensor, Tensor]:
        """E4M3 codes and scales, for each channel where an expert has one."""
        w, scale = (self.w13, self.w13_scale) if which == "w13" else (self.w2, self.w2_scale)
        if self.row.weights == "group":
            w = w.to(torch.float32).to(FP8)
        if self.row.weights == "expert":
            scale = scale.reshape(-1, 1).expand(-1, w.shape[1])
        if which == "w2" or not self.row.up_first:
            return w, scale.contiguous()
        half = w.shape[1] // 2
        w = torch.cat([w[:, half:].view(torch.uint8), w[:, :half].view(torch.uint8)], dim=1).view(FP8)
        if self.up_scale is not None:
            scale = torch.cat([scale[:, :half], self.up_scale.reshape(-1, 1).expand(-1, half)], dim=1)
        elif scale.dim() == 3:
            scale = torch.cat(scale.chunk(2, dim=1)[::-1], dim=1)
        return w, scale.contiguous()

    def product(self, which: str, a: Quantised, groups: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows sorted by expert times the weight of their expert."""
        (q, scale), (w, w_scale) = a, self.weight(which)
        if self.row.weights == "block":
            out = torch.empty(q.shape[0], w.shape[1], dtype=dtype, device=q.device)
            spread = scale.expand(-1, -(-q.shape[1] // BLOCK)).contiguous()
            m_grouped_fp8_gemm_nt_contiguous((q, spread), (w, w_scale), out, groups, check=False)
            return out
        scale = scale.expand(q.shape[0], 1).contiguous()
        if self.row.weights != "group":
            return scaled_grouped_mm(q, w, scale, w_scale, ends, dtype, check=False)
        alpha = _given("alpha", self.alpha[which == "w2"])[groups.clamp(min=0).long()][:, None]
        total = torch.zeros(q.shape[0], w.shape[1], dtype=torch.float32, device=q.device)
        for k in range(0, q.shape[1], BLOCK):  # group scales multiply the sums of 128 products
            part, of = q[:, k : k + BLOCK].contiguous(), w[:, :, k : k + BLOCK].contiguous()
            s = w_scale[:, :, k // BLOCK].contiguous()
            total += scaled_grouped_mm(part, of, alpha.contiguous(), s, ends, torch.float32, check=False)
        return total.to(dtype)


def _by_runs(
    layer: _Layer, x: Tensor, x_scale: Tensor, ids: Tensor, offset: int, a2_scale: Tensor | None, factor: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs of rows sorted by expert, and the row of each (token, slot). With ``factor`` they are weighted, from the
    accumulator, and rounded."""
    row, experts = layer.row, layer.w13.shape[0]
    tile = get_mk_alignment_for_contiguous_layout() if row.weights == "block" else 1
    rows = align(ids.numel() + experts * (tile - 1), tile)
    target, groups, ends = sorted_rows(ids, experts, offset, tile, rows)
    a = slots(x, target, rows), slots(x_scale, target, rows)
    h = layer.product("w13", a, groups, ends, torch.float32 if row.first else torch.bfloat16)
    h = without_padding(h, groups)
    if row.hidden is not None:
        q, s = QUANTISE[row.hidden](h, None)
        h = q.to(torch.float32) * s.repeat_interleave(BLOCK, dim=1)[:, : h.shape[1]]
    act = silu_and_mul(h.to(torch.float32) if row.silu == "none" else h, round_silu=row.silu == "each")
    if row.multiplied:
        act, a2_scale = act * _given("a2_scale", a2_scale), act.new_ones(1, dtype=torch.float32)
    if layer.up_scale is not None:
        a2_scale = act.new_ones(1, dtype=torch.float32)
    quantised = QUANTISE[row.requantise](act, a2_scale)
    if factor is None:
        return layer.product("w2", quantised, groups, ends, torch.bfloat16), target
    row_factor = scattered(factor.reshape(-1, 1), target, rows)
    if row.weights in ("block", "group"):
        y = layer.product("w2", quantised, groups, ends, torch.float32)
        return (y * row_factor).to(torch.bfloat16), target
    q, s = quantised
    return layer.product("w2", (q, s * row_factor), groups, ends, torch.bfloat16), target


def _by_mask(layer: _Layer, x: Tensor, x_scale: Tensor, ids: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """The same with as many rows for each expert as there are tokens."""
    experts, room = layer.w13.shape[0], x.shape[0]
    if checks.wanted(None, x.device):
        ordered = ids.sort(dim=1)[0]
        same = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        checks.values("topk_ids", None, ~same.any(), lambda: "topk_ids name an expert twice for one token")
    packed, _, ends = sorted_rows(ids, experts, offset, 1, ids.numel())
    starts = torch.nn.functional.pad(ends, (1, 0))
    local = (ids - offset).clamp(0, experts - 1)
    here = packed < ids.numel()
    target = torch.where(here, local * room + packed - starts[local], experts * room)
    counts = ends - starts[:-1]
    (w13, s13), (w2, s2) = layer.weight("w13"), layer.weight("w2")
    a = [slots(t, target, experts * room).view(experts, room, -1) for t in (x, x_scale)]
    h = torch.empty(experts, room, w13.shape[1], dtype=torch.bfloat16, device=x.device)
    fp8_m_grouped_gemm_nt_masked((a[0], a[1]), (w13, s13), h, counts, room, check=False)
    q, s = MASKED[layer.row.requantise](h, counts)
    y = torch.empty(experts, room, w2.shape[1], dtype=torch.bfloat16, device=x.device)
    fp8_m_grouped_gemm_nt_masked((q, s.contiguous()), (w2, s2), y, counts, room, check=False)
    return y.view(experts * room, -1), target


def slots(x: Tensor, target: Tensor, rows: int) -> Tensor:
    """Each token's row at the places of its slots, zeros elsewhere.

    ``x`` ``[T, C]`` of any dtype, ``target`` ``[T, top_k]`` int64 as of :func:`sorted_rows`; returns ``[rows, C]``.
    """
    raw = x.view(torch.uint8) if x.dtype == FP8 else x
    return scattered(raw.repeat_interleave(target.shape[1], dim=0), target, rows).view(x.dtype)


def combined(y: Tensor, weights: Tensor, target: Tensor, way: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Outputs of a token's experts, weighted (unless they are already) and added as ``way`` of :data:`COMBINE` says.

    ``y`` ``[R, H]`` bf16, ``weights`` ``[T, top_k]`` float32, ``target`` ``[T, top_k]`` int64, the row of each or R.
    Returns ``[T, H]``, of ``dtype`` where the sum is float32.
    """
    terms, here = gathered(y, target)
    if way in ("scaled", "reordered"):
        terms = terms * weights.to(terms.dtype).unsqueeze(-1)
    elif way == "stored":
        terms = terms.to(torch.float32) * weights.unsqueeze(-1)
    terms = torch.where(here, terms, torch.zeros_like(terms))
    if way in ("running", "reordered", "atomic"):
        total = torch.zeros_like(terms[:, 0])
        for slot in range(terms.shape[1]):
            total = total + terms[:, slot]
        return total
    return terms.to(torch.float32).sum(dim=1).to(dtype)


# --- checks -----------------------------------------------------------------------------------------------------------


def row_of(pipeline: str) -> Pipeline:
    """The pipeline of a name; OptionError names all where there is none."""
    if pipeline not in PIPELINES:
        raise OptionError(f"pipeline {pipeline!r:.80}; there are {', '.join(PIPELINES)}")
    return PIPELINES[pipeline]


def way_of(ways: tuple[str, ...], combine: str | None, top_k: int) -> str:
    """How a call weights and adds: ``combine`` where ``ways`` has it (OptionError otherwise), or the usual way."""
    if combine is None:
        return "running" if ways == _TRITON and 2 <= top_k <= 4 else ways[0]
    if combine not in ways:
        raise OptionError(f"combine={combine!r:.80}; this pipeline has {', '.join(ways)}")
    return combine


def _scales(row: Pipeline, x: Tensor, weights: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Scales of both weights, of the shape that the row has."""
    for name, (w, scale) in weights.items():
        (e, n, _), blocks = w.shape, -(-w.shape[2] // BLOCK)
        due, meaning = {
            "expert": ((e,), "[E]"),
            "channel": ((e, n), "[E, N]"),
            "block": ((e, -(-n // BLOCK), blocks), "[E, ceil(N/128), ceil(K/128)]"),
            "group": ((e, n, blocks), "[E, N, ceil(K/128)]"),
        }[row.weights]
        checks.operand(name, scale, due, meaning, torch.float32)
        checks.same_device(x=x, **{name: scale})


def _given(name: str, x: Tensor | None) -> Tensor:
    if x is None:
        raise InputError(f"this pipeline needs {name}")
    return x
