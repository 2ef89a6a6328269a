"""Contracts of scales in tiles for several matrices: torch's blocked form, experts in three placements, groups along K.

Who owns the padding is part of a contract: where the routine writes it, it must be zero; where nobody does (experts:
buffers of vLLM and FlashInfer are ``torch.empty``), it may hold anything, and a routine that reads tiles must not read
it. The cases fill what must not be read with NaN, infinity and the largest finite bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from oracle.routines.base import F32, Call, Inputs, Options, OptionSpec, TensorSpec, positive, register
from oracle.routines.layouts.contract import INTEGERS, ONE_BYTE, LayoutContract
from oracle.truth import layout, tiles
from oracle.verdict.compare import Verdict
from oracle.verdict.sets import Bits, Found, Range, Sets, judge_bits

TILE = OptionSpec("tile", "128x4", tuple(layout.HEIGHTS), "height x width of a tile")


@register
class ToBlocked(LayoutContract):
    """The routine owns the padding: zeros."""

    name = "to_blocked"
    summary = "scales in tiles of 128x4, zeros in the padding; each matrix of a batch by itself"
    source = "torchao mx_formats/utils.py to_blocked; FlashInfer block_scale_interleave"
    inputs = (TensorSpec("scale", ONE_BYTE, None, "[M, C] or [G, M, C]"),)
    function = staticmethod(tiles.to_blocked)


@register
class FromBlocked(LayoutContract):
    """The padding of the tiles is never read."""

    name = "from_blocked"
    summary = "scales by row and column out of tiles of 128x4 or 8x4"
    source = "torchao mx_formats/utils.py from_blocked"
    inputs = (TensorSpec("memory", ONE_BYTE, None, "[bytes] or [G, bytes], the tiles of each matrix"),)
    options = (
        OptionSpec("rows", None, None, "rows of a matrix"),
        OptionSpec("columns", None, None, "columns of a matrix"),
        TILE,
    )

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        rows, columns = (positive(options, name) for name in ("rows", "columns"))
        return {"out": tiles.from_blocked(inputs["memory"], rows, columns, str(options["tile"]))}


@register
class SwizzleScaleExperts(LayoutContract):
    """Padding and the gaps between experts are unspecified: nobody writes them. Rows of no expert go nowhere."""

    name = "swizzle_scale_experts"
    summary = "scales of experts, each in tiles of its own, in one of three placements"
    source = "torchao torch_to_blocked_2d_M_groups; vLLM blockscale_offsets; FlashInfer group_gemm_*_nt_groupwise"
    inputs = (
        TensorSpec("scale", ONE_BYTE, ("R", "C"), "scales of all experts"),
        TensorSpec("first", INTEGERS, ("G",), "the row at which each expert starts"),
        TensorSpec("rows", INTEGERS, ("G",), "rows of each expert"),
    )
    options = (
        OptionSpec("placement", "tight", tiles.PLACEMENTS, "where the tiles of an expert start"),
        OptionSpec("capacity", 0, None, "masked: rows for which every expert has room"),
    )
    function = staticmethod(tiles.swizzle_scale_experts)

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [Placed(call.truth, self.why_mistrust(call.inputs), call=call)]


@dataclass(frozen=True)
class Placed(Bits):
    """Every scale of an expert in its place; all other bytes are free."""

    call: Call = field(kw_only=True)

    def judge(self, found: Found) -> Verdict:
        source, offsets = self._places()
        out = found["out"].view(torch.uint8)[offsets.to(found["out"].device)]
        scale = self.call.inputs["scale"].view(torch.uint8)
        return judge_bits(out, scale[source.to(scale.device)], output="out", mistrust=self.mistrust)

    def ranges(self, expected: Found) -> dict[str, Range]:
        free = torch.ones(expected["out"].shape, dtype=torch.uint8, device="cpu")
        free[self._places()[1]] = 0
        return {"out": Range(expected["out"], expected["out"], free)}

    def _places(self) -> tuple[Tensor, Tensor]:
        x, o = self.call.inputs, self.call.resolved
        return tiles.expert_offsets(x["scale"], x["first"], x["rows"], str(o["placement"]), o["capacity"])[:2]


@register
class ToBlockedKGroups(LayoutContract):
    """The routine owns the padding of every group, and what is behind the last one: zeros."""

    name = "to_blocked_k_groups"
    summary = "scales whose columns belong to groups, each group in tiles of its own"
    source = "torchao torch_to_blocked_2d_K_groups"
    inputs = (
        TensorSpec("scale", ONE_BYTE, ("M", "C"), "scales of all groups side by side"),
        TensorSpec("ends", INTEGERS, ("G",), "the column after each group's last"),
    )
    function = staticmethod(tiles.to_blocked_k_groups)


@register
class ShuffleMatrixSfA(LayoutContract):
    """What ``nvfp4_quantize(do_shuffle=True)`` does to the scales of a weight; its codes are shuffled as they are."""

    name = "shuffle_matrix_sf_a"
    summary = "scales of a shuffled weight: rows in the order of the transposed MMA's fragments, then in tiles of 128x4"
    source = "FlashInfer shuffle_matrix_sf_a, for TensorRT-LLM's kernels"
    inputs = (TensorSpec("scale", ONE_BYTE, ("M", "C"), "scales by row, M a multiple of 128"),)
    options = (OptionSpec("epilogue_tile_m", 128, None, "height of the epilogue's tile"),)
    gpu = True

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        return {"out": tiles.shuffle_matrix_sf_a(inputs["scale"], positive(options, "epilogue_tile_m"))}


@register
class KGroupedPackedUe8m0(LayoutContract):
    name = "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor"
    gpu = True
    summary = "four exponent bytes of consecutive K blocks of one group in an int32"
    source = "DeepGEMM get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor"
    inputs = (
        TensorSpec("scale", F32, ("S", "MN"), "powers of two; the K blocks of one group after another"),
        TensorSpec("ks", INTEGERS, ("G",), "K of each group"),
    )
    options = (OptionSpec("gran_k", 128, tiles.GRANULARITIES, "elements of K that share a scale"),)
    strided = True
    function = staticmethod(tiles.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor)
