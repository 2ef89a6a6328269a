"""Contracts of mixture-of-experts layers in FP8: routing, experts from quantised input to combined output.

``moe_routing``  which experts a token goes to, and with which weights
``moe_fp8``      quantise, w13, silu-and-mul, requantise, w2, combine; judged by intervals that hold whatever a flipped
                 code of the intermediate may do (:mod:`oracle.routines.moe.moe_ranges`)
``apply_fi_trtllm_fp8_per_tensor_moe``: TensorRT-LLM's per-tensor layer with Llama-4 routing (:class:`TensorMoe`)

A layer is judged from its published quantised input (``a`` and ``a_scale``) or from its high-precision one (``x``,
quantised by the layer with the same recipe, or with ``a_scale`` when the recipe takes a given scale). ``numerics``
names the arithmetic of both products: a schedule or ``ieee32.any``. Not covered: bits (a layer rounds in too many
places for one prediction), shared experts, communication.

NaN and infinity in a token: nothing is claimed of its output.
Sources: vLLM fused_moe; FlashInfer trtllm_fused_moe; :mod:`oracle.truth.moe` and :mod:`oracle.truth.routing`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from oracle.bounds.accumulator import of_schedule
from oracle.bounds.code_boxes import code_boxes
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.bounds.product import U
from oracle.errors import InputError, NumericsError, OptionError, ShapeError, among, counted
from oracle.numbers import recipe_table
from oracle.numbers.formats import BF16, E4M3FN, FP32, decode, of_dtype, same_bits, share
from oracle.numbers.quantize import WIDE, quantize
from oracle.numbers.recipes import TORCH_STATIC, ScaleFormula
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
    positive,
    register,
)
from oracle.routines.moe.moe_ranges import act_span, boxed_span, input_boxes, outcome, shares
from oracle.routines.products.contract import OUT_DTYPES
from oracle.routines.traits import Kind
from oracle.tensorcore.identify import Match
from oracle.tensorcore.schedules import get as get_schedule
from oracle.tensorcore.schedules import is_class
from oracle.truth import routing
from oracle.truth.layout import ceil_div
from oracle.truth.moe import Activation, Combine, Experts, Steps, Tokens, layer, nearest, weighted_input
from oracle.truth.routing import Span
from oracle.verdict.compare import Admissible, Comparison, Verdict, Worst, compare, verdict
from oracle.verdict.sets import (
    Elements,
    Found,
    Property,
    Range,
    Sets,
    all_equal,
    mostly_zero,
    ranged,
    rounded_to,
    with_float32,
    worst_of,
)

BLOCK_NUMERICS = {"sm90": ("sm90.promote128",), "sm89": ("sm89.promote128",), "cpu": (IEEE32,)}
TENSOR_NUMERICS = {"sm90": ("sm90.chain",), "sm89": ("sm89.chain",), "cpu": (IEEE32,)}
WAYS = (Combine.STORED, Combine.WEIGHTED, Combine.FLOAT32, Combine.RUNNING)
"""The combinations that the layers of moe_fp8 use."""
QUANTISERS = tuple(
    recipe.name
    for recipe in recipe_table.of_element(E4M3FN)
    if recipe.fault is None
    and not recipe.scaling.global_scale
    and (recipe.formula is ScaleFormula.GIVEN or (recipe.block.rows, recipe.block.columns) == (1, 128))
)
"""What may quantise inside of a layer of moe_fp8: recipes of E4M3 in groups of 128, and those with a given scale."""
ROUTERS = ("llama4", "deepseek_v3", "softmax")


class Routing(Contract):
    """Experts of each token and their weights, in any order, weights beside their experts.

    Experts whose choices lie closer than a device's error may come in either order, and so may equal ones. Ids are
    int32 or int64 from 0 to E - 1, all different.
    """

    section = "MoE"
    returns = ("topk_weights", "topk_ids")

    def weights_dtypes(self, inputs: Inputs) -> tuple[torch.dtype, ...]:
        """Dtypes that a kernel may give weights in, the reference's first."""
        return F32

    @abstractmethod
    def forms(self, inputs: Inputs, options: Options) -> list[routing.Router]:
        """The routers of which one must explain a whole output; the first is the reference's."""

    def bias(self, inputs: Inputs, options: Options) -> Tensor | None:
        """What is added to the choices, ``[E]`` of the dtype of the input; None without one. NaN stays NaN."""
        return inputs.get("bias")

    def factor(self, inputs: Inputs, ids: Tensor) -> Tensor | None:
        """What multiplies the weights of the experts ``ids`` ``[T, k]``, float64 of their shape; None: nothing."""
        return None

    def refuse(self, inputs: Inputs, options: Options) -> None:
        routing.check(self.forms(inputs, options)[0], self.extents(inputs)["E"])

    def reference(self, inputs: Inputs, **options: object) -> dict[str, Tensor]:
        resolved = self.check(inputs, options)
        weights, ids = routing.route(inputs["logits"], self.forms(inputs, resolved)[0], self.bias(inputs, resolved))
        if (factor := self.factor(inputs, ids)) is not None:
            weights = weights * factor
        ids = torch.where(_padding(inputs), -1, ids)
        return {"topk_weights": rounded_to(weights, self.weights_dtypes(inputs)[0]), "topk_ids": ids.to(torch.int32)}

    def outputs(self, call: Call) -> dict[str, Out]:
        shape = (call.inputs["logits"].shape[0], positive(call.resolved, "top_k"))
        return {"topk_weights": Out(shape, self.weights_dtypes(call.inputs)), "topk_ids": Out(shape, INTEGERS)}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [Property(partial(self._decide, call, form)) for form in self.forms(call.inputs, call.resolved)]

    def _decide(self, call: Call, router: routing.Router, outputs: Found) -> Verdict:
        logits, bias = call.inputs["logits"], self.bias(call.inputs, call.resolved)
        padding, given = _padding(call.inputs), outputs["topk_ids"].to(torch.int64)
        all_scores = routing.scores(logits, router, bias)
        bad = routing.misrouted(given, all_scores, router, biased=bias is not None)
        bad = torch.where(padding, given != -1, bad[:, None]).any(dim=1)
        ids = given.clamp(0, logits.shape[1] - 1)
        span, dtype = routing.weight_span(all_scores, ids, router), outputs["topk_weights"].dtype
        due, ends = routing.weights_of(all_scores.score, ids, router), [span.low, span.high]
        if (factor := self.factor(call.inputs, ids)) is not None:
            corners = torch.stack([end * factor for end in ends])
            width = 2 * U * corners.abs().amax(dim=0) + routing.FLUSH
            due, ends = due * factor, [corners.amin(dim=0) - width, corners.amax(dim=0) + width]
        ends = [decode(rounded_to(end, dtype)) if dtype != torch.float32 else end for end in ends]
        expected = decode(rounded_to(due, dtype))
        lost = (all_scores.score_span.low.gather(1, ids) <= 0).all(dim=1, keepdim=True) & router.renormalise
        lost = lost & (router.epsilon == 0 and not router.nan_is_zero)
        known = (~bad[:, None] & ~padding).expand(ids.shape)
        sets = Admissible(ends[0], ends[1], expected, known, open=lost.expand(ids.shape))
        weights = verdict(
            compare(outputs["topk_weights"], sets, output="topk_weights"), basis="float32 weights of those experts"
        )
        right = routing.best_experts(all_scores.choice, router, biased=bias is not None)
        return worst_of([_judge_ids(bad, outputs["topk_ids"], torch.where(padding, -1, right)), weights])


