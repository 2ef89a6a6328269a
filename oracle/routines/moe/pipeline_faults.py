"""Faults of whole layers of experts: a step done wrongly, in the wrong place, or not at all.

A right layer has these stages (:mod:`oracle.routines.moe.pipelines`)::

    READ       its inputs                    OPTIONS    its options, the routing method among them
    PRODUCT    the tokens: codes, scales, experts and weights of the input, before rows are gathered
    RECIPE     the roundings between (:class:`oracle.truth.moe.Steps`)
    STORE      what an expert's first product is read as, float64       QUOTIENT   its activation
    CODES      its quantised intermediate and scale                     SUM        its weighted outputs
    WRITE      the output

An expert's stages get :class:`oracle.truth.moe.Rows`. Not covered: wrong quantiser formulas, which are faults of the
quantisers, and of one product, which are faults of the products.

Source: the threads that each declaration names (``seen``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from oracle.numbers.formats import decode
from oracle.numbers.quantize import quantize
from oracle.numbers.recipes import TORCH_STATIC
from oracle.routines.base import Call
from oracle.routines.fault import ARITHMETIC, CAST, INDEX, MOVEMENT, VALUE, Faults, WhyNot, both, entry, need, ones, way
from oracle.routines.ideas import fields, halves_swapped, itself, option, rolled, through_bf16
from oracle.routines.moe.faults import ON_INPUT, is_set
from oracle.routines.moe.pipelines import Pipeline, PipelineContract, Sharing
from oracle.routines.traits import Trait, of_class
from oracle.truth import routing
from oracle.truth.moe import Activation, Addition, Combine, Rows, Tokens
from oracle.verdict.sets import rounded_to

LAYERS = of_class(PipelineContract)
FAULTS = Faults(LAYERS)
fault = FAULTS.declare


def row_of(call: Call) -> Pipeline:
    """The pipeline of a call."""
    assert isinstance(call.contract, PipelineContract)
    return call.contract.row


def where(holds: Callable[[Pipeline], object], otherwise: str) -> WhyNot:
    """The pipeline is of a kind."""
    return need(lambda call: holds(row_of(call)), otherwise)


def of_rows(kind: str, holds: Callable[[Pipeline], object]) -> Trait:
    """Layers whose row is of a kind."""
    return Trait(kind, lambda contract: isinstance(contract, PipelineContract) and bool(holds(contract.row)))


ROUTED = of_rows("routes by itself", lambda row: row.routed)
MAPPED = of_rows("takes a map of experts", lambda row: row.mapped)
ON_ITS_INPUT = of_rows("may weight its input", lambda row: row.on_input)
MULTIPLIED = of_rows("multiplies its intermediate", lambda row: row.multiplied)
APART = of_rows("has a scale of the up rows", lambda row: row.apart)
BY_BLOCK = of_rows("has weights with a scale for each block", lambda row: row.weights is Sharing.BLOCK)
BY_GROUP = of_rows("has weights with a scale for each group", lambda row: row.weights is Sharing.GROUP)
BY_EXPERT = of_rows("has weights with a scale for each expert", lambda row: row.weights is Sharing.EXPERT)
SCALED = of_rows(
    "computes scales of its intermediate", lambda row: row.steps.recipe.formula is not TORCH_STATIC.formula
)
STATIC = of_rows("is given the scale of its intermediate", lambda row: row.static)
NARROWED = of_rows("rounds its first product", lambda row: row.steps.first is not None)
HIDDEN = of_rows("quantises its first product", lambda row: row.steps.hidden is not None)
SILU_ROUNDED = of_rows("rounds silu", lambda row: row.steps.activation is Activation.EACH)
WEIGHTED_FIRST = of_rows(
    "weights its second products in float32", lambda row: not any(w.value.stored for w in row.ways)
)
NARROW_SUM = of_rows(
    "adds slot by slot in the stored dtype", lambda row: all(way.value.addition is Addition.SLOTS for way in row.ways)
)
WIDE_SUM = of_rows("adds in float32", lambda row: all(way.value.addition is Addition.FLOAT32 for way in row.ways))


def _local(call: Call) -> tuple[Tensor, int]:
    """Local numbers of the experts ``[T, top_k]`` of each token, and how many experts the layer has."""
    contract = call.contract
    assert isinstance(contract, PipelineContract)
    ids = contract.routes(call.inputs, call.resolved, torch.float32)[0].ids
    return ids.to(torch.int64) - call.resolved["first_expert"], call.inputs["w13"].shape[0]


def _rows_of_experts(call: Call) -> Tensor:
    """Rows of every expert."""
    ids, count = _local(call)
    return torch.bincount(ids[(ids >= 0) & (ids < count)], minlength=count)


several: WhyNot = need(lambda call: int((_rows_of_experts(call) > 0).sum()) > 1, "one expert has tokens")
two_rows: WhyNot = need(lambda call: int(_rows_of_experts(call).max()) > 1, "every expert has one row")
two_slots: WhyNot = need(lambda call: call.contract.top_k(call) > 1, "one expert for each token")  # type: ignore[attr-defined]
absent: WhyNot = need(lambda call: bool((_local(call)[0] < 0).any()), "every expert is here or behind")
weighted: WhyNot = need(lambda call: not call.resolved.get(ON_INPUT), "the weight is on the input")
two_groups: WhyNot = need(lambda call: call.inputs["w2"].shape[2] > 128, "one group of 128")
wide: WhyNot = need(lambda call: call.inputs["w13"].shape[2] > 128, "one group of 128")


# --- weights and their scales -------------------------------------------------------------------------------


def _swapped(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The halves of gate and up rows exchanged, with their scales."""
    scale = inputs["w13_scale"]
    scales = {"w13_scale": halves_swapped(1)(scale)} if scale.dim() > 1 else {}
    return inputs | {"w13": halves_swapped(-2)(inputs["w13"]), **scales}


