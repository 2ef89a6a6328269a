"""Contracts of the layouts: the output is the input's bits in other places, so it is right or wrong, bit by bit.

A contract names its truth (:meth:`LayoutContract.made`); the verdict compares bits, and strides where the contract
promises them. Nothing is tolerated. Here: scales for TMA, tiles of scales, and the integers of padding as tables. Not
covered: expert weights (:mod:`oracle.routines.layouts.experts`), values that a caller computes
(:mod:`oracle.routines.layouts.shards`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import InputError, NumericsError, OptionError
from oracle.numbers.formats import codes_of, decode
from oracle.routines.base import Contract, OptionSpec, Output, TensorSpec, check_output, register
from oracle.truth import layout
from oracle.verdict import evidence
from oracle.verdict.compare import Comparison, Status, Verdict, Worst, verdict

ONE_BYTE = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.float8_e8m0fnu)
F32 = (torch.float32,)
INTEGERS = (torch.int64, torch.int32)


class LayoutContract(Contract):
    """A contract whose truth is a set of tensors to be matched bit for bit; ``strided`` ones in strides as well."""

    strided: ClassVar[bool] = False

    @abstractmethod
    def made(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> dict[str, Tensor]:
        """The right outputs of a checked call."""

    def reference(self, inputs: Mapping[str, Tensor], **options: object) -> Tensor | dict[str, Tensor]:
        made = self.made(inputs, self.check(inputs, options))
        return made if tuple(made) != ("out",) else made["out"]

    def judge(
        self, inputs: Mapping[str, Tensor], output: Output, *, arch: str, numerics: str | None, **options: object
    ) -> Verdict:
        if numerics is not None:
            raise NumericsError(f"{self.name} moves bits and has no numerics; pass none, not {numerics!r}")
        made = self.made(inputs, self.check(inputs, options))
        found = outputs_of(self.name, output, tuple(made))
        verdicts = []
        for name, expected in made.items():
            actual = found[name]
            check_output(
                actual, name=name, shape=tuple(expected.shape), dtypes=(expected.dtype,), device=expected.device
            )
            verdicts.append(judge_bits(actual, expected, output=name, mistrust=self.why_mistrust(inputs)))
            if self.strided and significant_strides(actual) != significant_strides(expected):
                verdicts.append(_wrong_strides(name, actual, expected))
        return worst_of(verdicts)

    def why_mistrust(self, inputs: Mapping[str, Tensor]) -> str | None:
        """Reason for which a pass on these inputs would prove little, or None."""
        for name, x in inputs.items():
            if x.numel() > 1 and x.dtype not in INTEGERS and bool((bits_of(x) == bits_of(x).flatten()[0]).all()):
                return f"all elements of {name} are equal, so a wrong place changes nothing"
        return None


def judge_bits(actual: Tensor, expected: Tensor, *, output: str, mistrust: str | None = None) -> Verdict:
    """The verdict on a tensor that must have the bits of another (NaN payloads and the sign of zero included)."""
    bad = bits_of(actual) != bits_of(expected)
    outside = int(bad.sum())
    worst, seen = None, None
    if outside:
        index = tuple(torch.nonzero(bad)[0].tolist())
        value, right = _number(actual, index), _number(expected, index)
        worst = Worst(index, value, right, right, right, math.inf, output)
        seen = evidence.of_bits(actual, expected, bad, output=output)
    found = Comparison(outside, bad.numel(), 0, math.inf if outside else 0.0, worst, bad, seen)
    return verdict(found, basis="every bit in its place", matches="the layout", mistrust=mistrust)


def bits_of(x: Tensor) -> Tensor:
    """A tensor as integers: the bits of a floating-point one."""
    return codes_of(x) if x.is_floating_point() else x


def significant_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of the axes that have more than one element: the others say nothing about memory."""
    return tuple(s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1)


