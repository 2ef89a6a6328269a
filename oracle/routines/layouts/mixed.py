"""Operands of FlashInfer's fused layers of experts on sm90, and scales of CuTe's six axes as a matrix of tiles.

    interleave_for_tma_wgmma_up                 rows of gate and up in turn, eight of each
    interleave_moe_scales_for_sm90_mixed_gemm   scales of 64 rows and 128 columns side by side, 16 bytes a row
    convert_sf_from_mma_layout                  scale bytes of the axes (32, 4, Mt, 4, Kt, G) as tiles in memory

NaN and -0 are bits as any others.
Source: FlashInfer flashinfer/fused_moe/monomoe.py, fused_moe/prepare.py, cute_dsl/utils.py of 0.6.18.post1. Not
covered: codes of E2M1 interleaved within a word.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import OptionError, ShapeError
from oracle.routines.base import Inputs, Options, OptionSpec, TensorSpec, register
from oracle.routines.layouts.contract import ONE_BYTE, LayoutContract
from oracle.routines.layouts.mega import MegaWeights, in_turn
from oracle.routines.traits import Kind

ROWS, COLUMNS, LINE = 64, 128, 16
"""Rows and columns of a block of weights, and the bytes of scales that lie side by side."""
TILE = (32, 4, 4)
"""Lanes of a tile, rows of a lane, and columns."""


@register
class InterleaveUp(MegaWeights):
    """``l1`` is ``[G, 2 N, K]``; N is a multiple of 64."""

    name = "interleave_for_tma_wgmma_up"
    summary = "gate and up rows of experts in turn, eight of each, as FlashInfer's one-kernel layer reads them"
    source = "FlashInfer flashinfer/fused_moe/monomoe.py interleave_for_tma_wgmma_up"
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("l1", Kind.CODES, ONE_BYTE, ("G", "R", "K"), "codes of gate rows, then up rows"),
    )
    returns = ("l1",)
    shapes: ClassVar[dict[str, str]] = {"l1": "that of the input l1"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (rows := inputs["l1"].shape[1]) % (2 * ROWS):
            raise ShapeError(f"l1 has {rows} rows of gate and up; pass a multiple of {2 * ROWS}")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        return {"l1": inputs["l1"][:, in_turn(inputs["l1"].shape[1])]}


@register
class InterleaveScales(LayoutContract):
    """Of 64 rows and 128 columns of a weight there are ``s = 128 / group_size`` scales a row, and 16 bytes hold those
    of ``m`` rows: ``out[e, i, j, f, s a + b] = scale[e, 64 i + 64 / m a + f, s j + b]``."""

    name = "interleave_moe_scales_for_sm90_mixed_gemm"
    summary = "scales of experts' 4-bit weights in lines of 16 bytes, as CUTLASS's mixed product of sm90 reads them"
    source = "FlashInfer flashinfer/fused_moe/prepare.py interleave_moe_scales_for_sm90_mixed_gemm"
    inputs = (
        TensorSpec("scale", Kind.SCALES, (torch.uint8, torch.bfloat16), ("E", "R", "C"), "scales, R a multiple of 64"),
    )
    options: ClassVar[tuple[OptionSpec, ...]] = (
        OptionSpec("group_size", 32, (32, 64, 128), "columns that share a scale"),
    )
    shapes: ClassVar[dict[str, str]] = {"out": "[E, R/64, C/s, 64/m, s m], of the dtype of scale"}
    gpu = True
    dispatched = False

    def refuse(self, inputs: Inputs, options: Options) -> None:
        _, rows, groups = inputs["scale"].shape
        side = COLUMNS // options["group_size"]
        if rows % ROWS or groups % side:
            raise ShapeError(f"scale holds {rows} rows of {groups}; pad them to multiples of {ROWS} and {side}")
        if LINE // inputs["scale"].element_size() % side:
            raise OptionError(f"16 bytes hold no whole rows of {side} scales; choose another group_size")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        scale, side = inputs["scale"], COLUMNS // options["group_size"]
        experts, rows, groups = scale.shape
        width = LINE // scale.element_size()
        folded = ROWS * side // width
        at = torch.arange(rows * groups, device="cpu").reshape(rows // ROWS, groups // side, folded, width)
        block, rest = at // (ROWS * groups), at % (ROWS * groups)
        column, place = rest // (ROWS * side), rest % (ROWS * side)
        line, inside = place // width, place % width
        row = block * ROWS + inside // side * folded + line
        return {"out": scale[:, row, column * side + inside % side]}


@register
class FromMmaLayout(LayoutContract):
    """``out`` is, byte after byte, ``G`` times Mt times Kt tiles of 512 bytes: the scale of row ``32 i + r`` and column
    ``c`` of a tile, ``sf_6d[r, i, mt, c, kt, g]``, is its byte ``16 r + 4 i + c``."""

    name = "convert_sf_from_mma_layout"
    summary = "scale bytes of CuTe's six axes as a matrix whose memory is tiles of 128x4"
    source = "FlashInfer flashinfer/cute_dsl/utils.py convert_sf_from_mma_layout"
    inputs = (TensorSpec("sf_6d", Kind.SCALES, ONE_BYTE, None, "scale bytes [32, 4, A, 4, B, G]"),)
    shapes: ClassVar[dict[str, str]] = {"out": "[G A 128, B 4]"}
    gpu = True
    dispatched = False

    def refuse(self, inputs: Inputs, options: Options) -> None:
        shape = tuple(inputs["sf_6d"].shape)
        if len(shape) != 6 or (*shape[:2], shape[3]) != TILE:
            raise ShapeError(f"sf_6d has shape {list(shape)}; tiles have the axes [32, 4, A, 4, B, G]")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        sf = inputs["sf_6d"]
        _, _, rows, _, columns, count = sf.shape
        at = torch.arange(sf.numel(), device="cpu")
        tile, byte = at // 512, at % 512
        g, mt, kt = tile // (rows * columns), tile // columns % rows, tile % columns
        whole = sf[byte // LINE, byte // TILE[2] % TILE[1], mt, byte % TILE[2], kt, g]
        return {"out": whole.reshape(count * rows * 128, columns * TILE[2])}
