"""Whole layers of experts as lists of steps, one row for each library's pipeline, and their contracts.

A row says in which order a layer quantises, multiplies, activates, requantises, weights and adds, and where it rounds:

    quantise   recipe of the input; None: it arrives as codes with scales
    weights    what shares a scale of a weight: an expert, an output channel, a 128x128 block, 128 columns of a row
    steps      roundings between the products (:class:`oracle.truth.moe.Steps`): the stored dtype, the activation,
               the recipe of the intermediate
    ways       how the experts' outputs become a token's (:class:`oracle.truth.moe.Combine`), the usual one first; a
               library that chooses by itself has several

What a row cannot say does not exist for its contract (:class:`PipelineContract`), which reads nothing else.
Permutation is no step: rows of an expert are those that chose it, in any order, and no value depends on the order.

Sources are named in the rows, at the commits of 2025 and 2026 that are in public. The first products of TensorRT-LLM's
block-scaled kernel leave as codes, by a formula inside its binary: every float32 formula is admitted. Not covered:
biases, other activations than silu-and-mul, float16, latency modes, the exchange between ranks.

A contract takes the weights as its kernel reads them but for their layout in memory (padding, tiles and swizzles are
contracts of their own): ``w13`` with gate rows first, or up rows first where the row says so. Scales are those of the
row's ``weights``. Experts of other ranks and ids of -1 add nothing.

*Truth.* The row's steps in float64 with the roundings that it declares (:func:`oracle.truth.moe.layer`).
*Admissible outputs.* Intervals that pass through every step (:mod:`oracle.routines.moe.moe_ranges`): a code of an
intermediate that rounding may flip is an interval of codes, its scale an interval of scales, and the second product
holds all of them. Sums that are rounded in any order have exact least and largest values over all orders, up to eight
terms. Alternatives, of which one must hold the whole output: the ways to combine, the dtype of the routing weights.

*Routing inside the layer.* Weights lie within a device's error (:mod:`oracle.truth.routing`). Of experts whose choices
lie closer than that, every choice is tried for its token, and that which admits its row is taken
(:func:`oracle.truth.routing.alternatives`); a token with too many choices is open.

*Where nothing is claimed.* Tokens with NaN or infinity, or whose intermediate may overflow, and elements whose truth is
NaN; the others of their experts are judged. Not covered: judging by bits; what a layer's output equals is for
``identify``.

NaN and infinity in a token: nothing is claimed of its output.
Sources: those of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.accumulator import of_schedule
from oracle.bounds.boxed import Box
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.errors import InputError, OptionError, ShapeError
from oracle.numbers import recipes
from oracle.numbers.formats import BF16, decode, of_dtype, same_bits, share
from oracle.numbers.quantize import quantize
from oracle.numbers.recipes import Recipe
from oracle.numbers.scaling import Block
from oracle.routines.base import (
    E4M3,
    F32,
    INTEGERS,
    Call,
    Contract,
    Inputs,
    Options,
    OptionSpec,
    Out,
    Output,
    TensorSpec,
    register,
)
from oracle.routines.fault import Fault, Stage, fold
from oracle.routines.moe.contract import KEPT, no_boxes, taken, why_mistrust
from oracle.routines.moe.moe_ranges import input_boxes, outcome, shares
from oracle.routines.moe.pipeline_bits import named
from oracle.routines.options import word
from oracle.routines.traits import Kind
from oracle.tensorcore.identify import Match
from oracle.tensorcore.instructions import arches
from oracle.tensorcore.schedules import get as get_schedule
from oracle.tensorcore.schedules import schedules
from oracle.truth import routing
from oracle.truth.layout import ceil_div, swap_w13_to_w31
from oracle.truth.moe import Activation, Combine, Experts, Rows, Steps, Tokens, layer, nearest, weighted_input
from oracle.truth.routing import Router, Span
from oracle.verdict.compare import Admissible, Verdict, compare, verdict
from oracle.verdict.sets import Found, Range, Sets, ranged, rounded_to, with_float32


class Sharing(StrEnum):
    """What shares a scale of a weight ``[E, N, K]``, and so the shape of its scales."""

    EXPERT = "an expert: [E]"
    CHANNEL = "an output channel: [E, N]"
    BLOCK = "a block: [E, ceil(N / 128), ceil(K / 128)]"
    GROUP = "128 columns of a row: [E, N, ceil(K / 128)]"


PROMOTED = {"sm90": ("sm90.promote128",), "sm89": ("sm89.promote128",), "cpu": (IEEE32,)}
CHAINED = {"sm90": ("sm90.chain",), "sm89": ("sm89.chain",), "cpu": (IEEE32,)}


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One layer; see the module's text.

    Attributes
    ----------
    up_first : the rows of ``w13`` are up, then gate.
    mapped : an expert map says which local expert a global one is.
    on_input : the weights may multiply the input instead (one expert for each token).
    multiplied : the intermediate is multiplied by a given value before it is cast; so is the input of int4 layers.
    routed : the layer gets logits and routes by itself.
    apart : gate and up rows have scales of their own for each expert, and the activation leaves in units of the second
        input's scale.
    activations : other roundings of the activation that are admitted, where its kernel is closed.
    halved : 64 columns of the intermediate share a scale, half of a block of the weights.
    dispatched : the production layer has it.
    """

    name: str
    summary: str
    source: str
    weights: Sharing
    steps: Steps
    quantise: Recipe | None = None
    ways: tuple[Combine, ...] = (Combine.STORED,)
    numerics: Mapping[str, tuple[str, ...]]
    up_first: bool = False
    mapped: bool = False
    on_input: bool = False
    multiplied: bool = False
    routed: bool = False
    apart: bool = False
    activations: tuple[Activation, ...] = ()
    halved: bool = False
    dispatched: bool = True

    @property
    def static(self) -> bool:
        """Whether the scales of the input and of the intermediate are given."""
        return self.quantise is not None and self.quantise.formula is recipes.ScaleFormula.GIVEN