def outputs_of(contract: str, output: Output, names: tuple[str, ...]) -> Mapping[str, Tensor]:
    """The named tensors of an output; a lone tensor may come as it is.

    Raises
    ------
    InputError
        Another set of outputs.
    """
    if isinstance(output, Tensor):
        output = {"out": output}
    if not isinstance(output, Mapping) or set(output) != set(names):
        have = ", ".join(output) if isinstance(output, Mapping) else type(output).__name__
        raise InputError(f"{contract} returns {', '.join(names)}; the output is {have or 'empty'}")
    return output


def worst_of(verdicts: list[Verdict]) -> Verdict:
    """One verdict for several outputs: the first failure, else the first that is no pass, else the first one.

    The counts add.
    """
    first = next((v for v in verdicts if v.status is Status.FAILED), None)
    first = first or next((v for v in verdicts if v.status is not Status.PASSED), verdicts[0])
    return replace(first, outside=sum(v.outside for v in verdicts), total=sum(v.total for v in verdicts))


def _wrong_strides(name: str, actual: Tensor, expected: Tensor) -> Verdict:
    said = (
        f"{name} has strides {tuple(actual.stride())} for shape {list(actual.shape)}; this layout has "
        f"{tuple(expected.stride())}"
    )
    return Verdict(Status.FAILED, said, actual.numel(), actual.numel(), basis="strides of the layout", pattern=said)


def _number(x: Tensor, index: tuple[int, ...]) -> float:
    element = x[index]
    return float(decode(element)) if x.is_floating_point() else float(element)


def positive(options: Mapping[str, object], name: str) -> int:
    """An option that must be a positive integer."""
    value = options[name]
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise OptionError(f"{name}={value!r}; pass a positive integer")
    return value


# --- scales -------------------------------------------------------------------------------------------------


