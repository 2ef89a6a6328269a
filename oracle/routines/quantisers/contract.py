"""Contracts of the quantisers: vLLM's, DeepGEMM's casts, the two inside FlashInfer's SM90 GEMM, and their companions.

Each contract says which recipes (:mod:`oracle.numbers.recipes`) it declares for its options, the first of them
being its reference, and in which layout the scale is published; admissible sets and verdicts are shared.
``numerics`` of a judgement names one recipe that the kernel declares; without it any recipe of the contract
is admitted, as a whole. Names, options and layouts follow the published routines; ``scale_ub`` is an input
because it is a tensor there.

Not covered: whether memory behind the logical shape of a scale is padded with zeros.

NaN and infinities are as the recipe has them; bytes that are only moved keep them.
Sources: those of the recipes (:mod:`oracle.numbers.recipes`, :mod:`oracle.numbers.mx_recipes`), one in a row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from oracle.bounds.quantiser import (
    agreement,
    code_of_ordinal,
    code_set,
    judge_recipe,
    kin,
    ordinal,
    same_kind,
    scale_set,
)
from oracle.errors import LayoutError, NumericsError, OptionError, ShapeError
from oracle.numbers import quantize, recipe_table, recipes
from oracle.numbers.formats import E4M3FN, FP16, FP32, decode, of_dtype
from oracle.numbers.recipes import Recipe, ScaleFormula
from oracle.numbers.rounding import Overflow, Rounding, encode, round_to, to_dtype
from oracle.numbers.scaling import TENSOR, TILE_128, Block, Grid, ScaleFormat, grid
from oracle.numbers.ue8m0 import ceil_power, ceil_to_ue8m0
from oracle.routines.base import (
    E4M3,
    Call,
    Contract,
    Inputs,
    Operands,
    Options,
    OptionSpec,
    Out,
    Output,
    TensorSpec,
    check_output,
    is_positive,
    positive,
    register,
)
from oracle.routines.fault import Fault, Stage, fold, touches
from oracle.routines.quantisers.verdict import judge_quantised
from oracle.routines.traits import Kind, Trait
from oracle.tensorcore.identify import Match
from oracle.verdict.compare import Admissible, Verdict, compare, verdict
from oracle.verdict.sets import Elements, Found, Range, Sets, ranged, rounded_to

X = TensorSpec("x", Kind.VALUES, quantize.WIDE, ("M", "K"), "values to quantise")
UE8M0 = OptionSpec("use_ue8m0", False, (False, True), "round the scale up to a power of two")

FAST_MATH = Trait("is built with fast math")
BLOCK_BYTES = Trait("publishes a byte of scale for each block, in a layout")
FOUR_BITS = Trait("publishes codes of four bits")
QUANTISER_INSIDE = Trait("quantises a value of its own to E4M3")
"""Stated by a contract with a method ``inner`` that gives the call of its quantiser, and a kernel with its stages."""


class QuantiserContract(Contract):
    """Codes ``q`` and scales ``scale`` with ``x ~= value(q) * scale``, by one of the recipes below.

    A block that K or the rows do not fill is filled with zeros for its amax only. Codes saturate at the ends of the
    element format; a code of 0 is 0x00 or 0x80 as its recipe says. Where a code or a scale is NaN any NaN of its format
    is right, of either sign. Strides of the outputs are free where nothing is said of them. Where two recipes are
    admitted an output may not mix them. ``numerics`` names one recipe, which may be one that is not listed but has the
    same blocks and formats.

    Subclasses
    ----------
    A subclass writes ``declared``, and ``publish`` and ``logical`` where its scales are stored otherwise. Every fault
    of :mod:`oracle.routines.quantisers.faults` applies to it; to one that states ``BLOCK_BYTES`` or ``FOUR_BITS`` those
    of its format do instead.
    """

    section = "Quantisation"
    inputs: ClassVar[tuple[TensorSpec, ...]] = (X,)
    roles = {"x": "x"}
    loses = True
    returns: ClassVar[tuple[str, ...]] = ("q", "scale")

    @abstractmethod
    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        """The recipes that the contract admits for a checked call, the reference first."""

    def publish(self, scale: Tensor, options: Options) -> Tensor:
        """The logical scales ``scale`` ``[..., G]``, float32, in the layout that the routine returns: ``[..., G]`` of
        the same dtype."""
        return scale

    def prepared_of(self, inputs: Inputs, options: Options) -> quantize.Prepared:
        """The values to quantise, with the scales that the call gives."""
        scale, scale_ub, global_scale = inputs.get("scale"), inputs.get("scale_ub"), inputs.get("global_scale")
        return quantize.prepare(inputs["x"], scale=scale, scale_ub=scale_ub, global_scale=global_scale)

    def published(self, outputs: Found, call: Call) -> dict[str, Tensor]:
        """Codes and logical scale as the routine returns them."""
        return {"q": outputs["q"], "scale": self.publish(outputs["scale"], call.resolved)}

    def logical(self, scale: Tensor, shape: tuple[int, ...], options: Options) -> Tensor:
        """The logical scale of shape ``shape``, of the same dtype, out of the returned ``scale`` ``[..., G]`` (any
        float dtype). Raises ShapeError or LayoutError where that has not the shape or the strides of this contract's
        layout."""
        if tuple(scale.shape) != shape:
            raise ShapeError(f"scale has shape {list(scale.shape)}; these inputs give {list(shape)}")
        return scale

    @property
    def takes_numerics(self) -> bool:
        """Numerics of a quantiser are recipes."""
        return True

    def prepared(self, call: Call) -> quantize.Prepared:
        """What a judgement takes for the values to quantise; see :func:`prepared`."""
        return self.prepared_of(call.inputs, call.resolved)

    def reference(self, inputs: Inputs, **options: object) -> dict[str, Tensor]:
        return self.predict(inputs, numerics=None, **options)

    def operands(self, call: Call) -> Operands:
        return Operands(self.roles, tuple(call.inputs["x"].shape), recipes=self.declared(call.inputs, call.resolved))

    def outputs(self, call: Call) -> dict[str, Out]:
        x = call.inputs["x"]
        return {
            "q": Out(self.shape_of_codes(call), E4M3),
            "scale": Out(None, (torch.float32, torch.float8_e8m0fnu, x.dtype)),
        }

    def shape_of_codes(self, call: Call) -> tuple[int, ...]:
        """The shape of ``q``."""
        return tuple(call.inputs["x"].shape)

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [QuantiserSets(self, call, self.recipes(call, numerics))]

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        outputs = run_quantiser(call, faults)
        return outputs if "scale" in call.inputs else self.published(outputs, call)

    def refused(self, call: Call, outputs: Found, right: Found) -> dict[str, Tensor] | None:
        """A code only where it is wrong for the published scale and for the right one."""
        x, admitted = prepared(call), call.operands.recipes
        q, scale = self.split(outputs, call, admitted)
        best = min((judge_recipe(x, q, scale, recipe) for recipe in admitted), key=lambda j: j.outside)
        _, rightly = self.split(right, call, admitted)
        codes = best.bad_codes & judge_recipe(x, q, rightly, best.recipe).bad_codes
        return {"q": codes, "scale": best.bad_scales}

    def predict(self, inputs: Inputs, *, numerics: str | None, **options: object) -> dict[str, Tensor]:
        """The bits of one recipe, the contract's first when none is named."""
        call = Call(self, inputs, options).checked()
        recipe = self.recipes(call, numerics)[0]
        quantised = self.prepared_of(inputs, call.resolved).quantized(recipe)
        return self.published({"q": quantised.codes, "scale": quantised.scale}, call)

    def identify(self, inputs: Inputs, output: Output, *, arch: str | None, **options: object) -> list[Match]:
        """Recipes by the fraction of codes and scales that they reproduce, best first; ``arch`` changes nothing."""
        call = Call(self, inputs, options).checked()
        q, scale = self.split(self.validate_output(call, output), call, call.operands.recipes)
        total = q.numel() + scale.numel()
        return sorted(
            (Match(n, equal, total) for n, equal in agreement(prepared(call), q, scale, among=self.kin(call))),
            key=lambda m: -m.equal,
        )

    def kin(self, call: Call) -> tuple[Recipe, ...]:
        """The named recipes of the element format of a call, over its blocks."""
        return kin(call.operands.recipes[0])

    def recipes(self, call: Call, numerics: str | None) -> Sequence[Recipe]:
        """The declared recipes, or the one that ``numerics`` names."""
        own = call.operands.recipes
        if numerics is None:
            return own
        named = recipe_table.get(numerics)
        if named.fault is not None:
            raise NumericsError(f"{numerics} is a known fault ({named.fault}); it can be identified, not declared")
        for recipe in own:
            if recipe.name == numerics:
                return (recipe,)
        static = [r.formula is recipes.ScaleFormula.GIVEN for r in (named, own[0])]
        if not same_kind(named.block, own[0].block) or static[0] != static[1]:
            raise NumericsError(
                f"{self.name} has blocks of {own[0].block}, recipe {numerics} has {named.block}; "
                f"declare one of {', '.join(r.name for r in own)}"
            )
        if named.element != own[0].element or named.scaling.global_scale != own[0].scaling.global_scale:
            levels = "two levels" if named.scaling.global_scale else "one level"
            raise NumericsError(
                f"recipe {numerics} codes {named.element} under {levels} of scales; "
                f"{self.name} takes {', '.join(r.name for r in own)}"
            )
        return (named.with_block(own[0].block),)

    def split(self, outputs: Found, call: Call, admitted: Sequence[Recipe]) -> tuple[Tensor, Tensor]:
        """Codes of the shape of ``x``, of the element format's dtype, and the logical scale ``[..., G]``, out of
        checked outputs."""
        return outputs["q"], self.scale_of(outputs["scale"], call, admitted)

    def scale_of(self, scale: Tensor, call: Call, admitted: Sequence[Recipe]) -> Tensor:
        """The logical scale ``[..., G]`` out of the returned ``scale`` ``[..., G]``, of the same dtype: float32, E8M0,
        or the dtype of ``x``, as the recipes have it. Raises InputError, DtypeError, ShapeError, DeviceError,
        LayoutError."""
        x = call.inputs["x"]
        dtypes = [torch.float32]
        if any(recipe.scale_format is ScaleFormat.UE8M0 for recipe in admitted):
            dtypes.append(torch.float8_e8m0fnu)
        if any(recipe.scale_format is ScaleFormat.INPUT for recipe in admitted):
            dtypes.append(x.dtype)
        check_output(scale, name="scale", shape=None, dtypes=tuple(dtypes), device=x.device)
        return self.logical(scale, grid(x.shape, admitted[0].block).scale_shape, call.resolved)


