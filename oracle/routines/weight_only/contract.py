"""Contracts of the products of 16-bit activations with weights of 2 to 8 bits: GPTQ, AWQ, Marlin, machete, FP4.

All are one arithmetic (:class:`WeightOnly`): the weight of a row of :class:`Weights` by a :class:`Form`, a sum over K,
and the :class:`Step`\\ s behind it. A routine says how its words hold the codes, what its scales and zero points are,
through which dtype partial sums may pass, and what follows the sum.

NaN and infinities: as IEEE arithmetic has them, in the order of the steps.
Sources: those of each class; :mod:`oracle.truth.weight_only`. Not covered: activations of 8 bits, sparse weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.engines import exact
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.bounds.narrow import narrow_bound, roundings_of
from oracle.errors import ShapeError
from oracle.numbers.formats import decode
from oracle.numbers.rounding import Overflow, Rounding, pair_to_dtype, two_sum
from oracle.routines.base import Call, Contract, Inputs, Options, Out
from oracle.routines.fault import Fault, Stage, fold
from oracle.routines.traits import Kind
from oracle.tensorcore.schedules import SPLIT, schedules
from oracle.truth.gemm import Exact, ScaledProduct
from oracle.truth.weight_only import Form, Weights
from oracle.verdict.compare import Admissible
from oracle.verdict.parts import interval_of
from oracle.verdict.sets import Elements, Found, Sets, all_equal, mostly_zero, rounded_to


@dataclass(frozen=True)
class Step:
    """One operation behind the sum, rounded to ``dtype``: ``x``, ``x * by`` or ``x + by``; ``by`` is float64 ``[N]``,
    ``[M, 1]`` or ``[1]``."""

    word: str
    dtype: torch.dtype
    by: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The value, float64 of the shape of ``x`` ``[M, N]``; NaN stays NaN."""
        if self.by is None:
            return _to(x, self.dtype)
        return _to(x * self.by if self.word == "times" else x + self.by, self.dtype)


@dataclass(frozen=True)
class Plan:
    """What a right kernel computes of some rows; faults change a field.

    Attributes
    ----------
    a : ``[M, K]``, of its own dtype.
    weights : before they are rounded.
    form : of the rounding of the weights.
    steps : behind the sum, in their order.
    rows : of the output, int64; None: all.
    """

    a: Tensor
    weights: Weights
    form: Form
    steps: tuple[Step, ...]
    rows: Tensor | None = None

    def product(self, form: Form) -> ScaledProduct:
        """The product of the activations and the weights of a form."""
        w = self.weights.values(form, self.a.dtype)
        w = w.to(torch.float32 if form is Form.EXACT else self.a.dtype).t().contiguous()
        one = torch.ones((1, 1), dtype=torch.float32, device=w.device)
        return ScaledProduct(self.a, w, one, one, block=max(1, w.shape[1]), b_rows=max(1, w.shape[0]))

    def finished(self, value: Exact, offset: Tensor | float = 0.0) -> Tensor:
        """The output, float64 ``[M, N]``, of a sum that is off by ``offset``."""
        high, low = two_sum(
            value.hi, torch.as_tensor(offset, dtype=torch.float64, device=value.hi.device).expand_as(value.hi)
        )
        low = torch.where(torch.isfinite(high), low + value.lo, 0.0)
        first, *others = self.steps
        dtype = first.dtype if first.by is None else torch.float32
        x = decode(pair_to_dtype(high, low, dtype, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF))
        for step in others if first.by is None else self.steps:
            x = step(x)
        return x


@dataclass(frozen=True)
class Way:
    """One arithmetic of a whole output: the form of its weights, and how many roundings to the dtype of the
    activations a term may meet before the steps (0: sums in float32)."""

    form: Form = Form.DIFFERENCE
    roundings: int = 0