_GROUP, _TOKEN, _GIVEN = recipes.VLLM_GROUP, recipes.VLLM_TOKEN, recipes.VLLM_STATIC
_TRITON = "vLLM fused_moe/fused_moe.py fused_experts_impl"
_TRITON_WAYS = (Combine.WEIGHTED, Combine.RUNNING)
_CUTLASS = "vLLM fused_moe/cutlass_moe.py run_cutlass_moe_fp8"
_FUSED = "FlashInfer csrc/fused_moe/cutlass_backend cutlass_fused_moe_kernels.cuh"
_FINALIZE = (Combine.ATOMIC, Combine.STORED)
_TRTLLM = "FlashInfer csrc/trtllm_fused_moe_kernel_launcher.cu"
_SM100 = {"sm100": ("sm100.promote128",), **PROMOTED}

PIPELINES = (
    # vLLM's Triton kernel, and SGLang's copy: weighted in the epilogue of the second product. moe_sum adds 2 to 4
    # slots in bfloat16 (vLLM issue 15045), other numbers of slots go to at::sum_out.
    Pipeline(
        name="fused_experts_tensor", summary="Triton experts, static scales", source=_TRITON,
        weights=Sharing.EXPERT, quantise=_GIVEN, steps=Steps(recipe=_GIVEN), ways=_TRITON_WAYS,
        numerics=CHAINED, mapped=True, on_input=True,
    ),
    Pipeline(
        name="fused_experts_channel", summary="Triton experts, a scale for each token and output channel",
        source=_TRITON, weights=Sharing.CHANNEL, quantise=_TOKEN, steps=Steps(recipe=_TOKEN), ways=_TRITON_WAYS,
        numerics=CHAINED, mapped=True, on_input=True,
    ),
    Pipeline(
        name="fused_experts_block", summary="Triton experts, 1x128 and 128x128 blocks", source=_TRITON,
        weights=Sharing.BLOCK, quantise=_GROUP, steps=Steps(recipe=_GROUP), ways=_TRITON_WAYS,
        numerics=PROMOTED, mapped=True, on_input=True,
    ),
    # DeepGEMM: products stored, gathered in float32; first releases weighted in place and added by moe_sum.
    Pipeline(
        name="deep_gemm_moe", summary="DeepGEMM's contiguous products, blocks", weights=Sharing.BLOCK,
        source="vLLM fused_moe/deep_gemm_moe.py, deep_gemm_utils.py ep_gather", quantise=_GROUP,
        steps=Steps(recipe=_GROUP), numerics=PROMOTED, mapped=True, on_input=True,
    ),
    Pipeline(
        name="batched_deep_gemm_moe", summary="DeepGEMM's masked products; intermediate quantised in bfloat16 steps",
        source="vLLM fused_moe/batched_deep_gemm_moe.py, csrc persistent_masked_m_silu_mul_quant",
        weights=Sharing.BLOCK, quantise=_GROUP, steps=Steps(recipe=recipes.VLLM_SILU_MASKED), numerics=PROMOTED,
    ),
    # CUTLASS: moe_unpermute weights in float32, the first release in the stored dtype.
    Pipeline(
        name="cutlass_moe_fp8", summary="cutlass_moe_mm, static scales", source=_CUTLASS, weights=Sharing.EXPERT,
        quantise=_GIVEN, steps=Steps(recipe=_GIVEN), ways=(Combine.STORED, Combine.SCALED), numerics=CHAINED,
        mapped=True, on_input=True,
    ),
    Pipeline(
        name="cutlass_moe_fp8_channel", summary="cutlass_moe_mm, a scale for each token and output channel",
        source=_CUTLASS, weights=Sharing.CHANNEL, quantise=_TOKEN, steps=Steps(recipe=_TOKEN),
        ways=(Combine.STORED, Combine.SCALED), numerics=CHAINED, mapped=True, on_input=True,
    ),
    Pipeline(
        name="cutlass_fused_experts_fp8", summary="fp8_blockwise_scaled_grouped_mm, 1x128 and 128x128 blocks",
        source="SGLang layers/moe/cutlass_moe.py cutlass_fused_experts_fp8", weights=Sharing.BLOCK,
        quantise=recipes.SGLANG_GROUP, steps=Steps(recipe=recipes.SGLANG_GROUP), numerics=PROMOTED,
    ),
    # SGLang's masked products: after DeepEP's dispatch, which combines by itself, or after its own permutation.
    Pipeline(
        name="deepep_moe_masked", summary="masked products of tokens that DeepEP quantised and dispatched",
        source="SGLang layers/moe/ep_moe/layer.py forward_deepgemm_masked; DeepEP internode_ll.cu combine",
        weights=Sharing.BLOCK, quantise=recipes.DEEPEP_1X128, steps=Steps(recipe=recipes.SGLANG_TRITON_COLUMN),
        numerics=PROMOTED,
    ),
    Pipeline(
        name="ep_moe_masked", summary="masked products, weighted and added in bfloat16 slot by slot",
        source="SGLang layers/moe/ep_moe/kernels.py moe_ep_deepgemm_preprocess, post_reorder_triton_kernel",
        weights=Sharing.BLOCK, quantise=recipes.SGLANG_GROUP, steps=Steps(recipe=recipes.SGLANG_TRITON_COLUMN),
        ways=(Combine.REORDERED, Combine.FUSED), numerics=PROMOTED,
    ),
    # FlashInfer: fused finalize adds bfloat16 atomically, the other one float32; the tuner picks unless it is told.
    Pipeline(
        name="cutlass_fused_moe_tensor", summary="cutlass_fused_moe of FP8 inputs, a scale for each expert",
        source=_FUSED, weights=Sharing.EXPERT, steps=Steps(activation=Activation.NONE, recipe=recipes.TORCH_STATIC),
        ways=_FINALIZE, numerics=CHAINED, up_first=True, multiplied=True,
    ),
    Pipeline(
        name="cutlass_fused_moe_block", summary="cutlass_fused_moe with use_deepseek_fp8_block_scale",
        source=_FUSED, weights=Sharing.BLOCK, quantise=recipes.FLASHINFER_1X128,
        steps=Steps(activation=Activation.PRODUCT, recipe=recipes.FLASHINFER_1X128), numerics=PROMOTED, up_first=True,
    ),
    Pipeline(
        name="cutlass_fused_moe_w4", summary="cutlass_fused_moe of int4 weights in groups of 128, E4M3 inputs",
        source=f"{_FUSED}; TensorRT-LLM preQuantScaleKernel.cu, sm90 mixed-input mainloop (groups scale accumulators)",
        weights=Sharing.GROUP, quantise=recipes.TORCH_STATIC,
        steps=Steps(activation=Activation.PRODUCT, recipe=recipes.TORCH_STATIC), ways=_FINALIZE, numerics=PROMOTED,
        up_first=True, multiplied=True,
    ),
    Pipeline(
        name="trtllm_fp8_block_scale_moe", summary="routing and experts; the first product leaves as codes",
        source=f"{_TRTLLM}; csrc/trtllm_fused_moe_dev_kernel.cu activationDeepSeekKernel, finalizeKernel",
        weights=Sharing.BLOCK, numerics=_SM100, up_first=True, routed=True,
        steps=Steps(first=torch.float32, activation=Activation.NONE, hidden=recipes.TRTLLM_GEN_1X128,
                    recipe=recipes.TRTLLM_GEN_1X128),
    ),
    Pipeline(
        name="trtllm_fp8_per_tensor_scale_moe", summary="routing and experts, static scales; nothing stored between",
        source=_TRTLLM, weights=Sharing.EXPERT, numerics={"sm100": ("sm100.chain",), **CHAINED},
        steps=Steps(first=torch.float32, activation=Activation.NONE, recipe=recipes.TORCH_STATIC),
        up_first=True, routed=True, apart=True,
    ),
    # One kernel for the whole layer: the routing weight multiplies before the intermediate is quantised.
    Pipeline(
        name="mono_moe", summary="one kernel of a layer on sm90, routing apart: ids and weights are given",
        source="FlashInfer csrc/fused_moe/monomoe/src moe_up_projection.cuh, moe_down_projection.cuh (0.6.18.post1)",
        weights=Sharing.BLOCK, quantise=recipes.SGLANG_GROUP, ways=(Combine.FLOAT32,), numerics=PROMOTED,
        steps=Steps(first=torch.float32, activation=Activation.NONE, weighted=True,
                    recipe=recipes.SGLANG_GROUP.with_block(Block(1, 64))),
        halved=True, dispatched=False,
    ),
    Pipeline(
        name="fp8_mega_moe", summary="DeepGEMM's kernel of a whole layer on sm90, one rank, codes and scales given",
        source="DeepGEMM sm90_fp8_mega_moe.cuh (sgl-deep-gemm 0.1.4.post1)", weights=Sharing.BLOCK, numerics=PROMOTED,
        steps=Steps(first=torch.float32, activation=Activation.NONE, weighted=True,
                    recipe=recipes.DEEPGEMM_DEVICE_1X32_UE8M0.with_block(Block(1, 64))),
        halved=True, dispatched=False,
    ),
)  # fmt: skip  # a table, one row a line
"""Every pipeline, in the order of the libraries."""