@dataclass(frozen=True)
class QuantiserSets(Sets):
    """The codes and scales that one of ``recipes`` admits as a whole."""

    contract: QuantiserContract
    call: Call
    recipes: Sequence[Recipe]

    def judge(self, outputs: Found) -> Verdict:
        q, scale = self.contract.split(outputs, self.call, self.recipes)
        return judge_quantised(prepared(self.call), q, scale, self.recipes)

    def ranges(self, expected: Found) -> dict[str, Range] | None:
        """The sets of the first recipe; codes as values, for the expected scale."""
        x, recipe = prepared(self.call), self.recipes[0]
        scales = scale_set(x, recipe)
        codes = code_set(x, recipe, scales.expected)
        q, scale, own = expected["q"], expected["scale"], x.codes(recipe)  # the recipe's own bits are admissible too
        mine = ordinal(own, codes.fmt)  # by rank: of -0 and +0 a minimum of values may be either
        edges = (torch.minimum(codes.low, mine), torch.maximum(codes.high, mine))
        nan = codes.nan | torch.isnan(decode(own.view(q.dtype)))
        low, high = (decode(torch.where(nan, own, code_of_ordinal(edge, codes.fmt)).view(q.dtype)) for edge in edges)
        published = []
        for edge, rounding in ((scales.low, Rounding.UP), (scales.high, Rounding.DOWN)):
            inside = round_to(edge, FP32, rounding=rounding, overflow=Overflow.INF)
            due = torch.where(torch.isnan(scales.expected), torch.nan, inside)
            published.append(self.contract.publish(rounded_to(due, scale.dtype), self.call.resolved))
        ones = torch.ones_like(scales.expected) if scales.open is None else (~scales.open).to(torch.float64)
        filled = decode(self.contract.publish(rounded_to(ones, scale.dtype), self.call.resolved)) == 1
        free = (~filled).to(torch.uint8)  # what is open, and the padding of the published layout
        return {
            "q": Range(rounded_to(low, q.dtype), rounded_to(high, q.dtype), codes.free.to(torch.uint8)),
            "scale": Range(*(x.reshape(scale.shape) for x in (*published, free))),
        }


