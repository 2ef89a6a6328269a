"""Contracts of the layouts: the output is the input's bits in other places, so it is right or wrong, bit by bit.

A contract names its truth (:meth:`LayoutContract.made`); the verdict compares bits, and strides where the contract
promises them. Nothing is tolerated. Here: scales for TMA, tiles of scales, and the integers of padding as tables. Not
covered: expert weights (:mod:`oracle.routines.layouts.experts`), values that a caller computes
(:mod:`oracle.routines.layouts.shards`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from oracle.routines.base import F32, Call, Contract, Inputs, Options, OptionSpec, Out, TensorSpec, positive, register
from oracle.truth import layout
from oracle.verdict.compare import Status, Verdict
from oracle.verdict.sets import Bits, Found, Range, Sets, bits_of, judge_bits, worst_of, wrong_strides

ONE_BYTE = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.float8_e8m0fnu)
INTEGERS = (torch.int64, torch.int32)


class LayoutContract(Contract):
    """A contract whose truth is a set of tensors to be matched bit for bit; ``strided`` ones in strides as well."""

    section: ClassVar[str] = "Padding and layout"
    strided: ClassVar[bool] = False

    function: ClassVar[Callable[..., Any]]

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        """The right outputs of a checked call: of ``function``, given the inputs in their order and the options."""
        made = self.function(*(inputs.get(spec.name) for spec in self.inputs), **options)
        found = zip(self.returns, (made,) if isinstance(made, Tensor) else made, strict=True)
        return {name: tensor for name, tensor in found if tensor is not None}

    def reference(self, inputs: Inputs, **options: object) -> Tensor | dict[str, Tensor]:
        made = self.made(inputs, self.check(inputs, options))
        return made if tuple(made) != ("out",) else made["out"]

    def outputs(self, call: Call) -> dict[str, Out]:
        return {name: Out(tuple(x.shape), (x.dtype,)) for name, x in call.truth.items()}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [Bits(call.truth, self.why_mistrust(call.inputs), self.strided)]

    def why_mistrust(self, inputs: Inputs) -> str | None:
        """Reason for which a pass on these inputs would prove little, or None."""
        for name, x in inputs.items():
            if x.numel() > 1 and x.dtype not in INTEGERS and bool((bits_of(x) == bits_of(x).flatten()[0]).all()):
                return f"all elements of {name} are equal, so a wrong place changes nothing"
        return None


# --- scales -------------------------------------------------------------------------------------------------


@register
class ColMajorTmaAligned(LayoutContract):
    """Lanes ``M .. align(M, 4) - 1`` of every column must be zero."""

    name = "get_col_major_tma_aligned_tensor"
    gpu = True
    summary = "float32 scales as columns at strides of align(M, 4)"
    source = "DeepGEMM get_col_major_tma_aligned_tensor"
    inputs = (TensorSpec("scale", F32, None, "[M, C] or [G, M, C]"),)
    strided = True
    function = staticmethod(layout.get_col_major_tma_aligned_tensor)

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [PaddedColumns(call.truth, self.why_mistrust(call.inputs), self.strided)]


class PaddedColumns(Bits):
    """The same bits, with memory behind every column up to the alignment, and zeros in it."""

    def judge(self, found: Found) -> Verdict:
        judged, out = super().judge(found), found["out"]
        if judged.status is Status.FAILED:
            return judged
        if not layout.has_pad_lanes(out):
            said = f"the memory of out {list(out.shape)} ends before the padding of its last column"
            return wrong_strides(said, out.numel())
        lanes = layout.pad_lanes(out)
        zeros = judge_bits(lanes, torch.zeros_like(lanes), output="padding") if lanes.numel() else judged
        return worst_of([zeros, judged]) if zeros.status is Status.FAILED else judged


@register
class PackedUe8m0(LayoutContract):
    name = "get_mn_major_tma_aligned_packed_ue8m0_tensor"
    gpu = True
    summary = "four exponent bytes of consecutive K blocks in an int32, words in columns"
    source = "DeepGEMM get_mn_major_tma_aligned_packed_ue8m0_tensor"
    inputs = (TensorSpec("scale", F32, None, "[M, C] or [G, M, C], powers of two"),)
    strided = True
    function = staticmethod(layout.get_mn_major_tma_aligned_packed_ue8m0_tensor)


@register
class RequiredLayout(LayoutContract):
    """The ``target`` option is the arch whose layout is asked for: packing can be tested on any machine."""

    name = "transform_sf_into_required_layout"
    summary = "scales as DeepGEMM takes them: float32 columns on sm90, packed UE8M0 on sm100"
    source = "DeepGEMM transform_sf_into_required_layout"
    inputs = (TensorSpec("scale", F32, None, "[ceil(mn / gran_mn), ceil(k / gran_k)], or with a leading G"),)
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
        made = layout.transform_sf_into_required_layout(
            inputs["scale"], mn=mn, k=k, gran_mn=gran, gran_k=gran_k, arch=str(options["target"])
        )
        return {"out": made}


@register
class SwizzleScale(LayoutContract):
    """Padding bytes are unspecified; the oracle writes zeros."""

    name = "swizzle_scale"
    summary = "scales in tiles of 128x4 or 8x4"
    source = "cuBLAS 1D block scaling factors layout; TensorRT-LLM get_sf_out_offset_8x4"
    inputs = (TensorSpec("scale", ONE_BYTE, None, "[M, C] or [G, M, C]"),)
    options = (OptionSpec("tile", "128x4", tuple(layout.HEIGHTS), "height x width of a tile"),)
    function = staticmethod(layout.swizzle_scale)

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [SwizzledScale(call.truth, self.why_mistrust(call.inputs), call=call)]


@dataclass(frozen=True)
class SwizzledScale(Bits):
    """Every scale in its place; the padding of a tile is free."""

    call: Call = field(kw_only=True)

    def judge(self, found: Found) -> Verdict:
        scale, tile = self.call.inputs["scale"], str(self.call.resolved["tile"])
        back = layout.unswizzle_scale(found["out"], *scale.shape[-2:], tile=tile)
        return judge_bits(back, scale, output="out", mistrust=self.mistrust)

    def ranges(self, expected: Found) -> dict[str, Range]:
        zeros = torch.zeros_like(self.call.inputs["scale"].view(torch.uint8))
        tile = str(self.call.resolved["tile"])
        empty, full = (layout.swizzle_scale(zeros, tile=tile, fill=fill) for fill in (0, 1))
        return {"out": Range(expected["out"], expected["out"], (empty != full).to(torch.uint8))}


# --- integers of padding, as tables -------------------------------------------------------------------------


class TableContract(LayoutContract):
    """An integer function over vectors of its arguments; one that gives a record has an output for each field."""

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
    return tuple(TensorSpec(name, INTEGERS, ("R",), "one value for each row of the table") for name in names)


# The function, which has the contract's name; what it computes, source, columns.
for _function, _summary, _source, _names in (
    (layout.ceil_div, "ceil(x / y)", "DeepGEMM deep_gemm/utils/math.py", ("x", "y")),
    (layout.align, "the smallest multiple of y that is not below x", "DeepGEMM deep_gemm/utils/math.py", ("x", "y")),
    (layout.calculate_tile_tokens_dim, "int((T top_k // E) * 1.3) to the next power of two, within [8, 64]",
     "vLLM flashinfer_utils.calculate_tile_tokens_dim", ("num_tokens", "top_k", "num_experts")),
):  # fmt: skip
    _fields = {"summary": _summary, "source": _source, "inputs": columns(*_names), "function": staticmethod(_function)}
    register(type(_function.__name__, (TableContract,), {"name": _function.__name__, **_fields}))
