"""Contracts of DeepGEMM's other block-scaled forms: transposed operands, ends of groups, groups of K.

    fp8_fp4_gemm_nn, _tn, _tt               the product of ``fp8_fp4_gemm_nt``, operands and scales given as ``[K, ..]``
    m_grouped_fp8_fp4_gemm_nn_contiguous    the contiguous one with weights ``[G, K, N]``
    m_grouped_fp8_fp4_gemm_nt_psum          groups of rows by their ends; each begins at the next multiple of 128
    k_grouped_fp8_gemm_tn_contiguous        ``c[g] + a_g b_g`` of every group of K, in float32

A transposed operand of four bits has two codes of neighbouring rows in a byte: ``[K, M / 2]``. Its scales lie
transposed too, packed ones word by word; the words of a group of K end with it. Source: DeepGEMM 2.6.1
csrc/apis/gemm.hpp @54e2261. Not covered: alignments of groups other than 128.

NaN codes and scales stay NaN, and make NaN of every sum that they enter; placing them reads no value.
Sources: DeepGEMM 2.6.1 csrc/apis/gemm.hpp @54e2261.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import InputError, ShapeError
from oracle.routines.base import E4M3, F32, INTEGERS, Inputs, Options, OptionSpec, TensorSpec, register
from oracle.routines.mx.contract import LINEAR, pack, unpack
from oracle.routines.mx_products.contract import (
    EIGHT,
    MX,
    PACKED,
    POWERS,
    SUMMAND,
    UE8M0,
    WORDS,
    C,
    Fp8Fp4,
    GroupedFp8Fp4Contiguous,
    MxProduct,
    Run,
    Side,
    check_powers,
    fp8_fp4_inputs,
    lanes_of,
)
from oracle.routines.products.grouped import RUN
from oracle.routines.traits import Kind
from oracle.truth.gemm import ScaledProduct
from oracle.truth.layout import WIDTH
from oracle.verdict.products import Part

SOURCE = "DeepGEMM 2.6.1 csrc/apis/gemm.hpp"


def turned(x: Tensor) -> Tensor:
    """``x``, codes or scales ``[.., R, C]`` of any dtype, as ``[.., C, R]`` of the same dtype; packed codes ``[.., R, C
    / 2]`` as ``[.., C, R / 2]``."""
    if x.dtype is not torch.uint8:
        raw = x.view(torch.uint8) if x.element_size() == 1 else x
        return raw.mT.contiguous().view(x.dtype)
    flat = x.reshape(-1, x.shape[-1])
    codes = unpack(flat.view(torch.uint8)).reshape(*x.shape[:-1], -1).mT.contiguous()
    return pack(codes.reshape(-1, codes.shape[-1])).reshape(*codes.shape[:-1], -1).view(x.dtype)


class Turned(Fp8Fp4):
    """The operands given as ``[K, ...]`` are transposed, with their scales (packed ones word by word). One of four bits
    has the codes of two neighbouring rows in a byte: ``[K, M/2]``.

    Subclasses
    ----------
    ``turned`` names these operands."""

    turned: ClassVar[tuple[str, ...]]
    shapes = {"out": "[M, N], in codes, not bytes"}

    def straight(self, inputs: Inputs) -> dict[str, Tensor]:
        """The inputs with every operand as ``[.., rows, K]``."""
        names = {name for code in self.turned for name in (code, f"{code}_scale")}
        return {name: turned(x) if name in names else x for name, x in inputs.items()}

    def matrix(self, inputs: Inputs, part: int) -> Tensor:
        return super().matrix(self.straight(inputs), part)

    def given(self, inputs: Inputs, part: int, codes: Tensor) -> Tensor:
        straight = super().given(self.straight(inputs), part, codes)
        return turned(straight) if self.names[part] in self.turned else straight

    def sides(self, inputs: Inputs, options: Options) -> tuple[Side, Side]:
        straight = {**inputs, **self.straight({name: inputs[name] for name in ("a", "b")})}
        sides = zip(super().sides(straight, options), super().scale_shapes(straight, options), strict=True)
        a, b = (self._lying(side, shape) if side.codes in self.turned else side for side, shape in sides)
        return a, b

    def scale_shapes(self, inputs: Inputs, options: Options) -> tuple[tuple[int, ...], tuple[int, ...]]:
        straight = {**inputs, **self.straight({name: inputs[name] for name in ("a", "b")})}
        pairs = zip(("a", "b"), super().scale_shapes(straight, options), strict=True)
        a, b = ((*due[:-2], due[-1], due[-2]) if name in self.turned else due for name, due in pairs)
        return a, b

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        return super().shape(self.straight({name: inputs[name] for name in ("a", "b")}))

    def _depth(self, inputs: Inputs, part: int) -> int:
        operand = inputs[self.names[part]]
        return operand.shape[-2] if self.names[part] in self.turned else super()._depth(inputs, part)

    @staticmethod
    def _lying(side: Side, shape: tuple[int, ...]) -> Side:
        """Places in scales ``shape`` as those in each of their matrices transposed, element by element."""
        lanes = WIDTH if side.tile == PACKED else 1
        rows, columns = shape[-2:]
        element = side.at // lanes
        inside = element % (rows * columns)
        moved = element - inside + inside % columns * rows + inside // columns
        return replace(side, at=moved * lanes + side.at % lanes)


@register
class Fp8Fp4GemmNn(Turned):
    name = "fp8_fp4_gemm_nn"
    summary = "a [M, K] times b [K, N], E4M3 or E2M1 codes, power-of-two scales of 32 or 128, plus c"
    source = SOURCE
    turned: ClassVar[tuple[str, ...]] = ("b",)
    inputs: ClassVar[tuple[TensorSpec, ...]] = fp8_fp4_inputs(("M", "K"), ("K2", "N"), C)


@register
class Fp8Fp4GemmTn(Turned):
    name = "fp8_fp4_gemm_tn"
    summary = "a [K, M] transposed times b [K, N], E4M3 or E2M1 codes, power-of-two scales of 32 or 128, plus c"
    source = SOURCE
    turned = ("a", "b")
    inputs = fp8_fp4_inputs(("K", "M"), ("K2", "N"), C)


@register
class Fp8Fp4GemmTt(Turned):
    name = "fp8_fp4_gemm_tt"
    summary = "a [K, M] transposed times b [N, K] transposed, E4M3 or E2M1 codes, scales of 32 or 128, plus c"
    source = SOURCE
    turned = ("a",)
    inputs = fp8_fp4_inputs(("K", "M"), ("N", "K2"), C)


@register
class GroupedFp8Fp4ContiguousNn(Turned, GroupedFp8Fp4Contiguous):
    name = "m_grouped_fp8_fp4_gemm_nn_contiguous"
    gpu = False
    summary = "rows sorted by expert in one matrix, -1 for padding, weights [G, K, N]; E4M3 or E2M1 codes"
    source = SOURCE
    turned = ("b",)
    inputs = fp8_fp4_inputs(("M", "K"), ("G", "K2", "N"), GroupedFp8Fp4Contiguous.inputs[-1])

    def runs(self, inputs: Inputs, options: Options) -> Sequence[Run]:
        return super().runs({**inputs, **self.straight({"b": inputs["b"]})}, options)


@register
class GroupedFp8Fp4Psum(Fp8Fp4):
    """Group ``g`` has the rows from the first multiple of 128 that is not below ``ends[g - 1]`` to ``ends[g]``; those
    between are unspecified. A group whose end does not lie behind its start is empty."""

    name = "m_grouped_fp8_fp4_gemm_nt_psum"
    summary = "rows of an expert up to its end in one matrix, each expert from a multiple of 128; E4M3 or E2M1 codes"
    source = "DeepGEMM 2.6.1 m_grouped_fp8_fp4_gemm_nt_contiguous(use_psum_layout=True)"
    groups = "ends"
    production = "m_grouped_fp8_fp4_gemm_nt_contiguous"
    inputs = fp8_fp4_inputs(
        ("M", "K"), ("G", "N", "K2"), TensorSpec("ends", Kind.OFFSETS, INTEGERS, ("G",), "last row of each, + 1")
    )

    def spans(self, inputs: Inputs) -> list[tuple[int, int]]:
        """The first row of each group, and the one behind its last."""
        ends = inputs["ends"].tolist()
        return [(-(-begin // RUN) * RUN, end) for begin, end in zip([0, *ends], ends, strict=False)]

    def runs(self, inputs: Inputs, options: Options) -> Sequence[Run]:
        n = inputs["b"].shape[1]
        spans = enumerate(self.spans(inputs))
        return [Run(slice(i, j), slice(g * n, g * n + n), g) for g, (i, j) in spans if j > i]

    def extents(self, inputs: Inputs) -> dict[str, int]:
        bound, ends = super().extents(inputs), inputs["ends"].tolist()
        if ends != sorted(ends) or ends[0] < 0 or ends[-1] > bound["M"]:
            raise InputError(f"ends are {ends}; they run from 0 to at most {bound['M']} and never back")
        if not any(end > begin for begin, end in self.spans(inputs)):
            raise InputError(f"ends are {ends}: no row is real and there is nothing to judge")
        return bound


@register
class KGroupedGemmTn(MxProduct):
    """Group ``g`` has the ``ks[g]`` rows of codes behind those of the groups before it; one without any has ``out[g] =
    c[g]``. Else ``out[g] = RN(c[g] + RN(sum))``. Scales are transposed, ``[K / gran_k, M]`` of float32 powers of two,
    or int32 words of four E8M0 bytes: the words of a group end with it, ``[sum over g of ceil(ks[g] / (4 gran_k)),
    M]``, and so do those of b, with N columns."""

    name = "k_grouped_fp8_gemm_tn_contiguous"
    summary = "for every group of K, c[g] + a_g [K_g, M] transposed times b_g [K_g, N], power-of-two scales; float32"
    source = f"{SOURCE} k_grouped_fp8_gemm_tn_contiguous on sm100"
    golden_arches = ("cpu", "sm90")
    numerics = EIGHT
    groups = "ks"
    out_dtypes = F32
    inputs = (
        TensorSpec("a", Kind.CODES, E4M3, ("K", "M"), "codes, groups of K one behind the other"),
        TensorSpec("a_scale", Kind.SCALES, (*F32, *WORDS), None, POWERS),
        TensorSpec("b", Kind.CODES, E4M3, ("K", "N"), "codes, groups of K one behind the other"),
        TensorSpec("b_scale", Kind.SCALES, (*F32, *WORDS), None, POWERS),
        TensorSpec("ks", Kind.COUNTS, INTEGERS, ("G",), "rows of K of each group, multiples of gran_k"),
        TensorSpec("c", Kind.STATE, F32, ("G", "M", "N"), SUMMAND),
    )
    options = (
        OptionSpec("out_dtype", None, (None, torch.float32), "dtype of the output: float32, for None too"),
        OptionSpec("gran_k", 128, (32, 128), "codes that share a scale"),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        for side, due in zip(self.sides(inputs, options), self.scale_shapes(inputs, options), strict=True):
            check_powers(side, inputs[side.scale], due)
        ks, gran = inputs["ks"].tolist(), _gran(options)
        if odd := [k for k in ks if k < 0 or k % gran]:
            raise InputError(f"ks holds {odd[0]}; every group has a multiple of {gran} rows, pad it with zeros")
        if sum(ks) != (k := inputs["a"].shape[0]):
            raise ShapeError(f"ks sum to {sum(ks)}; the operands have K={k}")

    def check_side(self, side: Side, k: int) -> None:
        if k % side.width:
            raise ShapeError(f"K={k} is not a multiple of gran_k={side.width}; pad the groups with zeros")

    def scale_shapes(self, inputs: Inputs, options: Options) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of both scales."""
        shapes, gran = list[tuple[int, ...]](), _gran(options)
        for name in "ab":
            lanes = lanes_of(inputs[f"{name}_scale"]) if f"{name}_scale" in inputs else 1
            steps = inputs["ks"].tolist() if lanes > 1 else [inputs[name].shape[0]]
            shapes.append((sum(-(-k // (gran * lanes)) for k in steps), inputs[name].shape[1]))
        return shapes[0], shapes[1]

    def sides(self, inputs: Inputs, options: Options) -> tuple[Side, Side]:
        both, gran = [], _gran(options)
        for part, (down, rows) in enumerate(self.scale_shapes(inputs, options)):
            name, scale = self.names[part], self.names[2 + part]
            lanes = lanes_of(inputs[scale]) if scale in inputs else 1
            row, at, start = torch.arange(rows, device="cpu")[:, None], [], 0
            for k in inputs["ks"].tolist() if lanes > 1 else [inputs[name].shape[0]]:
                block = torch.arange(-(-k // gran), device="cpu")
                at.append(((start + block // lanes) * rows + row) * lanes + block % lanes)
                start += -(-k // (gran * lanes))
            dtype, lies = (UE8M0, PACKED) if lanes > 1 else (torch.float32, LINEAR)
            both.append(Side(name, scale, gran, dtype, lies, torch.cat(at, dim=1), down * rows * lanes))
        return both[0], both[1]

    def matrix(self, inputs: Inputs, part: int) -> Tensor:
        return turned(inputs[self.names[part]])

    def given(self, inputs: Inputs, part: int, codes: Tensor) -> Tensor:
        return turned(codes.view(inputs[self.names[part]].dtype))

    def parts(self, inputs: Inputs, **options: object) -> list[Part]:
        (_, m, n), width = inputs["c"].shape, _gran(options)
        a, b = (self.matrix(inputs, part) for part in (0, 1))
        scales = [side.read(inputs[side.scale]) for side in self.sides(inputs, options)]
        products, start = [], 0
        for g, k in enumerate(inputs["ks"].tolist()):
            span, blocks = slice(start, start + k), slice(start // width, (start + k) // width)
            sides = a[:, span], b[:, span], scales[0][:, blocks], scales[1][:, blocks]
            if not k:  # the sum over nothing is that over zeros
                one = [torch.ones(rows, 1, dtype=torch.float32, device=a.device) for rows in (m, n)]
                zeros = [(0 * x).expand(-1, MX).to(a.dtype) for x in one]
                sides = zeros[0], zeros[1], one[0].to(scales[0].dtype), one[1].to(scales[1].dtype)
            product = ScaledProduct(*sides, block=width if k else MX, b_rows=1, c=inputs["c"][g])
            products.append(Part(product, torch.arange(g * m, g * m + m, device=a.device), g))
            start += k
        return products

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        return tuple(inputs["c"].shape)

    def _depth(self, inputs: Inputs, part: int) -> int:
        return inputs[self.names[part]].shape[0]


def _gran(options: Options) -> int:
    return int(str(options.get("gran_k", 128)))
