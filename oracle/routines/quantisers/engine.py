"""Runs a right quantiser with faults put into it; the stages are those of :mod:`oracle.numbers.quantize`, opened up.

x -> RECIPE -> AMAX -> scale and inverse -> QUOTIENT -> CODES -> SCALE as published
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.numbers.formats import E4M3FN, decode, from_codes, of_dtype
from oracle.numbers.quantize import Prepared, Steps, prepare, quotients, scale_steps
from oracle.numbers.recipes import Recipe, ScaleFormula
from oracle.numbers.rounding import Overflow, Rounding, encode, to_dtype
from oracle.numbers.scaling import Grid
from oracle.routines.fault import Call, Fault, Stage, fold, touches


def run_quantiser(call: Call, faults: tuple[Fault, ...]) -> dict[str, Tensor]:
    """``{"q": codes, "scale": scale}`` of the mutant, the scale before it is published."""
    given = fold(call, faults, Stage.READ, dict(call.inputs))
    x = prepare(given["x"], scale=given.get("scale"), scale_ub=given.get("scale_ub"))
    recipe: Recipe = fold(call, faults, Stage.RECIPE, call.recipe)
    cells = x.grid(recipe.block)
    steps = _steps(call, x, recipe, faults)
    values = Values(x, recipe, steps, cells)
    quotient = fold(call, faults, Stage.QUOTIENT, values)
    assert isinstance(quotient, Values)
    codes = fold(call, faults, Stage.CODES, cells.join(quotient.codes()))
    scale = fold(call, faults, Stage.SCALE, steps.scale.reshape(cells.scale_shape))
    if "scale" in given:
        return {"q": from_codes(codes, E4M3FN), "scale": given["scale"]}
    stored = to_dtype(scale, torch.float32, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
    return {"q": from_codes(codes, E4M3FN), "scale": stored}


def _steps(call: Call, x: Prepared, recipe: Recipe, faults: tuple[Fault, ...]) -> Steps:
    if recipe.formula is ScaleFormula.GIVEN or not touches(faults, Stage.AMAX):
        return x.steps(recipe)
    amax = fold(call, faults, Stage.AMAX, Amax(x, recipe))
    values = amax.right if isinstance(amax, Amax) else amax
    return scale_steps(values, recipe, of_dtype(x.dtype), scale_ub=x.scale_ub)


class Amax:
    """What a change of stage AMAX gets; it returns float64 ``[down, 1, across, 1]``."""

    def __init__(self, x: Prepared, recipe: Recipe) -> None:
        self.x, self.recipe = x, recipe

    @property
    def right(self) -> Tensor:
        """The right amax of every block."""
        return self.x.amax(self.recipe)

    @property
    def blocks(self) -> Tensor:
        """The values ``[down, r, across, c]``."""
        return self.x.blocks(self.recipe.block)


class Values:
    """What a change of stage QUOTIENT gets and returns: the quotients, and how they are rounded to codes."""

    def __init__(
        self,
        x: Prepared,
        recipe: Recipe,
        steps: Steps,
        cells: Grid,
        *,
        quotient: Tensor | None = None,
        rounding: Rounding = Rounding.NEAREST_EVEN,
        overflow: Overflow = Overflow.SATURATE,
    ) -> None:
        self.x, self.recipe, self.steps, self.cells = x, recipe, steps, cells
        self.rounding, self.overflow = rounding, overflow
        self.quotient = self._right() if quotient is None else quotient

    def altered(
        self, *, quotient: Tensor | None = None, rounding: Rounding | None = None, overflow: Overflow | None = None
    ) -> Values:
        """The same with another quotient, rounding or overflow."""
        return Values(
            self.x,
            self.recipe,
            self.steps,
            self.cells,
            quotient=self.quotient if quotient is None else quotient,
            rounding=self.rounding if rounding is None else rounding,
            overflow=self.overflow if overflow is None else overflow,
        )

    def codes(self) -> Tensor:
        """uint8 codes of the blocks."""
        codes = encode(self.quotient, E4M3FN, rounding=self.rounding, overflow=self.overflow)
        return codes.masked_fill(torch.isnan(self.quotient), self.recipe.code_of_nan)

    def _right(self) -> Tensor:
        return quotients(self.x.blocks(self.recipe.block), self.steps.scale, self.steps.inverse, self.recipe)


def values_of(codes: Tensor) -> Tensor:
    """float64 values of E4M3 codes given as uint8."""
    return decode(codes, E4M3FN)