class WeightOnly(Contract):
    """``out[m, n] = steps(sum_k a[m, k] * w[k, n])`` with ``w[k, n] = RN((q[k, n] - z[g, n]) * s[g, n])`` in the dtype
    T of ``a``; ``g`` is the group of row ``k``, ``k // (K / G)`` unless the call gives it. Codes, zero points and their
    difference are exact. Sums are in float32: in any order, or by the accumulator of a tensor core with K cut anywhere.
    The result is rounded to T to nearest even, infinite beyond its range. A NaN or infinite scale is multiplied as IEEE
    arithmetic does; where a partial sum may overflow nothing is claimed; -0 equals +0."""

    section = "GEMM"
    dispatched = False
    forms: ClassVar[tuple[Form, ...]] = (Form.DIFFERENCE,)

    def weights(self, inputs: Inputs, options: Options) -> Weights:
        """The weight of a checked call."""
        raise NotImplementedError

    def steps(self, inputs: Inputs, options: Options) -> tuple[Step, ...]:
        """What follows the sum; by default it is stored."""
        return (Step("store", self.activations(inputs).dtype),)

    def ways(self, inputs: Inputs, options: Options) -> list[Way]:
        """The arithmetics of the whole output that are right, the usual one first."""
        return [Way(form) for form in self.forms]

    def activations(self, inputs: Inputs) -> Tensor:
        """``a`` of the inputs, ``[M, K]`` bf16 or f16, as it is."""
        return next(inputs[spec.name] for spec in self.inputs if spec.kind is Kind.VALUES)

    def plans(self, inputs: Inputs, options: Options) -> list[Plan]:
        """What a right kernel computes."""
        form = self.ways(inputs, options)[0].form
        return [Plan(self.activations(inputs), self.weights(inputs, options), form, self.steps(inputs, options))]

    def shape(self, plans: list[Plan], inputs: Inputs) -> tuple[int, ...]:
        """The shape of the output."""
        return self.activations(inputs).shape[0], plans[0].weights.codes.shape[1]

    # --- what follows ---------------------------------------------------------------------------------------

    def placed(self, plans: list[Plan], parts: list[Tensor], inputs: Inputs) -> Tensor:
        """``parts``, float64 ``[M, N]`` of each plan, in its rows of one output, float64; NaN in the others."""
        *lead, n = self.shape(plans, inputs)
        flat = torch.full((math.prod(lead), n), torch.nan, dtype=torch.float64, device=parts[0].device)
        for plan, part in zip(plans, parts, strict=True):
            flat[slice(None) if plan.rows is None else plan.rows] = part
        return flat.reshape(*lead, n)

    def value(self, plans: list[Plan], inputs: Inputs) -> Tensor:
        """The output of these plans ``[M, N]``, each sum exact, in the dtype of the store."""
        parts = [plan.finished(exact(plan.product(plan.form))) for plan in plans]
        return rounded_to(self.placed(plans, parts, inputs), plans[0].steps[-1].dtype)

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        return self.value(self.plans(inputs, self.check(inputs, options)), inputs)

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        inputs = fold(call, faults, Stage.READ, dict(call.inputs))
        options = fold(call, faults, Stage.OPTIONS, dict(call.resolved))
        plans = [fold(call, faults, Stage.RECIPE, plan) for plan in self.plans(inputs, options)]
        outputs: dict[str, Tensor] = fold(call, faults, Stage.WRITE, {"out": self.value(plans, inputs)})
        return outputs

    def outputs(self, call: Call) -> dict[str, Out]:
        plans = self.plans(call.inputs, call.resolved)
        return {"out": Out(self.shape(plans, call.inputs), (plans[0].steps[-1].dtype,))}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        plans = self.plans(call.inputs, call.resolved)
        dtype = plans[0].a.dtype

        def sets(way: Way, name: str) -> Sets:
            def make() -> tuple[Mapping[str, Admissible], str]:
                of_plans = [self.ends(plan, way, name) for plan in plans]
                low, high, expected, unknown = (
                    self.placed(plans, list(parts), call.inputs) for parts in zip(*of_plans, strict=True)
                )
                return {"out": Admissible(low, high, expected, open=unknown != 0)}, f"weights {way.form}; {name}"

            return Elements(make, wider=name != IEEE32, mistrust=lambda found: _mistrust(plans, found))

        ways = self.ways(call.inputs, call.resolved)
        wide = [sets(way, name) for way in ways if not way.roundings for name in (IEEE32, *_classes(dtype))]
        return [*wide, *(sets(way, f"partial sums in {dtype}") for way in ways if way.roundings)]

    def ends(self, plan: Plan, way: Way, name: str) -> tuple[Tensor, ...]:
        """Least and largest output of a plan, that of the exact sum, and where nothing is claimed (1.0); float64 ``[M,
        N]``. Every step is monotone, so both ends of the sum go through them."""
        product = plan.product(way.form)
        value = exact(product)
        if way.roundings:
            unscaled = replace(plan.weights, scale=None).values(Form.EXACT, plan.a.dtype)
            reach = decode(plan.a).abs() @ unscaled.abs() if way.form is Form.EXACT else None
            interval = narrow_bound(product, plan.a.dtype, way.roundings, reach)
        else:
            interval = interval_of(product, name)
        center = plan.finished(value)
        ends = [plan.finished(value, offset) for offset in (interval.lo - value.slack, interval.hi + value.slack)]
        special = ~torch.isfinite(value.hi)
        low, high = torch.minimum(*ends), torch.maximum(*ends)
        for step in plan.steps if way.roundings else ():
            if step.word == "plus" and step.by is not None:  # the summand may meet these roundings as well
                more = roundings_of(way.roundings, step.dtype) * step.by.abs()
                low, high = _to(low - more, step.dtype), _to(high + more, step.dtype)
        low, high = (torch.where(special, center, end) for end in (low, high))
        unknown = torch.isnan(low + high) & torch.isfinite(center)
        unknown = unknown if interval.open is None else unknown | interval.open & ~special
        return low, high, center, unknown.to(torch.float64)


def _classes(dtype: torch.dtype) -> tuple[str, ...]:
    """Tensor cores that multiply this dtype, K cut anywhere."""
    word = "bf16" if dtype is torch.bfloat16 else "f16"
    known = {schedule.name for arch in ("sm80", "sm90", "sm100") for schedule in schedules(arch)}
    return tuple(name + SPLIT for arch in ("sm90", "sm80", "sm100") if (name := f"{arch}.{word}.chain") in known)


def _mistrust(plans: list[Plan], found: Found) -> str | None:
    scales = [plan.weights.scale for plan in plans if plan.weights.scale is not None]
    return (all_equal("the scales", scales) if scales else None) or mostly_zero(found["out"])


def _to(x: Tensor, dtype: torch.dtype) -> Tensor:
    return decode(rounded_to(x, dtype))


def groups(k: int, rows: int) -> Tensor:
    """The group of each of ``k`` rows under ``rows`` scales a column, int64 ``[K]``.

    Raises ShapeError: the groups are not equal."""
    if rows < 1 or k % rows:
        raise ShapeError(f"K={k} rows in {rows} groups: pass scales [G, N] with G a divisor of K (1: a group of -1)")
    return torch.arange(k, device="cpu") // (k // rows)
