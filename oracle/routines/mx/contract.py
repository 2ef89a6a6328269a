"""Contracts of MX and NVFP4: quantisers whose codes are packed and whose scales are bytes in tiles, and their inverses.

    x ~= value(q) * 2^(byte - 127)           MXFP8 (E4M3, E5M2), MXFP4 (E2M1): blocks of 32
    x ~= value(q) * e4m3(byte) / global      NVFP4 (E2M1): blocks of 16; ``global`` about 2688 / amax of the tensor

*Codes* of E2M1 are packed two a byte, the low nibble is the even column. *Scales* are bytes ``[M, K / block]`` or that
matrix in tiles (:func:`oracle.truth.layout.swizzle_scale`), flat, rows padded to 128 or 8 and columns to 4. The padding
belongs to the quantiser, which writes zeros; a dequantiser never reads it.

A quantiser admits the recipes of the libraries that publish it, each as a whole; ``numerics`` names one. Sources:
FlashInfer flashinfer/quantization, torchao mx_formats, TransformerEngine; OCP Microscaling Formats 1.0 for what a byte
means (0 is 2^-127, 255 is NaN). Here: one matrix and its formats. Training forms are in
:mod:`oracle.routines.mx.training`, rows with scales of their own and FP8 inputs in :mod:`oracle.routines.mx.tokens`,
experts in :mod:`oracle.routines.mx.experts`, casts in :mod:`oracle.routines.mx.casts`. Not covered: padding of K but
for ``mxfp8_quantize(alignment=..)``.

NaN and infinities are as the recipe has them; bytes that are only moved keep them.
Sources: those of :mod:`oracle.numbers.mx_recipes`, one in a row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import InputError, NumericsError, OptionError, ShapeError
from oracle.numbers import mx_recipes, recipes
from oracle.numbers.formats import E2M1, E4M3FN, E5M2, Format, decode
from oracle.numbers.quantize import WIDE, Prepared, prepare
from oracle.numbers.recipes import Recipe
from oracle.numbers.rounding import Overflow, Rounding, f32, to_dtype
from oracle.numbers.scaling import GROUP_16, GROUP_32, Block, grid
from oracle.routines.base import (
    F32,
    FP8,
    Call,
    Contract,
    Inputs,
    Options,
    OptionSpec,
    Out,
    TensorSpec,
    positive,
    register,
)
from oracle.routines.fault import Fault, Stage, fold
from oracle.routines.quantisers.contract import BLOCK_BYTES, QuantiserContract, QuantiserSets
from oracle.routines.traits import Kind, Trait
from oracle.truth.layout import HEIGHTS, swizzle_scale, unswizzle_scale
from oracle.verdict.compare import Admissible, Status, Verdict
from oracle.verdict.sets import Elements, Found, Range, Sets, judge_bits, rounded_to, worst_of

LINEAR = "linear"
LAYOUTS = (*HEIGHTS, LINEAR)
LAYOUT = OptionSpec(
    "layout", LAYOUTS[0], LAYOUTS, "how the scale bytes lie: in tiles, height x width, or linear: [M, C]"
)
ROUNDING = OptionSpec(
    "rounding", "rceil", tuple(mx_recipes.MODES), "how the shared scale becomes a power of two; recipes below"
)
ELEMENTS: Mapping[str, Format] = {"e4m3": E4M3FN, "e5m2": E5M2}
ELEMENT = OptionSpec("element", "e4m3", tuple(ELEMENTS), "format of the codes, e4m3 (fn) or e5m2")
ALIGNMENT = OptionSpec("alignment", 32, None, "columns of which those of codes and scales are a multiple, zeros behind")
INVERSED = OptionSpec(
    "is_global_scale_inversed", False, (False, True), "the global scale is amax/2688, which multiplies the codes"
)
GLOBAL = TensorSpec("global_scale", Kind.SCALES, F32, ("1",), "about 2688/amax of the tensor; positive")
GLOBAL_OF_ROWS = TensorSpec(
    "global_scale",
    Kind.SCALES,
    F32,
    ("1|M",),
    "about 2688/amax of the tensor [1] or of each row [M], or with is_global_scale_inversed the inverses",
)

MXFP8 = (
    recipes.TE_MXFP8_1X32,
    recipes.FLASHINFER_MXFP8_1X32,
    mx_recipes.FLASHINFER_CUTE_MXFP8,
    mx_recipes.FLASHINFER_HOST_MXFP8,
    mx_recipes.TORCHAO[E4M3FN, "rceil"],
)
MXFP4 = mx_recipes.FLASHINFER_MXFP4, mx_recipes.FLASHINFER_CUTE_MXFP4, mx_recipes.TORCHAO[E2M1, "rceil"]
"""The recipes of ``rceil``, of E4M3 and E2M1."""

FP8_CODES = Trait("publishes codes of FP8")
STACKED = Trait("quantises a batch of matrices, the scales of each in memory of their own")


def pack(codes: Tensor) -> Tensor:
    """4-bit ``codes`` ``[M, K]`` as bytes ``[M, K/2]``, uint8: the low nibble is the even column."""
    pairs = codes.contiguous().view(torch.int16)  # little-endian: the even column is the low byte
    return (pairs | pairs >> 4).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of :func:`pack`: uint8 ``[M, K]``, a code each, of ``packed`` ``[M, K/2]``, uint8, in any strides."""
    pairs = packed.contiguous().to(torch.int16)
    return (pairs & 0xF | (pairs & 0xF0) << 4).view(torch.uint8)


