"""Contracts of DeepGEMM's other forms: transposed operands, float32 sums that accumulate, K in groups, heads.

    fp8_gemm_nn, _tn, _tt                the product of :class:`.Fp8GemmNt`, operands and scales as ``[K, ...]``
    fp8_gemm_nt_1d1d                     recipe (1, 1, 128): a scale for each row of ``b``; float32, ``c`` added last
    k_grouped_fp8_gemm_nt_contiguous     that product of every group of K (a weight gradient of each expert)
    m_grouped_fp8_gemm_nn_contiguous     ``m_grouped_fp8_gemm_nt_contiguous`` with ``b [G, K, N]``
    fp8_einsum                           "bhr,hdr->bhd": a product for every head ``h``
    fp8_gemm_nt_skip_head_mid            columns in heads, with a gap inside each that is not written

The library demands operands whose K lies dense for all of them on sm90; here ``[K, M]`` is the logical shape, and
strides are the kernel's affair. A float32 output holds ``RN(c + F)``, ``F`` the promoted float32 sum: one addition,
which the kernel leaves to the memory (a reduction that may flush subnormals, :data:`oracle.bounds.product.FLUSHED`).
Source: deepseek-ai/DeepGEMM 54e2261, csrc/apis/gemm.hpp and einsum.hpp, impls/sm90_fp8_gemm_1d1d.cuh.
Not covered: UE8M0 casts inside the library, FP4 operands, prefix sums as a layout of groups.

NaN codes and scales stay NaN, and make NaN of every sum that they enter; placing them reads no value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import InputError, OptionError, ShapeError
from oracle.routines.base import (
    F32,
    FP8,
    INTEGERS,
    Call,
    Contract,
    Inputs,
    Options,
    OptionSpec,
    Out,
    TensorSpec,
    positive,
    register,
)
from oracle.routines.products.contract import (
    BLOCK_NUMERICS,
    BLOCKS,
    OUT_DTYPE,
    OUT_DTYPES,
    Fp8GemmNt,
    ProductContract,
    block_scaled,
    scale_input,
    transposed,
)
from oracle.routines.products.grouped import GroupedContiguous
from oracle.routines.products.traits import HEADS, K_IN_GROUPS
from oracle.routines.traits import Kind
from oracle.tensorcore.schedules import Schedule
from oracle.truth.gemm import ScaledProduct
from oracle.verdict.compare import Verdict
from oracle.verdict.products import Part
from oracle.verdict.sets import Found, Range, Sets

SOURCE = "DeepGEMM csrc/apis/gemm.hpp"
FLOAT32_OUT = OptionSpec("out_dtype", None, (None, torch.float32), "dtype of the output: float32, for None too")
SUMMAND = "added in float32 after the whole of K"


# --- transposed operands ------------------------------------------------------------------------------------


def _turned(inputs: Sequence[TensorSpec], names: Sequence[str]) -> tuple[TensorSpec, ...]:
    """The inputs with the last two dims of these exchanged."""
    return tuple(
        replace(s, dims=(*s.dims[:-2], s.dims[-1], s.dims[-2])) if s.name in names and s.dims is not None else s
        for s in inputs
    )


class Turned(ProductContract):
    """The operands given as ``[K, ...]``, and their scales, are transposed; any strides.

    Subclasses
    ----------
    ``turned`` names these operands and their scales.
    """

    laid_out = True
    turned: ClassVar[tuple[str, ...]]

    def matrices(self, call: Call, role: str, tensor: Tensor) -> list[Tensor]:
        view = tensor.mT if self.roles[role] in self.turned else tensor
        return list(view) if view.dim() == 3 else [view]

    def straight(self, inputs: Inputs) -> dict[str, Tensor]:
        """The inputs with every operand as ``[..., rows, K]``."""
        return {name: _transposed(x) if name in self.turned else x for name, x in inputs.items()}


@register
class Fp8GemmNn(Turned, Fp8GemmNt):
    name = "fp8_gemm_nn"
    probed = None
    summary = "a [M, K] times b [K, N]; 1x128 scales on a, 128x128 scales on b"
    source = SOURCE
    turned: ClassVar[tuple[str, ...]] = ("b", "b_scale")
    inputs: ClassVar[tuple[TensorSpec, ...]] = _turned(Fp8GemmNt.inputs, turned)

    def parts(self, inputs: Inputs) -> list[Part]:
        return super().parts(self.straight(inputs))

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        straight = {name: inputs[name].mT if name in self.turned else inputs[name] for name in ("a", "b")}
        return super().shape(straight)


@register
class Fp8GemmTn(Fp8GemmNn):
    name = "fp8_gemm_tn"
    summary = "a [K, M] transposed times b [K, N]; scales transposed alike"
    turned = ("a", "a_scale", "b", "b_scale")
    inputs = _turned(Fp8GemmNt.inputs, turned)


@register
class Fp8GemmTt(Fp8GemmNn):
    name = "fp8_gemm_tt"
    summary = "a [K, M] transposed times b [N, K] transposed; scales of a transposed"
    turned = ("a", "a_scale")
    inputs = _turned(Fp8GemmNt.inputs, turned)


@register
class GroupedContiguousNn(Turned, GroupedContiguous):
    name = "m_grouped_fp8_gemm_nn_contiguous"
    summary = "rows sorted by expert in one matrix, weights [G, K, N]; -1 marks padding rows"
    source = SOURCE
    turned = ("b", "b_scale")
    inputs = _turned(GroupedContiguous.inputs, turned)

    def parts(self, inputs: Inputs) -> list[Part]:
        return super().parts(self.straight(inputs))

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        return inputs["a"].shape[0], inputs["b"].shape[2]


# --- float32 sums that accumulate ---------------------------------------------------------------------------


@register
class Fp8GemmNt1D1D(Fp8GemmNt):
    """``out = RN(c + F)``, ``F`` the float32 sum over K in blocks of 128: one addition, which the kernel leaves to the
    memory, where subnormals may be flushed to zero. ``c`` does not start the accumulator: it is added last."""

    name = "fp8_gemm_nt_1d1d"
    probed = None
    summary = "a [M, K] times b [N, K] transposed, 1x128 scales on both; float32, with c [M, N] added last"
    source = f"{SOURCE}, recipe (1, 1, 128)"
    scaling = (BLOCKS[0], BLOCKS[0])
    out_dtypes = F32
    options: ClassVar[tuple[OptionSpec, ...]] = (FLOAT32_OUT,)
    inputs = (
        *Fp8GemmNt.inputs[:3],
        scale_input("b_scale", BLOCKS[0], "N", "K", doc="logical 1x128 scales"),
        TensorSpec("c", Kind.STATE, F32, ("M", "N"), SUMMAND, optional=True),
    )

    def parts(self, inputs: Inputs) -> list[Part]:
        return [Part(summed(inputs["a"], inputs["b"], inputs["a_scale"], inputs["b_scale"], inputs.get("c")))]


@register
class KGrouped(ProductContract):
    """Group ``g`` has ``ks[g]`` steps of K, a multiple of 128, possibly none: then ``out[g] = c[g]``. Its codes are the
    ``M * ks[g]`` (of ``b``: ``N * ks[g]``) behind those of the groups before it, row by row. Else
    ``out[g] = RN(c[g] + F)``, ``F`` the float32 sum over its K; subnormals of that addition may be flushed."""

    name = "k_grouped_fp8_gemm_nt_contiguous"
    traits = frozenset({K_IN_GROUPS})
    summary = "for every group of K, c[g] + a_g [M, K_g] times b_g [N, K_g] transposed, 1x128 scales; float32"
    source = f"{SOURCE}; impls/sm90_fp8_gemm_1d1d.cuh"
    laid_out = True
    out_dtypes = F32
    options = (FLOAT32_OUT,)
    inputs = (
        TensorSpec("a", Kind.CODES, FP8, ("L",), "codes of all groups, each [M, K_g] row-major", contiguous=True),
        TensorSpec(
            "a_scale", Kind.SCALES, F32, ("M", "B"), "1x128 scales, blocks of all groups in a row", contiguous=True
        ),
        TensorSpec("b", Kind.CODES, FP8, ("J",), "codes of all groups, each [N, K_g] row-major", contiguous=True),
        TensorSpec(
            "b_scale", Kind.SCALES, F32, ("N", "B"), "1x128 scales, blocks of all groups in a row", contiguous=True
        ),
        TensorSpec("ks", Kind.COUNTS, INTEGERS, ("G",), "steps of K of each group"),
        TensorSpec("c", Kind.STATE, F32, ("G", "M", "N"), SUMMAND, contiguous=True),
    )

    def matrices(self, call: Call, role: str, tensor: Tensor) -> list[Tensor]:
        ks = [k for k in call.inputs["ks"].tolist() if k]
        if tensor.dim() == 2:
            return list(tensor.split_with_sizes([k // 128 for k in ks], dim=1))
        rows = call.inputs[f"{role}_scale"].shape[0]
        return [part.view(rows, k) for part, k in zip(tensor.split_with_sizes([rows * k for k in ks]), ks, strict=True)]

    def parts(self, inputs: Inputs) -> list[Part]:
        c = inputs["c"]
        _, m, n = c.shape
        parts, start = [], 0
        for g, k in enumerate(inputs["ks"].tolist()):
            a, b = (
                inputs[name][rows * start : rows * (start + k)].view(rows, k) for name, rows in (("a", m), ("b", n))
            )
            blocks = slice(start // 128, (start + k) // 128)
            a_scale, b_scale = (inputs[name][:, blocks].contiguous() for name in ("a_scale", "b_scale"))
            if not k:  # the sum over nothing is that over a zero
                a_scale, b_scale = (torch.ones(rows, 1, dtype=torch.float32, device=c.device) for rows in (m, n))
                a, b = ((0 * one).to(inputs[name].dtype) for name, one in (("a", a_scale), ("b", b_scale)))
            rows_of = torch.arange(g * m, (g + 1) * m, device=c.device)
            parts.append(Part(summed(a, b, a_scale, b_scale, c[g]), rows_of, g))
            start += k
        return parts

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        return tuple(inputs["c"].shape)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        bound = self.extents(inputs)
        ks = inputs["ks"].tolist()
        if odd := [k for k in ks if k < 0 or k % 128]:
            raise InputError(f"ks holds {odd[0]}; every group has a multiple of 128 steps, pad it with zeros")
        if sum(ks) != 128 * bound["B"]:
            raise ShapeError(f"ks sum to {sum(ks)}; the scales have {bound['B']} blocks of 128")
        for name, symbol, rows in (("a", "L", "M"), ("b", "J", "N")):
            if bound[symbol] != bound[rows] * sum(ks):
                raise ShapeError(
                    f"{name} has {bound[symbol]} codes; {rows}={bound[rows]} rows of {sum(ks)} steps have "
                    f"{bound[rows] * sum(ks)}"
                )


def summed(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, c: Tensor | None) -> ScaledProduct:
    """The product of codes ``a`` ``[M, K]`` and ``b`` ``[N, K]`` (FP8) with 1x128 scales ``a_scale`` ``[M, B]``,
    ``b_scale`` ``[N, B]`` on both sides, and a summand ``c`` ``[M, N]``, float32."""
    return ScaledProduct(a, b, a_scale, b_scale, block=min(128, a.shape[1]), b_rows=1, c=c)


def _transposed(x: Tensor) -> Tensor:
    """The last two axes exchanged, contiguous, of any dtype."""
    return transposed(x) if x.dim() == 2 else torch.stack([transposed(m).view(_raw(x)) for m in x]).view(x.dtype)


def _raw(x: Tensor) -> torch.dtype:
    return torch.uint8 if x.element_size() == 1 else x.dtype


# --- heads --------------------------------------------------------------------------------------------------


@register
class Fp8Einsum(ProductContract):
    """Row ``(b, h)`` of the output is row ``b`` of head ``h``'s product."""

    name = "fp8_einsum"
    traits = frozenset({HEADS})
    summary = "bhr,hdr->bhd: for every head a [B, R] times b [D, R] transposed; 1x128 and 128x128 scales"
    source = "DeepGEMM csrc/apis/einsum.hpp"
    laid_out = True
    inputs = (
        TensorSpec("a", Kind.CODES, FP8, ("M", "H", "K"), "activation codes"),
        scale_input("a_scale", BLOCKS[0], "M", "H", "K", doc="logical 1x128 scales"),
        TensorSpec("b", Kind.CODES, FP8, ("H", "N", "K"), "weight codes of every head"),
        scale_input("b_scale", BLOCKS[1], "H", "N", "K", doc="128x128 scales of every head"),
    )

    def matrices(self, call: Call, role: str, tensor: Tensor) -> list[Tensor]:
        return list(tensor.unbind(0 if role.startswith("b") else 1))

    def parts(self, inputs: Inputs) -> list[Part]:
        m, heads, _ = inputs["a"].shape
        rows = torch.arange(m, device=inputs["a"].device) * heads
        parts = []
        for h in range(heads):
            a, b = (x.contiguous() for x in (inputs["a"][:, h], inputs["b"][h]))
            scales = inputs["a_scale"][:, h].contiguous(), inputs["b_scale"][h]
            parts.append(Part(block_scaled(a, b, *scales, self.scaling), rows + h, h))
        return parts


