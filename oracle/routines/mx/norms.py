"""Contracts of an RMS norm quantised to blocks that share a scale byte, in one kernel: MXFP8, MXFP4 and NVFP4.

    value      the norm of ``x [+ residual]`` times ``weight``, as of :mod:`oracle.routines.fused.kernels`
    q, scale   codes and scale bytes of that value, as of :mod:`oracle.routines.mx.contract`
    residual   ``RN(x + residual)`` in the dtype of ``x``, where there is one

The value is an interval, and so are scales and codes. Not covered: a sum that is rounded before its norm.

NaN makes its row NaN, an infinity its row 0 and itself NaN, which are quantised as the recipe has them.
Source: derived from FlashInfer 0.6.18 (``rmsnorm_fp4quant``: the norm and the quantiser in one kernel) and the two
modules above, whose promises these put together.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from oracle.numbers.quantize import Ends, Prepared, prepare
from oracle.numbers.recipes import Recipe
from oracle.routines.base import Call, Inputs, Options, OptionSpec, Out, TensorSpec, register
from oracle.routines.fault import Fault, Stage, fold
from oracle.routines.fused.kernels import EPSILON, NORMALISES, OPTIONAL, WEIGHT, NormContract, RmsNormPerBlockQuant, X
from oracle.routines.mx.contract import (
    GLOBAL,
    LAYOUT,
    MXFP4,
    MXFP8,
    BlockQuantiser,
    BlockSets,
    Mxfp4Quantize,
    Mxfp8Quantize,
    Nvfp4Quantize,
    positive_scale,
)
from oracle.routines.quantisers.contract import run_quantiser
from oracle.verdict.compare import Status, Verdict
from oracle.verdict.sets import Found, Sets, judge_bits, rounded_to, worst_of

ROUNDING = OptionSpec(
    "rounding", "each", ("each", "product", "none"), "where (z r) weight is rounded to the dtype of x; none: nowhere"
)
_NORM = RmsNormPerBlockQuant()
EARLY = (Stage.READ, Stage.OPTIONS, Stage.STORE)


class NormedBlocks(BlockQuantiser):
    """What is quantised is the RMS norm of a row, T the dtype of ``x``, each operation rounded to float32:

        z = x [+ residual]        r = 1 / sqrt(mean(z^2) + epsilon)
        value = T(T(z r) weight)   rounding each
                T((z r) weight)    product
                (z r) weight       none

    ``mean`` is a float32 sum in any order and ``z`` is float32; ``residual`` is returned as ``T(x + residual)``, where
    it is not given as ``x`` or not at all. A device's root errs, so that the value, its scale and its codes are
    intervals."""

    traits = frozenset({NORMALISES})
    gpu = False  # no capture is of one
    returns = ("q", "scale", "residual")
    options: ClassVar[tuple[OptionSpec, ...]] = (LAYOUT, EPSILON, ROUNDING)
    plain: ClassVar[BlockQuantiser]
    sum_in_dtype: ClassVar[bool] = False
    rounding: ClassVar[str] = "each"
    production = "rms_norm_block_scaled_quant"

    def refuse(self, inputs: Inputs, options: Options) -> None:
        NormContract.refuse(_NORM, inputs, options)

    def prepared_of(self, inputs: Inputs, options: Options) -> Prepared:
        value = _NORM.value(inputs, options)
        x, unknown = value.expected, value.sets.open
        free = torch.isnan(x) if unknown is None else torch.isnan(x) | unknown
        low, high = (torch.where(free, x, rounded_to(e, value.dtype)) for e in (value.sets.low, value.sets.high))
        return prepare(x, global_scale=inputs.get("global_scale"), ends=Ends(low, high, unknown))

    def outputs(self, call: Call) -> dict[str, Out]:
        x = call.inputs["x"]
        due = Out(tuple(x.shape), (x.dtype,), optional="residual" not in call.inputs)
        return super().outputs(call) | {"residual": due}

    def total(self, inputs: Inputs) -> Tensor:
        """``x [+ residual]`` ``[M, H]`` in the dtype of ``x``."""
        return rounded_to(_NORM.summed(inputs, rounded=True), inputs["x"].dtype)

    def published(self, outputs: Found, call: Call) -> dict[str, Tensor]:
        return super().published(outputs, call) | {"residual": self.total(call.inputs)}

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        inputs = fold(call, faults, Stage.READ, dict(call.inputs))
        options = fold(call, faults, Stage.OPTIONS, dict(call.resolved))
        x: Tensor = fold(call, faults, Stage.STORE, _NORM.value(inputs, options).expected)
        named = {"x": x} | {name: inputs[name] for name in ("global_scale",) if name in inputs}
        inside = Call(self.plain, named, {"layout": call.resolved["layout"]}).checked()
        rest = tuple(fault for fault in faults if not set(EARLY) & set(fault.changes))
        outputs = self.published(run_quantiser(inside, rest), call) | {"residual": self.total(inputs)}
        written: dict[str, Tensor] = fold(call, faults, Stage.WRITE, outputs)
        return written

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [NormedSets(self, call, self.recipes(call, numerics))]

    def refused(self, call: Call, outputs: Found, right: Found) -> dict[str, Tensor] | None:
        bad = super().refused(call, outputs, right)
        if bad is not None and "residual" in outputs:
            bad["residual"] = ~same(outputs["residual"], self.total(call.inputs))
        return bad


class NormedSets(BlockSets):
    """Codes and scales as of every block quantiser, and the bits of the sum."""

    def judge(self, outputs: Found) -> Verdict:
        judged = super().judge(outputs)
        if judged.status is Status.FAILED or "residual" not in outputs:
            return judged
        assert isinstance(self.contract, NormedBlocks)
        total = judge_bits(outputs["residual"], self.contract.total(self.call.inputs), output="residual")
        return worst_of([total, judged]) if total.status is Status.FAILED else judged


def same(x: Tensor, y: Tensor) -> Tensor:
    """Where ``x`` and ``y`` ``[M, H]``, of one dtype of 16 or 32 bits, have equal bits or are NaN both; bool
    ``[M, H]``."""
    size = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return (x.contiguous().view(size) == y.contiguous().view(size)) | torch.isnan(x) & torch.isnan(y)


@register
class RmsNormMxfp8Quantize(NormedBlocks):
    name = "rms_norm_mxfp8_quantize"
    summary = "RMS norm of a row [+ residual, in float32], quantised to MXFP8 (E4M3)"
    source = "derived: the norm of rms_norm_per_block_quant under the recipes of mxfp8_quantize"
    inputs: ClassVar[tuple[TensorSpec, ...]] = (X, WEIGHT, OPTIONAL)
    plain = Mxfp8Quantize()

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return MXFP8


@register
class RmsNormMxfp4Quantize(NormedBlocks):
    name = "rms_norm_mxfp4_quantize"
    summary = "RMS norm of a row [+ residual, in float32], quantised to MXFP4"
    source = "derived: the norm of rms_norm_per_block_quant under the recipes of mxfp4_quantize"
    inputs: ClassVar[tuple[TensorSpec, ...]] = (X, WEIGHT, OPTIONAL)
    packed = True
    plain = Mxfp4Quantize()

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return MXFP4


@register
class RmsNormNvfp4Quantize(NormedBlocks):
    name = "rms_norm_nvfp4_quantize"
    summary = "RMS norm of a row [+ residual, in float32], quantised to NVFP4"
    source = "derived: the norm of rms_norm_per_block_quant under the recipes of nvfp4_quantize"
    inputs: ClassVar[tuple[TensorSpec, ...]] = (X, WEIGHT, OPTIONAL, GLOBAL)
    width, packed, scale_dtype = Nvfp4Quantize.width, True, torch.float8_e4m3fn
    plain = Nvfp4Quantize()

    def refuse(self, inputs: Inputs, options: Options) -> None:
        positive_scale(inputs)

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return self.plain.declared(inputs, {"is_global_scale_inversed": False})