@register
class MoeRouting(Routing):
    """Of each row of logits ``l`` the ``top_k`` experts:

        llama4        choice l; weight sigmoid(l)
        deepseek_v3   s = sigmoid(l), choice s + bias; weight s
        softmax       s = softmax(l), choice s (+ bias); weight s

    With ``num_expert_group`` groups of equal size ``topk_group`` of them remain: those of the best group score, which
    is the sum of the two largest choices of a group where a bias is given, and its largest choice where none is. The
    ``top_k`` largest choices among them are taken. With llama4 a bias is added to no choice. With ``renormalize``
    weights are divided by their sum (llama4 too); nothing is claimed of them where every score of the chosen experts is
    below 2^-126 and may be 0. Then they are multiplied by ``routed_scaling_factor``. Scores may err as ``ex2.approx``
    and ``rcp.approx`` do. A row with a NaN logit may choose any experts, whose weights are those of the formulas; so
    may one whose softmax is NaN, of a logit of +inf or of -inf alone. Else an infinite logit has the score 0 or 1.
    """

    name = "moe_routing"
    production = "moe_layer.route_deepseek_v3"
    summary = "top-k experts and their weights: Llama-4, DeepSeek-V3 (grouped, biased), softmax"
    source = "vLLM fused_moe routers; DeepSeek-V3 inference/model.py"
    inputs = (
        TensorSpec("logits", Kind.LOGITS, WIDE, ("T", "E"), "router logits"),
        TensorSpec("bias", Kind.BIAS, F32, ("E",), "correction of the choice, not of the weight", optional=True),
    )
    options = (
        OptionSpec("router", "deepseek_v3", ROUTERS, "routing method"),
        OptionSpec("top_k", 8, None, "experts of a token"),
        OptionSpec("num_expert_group", 1, None, "groups of experts"),
        OptionSpec("topk_group", 1, None, "groups that remain"),
        OptionSpec("renormalize", False, (False, True), "weights of a token sum to 1, before the scaling factor"),
        OptionSpec("routed_scaling_factor", 1.0, None, "factor of all weights"),
    )

    def forms(self, inputs: Inputs, options: Options) -> list[routing.Router]:
        return [router_of(options)]


def _padding(inputs: Inputs) -> Tensor:
    """Bool ``[T, 1]``: rows of padding, which have no experts."""
    rows = inputs.get("is_padding")
    return torch.zeros_like(inputs["logits"][:, :1], dtype=torch.bool) if rows is None else rows[:, None] != 0