def steps_by(pipeline: Pipeline, combine: Combine) -> Steps:
    """The pipeline's steps with one of its ways to combine."""
    return replace(pipeline.steps, combine=combine)


# --- contracts ----------------------------------------------------------------------------------------------


HALF = 64
"""Columns that share a scale where it is half of a block."""
WIDE = (torch.bfloat16,)
INT4 = (torch.int8,)
ONE = TensorSpec("x", Kind.VALUES, WIDE, ("T", "H"), "input")
STAGES = {"first": Stage.STORE, "activated": Stage.QUOTIENT, "quantised": Stage.CODES, "term": Stage.SUM}
"""Where a fault changes what an expert has after a step; the input's tokens are PRODUCT, the row's steps RECIPE."""


def inputs_of(row: Pipeline) -> tuple[TensorSpec, ...]:
    """What the layer of a row takes."""
    weight = INT4 if row.weights is Sharing.GROUP else E4M3
    specs = [TensorSpec("a", Kind.CODES, E4M3, ("T", "H"), "quantised input") if row.quantise is None else ONE]
    if row.quantise is None and row.weights is Sharing.BLOCK:
        specs.append(
            TensorSpec("a_scale", Kind.SCALES, F32, ("T", "H/128"), "its scales (logical: the kernel takes [H/128, T])")
        )
    specs += [
        TensorSpec(
            "w13",
            Kind.CODES,
            weight,
            ("E", "R", "H"),
            "up rows, then gate rows" if row.up_first else "gate, then up rows",
        ),
        TensorSpec("w13_scale", Kind.SCALES, F32, None, f"{row.weights}; N, K those of w13" + APART * row.apart),
        TensorSpec("w2", Kind.CODES, weight, ("E", "H", "I"), "down projection"),
        TensorSpec("w2_scale", Kind.SCALES, F32, None, f"{row.weights}; N, K those of w2" + FULL * row.apart),
    ]
    if row.static and not row.multiplied:
        specs += [
            TensorSpec(f"a{n}_scale", Kind.SCALES, F32, ("1",), f"static scale of the {w}") for n, w in NAMES.items()
        ]
    if row.weights is Sharing.GROUP:
        sizes = ("H", "I")
        specs += [
            TensorSpec(f"prequant{n}", Kind.WEIGHTS, WIDE, (sizes[n - 1],), f"multiplies the {w}")
            for n, w in NAMES.items()
        ]
        specs += [TensorSpec(f"alpha{n}", Kind.ALPHA, F32, ("E",), f"scale of the {w}") for n, w in NAMES.items()]
    elif row.multiplied:
        specs.append(TensorSpec("fc2_act_scale", Kind.SCALES, F32, ("1",), "multiplies the intermediate"))
    if row.apart:
        doc = "multiplies the first product's up columns: scale of up rows over that of the intermediate"
        specs.append(TensorSpec("up_scale", Kind.SCALES, F32, ("E",), doc))
    if row.routed:
        specs += [
            TensorSpec("logits", Kind.LOGITS, (*F32, *WIDE), ("T", "X"), "router logits of all experts"),
            TensorSpec("bias", Kind.BIAS, (*F32, *WIDE), ("X",), "correction of the choice", optional=True),
        ]
    else:
        specs += [
            TensorSpec("topk_ids", Kind.IDS, INTEGERS, ("T", "k"), "global experts of each token, -1 for none"),
            TensorSpec("topk_weights", Kind.WEIGHTS, F32, ("T", "k"), "their weights"),
        ]
    if row.mapped:
        doc = "local expert of each global one, or -1"
        specs.append(TensorSpec("expert_map", Kind.IDS, INTEGERS, ("X",), doc, optional=True))
    return tuple(specs)


