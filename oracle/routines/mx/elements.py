"""Contracts of the other element formats: MXFP6, MXINT8, and DeepGEMM's FP4 under float32 scales.

MXFP6 (E3M2, E2M3) and MXINT8 have one code a byte: torchao keeps six bits unpacked, in the low ones. A NaN scale makes
a block NaN in formats that have no NaN. DeepGEMM's cast of E2M1 takes groups of 32 or 128 along K, the last one
shorter; its ties go toward zero, no code is -0 and NaN is coded 0 (as 6 by the release of April 2026). Its powers of
two may be published as the exponent bytes of four groups in an int32, the first in the lowest byte; groups that do not
exist have the scale 1.

Sources: torchao mx_formats; OCP Microscaling Formats 1.0, 5.3 and 6.3; DeepGEMM deep_gemm/utils/math.py @54e2261
(26/06) and @7f2a703 (26/04).

NaN and infinities are as the recipe has them; bytes that are only moved keep them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import OptionError, ShapeError
from oracle.numbers import mx_recipes
from oracle.numbers.formats import E2M1, E2M3, E3M2, MXINT8, Format, decode
from oracle.numbers.quantize import WIDE
from oracle.numbers.recipes import Recipe
from oracle.numbers.rounding import Overflow, Rounding, f32, to_dtype
from oracle.numbers.scaling import Block
from oracle.routines.base import F32, Call, Contract, Inputs, Options, OptionSpec, Out, TensorSpec, register
from oracle.routines.fault import Fault, Stage, fold
from oracle.routines.layouts.contract import LayoutContract
from oracle.routines.mx.contract import (
    LAYOUT,
    ROUNDING,
    SCALE_BYTES,
    BlockDequantiser,
    BlockQuantiser,
    pack,
    unpack,
)
from oracle.routines.quantisers.contract import FOUR_BITS, UE8M0, QuantiserContract, QuantiserSets
from oracle.routines.traits import Kind
from oracle.verdict.compare import Admissible, Status, Verdict
from oracle.verdict.sets import Elements, Found, Range, Sets, judge_bits, worst_of

SIX: Mapping[str, Format] = {"e3m2": E3M2, "e2m3": E2M3}
ELEMENT_OF_SIX = OptionSpec("element", "e3m2", tuple(SIX), "codes: e3m2 of bias 3, e2m3 of bias 1")
BY_32 = (TensorSpec("x", Kind.VALUES, WIDE, ("M", "K"), "values to quantise, K a multiple of 32"),)
ONE_A_BYTE = TensorSpec("q", Kind.CODES, (torch.uint8,), ("M", "K"), "codes, one a byte")
GRANULARITIES = (32, 128)


@register
class Mxfp6Quantize(BlockQuantiser):
    name = "mxfp6_quantize"
    gpu = False
    summary = "MXFP6: blocks of 32, E3M2 or E2M3 codes one a byte, E8M0 scales"
    source = "torchao mx_formats to_mx"
    inputs = BY_32
    options = (LAYOUT, ROUNDING, ELEMENT_OF_SIX)

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return (mx_recipes.TORCHAO[SIX[str(options["element"])], str(options["rounding"])],)


@register
class Mxint8Quantize(BlockQuantiser):
    """A code is ``RN(64 x / scale)``, clamped to -127 .. 127, in two's complement."""

    name = "mxint8_quantize"
    gpu = False
    summary = "MXINT8: blocks of 32, two's complement codes of value code/64, E8M0 scales"
    source = "OCP Microscaling Formats 1.0, 6.3"
    inputs = BY_32
    options = (LAYOUT,)

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return (mx_recipes.OCP_MXINT8,)


class _OneAByte(BlockDequantiser):
    """Codes of a format that torch has no dtype for, one a byte."""

    inputs = (ONE_A_BYTE, SCALE_BYTES)
    packed = False
    gpu = False

    def values(self, inputs: Inputs, options: Options) -> Tensor:
        """The values of the codes; InputError where a byte is no code of the format."""
        return decode(inputs["q"], self.element_of(options))

    def element_of(self, options: Options) -> Format:
        """Format of the codes."""
        return MXINT8


@register
class Mxfp6Dequantize(_OneAByte):
    name = "mxfp6_dequantize"
    summary = "MXFP6 codes times their E8M0 scales"
    source = "torchao mx_formats; OCP Microscaling Formats 1.0"
    options = (LAYOUT, ELEMENT_OF_SIX)

    def element_of(self, options: Options) -> Format:
        return SIX[str(options["element"])]


@register
class Mxint8Dequantize(_OneAByte):
    """The code -128 is -2, which no quantiser writes."""

    name = "mxint8_dequantize"
    summary = "MXINT8 codes times their E8M0 scales"
    source = "OCP Microscaling Formats 1.0"


