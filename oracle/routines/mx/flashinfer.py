"""Contracts of FlashInfer's other NVFP4 quantisers: batches, shuffled weights, silu-and-mul before the quantiser.

    nvfp4_batched_quantize          each matrix of a batch in tiles of its own; codes and scales of [B, M, K]
    nvfp4_quantize_shuffled         rows of codes and of scales in the order of TensorRT-LLM's kernels, then tiles
    silu_and_mul_nvfp4_quantize     RN(silu(gate) up) in the dtype of x, and NVFP4 of that: x [M, 2 I]
    silu_and_mul_mxfp8_quantize, silu_and_mul_mxfp4_quantize    the same of MX: no library publishes them alone
    silu_and_mul_scaled_nvfp4_experts_quantize      the same of the first rows of each expert's buffer [G, M, 2 I]
    silu_and_mul_scaled_fp4_experts_quant, silu_and_mul_mxfp4_experts_quant    vLLM's, of rows expert by expert [M, 2 I]

Verdicts on a batch count the rows of all its matrices below one another. Source: FlashInfer flashinfer/quantization
@fb28d7242. Not covered: other tile heights of a shuffle.

NaN and infinities are as the recipe has them; bytes that are only moved keep them.
Source: FlashInfer flashinfer/quantization @fb28d7242.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import ShapeError
from oracle.numbers import mx_recipes
from oracle.numbers.quantize import WIDE, Ends, Prepared, prepare
from oracle.numbers.recipes import Recipe
from oracle.routines.base import Call, Inputs, Options, OptionSpec, TensorSpec, register
from oracle.routines.fused.kernels import gated
from oracle.routines.mx.contract import (
    GLOBAL,
    LAYOUT,
    LAYOUTS,
    MXFP4,
    MXFP8,
    STACKED,
    BlockQuantiser,
    Nvfp4Quantize,
    padding_of,
)
from oracle.routines.mx.experts import (
    GLOBALS,
    MASK,
    OFFSETS,
    ExpertQuantiser,
    Mxfp4ExpertsQuant,
    ScaledFp4ExpertsQuant,
    ScaledFp4GroupedQuantize,
)
from oracle.routines.traits import Kind, Trait
from oracle.truth.layout import inverse_order, row_order, swizzle_scale, unswizzle_scale
from oracle.verdict.sets import rounded_to

TILES = OptionSpec("layout", LAYOUTS[0], LAYOUTS[:2], "height x width of a tile of the scale bytes")
SHUFFLE = 32
"""Rows that are permuted among themselves."""
SILU = Trait("quantises silu(gate) * up to NVFP4")


class _Encoded(Nvfp4Quantize):
    """NVFP4 under 2688/amax of the tensor."""

    gpu = False  # its libraries compile it for sm100 and later alone, and no capture is of one
    options: ClassVar[tuple[OptionSpec, ...]] = (LAYOUT,)

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return mx_recipes.FLASHINFER_NVFP4_EXACT, mx_recipes.FLASHINFER_NVFP4, mx_recipes.FLASHINFER_CUTE_NVFP4


@register
class Nvfp4BatchedQuantize(_Encoded):
    """Each matrix of the batch has tiles, and padding, of its own: ``scale [B, bytes]``."""

    traits = frozenset({STACKED})
    name = "nvfp4_batched_quantize"
    shapes = {"q": "[B, M, K/2]", "scale": "[B, bytes]: the bytes of the tiles of [M, K/16]"}
    summary = "NVFP4 of a batch of matrices under one global scale, the scales of each in tiles of its own"
    source = "FlashInfer nvfp4_batched_quantize"
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("x", Kind.VALUES, WIDE, ("B", "M", "K"), "K a multiple of 16"),
        GLOBAL,
    )
    options = (TILES,)

    def prepared_of(self, inputs: Inputs, options: Options) -> Prepared:
        return prepare(inputs["x"].flatten(0, 1), global_scale=inputs["global_scale"])

    def shape_of_scales(self, call: Call) -> tuple[int, int]:
        batch, m, k = call.inputs["x"].shape
        return batch * m, k // self.width

    def memory(self, scale: Tensor, call: Call) -> Tensor:
        batch = call.inputs["x"].shape[0]
        return swizzle_scale(scale.reshape(batch, -1, scale.shape[1]), tile=str(call.resolved["layout"]))

    def scales_of(self, memory: Tensor, call: Call) -> Tensor:
        _, m, k = call.inputs["x"].shape
        tile = str(call.resolved["layout"])
        return unswizzle_scale(memory.view(torch.uint8), m, k // self.width, tile=tile).flatten(0, 1)

    def padding(self, call: Call) -> Tensor | None:
        batch, m, k = call.inputs["x"].shape
        pads = padding_of((m, k // self.width), str(call.resolved["layout"]))
        return None if pads is None else pads.expand(batch, -1)

    def codes(self, codes: Tensor, call: Call) -> Tensor:
        return super().codes(codes, call).reshape(self.shape_of_codes(call))

    def codes_of(self, q: Tensor, call: Call) -> Tensor:
        return super().codes_of(q.flatten(0, 1), call)

    def shape_of_codes(self, call: Call) -> tuple[int, ...]:
        batch, m, k = call.inputs["x"].shape
        return batch, m, k // 2


@register
class Nvfp4QuantizeShuffled(_Encoded):
    """Row ``i`` of ``q``, and of the matrix of scales before it is put in tiles, is that of row ``order[i]`` of ``x``;
    in each 32 rows ``order`` is 0 4 .. 28 1 5 .. 29 2 6 .. 30 3 7 .. 31 (TensorRT-LLM's shuffleMatrixA)."""

    name = "nvfp4_quantize_shuffled"
    summary = "NVFP4 of a weight whose rows, of codes and of scales, are in the order of TensorRT-LLM's kernels"
    source = "FlashInfer nvfp4_quantize(do_shuffle=True)"
    inputs = (TensorSpec("x", Kind.VALUES, WIDE, ("M", "K"), "M a multiple of 32, K of 16"), GLOBAL)
    options = (OptionSpec("layout", LAYOUTS[0], LAYOUTS[:1], "how the scale bytes lie"),)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (m := inputs["x"].shape[0]) % SHUFFLE:
            raise ShapeError(f"M={m} is not a multiple of {SHUFFLE}, the rows that are permuted; pad M")

    def memory(self, scale: Tensor, call: Call) -> Tensor:
        return super().memory(scale[self._order(scale)], call)

    def scales_of(self, memory: Tensor, call: Call) -> Tensor:
        scales = super().scales_of(memory, call)
        return scales[inverse_order(self._order(scales))].contiguous()

    def codes(self, codes: Tensor, call: Call) -> Tensor:
        return super().codes(codes, call)[self._order(codes)]

    def codes_of(self, q: Tensor, call: Call) -> Tensor:
        return super().codes_of(q[inverse_order(self._order(q))], call)

    @staticmethod
    def _order(x: Tensor) -> Tensor:
        return row_order(x.shape[0]).to(x.device)


def activated(x: Tensor) -> tuple[Tensor, Ends]:
    """``RN(silu(gate) * up)`` of ``x [M, 2 I]`` in its dtype, and what a device's silu may make of it."""
    value = gated(x, "product")
    due, unknown = value.expected, value.sets.open
    free = torch.isnan(due) if unknown is None else torch.isnan(due) | unknown
    low, high = (torch.where(free, due, rounded_to(edge, value.dtype)) for edge in (value.sets.low, value.sets.high))
    return due, Ends(low, high, unknown)


def halved(inputs: Inputs, width: int) -> None:
    """Refuse gates and values whose number is no multiple of a scale's."""
    if (c := inputs["x"].shape[-1]) % (2 * width):
        raise ShapeError(f"x has {c} columns: I={c / 2:g} is not a multiple of {width}; pad I")


class Activated(BlockQuantiser):
    """What is quantised is ``RN(silu(gate) * up)``, rounded once, to the dtype of ``x``; gate is ``x[:, :I]``, up the
    rest, ``silu(x) = x / (1 + exp(-x))``. A device's silu errs, so that the value, its scale and its codes are
    intervals. Codes are those of ``[M, I]``."""

    traits = frozenset({SILU})
    gpu = False  # no capture is of one
    shapes = {
        "q": "[M, I], two codes of E2M1 in a byte: [M, I/2]",
        "scale": "[bytes] of the tiles of [M, I / block], flat; linear: that matrix",
    }
    options: ClassVar[tuple[OptionSpec, ...]] = (LAYOUT,)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        halved(inputs, self.width)

    def prepared_of(self, inputs: Inputs, options: Options) -> Prepared:
        x, ends = activated(inputs["x"])
        return prepare(x, global_scale=inputs.get("global_scale"), ends=ends)

    def shape_of_scales(self, call: Call) -> tuple[int, int]:
        m, c = call.inputs["x"].shape
        return m, c // 2 // self.width

    def shape_of_codes(self, call: Call) -> tuple[int, ...]:
        m, c = call.inputs["x"].shape
        return m, c // 2 >> self.packed


@register
class SiluAndMulNvfp4Quantize(Activated, _Encoded):
    name = "silu_and_mul_nvfp4_quantize"
    summary = "silu(gate) * up rounded to the dtype of x, quantised to NVFP4"
    source = "FlashInfer silu_and_mul_nvfp4_quantize"
    inputs = (TensorSpec("x", Kind.VALUES, WIDE, ("M", "C"), "gate, then up: [M, 2 I], I a multiple of 16"), GLOBAL)


GATES_OF_32 = TensorSpec("x", Kind.VALUES, WIDE, ("M", "C"), "gate, then up: [M, 2 I], I a multiple of 32")


@register
class SiluAndMulMxfp8Quantize(Activated):
    name = "silu_and_mul_mxfp8_quantize"
    summary = "silu(gate) * up rounded to the dtype of x, quantised to MXFP8 (E4M3)"
    source = "derived: the value of silu_and_mul_nvfp4_quantize under the recipes of mxfp8_quantize"
    inputs = (GATES_OF_32,)
    production = "silu_and_mul_block_scaled_quant"

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return MXFP8


@register
class SiluAndMulMxfp4Quantize(Activated):
    name = "silu_and_mul_mxfp4_quantize"
    summary = "silu(gate) * up rounded to the dtype of x, quantised to MXFP4"
    source = "derived: the value of silu_and_mul_nvfp4_quantize under the recipes of mxfp4_quantize"
    inputs = (GATES_OF_32,)
    packed = True
    production = "silu_and_mul_block_scaled_quant"

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return MXFP4


class _ActivatedRows(ExpertQuantiser):
    """What is quantised is that of ``silu_and_mul_nvfp4_quantize``: ``RN(silu(gate) * up)`` in the dtype of ``x``, of
    the rows of each expert."""

    traits = frozenset({SILU})

    def refuse(self, inputs: Inputs, options: Options) -> None:
        halved(inputs, self.width)

    def columns(self, inputs: Inputs) -> int:
        return inputs["x"].shape[-1] // 2

    def prepared_of(self, inputs: Inputs, options: Options) -> Prepared:
        row, expert, _ = self._rows(inputs, options)
        x, ends = activated(inputs["x"].flatten(0, -2)[row])
        scale = inputs.get("global_scale")
        return prepare(x, global_scale=None if scale is None else scale[expert], ends=ends)


@register
class SiluAndMulScaledNvfp4ExpertsQuantize(_ActivatedRows, ScaledFp4GroupedQuantize):
    name = "silu_and_mul_scaled_nvfp4_experts_quantize"
    summary = "silu(gate) * up of the first rows of each expert, quantised to NVFP4 for masked grouped products"
    source = "FlashInfer silu_and_mul_scaled_nvfp4_experts_quantize"
    inputs = (
        TensorSpec("x", Kind.VALUES, WIDE, ("G", "M", "C"), "gate, then up: [G, M, 2 I], I a multiple of 16"),
        MASK,
        GLOBALS,
    )


@register
class SiluAndMulScaledFp4ExpertsQuant(_ActivatedRows, ScaledFp4ExpertsQuant):
    name = "silu_and_mul_scaled_fp4_experts_quant"
    summary = "silu(gate) * up of rows that lie expert by expert, quantised to NVFP4"
    source = "vLLM silu_and_mul_scaled_fp4_experts_quant"
    inputs = (
        TensorSpec("x", Kind.VALUES, WIDE, ("M", "C"), "gate, then up: [M, 2 I], I a multiple of 16"),
        GLOBALS,
        OFFSETS,
    )


@register
class SiluAndMulMxfp4ExpertsQuant(_ActivatedRows, Mxfp4ExpertsQuant):
    name = "silu_and_mul_mxfp4_experts_quant"
    summary = "silu(gate) * up of rows that lie expert by expert, quantised to MXFP4"
    source = "vLLM silu_and_mul_mxfp4_experts_quant"
    inputs = (
        TensorSpec("x", Kind.VALUES, WIDE, ("M", "C"), "gate, then up: [M, 2 I], I a multiple of 32"),
        OFFSETS,
    )
