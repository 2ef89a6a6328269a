"""Contracts of the layouts: the output is the input's bits in other places, so it is right or wrong, bit by bit.

A contract names its truth (:meth:`LayoutContract.made`); the verdict compares bits, and strides where the contract
promises them. Nothing is tolerated. Here: scales for TMA, tiles of scales, weights of experts, and the integers of
padding as tables.

Who owns the padding of tiles is part of a contract: where the routine writes it, it must be zero; where nobody does
(experts: buffers of vLLM and FlashInfer are ``torch.empty``), it may hold anything, and a routine that reads tiles must
not read it. The cases fill what must not be read with NaN, infinity and the largest finite bytes.

Not covered: values that a caller computes (:mod:`oracle.routines.layouts.shards`), BlockMajorK.

NaN bytes are moved like any others.
Source: the function of :mod:`oracle.truth.layout` and :mod:`oracle.truth.tiles` that each contract names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from oracle.routines.base import F32, Call, Contract, Inputs, Options, OptionSpec, TensorSpec, positive, register
from oracle.routines.traits import Kind, Trait
from oracle.truth import layout, tiles
from oracle.verdict.compare import Status, Verdict
from oracle.verdict.sets import Bits, Found, Range, Sets, bits_of, judge_bits, worst_of, wrong_strides

ONE_BYTE = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.float8_e8m0fnu)
INTEGERS = (torch.int64, torch.int32)
TILED = Trait("writes a matrix of scales in tiles of 128x4")
OWNS_PADDING = Trait("writes zeros into the padding of tiles")
PACKS = Trait("packs the exponents of four K blocks in an int32")


class LayoutContract(Contract):
    """The output is bits of the inputs in other places, or integers: each is right or wrong, NaN and -0 included.

    Subclasses
    ----------
    ``function`` gives the right outputs, or ``made`` does; ``strided`` ones are compared in strides as well, and of
    ``computed`` ones any NaN is right where NaN is due."""

    section: ClassVar[str] = "Padding and layout"
    strided: ClassVar[bool] = False
    computed: ClassVar[bool] = False

    function: ClassVar[Callable[..., Any]]

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        """The right outputs of a checked call: of ``function``, given the inputs in their order and the options."""
        outputs = self.function(*(inputs.get(spec.name) for spec in self.inputs), **options)
        pairs = zip(self.returns, (outputs,) if isinstance(outputs, Tensor) else outputs, strict=True)
        return {name: tensor for name, tensor in pairs if tensor is not None}

    def reference(self, inputs: Inputs, **options: object) -> Tensor | dict[str, Tensor]:
        outputs = self.made(inputs, self.check(inputs, options))
        return outputs if tuple(outputs) != ("out",) else outputs["out"]

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [Bits(call.truth, self.why_mistrust(call.inputs), self.strided, self.computed)]

    def why_mistrust(self, inputs: Inputs) -> str | None:
        """Reason for which a pass on these inputs would prove little, or None."""
        for name, x in inputs.items():
            if x.numel() > 1 and x.dtype not in INTEGERS and bool((bits_of(x) == bits_of(x).flatten()[0]).all()):
                return f"all elements of {name} are equal, so a wrong place changes nothing"
        return None


# --- scales -------------------------------------------------------------------------------------------------


@register
class ColMajorTmaAligned(LayoutContract):
    """Strides are compared, and the memory behind every column, lanes ``M .. align(M, 4) - 1``, must be zero."""

    name = "get_col_major_tma_aligned_tensor"
    gpu = True
    summary = "float32 scales as columns at strides of align(M, 4)"
    source = "DeepGEMM get_col_major_tma_aligned_tensor"
    inputs = (TensorSpec("scale", Kind.SCALES, F32, None, "[M, C] or [G, M, C]"),)
    strided = True
    function = staticmethod(layout.get_col_major_tma_aligned_tensor)

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [PaddedColumns(call.truth, self.why_mistrust(call.inputs), self.strided)]


class PaddedColumns(Bits):
    """The same bits, with memory behind every column up to the alignment, and zeros in it."""

    def judge(self, outputs: Found) -> Verdict:
        judged, out = super().judge(outputs), outputs["out"]
        if judged.status is Status.FAILED:
            return judged
        if not layout.has_pad_lanes(out):
            text = f"the memory of out {list(out.shape)} ends before the padding of its last column"
            return wrong_strides(text, out.numel())
        lanes = layout.pad_lanes(out)
        zeros = judge_bits(lanes, torch.zeros_like(lanes), output="padding") if lanes.numel() else judged
        return worst_of([zeros, judged]) if zeros.status is Status.FAILED else judged


@register
class PackedUe8m0(LayoutContract):
    name = "get_mn_major_tma_aligned_packed_ue8m0_tensor"
    traits = frozenset({PACKS})
    gpu = True
    summary = "four exponent bytes of consecutive K blocks in an int32, words in columns"
    source = "DeepGEMM get_mn_major_tma_aligned_packed_ue8m0_tensor"
    inputs = (TensorSpec("scale", Kind.SCALES, F32, None, "[M, C] or [G, M, C], powers of two"),)
    strided = True
    shapes = {"out": "[M, ceil(C/4)] or [G, M, ceil(C/4)], strides ([align(M, 4) ceil(C/4),] 1, align(M, 4))"}
    function = staticmethod(layout.get_mn_major_tma_aligned_packed_ue8m0_tensor)


@register
class RequiredLayout(LayoutContract):
    """The ``target`` option is the arch whose layout is asked for: packing can be tested on any machine. On sm90 a
    scale of 128 rows stays as it is, contiguous."""

    name = "transform_sf_into_required_layout"
    shapes = {"out": "sm90: that of scale; sm100: int32 [mn, ceil(columns / 4)]; with a leading G where scale has one"}
    traits = frozenset({PACKS})
    summary = "scales as DeepGEMM takes them: float32 columns on sm90, packed UE8M0 on sm100"
    source = "DeepGEMM transform_sf_into_required_layout"
    inputs = (
        TensorSpec("scale", Kind.SCALES, F32, None, "[ceil(mn / gran_mn), ceil(k / gran_k)], or with a leading G"),
    )
    options = (
        OptionSpec("mn", None, None, "rows of the operand"),
        OptionSpec("k", None, None, "columns of the operand"),
        OptionSpec("gran_mn", 1, (1, 128), "rows that share a scale"),
        OptionSpec("gran_k", 128, (128, 32), "elements of K that share a scale; 32 on sm100 alone"),
        OptionSpec("target", "sm90", layout.ARCHES, "arch whose layout is asked for"),
    )
    strided = True

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        mn, k, gran, gran_k = (positive(options, name) for name in ("mn", "k", "gran_mn", "gran_k"))
        out = layout.transform_sf_into_required_layout(
            inputs["scale"], mn=mn, k=k, gran_mn=gran, gran_k=gran_k, arch=str(options["target"])
        )
        return {"out": out}


@register
class SwizzleScale(LayoutContract):
    """The scale of row ``r`` and column ``c`` lies at ``(r // 128 * ceil(C/4) + c // 4) * 512 + r % 32 * 16 + r % 128
    // 32 * 4 + c % 4`` (128x4), or at ``(r // 8 * ceil(C/4) + c // 4) * 32 + r % 8 * 4 + c % 4`` (8x4). Padding bytes
    may hold anything."""

    shapes = {"out": "[align(M, 128) * align(C, 4)], 8x4: [align(M, 8) * align(C, 4)], with a leading G for groups"}

    name = "swizzle_scale"
    traits = frozenset({TILED})
    summary = "scales in tiles of 128x4 or 8x4"
    source = "cuBLAS 1D block scaling factors layout; TensorRT-LLM get_sf_out_offset_8x4"
    inputs = (TensorSpec("scale", Kind.SCALES, ONE_BYTE, None, "[M, C] or [G, M, C]"),)
    options = (OptionSpec("tile", "128x4", tuple(layout.HEIGHTS), "height x width of a tile"),)
    function = staticmethod(layout.swizzle_scale)

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [SwizzledScale(call.truth, self.why_mistrust(call.inputs), call=call)]


@dataclass(frozen=True)
class SwizzledScale(Bits):
    """Every scale in its place; the padding of a tile is free."""

    call: Call = field(kw_only=True)

    def judge(self, outputs: Found) -> Verdict:
        scale, tile = self.call.inputs["scale"], str(self.call.resolved["tile"])
        back = layout.unswizzle_scale(outputs["out"], *scale.shape[-2:], tile=tile)
        return judge_bits(back, scale, output="out", mistrust=self.mistrust)

    def ranges(self, expected: Found) -> dict[str, Range]:
        zeros = torch.zeros_like(self.call.inputs["scale"].view(torch.uint8))
        tile = str(self.call.resolved["tile"])
        empty, full = (layout.swizzle_scale(zeros, tile=tile, fill=fill) for fill in (0, 1))
        return {"out": Range(expected["out"], expected["out"], (empty != full).to(torch.uint8))}


# --- integers of padding, as tables -------------------------------------------------------------------------


class TableContract(LayoutContract):
    """A table of integers: each row of the inputs has an answer, int64; one that is a record has an output a field."""

    def row(self, *arguments: int) -> int | tuple[int, ...]:
        """The answer for one row; by default that of ``function``."""
        answer: int | tuple[int, ...] = self.function(*arguments)
        return answer

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        columns = [inputs[spec.name].tolist() for spec in self.inputs]
        answers = [self.row(*arguments) for arguments in zip(*columns, strict=True)]
        rows = [answer if isinstance(answer, tuple) else (answer,) for answer in answers]
        device = inputs[self.inputs[0].name].device
        fields = zip(self.returns, zip(*rows, strict=True), strict=True)
        return {name: torch.tensor(values, dtype=torch.int64, device=device) for name, values in fields}


def columns(*names: str) -> tuple[TensorSpec, ...]:
    """Inputs of a table: one vector of integers for each of its columns."""
    return tuple(
        TensorSpec(name, Kind.PARAMETERS, INTEGERS, ("R",), "one value for each row of the table") for name in names
    )


# --- weights of experts -------------------------------------------------------------------------------------


WEIGHT = (*ONE_BYTE, torch.bfloat16, torch.float16, torch.float32)


@register
class ShuffleMatrixA(LayoutContract):
    name = "shuffle_matrix_a"
    shapes = {"out": "[M, K], in the dtype of w"}
    summary = "rows in the order of the transposed MMA's fragments"
    source = "TensorRT-LLM shuffleMatrixA"
    inputs = (TensorSpec("w", Kind.CODES, WEIGHT, ("M", "K"), "one expert's weight"),)
    options = (OptionSpec("epilogue_tile_m", 128, None, "height of the epilogue's tile"),)

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        return {"out": layout.shuffle_matrix_a(inputs["w"], positive(options, "epilogue_tile_m"))}


@register
class RotateWeights(LayoutContract):
    """Rows of the output are ``w[order]`` as ``shuffle_matrix_a`` orders them, after gate and up rows were interleaved
    (row ``2 i`` is gate row ``i``, row ``2 i + 1`` up row ``i``) where ``is_gated``."""

    name = "rotate_weights_for_fi_trtllm_fp8_per_tensor_moe"
    summary = "both expert weights in the row order of TensorRT-LLM's per-tensor FP8 kernel"
    source = "vLLM flashinfer_utils.rotate_weights_for_fi_trtllm_fp8_per_tensor_moe"
    inputs = (
        TensorSpec("gemm1_weights", Kind.CODES, ONE_BYTE, ("E", "R", "H"), "gate rows, then up rows"),
        TensorSpec("gemm2_weights", Kind.CODES, ONE_BYTE, ("E", "H", "I"), "down projection"),
    )
    options = (OptionSpec("is_gated", True, (True, False), "gate and up rows are interleaved first"),)
    returns = ("gemm1_weights", "gemm2_weights")
    function = staticmethod(layout.rotate_weights_for_fi_trtllm_fp8_per_tensor_moe)


@register
class AlignMoeWeights(LayoutContract):
    """A failure whose bits are those of the published placement says so."""

    name = "align_fp8_moe_weights_for_fi"
    shapes = {
        "w13": "[E, 2 A, H], or without a gate [E, A, H], with A = align(I, 16)",
        "w2": "[E, H, A], with A = align(I, 16)",
    }
    summary = "the intermediate size padded with zeros to a multiple of 16, gate and up each in its place"
    source = "vLLM flashinfer_utils.align_fp8_moe_weights_for_fi, with the halves placed apart"
    inputs = (
        TensorSpec("w13", Kind.CODES, WEIGHT, ("E", "R", "H"), "gate rows, then up rows"),
        TensorSpec("w2", Kind.CODES, WEIGHT, ("E", "H", "I"), "down projection"),
    )
    options = (OptionSpec("is_act_and_mul", True, (True, False), "w13 has a gate and an up half"),)
    returns = ("w13", "w2")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        w13, w2, _ = layout.align_fp8_moe_weights_for_fi(inputs["w13"], inputs["w2"], bool(options["is_act_and_mul"]))
        return {"w13": w13, "w2": w2}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [PublishedPlacement(call.truth, self.why_mistrust(call.inputs), call=call)]


@dataclass(frozen=True)
class PublishedPlacement(Bits):
    """The same bits; a failure with the bits of the published routine is named."""

    call: Call = field(kw_only=True)

    def judge(self, outputs: Found) -> Verdict:
        judged = super().judge(outputs)
        if judged.status is not Status.FAILED:
            return judged
        gated = bool(self.call.resolved["is_act_and_mul"])
        w13, w2 = self.call.inputs["w13"], self.call.inputs["w2"]
        published = layout.align_fp8_moe_weights_for_fi_published(w13, w2, gated)[:2]
        pairs = zip((outputs["w13"], outputs["w2"]), published, strict=True)
        if all(torch.equal(bits_of(x), bits_of(y)) for x, y in pairs):
            fault = "up half of gated weights left at the unpadded offset"
            return replace(judged, explained_by=(fault,), summary=f"{judged.summary}; every bit is that of: {fault}")
        return judged


@register
class PrepareMoeLayer(LayoutContract):
    """The scales that a per-tensor layer registers are :class:`oracle.routines.layouts.shards.RegisterScales`."""

    name = "prepare_fp8_moe_layer_for_fi"
    section = "MoE"
    summary = "pad (per tensor only), swap w13 to w31 (block scales too), rotate for TensorRT-LLM (per tensor only)"
    source = "vLLM flashinfer_utils.prepare_fp8_moe_layer_for_fi, with the halves placed apart"
    inputs = (
        TensorSpec("w13", Kind.CODES, ONE_BYTE, ("E", "R", "H"), "gate rows, then up rows"),
        TensorSpec("w2", Kind.CODES, ONE_BYTE, ("E", "H", "I"), "down projection"),
        TensorSpec("w13_scale", Kind.SCALES, F32, None, "[E], or block scales [E, ceil(R/128), ceil(H/128)]"),
        TensorSpec("w2_scale", Kind.SCALES, F32, None, "[E], or block scales [E, ceil(H/128), ceil(I/128)]"),
    )
    options = (
        OptionSpec("block_quant", False, (False, True), "128x128 block scales"),
        OptionSpec("is_act_and_mul", True, (True, False), "w13 has a gate and an up half"),
        OptionSpec("is_trtllm", False, (False, True), "TensorRT-LLM's kernel, else CUTLASS"),
    )
    returns = ("w13", "w2", "w13_scale", "w2_scale")
    function = staticmethod(layout.prepare_fp8_moe_layer_for_fi)


# --- tiles of several matrices ------------------------------------------------------------------------------


TILE = OptionSpec("tile", "128x4", tuple(layout.HEIGHTS), "height x width of a tile")


@register
class ToBlocked(LayoutContract):
    """The padding of tiles is written: zeros."""

    name = "to_blocked"
    shapes = {"out": "[align(M, 128) * align(C, 4)], with a leading G for groups"}
    traits = frozenset({TILED, OWNS_PADDING})
    summary = "scales in tiles of 128x4, zeros in the padding; each matrix of a batch by itself"
    source = "torchao mx_formats/utils.py to_blocked; FlashInfer block_scale_interleave"
    inputs = (TensorSpec("scale", Kind.SCALES, ONE_BYTE, None, "[M, C] or [G, M, C]"),)
    function = staticmethod(tiles.to_blocked)


@register
class FromBlocked(LayoutContract):
    """The tiles are those of ``swizzle_scale``; their padding is never read."""

    name = "from_blocked"
    shapes = {"out": "[rows, columns], with a leading G for groups"}
    summary = "scales by row and column out of tiles of 128x4 or 8x4"
    source = "torchao mx_formats/utils.py from_blocked"
    inputs = (TensorSpec("memory", Kind.SCALES, ONE_BYTE, None, "[bytes] or [G, bytes], the tiles of each matrix"),)
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
    """Expert ``i`` has the rows ``p_i = first[i]`` to ``p_i + m_i``, excluded, ``m_i = rows[i]``. Its tiles of 128x4
    start at row ``sum of align(m_j, 128) over j < i`` (tight), ``floor((p_i + 127 i) / 128) * 128`` (flashinfer), or
    ``i align(capacity, 128)`` (masked, where ``p_i = i capacity``) of a matrix of ``floor((R + 127 G) / 128) * 128``
    rows (masked: ``G align(capacity, 128)``). Padding and the gaps between experts may hold anything; rows of no expert
    are dropped."""

    name = "swizzle_scale_experts"
    shapes = {"out": "flat: the rows above times align(C, 4)"}
    summary = "scales of experts, each in tiles of its own, in one of three placements"
    source = "torchao torch_to_blocked_2d_M_groups; vLLM blockscale_offsets; FlashInfer group_gemm_*_nt_groupwise"
    inputs = (
        TensorSpec("scale", Kind.SCALES, ONE_BYTE, ("R", "C"), "scales of all experts"),
        TensorSpec("first", Kind.OFFSETS, INTEGERS, ("G",), "the row at which each expert starts"),
        TensorSpec("rows", Kind.COUNTS, INTEGERS, ("G",), "rows of each expert"),
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

    def judge(self, outputs: Found) -> Verdict:
        source, offsets = self._places()
        out = outputs["out"].view(torch.uint8)[offsets.to(outputs["out"].device)]
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
    """The columns of group ``j`` are put in tiles of 128x4 by themselves, from byte ``align(M, 128) * sum of align(c_i,
    4) over i < j`` on, ``c_i`` the columns of group ``i``, in memory of ``align(M, 128) * (C + 4 G)`` bytes. Padding of
    every group, and what is behind the last one, is written: zeros."""

    name = "to_blocked_k_groups"
    shapes = {"out": "flat: align(M, 128) * (C + 4 G)"}
    traits = frozenset({OWNS_PADDING})
    summary = "scales whose columns belong to groups, each group in tiles of its own"
    source = "torchao torch_to_blocked_2d_K_groups"
    inputs = (
        TensorSpec("scale", Kind.SCALES, ONE_BYTE, ("M", "C"), "scales of all groups side by side"),
        TensorSpec("ends", Kind.OFFSETS, INTEGERS, ("G",), "the column after each group's last"),
    )
    function = staticmethod(tiles.to_blocked_k_groups)


@register
class ShuffleMatrixSfA(LayoutContract):
    """What ``nvfp4_quantize(do_shuffle=True)`` does to the scales of a weight; its codes are shuffled as they are."""

    name = "shuffle_matrix_sf_a"
    traits = frozenset({TILED, OWNS_PADDING})
    summary = "scales of a shuffled weight: rows in the order of the transposed MMA's fragments, then in tiles of 128x4"
    source = "FlashInfer shuffle_matrix_sf_a, for TensorRT-LLM's kernels"
    inputs = (TensorSpec("scale", Kind.SCALES, ONE_BYTE, ("M", "C"), "scales by row, M a multiple of 128"),)
    options = (OptionSpec("epilogue_tile_m", 128, None, "height of the epilogue's tile"),)
    gpu = True

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        return {"out": tiles.shuffle_matrix_sf_a(inputs["scale"], positive(options, "epilogue_tile_m"))}


@register
class KGroupedPackedUe8m0(LayoutContract):
    """Word ``(w, m)`` of group ``j``, which has ``ceil(ks[j] / gran_k)`` rows of ``scale``, holds the exponent bytes of
    its rows ``4 w`` to ``4 w + 3`` in column ``m``, the first in the lowest byte. No word holds two groups; bytes past
    a group's last scale are 0."""

    name = "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor"
    shapes = {"out": "[words, M]: ceil(n/4) words of each group of n rows of scale, one group after the other"}
    gpu = True
    summary = "four exponent bytes of consecutive K blocks of one group in an int32"
    source = "DeepGEMM get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor"
    inputs = (
        TensorSpec("scale", Kind.SCALES, F32, ("S", "MN"), "powers of two; the K blocks of one group after another"),
        TensorSpec("ks", Kind.COUNTS, INTEGERS, ("G",), "K of each group"),
    )
    options = (OptionSpec("gran_k", 128, tiles.GRANULARITIES, "elements of K that share a scale"),)
    strided = True
    function = staticmethod(tiles.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor)


# Routines that their function says: the function, which has the contract's name; what it computes, source, inputs.
for _function, _summary, _source, _inputs in (
    (layout.ceil_div, "ceil(x / y)", "DeepGEMM deep_gemm/utils/math.py", columns("x", "y")),
    (
        layout.align,
        "the smallest multiple of y that is not below x",
        "DeepGEMM deep_gemm/utils/math.py",
        columns("x", "y"),
    ),
    (
        layout.calculate_tile_tokens_dim,
        "int((T top_k // E) * 1.3) to the next power of two, within [8, 64]",
        "vLLM flashinfer_utils.calculate_tile_tokens_dim",
        columns("num_tokens", "top_k", "num_experts"),
    ),
    (
        layout.swap_w13_to_w31,
        "the gate and up halves exchanged",
        "vLLM flashinfer_utils.swap_w13_to_w31",
        (TensorSpec("x", Kind.CODES, WEIGHT, None, "[..., 2 I, H], or block scales [..., 2 B, C]"),),
    ),
    (
        layout.reorder_rows_for_gated_act_gemm,
        "gate and up rows alternating",
        "TensorRT-LLM reorderRowsForGatedActGemm",
        (TensorSpec("w", Kind.CODES, WEIGHT, ("M", "K"), "one expert's gate rows, then its up rows"),),
    ),
):
    _base = TableContract if _inputs[0].dtypes == INTEGERS else LayoutContract
    _fields = {"summary": _summary, "source": _source, "inputs": _inputs, "function": staticmethod(_function)}
    register(type(_function.__name__, (_base,), {"name": _function.__name__, **_fields}))