# --- DeepGEMM's FP4 -----------------------------------------------------------------------------------------------

GRAN_K = OptionSpec("gran_k", 128, GRANULARITIES, "elements of K that share a scale")
PACKED_UE8M0 = OptionSpec("use_packed_ue8m0", False, (False, True), "four exponent bytes in an int32, row-major")
ONE, WORD = 127, 4
"""The exponent byte of the scale 1, and bytes in a word."""


def words(scale: Tensor) -> Tensor:
    """Float32 powers of two ``scale`` ``[M, G]`` as exponent bytes, int32 ``[M, ceil(G / 4)]``; groups past the last
    are 1."""
    exponents = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return torch.nn.functional.pad(exponents, (0, -scale.shape[1] % WORD), value=ONE).contiguous().view(torch.int32)


def scales_of_words(packed: Tensor, groups: int) -> Tensor:
    """The inverse of :func:`words`: float32 ``[M, G]`` of ``packed`` ``[M, ceil(G/4)]``, int32; the byte 255 is
    infinity, as an exponent of float32 has it."""
    exponents = packed.contiguous().view(torch.uint8)[:, :groups].to(torch.int32)
    return (exponents << 23).view(torch.float32)


@register
class PerTokenCastToFp4(QuantiserContract):
    """Groups of ``gran_k`` elements of a row, the last one may be shorter. Two codes share a byte, the low nibble is
    the even column; ``q`` is uint8 or int8. ``scale`` is float32 ``[M, G]`` or, with ``use_packed_ue8m0``, int32 ``[M,
    ceil(G/4)]`` of the exponent bytes of four groups, the first in the lowest byte; groups past the last have the byte
    127, the scale 1. ``use_packed_ue8m0`` needs ``use_ue8m0``. An infinite element under an infinite scale has a NaN
    quotient: its code is 0, or 7 (6.0) by the release of April 2026."""

    traits = frozenset({FOUR_BITS})
    name = "per_token_cast_to_fp4"
    shapes = {"q": "[M, K/2]", "scale": "[M, ceil(K / gran_k)]; packed: int32 [M, ceil(ceil(K / gran_k) / 4)]"}
    summary = "E2M1 codes two a byte under float32 scales, max(amax, 1e-4)/6; ties toward zero, no -0"
    source = "DeepGEMM deep_gemm/utils/math.py per_token_cast_to_fp4"
    inputs = (TensorSpec("x", Kind.VALUES, WIDE, ("M", "K"), "values to quantise, K even"),)
    options: ClassVar[tuple[OptionSpec, ...]] = (UE8M0, GRAN_K, PACKED_UE8M0)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if inputs["x"].shape[1] % 2:
            raise ShapeError(f"K={inputs['x'].shape[1]} is odd; two codes make a byte, pad K")
        if options["use_packed_ue8m0"] and not options["use_ue8m0"]:
            raise OptionError("use_packed_ue8m0 packs exponents of powers of two; set use_ue8m0=True as well")

    def publish(self, scale: Tensor, options: Options) -> Tensor:
        return words(scale) if options["use_packed_ue8m0"] else scale

    def across(self, call: Call) -> int:
        """Scales of a row."""
        return -(-call.inputs["x"].shape[1] // int(str(call.resolved["gran_k"])))

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        powers = mx_recipes.DEEPGEMM_FP4_UE8M0, mx_recipes.DEEPGEMM_2604_FP4_UE8M0
        plain = mx_recipes.DEEPGEMM_FP4, mx_recipes.DEEPGEMM_2604_FP4
        block = Block(1, int(str(options["gran_k"])))
        return tuple(recipe.with_block(block) for recipe in (powers if options["use_ue8m0"] else plain))

    def outputs(self, call: Call) -> dict[str, Out]:
        m, k = call.inputs["x"].shape
        scale = Out(None, F32)
        if call.resolved["use_packed_ue8m0"]:
            scale = Out((m, -(-self.across(call) // WORD)), (torch.int32,))
        return {"q": Out((m, k // 2), (torch.uint8, torch.int8)), "scale": scale}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [PackedSets(self, call, self.recipes(call, numerics))]

    def published(self, outputs: Mapping[str, Tensor], call: Call) -> dict[str, Tensor]:
        return {"q": pack(outputs["q"]), "scale": self.publish(outputs["scale"], call.resolved)}

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = fold(call, faults, Stage.WRITE, super().kernel(call, faults))
        return outputs

    def split(self, outputs: Found, call: Call, admitted: Sequence[Recipe]) -> tuple[Tensor, Tensor]:
        """Codes ``[M, K]``, uint8, and float32 scales ``[M, G]``."""
        scale = outputs["scale"]
        if call.resolved["use_packed_ue8m0"]:
            scale = scales_of_words(scale, self.across(call))
        return unpack(outputs["q"].view(torch.uint8)), self.scale_of(scale, call, admitted)

    def refused(
        self, call: Call, outputs: Mapping[str, Tensor], right: Mapping[str, Tensor]
    ) -> dict[str, Tensor] | None:
        bad = super().refused(call, outputs, right)
        assert bad is not None
        scale = bad["scale"]
        if call.resolved["use_packed_ue8m0"]:
            pads = torch.nn.functional.pad(scale, (0, -scale.shape[1] % WORD)).to(torch.uint8)
            pads[:, scale.shape[1] :] = self.rest(outputs["scale"], call) != ONE
            scale = pads.contiguous().view(torch.int32) != 0
        return {"q": pack(bad["q"].to(torch.uint8)) != 0, "scale": scale}

    def rest(self, packed: Tensor, call: Call) -> Tensor:
        """The bytes of words ``packed`` ``[M, ceil(G/4)]``, int32, behind the last group: uint8 ``[M, n]``."""
        return packed.contiguous().view(torch.uint8)[:, self.across(call) :]


class PackedSets(QuantiserSets):
    """The codes and scales that one recipe admits as a whole, and the scale 1 in the bytes of groups past the last."""

    def judge(self, outputs: Found) -> Verdict:
        judged, contract = super().judge(outputs), self.contract
        assert isinstance(contract, PerTokenCastToFp4)
        if judged.status is Status.FAILED or not self.call.resolved["use_packed_ue8m0"]:
            return judged
        rest = contract.rest(outputs["scale"], self.call)
        if not rest.numel():
            return judged
        ones = judge_bits(rest, torch.full_like(rest, ONE), output="padding of scale")
        return worst_of([ones, judged]) if ones.status is Status.FAILED else judged

    def ranges(self, expected: Found) -> dict[str, Range] | None:
        """None: neighbours of a packed code are no interval of bytes."""
        return None


@register
class CastBackFromFp4(Contract):
    """``out = RN_float32(value(q) * scale)``, two codes in a byte, the low nibble the even column. The code 8 (-0) is
    read as +0; +0 and -0 of the output are equal. A NaN scale gives NaN, also times 0, and so does an infinite scale
    times 0; else that gives infinities."""

    name = "cast_back_from_fp4"
    shapes = {"out": "[M, 2 P]"}
    section = "Quantisation"
    summary = "E2M1 codes times the float32 scale of their group"
    source = "DeepGEMM deep_gemm/utils/math.py cast_back_from_fp4"
    inputs = (
        TensorSpec("q", Kind.CODES, (torch.uint8, torch.int8), ("M", "P"), "codes, two a byte"),
        TensorSpec("scale", Kind.SCALES, F32, ("M", "G"), "a scale for each group of a row"),
    )
    options = (GRAN_K,)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        k, width, have = inputs["q"].shape[1] * 2, int(str(options["gran_k"])), inputs["scale"].shape[1]
        if have != -(-k // width):
            raise ShapeError(f"scale has {have} columns; K={k} codes in groups of {width} have {-(-k // width)}")

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        resolved = self.check(inputs, options)
        values = decode(unpack(inputs["q"].view(torch.uint8)), E2M1)
        values = torch.where(values == 0, 0.0, values)
        scale = decode(inputs["scale"]).repeat_interleave(int(str(resolved["gran_k"])), dim=1)[:, : values.shape[1]]
        return to_dtype(f32(values * scale), torch.float32, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)

    def outputs(self, call: Call) -> dict[str, Out]:
        m, packed = call.inputs["q"].shape
        return {"out": Out((m, packed * 2), F32)}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        def ends() -> tuple[dict[str, Admissible], str]:
            due = decode(call.truth["out"])
            return {"out": Admissible(due, due, due)}, "one float32 product"

        return [Elements(ends)]


@register
class TransposePackedFp4(LayoutContract):
    """Codes are moved, not looked at: -0 stays -0."""

    name = "transpose_packed_fp4"
    shapes = {"out": "[2 P, M/2] for q [M, P]: the transpose of the codes, two in a byte"}
    section = "Quantisation"
    summary = "codes of [M, N] two a byte along N as those of [N, M] two a byte along M"
    source = "DeepGEMM deep_gemm/utils/math.py transpose_packed_fp4"
    inputs = (TensorSpec("q", Kind.CODES, (torch.uint8, torch.int8), ("M", "P"), "codes, two a byte, M even"),)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (m := inputs["q"].shape[0]) % 2:
            raise ShapeError(f"M={m} is odd; two rows make a byte of the transpose, pad M")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        q = inputs["q"]
        return {"out": pack(unpack(q.view(torch.uint8)).t().contiguous()).view(q.dtype)}