def stored(scale: Tensor, layout: str) -> Tensor:
    """Scale bytes ``scale`` ``[M, C]``, uint8, in a layout: ``[bytes]``, or ``[M, C]``; padding zero."""
    return scale.contiguous() if layout == LINEAR else swizzle_scale(scale, tile=layout)


def loaded(memory: Tensor, shape: tuple[int, int], layout: str) -> Tensor:
    """The scale bytes ``[M, C]``, uint8, out of a ``memory`` ``[bytes]`` or ``[M, C]`` in that layout; padding is not
    read.

    Raises ShapeError: the memory has another shape.
    """
    if layout != LINEAR:
        return unswizzle_scale(memory, *shape, tile=layout)
    if tuple(memory.shape) != shape:
        raise ShapeError(f"scale has shape {list(memory.shape)}; the linear layout of these values has {list(shape)}")
    return memory


def padding_of(shape: tuple[int, int], layout: str) -> Tensor | None:
    """Which bytes of a layout are padding, bool ``[bytes]``; None where it has none."""
    if layout == LINEAR:
        return None
    empty = torch.zeros(shape, dtype=torch.uint8, device="cpu")
    return swizzle_scale(empty, tile=layout, fill=1).to(torch.bool)


class BlockQuantiser(QuantiserContract):
    """Codes and one scale byte for each block of 32 (MX) or 16 (NVFP4) elements of K.

        x ~= value(q) * 2^(byte - 127)           MX (scale ue8m0): a byte of 255 is NaN, 0 is 2^-127
        x ~= value(q) * e4m3(byte) / global      NVFP4 (scale e4m3); ``global`` is that of the tensor, positive

    Codes of E2M1 are packed two in a byte, the low nibble is the even column; other codes take a byte each. The scale
    of row ``r`` and block ``c`` of a matrix ``[M, C]`` lies, in tiles of ``128x4``, flat, at

        (r // 128 * ceil(C/4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4

    and in tiles of ``8x4`` at ``(r // 8 * ceil(C/4) + c // 4) * 32 + r % 8 * 4 + c % 4``: rows are padded to 128 or 8
    and columns to 4, so that a matrix takes ``align(M, 128) * align(C, 4)`` bytes or, in tiles of ``8x4``,
    ``align(M, 8) * align(C, 4)``. Without tiles (``linear``) it is ``[M, C]``, not padded. The quantiser writes zeros
    into that padding, unless it is said below that this padding is not written.

    Subclasses
    ----------
    ``width`` elements share a scale byte of ``scale_dtype``; ``packed``: two codes to a byte;
    ``owns_padding``: zeros are written into the padding of the scales, which is unspecified else; ``repeats``: scale
    bytes that hold the same scale. A subclass writes ``declared``, and ``prepared_of`` where it quantises something
    else than ``x``."""

    shapes = {
        "q": "[M, K], two codes of E2M1 in a byte: [M, K/2]",
        "scale": "[bytes] of the tiles, for a matrix of the scales of all blocks, [M, K / block]; linear: that matrix",
    }
    traits = frozenset({BLOCK_BYTES})
    owns_padding: ClassVar[bool] = True
    repeats: ClassVar[int] = 1
    width: ClassVar[int] = GROUP_32.columns or 1
    packed: ClassVar[bool] = False
    scale_dtype: ClassVar[torch.dtype] = torch.float8_e8m0fnu
    gpu = True

    @abstractmethod
    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]: ...

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (k := inputs["x"].shape[-1]) % self.width:
            raise ShapeError(f"K={k} is not a multiple of {self.width}, the elements that share a scale; pad K")

    def shape_of_scales(self, call: Call) -> tuple[int, int]:
        """Rows and columns of the scale bytes."""
        m, k = call.inputs["x"].shape
        return m, k // self.width

    def lying(self, call: Call) -> tuple[tuple[int, int], str]:
        """Rows and columns of the matrix of scale bytes as it lies in memory, and its layout."""
        return self.shape_of_scales(call), str(call.resolved["layout"])

    def memory(self, scale: Tensor, call: Call) -> Tensor:
        """Scale bytes ``scale`` ``[M, C]``, uint8, of :meth:`shape_of_scales` as they are returned, uint8 ``[bytes]``
        or another shape of them; padding zero."""
        return stored(scale, self.lying(call)[1])

    def scales_of(self, memory: Tensor, call: Call) -> Tensor:
        """The inverse of :meth:`memory`: uint8 ``[M, C]`` of ``memory`` ``[bytes]``."""
        return loaded(memory.view(torch.uint8), *self.lying(call))

    def in_order(self, call: Call, name: str, x: Tensor) -> Tensor:
        if name != "scale" or x.element_size() != 1:
            return x
        scales = self.distinct(self.scales_of(x.view(torch.uint8), call), call)
        return scales.to(torch.bool) if x.dtype is torch.bool else scales

    def padding(self, call: Call) -> Tensor | None:
        """Which returned scale bytes are padding, bool ``[bytes]``; None where there is none."""
        return padding_of(*self.lying(call))

    def repeated(self, scale: Tensor, call: Call) -> Tensor:
        """A scale of each block, ``scale`` ``[M / repeats, C]``, as the bytes ``[M, C]``, uint8, in which several may
        hold the same."""
        return scale.repeat_interleave(self.repeats, dim=0)

    def distinct(self, scale: Tensor, call: Call) -> Tensor:
        """One byte of each block, uint8 ``[M / repeats, C]``, of ``scale`` ``[M, C]``; the inverse of
        :meth:`repeated`."""
        return scale[:: self.repeats].contiguous()

    def codes(self, codes: Tensor, call: Call) -> Tensor:
        """``codes`` ``[M, K]``, one each, as they are returned: ``[M, K]`` of the same dtype, or uint8 ``[M, K/2]``."""
        return pack(codes) if self.packed else codes

    def codes_of(self, q: Tensor, call: Call) -> Tensor:
        """The inverse of :meth:`codes`: ``[M, K]`` of ``q`` ``[M, K]`` or ``[M, K/2]``, of the same dtype."""
        return unpack(q) if self.packed else q

    def shape_of_codes(self, call: Call) -> tuple[int, ...]:
        m, k = call.inputs["x"].shape
        return m, k // 2 if self.packed else k

    def outputs(self, call: Call) -> dict[str, Out]:
        empty = torch.zeros(self.shape_of_scales(call), dtype=torch.uint8, device="cpu")
        return {
            "q": Out(self.shape_of_codes(call), (call.recipe.element.tensor_dtype,)),
            "scale": Out(tuple(self.memory(empty, call).shape), (torch.uint8, self.scale_dtype)),
        }

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [BlockSets(self, call, self.recipes(call, numerics))]

    def published(self, outputs: Mapping[str, Tensor], call: Call) -> dict[str, Tensor]:
        due = to_dtype(
            decode(outputs["scale"]), self.scale_dtype, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE
        )
        scale = self.repeated(due.view(torch.uint8), call)
        return {"q": self.codes(outputs["q"], call), "scale": self.memory(scale, call)}

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = fold(call, faults, Stage.WRITE, super().kernel(call, faults))
        return outputs

    def split(self, outputs: Found, call: Call, admitted: Sequence[Recipe]) -> tuple[Tensor, Tensor]:
        """Codes ``[M, K]`` and one scale ``[.., C]`` a block, of the element format's dtype and ``scale_dtype``."""
        scale = self.distinct(self.scales_of(outputs["scale"], call), call)
        return self.codes_of(outputs["q"], call), scale.view(self.scale_dtype)

    def refused(
        self, call: Call, outputs: Mapping[str, Tensor], right: Mapping[str, Tensor]
    ) -> dict[str, Tensor] | None:
        """As for other quantisers, in the bytes of the outputs; padding is refused where it is not zero."""
        bad = super().refused(call, outputs, right)
        assert bad is not None
        scale = self.memory(self.repeated(bad["scale"].to(torch.uint8), call), call).to(torch.bool)
        pads = self.padding(call)
        if pads is not None and self.owns_padding:
            scale = scale | pads & (outputs["scale"].view(torch.uint8) != 0)
        return {"q": self.codes(bad["q"].to(torch.uint8), call) != 0, "scale": scale}

    def recipes(self, call: Call, numerics: str | None) -> Sequence[Recipe]:
        named = super().recipes(call, numerics)
        for recipe in named:
            own = call.recipe
            if recipe.scale_format is not own.scale_format or recipe.encodes != own.encodes:
                raise NumericsError(
                    f"recipe {recipe.name} publishes other scales than {self.name} with these options; "
                    f"declare one of {', '.join(r.name for r in call.operands.recipes)}"
                )
        return named