@register
class MoeFp8(Contract):
    """For each token and each of its experts ``e``, with ``store`` a rounding to bfloat16, sums in float32:

        h    = store(a @ w13[e].T)                 gate: the first I columns, up: the others
        act  = silu(min(gate, limit)) * clamp(up, -limit, limit)      silu(x) = x / (1 + exp(-x))
        q, s = the recipe's codes and scales of act
        out  = the sum over the experts of weight * store((q, s) @ w2[e].T), by ``combine``

    ``activation_rounding``: EACH rounds silu and the product to bfloat16, PRODUCT the product alone, NONE neither
    (float32). ``combine``: STORED as above; WEIGHTED rounds the weighted product instead, FLOAT32 nothing, RUNNING as
    WEIGHTED and every sum, slot by slot, to bfloat16. Other sums over experts are float32 in any order, rounded once to
    the output's dtype. A store is to bfloat16, whatever the output's dtype is.

    Exactly one of ``a`` and ``x`` is given; ``x`` is quantised by the same recipe, or under ``a_scale`` with
    ``a2_scale``. ``apply_router_weight_on_input`` multiplies ``x`` by the weight, both in its dtype, before it is
    quantised (one expert for each token), and no weight multiplies the output; with codes given, as ``a``, the weight
    is used nowhere. Expert ``topk_ids - first_expert`` is the local one; -1 and those of other ranks add nothing, and a
    token without a local expert gives zeros. Of tokens with NaN or infinity, or whose intermediate may overflow,
    nothing is claimed.
    """

    name = "moe_fp8"
    shapes = {"out": "[T, H]"}
    gpu = True
    production = "moe_layer.moe_block_scaled"
    section = "MoE"
    summary = "the experts of a layer: w13, silu and mul, requantised intermediate, w2, weighted sum"
    source = "vLLM fused_moe experts (DeepGEMM, Triton, CUTLASS); TensorRT-LLM fused MoE"
    inputs = (
        TensorSpec("a", Kind.CODES, E4M3, ("T", "H"), "quantised input", optional=True),
        TensorSpec(
            "a_scale",
            Kind.SCALES,
            F32,
            None,
            "[1], [T, 1] or [T, ceil(H/128)]; with x the given scale [1]",
            optional=True,
        ),
        TensorSpec("x", Kind.VALUES, WIDE, ("T", "H"), "high-precision input, quantised by the layer", optional=True),
        TensorSpec("w13", Kind.CODES, E4M3, ("E", "R", "H"), "gate rows, then up rows; R = 2 I"),
        TensorSpec("w13_scale", Kind.SCALES, F32, None, "[E] or [E, ceil(2 I/128), ceil(H/128)]"),
        TensorSpec("w2", Kind.CODES, E4M3, ("E", "H", "I"), "down projection"),
        TensorSpec("w2_scale", Kind.SCALES, F32, None, "[E] or [E, ceil(H/128), ceil(I/128)]"),
        TensorSpec("topk_ids", Kind.IDS, INTEGERS, ("T", "k"), "global experts of each token, -1 for none"),
        TensorSpec("topk_weights", Kind.WEIGHTS, F32, ("T", "k"), "their weights"),
        TensorSpec("a2_scale", Kind.SCALES, F32, None, "one value: given scale of the intermediate", optional=True),
    )
    options = (
        OptionSpec("first_expert", 0, None, "number of this rank's first expert (expert parallelism)"),
        OptionSpec(
            "recipe",
            None,
            None,
            "name of the quantiser of x and of act: with a2_scale one with a given scale (None: torch_static), else "
            "one of groups of 128 (None: vllm_group)",
            names=QUANTISERS,
        ),
        OptionSpec(
            "activation_rounding", "EACH", tuple(a.name for a in Activation), "where silu * up is rounded, as above"
        ),
        OptionSpec("limit", None, None, "clamp of gate (above) and up (both sides)"),
        OptionSpec(
            "apply_router_weight_on_input", False, (False, True), "weights, in its dtype, multiply the input instead"
        ),
        OptionSpec(
            "out_dtype",
            None,
            (None, *OUT_DTYPES),
            "dtype of the output; None: any of those of the output below is right",
        ),
        OptionSpec(
            "combine",
            None,
            (None, *(c.name for c in WAYS)),
            "how the experts' outputs are weighted, stored and added; None admits any one",
            declares=True,
        ),
    )
    numerics = BLOCK_NUMERICS
    golden_arches = ("cpu", "sm90")

    def refuse(self, inputs: Inputs, options: Options) -> None:
        """Also: one input and the scales that belong to it; weights on an ``x`` only with one expert for each token."""
        if ("a" in inputs) == ("x" in inputs):
            raise InputError(
                "moe_fp8 takes the quantised input (a, a_scale) or the high-precision one (x): one of them"
            )
        if "a" in inputs and "a_scale" not in inputs:
            raise InputError("moe_fp8: a comes with a_scale")
        if "x" in inputs and "a_scale" in inputs and inputs["a_scale"].numel() != 1:
            raise ShapeError(f"with x, a_scale is its one given scale [1], not {list(inputs['a_scale'].shape)}")
        if "x" in inputs and ("a_scale" in inputs) != ("a2_scale" in inputs):
            raise InputError("moe_fp8: with x, a_scale and a2_scale are given both or neither")
        top_k = inputs["topk_weights"].shape[1]
        if "x" in inputs and options["apply_router_weight_on_input"] and top_k != 1:
            raise InputError(f"weights on the input need one expert for each token, not {top_k}")
        for name in ("a2_scale", *(("a_scale",) if "x" in inputs else ())):
            if name in inputs:
                _static(name, inputs[name])
        if "a" in inputs and inputs["a_scale"].numel() != 1:
            (t, h), shape = inputs["a"].shape, tuple(inputs["a_scale"].shape)
            if shape not in ((t, 1), (t, ceil_div(h, 128))):
                raise ShapeError(
                    f"a_scale has shape {list(shape)}; pass one value, [{t}, 1] or [{t}, {ceil_div(h, 128)}]"
                )
        steps_of(inputs, options)
        _experts(inputs, options)

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        """Float64 ``[T, H]``, STORED where none is declared: the declared roundings inside the layer, none of the last
        sum (or rounded to ``out_dtype``)."""
        resolved = self.check(inputs, options)
        call = _call(inputs, resolved)
        out = layer(call.tokens, call.experts, call.steps)
        dtype = resolved["out_dtype"]
        return out if dtype is None else rounded_to(out, dtype)

    def outputs(self, call: Call) -> dict[str, Out]:
        dtype = call.resolved["out_dtype"]
        tokens = call.inputs["a" if "a" in call.inputs else "x"]
        return {"out": Out(tuple(tokens.shape), (dtype,) if isinstance(dtype, torch.dtype) else OUT_DTYPES)}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        """For whatever a flipped code of the intermediate may do."""
        layer = call.cached("layer", lambda: _call(call.inputs, call.resolved))
        declared = call.resolved["combine"] is not None
        ways = [layer.steps.combine] if declared else WAYS
        mistrust = partial(why_mistrust, layer.tokens, layer.experts)

        def sets(combine: Combine, name: str, wider: bool) -> Sets:
            def make() -> tuple[dict[str, Admissible], str]:
                made_once = partial(_admissible, call, layer, combine, name)
                admitted, basis = call.cached(f"admissible by {combine.name} and {name}", made_once)
                return {"out": admitted}, basis

            other = wider or combine is not ways[0]
            return Elements(make, name, other, mistrust=lambda outputs: mistrust(outputs["out"]))

        name = self.arithmetics(call, numerics)[0]
        by_way = [with_float32(partial(sets, c), name, declared=numerics is not None) for c in ways]
        return [each for alternatives in by_way for each in alternatives]

    def identify(self, inputs: Inputs, output: Output, *, arch: str | None, **options: object) -> list[Match]:
        """Every one of :data:`WAYS` by the fraction of elements that equal its reference, best first; ``arch`` changes
        nothing. A right layer whose intermediate has other codes than the reference's is near 1, not 1."""
        call = Call(self, inputs, options).checked()
        out = self.validate_output(call, output)["out"]
        layer = _call(call.inputs, call.resolved)
        matches = []
        for combine in WAYS:
            due = rounded_to(_expected(call, layer, combine), out.dtype)
            matches.append(Match(combine.name, share(same_bits(due, out)), out.numel()))
        return sorted(matches, key=lambda match: -match.equal)

    def numerics_of(self, call: Call) -> Mapping[str, tuple[str, ...]]:
        return TENSOR_NUMERICS if call.inputs["w13_scale"].dim() == 1 else BLOCK_NUMERICS

    def why_not(self, call: Call, numerics: str) -> str | None:
        return no_boxes(self.name, numerics)


