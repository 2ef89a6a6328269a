"""Contracts of fused quantisers: what an engine launches around a product, as one value per element and one recipe.

    value      what a kernel computes before it quantises: an interval on the grid of the dtype that it is held in
    recipe     amax, scale and codes of that value (:mod:`oracle.numbers.recipes`)

A device's exponential, reciprocal square root and order of summation leave the value an interval; so are then the scale
and the codes (:mod:`oracle.bounds.quantiser`, *values known up to an interval*). Each contract says which roundings
come before the quantiser: they are part of what it promises, and another library's are another recipe. Judged are the
rows that the call specifies: the first ``masked_m[e]`` of every expert, or all.

``numerics`` names one recipe, as for the quantisers. Faults of the value have the stages READ, OPTIONS and STORE (the
value itself); those of the quantiser RECIPE, AMAX, QUOTIENT, CODES and SCALE, on the specified rows as a matrix.

NaN of the value is quantised as the recipe has it; a NaN that is moved stays.
Source: derived in :mod:`oracle.bounds.quantiser`; the kernels as named by each contract.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from oracle.bounds.interval import Admissible
from oracle.bounds.quantiser import identify, kin
from oracle.errors import OptionError, ShapeError
from oracle.numbers.quantize import WIDE, Ends, Prepared, prepare
from oracle.numbers.recipes import Recipe, ScaleFormula
from oracle.numbers.scaling import grid
from oracle.routines.base import (
    E4M3,
    F32,
    INTEGERS,
    Call,
    Contract,
    Inputs,
    Operands,
    Options,
    OptionSpec,
    Out,
    Output,
    TensorSpec,
)
from oracle.routines.fault import Fault, Stage, fold, touches
from oracle.routines.quantisers.contract import (
    QUANTISER_INSIDE,
    PerTokenGroupQuantFp8,
    QuantiserContract,
    QuantiserSets,
    run_quantiser,
)
from oracle.routines.traits import Kind
from oracle.tensorcore.identify import Match
from oracle.verdict.compare import Status, Verdict, compare, verdict
from oracle.verdict.sets import Found, Range, Sets, judge_bits, ranged, rounded_to, worst_of

SCALE = TensorSpec("scale", Kind.SCALES, F32, None, "one value, given: it multiplies on dequantisation")
SCALE_UB = TensorSpec("scale_ub", Kind.BOUND, F32, None, "one value: an upper bound", optional=True)
MASKED = TensorSpec("masked_m", Kind.COUNTS, INTEGERS, ("E",), "rows of each expert that are in use")
COLUMNS = OptionSpec("is_scale_transposed", False, (False, True), "scales of one group lie side by side in memory")
INNER = (
    TensorSpec("x", Kind.VALUES, WIDE, ("M", "K"), "the value, one row for each specified row"),
    TensorSpec("scale", Kind.SCALES, F32, None, "the given scale", optional=True),
    TensorSpec("scale_ub", Kind.BOUND, F32, None, "an upper bound", optional=True),
)
CONTIGUOUS, COLUMN_MAJOR = ({"column_major_scales": columns, "tma_aligned_scales": False} for columns in (False, True))
_GROUPS = PerTokenGroupQuantFp8()


@dataclass(frozen=True)
class Value:
    """What is quantised, ``[..., K]``: the interval, and the dtype that it is held in."""

    sets: Admissible
    dtype: torch.dtype

    @property
    def expected(self) -> Tensor:
        """The expected value ``[..., K]`` in its dtype."""
        return rounded_to(self.sets.expected, self.dtype)


class Inner(QuantiserContract):
    """The quantiser inside the fused call ``outer``, on rows ``[M, K]`` of a value; never registered."""

    inputs: ClassVar[tuple[TensorSpec, ...]] = INNER

    def __init__(self, outer: Call, recipes: Sequence[Recipe], between: Prepared | None) -> None:
        self.name = outer.contract.name  # type: ignore[misc]
        self.outer, self.admitted, self.between = outer, tuple(recipes), between

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return self.admitted

    def prepared(self, call: Call) -> Prepared:
        return super().prepared(call) if self.between is None else self.between


class FusedContract(Contract):
    """A value is computed and quantised at once, by one of the recipes below.

    The value may err as a device's exponential, reciprocal square root and order of summation do; it is rounded where
    the contract says so, to nearest even, and then quantised: amax, scale and codes are those of the rounded value.
    What NaN, infinities, -0 and zeros of the value give is what the recipe says. Where ``masked_m`` is an input, the
    first ``masked_m[e]`` rows (0 to T) of expert ``e`` are quantised; the codes and scales of the others may hold
    anything, and those of the input are not read; one row at least is in use. Given scales hold one value, which
    is used as the recipe says, whatever it is. ``is_scale_transposed`` changes the strides of the scales alone, to
    ``(1, M)`` in the last two axes, and they are compared. Other strides are free.

    Subclasses
    ----------
    A subclass writes ``value`` and ``declared``; ``shape`` where the codes have not the shape of ``x``, ``modelled``
    where it knows kernels bit for bit. Truth, prediction, judgement, diagnosis and every fault of the quantiser inside
    come with it; a contract that returns no ``scale`` is given one as an input of that name.
    """

    traits = frozenset({QUANTISER_INSIDE})

    section = "Fused quantisation"
    loses = True
    returns: ClassVar[tuple[str, ...]] = ("q", "scale")
    beside: ClassVar[str] = "padding of scale"  # what `zeros` are of
    interval: ClassVar[bool] = True  # whether admissible outputs are an interval around the expected ones
    gpu = True

    @abstractmethod
    def value(self, inputs: Inputs, options: Options) -> Value:
        """What a right kernel quantises, for checked inputs and options."""

    @abstractmethod
    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        """The recipes that the contract admits for a checked call, the reference first."""

    def others(self, inputs: Inputs, options: Options) -> dict[str, Admissible]:
        """Outputs beside codes and scale, in the dtype of ``x``."""
        return {}

    def modelled(self, inputs: Inputs, options: Mapping[str, object]) -> dict[str, Tensor]:
        """The value bit for bit as known kernels compute it, by what they do; of the value's dtype."""
        return {}

    def given(self, inputs: Inputs) -> dict[str, Tensor]:
        """The scales that the quantiser is given."""
        return {name: inputs[name] for name in ("scale", "scale_ub") if name in inputs}

    def codes(self, matrix: Tensor, inputs: Inputs, fill: float) -> dict[str, Tensor]:
        """The outputs that hold codes, uint8, from ``matrix`` ``[R, K]``, one element for each code of the specified
        rows; ``fill`` elsewhere."""
        return {"q": _whole(matrix, self.rows(inputs), self.shape(inputs), fill)}

    def rows(self, inputs: Inputs) -> Tensor | None:
        """The specified rows, bool ``[E T]``; None where all are."""
        if "masked_m" not in inputs:
            return None
        experts, tokens = inputs["x"].shape[:2]
        return (torch.arange(tokens, device="cpu")[None, :] < inputs["masked_m"].cpu()[:, None]).reshape(-1)

    def publish(self, scale: Tensor, options: Options) -> Tensor:
        """Scales ``scale`` ``[..., G]``, float32, in the layout that the routine returns: ``[..., G]``, float32."""
        return _GROUPS.publish(scale, COLUMN_MAJOR if options.get(COLUMNS.name) else CONTIGUOUS)

    def logical(self, scale: Tensor, shape: tuple[int, ...], options: Options) -> Tensor:
        """The inverse of :meth:`publish`: float32 ``[..., G]`` out of ``scale`` ``[..., G]``. Raises ShapeError or
        LayoutError where the scale is not laid out so."""
        return _GROUPS.logical(scale, shape, COLUMN_MAJOR if options.get(COLUMNS.name) else CONTIGUOUS)

    def zeros(self, outputs: Found, call: Call) -> Tensor:
        """Bytes of the published scales behind those of any group, uint8 of any shape: zeros are due there. Raises
        OptionError: an option of the call is no size."""
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    # --- what follows ---------------------------------------------------------------------------------------

    @property
    def takes_numerics(self) -> bool:
        return True

    def refuse(self, inputs: Inputs, options: Options) -> None:
        for name in ("scale", "scale_ub"):
            if name in inputs and inputs[name].numel() != 1:
                raise ShapeError(f"{name} has shape {list(inputs[name].shape)}; it must hold one value")
        if "masked_m" in inputs:
            tokens, used = inputs["x"].shape[1], inputs["masked_m"]
            if bool((used < 0).any()) or bool((used > tokens).any()):
                raise OptionError(f"masked_m {used.tolist()} is not within 0 and the {tokens} rows of an expert")
            if not bool((used > 0).any()):
                raise ShapeError("masked_m names no row of any expert; there is nothing to judge")

    @final
    def inner(self, call: Call) -> Call:
        """The quantiser's part of a checked call: the specified rows of the value, with its interval."""
        return call.cached("inner", lambda: self._inner(call))

    def _inner(self, call: Call) -> Call:
        value = call.cached("value", lambda: self.value(call.inputs, call.resolved))
        recipes, scales = self.declared(call.inputs, call.resolved), self.given(call.inputs)
        x, (low, high) = value.expected, (rounded_to(e, value.dtype) for e in (value.sets.low, value.sets.high))
        nothing = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
        unknown = nothing if value.sets.open is None else value.sets.open
        nan = torch.isnan(x)
        low, high = (torch.where(nan | unknown, x, end) for end in (low, high))
        rows = self.rows(call.inputs)
        x, low, high, unknown = (matrix_of(t, rows) for t in (x, low, high, unknown))
        between = prepare(x, **scales, ends=Ends(low, high, unknown))
        return Call(Inner(call, recipes, between), {"x": x, **scales})

    def operands(self, call: Call) -> Operands:
        shape, rows = self.shape(call.inputs), self.rows(call.inputs)
        count = math.prod(shape[:-1]) if rows is None else int(rows.sum())
        return Operands({}, (count, shape[-1]), recipes=self.declared(call.inputs, call.resolved))

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        """The shape of the codes."""
        return tuple(inputs["x"].shape)

    def outputs(self, call: Call) -> dict[str, Out]:
        shape, rows = self.shape(call.inputs), self.rows(call.inputs)
        recipe = self.declared(call.inputs, call.resolved)[0]
        outs = {"q": Out(shape, E4M3, _spread(rows, shape))}
        if "scale" in self.returns:
            of_scale = grid(shape, recipe.block).scale_shape
            dtypes = (*F32, torch.bfloat16) if recipe.formula is ScaleFormula.BF16_MULTIPLY else F32
            outs["scale"] = Out(of_scale, dtypes, _spread(rows, of_scale))
        for name, sets in self.others(call.inputs, call.resolved).items():
            absent = name in {spec.name for spec in self.inputs} and name not in call.inputs
            outs[name] = Out(tuple(sets.expected.shape), (call.inputs["x"].dtype,), optional=absent)
        return outs

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        inner = self.inner(call)
        assert isinstance(inner.contract, Inner)
        return [FusedSets(self, call, QuantiserSets(inner.contract, inner, inner.contract.recipes(inner, numerics)))]

    def split(self, outputs: Found, call: Call) -> dict[str, Tensor]:
        """Codes and logical scale of the specified rows, as the inner quantiser returns them."""
        rows, shape = self.rows(call.inputs), self.shape(call.inputs)
        recipe = self.declared(call.inputs, call.resolved)[0]
        if "scale" not in self.returns:
            return {"q": matrix_of(outputs["q"], rows), "scale": self.given(call.inputs)["scale"].reshape(1)}
        scale = self.logical(outputs["scale"], grid(shape, recipe.block).scale_shape, call.resolved)
        return {"q": matrix_of(outputs["q"], rows), "scale": matrix_of(scale, rows)}

    def published(self, outputs: Found, inputs: Inputs, call: Call) -> dict[str, Tensor]:
        """The outputs of the routine from codes and scale of the specified rows; NaN elsewhere."""
        rows, shape, dtype = self.rows(inputs), self.shape(call.inputs), outputs["q"].dtype
        tensors = {name: q.view(dtype) for name, q in self.codes(outputs["q"].view(torch.uint8), inputs, 0x7F).items()}
        if "scale" in self.returns:
            recipe = self.declared(call.inputs, call.resolved)[0]
            scale = _whole(outputs["scale"], rows, grid(shape, recipe.block).scale_shape, torch.nan)
            tensors["scale"] = self.publish(scale, call.resolved)
        return tensors

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        inputs = fold(call, faults, Stage.READ, dict(call.inputs))
        options = fold(call, faults, Stage.OPTIONS, dict(call.resolved))
        moved = touches(faults, Stage.READ, Stage.OPTIONS)
        value = self.value(inputs, options) if moved else call.cached("value", lambda: self.value(inputs, options))
        x = fold(call, faults, Stage.STORE, value.expected)
        x = matrix_of(x, self.rows(inputs))
        inside = Call(Inner(call, self.declared(inputs, options), None), {"x": x, **self.given(inputs)})
        rest = tuple(fault for fault in faults if not {Stage.READ, Stage.OPTIONS} & set(fault.changes))
        quantised = run_quantiser(inside, rest)
        outputs = self.published(quantised, inputs, call)
        for name, sets in self.others(inputs, options).items():
            outputs[name] = rounded_to(sets.expected, inputs["x"].dtype)
        written: dict[str, Tensor] = fold(call, faults, Stage.WRITE, outputs)
        return written

    def reference(self, inputs: Inputs, **options: object) -> dict[str, Tensor]:
        return self.kernel(Call(self, inputs, options).checked())

    def predict(self, inputs: Inputs, *, numerics: str | None, **options: object) -> dict[str, Tensor]:
        """The bits of one recipe on the expected value, the contract's first when none is named."""
        call = Call(self, inputs, options).checked()
        inner = self.inner(call)
        outputs = inner.contract.predict(inner.inputs, numerics=numerics)
        assert isinstance(outputs, dict)
        beside = {n: rounded_to(s.expected, inputs["x"].dtype) for n, s in self.others(inputs, call.resolved).items()}
        return self.published(outputs, inputs, call) | beside

    def identify(self, inputs: Inputs, output: Output, *, arch: str | None, **options: object) -> list[Match]:
        """Recipes by the fraction of codes and scales that they reproduce, on the expected value and on those of known
        kernels, best first."""
        call = Call(self, inputs, options).checked()
        inner, codes = self.inner(call), self.split(self.validate_output(call, output), call)
        matches = inner.contract.identify(inner.inputs, codes, arch=arch)
        for name, value in self.modelled(inputs, call.resolved).items():
            other = {**inner.inputs, "x": matrix_of(value, self.rows(inputs))}
            modelled = inner.contract.identify(other, codes, arch=arch)
            matches += [Match(f"{m.schedule} of {name}", m.equal, m.compared) for m in modelled]
        return sorted(matches, key=lambda m: -m.equal)

    def refused(self, call: Call, outputs: Found, right: Found) -> dict[str, Tensor] | None:
        inner = self.inner(call)
        bad = inner.contract.refused(inner, self.split(outputs, call), self.split(right, call))
        assert bad is not None
        rows = self.rows(call.inputs)
        masks = self.codes(bad["q"], call.inputs, 0)
        if "scale" in self.returns:
            masks["scale"] = _whole(bad["scale"], rows, tuple(outputs["scale"].shape), 0)
        for name, sets in self.others(call.inputs, call.resolved).items():
            masks[name] = compare(outputs[name], sets).bad
        return masks


