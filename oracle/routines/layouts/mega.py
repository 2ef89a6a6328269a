"""Weights of DeepGEMM's layer of experts in one kernel, and the words that hold four exponents.

    transform_weights_for_mega_moe        gate and up rows in turn, eight of each; scales too, placed for UTCCP
    transform_weights_for_mega_moe_sm90   gate and up rows in turn, eight of each; scales stay
    pack_ue8m0_to_int                     four float32 powers of two a word, the first in the least byte
    unpack_ue8m0_from_int                 the inverse

NaN and -0 are bits as any others.
Source: DeepGEMM deep_gemm/mega/__init__.py, deep_gemm/__init__.py and deep_gemm/utils/math.py of sgl-deep-gemm
0.1.4.post1. Not covered: the buffers that ranks share.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import InputError, ShapeError
from oracle.routines.base import F32, Inputs, Options, TensorSpec, register
from oracle.routines.layouts.contract import ONE_BYTE, PACKS, LayoutContract
from oracle.routines.traits import Kind

UNIT, LANES, WARPS = 8, 32, 4
"""Rows of gate or up that stand together; rows that a copy to tensor memory takes at once, and its warps."""
EXPONENT = 0x7F80_0000
WORDS = (torch.int32,)
CODES = (*ONE_BYTE, torch.int8)


def in_turn(rows: int) -> Tensor:
    """The row of ``[gate, up]`` that stands in each of ``rows`` rows, int64 ``[rows]``: eight of gate, eight of up."""
    at = torch.arange(rows, device="cpu")
    block, place = at // (2 * UNIT), at % (2 * UNIT)
    return block * UNIT + place % UNIT + (place // UNIT) * (rows // 2)


def by_warps(rows: int) -> Tensor:
    """The row of scales that stands in each of ``rows`` rows, int64 ``[rows]``: of 128 rows row ``32 w + l`` stands in
    row ``4 l + w``."""
    at = torch.arange(rows, device="cpu")
    tile, place = at // (LANES * WARPS), at % (LANES * WARPS)
    return tile * LANES * WARPS + place % WARPS * LANES + place // WARPS


def _inputs(scales: str, dtypes: tuple[torch.dtype, ...], *rows: str) -> tuple[TensorSpec, ...]:
    """Codes of both weights with their scales, whose axes of rows have these letters."""
    first, second = rows
    return (
        TensorSpec("l1", Kind.CODES, CODES, ("G", "R", "K"), "codes of gate rows, then up rows"),
        TensorSpec("l1_sf", Kind.SCALES, dtypes, ("G", first, "C"), scales),
        TensorSpec("l2", Kind.CODES, CODES, ("G", "H", "L"), "codes of the down projection"),
        TensorSpec("l2_sf", Kind.SCALES, dtypes, ("G", second, "D"), scales),
    )


class MegaWeights(LayoutContract):
    """Rows of ``l1`` ``[G, 2 I, .]`` are gate rows, then up rows. Row ``16 b + j`` of the output is gate row
    ``8 b + j`` for ``j < 8``, else up row ``8 b + j - 8``. ``I`` is a multiple of 8."""

    returns: ClassVar[tuple[str, ...]] = ("l1", "l1_sf", "l2", "l2_sf")
    shapes: ClassVar[dict[str, str]] = {name: f"that of the input {name}" for name in returns}
    gpu = True
    dispatched = False

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (rows := inputs["l1"].shape[1]) % (2 * UNIT):
            raise ShapeError(f"l1 has {rows} rows of gate and up; DeepGEMM takes a multiple of {2 * UNIT}")


@register
class TransformWeights(MegaWeights):
    """Rows of ``l1_sf`` are reordered as those of ``l1``. Then of every 128 rows of both scales row ``32 w + l`` goes
    to row ``4 l + w``. Rows of scales are a multiple of 128; ``l2`` stays."""

    name = "transform_weights_for_mega_moe"
    summary = "weights and packed scales of a layer of experts as DeepGEMM's fused kernel of sm100 reads them"
    source = "DeepGEMM deep_gemm/mega/__init__.py transform_weights_for_mega_moe, _transpose_sf_for_utccp"
    inputs = _inputs("their scales, four exponents a word", WORDS, "R", "H")

    def refuse(self, inputs: Inputs, options: Options) -> None:
        super().refuse(inputs, options)
        for name in ("l1_sf", "l2_sf"):
            if (rows := inputs[name].shape[1]) % (LANES * WARPS):
                raise ShapeError(f"{name} has {rows} rows; pad the weight to a multiple of {LANES * WARPS}")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        l1, l1_sf, l2, l2_sf = (inputs[name] for name in self.returns)
        turned = in_turn(l1.shape[1])
        return {
            "l1": l1[:, turned],
            "l1_sf": l1_sf[:, turned][:, by_warps(l1_sf.shape[1])],
            "l2": l2,
            "l2_sf": l2_sf[:, by_warps(l2_sf.shape[1])],
        }


@register
class TransformWeightsSm90(MegaWeights):
    """Scales of 128x128 blocks and ``l2`` stay as they are."""

    name = "transform_weights_for_mega_moe_sm90"
    summary = "weights of a layer of experts as DeepGEMM's fused kernel of sm90 reads them"
    source = "DeepGEMM deep_gemm/__init__.py transform_weights_for_mega_moe_sm90"
    inputs = _inputs("their scales", F32, "A", "B")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        outputs = {name: inputs[name] for name in self.returns}
        return outputs | {"l1": outputs["l1"][:, in_turn(outputs["l1"].shape[1])]}


@register
class PackUe8m0(LayoutContract):
    """Byte ``i`` of word ``c`` is the exponent field of ``x[..., 4 c + i]``. Its values are powers of two (0 and
    infinity are bytes 0 and 255), and columns a multiple of 4."""

    name = "pack_ue8m0_to_int"
    traits = frozenset({PACKS})
    gpu = True
    dispatched = False
    summary = "four exponent bytes in an int32, row by row"
    source = "DeepGEMM deep_gemm/utils/math.py pack_ue8m0_to_int"
    inputs = (TensorSpec("x", Kind.SCALES, F32, ("M", "S"), "powers of two, S a multiple of 4"),)
    shapes: ClassVar[dict[str, str]] = {"out": "[M, S / 4], int32"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (columns := inputs["x"].shape[1]) % 4:
            raise ShapeError(f"x has {columns} columns; a word holds 4 exponents, pad with 1.0")
        bits = inputs["x"].contiguous().view(torch.int32)
        if bool((wrong := bits & ~EXPONENT).any()):
            at = torch.nonzero(wrong)[0].tolist()
            raise InputError(
                f"x{at} = {float(inputs['x'][tuple(at)]):.9g} has more than an exponent; round it up first"
            )

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        exponents = (inputs["x"].contiguous().view(torch.int32) >> 23).to(torch.uint8)
        return {"out": exponents.contiguous().view(torch.int32)}


@register
class UnpackUe8m0(LayoutContract):
    """Byte ``i`` of word ``c`` is the exponent field of ``out[..., 4 c + i]``, whose other bits are 0: byte 0 gives 0
    and byte 255 infinity."""

    name = "unpack_ue8m0_from_int"
    gpu = True
    dispatched = False
    summary = "the powers of two whose exponents an int32 holds"
    source = "DeepGEMM deep_gemm/utils/math.py unpack_ue8m0_from_int"
    inputs = (TensorSpec("packed_sf", Kind.SCALES, WORDS, ("M", "C"), "four exponents a word"),)
    shapes: ClassVar[dict[str, str]] = {"out": "[M, 4 C], float32"}

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        words = inputs["packed_sf"].clone(memory_format=torch.contiguous_format)  # of one column, whatever its strides
        exponents = words.view(torch.uint8).to(torch.int32)
        return {"out": (exponents << 23).view(torch.float32)}