class _Call(NamedTuple):
    """A checked call: tokens (with quantised input), experts, steps, and the high-precision input if it was given."""

    tokens: Tokens
    experts: Experts
    steps: Steps
    x: Tensor | None


def router_of(options: Options) -> routing.Router:
    """The router that options name."""
    scaling = options["routed_scaling_factor"]
    if not isinstance(scaling, int | float):
        raise OptionError(f"routed_scaling_factor={scaling!r}; pass a number")
    common = routing.Router(
        top_k=positive(options, "top_k"),
        groups=positive(options, "num_expert_group"),
        top_groups=positive(options, "topk_group"),
        renormalise=bool(options["renormalize"]),
        scaling=float(scaling),
    )
    if options["router"] == "llama4":
        return replace(common, choose_by_logit=True, on_input=True)
    return replace(common, scoring=routing.Scoring.SOFTMAX) if options["router"] == "softmax" else common


def _experts(inputs: Inputs, options: Options) -> Experts:
    """This rank's experts; ShapeError or OptionError where scales or the first expert do not fit them."""
    first = options["first_expert"]
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise OptionError(f"first_expert={first!r}; pass the number of this rank's first expert")
    w13, w13_scale, w2, w2_scale = (inputs[name] for name in ("w13", "w13_scale", "w2", "w2_scale"))
    return Experts(w13, w13_scale, w2, w2_scale, inputs.get("a2_scale"), first)