NAMES = {1: "input", 2: "intermediate"}
GROUPS = (
    "of n_group groups of equal size topk_group remain, those of the best group score: the sum of the two largest "
    "choices of a group where a bias is given, its largest choice where none is"
)
APART = "; it multiplies the first product's gate columns, the scale of the input within it"
FULL = (
    "; it multiplies the second product, the scale of the intermediate within it: codes are of silu(gate) * up as it is"
)


def options_of(row: Pipeline) -> tuple[OptionSpec, ...]:
    """The options of the layer of a row."""
    specs = [OptionSpec("first_expert", 0, None, "number of this rank's first expert (expert parallelism)")]
    if len(row.ways) > 1:
        names = tuple(way.name for way in row.ways)
        specs.append(OptionSpec("combine", None, (None, *names), _combining(row), declares=True))
    if row.on_input:
        doc = "weights, in its dtype, multiply the input instead, rounded to it; every weight of the sum is then 1"
        specs.append(OptionSpec("apply_router_weight_on_input", False, (False, True), doc))
    if row.routed:
        specs += [
            OptionSpec("routing_method", "DeepSeekV3", tuple(routing.METHODS), "RoutingMethodType by name, as above"),
            OptionSpec("top_k", 8, None, "experts of a token"),
            OptionSpec("n_group", 1, None, "groups of experts (DeepSeekV3)"),
            OptionSpec("topk_group", 1, None, "groups that remain (DeepSeekV3)"),
            OptionSpec("routed_scaling_factor", 1.0, None, "factor of all weights (DeepSeekV3)"),
            OptionSpec(
                "weight_dtype", None, (None, *KEPT), "dtype in which weights are kept; None: either", declares=True
            ),
        ]
    return tuple(specs)


def _combining(row: Pipeline) -> str:
    """What the option says of the ways that are admitted where none is named."""
    known = "how experts' outputs are added, as above; None admits any"
    return f"{known}, but RUNNING for 2 to 4 experts of a token alone" if Combine.RUNNING in row.ways else known


@dataclass(frozen=True)
class Route:
    """Local experts ``[T, k]``, their weights as they are kept, and bounds of those of a kernel; bool ``[T]`` where
    nothing is known. Given ones are exact."""

    ids: Tensor
    weights: Tensor
    span: Span | None = None
    lost: Tensor | None = None