fault(
    "experts: routing weight on the output, not on the intermediate",
    ARITHMETIC,
    on=of_rows("weights its intermediate", lambda row: row.steps.weighted),
    seen="DeepGEMM mega layers beside layers that combine with weights",
    recipe=lambda steps: replace(steps, weighted=False),
    same_if="all weights are 1, or a float32 scale takes the weight up",
    admissible_if="weights are powers of two, or a float32 scale takes them up",
)
fault("experts: gate and up exchanged", MOVEMENT, seen="sglang PR 11081", read=_swapped)
fault(
    "experts: gate and up exchanged without their scales",
    MOVEMENT,
    seen="sglang PR 32430",
    read=entry("w13", halves_swapped(-2)),
    on=LAYERS - BY_EXPERT,
)
for which in ("w13", "w2"):
    fault(
        f"experts: {which} scales of the next expert",
        INDEX,
        seen="DeepGEMM PR 343",
        read=entry(f"{which}_scale", lambda scale: torch.roll(scale, -1, dims=0)),
        needs=several,
    )
fault(
    "experts: group offsets off by one row",
    MOVEMENT,
    seen="DeepGEMM PR 450",
    product=lambda call, tokens: replace(tokens, ids=_off_by_one(call, tokens)),
    needs=both(several, two_rows),
)
fault(
    "experts: weight scales of the first block for all blocks",
    INDEX,
    seen="sglang PR 20819",
    read=entry("w13_scale", lambda scale: scale[..., :1].expand_as(scale).contiguous()),
    on=BY_BLOCK | BY_GROUP,
    needs=wide,
)
fault(
    "experts: group scales of int4 weights dropped",
    VALUE,
    seen="sglang PR 31529",
    read=lambda i: i | {n: i[n].mean(dim=-1, keepdim=True).expand_as(i[n]).contiguous() for n in ("w13_scale",)},
    on=BY_GROUP,
    needs=wide,
)


def _off_by_one(call: Call, tokens: Tokens) -> Tensor:
    """The first row of every expert, in the order of tokens, goes with the expert before it."""
    local, count = _local(call)
    ids, first = tokens.ids.clone().to(torch.int64), call.resolved["first_expert"]
    busy = [e for e in range(count) if bool((local == e).any())]
    for before, expert in zip(busy, busy[1:], strict=False):
        token, slot = torch.nonzero(local == expert)[0].tolist()
        ids[token, slot] = before + first
    return ids


# --- experts of this rank -----------------------------------------------------------------------------------