@dataclass(frozen=True)
class SomeColumns(Sets):
    """The sets of the written columns of an output whose other columns are unspecified."""

    written: Sets
    columns: Tensor

    @property
    def numerics(self) -> str:  # type: ignore[override]
        return self.written.numerics

    def judge(self, outputs: Found) -> Verdict:
        return self.written.judge({"out": outputs["out"][:, self.columns]})

    def ranges(self, expected: Found) -> dict[str, Range] | None:
        out = expected["out"]
        inner = self.written.ranges({"out": out[:, self.columns].contiguous()})
        if inner is None:
            return None
        low, high = torch.full_like(out, -torch.inf), torch.full_like(out, torch.inf)
        free = torch.ones(out.shape, dtype=torch.uint8, device="cpu")
        own = inner["out"]
        for whole, part in zip((low, high, free), (own.low, own.high, own.free), strict=True):
            whole[:, self.columns] = part
        return {"out": Range(low, high, free)}


@register
class SkipHeadMid(Contract):
    """Each head has ``left`` columns, a gap of ``mid`` that is not written, and ``right`` columns: product column ``n``
    is output column ``n + (n + right) // (left + right) * mid``. N is a multiple of ``left + right``. The columns of
    the gaps may hold anything. The product is that of :class:`.Fp8GemmNt`: each element is the sum over blocks k of K
    of ``a_scale[m, k] * b_scale[n // 128, k]`` times the sum over the block of ``a[m, .] * b[n, .]``, rounded once to
    the output's dtype. NaN stays NaN, also times 0."""

    name = "fp8_gemm_nt_skip_head_mid"
    section = "GEMM"
    gpu = True
    golden_arches = ("cpu", "sm90")
    summary = f"{Fp8GemmNt.name} whose columns go to heads with a gap inside, which is not written"
    source = SOURCE
    numerics = BLOCK_NUMERICS
    inputs = Fp8GemmNt.inputs
    shapes = {"out": "[M, N / (left + right) * (left + mid + right)], one head after the other"}
    options = (
        OUT_DTYPE,
        OptionSpec("left", 128, None, "columns of a head before the gap"),
        OptionSpec("mid", 64, None, "columns of the gap"),
        OptionSpec("right", 128, None, "columns of a head behind the gap"),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        left, _, right = (positive(options, name) for name in ("left", "mid", "right"))
        n = inputs["b"].shape[0]
        if n % (left + right):
            raise OptionError(f"left={left} and right={right} make heads of {left + right}; N={n} is no multiple of it")

    def columns(self, call: Call) -> tuple[Tensor, int]:
        """Where each column of the product goes, int64 ``[N]``, and the columns of the output. Raises OptionError."""
        left, mid, right = (positive(call.resolved, name) for name in ("left", "mid", "right"))
        n = torch.arange(call.inputs["b"].shape[0], device=call.inputs["b"].device)
        return n + (n + right) // (left + right) * mid, len(n) + len(n) // (left + right) * mid

    def spread(self, call: Call, out: Tensor) -> Tensor:
        """Product columns ``out`` ``[M, N]`` in their places, NaN in the gaps: ``[M, columns]`` of the same dtype."""
        at, width = self.columns(call)
        whole = torch.full((out.shape[0], width), torch.nan, dtype=out.dtype, device=out.device)
        whole[:, at] = out
        return whole

    def outputs(self, call: Call) -> dict[str, Out]:
        dtype, (at, width) = call.resolved["out_dtype"], self.columns(call)
        specified = torch.zeros(call.inputs["a"].shape[0], width, dtype=torch.bool, device=at.device)
        specified[:, at] = True
        dtypes = (dtype,) if isinstance(dtype, torch.dtype) else OUT_DTYPES
        return {"out": Out(tuple(specified.shape), dtypes, specified)}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [SomeColumns(sets, self.columns(call)[0]) for sets in DENSE.admissible(_dense(call), numerics)]

    def why_not(self, call: Call, numerics: str) -> str | None:
        return DENSE.why_not(_dense(call), numerics)

    def by_schedule(self, call: Call, schedule: Schedule, numerics: str) -> dict[str, Tensor]:
        return {"out": self.spread(call, DENSE.by_schedule(_dense(call), schedule, numerics)["out"])}

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        call = Call(self, inputs, options).checked()
        return self.spread(call, DENSE.reference(inputs, out_dtype=call.resolved["out_dtype"]))

    def predict(self, inputs: Inputs, *, numerics: str | None, **options: object) -> Tensor:
        """The bits ``[M, columns]`` of the product by one of the numerics, in ``out_dtype``, NaN in the gaps."""
        call = Call(self, inputs, options).checked()
        outputs = DENSE.predict(inputs, numerics=numerics, out_dtype=call.resolved["out_dtype"])
        return self.spread(call, outputs)


DENSE = Fp8GemmNt()


def _dense(call: Call) -> Call:
    """The product of a call whose columns go to heads."""
    return replace(call, contract=DENSE, options={"out_dtype": call.resolved["out_dtype"]})