@dataclass(frozen=True)
class FusedSets(Sets):
    """The codes and scales that one recipe admits for the value, and the intervals of what else is returned."""

    contract: FusedContract
    call: Call
    quantiser: QuantiserSets

    def judge(self, outputs: Found) -> Verdict:
        codes = self.contract.split(outputs, self.call)
        judged = self.quantiser.judge(codes)
        if judged.outside == 0 and judged.matches is None and (name := self._modelled(codes)):
            judged = replace(judged, matches=name, summary=f"{judged.summary}; bits of {name}")
        if judged.status is not Status.FAILED and (rest := self.contract.zeros(outputs, self.call)).numel():
            zeros = judge_bits(rest, torch.zeros_like(rest), output=self.contract.beside)
            judged = worst_of([zeros, judged]) if zeros.status is Status.FAILED else judged
        others = self.contract.others(self.call.inputs, self.call.resolved)
        beside = [
            verdict(compare(outputs[name], sets, output=name), basis="one rounding") for name, sets in others.items()
        ]
        return worst_of([judged, *beside]) if beside else judged

    def _modelled(self, codes: Found) -> str | None:
        """The recipe and the kernel's own value that give an output's bits."""
        call, inner = self.call, self.quantiser.call
        contract, rows = self.quantiser.contract, self.contract.rows(call.inputs)
        q, scale = contract.split(codes, inner, self.quantiser.recipes)
        for name, value in self.contract.modelled(call.inputs, call.resolved).items():
            x = contract.prepared_of({**inner.inputs, "x": matrix_of(value, rows)}, inner.resolved)
            for recipe in identify(x, q, scale, among=kin(self.quantiser.recipes[0])):
                return f"{recipe} of {name}"
        return None

    def ranges(self, expected: Found) -> dict[str, Range] | None:
        """The sets of the first recipe for the expected scale; rows that are not specified are free."""
        inner = self.quantiser.ranges(self.contract.split(expected, self.call)) if self.contract.interval else None
        if inner is None:
            return None
        inputs, codes = self.call.inputs, inner["q"]
        ends = [self.contract.codes(end.view(torch.uint8), inputs, 0x7F) for end in (codes.low, codes.high)]
        free, dtype = self.contract.codes(codes.free, inputs, 1), codes.low.dtype
        intervals = {name: Range(ends[0][name].view(dtype), ends[1][name].view(dtype), free[name]) for name in free}
        if "scale" in expected:
            rows, shape, r = self.contract.rows(inputs), tuple(expected["scale"].shape), inner["scale"]
            low, high = (_whole(end, rows, shape, torch.nan) for end in (r.low, r.high))
            intervals["scale"] = Range(low, high, _whole(r.free, rows, shape, 1))
        for name, sets in self.contract.others(self.call.inputs, self.call.resolved).items():
            intervals[name] = ranged(sets, expected[name].dtype)
        return intervals


def matrix_of(x: Tensor, rows: Tensor | None) -> Tensor:
    """``x`` ``[..., K]`` of any dtype as a matrix ``[R, K]`` of the same dtype: the specified ``rows`` (bool ``[R]``),
    or all."""
    raw = x.view(torch.uint8) if x.dtype.itemsize == 1 and x.is_floating_point() else x
    matrix = raw.reshape(-1, raw.shape[-1])
    chosen = matrix if rows is None else matrix[rows.to(x.device)]
    return chosen.contiguous().view(x.dtype)


def _whole(x: Tensor, rows: Tensor | None, shape: tuple[int, ...], fill: float) -> Tensor:
    """The inverse of :func:`_matrix`, ``fill`` in the other rows."""
    if rows is None:
        return x.reshape(shape)
    out = torch.full((rows.numel(), shape[-1]), fill, dtype=x.dtype, device=x.device)
    out[rows.to(x.device)] = x.reshape(-1, shape[-1])
    return out.reshape(shape)


def _spread(rows: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """The specified rows of an output, over its elements."""
    return None if rows is None else rows.reshape(*shape[:-1], 1).expand(shape)
