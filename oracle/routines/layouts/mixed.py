"""Operands of FlashInfer's fused layers of experts on sm90, and scales of CuTe's six axes as a matrix of tiles.

    interleave_for_tma_wgmma_up                 rows of gate and up in turn, eight of each
    interleave_moe_scales_for_sm90_mixed_gemm   scales of 64 rows and 128 columns side by side, 16 bytes a row
    interleave_moe_weights_for_sm90_mixed_gemm  codes of 4 bits in the order of the fragments, bits in that of the cast
    preprocess_moe_weights_for_sm90_mixed_gemm_humming  exponents of an expert within a range, codes divided to match
    convert_sf_from_mma_layout                  scale bytes of the axes (32, 4, Mt, 4, Kt, G) as tiles in memory

NaN and -0 are bits as any others.
Source: FlashInfer flashinfer/fused_moe/monomoe.py, fused_moe/prepare.py, cute_dsl/utils.py of 0.6.18.post1 and its
csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm/moe_gemm_mixed_utils.cu.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import InputError, OptionError, ShapeError
from oracle.numbers.formats import E2M1, decode
from oracle.numbers.rounding import Overflow, Rounding, encode
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


def _bits(pieces: str) -> tuple[int, ...]:
    """Where each bit of a word goes: ``FROM:TO`` for one bit, ``FROM:TO*`` for three from there on."""
    places: dict[int, int] = {}
    for piece in pieces.split():
        first, to = (int(x) for x in piece.rstrip("*").split(":"))
        places |= {first + i: to + i for i in range(3 if piece.endswith("*") else 1)}
    return tuple(places[bit] for bit in range(32))


BITS = {
    "int4": tuple(range(32)),
    "fp4_fp8": tuple(bit if bit % 4 < 3 else 4 * (1, 3, 5, 7, 0, 2, 4, 6)[bit // 4] + 3 for bit in range(32)),
    "fp4": _bits(
        "0:6* 3:15 4:22* 7:31 8:3* 11:12 12:19* 15:28 16:0* 19:9 20:16* 23:25 24:13 25:10 26:11 27:14 28:29 29:26 "
        "30:27 31:30"
    ),
}
"""By kind of weights the place of each bit of a word: signs of eight codes apart, magnitudes as the cast takes them."""


@register
class InterleaveWeights(LayoutContract):
    """Of 16 rows and 64 columns, rows ``r`` and ``r + 8`` share words of eight codes. Bytes ``8 i + 4 h + l`` of a row
    (``fp4``), or ``8 i + 2 l + h`` (others), ``i`` the group of eight, of row ``r`` and of row ``r + 8`` are the four
    of word ``(i // 2, l)``, and lie in row ``r + 8 (i % 2)`` from byte ``16 (i // 2) + 4 l`` on; then the bits of a
    word change places."""

    name = "interleave_moe_weights_for_sm90_mixed_gemm"
    summary = "4-bit codes of experts in the order in which CUTLASS's mixed product of sm90 converts them"
    source = "FlashInfer flashinfer/fused_moe/prepare.py interleave_moe_weights_for_sm90_mixed_gemm"
    inputs = (TensorSpec("weight", Kind.CODES, (torch.uint8,), ("E", "N", "B"), "two codes of 4 bits a byte"),)
    options: ClassVar[tuple[OptionSpec, ...]] = (
        OptionSpec("quant_type", "fp4", tuple(BITS)[::-1], "what the codes are, and what they become"),
    )
    shapes: ClassVar[dict[str, str]] = {"out": "that of weight"}
    gpu = True
    dispatched = False

    def refuse(self, inputs: Inputs, options: Options) -> None:
        _, rows, width = inputs["weight"].shape
        if rows % 16 or width % 32:
            raise ShapeError(f"weight has {rows} rows of {width} bytes; pass multiples of 16 and of 32")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        return {"out": interleaved(inputs["weight"], str(options["quant_type"]))}


def interleaved(weight: Tensor, kind: str) -> Tensor:
    """``weight`` ``[E, N, B]``, uint8, N a multiple of 16 and B of 32, as :class:`InterleaveWeights` has it.

    NaN: codes are bits. Raises KeyError: ``kind`` is none of :data:`BITS`. Source: as of the module."""
    experts, rows, width = weight.shape
    parts = weight.reshape(experts, rows // 16, 2, 8, width // 32, 2, 2, *((2, 4) if kind == "fp4" else (4, 2)))
    axes = (0, 1, 6, 3, 4, 5, 8, 7, 2) if kind == "fp4" else (0, 1, 6, 3, 4, 5, 7, 2, 8)
    four = parts.permute(*axes).flatten(-2).to(torch.int64)
    word = four[..., 0] | four[..., 1] << 8 | four[..., 2] << 16 | four[..., 3] << 24
    moved = torch.zeros_like(word)
    for bit, place in enumerate(BITS[kind]):
        moved |= (word >> bit & 1) << place
    return torch.stack([moved >> 8 * i & 0xFF for i in range(4)], dim=-1).to(torch.uint8).reshape(weight.shape)


@register
class HummingWeights(LayoutContract):
    """Of an expert with exponents up to ``m``, those below ``m - max_range`` are raised to it, and codes of E2M1 are
    divided by the power of two to match, rounded to nearest, ties away from zero; a code of -0 becomes 0.

    ``out_scale`` counts exponents from the least one on, from 1; ``residual`` is ``2^(least - 128)``, the least one as
    a byte of E8M0. With ``interleave`` codes and exponents lie as the two contracts of interleaved weights and scales
    have them, of kind ``fp4_fp8`` and 32 columns. An exponent is at most 126 below the largest of its expert."""

    name = "preprocess_moe_weights_for_sm90_mixed_gemm_humming"
    summary = "MXFP4 weights of experts for FP8 activations: exponents within a range, codes divided to match"
    source = "FlashInfer flashinfer/fused_moe/prepare.py preprocess_moe_weights_for_sm90_mixed_gemm_humming"
    inputs = (
        TensorSpec("weight", Kind.CODES, (torch.uint8,), ("E", "N", "B"), "two codes of E2M1 a byte"),
        TensorSpec("raw_scale", Kind.SCALES, (torch.uint8,), ("E", "N", "S"), "exponents, B = 16 S"),
    )
    options: ClassVar[tuple[OptionSpec, ...]] = (
        OptionSpec("max_range", 11, None, "by how much exponents of an expert may differ, up to 11"),
        OptionSpec("interleave", True, (True, False), "both lie as the product reads them"),
    )
    returns = ("out", "out_scale", "residual")
    shapes: ClassVar[dict[str, str]] = {
        "out": "that of weight",
        "out_scale": "that of raw_scale, or [E, N/64, S/4, 16, 16]",
        "residual": "[E], float32",
    }
    gpu = True
    dispatched = False

    def refuse(self, inputs: Inputs, options: Options) -> None:
        _, rows, width = inputs["weight"].shape
        scale, most = inputs["raw_scale"], options["max_range"]
        if type(most) is not int or not 0 <= most <= 11:
            raise OptionError(f"max_range={most!r}; pass 0 to 11")
        if width != 16 * scale.shape[2] or not scale.numel():
            raise ShapeError(f"weight has rows of {width} bytes, raw_scale of {scale.shape[2]}; pass one for 16 bytes")
        if options["interleave"] and (rows % ROWS or width % (COLUMNS // 2)):
            raise ShapeError(f"weight has {rows} rows of {width} bytes; pass multiples of {ROWS} and {COLUMNS // 2}")
        each = scale.flatten(1).to(torch.int64)
        if bool((each.amax(1) - each.amin(1) > 126).any()):
            raise InputError("raw_scale of an expert differs by more than 126; its least blocks are zeros: raise them")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        raw = inputs["raw_scale"].to(torch.int64)
        largest, least = raw.flatten(1).amax(1), raw.flatten(1).amin(1)
        first = torch.maximum(least, largest - int(str(options["max_range"])))
        kept = torch.maximum(raw, first[:, None, None])
        weight = inputs["weight"]
        codes = torch.stack([weight & 15, weight >> 4], dim=-1).flatten(-2)
        shift = (kept - raw).repeat_interleave(32, dim=-1)
        divided = decode(codes, E2M1) * torch.exp2(-shift.to(torch.float64))
        code = encode(divided, E2M1, rounding=Rounding.NEAREST_AWAY, overflow=Overflow.SATURATE)
        code = code.masked_fill(codes == 8, 0)
        packed = (code[..., 0::2] | code[..., 1::2] << 4).to(torch.uint8)
        offset = (kept - first[:, None, None] + 1).to(torch.uint8)
        if options["interleave"]:
            packed = interleaved(packed, "fp4_fp8")
            offset = InterleaveScales().made({"scale": offset}, {"group_size": 32})["out"]
        residual = torch.exp2(first.to(torch.float64) - 128).to(torch.float32)
        return {"out": packed, "out_scale": offset, "residual": residual}
