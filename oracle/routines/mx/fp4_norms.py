"""Contracts of RMS norms to FP4, by themselves and after the sum of an all-reduce; T is the dtype of ``x``.

    rmsnorm_fp4quant, rmsnorm_mxfp4quant            T(x weight) r in float32; blocks of 16 under E4M3, of 32 under E8M0
    add_rmsnorm_fp4quant, add_rmsnorm_mxfp4quant    the same of z = T(x + residual)
    allreduce_fusion_fp4                            T((z r) (weight + weight_bias)) of that z, to NVFP4
    trtllm_moe_allreduce_fusion                     the same where x is T-sums of what the active experts gave
    trtllm_moe_finalize_allreduce_fusion            the same where x is the T-sum of a token's slots

``r = 1 / sqrt(mean(z^2) + epsilon)``, a float32 sum in any order. The sum with a residual is returned, and the norm
where a kernel stores it; both are in T. An all-reduce is that of one rank. Scale bytes in tiles have padding that
nobody writes. The global scale is about 2688/amax and multiplies, although FlashInfer's text says that the norm is
divided by it.

Sources: FlashInfer 0.6.18.post1 flashinfer/cute_dsl/rmsnorm_fp4quant.py, add_rmsnorm_fp4quant.py,
include/flashinfer/comm/trtllm_allreduce_fusion.cuh, trtllm_moe_allreduce_fusion.cuh. Not covered: both layouts of the
scales at once.

NaN and infinities are as the recipe has them; a NaN makes its row NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.interval import Admissible
from oracle.bounds.norm import U, reciprocal_norm
from oracle.errors import DtypeError, OptionError, ShapeError
from oracle.numbers.formats import FP32, decode, of_dtype
from oracle.numbers.quantize import Ends, Prepared, prepare
from oracle.numbers.recipes import Recipe
from oracle.numbers.rounding import f32
from oracle.routines.base import F32, Call, Inputs, Options, OptionSpec, Out, TensorSpec, register
from oracle.routines.fault import Fault, Stage, fold
from oracle.routines.fused.kernels import EPSILON, normed
from oracle.routines.fused.norms import BIAS
from oracle.routines.mx.contract import (
    GLOBAL,
    LAYOUT,
    LAYOUTS,
    LINEAR,
    BlockQuantiser,
    BlockSets,
    Mxfp4Quantize,
    Nvfp4Quantize,
)
from oracle.routines.quantisers.contract import run_quantiser
from oracle.routines.traits import Kind
from oracle.truth.moe import nearest
from oracle.verdict.compare import Verdict, compare, verdict
from oracle.verdict.sets import Found, Sets, rounded_to, worst_of

NARROW = (torch.bfloat16, torch.float16)
X = TensorSpec("x", Kind.VALUES, NARROW, ("M", "K"), "activations, K a multiple of the block of a scale")
WEIGHT = TensorSpec("weight", Kind.WEIGHTS, NARROW, ("K",), "of the dtype of x")
RESIDUAL = TensorSpec("residual", Kind.VALUES, NARROW, ("M", "K"), "added; of the dtype of x")
TILES = OptionSpec("layout", LINEAR, (LINEAR, LAYOUTS[0]), "how the scale bytes lie")


class NormedFp4(BlockQuantiser):
    """What is quantised is the RMS norm of a row times its weight."""

    packed = True
    owns_padding = False
    gpu = False  # its libraries compile it for sm100 and later alone, and no capture is of one
    dispatched = False
    weight_first: ClassVar[bool] = True  # T(z weight) r in float32, or T((z r) weight)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        for name in {"weight", "residual", "experts", "shared"} & {*inputs}:
            if inputs[name].dtype != inputs["x"].dtype:
                raise DtypeError(f"{name} has dtype {inputs[name].dtype}, x {inputs['x'].dtype}; pass one dtype")
        epsilon, bias = options["epsilon"], options.get("weight_bias", 0.0)
        if not isinstance(epsilon, float) or not 0 < epsilon < 1:
            raise OptionError(f"epsilon={epsilon!r} is no float between 0 and 1")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= 2.0**10:
            raise OptionError(f"weight_bias={bias!r} is no number within 1024 of 0")

    def reduced(self, inputs: Inputs, options: Options) -> Tensor:
        """What stands for ``x`` in the sum with the residual, float64 ``[M, K]`` of values of T."""
        return decode(inputs["x"])

    def total(self, inputs: Inputs, options: Options) -> Tensor:
        """The rounded sum with the residual, or ``x``: float64 ``[M, K]``."""
        x = self.reduced(inputs, options)
        if "residual" not in inputs:
            return x
        return nearest(f32(x + decode(inputs["residual"])), of_dtype(inputs["x"].dtype))

    def norm(self, inputs: Inputs, options: Options) -> tuple[Admissible, torch.dtype]:
        """What is quantised, and the dtype that it is held in."""
        z, dtype = self.total(inputs, options), inputs["x"].dtype
        bias, epsilon = (
            f32(torch.tensor(float(str(options.get(name, 0.0))), dtype=torch.float64, device=z.device))
            for name in ("weight_bias", "epsilon")
        )
        w, root = f32(decode(inputs["weight"]) + bias), reciprocal_norm(self.squared(z, options), float(epsilon))
        if not self.weight_first:
            low, high, due = (nearest(f32(end), of_dtype(dtype)) for end in normed(z, w, root, FP32))
        else:
            t = nearest(f32(z * w), of_dtype(dtype))
            ends, due = [t * r for r in (root.low, root.high)], f32(t * f32(root.exact))
            low, high = torch.minimum(*ends), torch.maximum(*ends)
            low, high = f32(low - 2 * U * low.abs()), f32(high + 2 * U * high.abs())
        return Admissible(torch.fmin(low, due), torch.fmax(high, due), due, open=root.open.expand(z.shape)), dtype

    def squared(self, z: Tensor, options: Options) -> Tensor:
        """What the mean square is of, float64 ``[M, K']``, of ``z [M, K]``, float64."""
        change = options.get("squared")  # of a fault
        return change(z) if callable(change) else z

    def prepared_of(self, inputs: Inputs, options: Options) -> Prepared:
        sets, dtype = self.norm(inputs, options)
        held = torch.float32 if self.weight_first else dtype
        due, (low, high) = rounded_to(sets.expected, held), (rounded_to(e, held) for e in (sets.low, sets.high))
        assert sets.open is not None
        free = torch.isnan(due) | sets.open
        low, high = (torch.where(free, due, end) for end in (low, high))
        return prepare(due, global_scale=inputs.get("global_scale"), ends=Ends(low, high, sets.open))

    def others(self, inputs: Inputs, options: Options) -> dict[str, Admissible]:
        """The outputs beside codes and scales, ``[M, K]`` in the dtype of ``x``."""
        found = {}
        if "residual" in self.returns:
            z = self.total(inputs, options)
            found["residual"] = Admissible(z, z, z)
        if "norm" in self.returns:
            found["norm"] = self.norm(inputs, options)[0]
        return found

    def _rows(self, call: Call) -> tuple[int, int]:
        m, k = call.inputs["residual" if "residual" in call.inputs else "x"].shape
        return m, k

    def shape_of_scales(self, call: Call) -> tuple[int, int]:
        m, k = self._rows(call)
        return m, k // self.width

    def shape_of_codes(self, call: Call) -> tuple[int, ...]:
        m, k = self._rows(call)
        return m, k // 2

    def outputs(self, call: Call) -> dict[str, Out]:
        beside = {name for name in self.returns if name not in ("q", "scale")}
        return super().outputs(call) | {name: Out(self._rows(call), (call.inputs["x"].dtype,)) for name in beside}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [NormedSets(self, call, self.recipes(call, numerics))]

    def published(self, outputs: Mapping[str, Tensor], call: Call) -> dict[str, Tensor]:
        return super().published(outputs, call) | self._beside(call.inputs, call.resolved)

    def _beside(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        dtype = inputs["x"].dtype
        return {name: rounded_to(sets.expected, dtype) for name, sets in self.others(inputs, options).items()}

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        inputs = fold(call, faults, Stage.READ, dict(call.inputs))
        options = fold(call, faults, Stage.OPTIONS, dict(call.resolved))
        quantised = self.published(run_quantiser(call, faults), call) | self._beside(inputs, options)
        outputs: dict[str, Tensor] = fold(call, faults, Stage.WRITE, quantised)
        return outputs

    def refused(
        self, call: Call, outputs: Mapping[str, Tensor], right: Mapping[str, Tensor]
    ) -> dict[str, Tensor] | None:
        bad = super().refused(call, outputs, right)
        assert bad is not None
        beside = self.others(call.inputs, call.resolved).items()
        return bad | {name: compare(outputs[name], sets).bad for name, sets in beside}


class NormedSets(BlockSets):
    """Codes and scales of the norm, and what is returned beside them, within its interval."""

    def judge(self, outputs: Found) -> Verdict:
        contract = self.contract
        assert isinstance(contract, NormedFp4)
        beside = [
            verdict(compare(outputs[name], sets, output=name), basis="the norm within its bounds, one rounding")
            for name, sets in contract.others(self.call.inputs, self.call.resolved).items()
        ]
        return worst_of([super().judge(outputs), *beside])


_FROM = "FlashInfer flashinfer/cute_dsl"


@register
class RmsnormFp4quant(NormedFp4, Nvfp4Quantize):
    name = "rmsnorm_fp4quant"
    summary = "RMS norm of a row, of x times weight in T, quantised to NVFP4"
    source = f"{_FROM}/rmsnorm_fp4quant.py, block_size 16"
    inputs: ClassVar[tuple[TensorSpec, ...]] = (X, WEIGHT, GLOBAL)
    options: ClassVar[tuple[OptionSpec, ...]] = (EPSILON, TILES)

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return Nvfp4Quantize.declared(self, inputs, {"is_global_scale_inversed": False})


@register
class AddRmsnormFp4quant(RmsnormFp4quant):
    name = "add_rmsnorm_fp4quant"
    summary = "RMS norm of the rounded sum with a residual, which is returned, quantised to NVFP4"
    source = f"{_FROM}/add_rmsnorm_fp4quant.py, block_size 16"
    inputs = (X, RESIDUAL, WEIGHT, GLOBAL)
    returns = ("q", "scale", "residual")


@register
class RmsnormMxfp4quant(NormedFp4, Mxfp4Quantize):
    name = "rmsnorm_mxfp4quant"
    summary = "RMS norm of a row, of x times weight in T, quantised to MXFP4"
    source = f"{_FROM}/rmsnorm_fp4quant.py, block_size 32"
    inputs: ClassVar[tuple[TensorSpec, ...]] = (X, WEIGHT)
    options: ClassVar[tuple[OptionSpec, ...]] = (EPSILON, TILES)

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return Mxfp4Quantize.declared(self, inputs, {"rounding": "rceil"})


@register
class AddRmsnormMxfp4quant(RmsnormMxfp4quant):
    name = "add_rmsnorm_mxfp4quant"
    summary = "RMS norm of the rounded sum with a residual, which is returned, quantised to MXFP4"
    source = f"{_FROM}/add_rmsnorm_fp4quant.py, block_size 32"
    inputs = (X, RESIDUAL, WEIGHT)
    returns = ("q", "scale", "residual")


# --- after an all-reduce ------------------------------------------------------------------------------------


@register
class AllreduceFusionFp4(RmsnormFp4quant):
    name = "allreduce_fusion_fp4"
    summary = "after an all-reduce: the rounded sum with a residual, its RMS norm, and that quantised to NVFP4"
    source = "FlashInfer allreduce_fusion, kARResidualRMSNormOutFP4Quant"
    inputs: ClassVar[tuple[TensorSpec, ...]] = (X, RESIDUAL, WEIGHT, GLOBAL)
    options: ClassVar[tuple[OptionSpec, ...]] = (EPSILON, BIAS, LAYOUT)
    returns = ("q", "scale", "residual", "norm")
    weight_first = False


def summed(terms: Tensor, start: Tensor, dtype: torch.dtype, *, wide: bool = False) -> Tensor:
    """``start [M, K]`` and ``terms [n, M, K]``, float64, added one after another, each term and sum rounded to the
    dtype: float64 ``[M, K]``. ``wide``: rounded once, at the end. NaN and infinities as IEEE arithmetic gives them."""
    fmt, total = of_dtype(dtype), start
    for term in terms:
        total = total + term if wide else nearest(total + nearest(f32(term), fmt), fmt)
    return nearest(f32(total), fmt)


@register
class TrtllmMoeAllreduceFusion(AllreduceFusionFp4):
    """``y = sum_a T(experts[a] factors[a])``, the experts one after the other, each sum rounded to T; then ``+ x``,
    what the shared experts gave, in T."""

    name = "trtllm_moe_allreduce_fusion"
    summary = "weighted sums of active experts in T, a residual, the RMS norm, and that in NVFP4"
    source = "FlashInfer trtllm_moe_allreduce_fusion"
    inputs = (
        TensorSpec("experts", Kind.VALUES, NARROW, ("A", "M", "K"), "rows of each active expert"),
        TensorSpec("factors", Kind.WEIGHTS, F32, ("A", "M"), "their weights"),
        *AllreduceFusionFp4.inputs,
    )

    def reduced(self, inputs: Inputs, options: Options) -> Tensor:
        x, dtype, wide = decode(inputs["x"]), inputs["x"].dtype, bool(options.get("wide"))
        terms = decode(inputs["experts"]) * decode(inputs["factors"])[..., None]
        return nearest(f32(summed(terms, torch.zeros_like(x), dtype, wide=wide) + x), of_dtype(dtype))


@register
class TrtllmMoeFinalizeAllreduceFusion(AllreduceFusionFp4):
    """``y = sum_j T(x[slots[t, j]] factors[t, j])``, slot by slot, each sum rounded to T; a slot of -1 adds nothing,
    and without factors rows are added as they are. Then ``y = T(y routed_scaling_factor)``, where it is not 1, then
    ``+ shared`` in T."""

    name = "trtllm_moe_finalize_allreduce_fusion"
    summary = "weighted sums of a token's slots in T, a residual, the RMS norm, and that in NVFP4"
    source = "FlashInfer trtllm_moe_finalize_allreduce_fusion"
    inputs = (
        TensorSpec("x", Kind.VALUES, NARROW, ("P", "K"), "rows in the order of experts, K a multiple of 16"),
        TensorSpec("slots", Kind.SLOTS, (torch.int32,), ("M", "k"), "row of each slot of a token, or -1"),
        TensorSpec("factors", Kind.WEIGHTS, (torch.float32, *NARROW), ("M", "k"), "weights of slots", optional=True),
        TensorSpec("shared", Kind.VALUES, NARROW, ("M", "K"), "of the shared experts", optional=True),
        *AllreduceFusionFp4.inputs[1:],
    )
    options = (*AllreduceFusionFp4.options, OptionSpec("routed_scaling_factor", 1.0, None, "multiplies the sum"))

    def refuse(self, inputs: Inputs, options: Options) -> None:
        slots, rows = inputs["slots"], inputs["x"].shape[0]
        if bool((slots < -1).any()) or bool((slots >= rows).any()):
            raise ShapeError(f"slots reach from {int(slots.min())} to {int(slots.max())}; x has {rows} rows")
        factor = options["routed_scaling_factor"]
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 2.0**-10 <= factor <= 2.0**10:
            raise OptionError(f"routed_scaling_factor={factor!r} is no number within 2^-10 and 2^10")

    def reduced(self, inputs: Inputs, options: Options) -> Tensor:
        dtype, wide, fmt = inputs["x"].dtype, bool(options.get("wide")), of_dtype(inputs["x"].dtype)
        slots = inputs["slots"].long()
        rows = decode(inputs["x"])[slots.clamp(min=0)]
        rows = rows * decode(inputs["factors"])[..., None] if "factors" in inputs else rows
        terms = rows.masked_fill((slots < 0)[..., None], 0.0).transpose(0, 1)
        total = summed(terms, torch.zeros_like(decode(inputs["residual"])), dtype, wide=wide)
        factor = f32(torch.tensor(options["routed_scaling_factor"], dtype=torch.float64, device=total.device))
        total = nearest(f32(total * factor), fmt)
        return nearest(f32(total + decode(inputs["shared"])), fmt) if "shared" in inputs else total