@register
class ColMajorTmaAligned(LayoutContract):
    """Lanes ``M .. align(M, 4) - 1`` of every column must be zero."""

    name = "get_col_major_tma_aligned_tensor"
    summary = "float32 scales as columns at strides of align(M, 4)"
    source = "DeepGEMM get_col_major_tma_aligned_tensor"
    inputs = (TensorSpec("scale", F32, None, "[M, C] or [G, M, C]"),)
    strided = True

    def made(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> dict[str, Tensor]:
        return {"out": layout.get_col_major_tma_aligned_tensor(inputs["scale"])}

    def judge(
        self, inputs: Mapping[str, Tensor], output: Output, *, arch: str, numerics: str | None, **options: object
    ) -> Verdict:
        judged = super().judge(inputs, output, arch=arch, numerics=numerics, **options)
        if judged.status is Status.FAILED:
            return judged
        out = outputs_of(self.name, output, ("out",))["out"]
        if not layout.has_pad_lanes(out):
            said = f"the memory of out {list(out.shape)} ends before the padding of its last column"
            return Verdict(Status.FAILED, said, out.numel(), out.numel(), basis="strides of the layout", pattern=said)
        lanes = layout.pad_lanes(out)
        zeros = judge_bits(lanes, torch.zeros_like(lanes), output="padding") if lanes.numel() else judged
        return worst_of([zeros, judged]) if zeros.status is Status.FAILED else judged


@register
class PackedUe8m0(LayoutContract):
    name = "get_mn_major_tma_aligned_packed_ue8m0_tensor"
    summary = "four exponent bytes of consecutive K blocks in an int32, words in columns"
    source = "DeepGEMM get_mn_major_tma_aligned_packed_ue8m0_tensor"
    inputs = (TensorSpec("scale", F32, None, "[M, C] or [G, M, C], powers of two"),)
    strided = True

    def made(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> dict[str, Tensor]:
        return {"out": layout.get_mn_major_tma_aligned_packed_ue8m0_tensor(inputs["scale"])}


@register
class RequiredLayout(LayoutContract):
    """The ``target`` option is the arch whose layout is asked for: packing can be tested on any machine."""

    name = "transform_sf_into_required_layout"
    summary = "scales as DeepGEMM takes them: float32 columns on sm90, packed UE8M0 on sm100"
    source = "DeepGEMM transform_sf_into_required_layout"
    inputs = (TensorSpec("scale", F32, None, "[ceil(mn / gran_mn), ceil(k / 128)], or with a leading G"),)
    options = (
        OptionSpec("mn", None, None, "rows of the operand"),
        OptionSpec("k", None, None, "columns of the operand"),
        OptionSpec("gran_mn", 1, (1, 128), "rows that share a scale"),
        OptionSpec("target", "sm90", layout.strided.ARCHES, "arch whose layout is asked for"),
    )
    strided = True

    def made(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> dict[str, Tensor]:
        mn, k, gran = (positive(options, name) for name in ("mn", "k", "gran_mn"))
        made = layout.transform_sf_into_required_layout(
            inputs["scale"], mn=mn, k=k, gran_mn=gran, arch=str(options["target"])
        )
        return {"out": made}


@register
class SwizzleScale(LayoutContract):
    """Padding bytes are unspecified; the oracle writes zeros."""

    name = "swizzle_scale"
    summary = "scales in tiles of 128x4 or 8x4"
    source = "cuBLAS 1D block scaling factors layout; TensorRT-LLM get_sf_out_offset_8x4"
    inputs = (TensorSpec("scale", ONE_BYTE, None, "[M, C] or [G, M, C]"),)
    options = (OptionSpec("tile", "128x4", tuple(layout.swizzle.HEIGHTS), "height x width of a tile"),)

    def made(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> dict[str, Tensor]:
        return {"out": layout.swizzle_scale(inputs["scale"], tile=str(options["tile"]))}

    def judge(
        self, inputs: Mapping[str, Tensor], output: Output, *, arch: str, numerics: str | None, **options: object
    ) -> Verdict:
        resolved = self.check(inputs, options)
        scale, tile = inputs["scale"], str(resolved["tile"])
        expected = self.made(inputs, resolved)["out"]
        actual = outputs_of(self.name, output, ("out",))["out"]
        check_output(actual, name="out", shape=tuple(expected.shape), dtypes=(scale.dtype,), device=scale.device)
        rows, columns = scale.shape[-2:]
        found = layout.unswizzle_scale(actual, rows, columns, tile=tile)
        return judge_bits(found, scale, output="out", mistrust=self.why_mistrust(inputs))


# --- integers of padding, as tables -------------------------------------------------------------------------


class TableContract(LayoutContract):
    """An integer function over vectors of its arguments; one that gives a record has an output for each field."""

    def row(self, *arguments: int) -> int | tuple[int, ...]:
        """The function."""
        raise NotImplementedError

    def made(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> dict[str, Tensor]:
        columns = [inputs[spec.name].tolist() for spec in self.inputs]
        answers = [self.row(*arguments) for arguments in zip(*columns, strict=True)]
        rows = [answer if isinstance(answer, tuple) else (answer,) for answer in answers]
        device = inputs[self.inputs[0].name].device
        fields = zip(self.outputs, zip(*rows, strict=True), strict=True)
        return {name: torch.tensor(values, dtype=torch.int64, device=device) for name, values in fields}


def _columns(*names: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, INTEGERS, ("R",), "one value for each row of the table") for name in names)


@register
class CeilDiv(TableContract):
    name = "ceil_div"
    summary = "ceil(x / y)"
    source = "DeepGEMM deep_gemm/utils/math.py"
    inputs = _columns("x", "y")

    def row(self, *arguments: int) -> int:
        return layout.ceil_div(*arguments)


@register
class Align(TableContract):
    name = "align"
    summary = "the smallest multiple of y that is not below x"
    source = "DeepGEMM deep_gemm/utils/math.py"
    inputs = _columns("x", "y")

    def row(self, *arguments: int) -> int:
        return layout.align(*arguments)


@register
class TileTokens(TableContract):
    name = "calculate_tile_tokens_dim"
    summary = "int((T top_k // E) * 1.3) to the next power of two, within [8, 64]"
    source = "vLLM flashinfer_utils.calculate_tile_tokens_dim"
    inputs = _columns("num_tokens", "top_k", "num_experts")

    def row(self, *arguments: int) -> int:
        return layout.calculate_tile_tokens_dim(*arguments)