def _call(inputs: Inputs, options: Options) -> _Call:
    steps, experts = steps_of(inputs, options), _experts(inputs, options)
    on_input, weights = bool(options["apply_router_weight_on_input"]), inputs["topk_weights"]
    x = None
    if "x" in inputs:
        x = weighted_input(inputs["x"], weights, on_input=on_input)
        quantised = quantize(x, steps.recipe, scale=inputs.get("a_scale"))
        codes, scale = quantised.codes, quantised.scale
    else:
        codes, scale = inputs["a"], inputs["a_scale"]
    scale = scale.reshape(1, 1) if scale.numel() == 1 else scale
    return _Call(Tokens(codes, scale, inputs["topk_ids"], weights, on_input), experts, steps, x)


def _admissible(call: Call, layer: _Call, combine: Combine, name: str) -> tuple[Admissible, str]:
    acc = None if name == IEEE32 else of_schedule(get_schedule(name))
    scale, steps = call.inputs.get("a_scale"), replace(layer.steps, combine=combine)
    boxes, unknown = (None, None) if layer.x is None else input_boxes(layer.x, steps.recipe, scale)
    parts = call.cached(
        f"shares by {name}",
        lambda: shares(
            layer.tokens,
            layer.experts,
            steps,
            numerics=name,
            acc=acc,
            boxes=None if boxes is None else lambda expert: boxes,
            unknown=unknown,
        ),
    )
    result, fmt = outcome(layer.tokens, layer.experts, steps, parts), of_dtype(call.out_dtype)
    expected = nearest(_expected(call, layer, combine), fmt)
    low, high = nearest(result.span.low, fmt), nearest(result.span.high, fmt)
    basis = f"{result.basis}: {result.flips} of {result.intermediates} of the intermediate"
    return Admissible(low, high, torch.nan_to_num(expected, 0.0), open=result.open), basis


def _expected(call: Call, inner: _Call, combine: Combine) -> Tensor:
    """The reference by one combine, float64, computed once for a call."""
    steps = replace(inner.steps, combine=combine)
    return call.cached(f"reference by {combine.name}", lambda: layer(inner.tokens, inner.experts, steps))


def _static(name: str, scale: Tensor) -> None:
    """Refuse a given scale that no quantiser divides by."""
    if scale.numel() != 1:
        raise ShapeError(f"{name} has shape {list(scale.shape)}; a static scale is one value")
    if not 0 < (value := float(scale.reshape(()))) < math.inf:
        raise InputError(f"{name} is {value}; a static scale is positive and finite")


def steps_of(inputs: Inputs, options: Options) -> Steps:
    """What the checked inputs and options of ``moe_fp8`` make a layer round and quantise with.

    Raises NumericsError, InputError, OptionError: the recipe is a known fault, has one scale for all rows of a call,
    which are a layer's own choice, is none of :data:`QUANTISERS` else, or does not fit the given scales; the limit is
    no positive number.
    """
    static = "a2_scale" in inputs
    name = options["recipe"] or ("torch_static" if static else "vllm_group")
    recipe = recipe_table.get(str(name))
    if recipe.fault is not None:
        raise NumericsError(f"recipe {recipe.name} is a known fault: {recipe.fault}")
    if recipe.block.rows is None and recipe.formula is not ScaleFormula.GIVEN:
        raise NumericsError(
            f"recipe {recipe.name} has one scale for all rows, and which rows a layer quantises at a time is its own "
            "choice; give a_scale and a2_scale, or take a recipe of groups or rows"
        )
    if recipe.name not in QUANTISERS:
        raise NumericsError(
            f"recipe {recipe.name} gives {recipe.element} in blocks of {recipe.block}; {among(recipe.name, QUANTISERS)}"
        )
    if (recipe.formula is ScaleFormula.GIVEN) != static:
        raise InputError(f"recipe {recipe.name} {'computes its own scale: pass no' if static else 'needs'} a2_scale")
    limit = options["limit"]
    if limit is not None and (not isinstance(limit, int | float) or not limit > 0):
        raise OptionError(f"limit={limit!r}; pass a positive number, or None")
    rounding, combine = Activation[str(options["activation_rounding"])], options["combine"]
    return Steps(
        activation=rounding,
        recipe=recipe,
        limit=None if limit is None else float(limit),
        combine=Combine.STORED if combine is None else Combine[str(combine)],
    )