@dataclass(frozen=True)
class Parts:
    """What a call multiplies. Of the input only the ``boxes`` of each expert are known where they are not None, and of
    the rows ``unknown`` nothing."""

    tokens: Tokens
    experts: Experts
    boxes: Callable[[int], Sequence[Box]] | None
    unknown: Tensor | None


class PipelineContract(Contract):
    """For each token and each of its local experts ``e``, as the steps below say:

        h    = first(a @ w13[e].T)             its gate and up columns; sums in float32
        act  = silu(gate) * up                 silu(x) = x / (1 + exp(-x)), rounded as ``activation`` says
        q, s = the recipe's codes and scales of act
        out  = the sum over its experts of weight * ((q, s) @ w2[e].T), rounded as ``combine`` says, bfloat16

    Ids of experts are global. Expert ``id - first_expert`` is the local one, where no map is given. With ``expert_map``
    it is ``expert_map[id]``. An id of -1 and the experts of other ranks add nothing, and a token without a local expert
    gives zeros. Given scales are positive
    and finite. Of tokens with NaN or infinity, or whose intermediate may overflow, nothing is claimed; the others of
    their experts are judged. Rows of experts may be in any order: no value depends on it."""

    shapes = {"out": "[T, H]"}
    row: ClassVar[Pipeline]
    section = "MoE"
    production = "moe_pipelines.moe_experts"
    golden_arches: ClassVar[tuple[str, ...]] = ("cpu", "sm90")

    def refuse(self, inputs: Inputs, options: Options) -> None:
        first = options["first_expert"]
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise OptionError(f"first_expert={first!r}; pass the number of this rank's first expert")
        e, r, h = inputs["w13"].shape
        self._check_scales(inputs, e, r, h)
        for name in ("a1_scale", "a2_scale", "fc2_act_scale"):
            if name in inputs and not 0 < float(inputs[name]) < float("inf"):
                raise InputError(f"{name} is {float(inputs[name])}; a static scale is positive and finite")
        if (known := inputs.get("expert_map")) is not None:
            if first:
                raise OptionError(f"first_expert={first} beside an expert_map; pass one of them")
            _within("expert_map", known, e)
            _within("topk_ids", inputs["topk_ids"], known.shape[0])
        if self.row.routed:
            method = options["routing_method"]
            if "bias" in inputs and method not in routing.BIASED:
                raise InputError(f"{method} takes no bias; {' and '.join(routing.BIASED)} do")
            routing.scores(inputs["logits"], self.router(options), inputs.get("bias"))
        if options.get("apply_router_weight_on_input") and inputs["topk_ids"].shape[1] != 1:
            raise InputError(f"weights on the input need one expert for each token, not {inputs['topk_ids'].shape[1]}")

    def _check_scales(self, inputs: Inputs, e: int, r: int, h: int) -> None:
        i = inputs["w2"].shape[2]
        if r != 2 * i:
            raise ShapeError(f"w13 has {r} rows for {i} columns of w2; it holds gate and up rows, [E, 2 I, H]")
        for name, rows, columns in (("w13_scale", r, h), ("w2_scale", h, i)):
            due = {
                Sharing.EXPERT: (e,),
                Sharing.CHANNEL: (e, rows),
                Sharing.GROUP: (e, rows, ceil_div(columns, 128)),
                Sharing.BLOCK: (e, ceil_div(rows, 128), ceil_div(columns, 128)),
            }[self.row.weights]
            if tuple(inputs[name].shape) != due:
                raise ShapeError(f"{name} has shape {list(inputs[name].shape)}; {self.name} takes {list(due)}")
        if self.row.weights is Sharing.BLOCK and self.row.up_first and i % 128:
            raise ShapeError(f"I={i}: a block of w13 would hold up and gate rows; pad I to a multiple of 128")
        for name in ("w13", "w2") if self.row.weights is Sharing.GROUP else ():
            if int(inputs[name].min()) < -8 or int(inputs[name].max()) > 7:
                raise InputError(f"{name} holds values outside -8..7; an int4 weight is one of these, in an int8 each")

    # --- truth ----------------------------------------------------------------------------------------------

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        """``[T, H]`` bfloat16: the first way to combine, weights of float32, of equal choices the first expert."""
        return self.kernel(Call(self, inputs, options).checked())["out"]

    def outputs(self, call: Call) -> dict[str, Out]:
        shape = call.inputs["a" if "a" in call.inputs else "x"].shape
        return {"out": Out(tuple(shape), (torch.bfloat16,))}

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        inputs = fold(call, faults, Stage.READ, dict(call.inputs))
        options = fold(call, faults, Stage.OPTIONS, dict(call.resolved))
        parts = self.parts(inputs, options, self.routes(inputs, options, self.kept(options)[0])[0])
        tokens = fold(call, faults, Stage.PRODUCT, parts.tokens)
        steps = fold(call, faults, Stage.RECIPE, steps_by(self.row, self.ways(call)[0]))
        out = rounded_to(layer(tokens, parts.experts, steps, partial(_changed, call, faults)), torch.bfloat16)
        outputs: dict[str, Tensor] = fold(call, faults, Stage.WRITE, {"out": out})
        return outputs

    def ways(self, call: Call) -> tuple[Combine, ...]:
        """The admitted ways to combine: the named one, or those of the row; moe_sum adds 2 to 4 slots."""
        named = call.resolved.get("combine")
        if named is not None:
            return (Combine[str(named)],)
        k = self.top_k(call)
        if Combine.RUNNING in self.row.ways:
            return (Combine.RUNNING, Combine.WEIGHTED) if 2 <= k <= 4 else (Combine.WEIGHTED,)
        return self.row.ways

    def top_k(self, call: Call) -> int:
        """Experts of a token."""
        return int(str(call.resolved["top_k"])) if self.row.routed else call.inputs["topk_ids"].shape[1]

    def kept(self, options: Options) -> tuple[torch.dtype, ...]:
        """Dtypes in which routing weights may be kept; float32 where they are given."""
        weight_dtype = options.get("weight_dtype", torch.float32)
        return (weight_dtype,) if isinstance(weight_dtype, torch.dtype) else KEPT

    # --- routing --------------------------------------------------------------------------------------------

    def router(self, options: Options) -> Router:
        """The router that options name."""
        method, top_k, factor = str(options["routing_method"]), options["top_k"], options["routed_scaling_factor"]
        groups = options["n_group"], options["topk_group"]
        for name in ("top_k", "n_group", "topk_group"):
            value = options[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name}={value!r} is not a positive integer")
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
            raise OptionError(f"routed_scaling_factor={factor!r}; pass a positive number")
        if method != "DeepSeekV3" and (groups != (1, 1) or factor != 1.0):
            raise OptionError(f"{method} has neither groups nor a scaling factor; they are DeepSeekV3's")
        if method == "Llama4" and top_k != 1:
            raise OptionError(f"top_k={top_k}; Llama4 weights the input, with one expert for each token")
        return Router(
            top_k=top_k, groups=groups[0], top_groups=groups[1], scaling=float(factor), **routing.METHODS[method]
        )

    def routes(self, inputs: Inputs, options: Options, weight_dtype: torch.dtype) -> list[Route]:
        """Every way to route, the reference's first."""
        if not self.row.routed:
            return [Route(self.local(inputs), inputs["topk_weights"])]
        router, bias = self.router(options), None
        if options["routing_method"] in routing.BIASED:
            bias = inputs.get("bias")
        finite = torch.isfinite(decode(inputs["logits"])).all(dim=1)
        logits = inputs["logits"].masked_fill(~finite[:, None], 0.0)
        scores = routing.scores(logits, router, bias)
        first = routing.route(logits, router, bias)[1]
        ways, lost = routing.alternatives(scores, router, first, biased=bias is not None)
        routed = []
        for ids in ways:
            span = routing.weight_span(scores, ids, router)
            low, exact, high = (
                rounded_to(w, weight_dtype).to(torch.float32)
                for w in (span.low, routing.weights_of(scores.score, ids, router), span.high)
            )
            if router.on_input:
                low = low.clamp(min=0.0)
            routed.append(Route(ids, exact, Span(decode(low), decode(high)), lost | ~finite))
        return routed

    def local(self, inputs: Inputs) -> Tensor:
        """Global ids, or local ones where a map says which: int64 ``[T, k]``."""
        ids, known = inputs["topk_ids"].to(torch.int64), inputs.get("expert_map")
        if known is None:
            return ids
        return torch.where(ids >= 0, known.to(torch.int64)[ids.clamp(min=0)], -1)

    # --- operands -------------------------------------------------------------------------------------------

    def parts(self, inputs: Inputs, options: Options, route: Route) -> Parts:
        """What a call multiplies, for one choice of experts."""
        row, experts = self.row, self.experts(inputs, options)
        on_input = bool(options.get("apply_router_weight_on_input"))
        if row.quantise is not None:
            x, static_scale = weighted_input(inputs["x"], route.weights, on_input=on_input), inputs.get("a1_scale")
            if row.multiplied:
                x = rounded_to(decode(x) * decode(inputs["prequant1"]), torch.bfloat16)
                static_scale = x.new_ones(1, dtype=torch.float32)
            quantised = quantize(x, row.quantise, scale=static_scale)
            scale = quantised.scale.reshape(1, 1) if quantised.scale.numel() == 1 else quantised.scale
            boxes, unknown = input_boxes(x, row.quantise, static_scale)
            if row.halved:
                scale = _halved(scale, x.shape[1])
                ends = [(_halved(b.scale_low, x.shape[1]), _halved(b.scale_high, x.shape[1])) for b in boxes]
                boxes = [replace(b, scale_low=e[0], scale_high=e[1]) for b, e in zip(boxes, ends, strict=True)]
            tokens = Tokens(quantised.codes, scale, route.ids, route.weights, on_input)
            return Parts(tokens, experts, lambda expert: boxes, unknown)
        codes = inputs["a"]
        scale = inputs.get("a_scale", codes.new_ones((1, 1), dtype=torch.float32))
        if row.halved:  # no schedule promotes in blocks of 64: an interval
            scale, values = _halved(scale, codes.shape[1]), decode(codes)
            lost = ~torch.isfinite(values).all(dim=1)
            known, units = values.masked_fill(lost[:, None], 0.0), decode(scale)
            box = Box(known, known, units, units, of_dtype(codes.dtype))
            return Parts(Tokens(codes, scale, route.ids, route.weights), experts, lambda expert: [box], lost)
        if not (row.apart and self.router(options).on_input):
            return Parts(Tokens(codes, scale, route.ids, route.weights), experts, None, None)
        # the routing weight multiplies the first product, as a scale of the token
        assert route.span is not None
        values = decode(codes)
        unknown = ~torch.isfinite(values).all(dim=1)
        known = values.masked_fill(unknown[:, None], 0.0)
        box = Box(known, known, route.span.low, route.span.high, of_dtype(codes.dtype))
        return Parts(
            Tokens(codes, route.weights, route.ids, route.weights, True), experts, lambda expert: [box], unknown
        )

    def experts(self, inputs: Inputs, options: Options) -> Experts:
        """The weights of a call, gate rows first, with the scales of whatever shares one."""
        row, first = self.row, options["first_expert"]
        w13, w2, scale = inputs["w13"], inputs["w2"], inputs["w13_scale"]
        if row.weights is Sharing.GROUP:  # -8..7 are values of E4M3
            w13, w2 = (w.to(torch.float32).to(torch.float8_e4m3fn) for w in (w13, w2))
        if row.apart:
            half = w2.shape[2]
            scale = torch.cat([s[:, None].expand(-1, half) for s in (scale, inputs["up_scale"])], dim=1)
        if row.up_first:
            w13, scale = (swap_w13_to_w31(t) if t.dim() == 3 else t for t in (w13, scale))
        alpha = (inputs["alpha1"], inputs["alpha2"]) if "alpha1" in inputs else None
        multiplier = inputs.get("prequant2", inputs.get("fc2_act_scale"))
        one = scale.new_ones(1) if row.multiplied or row.apart else None
        if row.halved:
            scales = _halved(scale, w13.shape[2]), _halved(inputs["w2_scale"], w2.shape[2])
            return Experts(w13, scales[0], w2, scales[1], first=first, width=HALF)
        return Experts(w13, scale, w2, inputs["w2_scale"], inputs.get("a2_scale", one), first, multiplier, alpha)

    # --- verdicts -------------------------------------------------------------------------------------------

    def numerics_of(self, call: Call) -> Mapping[str, tuple[str, ...]]:
        return self.row.numerics

    def why_not(self, call: Call, numerics: str) -> str | None:
        return no_boxes(self.name, numerics)

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        name, declared = self.arithmetics(call, numerics)[0], numerics is not None
        sets: list[Sets] = []
        activations = self.row.steps.activation, *self.row.activations
        for combine, weight_dtype, act in product(self.ways(call), self.kept(call.resolved), activations):
            others = bool(sets)
            make = lambda n, wider, c=combine, k=weight_dtype, a=act, o=others: PipelineSets(  # noqa: E731
                call, self, c, k, a, n, wider or o
            )
            sets += with_float32(make, name, declared=declared)
        return sets

    def identify(self, inputs: Inputs, output: Output, *, arch: str | None, **options: object) -> list[Match]:
        """The row's ways to combine by the fraction of elements that equal the reference with them, best first; with an
        arch, schedules of both products too, the row's own first, with every way (:mod:`.pipeline_bits`)."""
        call = Call(self, inputs, options).checked()
        out, matches = self.validate_output(call, output)["out"], []
        for combine in self.ways(call):
            due = self.reference(inputs, **{**options, **({"combine": combine.name} if len(self.row.ways) > 1 else {})})
            matches.append(Match(combine.name, share(same_bits(due, out)), out.numel()))
        if arch in arches() and matches[0].equal < 1:
            usual = [name for name in self.row.numerics.get(str(arch), ()) if name != IEEE32]
            names = dict.fromkeys((*usual, *(schedule.name for schedule in schedules(arch))))
            every = dict.fromkeys((*self.ways(call), *Combine))
            route = self.routes(inputs, call.resolved, self.kept(call.resolved)[0])[0]
            parts = self.parts(inputs, call.resolved, route)
            matches += named(
                parts.tokens, parts.experts, self.row.steps, out, [get_schedule(name) for name in names], list(every)
            )
        return sorted(matches, key=lambda match: -match.equal)