fault(
    "experts: rank's first expert not subtracted",
    INDEX,
    seen="flashinfer 3547",
    options=option(first_expert=0),
    needs=is_set("first_expert", "this rank holds the first experts"),
)
fault(
    "experts: expert map off by one",
    INDEX,
    seen="flashinfer 3547",
    on=MAPPED,
    read=entry("expert_map", lambda known: torch.roll(known, 1)),
    needs=need(lambda call: "expert_map" in call.inputs, "there is no map"),
)
fault(
    "experts: absent experts taken for the first one",
    MOVEMENT,
    seen="DeepGEMM 34",
    needs=absent,
    on=LAYERS - ROUTED,
    product=lambda call, tokens: replace(
        tokens, ids=torch.where(_local(call)[0] < 0, call.resolved["first_expert"], tokens.ids)
    ),
)
fault(
    "experts: the first expert taken for an absent one",
    INDEX,
    seen="SGLang layers/moe/ep_moe/kernels.py post_reorder_triton_kernel, expert_id > 0",
    product=lambda call, tokens: replace(tokens, ids=tokens.ids.masked_fill(_local(call)[0] == 0, -1)),
    needs=need(lambda call: int(_rows_of_experts(call)[0]), "the first expert has no token"),
)


# --- the input ----------------------------------------------------------------------------------------------

many: WhyNot = need(lambda call: call.inputs["x" if "x" in call.inputs else "w2"].shape[0] > 0, "")
token_scales = of_rows(
    "has scales of tokens",
    lambda row: (
        row.weights is not Sharing.GROUP
        and not row.static
        and not row.apart
        and not (row.quantise is None and row.weights is Sharing.EXPERT)
    ),
)
tokens_differ: WhyNot = need(lambda call: call.contract.outputs(call)["out"].shape[0] > 1, "one token")  # type: ignore[index]
for words, change in (
    ("left behind when rows are sorted", lambda scale: torch.roll(scale, 1, dims=0)),
    ("of the first token for all", lambda scale: scale[:1].expand_as(scale).contiguous()),
):
    fault(
        f"experts: input scales {words}",
        INDEX,
        seen="sglang PR 31429",
        product=lambda tokens, c=change: replace(tokens, scale=c(tokens.scale)),
        on=token_scales,
        needs=tokens_differ,
    )
fault(
    "experts: input scales of the next group",
    INDEX,
    seen="mlc-ai/TIRx-kernels PR 5",
    on=BY_BLOCK,
    product=lambda tokens: replace(tokens, scale=torch.roll(tokens.scale, -1, dims=1)),
    needs=wide,
)
fault(
    "experts: rows of the previous token",
    MOVEMENT,
    seen="flashinfer 4396",
    product=lambda tokens: replace(
        tokens,
        codes=rolled(1)(tokens.codes),
        each=tokens.each and tuple((rolled(1)(codes), scale) for codes, scale in tokens.each),
    ),
    needs=tokens_differ,
)


# --- activation and requantisation --------------------------------------------------------------------------


def _unscaled(call: Call, rows: Rows) -> Rows:
    """The activation cast as it is, and read with the scale 1."""
    one = torch.ones(1, dtype=torch.float32, device=rows.value.device)
    quantised = quantize(rounded_to(decoded(rows), torch.float32), TORCH_STATIC, scale=one)
    assert rows.scale is not None
    return replace(rows, value=quantised.codes, scale=torch.ones_like(rows.scale))


def decoded(rows: Rows) -> Tensor:
    """Values of the quantised intermediate ``rows``, float64 ``[M, I]``: each code times its scale; NaN gives NaN.

    Its codes are float8 ``[M, I]``, its scale float32 ``[M, 1]`` or ``[M, ceil(I / 128)]``.
    """
    assert rows.scale is not None
    columns = rows.value.shape[1]
    width = columns if rows.scale.shape[1] == 1 else 128
    return decode(rows.value) * decode(rows.scale).repeat_interleave(width, dim=1)[:, :columns]


def scaling(change: Callable[[Tensor], Tensor]) -> Callable[[Rows], Rows]:
    """A CODES change of the scales of the intermediate alone."""

    def apply(rows: Rows) -> Rows:
        assert rows.scale is not None
        return replace(rows, scale=change(rows.scale))

    return apply