class BlockSets(QuantiserSets):
    """The codes and scales that one recipe admits as a whole, zeros in the padding of the scales, and equal bytes in
    the rows that share one."""

    def judge(self, outputs: Found) -> Verdict:
        judged = super().judge(outputs)
        return judged if judged.status is Status.FAILED else self.with_padding(judged, outputs)

    def with_padding(self, judged: Verdict, outputs: Found) -> Verdict:
        """A verdict on codes and scales, and on the bytes beside the scales."""
        contract = self.contract
        assert isinstance(contract, BlockQuantiser)
        if contract.repeats > 1:
            rows = contract.scales_of(outputs["scale"], self.call)
            due = contract.repeated(contract.distinct(rows, self.call), self.call)
            same = judge_bits(rows, due, output="scale")
            judged = worst_of([same, judged]) if same.status is Status.FAILED else judged
        pads = contract.padding(self.call)
        if judged.status is Status.FAILED or not contract.owns_padding or pads is None or not bool(pads.any()):
            return judged
        left = outputs["scale"].view(torch.uint8)[pads.to(outputs["scale"].device)]
        zeros = judge_bits(left, torch.zeros_like(left), output="padding of scale")
        return worst_of([zeros, judged]) if zeros.status is Status.FAILED else judged

    def ranges(self, expected: Found) -> dict[str, Range] | None:
        """None: neighbours of a packed code are no interval of bytes, and a scale decides which codes are right."""
        return None