@dataclass(frozen=True)
class PipelineSets(Sets):
    """The right outputs of one way to combine, with weights kept in one dtype; each token by the choice of experts that
    admits its row."""

    call: Call
    contract: PipelineContract
    combine: Combine
    kept: torch.dtype
    activation: Activation
    numerics: str
    wider: bool

    def judge(self, outputs: Found) -> Verdict:
        out = outputs["out"]
        routes = self.contract.routes(self.call.inputs, self.call.resolved, self.kept)
        sets, basis, parts = self._admissible(routes[0])
        ids = routes[0].ids
        for route in routes[1:]:
            wrong = compare(out, sets).bad.any(dim=1)
            if not bool(wrong.any()):
                break
            other, _, _ = self._admissible(route)
            better = wrong & ~compare(out, other).bad.any(dim=1)
            sets, ids = taken(sets, other, better), torch.where(better[:, None], route.ids, ids)
        mistrust = why_mistrust(replace(parts.tokens, ids=ids), parts.experts, out)
        return verdict(compare(out, sets), basis=basis, mistrust=mistrust)

    def ranges(self, expected: Found) -> dict[str, Range] | None:
        """None where it is no single interval: a choice of experts or of the weight's dtype."""
        routes = self.contract.routes(self.call.inputs, self.call.resolved, self.kept)
        if len(routes) > 1 or len(self.contract.kept(self.call.resolved)) > 1:
            return None
        return {"out": ranged(self._admissible(routes[0])[0], torch.bfloat16)}

    def _admissible(self, route: Route) -> tuple[Admissible, str, Parts]:
        contract = self.contract
        steps = replace(steps_by(contract.row, self.combine), activation=self.activation)
        parts = contract.parts(self.call.inputs, self.call.resolved, route)
        acc = None if self.numerics == IEEE32 else of_schedule(get_schedule(self.numerics))
        unknown = route.lost
        if parts.unknown is not None:
            unknown = parts.unknown if unknown is None else unknown | parts.unknown
        cached = self.call.cached(
            f"shares by {self.numerics} of {route.ids.tolist()} {self.kept} {self.activation}",
            lambda: shares(
                parts.tokens, parts.experts, steps, numerics=self.numerics, acc=acc, boxes=parts.boxes, unknown=unknown
            ),
        )
        reached = outcome(parts.tokens, parts.experts, steps, cached, None if parts.tokens.on_input else route.span)
        open_ = reached.open if route.lost is None else reached.open | route.lost[:, None]
        due = nearest(layer(parts.tokens, parts.experts, steps), BF16)
        low, high = nearest(reached.span.low, BF16), nearest(reached.span.high, BF16)
        basis = f"{reached.basis}: {reached.flips} of {reached.intermediates} of the intermediate"
        if contract.row.routed:
            basis += f", routing weights in {str(self.kept).removeprefix('torch.')}"
        return Admissible(low, high, torch.nan_to_num(due, 0.0), open=open_), basis, parts