def _input_scale(call: Call, rows: Rows) -> Rows:
    """The scales of the first product's rows where those of the second's belong."""
    contract = call.contract
    assert isinstance(contract, PipelineContract) and rows.scale is not None
    route = contract.routes(call.inputs, call.resolved, torch.float32)[0]
    scale = contract.parts(call.inputs, call.resolved, route).tokens.scale
    own = scale if scale.shape[0] == 1 else scale[rows.token]
    blocks = rows.scale.shape[1]
    return replace(rows, scale=own[:, torch.arange(blocks, device=own.device) % own.shape[1]].contiguous())


own_scale = (SCALED | STATIC) - BY_GROUP  # the scale of any other intermediate is 1
fault(
    "{}",
    VALUE,
    on=own_scale,
    over=(
        way("experts: intermediate not requantised by a scale", _unscaled, seen="vllm PR 41021"),
        way("experts: intermediate's scale dropped", scaling(ones), seen="vllm-omni 5263"),
        way("experts: input's scale for the intermediate", _input_scale, seen="vllm PR 41021"),
    ),
    codes=itself,
)

fault(
    "experts: intermediate's scales never written: 0",
    VALUE,
    seen="flashinfer 5053",
    on=SCALED,
    codes=scaling(torch.zeros_like),
    same_if="every weighted sum is 0",
)
fault(
    "experts: intermediate's scales of the previous row",
    INDEX,
    seen="NVIDIA/cutlass 2087",
    on=SCALED,
    codes=scaling(lambda scale: torch.roll(scale, 1, dims=0)),
    needs=two_rows,
)
fault(
    "experts: one row's intermediate scales for all rows",
    INDEX,
    seen="NVIDIA/cutlass 2154",
    on=SCALED,
    codes=scaling(lambda scale: scale[:1].expand_as(scale).contiguous()),
    needs=two_rows,
)

fault(
    "experts: intermediate's multiplier dropped",
    VALUE,
    seen="TensorRT-LLM PR 14199",
    read=lambda i: i | {n: ones(i[n]) for n in ("fc2_act_scale", "prequant2") if n in i},
    on=MULTIPLIED,
)
fault(
    "experts: intermediate's multiplier inverted",
    VALUE,
    seen="vllm PR 36297",
    read=lambda i: i | {n: 1 / i[n] for n in ("fc2_act_scale", "prequant2") if n in i},
    on=MULTIPLIED,
)

fault(
    "experts: up rows by the gate's scale",
    VALUE,
    seen="vllm PR 52405",
    read=lambda i: i | {"up_scale": i["w13_scale"]},
    on=APART,
)
fault(
    "experts: gate multiplied without silu",
    ARITHMETIC,
    seen="sglang PR 39920",
    store=lambda rows: replace(rows, value=_no_silu(rows.value)),
)


def _no_silu(h: Tensor) -> Tensor:
    """Gates of 128, which silu leaves unchanged, and the product of gate and up in the other half."""
    gate, up = h.chunk(2, dim=1)
    far = 128.0
    return torch.cat([torch.full_like(gate, far), gate * up / far], dim=1)


def _interleaved(rows: Rows) -> Rows:
    """Gates in even columns, ups in odd ones."""
    return replace(rows, value=torch.cat([rows.value[:, ::2], rows.value[:, 1::2]], dim=1))


fault(
    "experts: gate and up taken from neighbouring columns",
    MOVEMENT,
    seen="vllm PR 22951, aiter 5760",
    store=_interleaved,
    same_if="the columns are equal",
)
fault(
    "experts: silu rounded where it is not",
    CAST,
    seen="flashinfer 5128",
    recipe=fields(activation=Activation.EACH),
    on=LAYERS - SILU_ROUNDED - HIDDEN - NARROWED,
    same_if="no product of this call rounds otherwise",
    admissible_if="the rounding moves no code beyond its neighbours",
)
fault(
    "experts: rounding of silu left out",
    CAST,
    seen="TensorRT-LLM PR 14464",
    recipe=fields(activation=Activation.PRODUCT),
    on=SILU_ROUNDED,
    same_if="no product of this call rounds otherwise",
    admissible_if="the rounding moves no code beyond its neighbours",
)
fault(
    "experts: first product kept in float32",
    CAST,
    seen="TensorRT-LLM PR 14464",
    recipe=fields(first=torch.float32),
    on=LAYERS - NARROWED,
    admissible_if="the rounding moves no code beyond its neighbours",
)
fault(
    "experts: first product rounded to bfloat16",
    CAST,
    seen="no public thread: the first product stored between two kernels",
    recipe=fields(first=torch.bfloat16),
    on=NARROWED - HIDDEN,
    admissible_if="the rounding moves no code beyond its neighbours",
)
fault(
    "experts: first product not quantised",
    CAST,
    seen="TensorRT-LLM PR 14464",
    recipe=fields(hidden=None),
    on=HIDDEN,
)


