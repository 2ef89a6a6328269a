"""Contracts of CUTLASS' products of FP8 activations and int4 weights with group scales (W4A8), dense and grouped.

Weights and scales as the kernel wants them are layouts with contracts of their own:

    unified_encode_int4b, cutlass_encode_and_reorder_int4b    of the weights
    cutlass_pack_scale_fp8                                    of the group scales

The order of the weights is CuTe's: a warp's part of the left operand of a 64x32 FP8 product is 16 rows by 32 columns.
Sources: vLLM csrc/quantization/cutlass_w4a8; NVIDIA/cutlass examples/55_hopper_mixed_dtype_gemm/packed_scale.hpp,
reorder_utils.hpp (compute_memory_reordering_atom), CuTe mma_traits_sm90_gmma.hpp (ALayout_64x32).
Not covered: groups of other lengths than 128, zero points, a bias; weights reordered for 16-bit activations.

NaN scales give NaN weights.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from oracle.errors import InputError, ShapeError
from oracle.numbers.formats import decode
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.routines.base import E4M3, F32, Call, Inputs, Operands, Options, TensorSpec, register
from oracle.routines.layouts.contract import LayoutContract
from oracle.routines.products.batched import NARROW, NARROW_OUT, OFFSETS, SIZES, CutlassBlockwiseGrouped
from oracle.routines.products.contract import ROW_NUMERICS, ProductContract
from oracle.routines.traits import Kind
from oracle.truth.gemm import ScaledProduct
from oracle.verdict.products import Part

INT4 = (torch.int8,)
GROUP = 128
Q = TensorSpec("b_q", Kind.CODES, INT4, ("N", "K"), "weights -8..7")
GROUP_SCALES = TensorSpec(
    "b_group_scales", Kind.SCALES, E4M3, ("K/128", "N"), "scale of 128 weights of a row", contiguous=True
)
TOKENS = TensorSpec("a_token_scales", Kind.SCALES, F32, ("M", "1"), "one scale for each row", contiguous=True)


def weights(q: Tensor, scales: Tensor) -> Tensor:
    """E4M3 ``[N, K]``: the products of weights ``q`` ``[N, K]``, int8, and their group's ``scales`` ``[K/128, N]``,
    float8_e4m3fn, rounded to nearest even and saturated; a NaN scale gives NaN. Weights that a fault has decoded, in
    floats, stay as they are."""
    if q.is_floating_point():
        return q
    each = decode(scales).t().repeat_interleave(GROUP, dim=1)[:, : q.shape[1]]
    overflow = Overflow.SATURATE
    return to_dtype(q.to(torch.float64) * each, torch.float8_e4m3fn, rounding=Rounding.NEAREST_EVEN, overflow=overflow)


def check_int4(q: Tensor) -> None:
    """Refuse values of ``q`` ``[...]``, int8, outside -8..7. Raises InputError."""
    low, high = int(q.min()), int(q.max())
    if low < -8 or high > 7:
        raise InputError(f"b_q holds {low if low < -8 else high}; an int4 weight is -8..7")


class Int4Weights:
    """The weights are ``w[n, k] = RN_e4m3(q[n, k] * s[k // 128, n])``, to nearest even; a product beyond 448 saturates,
    and a NaN scale gives NaN. The tensor core multiplies E4M3 by E4M3, so the kernel looks each 4-bit weight up in a
    table of the eight E4M3 roundings of ``-8 s .. -1 s``: a scale of 1.125 and a weight of 7 give 8, not 7.875. Then
    ``out[m, n] = RN(channel[n] * (token[m] * sum_k a[m, k] * w[n, k]))``, or with the two scales in the other order, or
    their product first: scales after the whole sum. ``q`` are
    two's-complement values -8..7, one in an int8 each; another value is refused."""


@register
class W4A8(Int4Weights, ProductContract):
    name = "cutlass_w4a8_mm"
    summary = "a [M, K] times int4 weights [N, K] with a scale for 128 each; then one for each row and channel"
    source = "vLLM csrc/quantization/cutlass_w4a8/w4a8_mm_entry.cu"
    numerics = ROW_NUMERICS
    roles = {"a": "a", "b": "b_q", "a_scale": "a_token_scales", "b_scale": "b_channel_scales"}
    out_dtypes = NARROW
    options = (NARROW_OUT,)
    inputs = (
        TensorSpec("a", Kind.CODES, E4M3, ("M", "K"), "activation codes"),
        Q,
        GROUP_SCALES,
        TensorSpec("b_channel_scales", Kind.SCALES, F32, ("N", "1"), "one scale for each channel", contiguous=True),
        TOKENS,
    )

    def parts(self, inputs: Inputs) -> list[Part]:
        b = weights(inputs["b_q"], inputs["b_group_scales"])
        scales = inputs["a_token_scales"], inputs["b_channel_scales"]
        return [Part(ScaledProduct(inputs["a"], b, *scales, block=b.shape[1], b_rows=1))]

    def refuse(self, inputs: Inputs, options: Options) -> None:
        check_int4(inputs["b_q"])


@register
class W4A8Moe(Int4Weights, CutlassBlockwiseGrouped):
    name = "cutlass_w4a8_moe_mm"
    summary = "rows sorted by expert, runs of any length; int4 weights with a scale for 128 each"
    source = "vLLM csrc/quantization/cutlass_w4a8/w4a8_grouped_mm_entry.cu"
    numerics = ROW_NUMERICS
    roles = W4A8.roles
    inputs = (
        TensorSpec("a", Kind.CODES, E4M3, ("M", "K"), "activation codes"),
        TensorSpec("b_q", Kind.CODES, INT4, ("G", "N", "K"), "weights -8..7 of every expert"),
        TensorSpec(
            "b_group_scales", Kind.SCALES, E4M3, ("G", "K/128", "N"), "scale of 128 weights of a row", contiguous=True
        ),
        TensorSpec("b_channel_scales", Kind.SCALES, F32, ("G", "N"), "one scale for each channel", contiguous=True),
        TOKENS,
        OFFSETS,
        SIZES,
    )

    def operand(self, inputs: Inputs, g: int) -> Tensor:
        return weights(inputs["b_q"][g], inputs["b_group_scales"][g])

    def operands(self, call: Call) -> Operands:
        return replace(super().operands(call), decoded=partial(self.operand, call.inputs))

    def refuse(self, inputs: Inputs, options: Options) -> None:
        check_int4(inputs["b_q"])


def encoded(b: Tensor) -> Tensor:
    """Bytes ``b`` ``[...]``, uint8, of two nibbles each, 1..7 of them replaced by ``8 - v``; uint8 of any shape, the
    same."""
    low, high = (torch.where((v > 0) & (v < 8), 8 - v, v) for v in (b & 15, b >> 4))
    return high << 4 | low


def packed(scales: Tensor) -> Tensor:
    """E4M3 ``[8 n]`` of ``scales`` ``[...]``, ``n`` of float8_e4m3fn: ``-8 s`` to ``-s`` rounded to nearest even and
    saturated, scale by scale."""
    values = decode(scales).flatten()[:, None] * -torch.arange(8, 0, -1, device=scales.device).to(torch.float64)
    overflow = Overflow.SATURATE
    return to_dtype(values, torch.float8_e4m3fn, rounding=Rounding.NEAREST_EVEN, overflow=overflow).flatten()


@register
class EncodeInt4(LayoutContract):
    """Each of the two nibbles ``v`` of a byte from 1 to 7 becomes ``8 - v``, the others stay, so that the low three
    bits of every nibble but 0 are its row of the table ``-8 s .. -s``. It is its own inverse. vLLM has no operator for
    it: ``cutlass_encode_and_reorder_int4b`` contains it."""

    name = "unified_encode_int4b"
    summary = "nibbles of int4 weights, 1..7 as 8 - v: rows of a table of -8 s .. -s"
    source = "vLLM csrc/quantization/cutlass_w4a8/w4a8_utils.cu"
    inputs = (TensorSpec("b", Kind.CODES, (torch.uint8,), None, "two weights a byte, any shape"),)
    function = staticmethod(encoded)


WARP = (16, 32)
"""Rows and columns of weights that a warp holds for one product."""


def nibbles(words: Tensor) -> Tensor:
    """uint8 ``[R, 8 C]`` of ``words`` ``[R, C]``, int32: the lowest four bits of a word first."""
    byte = words.contiguous().view(torch.uint8)
    return torch.stack([byte & 15, byte >> 4], dim=-1).flatten(1)


def words(each: Tensor) -> Tensor:
    """The inverse of :func:`nibbles`: int32 ``[R, C]`` of ``each`` ``[R, 8 C]``, uint8."""
    pairs = each.reshape(each.shape[0], -1, 2)
    return (pairs[..., 1] << 4 | pairs[..., 0]).contiguous().view(torch.int32)


def reordered(b: Tensor) -> Tensor:
    """``b`` ``[K/8, N]``, int32, in columns, its nibbles encoded and in the order in which a warp reads them: int32
    ``[K/8, N]``."""
    rows, columns = WARP
    each = encoded(nibbles(b.t()))
    tiles = each.view(each.shape[0] // rows, 2, 8, each.shape[1] // columns, 2, 4, 4)  # row: v1 t1; column: v2 t0 v0
    return words(tiles.permute(3, 0, 2, 5, 4, 1, 6).reshape(each.shape)).t()


@register
class EncodeAndReorderInt4(LayoutContract):
    """The nibbles are encoded as ``unified_encode_int4b`` does, the lowest four bits of a word first, and reordered. A
    tile is 16 rows (of N) by 32 columns (of K). Thread ``t = t0 + 4 t1`` (``t0 < 4, t1 < 8``) holds the values
    ``v = v0 + 4 v1 + 8 v2`` (``v0 < 4``, the others < 2) at row ``t1 + 8 v1`` and column ``4 t0 + v0 + 16 v2``; value
    ``v`` of thread ``t`` goes to place ``16 t + v`` of its tile, and tiles follow each other down the rows. The output
    has strides ``(1, W)``. N is a multiple of 16, K of 32."""

    name = "cutlass_encode_and_reorder_int4b"
    gpu = True
    summary = "int4 weights [N, K], eight a word, encoded and in the order in which a warp of a W4A8 product reads them"
    source = "vLLM csrc/quantization/cutlass_w4a8/w4a8_mm_entry.cu; NVIDIA/cutlass reorder_utils.hpp"
    inputs = (
        TensorSpec(
            "b", Kind.CODES, (torch.int32,), ("W", "N"), "W = K/8 words of eight weights; vLLM takes strides (1, W)"
        ),
    )
    strided = True
    function = staticmethod(reordered)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        length, n = inputs["b"].shape
        if n % WARP[0] or length * 8 % WARP[1]:
            raise ShapeError(f"b holds weights [{n}, {length * 8}]; a warp reads {WARP[0]} by {WARP[1]}: pad them")


@register
class PackScale(LayoutContract):
    """Bytes ``8 i`` to ``8 i + 7`` are ``-8 s, -7 s .. -s`` of scale ``i``, rounded to nearest even and saturated; a
    NaN scale gives eight NaN, a scale of 0 eight zeros (-0)."""

    name = "cutlass_pack_scale_fp8"
    shapes = {"out": "[8 n] for n scales, in their row-major order"}
    gpu = True
    summary = "eight E4M3 values for every group scale: -8 s to -s, rounded"
    source = "vLLM csrc/quantization/cutlass_w4a8; NVIDIA/cutlass packed_scale.hpp"
    inputs = (TensorSpec("scales", Kind.SCALES, E4M3, None, "group scales, any shape"),)
    computed = True
    function = staticmethod(packed)