def _behind(x: Tensor, options: Options) -> int:
    """Columns of zeros behind the values, to a multiple of ``alignment``."""
    return -x.shape[-1] % int(str(options.get("alignment", 1)))


@register
class Mxfp8Quantize(BlockQuantiser):
    """``rounding`` chooses the recipe, as how the shared scale becomes a power of two. With ``alignment`` (a multiple
    of 32) codes and scales are those of ``x`` with zeros behind K, up to a multiple of ``alignment``."""

    traits = frozenset({FP8_CODES})
    name = "mxfp8_quantize"
    summary = "MXFP8: blocks of 32, E4M3 or E5M2 codes, E8M0 scales"
    source = "FlashInfer mxfp8_quantize; torchao to_mx; TransformerEngine quantize_mxfp8"
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("x", Kind.VALUES, WIDE, ("M", "K"), "values to quantise, K a multiple of 32"),
    )
    options: ClassVar[tuple[OptionSpec, ...]] = (LAYOUT, ROUNDING, ELEMENT, ALIGNMENT)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if "alignment" in options and positive(options, "alignment") % self.width:
            raise OptionError(f"alignment={options['alignment']} is not a multiple of {self.width}")

    def prepared_of(self, inputs: Inputs, options: Options) -> Prepared:
        """Zeros behind the values, where codes and scales are wider."""
        x = inputs["x"]
        return prepare(torch.nn.functional.pad(x, (0, _behind(x, options)))) if _behind(x, options) else prepare(x)

    def shape_of_scales(self, call: Call) -> tuple[int, int]:
        m, k = self.shape_of_codes(call)
        return m, k // self.width

    def shape_of_codes(self, call: Call) -> tuple[int, ...]:
        m, k = super().shape_of_codes(call)
        return m, k + _behind(call.inputs["x"], call.resolved)

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        element, mode = ELEMENTS[str(options["element"])], str(options["rounding"])
        torchao = mx_recipes.TORCHAO[element, mode]
        if mode != "rceil":
            return (torchao,)
        if element is E5M2:
            return mx_recipes.TE_MXFP8_E5M2, torchao
        return MXFP8