def prepared(call: Call) -> quantize.Prepared:
    """The values to quantise, with the given scale and the bound of amax where the call has them."""
    assert isinstance(call.contract, QuantiserContract)
    return call.contract.prepared(call)


@register
class ScaledFp8Quant(QuantiserContract):
    """With ``scale`` the quantisation is static, and that scale is returned; else the scale is that of the tensor,
    ``[1]``, or of each row, ``[M, 1]``. ``scale_ub`` bounds amax: ``a = min(a, scale_ub)``. With ``num_token_padding``
    ``q`` has ``max(M, num_token_padding)`` rows; those past M, and their scales, may hold anything.
    """

    name = "scaled_fp8_quant"
    gpu = True
    summary = "vLLM's per-tensor (static or dynamic) and per-token quantiser"
    source = "vLLM _custom_ops.scaled_fp8_quant"
    inputs = (
        X,
        TensorSpec("scale", Kind.SCALES, (torch.float32,), None, "one value: static quantisation", optional=True),
        TensorSpec("scale_ub", Kind.BOUND, (torch.float32,), None, "one value: bound of amax per token", optional=True),
    )
    options = (
        OptionSpec("use_per_token_if_dynamic", False, (False, True), "one scale per row when no scale is given"),
        OptionSpec("num_token_padding", None, None, "at least this many rows of q; the extra ones are unspecified"),
    )

    shapes = {
        "q": "[max(M, num_token_padding), K]",
        "scale": "of the tensor one value, [1] or []; of rows [M, 1], or with a row for each of q",
    }

    def refuse(self, inputs: Inputs, options: Options) -> None:
        for name in ("scale", "scale_ub"):
            if name in inputs and inputs[name].numel() != 1:
                raise ShapeError(f"{name} has shape {list(inputs[name].shape)}; it must hold one value")
        if "scale_ub" in inputs and ("scale" in inputs or not options["use_per_token_if_dynamic"]):
            raise OptionError("scale_ub bounds dynamic per-token scales; pass use_per_token_if_dynamic=True, no scale")
        if options["num_token_padding"] is not None:
            positive(options, "num_token_padding")

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        if "scale" in inputs:
            return recipes.TORCH_STATIC, recipes.VLLM_STATIC
        if options["use_per_token_if_dynamic"]:
            return recipes.VLLM_TOKEN, recipes.TORCH_TOKEN
        return recipes.TORCH_TENSOR, recipes.VLLM_TENSOR

    def reference(self, inputs: Inputs, **options: object) -> dict[str, Tensor]:
        outputs = self._padded(super().reference(inputs, **options), Call(self, inputs, options).checked())
        return outputs | {"scale": inputs["scale"]} if "scale" in inputs else outputs

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        return self._padded(super().kernel(call, faults), call)

    def _padded(self, outputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
        """The outputs with rows of zeros, and of scales of 1, up to the rows of ``q``."""
        q, scale = outputs["q"], outputs.get("scale")
        extra = (0, 0, 0, self._rows(call.inputs["x"], call.resolved) - q.shape[0])
        padded = {"q": torch.nn.functional.pad(q.view(torch.uint8), extra).view(q.dtype)}
        if scale is not None and scale.dim() == 2 and "scale" not in call.inputs:
            padded["scale"] = torch.nn.functional.pad(scale, extra, value=1.0)
        return {**outputs, **padded}

    def shape_of_codes(self, call: Call) -> tuple[int, ...]:
        x = call.inputs["x"]
        return self._rows(x, call.resolved), x.shape[1]

    def split(self, outputs: Found, call: Call, admitted: Sequence[Recipe]) -> tuple[Tensor, Tensor]:
        """Codes ``[M, K]``, float8_e4m3fn, and the logical scale ``[1]`` or ``[M, 1]``, without padding rows. Raises
        ShapeError."""
        scale, rows = outputs["scale"], call.inputs["x"].shape[0]
        if admitted[0].block == TENSOR:
            if scale.numel() != 1:
                raise ShapeError(f"scale has shape {list(scale.shape)}; one value for the whole tensor is due")
            scale = scale.reshape(1)
        elif scale.dim() == 2 and scale.shape[0] == outputs["q"].shape[0]:
            scale = scale[:rows]
        return outputs["q"][:rows], self.scale_of(scale, call, admitted)

    def _rows(self, x: Tensor, options: Options) -> int:
        padding = options["num_token_padding"]
        return x.shape[0] if padding is None else max(x.shape[0], positive(options, "num_token_padding"))


@register
class PerTokenGroupQuantFp8(QuantiserContract):
    """Scales ``[..., K / group_size]``. A power-of-two scale is that of ``max(amax, eps)/448``.

    ``column_major_scales`` changes the strides of the last two axes alone, M the rows there: to ``(1, M)``, or ``(1,
    align(M, 4))`` with ``tma_aligned_scales``; the lanes past M may hold anything, and strides of other axes are free.
    vLLM's kernel puts a floor on the scale itself as well: another recipe (``vllm_group_ue8m0``), to be declared.
    """

    name = "per_token_group_quant_fp8"
    gpu = True
    summary = "groups of each row along K, scale max(amax, eps)/448, optionally rounded up to a power of two"
    source = "vLLM per_token_group_quant_fp8; csrc per_token_group_quant.cu"
    inputs = (TensorSpec("x", Kind.VALUES, quantize.WIDE, None, "[..., K], K a multiple of group_size"),)
    shapes = {"scale": "[..., K / group_size]"}
    options = (
        OptionSpec(
            "group_size", recipes.VLLM_GROUP.block.columns, None, "elements of K that share a scale, any divisor of K"
        ),
        OptionSpec("eps", 1e-10, None, "floor of the amax"),
        OptionSpec("column_major_scales", False, (False, True), "strides (1, M) behind the same logical shape"),
        OptionSpec("tma_aligned_scales", False, (False, True), "with column-major: strides (1, align(M, 4))"),
        UE8M0,
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        group, x = positive(options, "group_size"), inputs["x"]
        if x.dim() < 1:
            raise ShapeError("x is a scalar; pass [..., K]")
        if x.shape[-1] % group:
            raise ShapeError(f"K={x.shape[-1]} is not a multiple of group_size={group}; pad K or choose a divisor")
        eps = options["eps"]
        if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < float("inf"):
            raise OptionError(f"{self.name}: eps={eps!r} is not a positive finite number")
        if options["tma_aligned_scales"] and not options["column_major_scales"]:
            raise OptionError(
                f"{self.name}: tma_aligned_scales aligns a column-major scale; set column_major_scales=True"
            )
        if options["column_major_scales"] and x.dim() < 2:
            raise ShapeError(f"column_major_scales needs two axes, x has shape {list(x.shape)}; pass a matrix")

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        plain = (recipes.VLLM_GROUP, recipes.TORCH_GROUP, recipes.SGLANG_GROUP)
        powers = (recipes.VLLM_GROUP_UE8M0_BITS, recipes.TORCH_GROUP_UE8M0, recipes.SGLANG_GROUP_UE8M0)
        block = Block(1, positive(options, "group_size"))
        return tuple(
            recipe.with_block(block).with_floor(float(options["eps"]))
            for recipe in (powers if options["use_ue8m0"] else plain)
        )

    def publish(self, scale: Tensor, options: Options) -> Tensor:
        if not options["column_major_scales"]:
            return scale
        rows = scale.shape[-2]
        lanes = -(-rows // 4) * 4 if options["tma_aligned_scales"] else rows
        store = scale.new_zeros(*scale.shape[:-2], scale.shape[-1], lanes)
        store[..., :rows] = scale.transpose(-1, -2)
        return store[..., :rows].transpose(-1, -2)

    def logical(self, scale: Tensor, shape: tuple[int, ...], options: Options) -> Tensor:
        scales = super().logical(scale, shape, options)
        if options["column_major_scales"]:
            rows = shape[-2]
            lead = -(-rows // 4) * 4 if options["tma_aligned_scales"] else rows
            due = (1, lead)
            for extent, stride, wanted in zip(shape[-2:], scale.stride()[-2:], due, strict=True):
                if extent > 1 and stride != wanted:
                    raise LayoutError(
                        f"scale has strides {scale.stride()}; these options give {due} in the last two axes: "
                        "judge a recorded scale, which has lost its strides, with column_major_scales=False"
                    )
        return scales


class _Cast(QuantiserContract):
    """DeepGEMM's casts: amax is at least 1e-4, so that a block of zeros has the scale 1e-4/448. The recipes are the
    same for blocks of every size. A float32 scale that is infinite is E8M0 byte 254 where the scales are returned as
    E8M0."""

    options: ClassVar[tuple[OptionSpec, ...]] = (UE8M0,)
    plain: ClassVar[Recipe]
    powers: ClassVar[tuple[Recipe, ...]]

    def block(self, options: Options) -> Block:
        return self.plain.block

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        own = self.powers if options["use_ue8m0"] else (self.plain,)
        return tuple(recipe.with_block(self.block(options)) for recipe in own)


@register
class PerBlockCastToFp8(_Cast):
    name = "per_block_cast_to_fp8"
    summary = "one scale per 128x128 block of a weight"
    source = "DeepGEMM per_block_cast_to_fp8"
    inputs = (TensorSpec("x", Kind.VALUES, quantize.WIDE, ("N", "K"), "weight"),)
    shapes = {"scale": "[ceil(N / R), ceil(K / C)] for block_size (R, C)"}
    options = (OptionSpec("block_size", (TILE_128.rows, TILE_128.columns), None, "rows and columns of a block"), UE8M0)
    plain = recipes.DEEPGEMM_128X128
    powers = (
        recipes.DEEPGEMM_128X128_UE8M0,
        recipes.DEEPGEMM_128X128_UE8M0_OPEN,
        recipes.TORCH_CAST_128X128_UE8M0,
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        self.block(options)

    def block(self, options: Options) -> Block:
        size = options["block_size"]
        if isinstance(size, str):
            size = [int(part) if part.strip().isdigit() else part for part in size.strip("()[] ").split(",")]
        if not isinstance(size, Sequence) or len(size) != 2 or not all(is_positive(extent) for extent in size):
            raise OptionError(f"{self.name}: block_size={size!r} is not two positive integers, such as (128, 128)")
        return Block(int(size[0]), int(size[1]))


@register
class PerTokenCastToFp8(_Cast):
    name = "per_token_cast_to_fp8"
    summary = "one scale per row and 128 elements of K"
    source = "DeepGEMM per_token_cast_to_fp8"
    plain = recipes.DEEPGEMM_1X128
    options = (UE8M0, OptionSpec("group", plain.block.columns, None, "elements of K that share a scale"))
    powers = (
        recipes.DEEPGEMM_1X128_UE8M0,
        recipes.DEEPGEMM_1X128_UE8M0_OPEN,
        recipes.TORCH_CAST_1X128_UE8M0,
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        positive(options, "group")

    def block(self, options: Options) -> Block:
        return Block(1, positive(options, "group"))


@register
class PerChannelCastToFp8(_Cast):
    name = "per_channel_cast_to_fp8"
    summary = "one scale per column and 128 rows"
    source = "DeepGEMM per_channel_cast_to_fp8"
    plain = recipes.DEEPGEMM_128X1
    shapes = {"scale": "[M/128, K], M a multiple of 128"}
    powers = (
        recipes.DEEPGEMM_128X1_UE8M0,
        recipes.DEEPGEMM_128X1_UE8M0_OPEN,
        recipes.TORCH_CAST_128X1_UE8M0,
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        m, rows = inputs["x"].shape[0], self.plain.block.rows or 1
        if m % rows:
            raise ShapeError(f"M={m} is not a multiple of {rows}; pad the rows")


class _FlashInfer(QuantiserContract):
    """No amax floor, an all-zero block has scale 1; division on the device is approximate, so that a scale and a code
    may be those of quotients within a few ulps. K is a multiple of 128."""

    traits = frozenset({FAST_MATH})
    recipe: ClassVar[Recipe]

    def refuse(self, inputs: Inputs, options: Options) -> None:
        k, group = inputs["x"].shape[1], self.recipe.block.columns or 1
        if k % group:
            raise ShapeError(f"K={k} is not a multiple of {group}; the kernel has no K tail, pad K")

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return (self.recipe,)


@register
class FlashinferQuantize1x128(_FlashInfer):
    """``scale[j, i]`` is that of row ``i`` and block ``j``; columns past M may hold anything."""

    name = "flashinfer_quantize_1x128"
    summary = "the activation quantiser inside FlashInfer's SM90 GEMM; scale stored [K/128, align(M, 4)]"
    source = "FlashInfer fp8_blockscale_gemm_sm90, scale_1x128_kernel"
    inputs = (TensorSpec("x", Kind.VALUES, (torch.bfloat16,), ("M", "K"), "activations, K a multiple of 128"),)
    recipe = recipes.FLASHINFER_1X128

    def publish(self, scale: Tensor, options: Options) -> Tensor:
        return torch.nn.functional.pad(scale.t(), (0, -scale.shape[0] % 4)).contiguous()

    def logical(self, scale: Tensor, shape: tuple[int, ...], options: Options) -> Tensor:
        stored = (shape[1], -(-shape[0] // 4) * 4)
        return super().logical(scale, stored, options)[:, : shape[0]].t()


@register
class FlashinferQuantize128x128(_FlashInfer):
    """As specified, with the amax of the whole block.

    Shipped kernels leave rows out of it, which the verdict names (``flashinfer_128x128_amax_fault``).
    """

    name = "flashinfer_quantize_128x128"
    shapes = {"scale": "[ceil(N/128), K/128]"}
    summary = "the BF16-weight quantiser inside FlashInfer's SM90 GEMM"
    source = "FlashInfer fp8_blockscale_gemm_sm90, scale_128x128_kernel"
    inputs = (TensorSpec("x", Kind.VALUES, (torch.bfloat16,), ("N", "K"), "weight, K a multiple of 128"),)
    recipe = recipes.FLASHINFER_128X128


# --- element-wise companions: dequantisation through float16, rounding to UE8M0 ------------------------------


@register
class PerTensorDequantize(Contract):
    """``out = RN_float16(value(q) * inv_scale)``, to nearest even; the product may be rounded to float32 first or not.

    Products that round above 65504 are infinite, those up to 2^-25 are zeros of either sign. A NaN code or scale gives
    NaN, an infinite scale infinities, and NaN for the codes of zeros.
    """

    name = "per_tensor_dequantize"
    section = "Quantisation"
    summary = "float16(value(q) * inv_scale), one scale for the tensor"
    source = "vLLM w8a8_utils.per_tensor_dequantize"
    inputs = (
        TensorSpec("q", Kind.CODES, (torch.float8_e4m3fn,), None, "codes, any shape"),
        TensorSpec("inv_scale", Kind.SCALES, (torch.float32,), None, "one value; it multiplies"),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if inputs["inv_scale"].numel() != 1:
            raise ShapeError(f"inv_scale has shape {list(inputs['inv_scale'].shape)}; it must hold one value")

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        """``[...]`` of any shape, float16: ``RN(value(q) * inv_scale)``."""
        self.check(inputs, options)
        return quantize.per_tensor_dequantize(inputs["q"], inputs["inv_scale"])

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [Elements(lambda: ({"out": self._set(call)}, "float16 of the exact or float32 product"))]

    def _set(self, call: Call) -> Admissible:
        twice = decode(call.truth["out"])
        product = decode(call.inputs["q"]) * decode(call.inputs["inv_scale"]).reshape(())
        once = round_to(product, FP16, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
        return Admissible(torch.minimum(once, twice), torch.maximum(once, twice), twice)


@register
class CeilToUe8m0(Contract):
    """``out`` is the smallest power of two that is not below ``|x|``, in float32; signs are dropped.

    Where implementations differ at the ends of the range, both are admissible. Up to 2^-127, zeros too: 2^-127 (a
    float32 subnormal) and 2^-126 (DeepGEMM's smallest). Above 2^127 and for infinity: 2^127 and infinity. For NaN:
    anything.
    """

    name = "ceil_to_ue8m0"
    section = "Quantisation"
    summary = "the smallest power of two that is not below |x|"
    source = "DeepGEMM deep_gemm/utils/math.py ceil_to_ue8m0"
    inputs = (TensorSpec("x", Kind.VALUES, (torch.float32,), None, "any shape"),)

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        """float32 ``[...]`` of the shape of ``x``: the smallest power of two not below ``|x|``."""
        self.check(inputs, options)
        return ceil_to_ue8m0(inputs["x"])

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        magnitude, due = decode(call.inputs["x"]).abs(), decode(call.truth["out"])
        low = ceil_power(magnitude, byte_low=0, inf_byte=254, nan_byte=254)
        high = torch.where(magnitude > 2.0**127, torch.inf, due)
        return [PowersOfTwo(Admissible(low, high, due, open=torch.isnan(magnitude)))]


@dataclass(frozen=True)
class PowersOfTwo(Sets):
    """Both ends of ``sets``, and nothing between them: that is no power of two."""

    sets: Admissible

    def judge(self, outputs: Found) -> Verdict:
        value = decode(outputs["out"])
        due = torch.where((value == self.sets.low) | (value == self.sets.high), value, self.sets.expected)
        admitted = Admissible(due, due, due, open=self.sets.open)
        return verdict(compare(outputs["out"], admitted), basis="smallest power of two not below |x|")

    def ranges(self, expected: Found) -> dict[str, Range]:
        return {"out": ranged(self.sets, torch.float32)}


# --- the right kernel with faults put into it: x -> RECIPE -> AMAX -> scale and inverse -> QUOTIENT -> CODES -> SCALE


def run_quantiser(call: Call, faults: tuple[Fault, ...]) -> dict[str, Tensor]:
    """``{"q": codes, "scale": scale}`` of the mutant, the scale before it is published."""
    inputs = fold(call, faults, Stage.READ, dict(call.inputs))
    assert isinstance(call.contract, QuantiserContract)
    x = call.contract.prepared_of(inputs, fold(call, faults, Stage.OPTIONS, dict(call.resolved)))
    recipe: Recipe = fold(call, faults, Stage.RECIPE, call.recipe)
    cells = x.grid(recipe.block)
    steps = _steps(call, x, recipe, faults)
    right = quantize.quotients(x.blocks(recipe.block), steps.total, steps.inverse, recipe)
    values: Values = fold(call, faults, Stage.QUOTIENT, Values(x, recipe, steps, cells, right))
    codes = fold(call, faults, Stage.CODES, cells.join(values.codes()))
    scale = fold(call, faults, Stage.SCALE, steps.scale.reshape(cells.scale_shape))
    q = codes.view(recipe.element.tensor_dtype)
    if "scale" in inputs:
        return {"q": q, "scale": inputs["scale"]}
    return {"q": q, "scale": to_dtype(scale, torch.float32, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)}


def _steps(call: Call, x: quantize.Prepared, recipe: Recipe, faults: tuple[Fault, ...]) -> quantize.Steps:
    if recipe.formula is ScaleFormula.GIVEN or not touches(faults, Stage.AMAX):
        return x.steps(recipe)
    amax = fold(call, faults, Stage.AMAX, Amax(x, recipe))
    values = amax.right if isinstance(amax, Amax) else amax
    steps = quantize.scale_steps(values, recipe, of_dtype(x.dtype), scale_ub=x.scale_ub, global_scale=x.global_scale)
    return steps if recipe.candidates is None else x.chosen(recipe, steps)


@dataclass(frozen=True)
class Amax:
    """What a change of stage AMAX gets; it returns float64 ``[down, 1, across, 1]``."""

    x: quantize.Prepared
    recipe: Recipe

    @property
    def right(self) -> Tensor:
        """The right amax of every block, float64 ``[down, 1, across, 1]``."""
        return self.x.amax(self.recipe)

    @property
    def blocks(self) -> Tensor:
        """The values ``[down, r, across, c]``, float64."""
        return self.x.blocks(self.recipe.block)


@dataclass(frozen=True)
class Values:
    """What a change of stage QUOTIENT gets and returns: the quotients, and how they are rounded to codes."""

    x: quantize.Prepared
    recipe: Recipe
    steps: quantize.Steps
    cells: Grid
    quotient: Tensor
    rounding: Rounding | None = None
    overflow: Overflow = Overflow.SATURATE

    def altered(self, **changes: Any) -> Values:
        """The same with another ``quotient``, ``rounding`` or ``overflow``; None changes nothing."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})

    def codes(self) -> Tensor:
        """uint8 codes of the blocks ``[down, r, across, c]``, rounded as the recipe says unless a fault says
        otherwise."""
        undefined, element = torch.isnan(self.quotient), self.recipe.element
        if self.rounding is None and self.overflow is Overflow.SATURATE:
            return quantize.to_codes(self.quotient, self.recipe, self.x.random_blocks(self.recipe))
        numbers = self.quotient.masked_fill(undefined, 0.0)
        codes = encode(numbers, element, rounding=self.rounding or Rounding.NEAREST_EVEN, overflow=self.overflow)
        return codes.masked_fill(undefined, self.recipe.code_of_nan)


def values_of(codes: Tensor) -> Tensor:
    """float64 values, of the same shape, of E4M3 ``codes`` of any shape given as uint8."""
    return decode(codes, E4M3FN)
