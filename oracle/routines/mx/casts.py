"""Contracts of casts between FP8 with scales of 128 and MXFP8.

    block_scales_to_mxfp8    scales that are powers of two, repeated: byte = exponent, four columns (and 128 rows) each
    fp8_block_to_mxfp8       codes times float32 scales, rounded to the dtype of an engine's weights, and quantised
    again mxfp8_to_fp8_block       MXFP8 codes times their scales in that dtype, and 128x128 blocks of E4M3 again

The first is a relabelling: no code changes and no value does. The other two round twice; the value in between is one of
``dtype``, ``RN(code * scale)``, a product of 28 bits that float32 rounds first or not: one value or two.

Sources: TransformerEngine swizzle_block_scaling_to_mxfp8_scaling_factors (block-scaled products on sm100 through
MXFP8); SGLang requant_npu_arch35_block_fp8_to_mxfp8 and vLLM-Ascend fp8_block.py (FP8 checkpoints as MXFP8); DeepGEMM's
and vLLM's 128x128 casts of what MXFP8 checkpoints hold. Not covered: scales that are no powers of two without a
requantisation.

NaN and infinities are as the recipe has them; bytes that are only moved keep them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from oracle.errors import InputError, ShapeError
from oracle.numbers import recipes
from oracle.numbers.formats import decode
from oracle.numbers.quantize import Ends, Prepared, prepare
from oracle.numbers.recipes import Recipe
from oracle.numbers.rounding import Overflow, Rounding, exponent_of, f32, to_dtype
from oracle.numbers.scaling import GROUP_32, Block, grid
from oracle.routines.base import E4M3, F32, Call, Inputs, Options, OptionSpec, Out, TensorSpec, register
from oracle.routines.layouts.contract import LayoutContract
from oracle.routines.mx.contract import LAYOUT, Mxfp8Quantize, loaded, stored
from oracle.routines.quantisers.contract import QuantiserContract
from oracle.routines.traits import Kind

BLOCK, GROUP = 128, 32
DTYPES: Mapping[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
DTYPE = OptionSpec("dtype", "bfloat16", tuple(DTYPES), "what the values are rounded to between the two casts")
CODES = TensorSpec("x", Kind.CODES, E4M3, ("M", "K"), "codes, K a multiple of 32")


def spread(scale: Tensor, shape: tuple[int, int]) -> Tensor:
    """``scale`` ``[M | ceil(M/128), ceil(K/128)]`` of any dtype over the elements of ``[M, K]``, of the same dtype.

    Raises ShapeError: they have another shape.
    """
    m, k = shape
    rows, columns = scale.shape
    if columns != -(-k // BLOCK) or rows not in (m, -(-m // BLOCK)):
        raise ShapeError(f"scale has shape {list(scale.shape)}; codes {list(shape)} have blocks of 1x128 or 128x128")
    return grid(shape, Block(1 if rows == m else BLOCK, BLOCK)).spread(scale)


def between(q: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """``RN(RN32(code * scale))`` in ``dtype`` of ``q`` and ``scale``, both ``[M, K]``, and the least and the largest of
    it and ``RN(code * scale)``: three tensors ``[M, K]`` of that dtype."""
    product = decode(q) * decode(scale)
    ways = [to_dtype(y, dtype, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF) for y in (f32(product), product)]
    wide = [way.double() for way in ways]
    low, high = (torch.where(wide[0] <= wide[1], *pair) for pair in ((ways[0], ways[1]), (ways[1], ways[0])))
    return ways[0], low, high


@register
class BlockScalesToMxfp8(LayoutContract):
    """Byte ``[m, j]`` is the exponent of the scale of row ``m`` and columns ``32 j`` to ``32 j + 31``, plus 127: a
    scale is repeated over four columns of bytes (and 128 rows). No code changes. Scales are powers of two from 2^-127
    to 2^127, others are refused; tiles lie as ``mxfp8_quantize`` writes them, their padding is zero."""

    name = "block_scales_to_mxfp8"
    shapes = {"out": "the bytes of the tiles of [M, K/32], 128x4 or 8x4, flat; linear: [M, K/32]"}
    section = "Quantisation"
    summary = "power-of-two scales of 1x128 or 128x128 as E8M0 bytes of 1x32, in tiles"
    source = "TransformerEngine nvte_swizzle_block_scaling_to_mxfp8_scaling_factors"
    inputs = (
        CODES,
        TensorSpec("scale", Kind.SCALES, F32, ("R", "C"), "powers of two, [M or ceil(M/128), ceil(K/128)]"),
    )
    options = (LAYOUT,)
    gpu = False  # its libraries compile it for sm100 and later alone, and no capture is of one

    def refuse(self, inputs: Inputs, options: Options) -> None:
        divisible(inputs["x"])
        spread(inputs["scale"], (inputs["x"].shape[0], inputs["x"].shape[1]))
        scale = decode(inputs["scale"])
        good = (scale > 0) & torch.isfinite(scale) & (torch.frexp(scale)[0] == 0.5) & (scale >= 2.0**-127)
        if not bool(good.all()):
            raise InputError(f"scale holds {float(scale[~good][0])}; pass powers of two from 2^-127 to 2^127")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        m, k = inputs["x"].shape
        each = spread(inputs["scale"], (m, k))[:, ::GROUP]
        return {"out": stored((exponent_of(decode(each)) + 127).to(torch.uint8), str(options["layout"]))}

    def why_mistrust(self, inputs: Inputs) -> str | None:
        return super().why_mistrust({"scale": inputs["scale"]})


def divisible(q: Tensor, width: int = GROUP) -> None:
    """Refuse codes ``q`` ``[M, K]`` of any dtype whose K is no multiple of a scale's. Raises ShapeError."""
    if q.shape[1] % width:
        raise ShapeError(f"K={q.shape[1]} is not a multiple of {width}, the codes that share a scale; pad K")