@register
class Mxfp4Quantize(BlockQuantiser):
    name = "mxfp4_quantize"
    summary = "MXFP4: blocks of 32, E2M1 codes two a byte, E8M0 scales"
    source = "FlashInfer mxfp4_quantize; torchao to_mx"
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("x", Kind.VALUES, WIDE, ("M", "K"), "values to quantise, K a multiple of 32"),
    )
    options: ClassVar[tuple[OptionSpec, ...]] = (LAYOUT, ROUNDING)
    packed = True

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        mode = str(options["rounding"])
        return MXFP4 if mode == "rceil" else (mx_recipes.TORCHAO[E2M1, mode],)


@register
class Nvfp4Quantize(BlockQuantiser):
    """``global_scale [1]`` is of the tensor, ``[M]`` of each row; NaN, 0 and negative ones are refused. By FlashInfer's
    recipes a block of zeros has the scale 0 whatever the global scale, 2688/0 included.
    ``is_global_scale_inversed``: the global scale is amax/2688, which multiplies on dequantisation."""

    name = "nvfp4_quantize"
    summary = "NVFP4: blocks of 16, E2M1 codes two a byte, E4M3 scales under a scale of the tensor"
    source = "FlashInfer nvfp4_quantize and fp4_quantize; vLLM scaled_fp4_quant; TransformerEngine; torchao; modelopt"
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("x", Kind.VALUES, WIDE, ("M", "K"), "values to quantise, K a multiple of 16"),
        GLOBAL_OF_ROWS,
    )
    options: ClassVar[tuple[OptionSpec, ...]] = (LAYOUT, INVERSED)
    width = GROUP_16.columns or 1
    packed = True
    scale_dtype = torch.float8_e4m3fn

    def refuse(self, inputs: Inputs, options: Options) -> None:
        positive_scale(inputs)

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        if options["is_global_scale_inversed"]:
            modelopt = mx_recipes.MODELOPT_NVFP4, mx_recipes.MODELOPT_0_47_NVFP4
            return mx_recipes.FLASHINFER_NVFP4_INVERSED, mx_recipes.TORCHAO_NVFP4, *modelopt
        return mx_recipes.FLASHINFER_NVFP4_EXACT, mx_recipes.FLASHINFER_NVFP4, mx_recipes.FLASHINFER_CUTE_NVFP4


@register
class ScaledFp4Quant(Nvfp4Quantize):
    """The padding of the scales may hold anything; this padding is not written: vLLM allocates them uninitialised, and
    the loop that should clear their padding is empty. ``global_scale`` is 2688/amax."""

    name = "scaled_fp4_quant"
    gpu = False  # its libraries compile it for sm100 and later alone, and no capture is of one
    summary = "NVFP4 as vLLM quantises it: scales in 128x4 tiles whose padding is unspecified"
    source = "vLLM csrc nvfp4_quant_kernels.cu, nvfp4_utils.cuh @07c13c7"
    inputs = (TensorSpec("x", Kind.VALUES, WIDE, ("M", "K"), "values to quantise, K a multiple of 16"), GLOBAL)
    options = (OptionSpec("layout", LAYOUTS[0], LAYOUTS[:1], "how the scale bytes lie"),)
    owns_padding = False
    production = "nvfp4_quantize"

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return mx_recipes.FLASHINFER_NVFP4_EXACT, mx_recipes.VLLM_NVFP4, mx_recipes.FLASHINFER_NVFP4


