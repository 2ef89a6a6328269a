"""Contracts of MXFP8 down the columns and in squares, for training, where a matrix and its transpose are multiplied.

    columnwise    blocks of 32 rows of one column; codes ``[M, K]``, a byte at ``[k, m // 32]`` (or ``[m // 32, k]``)
    3d            the columns of each weight ``[N, K]`` of ``[E, N, K]``, its bytes by themselves
    32x32         one scale for 32 rows and 32 columns, so that a weight and its transpose have the same codes; the
                  bytes are those of either direction, each repeated 32 times

Scale bytes of the columns are those of the transpose: the matrix ``[K, M / 32]``, row-major (``linear``) or in tiles,
is what a product of the transpose reads. ``compact`` is that matrix transposed, ``[M / 32, K]``. Codes are judged as
``[M, K]``, whatever their strides. Row-wise bytes of 32x32 are read back by ``mxfp8_dequantize``.

Sources: torchao triton_to_mxfp8_dim1, mxfp8_quantize_cuda and its CuTe-DSL 32x1 kernels; TransformerEngine
quantize_mxfp8.cuh (columnwise, 2D scaling; with_gemm_swizzled_scales). Not covered: squares of 3-D weights, padding
to 128.

NaN and infinities are as the recipe has them; bytes that are only moved keep them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import ShapeError
from oracle.numbers import mx_recipes, recipe_table, recipes
from oracle.numbers.formats import E5M2
from oracle.numbers.quantize import WIDE, Prepared, prepare
from oracle.numbers.recipes import Recipe
from oracle.numbers.scaling import GROUP_32, Block
from oracle.routines.base import FP8, Call, Inputs, Options, OptionSpec, TensorSpec, register
from oracle.routines.mx.contract import (
    ELEMENT,
    ELEMENTS,
    LAYOUTS,
    LINEAR,
    ROUNDING,
    SCALE_BYTES,
    STACKED,
    BlockDequantiser,
    Mxfp8Quantize,
    padding_of,
    stored,
)
from oracle.routines.traits import Kind
from oracle.truth.layout import swizzle_scale, unswizzle_scale

TALL = GROUP_32.columns or 1
"""Rows that share a scale."""
COMPACT = "compact"
LAYOUT = OptionSpec(
    "layout",
    LAYOUTS[0],
    (*LAYOUTS, COMPACT),
    "bytes of the columns: in tiles, linear: [K, M/32], or compact: [M/32, K]",
)
DIRECTIONS = ("rowwise", "columnwise")
DIRECTION = OptionSpec("direction", DIRECTIONS[0], DIRECTIONS, "whose bytes: of the matrix or of its transpose")
ROWS = TensorSpec("x", Kind.VALUES, WIDE, ("M", "K"), "values to quantise, M a multiple of 32")
BOTH = TensorSpec("x", Kind.VALUES, WIDE, ("M", "K"), "values to quantise, M and K multiples of 32")


def upright(layout: str) -> tuple[bool, str]:
    """Whether the bytes lie as ``[M / 32, K]``, and the layout of the matrix that lies."""
    return layout == COMPACT, LINEAR if layout == COMPACT else layout


def tall(m: int) -> None:
    """Refuse rows that are no multiple of a block's."""
    if m % TALL:
        raise ShapeError(f"M={m} is not a multiple of {TALL}, the rows that share a scale; pad M")