# --- weights and sums ---------------------------------------------------------------------------------------

unit_weights = "every weight is 1"
fault(
    "experts: routing weight dropped",
    VALUE,
    seen="TensorRT-LLM PR 14199",
    product=lambda tokens: replace(tokens, weights=ones(tokens.weights)),
    needs=weighted,
    same_if=unit_weights,
)
fault(
    "experts: routing weight applied twice",
    VALUE,
    seen="vllm PR 43694",
    product=lambda tokens: replace(tokens, weights=tokens.weights * tokens.weights),
    needs=weighted,
    same_if=unit_weights,
)
fault(
    "experts: routing weight before the activation",
    ARITHMETIC,
    seen="vllm PR 16744",
    needs=weighted,
    same_if=unit_weights,
    store=lambda call, rows: replace(rows, value=rows.value * _weight(call, rows)),
    product=lambda tokens: replace(tokens, weights=ones(tokens.weights)),
)
fault(
    "experts: routing weights rounded to bfloat16",
    CAST,
    seen="sglang 39351",
    product=lambda tokens: replace(tokens, weights=through_bf16(tokens.weights)),
    needs=both(weighted, need(lambda call: bool((_bf16_error(call) != 0).any()), "every weight is a bfloat16 value")),
    admissible_if="a code that may flip moves a sum as far",
)
fault(
    "experts: weights of the next slot",
    INDEX,
    seen="flashinfer PR 4639",
    needs=both(two_slots, weighted),
    product=lambda tokens: replace(tokens, weights=torch.roll(tokens.weights, 1, dims=1)),
    same_if="all weights of a token are equal",
)
fault(
    "experts: weights of the previous token",
    INDEX,
    seen="flashinfer PR 4639",
    needs=both(tokens_differ, weighted),
    product=lambda tokens: replace(tokens, weights=torch.roll(tokens.weights, 1, dims=0)),
)

fault(
    "experts: weight of a token's first expert for all of its experts",
    INDEX,
    seen="vllm-xpu-kernels PR 66",
    needs=both(two_slots, weighted),
    product=lambda tokens: replace(tokens, weights=tokens.weights[:, :1].expand_as(tokens.weights).contiguous()),
    same_if="all weights of a token are equal",
)
fault(
    "experts: weight on the output instead of the input",
    ARITHMETIC,
    seen="flashinfer PR 4639",
    on=ON_ITS_INPUT,
    options=option(**{ON_INPUT: False}),
    needs=is_set(ON_INPUT, "the weight is on the output"),
)
fault(
    "experts: weight on the input and on the output",
    ARITHMETIC,
    seen="no public thread: the choice is not passed on to the second product",
    on=ON_ITS_INPUT,
    product=lambda tokens: replace(tokens, on_input=False),
    needs=is_set(ON_INPUT, "the weight is on the output"),
    same_if=unit_weights,
)
fault(
    "{}",
    MOVEMENT,
    over=(
        way(
            "experts: last rows of the last expert lost",
            lambda call, rows: replace(rows, value=_tail(call, rows, 0.0)),
            seen="TransformerEngine PR 3171",
        ),
        way(
            "experts: last rows of the last expert stale",
            lambda call, rows: replace(rows, value=_tail(call, rows, None)),
            seen="aprender 2765",
            needs=two_rows,
            same_if="the last expert has one row",
        ),
        way(
            "experts: one slot of a token left out",
            lambda rows: replace(rows, value=rows.value * (rows.slot != 1)[:, None]),
            seen="vllm 52997",
            needs=both(two_slots, several),
        ),
        way(
            "experts: rows not put back in their order",
            lambda rows: replace(rows, value=torch.roll(rows.value, 1, dims=0)),
            seen="flashinfer PR 2716",
            needs=two_rows,
        ),
    ),
    sum=itself,
)