@register
class Fp8BlockToMxfp8(Mxfp8Quantize):
    """What is quantised is ``RN(code * scale)`` in ``dtype``, which may be rounded to float32 first."""

    name = "fp8_block_to_mxfp8"
    shapes = {"q": "[M, K]", "scale": "the bytes of the tiles of [M, K/32], 128x4 or 8x4, flat; linear: [M, K/32]"}
    gpu = False
    summary = "FP8 codes under float32 scales of 1x128 or 128x128, quantised again to MXFP8"
    source = "SGLang requant_npu_arch35_block_fp8_to_mxfp8; vLLM-Ascend fp8_block.py"
    inputs = (CODES, TensorSpec("block_scale", Kind.SCALES, F32, ("R", "C"), "[M or ceil(M/128), ceil(K/128)]"))
    options = (LAYOUT, DTYPE)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        spread(inputs["block_scale"], (inputs["x"].shape[0], inputs["x"].shape[1]))

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return super().declared(inputs, {"element": "e4m3", "rounding": "rceil"})

    def prepared_of(self, inputs: Inputs, options: Options) -> Prepared:
        x = inputs["x"]
        scale = spread(inputs["block_scale"], (x.shape[0], x.shape[1]))
        nominal, low, high = between(x, scale, DTYPES[str(options["dtype"])])
        return prepare(nominal, ends=Ends(low, high))


@register
class Mxfp8ToFp8Block(QuantiserContract):
    """What is quantised is ``RN(code * 2^(byte - 127))`` in ``dtype``, which may be rounded to float32 first. Scale
    bytes lie as ``mxfp8_quantize`` writes them; their padding is not read."""

    name = "mxfp8_to_fp8_block"
    shapes = {"q": "[M, K]", "scale": "[ceil(M/128), ceil(K/128)]"}
    summary = "MXFP8 codes times their scales, quantised again to E4M3 under float32 scales of 128x128"
    source = "DeepGEMM per_block_cast_to_fp8 of dequantised MXFP8 weights"
    inputs = (
        CODES,
        TensorSpec(
            "mx_scale",
            Kind.SCALES,
            (torch.uint8,),
            None,
            "bytes of the matrix [M, K/32]: in tiles of 128x4 or 8x4, or linear",
        ),
    )
    options = (LAYOUT, DTYPE)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        divisible(inputs["x"])
        self._scale(inputs, options)

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return (recipes.DEEPGEMM_128X128,)

    def prepared_of(self, inputs: Inputs, options: Options) -> Prepared:
        x = inputs["x"]
        scale = grid(x.shape, GROUP_32).spread(self._scale(inputs, options))
        nominal, low, high = between(x, scale, DTYPES[str(options["dtype"])])
        return prepare(nominal, ends=Ends(low, high))

    def outputs(self, call: Call) -> dict[str, Out]:
        return {"q": Out(tuple(call.inputs["x"].shape), E4M3), "scale": Out(None, F32)}

    def _scale(self, inputs: Inputs, options: Options) -> Tensor:
        m, k = inputs["x"].shape
        return loaded(inputs["mx_scale"], (m, k // GROUP), str(options["layout"])).view(torch.float8_e8m0fnu)