def _changed(call: Call, faults: tuple[Fault, ...], step: str, rows: Rows) -> Rows:
    changed: Rows = fold(call, faults, STAGES[step], rows)
    return changed


def _halved(scale: Tensor, columns: int) -> Tensor:
    """Scales ``[..., ceil(K / 128)]`` as one for each 64 columns."""
    return scale.repeat_interleave(2, dim=-1)[..., : ceil_div(columns, HALF)]


def _within(name: str, ids: Tensor, count: int) -> None:
    """Refuse ids from ``count`` on."""
    if int(ids.max()) >= count:
        raise InputError(f"{name} holds {int(ids.max())}; there are {count} experts, numbered from 0")


def described(row: Pipeline) -> str:
    """The steps of a row, one in a line."""
    steps, first = row.steps, row.steps.first or row.steps.store
    lines = {
        "input": "codes" if row.quantise is None else row.quantise.name,
        "w13": "up rows, then gate rows" if row.up_first else "gate rows, then up rows",
        "scales of the weights": row.weights,
        **({"weights": "-8..7, exact; scales multiply sums of 128 products"} if row.weights is Sharing.GROUP else {}),
        "first": f"rounded to {word(first)}" + (f", then quantised by {steps.hidden.name}" if steps.hidden else ""),
        "activation": " or ".join((steps.activation, *row.activations)),
        "multiplied before the quantiser": "by a given value, rounded" if row.multiplied else "no",
        **({"weight": "multiplies the activation, in float32, and not the output"} if steps.weighted else {}),
        "recipe": steps.recipe.name + (" of 64 columns" if row.halved else ""),
        **{f"combine {way.name}": _combined(way) for way in row.ways},
    }
    if row.routed:
        lines |= {"groups": GROUPS} | {f"routing_method {name}": _routed(name, row) for name in routing.METHODS}
    return "\n".join(["The steps:", "", *(f"    {name}: {parts}" for name, parts in lines.items())])