def positive_scale(inputs: Inputs) -> None:
    """Refuse global scales that are NaN, zero or negative."""
    scale = inputs["global_scale"]
    bad = scale[~(scale > 0)]
    if bad.numel():
        value = float(bad[0])
        raise InputError(f"global_scale is {value}; it must be positive (2688/amax; 1 for a tensor of zeros)")


# --- back to float32 ----------------------------------------------------------------------------------------------


class BlockDequantiser(Contract):
    """``out = RN_float32(value(q) * scale)``; the padding of the scales is never read, whatever it holds.

    Codes of E2M1 are two in a byte, the low nibble is the even column; its bits 0 to 2 are the place in 0, 0.5, 1, 1.5,
    2, 3, 4, 6 and bit 3 is the sign. Other codes take a byte each. The scale bytes are a matrix, a scale for each block
    of 32 codes of a row, of NVFP4 for 16, C blocks of a row: without tiles (``linear``) ``[M, C]``, in tiles of
    ``128x4`` flat ``[align(M, 128) * align(C, 4)]``, that of row ``r`` and block ``j`` at ``(r // 128 * ceil(C/4) + j
    // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + j % 4``, and in tiles of ``8x4`` flat ``[align(M, 8) * align(C,
    4)]``, at ``(r // 8 * ceil(C/4) + j // 4) * 32 + r % 8 * 4 + j % 4``. An E8M0 byte is ``2^(byte - 127)``, an E4M3
    byte its value with its sign. A NaN code or scale (byte 255 of E8M0) gives NaN, also times 0; an infinite code of
    E5M2 an infinity; above the largest float32 the product is infinite. +0 and -0 are equal.
    """

    section = "Quantisation"
    width: ClassVar[int] = GROUP_32.columns or 1
    packed: ClassVar[bool] = True
    scale_dtype: ClassVar[torch.dtype] = torch.float8_e8m0fnu
    options: ClassVar[tuple[OptionSpec, ...]] = (LAYOUT,)
    gpu = True

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (k := self.shape(inputs)[1]) % self.width:
            raise ShapeError(f"q holds K={k} codes a row, not a multiple of {self.width}, the codes that share a scale")
        self.scales_of(inputs["scale"], inputs, options)

    def shape(self, inputs: Inputs) -> tuple[int, int]:
        """Rows and columns of the values."""
        m, k = inputs["q"].shape
        return m, k * 2 if self.packed else k

    @property
    def block(self) -> Block:
        """The codes that share a scale."""
        return Block(1, self.width)

    def shape_of_scales(self, inputs: Inputs) -> tuple[int, int]:
        """Rows and columns of the scale bytes."""
        m, k = self.shape(inputs)
        return m, k // self.width

    def lying(self, inputs: Inputs, options: Options) -> tuple[tuple[int, int], str]:
        """Rows and columns of the matrix of scale bytes as it lies in memory, and its layout."""
        return self.shape_of_scales(inputs), str(options["layout"])

    def scales_of(self, memory: Tensor, inputs: Inputs, options: Options) -> Tensor:
        """The scale bytes ``[M, C]``, uint8, of :meth:`shape_of_scales` out of their ``memory`` ``[bytes]`` or ``[M,
        C]``. Raises ShapeError where that has another size."""
        return loaded(memory, *self.lying(inputs, options))

    def values(self, inputs: Inputs, options: Options) -> Tensor:
        """The values of the codes, float64 ``[M, K]``."""
        return decode(unpack(inputs["q"]), E2M1) if self.packed else decode(inputs["q"])

    def operands_of(self, inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
        """Values of the codes and of the scales over them, float64 ``[M, K]``."""
        scale = self.scales_of(inputs["scale"], inputs, options).contiguous().view(self.scale_dtype)
        return self.values(inputs, options), grid(self.shape(inputs), self.block).spread(decode(scale))

    def alternatives(self, inputs: Inputs, options: Options) -> list[Tensor]:
        """What right orders of multiplication give, float64 values ``[M, K]`` of float32."""
        values, scale = self.operands_of(inputs, options)
        return [f32(values * scale)]

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        values = self.alternatives(inputs, self.check(inputs, options))[0]
        return to_dtype(values, torch.float32, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)

    def outputs(self, call: Call) -> dict[str, Out]:
        return {"out": Out(self.shape(call.inputs), F32)}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        def ends() -> tuple[dict[str, Admissible], str]:
            alternatives = torch.stack(self.alternatives(call.inputs, call.resolved))
            return {
                "out": Admissible(alternatives.amin(dim=0), alternatives.amax(dim=0), alternatives[0])
            }, "float32 products in either order"

        return [Elements(ends)]


SCALE_BYTES = TensorSpec("scale", Kind.SCALES, (torch.uint8,), None, "scale bytes in their layout")
PACKED = TensorSpec("q", Kind.CODES, (torch.uint8,), ("M", "K"), "codes, two a byte")


@register
class Mxfp8Dequantize(BlockDequantiser):
    name = "mxfp8_dequantize"
    summary = "MXFP8 codes times their E8M0 scales"
    source = "FlashInfer mxfp8_dequantize_host; OCP Microscaling Formats 1.0"
    inputs = (TensorSpec("q", Kind.CODES, FP8, ("M", "K"), "codes"), SCALE_BYTES)
    packed = False


@register
class Mxfp4Dequantize(BlockDequantiser):
    name = "mxfp4_dequantize"
    summary = "MXFP4 codes times their E8M0 scales"
    source = "FlashInfer mxfp4_dequantize; OCP Microscaling Formats 1.0"
    inputs = (PACKED, SCALE_BYTES)


@register
class Nvfp4Dequantize(BlockDequantiser):
    """``value(q) * (scale * g)`` or ``(value(q) * scale) * g``, ``g`` the global scale, each product rounded to
    float32; 16 codes of a row share a scale byte. An E4M3 scale byte is read with its sign; 0x7f and 0xff are NaN."""

    name = "nvfp4_dequantize"
    summary = "NVFP4 codes times their E4M3 scales and the scale of the tensor"
    source = "FlashInfer e2m1_and_ufp8sf_scale_to_float"
    inputs = (PACKED, SCALE_BYTES, TensorSpec("global_scale", Kind.SCALES, F32, ("1",), "amax/2688; it multiplies"))
    width = GROUP_16.columns or 1
    scale_dtype = torch.float8_e4m3fn

    def alternatives(self, inputs: Inputs, options: Options) -> list[Tensor]:
        values, scale = self.operands_of(inputs, options)
        g = decode(inputs["global_scale"])
        return [f32(values * f32(scale * g)), f32(values * scale * g)]


@register
class Nvfp4KvDequantize(Nvfp4Dequantize):
    """``RN_T(RN(RN(value(q) * scale) * g))`` or ``RN_T(RN(value(q) * RN(scale * g)))``, ``g`` the global scale and T
    the dtype of ``out``: above its largest value the output is infinite. Scale bytes are ``[M, K/16]``."""

    name = "nvfp4_kv_dequantize"
    summary = "NVFP4 codes of a KV cache times their E4M3 scales and the scale of the tensor, in 16 bits"
    source = "FlashInfer csrc/fp4_kv_dequantization.cu nvfp4_dequant_vectorized_kernel (0.6.18.post1)"
    options = (
        OptionSpec("layout", LINEAR, (LINEAR,), "how the scale bytes lie"),
        OptionSpec("out_dtype", torch.bfloat16, (torch.bfloat16, torch.float16), "T, the dtype of out"),
    )
    dispatched = False

    def alternatives(self, inputs: Inputs, options: Options) -> list[Tensor]:
        dtype = options["out_dtype"]
        return [decode(rounded_to(each, dtype)) for each in super().alternatives(inputs, options)[::-1]]

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        resolved = self.check(inputs, options)
        return rounded_to(self.alternatives(inputs, resolved)[0], resolved["out_dtype"])

    def outputs(self, call: Call) -> dict[str, Out]:
        return {"out": Out(self.shape(call.inputs), (call.resolved["out_dtype"],))}