class ColumnsQuantiser(Mxfp8Quantize):
    """Codes ``[M, K]``, in any strides, and scale bytes that are, or may be, those of the transpose.

    In tiles, and ``linear``, the bytes of the columns are the matrix ``[K, M/32]``, which a product of the transpose
    reads; ``compact`` is that matrix transposed, ``[M/32, K]``.
    """

    shapes = {"scale": "the bytes of the tiles of [K, M/32], flat; with layout=linear [K, M/32], compact: [M/32, K]"}

    block: ClassVar[Block]

    def transposes(self, call: Call) -> bool:
        """Whether the matrix of bytes lies transposed."""
        return not upright(str(call.resolved["layout"]))[0]

    def lying(self, call: Call) -> tuple[tuple[int, int], str]:
        rows, columns = self.shape_of_scales(call)
        layout = upright(str(call.resolved["layout"]))[1]
        return ((columns, rows) if self.transposes(call) else (rows, columns)), layout

    def memory(self, scale: Tensor, call: Call) -> Tensor:
        return stored(scale.t().contiguous() if self.transposes(call) else scale, self.lying(call)[1])

    def scales_of(self, memory: Tensor, call: Call) -> Tensor:
        scales = super().scales_of(memory, call)
        return scales.t().contiguous() if self.transposes(call) else scales

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        element, mode = ELEMENTS[str(options["element"])], str(options["rounding"])
        known: tuple[Recipe, ...] = (mx_recipes.TORCHAO[element, mode],)
        if mode == "rceil":
            known = (mx_recipes.TE_MXFP8_E5M2 if element is E5M2 else recipes.TE_MXFP8_1X32, *known)
        return tuple(recipe.with_block(self.block) for recipe in known)

    def recipes(self, call: Call, numerics: str | None) -> Sequence[Recipe]:
        """A recipe of 32 columns may be declared: it is taken over the blocks of this contract."""
        named = None if numerics is None else recipe_table.recipes().get(numerics)
        if named is not None and named.block == GROUP_32 and named.element == call.recipe.element:
            return (named.with_block(self.block),)
        return super().recipes(call, numerics)


@register
class Mxfp8QuantizeColumnwise(ColumnsQuantiser):
    name = "mxfp8_quantize_columnwise"
    gpu = False  # its libraries compile it for sm100 and later alone, and no capture is of one
    summary = "MXFP8 down the columns: blocks of 32 rows, E4M3 or E5M2 codes, E8M0 scales of the transpose"
    source = "torchao triton_to_mxfp8_dim1, mxfp8_quantize_cuda; TransformerEngine quantize_mxfp8.cuh, columnwise"
    inputs: ClassVar[tuple[TensorSpec, ...]] = (ROWS,)
    options: ClassVar[tuple[OptionSpec, ...]] = (LAYOUT, ROUNDING, ELEMENT)
    width = 1
    block = Block(TALL, 1)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        tall(inputs["x"].shape[0])

    def shape_of_scales(self, call: Call) -> tuple[int, int]:
        m, k = call.inputs["x"].shape
        return m // TALL, k