def _routed(name: str, row: Pipeline) -> str:
    """A method of routing, in words."""
    method = Router(top_k=1, **routing.METHODS[name])
    clauses = [
        f"scores {method.scoring} of the logits, choices " + ("the logits" if method.choose_by_logit else "the scores")
    ]
    clauses += ["plus the bias"] if name in routing.BIASED else []
    clauses += ["of groups"] if name == "DeepSeekV3" else []
    divided = "divided by their sum" + (f" + {method.epsilon:g}" if method.epsilon else "")
    clauses += [f"weights the chosen scores {divided}" if method.renormalise else "weights the chosen scores"]
    clauses += ["times routed_scaling_factor"] if name == "DeepSeekV3" else []
    if method.on_input:
        place = "the first product before the activation" if row.apart else "the second product, as of other methods"
        clauses += [f"one expert, whose weight multiplies {place}"]
    return ", ".join(clauses)


def _combined(way: Combine) -> str:
    ways = way.value
    rounded_ones = {"the second product": ways.stored, "the weight": ways.weight, "the weighted product": ways.term}
    named_ones = ", ".join(name for name, on in rounded_ones.items() if on)
    return f"{named_ones or 'nothing'} rounded to the stored dtype; added {ways.addition}"


def _registered(row: Pipeline) -> type[PipelineContract]:
    """The contract of one row."""
    contract: type[PipelineContract] = type(
        row.name,
        (PipelineContract,),
        {
            "__module__": __name__,
            "__doc__": described(row),
            "row": row,
            "name": row.name,
            "summary": row.summary,
            "source": row.source,
            "inputs": inputs_of(row),
            "options": options_of(row),
            "numerics": row.numerics,
            "dispatched": row.dispatched,
            "production": PipelineContract.production if row.dispatched else "",
        },
    )
    register(contract)
    return contract


CONTRACTS = {row.name: _registered(row) for row in PIPELINES}
"""Every contract of this file by name."""