def _judge_ids(bad: Tensor, ids: Tensor, right: Tensor) -> Verdict:
    """Of rows with wrong experts, the first: what it has beside a right choice. Ids are no numbers between two ends."""
    worst = None
    if bool(bad.any()):
        row = int(torch.nonzero(bad)[0, 0])
        worst = Worst((row, 0), float(ids[row, 0]), math.nan, math.nan, math.nan, math.inf, "topk_ids")
    comparison = Comparison(int(bad.sum()), bad.numel(), 0, math.inf if worst else 0.0, worst, bad)
    basis = "experts whose choice no rounding explains otherwise"
    if worst is None:
        return verdict(comparison, basis=basis)
    given, due = (", ".join(map(str, experts[worst.index[0]].tolist())) for experts in (ids, right))
    text = f"{comparison.outside} of {counted(len(ids), 'row')} have wrong experts ({basis})"
    said = f"{text}: topk_ids[{worst.index[0]}] is {given}; {due} are right"
    return replace(verdict(comparison, basis=basis), summary=said)


def no_boxes(contract: str, numerics: str) -> str | None:
    """Why the products of a layer that quantises its intermediate cannot be judged by these numerics, or None."""
    if numerics != IEEE32 and (is_class(numerics) or get_schedule(numerics).split is not None):
        return f"{contract} has no any-order bound for {numerics}; declare the schedule or {IEEE32}"
    return None


def why_mistrust(tokens: Tokens, experts: Experts, out: Tensor) -> str | None:
    """Reason for which a pass of a layer with these inputs would prove little, or None; ``out`` ``[T, H]``, any float
    dtype."""
    if not any(True for _ in tokens.slots(experts)):
        return "no token goes to an expert of this rank"
    for name in ("w13_scale", "w2_scale"):
        if reason := all_equal(name, [getattr(experts, name)]):
            return reason
    local = tokens.ids.to(torch.int64) - experts.first
    busy = ((local >= 0) & (local < experts.w13.shape[0])).any(dim=1)
    return mostly_zero(decode(out)[busy])


# --- TensorRT-LLM's per-tensor layer ------------------------------------------------------------------------


NUMERICS = {**TENSOR_NUMERICS, "sm100": ("sm100.chain",)}
"""TensorRT-LLM's kernel is sm100's; the others are for kernels that compute the same elsewhere."""
STEPS = Steps(store=torch.float32, activation=Activation.NONE, recipe=TORCH_STATIC)
"""Nothing is stored between the products but codes."""
KEPT = (torch.float32, torch.bfloat16)
"""Dtypes in which the routing weight may be kept."""


@dataclass(frozen=True)
class Choice:
    """One way to route: experts ``[T]`` (global; -1 for none), tokens about which nothing is claimed, its number."""

    ids: Tensor
    lost: Tensor
    number: int