@register
class Mxfp8Quantize3d(ColumnsQuantiser):
    """Codes are judged as ``[E, N, K]``; torchao's lie column-major in each weight."""

    shapes = {
        "scale": "[E, align(K, 128) * align(N/32, 4)], the tiles of [K, N/32] of each weight; compact: [E, N/32, K]"
    }

    traits = frozenset({STACKED})
    name = "mxfp8_quantize_3d"
    gpu = False  # its libraries compile it for sm100 and later alone, and no capture is of one
    summary = "MXFP8 down the columns of the weights of experts, E8M0 scales of the transpose of each in its own tiles"
    source = "torchao mxfp8_quantize_cuda_3d, its CuTe-DSL kernel; scale_block_dim2=1"
    inputs = (TensorSpec("x", Kind.VALUES, WIDE, ("E", "N", "K"), "weights to quantise, N a multiple of 32"),)
    options = (OptionSpec("layout", LAYOUTS[0], (LAYOUTS[0], COMPACT), "in tiles, or [E, N/32, K]"), ROUNDING, ELEMENT)
    width = 1
    block = Block(TALL, 1)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (n := inputs["x"].shape[1]) % TALL:
            raise ShapeError(f"N={n} is not a multiple of {TALL}, the rows that share a scale; pad N")

    def prepared_of(self, inputs: Inputs, options: Options) -> Prepared:
        return prepare(inputs["x"].flatten(0, 1))

    def shape_of_scales(self, call: Call) -> tuple[int, int]:
        e, n, k = call.inputs["x"].shape
        return e * n // TALL, k

    def memory(self, scale: Tensor, call: Call) -> Tensor:
        each = scale.reshape(call.inputs["x"].shape[0], -1, scale.shape[1])
        return swizzle_scale(each.mT.contiguous()) if self.transposes(call) else each.contiguous()

    def scales_of(self, memory: Tensor, call: Call) -> Tensor:
        _, n, k = call.inputs["x"].shape
        raw = memory.view(torch.uint8)
        each = unswizzle_scale(raw, k, n // TALL, tile=LAYOUTS[0]).mT if self.transposes(call) else raw
        return each.flatten(0, 1).contiguous()

    def padding(self, call: Call) -> Tensor | None:
        e, n, k = call.inputs["x"].shape
        pads = padding_of((k, n // TALL), LAYOUTS[0])
        return pads.expand(e, -1) if pads is not None and self.transposes(call) else None

    def codes(self, codes: Tensor, call: Call) -> Tensor:
        return codes.reshape(call.inputs["x"].shape)

    def codes_of(self, q: Tensor, call: Call) -> Tensor:
        return q.flatten(0, 1)

    def shape_of_codes(self, call: Call) -> tuple[int, ...]:
        return tuple(call.inputs["x"].shape)


@register
class Mxfp8Quantize2d(ColumnsQuantiser):
    """Blocks of 32x32. ``rowwise`` bytes are the matrix ``[M, K/32]`` with 32 equal rows, in tiles or, ``linear`` and
    ``compact`` alike, as it is. ``columnwise`` ones are the matrix ``[K, M/32]`` of the transpose, with 32 equal rows,
    in tiles or ``linear``; ``compact`` is that matrix transposed, ``[M/32, K]``. M and K are multiples of 32."""

    shapes = {
        "scale": "rowwise: the bytes of the tiles of [M, K/32], linear and compact [M, K/32]; columnwise: the bytes of "
        "the tiles of [K, M/32], linear [K, M/32], compact [M/32, K]"
    }

    name = "mxfp8_quantize_2d"
    gpu = False  # its libraries compile it for sm100 and later alone, and no capture is of one
    summary = "MXFP8 of weights: one scale for 32x32, so that a weight and its transpose have the same codes"
    source = "TransformerEngine quantize_mxfp8.cuh with 2D scaling"
    inputs: ClassVar[tuple[TensorSpec, ...]] = (BOTH,)
    options: ClassVar[tuple[OptionSpec, ...]] = (LAYOUT, DIRECTION, ELEMENT)
    repeats = TALL
    block = Block(TALL, TALL)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        tall(inputs["x"].shape[0])

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return super().declared(inputs, {**options, "rounding": "rceil"})

    def across(self, call: Call) -> bool:
        """Whether the bytes are those of the transpose."""
        return bool(call.resolved["direction"] == DIRECTIONS[1])

    def transposes(self, call: Call) -> bool:
        """Row-wise bytes lie as they are; ``compact`` is for those of the transpose what [M, K/32] is for them."""
        return self.across(call) and super().transposes(call)

    def shape_of_scales(self, call: Call) -> tuple[int, int]:
        m, k = call.inputs["x"].shape
        return (m // TALL, k) if self.across(call) else (m, k // TALL)

    def repeated(self, scale: Tensor, call: Call) -> Tensor:
        return scale.repeat_interleave(TALL, dim=1 if self.across(call) else 0)

    def distinct(self, scale: Tensor, call: Call) -> Tensor:
        return (scale[:, ::TALL] if self.across(call) else scale[::TALL]).contiguous()


@register
class Mxfp8DequantizeColumnwise(BlockDequantiser):
    """Here the matrix of scale bytes is ``[K, M/32]``, in tiles or ``linear``; ``compact``: ``[M/32, K]``."""

    name = "mxfp8_dequantize_columnwise"
    summary = "MXFP8 codes times the E8M0 scales of 32 rows each"
    source = "TransformerEngine dequantize_mxfp8.cuh, columnwise; OCP Microscaling Formats 1.0"
    inputs = (TensorSpec("q", Kind.CODES, FP8, ("M", "K"), "codes, M a multiple of 32"), SCALE_BYTES)
    options: ClassVar[tuple[OptionSpec, ...]] = (LAYOUT,)
    width = 1
    packed = False
    gpu = False

    @property
    def block(self) -> Block:
        return Block(TALL, 1)

    def check(self, inputs: Inputs, options: Options) -> dict[str, object]:
        q = inputs.get("q")
        if isinstance(q, Tensor) and q.dim() == 2:
            tall(len(q))
        return super().check(inputs, options)

    def shape_of_scales(self, inputs: Inputs) -> tuple[int, int]:
        m, k = self.shape(inputs)
        return m // TALL, k

    def lying(self, inputs: Inputs, options: Options) -> tuple[tuple[int, int], str]:
        rows, columns = self.shape_of_scales(inputs)
        as_is, layout = upright(str(options["layout"]))
        return ((rows, columns) if as_is else (columns, rows)), layout

    def scales_of(self, memory: Tensor, inputs: Inputs, options: Options) -> Tensor:
        scales = super().scales_of(memory, inputs, options)
        return scales if upright(str(options["layout"]))[0] else scales.t()
