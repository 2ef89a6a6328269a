"""Contracts of activations by themselves, one row each: which formula, which parameters, and where it is rounded.

A row gives a :class:`oracle.truth.activation.Formula`, whether what becomes of the gate is rounded to the dtype of the
input before it meets up, and which options set which parameter. Truth, admissible outputs, cases and faults follow;
layers of experts have the same formulas between their products (:mod:`oracle.routines.moe.pipelines`).

Judged are intervals: a device's exponential, error function and tanh err (:mod:`oracle.bounds.activation`), and every
rounding after them is monotone.

NaN and infinities: those of :class:`ActivationContract`.
Sources: those of the rows. Not covered: ``gelu_new``, ``gelu_fast``, ``fatrelu``, rows in use by counts
(``masked_moe_activation``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import InputError, OptionError, ShapeError
from oracle.numbers.formats import decode, of_dtype
from oracle.numbers.quantize import WIDE
from oracle.numbers.rounding import f32
from oracle.routines.base import INTEGERS, Call, Contract, Inputs, Options, OptionSpec, Out, TensorSpec, register
from oracle.routines.fault import Fault, Stage, fold
from oracle.routines.moe.moe_ranges import gated_span
from oracle.routines.traits import Kind
from oracle.truth.activation import SWIGLU, Curve, Formula, bounded
from oracle.truth.moe import Activation, Steps, activated, clamped, left_of, nearest
from oracle.truth.routing import Span
from oracle.verdict.compare import Admissible
from oracle.verdict.sets import Elements, Sets, mostly_zero, rounded_to

RANGE = 2.0**10
"""Parameters other than a limit lie within it and, where they divide, above its reciprocal."""
UNDEFINED_BELOW = frozenset({Curve.SILU, Curve.GELU, Curve.GELU_TANH})
"""Of a gate of -inf these curves are -inf times 0."""


class ActivationContract(Contract):
    """The activation between the two products of an expert, by itself; T is the dtype of ``x``, all else is float32.

    NaN in gate or up gives NaN; with a limit nothing is claimed of it, since a device minimum drops NaN. A gate of +inf
    gives an infinity of the sign of up, a gate of -inf NaN or 0 (nothing is claimed) unless the formula has a limit of
    its own there; an infinite up gives an infinity of the sign of what the gate becomes, where that cannot be flushed
    to 0. Beyond the range of T the result is infinite. +0 and -0 are equal. No rows give no rows.
    """

    section = "MoE"
    applied: ClassVar[str] = "the activation"
    """What verdicts call it."""
    gated: ClassVar[bool] = True
    """Whether a row of x holds gate and up."""

    def steps(self, x: Tensor, options: Options) -> Steps:
        """Formula, clamp and roundings of a call on ``x`` ``[..., 2 I]`` (bfloat16, float16 or float32)."""
        raise NotImplementedError

    def refuse(self, inputs: Inputs, options: Options) -> None:
        x = inputs["x"]
        if x.dim() == 0 or (self.gated and x.shape[-1] % 2):
            raise ShapeError(f"x has shape {list(x.shape)}; its last axis holds gate and up, [..., 2 I]")

    def unwritten(self, inputs: Inputs) -> Tensor | None:
        """Rows of ``x``, bool ``[M]``, of which nothing is read or written; None where there are none."""
        return None

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        """The correctly rounded result ``[..., I]`` in the dtype of ``x``; NaN in rows that are not written."""
        return self._computed(inputs, self.steps(inputs["x"], self.check(inputs, options)))

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        inputs = fold(call, faults, Stage.READ, dict(call.inputs))
        options = fold(call, faults, Stage.OPTIONS, dict(call.resolved))
        steps = fold(call, faults, Stage.RECIPE, self.steps(inputs["x"], options))
        outputs: dict[str, Tensor] = fold(call, faults, Stage.WRITE, {"out": self._computed(inputs, steps)})
        return outputs

    def _computed(self, inputs: Inputs, steps: Steps) -> Tensor:
        value, unwritten = activated(decode(inputs["x"]), steps), self.unwritten(inputs)
        return rounded_to(value if unwritten is None else value.masked_fill(unwritten[:, None], math.nan), steps.store)

    def outputs(self, call: Call) -> dict[str, Out]:
        x, unwritten = call.inputs["x"], self.unwritten(call.inputs)
        gated = self.steps(x, call.resolved).formula.gated
        shape = (*x.shape[:-1], x.shape[-1] // 2 if gated else x.shape[-1])
        return {"out": Out(shape, (x.dtype,), None if unwritten is None else (~unwritten)[:, None].expand(shape))}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        basis = f"{self.applied} within a device's error, then its roundings"
        mistrust = lambda outputs: mostly_zero(decode(outputs["out"]))  # noqa: E731
        return [Elements(lambda: ({"out": self.interval(call)}, basis), mistrust=mistrust)]

    def interval(self, call: Call) -> Admissible:
        """The admissible outputs of a checked call."""
        x, unwritten = call.inputs["x"], self.unwritten(call.inputs)
        found = interval_of(x, self.steps(x, call.resolved))
        if unwritten is None or found.open is None:
            return found
        return replace(found, open=found.open | unwritten[:, None])


def interval_of(x: Tensor, steps: Steps) -> Admissible:
    """What a device may give of ``x`` ``[..., 2 I]``, float32, bfloat16 or float16, by these steps: ``[..., I]`` on the
    grid of ``steps.store``. NaN and infinities as of :class:`ActivationContract`. Source: derived in
    :mod:`oracle.bounds.activation`."""
    h, fmt = decode(x), of_dtype(steps.store)
    gate, up = clamped(h, steps)
    special = ~torch.isfinite(left_of(gate, steps))
    if up is not None:
        special = special | ~torch.isfinite(bounded(up, steps.formula))
    g, u = (None if half is None else half.masked_fill(special, 0.0) for half in (gate, up))
    assert g is not None
    span = gated_span(Span(g, g), None if u is None else Span(u, u), steps)
    ieee = activated(h, replace(steps, activation=Activation.NONE))
    due = nearest(torch.where(special, ieee, activated(h, steps)), fmt)
    low, high = (torch.where(special, due, edge) for edge in (span.low, span.high))
    return Admissible(low, high, due, open=_undetermined(gate, up, steps))


def _undetermined(gate: Tensor, up: Tensor | None, steps: Steps) -> Tensor:
    """Elements whose special value depends on how a kernel computes."""
    open_, nan = torch.zeros_like(gate, dtype=torch.bool), torch.isnan(gate)
    if steps.formula.curve in UNDEFINED_BELOW:
        open_ = torch.isneginf(gate)
    if up is not None:
        left = gated_span(Span(*(torch.nan_to_num(gate, 0.0, 0.0, 0.0),) * 2), None, steps)
        perhaps_zero = (left.low <= 0) & (left.high >= 0) & (gate != 0) & torch.isfinite(gate)
        open_, nan = open_ | (torch.isinf(bounded(up, steps.formula)) & perhaps_zero), nan | torch.isnan(up)
    return torch.where(nan, torch.full_like(nan, steps.limit is not None), open_)


@register
class SiluAndMul(ActivationContract):
    """The activation between the two products of an expert, by itself::

        out = RN_T(silu(gate) * up)                   gate = x[..., :I], up = x[..., I:], T the dtype of x
        out = RN_T(RN_T(silu(gate)) * up)             with ``round_silu``
        silu(x) = x / (1 + exp(-x))                   with ``limit``: gate <= limit, -limit <= up <= limit, first

    Sources: vLLM csrc/activation_kernels.cu (silu_and_mul, with its rounding of silu), SGLang's clamped variant.
    """

    name = "silu_and_mul"
    applied = "silu"
    shapes = {"out": "[..., I]"}
    production = "moe_layer.silu_and_mul"
    summary = "silu(gate) * up, optionally clamped first, rounded once or also after silu"
    source = "vLLM csrc/activation_kernels.cu silu_and_mul"
    inputs = (TensorSpec("x", Kind.VALUES, WIDE, None, "[..., 2 I]: gate, then up"),)
    options = (
        OptionSpec("limit", None, None, "clamp of gate (above) and up (both sides)"),
        OptionSpec("round_silu", False, (False, True), "silu is rounded to the dtype of x before it is multiplied"),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        limit = options["limit"]
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0):
            raise OptionError(f"limit={limit!r}; pass a positive number, or None")

    def steps(self, x: Tensor, options: Options) -> Steps:
        """As of :meth:`ActivationContract.steps`; ``x`` ``[..., 2 I]`` (bfloat16, float16 or float32)."""
        limit = options["limit"]
        rounding = Activation.EACH if options["round_silu"] else Activation.PRODUCT
        return Steps(store=x.dtype, activation=rounding, limit=None if limit is None else float(limit))


# --- rows ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """One activation of a library.

    Attributes
    ----------
    formula, each : what is computed; whether what the gate becomes is rounded to T before it meets up.
    options : for each option which parameter it sets (``limit``, or a field of the formula), and its default.
    rows : a row belongs to an expert; those of none, or of another rank's, are neither read nor written.
    """

    name: str
    summary: str
    source: str
    formula: Formula = SWIGLU
    each: bool = False
    options: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    rows: bool = False


_CSRC, _MOE = "vLLM csrc/libtorch_stable/activation_kernels.cu", "vLLM layers/fused_moe/activation.py"
_UNGATED = f"{_MOE} apply_moe_activation"

ROWS = (
    Row(
        name="silu_and_mul_with_clamp", summary="gate and up clamped, silu of alpha times gate, up plus beta",
        source=f"{_CSRC} silu_and_mul_with_clamp; SWIGLUOAI_UNINTERLEAVE", formula=Formula(narrow=True), each=True,
        options={"limit": ("limit", 7.0), "alpha": ("alpha", 1.0), "beta": ("beta", 0.0)},
    ),
    Row(
        name="swigluoai_and_mul", summary="gpt-oss: gate and up in neighbouring columns, clamped, up plus 1",
        source=f"{_CSRC} swigluoai_and_mul; OpenAI triton_kernels swiglu_fn",
        formula=Formula(interleaved=True, alpha=1.702, beta=1.0),
        options={"alpha": ("alpha", 1.702), "limit": ("limit", 7.0)},
    ),
    Row(
        name="swiglu_limit_func", summary="silu and mul, clamped, of the rows that belong to an expert of this rank",
        source="vLLM layers/fused_moe/utils.py swiglu_limit_func with topk_ids", rows=True,
        options={"swiglu_limit": ("limit", 0.0)},
    ),
    Row(
        name="swiglustep_and_mul", summary="silu of gate clamped from above, up clamped on both sides",
        source=f"{_CSRC} masked_swiglustep_and_mul_kernel; vLLM layers/activation.py SwigluStepAndMul",
        formula=Formula(late=True), options={"limit": ("limit", 7.0)},
    ),
    Row(
        name="situ_and_mul", summary="a bounded silu of gate times a bounded up",
        source=f"{_CSRC} situ_and_mul", formula=Formula(curve=Curve.SITU, alpha=4.0, linear=25.0),
        options={"beta": ("alpha", 4.0), "linear_beta": ("linear", 25.0)},
    ),
    Row(
        name="mul_and_silu", summary="up, then gate: silu of the second half times the first",
        source=f"{_CSRC} mul_and_silu", formula=Formula(up_first=True), each=True,
    ),
    Row(
        name="gelu_and_mul", summary="gelu(gate) * up, the error function's", source=f"{_CSRC} gelu_and_mul",
        formula=Formula(curve=Curve.GELU), each=True,
    ),
    Row(
        name="gelu_tanh_and_mul", summary="gelu(gate) * up, in its tanh form", source=f"{_CSRC} gelu_tanh_and_mul",
        formula=Formula(curve=Curve.GELU_TANH), each=True,
    ),
    *(
        Row(
            name=f"{name}_no_mul", summary=f"{name} of every column; the weight has no up rows",
            source=f"{_UNGATED} {name.upper()}_NO_MUL", formula=Formula(curve=curve, gated=False),
        )
        for name, curve in (
            ("silu", Curve.SILU), ("gelu", Curve.GELU), ("gelu_tanh", Curve.GELU_TANH), ("relu2", Curve.RELU2))
    ),
)  # fmt: skip  # a table, one row a line
"""Every activation, in the order of the libraries."""

MEANS = {
    "limit": "clamp of gate (above) and up (both sides)",
    "alpha": "parameter of the curve",
    "beta": "is added to up",
    "linear": "bounds up smoothly",
}
IDS = (
    TensorSpec("topk_ids", Kind.IDS, INTEGERS, ("M",), "the expert of each row, -1 for none"),
    TensorSpec(
        "expert_map", Kind.IDS, INTEGERS, ("X",), "local expert of each global one, -1 elsewhere", optional=True
    ),
)


class RowContract(ActivationContract):
    """An activation whose steps are a row of :data:`ROWS`.

    A limit is positive, the parameter of a curve within 2^-10 and 2^10, other parameters within 2^10 of 0. Ids are at
    least -1, and below the entries of the map where there is one.
    """

    row: ClassVar[Row]
    dispatched = False

    def refuse(self, inputs: Inputs, options: Options) -> None:
        for name, (of, _) in self.row.options.items():
            value = options[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise OptionError(f"{name}={value!r}; pass a finite number")
            if of == "limit" and not value > 0 and not (self.row.rows and value == 0):
                raise OptionError(f"{name}={value!r}; pass a positive number")
            if of != "limit" and not abs(value) <= RANGE:
                raise OptionError(f"{name}={value!r}; pass a number within {RANGE:g} of 0")
            if of == "alpha" and value < 1 / RANGE:
                raise OptionError(f"{name}={value!r}; pass a number within {1 / RANGE:g} and {RANGE:g}")
        if self.row.rows:
            ids, known = inputs["topk_ids"], inputs.get("expert_map")
            if bool((ids < -1).any()) or (known is not None and bool((ids >= known.numel()).any())):
                raise InputError(f"topk_ids reach from {int(ids.min())} to {int(ids.max())}; -1 is none")

    def steps(self, x: Tensor, options: Options) -> Steps:
        """Parameters are float32 numbers, a linear bound of 0 or below is none; so is a limit of 0. ``x``
        ``[..., 2 I]`` (any float dtype)."""
        row = self.row
        given = torch.tensor([options[n] for n in row.options], dtype=torch.float64, device="cpu")
        values = dict(zip((of for of, _ in row.options.values()), f32(given).tolist(), strict=True))
        limit = values.pop("limit", 0.0) or None
        if "linear" in values:
            values["linear"] = max(values["linear"], 0.0)
        rounding = Activation.EACH if row.each else Activation.PRODUCT
        return Steps(store=x.dtype, activation=rounding, limit=limit, formula=replace(row.formula, **values))

    def unwritten(self, inputs: Inputs) -> Tensor | None:
        if not self.row.rows:
            return None
        ids, known = inputs["topk_ids"].long(), inputs.get("expert_map")
        return ids < 0 if known is None else (ids < 0) | (known.long()[ids.clamp(min=0)] < 0)


def described(row: Row) -> str:
    """The steps of a row, one in a line."""
    formula, names = row.formula, {of: name for name, (of, _) in row.options.items()}
    gate, up = ("x[..., ::2]", "x[..., 1::2]") if formula.interleaved else ("x[..., :I]", "x[..., I:]")
    gate, up = (up, gate) if formula.up_first else (gate, up)
    lines, limit = [f"g = {gate}, u = {up}" if formula.gated else "g = x"], names.get("limit")
    if limit:
        above = "" if formula.late else f"g = min(g, {limit}){', rounded to T' * formula.narrow}; "
        lines.append(f"{above}u = min(max(u, -{limit}), {limit}){', rounded to T or not' * formula.narrow}")
    curve = formula.curve.replace("alpha", names["alpha"]) if "alpha" in names else formula.curve.replace("alpha ", "")
    clamp = f", then y = min(y, {limit})" if limit and formula.late else ""
    lines.append(f"y = {curve}{', rounded to T' * row.each}{clamp}")
    if "linear" in names:
        lines.append("u = {0} tanh(u / {0})".format(names["linear"]))
    added = names.get("beta", f"{formula.beta:g}" * bool(formula.beta))
    right = f" (u + {added})" if added else " u"
    lines.append(f"out = y{right * formula.gated}, rounded to T")
    text = "\n".join(["The steps, each in float32:", "", *(f"    {line}" for line in lines)])
    if row.rows:
        text += f"\n\nRows whose id is -1, or that the map sends to -1, may hold anything. {limit}=0 clamps nothing."
    if "linear" in names:
        text += f"\n\n{names['linear']} of 0 or below leaves u as it is."
    return text


def _registered(row: Row) -> type[RowContract]:
    """The contract of one row."""
    gated, width = row.formula.gated, "2 I" if row.formula.gated else "I"
    order = "neighbours" if row.formula.interleaved else "up, then gate" if row.formula.up_first else "gate, then up"
    x = TensorSpec("x", Kind.VALUES, WIDE, ("M", "C") if row.rows else None, f"[..., {width}]" + f": {order}" * gated)
    contract: type[RowContract] = type(
        row.name,
        (RowContract,),
        {
            "__module__": __name__,
            "__doc__": described(row),
            "row": row,
            "gated": gated,
            "name": row.name,
            "summary": row.summary,
            "source": row.source,
            "shapes": {"out": "[..., I]"},
            "inputs": (x, *IDS) if row.rows else (x,),
            "options": tuple(OptionSpec(n, default, None, MEANS[of]) for n, (of, default) in row.options.items()),
        },
    )
    register(contract)
    return contract


CONTRACTS = {row.name: _registered(row) for row in ROWS}
"""Every contract of a row by name."""