@register
class TensorMoe(Contract):
    """TensorRT-LLM's layer from the checkpoint's weights; one dtype of the routing weight must explain a whole output.

    For a token with logits ``l`` over all experts, ``e = argmax l`` (one of this rank's, else the row is zero) ::

        q     = sat(x / s1)                             s1 = w13_input_scale, the static scale of the input
        w     = sigmoid(l[e])                           kept in float32, or rounded to bfloat16 by the routing kernel
        gate, up = w * s1 * w13_scale[e] * (q @ w13[e].T)            "on the input": before the activation, not after w2
        c     = sat(silu(gate) * up / s2)               s2 = w2_input_scale; float32 up to here
        out   = bf16(s2 * w2_scale[e] * (c @ w2[e].T))

    The kernel is handed prepared weights (padded, halves exchanged, rows permuted) and ``g1 = w13_scale s1``, ``g1 /
    s2``, ``w2_scale s2``; the truth knows nothing of either, so a wrong preparation is a wrong result. Intervals as in
    :mod:`oracle.routines.moe.moe_ranges`: the weight widens the scale of the first product, a code of either quantiser
    may flip. The up half is multiplied by ``fl(g1 / s2)`` before it meets silu: at most ``8 u`` beside the ideal order
    (two products, a quotient of 2 ulp), added in :func:`_rescaled`. Of equal largest logits either expert is right.

    Sources: vLLM flashinfer_utils.apply_fi_trtllm_fp8_per_tensor_moe; FlashInfer trtllm_fp8_per_tensor_scale_moe, its
    routing kernel (trtllm_fused_moe_routing_llama4.cu: the weight is stored in bfloat16) and its reference (the weight
    multiplies the first product). Not covered: tokens whose largest logit is NaN or infinite, other routings, ungated
    experts.
    """

    name = "apply_fi_trtllm_fp8_per_tensor_moe"
    section = "MoE"
    summary = "experts with one scale for each weight and static inputs; Llama-4 routing, its weight on the input"
    source = "vLLM flashinfer_utils.apply_fi_trtllm_fp8_per_tensor_moe; FlashInfer trtllm_fp8_per_tensor_scale_moe"
    inputs = (
        TensorSpec("hidden_states", Kind.VALUES, WIDE, ("T", "H"), "input, quantised by the layer"),
        TensorSpec("router_logits", Kind.LOGITS, WIDE, ("T", "X"), "logits of the experts of all ranks"),
        TensorSpec("w13", Kind.CODES, E4M3, ("E", "R", "H"), "gate rows, then up rows, as the checkpoint has them"),
        TensorSpec("w13_scale", Kind.SCALES, F32, ("E",), "scale of each expert's w13"),
        TensorSpec("w13_input_scale", Kind.SCALES, F32, None, "one value: static scale of the input"),
        TensorSpec("w2", Kind.CODES, E4M3, ("E", "H", "I"), "down projection, as the checkpoint has it"),
        TensorSpec("w2_scale", Kind.SCALES, F32, ("E",), "scale of each expert's w2"),
        TensorSpec("w2_input_scale", Kind.SCALES, F32, None, "one value: static scale of the intermediate"),
    )
    options = (
        OptionSpec("ep_rank", 0, None, "this rank; its first expert is ep_rank * E"),
        OptionSpec(
            "weight_dtype",
            None,
            (None, *KEPT),
            "dtype in which the routing weight is kept; None: either",
            declares=True,
        ),
    )
    numerics = NUMERICS
    golden_arches = ("cpu", "sm100")

    def refuse(self, inputs: Inputs, options: Options) -> None:
        rank = options["ep_rank"]
        experts, everywhere = inputs["w13"].shape[0], inputs["router_logits"].shape[1]
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < max(1, everywhere // experts):
            raise OptionError(f"ep_rank={rank!r}; {everywhere} experts in ranks of {experts} have ranks from 0")
        for name in ("w13_input_scale", "w2_input_scale"):
            if inputs[name].numel() != 1:
                raise ShapeError(f"{name} has shape {list(inputs[name].shape)}; the kernel is static: pass one value")
            value = float(inputs[name].reshape(()))
            if not 0 < value < float("inf"):
                raise InputError(f"{name} is {value}; a static scale is positive and finite")

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        """``[T, H]`` bfloat16; of equal logits the first expert, the weight in ``weight_dtype`` (None: float32)."""
        resolved = self.check(inputs, options)
        weight_dtype = resolved["weight_dtype"] or torch.float32
        return _truth(inputs, experts_of(inputs, resolved), choices(inputs["router_logits"])[0], weight_dtype)

    def outputs(self, call: Call) -> dict[str, Out]:
        return {"out": Out(tuple(call.inputs["hidden_states"].shape), (torch.bfloat16,))}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        name, weight_dtype = self.arithmetics(call, numerics)[0], call.resolved["weight_dtype"]
        dtypes = [weight_dtype] if isinstance(weight_dtype, torch.dtype) else KEPT
        alone, declared = isinstance(weight_dtype, torch.dtype), numerics is not None
        alternatives = [with_float32(partial(RoutedSets, call, k, alone), name, declared=declared) for k in dtypes]
        return [sets for alike in zip(*alternatives, strict=True) for sets in alike]

    def why_not(self, call: Call, numerics: str) -> str | None:
        return no_boxes(self.name, numerics)


@dataclass(frozen=True)
class RoutedSets(Sets):
    """The right outputs when the routing weight is kept in ``kept``; of equal logits each token by the choice of
    experts that admits its row. ``alone``: no other dtype is admitted."""

    call: Call
    kept: torch.dtype
    alone: bool
    numerics: str
    wider: bool

    def judge(self, outputs: Found) -> Verdict:
        out, inputs = outputs["out"], self.call.inputs
        ways = choices(inputs["router_logits"])
        sets, basis = self._admissible(ways[0])
        ids = ways[0].ids
        for choice in ways[1:]:
            wrong = compare(out, sets).bad.any(dim=1)
            if not bool(wrong.any()):
                break
            other, _ = self._admissible(choice)
            better = wrong & ~compare(out, other).bad.any(dim=1)
            sets, ids = taken(sets, other, better), torch.where(better, choice.ids, ids)
        one = out.new_ones((1, 1), dtype=torch.float32)
        tokens = Tokens(out, one, ids[:, None], one.expand(ids.shape[0], 1), on_input=True)
        basis = f"{basis}, routing weight in {str(self.kept).removeprefix('torch.')}"
        mistrust = why_mistrust(tokens, experts_of(inputs, self.call.resolved), out)
        return verdict(compare(out, sets), basis=basis, mistrust=mistrust)

    def ranges(self, expected: Found) -> dict[str, Range] | None:
        """None where it is no single interval: a choice of experts or of the weight's dtype."""
        ways = choices(self.call.inputs["router_logits"])
        if len(ways) > 1 or not self.alone:
            return None
        return {"out": ranged(self._admissible(ways[0])[0], torch.bfloat16)}

    def _admissible(self, choice: Choice) -> tuple[Admissible, str]:
        """Computed once for a call."""
        experts = experts_of(self.call.inputs, self.call.resolved)
        build = partial(_admissible_of, self.call.inputs, experts, choice, self.kept, self.numerics)
        return self.call.cached(f"admissible {choice.number} by {self.kept} and {self.numerics}", build)


def choices(logits: Tensor) -> list[Choice]:
    """Every way to route by ``logits`` ``[T, E]``, any float dtype: the n-th of the experts that share the largest
    logit (the first where there are fewer)."""
    x = decode(logits)
    lost = torch.isnan(x).any(dim=1) | ~torch.isfinite(x.amax(dim=1))
    tied = (x == x.amax(dim=1, keepdim=True)) | lost[:, None]
    count, place = tied.sum(dim=1), tied.to(torch.int64).cumsum(dim=1)
    most = int(torch.where(lost, 1, count).max())
    ways = []
    for n in range(most):
        wanted = torch.where(lost | (count <= n), 1, n + 1)
        ids = ((place == wanted[:, None]) & tied).to(torch.int64).argmax(dim=1)
        ways.append(Choice(ids, lost, n))
    return ways


def experts_of(inputs: Inputs, options: Options) -> Experts:
    """This rank's experts of a checked call."""
    w13, w13_scale, w2, w2_scale = (inputs[name] for name in ("w13", "w13_scale", "w2", "w2_scale"))
    return Experts(w13, w13_scale, w2, w2_scale, inputs["w2_input_scale"], options["ep_rank"] * w13.shape[0])


def tokens_of(inputs: Inputs, choice: Choice, weight_dtype: torch.dtype) -> Tokens:
    """Quantised tokens and their experts; the routing weight is in the scale of each token."""
    own = decode(inputs["router_logits"]).gather(1, choice.ids[:, None])
    weight, first = nearest(routing.sigmoid(own), of_dtype(weight_dtype)), inputs["w13_input_scale"]
    scale = rounded_to(weight * decode(first).reshape(1, 1), torch.float32)
    codes = quantize(inputs["hidden_states"], TORCH_STATIC, scale=first).codes
    return Tokens(codes, scale, choice.ids[:, None], torch.ones_like(scale), on_input=True)


def _truth(inputs: Inputs, experts: Experts, choice: Choice, weight_dtype: torch.dtype) -> Tensor:
    """The output with every rounding that is declared, bfloat16."""
    return rounded_to(layer(tokens_of(inputs, choice, weight_dtype), experts, STEPS), torch.bfloat16)


def _admissible_of(
    inputs: Inputs, experts: Experts, choice: Choice, weight_dtype: torch.dtype, name: str
) -> tuple[Admissible, str]:
    """The admissible output for one choice of experts and one dtype of the weight, and what it rests on."""
    x, first = inputs["hidden_states"], inputs["w13_input_scale"]
    acc = None if name == IEEE32 else of_schedule(get_schedule(name))
    weight = _weights(inputs["router_logits"], choice, weight_dtype)
    low, high = (torch.zeros(tuple(x.shape), dtype=torch.float64, device=x.device) for _ in range(2))
    open_, basis, flips, count = choice.lost.clone(), name, 0, 0
    for expert in range(experts.w13.shape[0]):
        token = torch.nonzero((choice.ids - experts.first == expert) & ~choice.lost)[:, 0]
        if not token.numel():
            continue
        rows = decode(x.index_select(0, token))
        boxes, _ = code_boxes(Span(rows, rows), STEPS.recipe, of_dtype(x.dtype), first)
        weighted = [
            replace(b, scale_low=b.scale_low * weight.low[token], scale_high=b.scale_high * weight.high[token])
            for b in boxes
        ]
        h, lost, _ = boxed_span(weighted, experts, "w13", expert, torch.float32, acc)
        codes, flipped = code_boxes(_rescaled(act_span(h, STEPS)), STEPS.recipe, FP32, experts.intermediate_scale)
        y, over, basis = boxed_span(codes, experts, "w2", expert, torch.float32, acc)
        low[token], high[token] = y.low, y.high
        open_[token] |= lost | over
        flips, count = flips + flipped, count + codes[0].low.numel()
    due = torch.nan_to_num(decode(_truth(inputs, experts, choice, weight_dtype)), 0.0)
    sets = Admissible(nearest(low, BF16), nearest(high, BF16), due, open=open_[:, None].expand(low.shape))
    return sets, f"{basis}: {flips} of {count} of the intermediate"


def _weights(logits: Tensor, choice: Choice, weight_dtype: torch.dtype) -> Span:
    """Interval ``[T, 1]`` of a kernel's routing weights, not below 0."""
    router = routing.llama4()
    ordinary = torch.where(choice.lost[:, None], torch.zeros_like(logits), logits)
    span = routing.weight_span(routing.scores(ordinary, router), choice.ids[:, None], router)
    low, high = (edge.clamp(min=0.0) for edge in (span.low, span.high))
    return Span(low, high) if weight_dtype == torch.float32 else Span(nearest(low, BF16), nearest(high, BF16))


def _rescaled(act: Span) -> Span:
    """The activation with what the other order of its scales may change."""
    return Span(act.low - 8 * U * act.low.abs(), act.high + 8 * U * act.high.abs())


def taken(sets: Admissible, other: Admissible, rows: Tensor) -> Admissible:
    """``sets`` ``[T, H]`` with the given ``rows`` (bool ``[T]``) of ``other``."""
    pick = rows[:, None]
    low, high, expected = (
        torch.where(pick, getattr(other, name), getattr(sets, name)) for name in ("low", "high", "expected")
    )
    assert sets.open is not None and other.open is not None
    return Admissible(low, high, expected, open=torch.where(pick, other.open, sets.open))