fault(
    "experts: sum in bfloat16",
    ARITHMETIC,
    seen="vLLM issue 15045",
    needs=two_slots,
    recipe=fields(combine=Combine.REORDERED),
    on=WIDE_SUM,
    same_if="no sum of this call rounds otherwise",
    admissible_if="a code that may flip moves a sum as far",
)
fault(
    "experts: sum kept in float32",
    ARITHMETIC,
    seen="no public thread: a reduction that keeps its sums in registers",
    needs=two_slots,
    recipe=fields(combine=Combine.SCALED),
    on=NARROW_SUM,
    same_if="no sum of this call rounds otherwise",
    admissible_if="a code that may flip moves a sum as far",
)
fault(
    "experts: second product rounded before its routing weight",
    ARITHMETIC,
    seen="vllm PR 31931",
    on=WEIGHTED_FIRST,
    recipe=fields(combine=Combine.STORED),
    needs=weighted,
    same_if="no product of this call rounds otherwise",
    admissible_if="a code that may flip moves a sum as far",
)
fault(
    "experts: output of the last call",
    MOVEMENT,
    seen="flashinfer PR 2716",
    needs=tokens_differ,
    write=entry("out", lambda out: torch.cat([out[:-1], out[:1]])),
)
fault(
    "experts: outputs of the second half of the tokens those of the first",
    MOVEMENT,
    seen="vllm 47281, PR 50220: row times stride beyond 32 bits in the sum over choices",
    needs=tokens_differ,
    write=entry("out", lambda out: out[torch.arange(len(out), device=out.device) % -(-len(out) // 2)]),
    same_if="the outputs are equal",
)
fault(
    "experts: NaN of one token reaches the others of its expert",
    MOVEMENT,
    seen="flashinfer PR 3650",
    write=entry("out", lambda call, out: out.masked_fill(_beside_non_finite(call)[:, None], torch.nan)),
    needs=need(
        lambda call: bool((_beside_non_finite(call) & ~_non_finite(call)).any()), "no token shares an expert with a NaN"
    ),
)


def _non_finite(call: Call) -> Tensor:
    """Tokens with NaN or infinity."""
    rows = call.inputs["x" if "x" in call.inputs else "a"]
    if rows.dtype is torch.uint8:  # codes of E2M1, which has neither
        return torch.zeros(rows.shape[0], dtype=torch.bool, device=rows.device)
    return ~torch.isfinite(decode(rows)).all(dim=1)


def _beside_non_finite(call: Call) -> Tensor:
    """Tokens that share an expert with a token of NaN or infinity."""
    local, count = _local(call)
    here = (local >= 0) & (local < count)
    theirs = local[_non_finite(call)][here[_non_finite(call)]]
    return (torch.isin(local, theirs) & here).any(dim=1)


def _bf16_error(call: Call) -> Tensor:
    """By how much the weights change that are given, or follow from logits, where they are rounded to bfloat16."""
    contract = call.contract
    assert isinstance(contract, PipelineContract)
    weights = contract.routes(call.inputs, call.resolved, contract.kept(call.resolved)[0])[0].weights.to(torch.float32)
    return through_bf16(weights) - weights


def _weight(call: Call, rows: Rows) -> Tensor:
    contract = call.contract
    assert isinstance(contract, PipelineContract)
    weights = contract.routes(call.inputs, call.resolved, contract.kept(call.resolved)[0])[0].weights
    return decode(weights)[rows.token, rows.slot, None]


def _tail(call: Call, rows: Rows, fill: float | None) -> Tensor:
    """The outputs of the last row of the last busy expert: ``fill``, or what the row before it has."""
    if rows.expert != int(torch.nonzero(_rows_of_experts(call))[-1]):
        return rows.value
    value = rows.value.clone()
    value[-1] = value[-2 if value.shape[0] > 1 else -1] if fill is None else fill
    return value


# --- routing inside the layer -------------------------------------------------------------------------------


def method(*names: str) -> WhyNot:
    """The routing method is one of these."""
    return need(lambda call: call.resolved["routing_method"] in names, "the routing method is another")


for words, seen, names, other in (
    ("not renormalised", "flashinfer PR 4639", ("SigmoidRenorm", "MiniMax2"), "Sigmoid"),
    ("not renormalised after softmax", "flashinfer PR 4639", ("RenormalizeNaive", "Renormalize"), "Default"),
    ("renormalised", "flashinfer PR 4639", ("Default",), "RenormalizeNaive"),
    ("by softmax for sigmoid", "sglang PR 39920", ("Sigmoid", "TopKSigmoid", "Llama4"), "Default"),
    ("by sigmoid for softmax", "sglang PR 39920", ("Default",), "Sigmoid"),
    ("without sigmoid", "sglang PR 39920", ("TopKSigmoid",), "TopK"),
    ("by softmax for the logit itself", "flashinfer PR 1723", ("TopK",), "Renormalize"),
):
    fault(
        f"experts: routing weights {words}",
        ARITHMETIC,
        seen=seen,
        on=ROUTED,
        options=option(routing_method=other, n_group=1, topk_group=1, routed_scaling_factor=1.0),
        needs=both(method(*names), two_slots) if "renorm" in words else method(*names),
    )
fault(
    "experts: routed scaling factor lost",
    VALUE,
    seen="TensorRT-LLM PR 14199",
    on=ROUTED,
    options=option(routed_scaling_factor=1.0),
    needs=need(lambda call: call.resolved["routed_scaling_factor"] != 1.0, "the factor is 1"),
)
fault(
    "experts: wrong number of expert groups",
    ARITHMETIC,
    seen="flashinfer PR 1723",
    on=ROUTED,
    options=option(n_group=1, topk_group=1),
    needs=need(lambda call: call.resolved["n_group"] != 1, "no groups"),
    same_if="the best experts lie in the groups that remain",
)
fault(
    "experts: bias of the choice ignored",
    ARITHMETIC,
    seen="flashinfer PR 4639",
    on=ROUTED,
    read=lambda inputs: {name: value for name, value in inputs.items() if name != "bias"},
    needs=need(lambda call: "bias" in call.inputs, "there is no bias"),
    same_if="the bias changes no choice",
)
fault(
    "experts: routed scaling factor applied twice",
    VALUE,
    seen="kvcache-ai/sglang PR 86",
    on=ROUTED,
    options=lambda options: options | {"routed_scaling_factor": options["routed_scaling_factor"] ** 2},
    needs=need(lambda call: call.resolved["routed_scaling_factor"] != 1.0, "the factor is 1"),
)
fault(
    "experts: those behind the largest power of two never chosen",
    MOVEMENT,
    seen="aiter PR 2359",
    on=ROUTED,
    read=lambda inputs: inputs | {name: _up_to_a_power(inputs[name]) for name in ("logits", "bias") if name in inputs},
    needs=need(
        lambda call: (e := call.inputs["logits"].shape[1]) & (e - 1) and _power(e) >= int(call.resolved["top_k"]),
        "as many experts as a power of two, or too few before it",
    ),
    same_if="none of them is chosen",
)


def _power(count: int) -> int:
    return 1 << (count.bit_length() - 1)


def _up_to_a_power(x: Tensor) -> Tensor:
    """Logits or biases ``[.., E]`` that are out of reach behind the largest power of two."""
    behind = torch.arange(x.shape[-1], device=x.device) >= _power(x.shape[-1])
    return x.masked_fill(behind, -(2.0**20))


biased = both(method(*routing.BIASED), need(lambda call: "bias" in call.inputs, "there is no bias"))


@fault(
    "experts: bias of the choice added to the weights too",
    ARITHMETIC,
    seen="vllm PR 12002, transformers PR 39581",
    on=ROUTED,
    needs=biased,
)
def product_of_biased_weights(call: Call, tokens: Tokens) -> Tokens:
    """The tokens with the weights that choices give."""
    contract = call.contract
    assert isinstance(contract, PipelineContract)
    router = contract.router(call.resolved)
    choice = routing.scores(call.inputs["logits"], router, call.inputs["bias"]).choice
    weights = routing.weights_of(choice, tokens.ids, router).to(tokens.weights.dtype)
    return replace(tokens, weights=weights)
