"""Contracts of the dense scaled products: DeepGEMM's, FlashInfer's, CUTLASS' and torch's linear kernels.

Each contract says how its inputs name the operands of one scaled product (:mod:`oracle.truth.gemm`) and which numerics
its kernels use on which arch; truth, prediction and judgement are shared. Shapes: ``M`` tokens, ``N`` output features,
``K`` input features. Sources: DeepGEMM @54e2261; vLLM csrc/quantization/w8a8/cutlass; torch._scaled_mm.

NaN codes and scales stay NaN, and make NaN of every sum that they enter; placing them reads no value.
Source: DeepSeek-V3 report, 3.3.2, for the formula; the libraries as named by each contract.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.errors import ShapeError
from oracle.numbers.formats import FP32
from oracle.numbers.scaling import E4M3_1X128, E4M3_128X128, Layout, Scaling
from oracle.routines import mutants
from oracle.routines.base import (
    F32,
    FP8,
    Call,
    Contract,
    Inputs,
    Operands,
    Options,
    OptionSpec,
    Out,
    Output,
    TensorSpec,
    register,
)
from oracle.routines.fault import Fault
from oracle.routines.products.traits import BY_SHAPE
from oracle.routines.traits import Kind
from oracle.tensorcore.identify import Match, identify_product
from oracle.tensorcore.schedules import Schedule, is_class, of_class
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth.gemm import ScaledProduct
from oracle.verdict.products import Part, ProductSets, accumulation_faults, predict_parts, truth, wider_classes
from oracle.verdict.sets import Sets

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
BLOCKS = (E4M3_1X128, E4M3_128X128)
"""DeepSeek-V3's scaling of activations and weights; every block-scaled kernel of the suite uses it."""
OUT_DTYPE = OptionSpec(
    "out_dtype", None, (None, *OUT_DTYPES), "dtype of the output; None: any of those of the output below is right"
)

PLAIN_ROLES = {part: part for part in ("a", "b", "a_scale", "b_scale")}

BLOCK_NUMERICS: Mapping[str, tuple[str, ...]] = {
    "sm90": (
        "sm90.promote128", "sm90.promote128.muladd", "sm90.promote128.row_then_col",
        "sm90.promote128.row_then_col.fma", "sm90.promote128.col_then_row.fma", "sm90.mma_sync.promote128",
        "sm90.mma_sync.promote128.muladd", "sm90.mma_f16.promote128", "sm90.mma_f16.promote128.row_then_col.fma",
    ),
    "sm80": ("sm80.f16.promote128",),
    "sm86": ("sm86.f16.promote128",),
    "sm89": ("sm89.promote128", "sm89.promote128.muladd", "sm89.promote128.row_then_col"),
    "sm100": ("sm100.chain_ue8m0", "sm100.promote128", "sm100.promote128.muladd"),
    "sm120": ("sm120.chain_ue8m0", "sm120.promote128", "sm120.promote128.muladd"),
    "cpu": (IEEE32,),
}  # fmt: skip  # a table, one row a line
ROW_NUMERICS: Mapping[str, tuple[str, ...]] = {
    "sm90": (
        "sm90.chain", "sm90.chain.row_then_col", "sm90.chain.product", "sm90.promote128.scale_after",
        "sm90.promote128.scale_after.row_then_col", "sm90.promote128.scale_after.product",
        "sm90.promote32.scale_after.product", "sm90.mma_sync.chain", "sm90.mma_f16.chain",
    ),
    "sm89": ("sm89.chain", "sm89.chain.row_then_col", "sm89.chain.product", "sm89.promote128.scale_after"),
    "sm100": ("sm100.chain", "sm100.chain.row_then_col", "sm100.chain.product"),
    "sm120": ("sm120.chain", "sm120.chain.row_then_col", "sm120.chain.product"),
    "cpu": (IEEE32,),
}  # fmt: skip  # a table, one row a line


def scale_input(name: str, scaling: Scaling, *dims: str, doc: str, optional: bool = False) -> TensorSpec:
    """The scales of an operand of these dims (the last two are cut into blocks), as ``scaling`` has them."""
    *lead, rows, columns = dims
    block = scaling.block
    cut = [
        dim if extent == 1 else f"{dim}/{extent}" if extent else "1"
        for dim, extent in ((rows, block.rows), (columns, block.columns))
    ]
    dtype = scaling.scale_format.number_format(FP32).torch_dtype
    assert dtype is not None, "every scale format has a torch dtype"
    placed = cut[::-1] if scaling.layout is Layout.TRANSPOSED else cut
    return TensorSpec(name, Kind.SCALES, (dtype,), (*lead, *placed), doc, optional=optional, contiguous=True)


A = TensorSpec("a", Kind.CODES, FP8, ("M", "K"), "activation codes")
B = TensorSpec("b", Kind.CODES, FP8, ("N", "K"), "weight codes")
EXPERTS = TensorSpec("b", Kind.CODES, FP8, ("G", "N", "K"), "weight codes of every expert")
BIAS = TensorSpec("bias", Kind.BIAS, FLOATS, ("N",), "added in float32 before the output is rounded", optional=True)


class ProductContract(Contract):
    """Scaled products, each a sum over blocks of K, of which the last may be shorter:

        y[m, n] = sum over blocks k of  a_scale[m, k] * b_scale[n, k] * (sum over the block of a[m, .] * b[n, .])

    Codes are multiplied and added by the arithmetic of a tensor core, or in float32 in any order; the scales enter in
    float32 as the numerics below say. Then the factor ``alpha`` multiplies the whole sum, rounded to float32. Last a
    ``bias`` is added, rounded to float32 (it may be one fused multiply-add with the outer scale). The result is rounded
    once to the output's dtype, to nearest even, without saturation: above its largest number it is infinite.

    A NaN code, scale, factor or summand gives NaN in every element that it reaches, also times 0; so does an infinite
    scale times a block of zeros. Else an infinite scale gives infinities. Where a float32 sum may overflow on its way
    nothing is claimed. +0 and -0 are equal, and any NaN stands for NaN. Rows that belong to no group, and columns that
    are not written, may hold anything. Scales are logical: a kernel that wants another layout gets it from its wrapper.

    Subclasses
    ----------
    A subclass writes ``parts``; ``scaling`` is that of ``a`` and of ``b``, where the scales are those of blocks;
    ``cuts_k``: its kernels may cut K into partial sums.
    """

    section = "GEMM"
    gpu = True
    numerics = BLOCK_NUMERICS
    roles: ClassVar[Mapping[str, str]] = PLAIN_ROLES
    options: ClassVar[tuple[OptionSpec, ...]] = (OUT_DTYPE,)
    golden_arches: ClassVar[tuple[str, ...]] = ("cpu", "sm90")
    multiplies = True
    scaling: ClassVar[tuple[Scaling, Scaling]] = BLOCKS
    out_dtypes: ClassVar[tuple[torch.dtype, ...]] = OUT_DTYPES
    row_unit: ClassVar[int] = 1
    cuts_k: ClassVar[bool] = False

    @abstractmethod
    def parts(self, inputs: Inputs) -> list[Part]:
        """The products that make up the output, for checked inputs."""

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        """The output's shape: that of ``a`` with N in place of K."""
        n = inputs[self.roles["b"]].shape[-1 if self.b_columns else -2]
        return *inputs[self.roles["a"]].shape[:-1], n

    def operands(self, call: Call) -> Operands:
        codes = [call.inputs.get(self.roles.get(part, "")) for part in ("a", "b")]
        return Operands(
            roles=self.roles,
            shape=self.shape(call.inputs),
            parts=self.parts(call.inputs),
            given=all(x is not None and x.element_size() == 1 for x in codes),
            b_columns=self.b_columns,
            laid_out=self.laid_out,
            groups=self.groups,
            group_of_row=any(spec.name == self.groups and spec.dims == ("M",) for spec in self.inputs),
            row_unit=self.row_unit,
        )

    def outputs(self, call: Call) -> dict[str, Out]:
        dtype, shape = call.resolved["out_dtype"], self.shape(call.inputs)
        specified = None
        if self.groups is not None and (rows := call.operands.specified()) is not None:
            specified = rows.reshape(shape[:-1])[..., None].expand(shape)
        return {"out": Out(shape, (dtype,) if isinstance(dtype, torch.dtype) else self.out_dtypes, specified)}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        names = self.arithmetics(call, numerics)
        faults = () if is_class(names[0]) else accumulation_faults(get_schedule(names[0]))
        wider = wider_classes(names) if numerics is None else ()
        return [ProductSets(call.parts, names, wider, faults, self.cuts_k)]

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        return {"out": mutants.write(call, mutants.products(call, faults), faults).view(call.operands.shape)}

    def by_schedule(self, call: Call, schedule: Schedule, numerics: str) -> dict[str, Tensor]:
        for part in call.parts:
            schedule.check(part.product, out_dtype=call.out_dtype)
        return {"out": predict_parts(call.parts, call.rows, schedule, call.out_dtype).view(call.operands.shape)}

    def why_not(self, call: Call, numerics: str) -> str | None:
        if numerics == IEEE32:
            return None
        schedule = of_class(numerics)
        return next((r for p in call.parts if (r := schedule.why_not(p.product, out_dtype=call.out_dtype))), None)

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        call = Call(self, inputs, options).checked()
        return truth(call.parts, call.rows, call.resolved["out_dtype"]).view(call.operands.shape)

    def predict(self, inputs: Inputs, *, numerics: str | None, **options: object) -> Tensor:
        """The bits ``[..., N]`` by one of the numerics, the usual one where none is named, in ``out_dtype``."""
        out_dtype = self.check(inputs, options)["out_dtype"] or self.out_dtypes[0]
        call = Call(self, inputs, options, out_dtype=out_dtype)
        name = numerics or self.arithmetics(call)[0]
        return self.by_schedule(call, get_schedule(name), name)["out"]

    def identify(self, inputs: Inputs, output: Output, *, arch: str | None, **options: object) -> list[Match]:
        """Schedules by the fraction of equal bits over all parts, best first; a sample of each large part."""
        call = Call(self, inputs, options).checked()
        tensor = self.validate_output(call, output)["out"]
        flat = tensor.reshape(-1, tensor.shape[-1])
        matches: dict[str, list[Match]] = {}
        own = [name for names in self.numerics_of(call).values() for name in names]
        for part in call.parts:
            for match in identify_product(part.product, part.of(flat), arch, first=own):
                matches.setdefault(match.schedule, []).append(match)
        return sorted((_joined(m) for m in matches.values() if len(m) == len(call.parts)), key=lambda m: m.rank)


@register
class Fp8GemmNt(ProductContract):
    name = "fp8_gemm_nt"
    probed: ClassVar[tuple[int | None, int] | None] = (128, 128)
    summary = "a [M, K] times b [N, K] transposed, 1x128 scales on a, 128x128 scales on b"
    source = "DeepGEMM fp8_gemm_nt; DeepSeek-V3 report, 3.3.2"
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        A,
        scale_input("a_scale", BLOCKS[0], "M", "K", doc="logical 1x128 scales"),
        B,
        scale_input("b_scale", BLOCKS[1], "N", "K", doc="128x128 scales"),
    )

    def parts(self, inputs: Inputs) -> list[Part]:
        return [Part(block_scaled(inputs["a"], inputs["b"], inputs["a_scale"], inputs["b_scale"], self.scaling))]


@register
class CutlassScaledMm(ProductContract):
    """Scale kinds are read off the shapes: ``[1]`` or ``[1, 1]`` per tensor; ``[M, 1]`` per token for ``a``;
    ``[1, N]``, ``[N, 1]`` or ``[N]`` per channel for ``b``; ``[M, ceil(K/128)]`` with ``[ceil(N/128), ceil(K/128)]``
    for blocks. Both scales are of blocks where both shapes are those of blocks and K or N is more than 128; else each
    is of its own other kind, and a scale of the tensor goes with one of tokens or channels. Where two kinds have one
    shape (M = 1, N = 1) they mean the same."""

    name = "cutlass_scaled_mm"
    traits = frozenset({BY_SHAPE})
    probed = (None, 1)
    summary = "a [M, K] times b [N, K] transposed; per-tensor, per-token, per-channel or block scales; optional bias"
    source = "vLLM csrc cutlass_scaled_mm"
    numerics = ROW_NUMERICS
    inputs = (
        A,
        TensorSpec("b", Kind.CODES, FP8, ("N", "K"), "weight codes, logical [N, K]"),
        TensorSpec("a_scale", Kind.SCALES, F32, None, "[1], [M, 1] or [M, ceil(K/128)]", contiguous=True),
        TensorSpec("b_scale", Kind.SCALES, F32, None, "[1], [1, N] or [ceil(N/128), ceil(K/128)]", contiguous=True),
        BIAS,
    )

    def parts(self, inputs: Inputs) -> list[Part]:
        a, b, bias = inputs["a"], inputs["b"], inputs.get("bias")
        return [Part(scaled_by_shape(a, b, inputs["a_scale"], inputs["b_scale"], bias, self.scaling))]

    def refuse(self, inputs: Inputs, options: Options) -> None:
        self.parts(inputs)

    def numerics_of(self, call: Call) -> Mapping[str, tuple[str, ...]]:
        product = call.parts[0].product
        return BLOCK_NUMERICS if product.B > 1 or 1 < product.b_rows < product.N else ROW_NUMERICS


# Shapes of one scale for an operand, of one for each row of a, and of one for each row of b.
ONE, TOKENS, CHANNELS = ("[]", "1", "1x1"), ("Mx1",), ("1xN", "Nx1", "N")


class TorchScaledMm(ProductContract):
    """One scale for an operand (``[]``, ``[1]`` or ``[1, 1]``), one for each row of ``qinput`` (``[M, 1]``), or one for
    each column of ``weight`` (``[1, N]``, ``[N, 1]`` or ``[N]``), as the contract's summary says."""

    numerics = ROW_NUMERICS
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("qinput", Kind.CODES, FP8, ("M", "K"), "activation codes"),
        TensorSpec("weight", Kind.CODES, FP8, ("K", "N"), "weight codes, logical [K, N]"),
        TensorSpec("scale_a", Kind.SCALES, F32, None, "scale of qinput", contiguous=True),
        TensorSpec("scale_b", Kind.SCALES, F32, None, "scale of weight", contiguous=True),
        BIAS,
    )
    roles = {"a": "qinput", "b": "weight", "a_scale": "scale_a", "b_scale": "scale_b"}
    b_columns = True
    cuts_k = True  # cuBLASLt does
    source = "torch._scaled_mm as vLLM's w8a8_utils calls it"
    scale_dims: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]] = (ONE, ONE)

    def parts(self, inputs: Inputs) -> list[Part]:
        b, scales = transposed(inputs["weight"]), (inputs["scale_a"], inputs["scale_b"])
        return [Part(scaled_by_shape(inputs["qinput"], b, *scales, inputs.get("bias")))]

    def refuse(self, inputs: Inputs, options: Options) -> None:
        bound = self.extents(inputs)
        for name, kinds in zip(("scale_a", "scale_b"), self.scale_dims, strict=True):
            shape = tuple(inputs[name].shape)
            shapes = {kind: tuple(bound.get(d, 1) for d in kind.split("x")) if kind != "[]" else () for kind in kinds}
            if shape not in shapes.values():
                raise ShapeError(
                    f"{name} has shape {list(shape)}; {self.name} takes "
                    f"{' or '.join(str(list(s)) for s in shapes.values())}"
                )


@register
class TorchPerTensor(TorchScaledMm):
    name = "torch_per_tensor_w8a8_scaled_mm"
    summary = "one scale for each operand"


@register
class TorchPerToken(TorchScaledMm):
    name = "torch_per_token_w8a8_scaled_mm"
    probed = (None, 1)
    summary = "one scale for each row of qinput and each column of weight (row-wise kernel)"
    scale_dims = (TOKENS, CHANNELS)


@register
class TorchChannelwise(TorchScaledMm):
    name = "torch_channelwise_w8a8_scaled_mm"
    probed = (None, 1)
    summary = "unit-scale product to float32, then scale_a, scale_b and bias, then the output dtype"
    scale_dims = ((*ONE, *TOKENS), (*ONE, *CHANNELS))


def transposed(x: Tensor) -> Tensor:
    """The transpose ``[C, R]`` of a matrix ``x`` ``[R, C]`` of any dtype, contiguous."""
    raw = x.view(torch.uint8) if x.element_size() == 1 else x
    return raw.t().contiguous().view(x.dtype)


def block_scaled(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, scaling: tuple[Scaling, Scaling] = BLOCKS
) -> ScaledProduct:
    """The product of codes ``a`` ``[M, K]`` and ``b`` ``[N, K]`` (FP8) with float32 scales in blocks, ``a_scale`` ``[M,
    B]`` and ``b_scale`` ``[N or blocks, B]``: of ``scaling`` or, with a row of scales for each row of ``b``, those of
    ``a`` for both."""
    of_a, of_b = scaling
    if b_scale.shape[0] == b.shape[0] > of_b.grid(b.shape).count[0]:
        of_b = of_a
    blocks = of_b.grid(b.shape)
    return ScaledProduct(a, b, a_scale, b_scale, block=blocks.block_columns, b_rows=blocks.block_rows)


def scaled_by_shape(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    scaling: tuple[Scaling, Scaling] = BLOCKS,
) -> ScaledProduct:
    """The product of codes ``a`` ``[M, K]``, ``b`` ``[N, K]`` (FP8) and ``bias`` ``[N]`` whose scale kinds are read off
    the shapes of ``a_scale`` and ``b_scale``. Raises ShapeError where one is of no kind, or block scales meet
    others."""
    (m, k), n = a.shape, b.shape[0]
    (of_a, of_b), cells = scaling, scaling[1].grid(b.shape)
    groups, blocks = cells.count
    shape_a, shape_b = tuple(a_scale.shape), tuple(b_scale.shape)
    if (blocks > 1 or groups > 1) and shape_a == of_a.scale_shape(a.shape) and shape_b == of_b.scale_shape(b.shape):
        return ScaledProduct(a, b, a_scale, b_scale, block=cells.block_columns, b_rows=cells.block_rows, bias=bias)
    if a_scale.numel() != 1 and shape_a != (m, 1):
        raise ShapeError(
            f"a_scale has shape {list(shape_a)}; M={m}, K={k} take [1], [{m}, 1] or, with b_scale "
            f"[{groups}, {blocks}], [{m}, {blocks}]"
        )
    if b_scale.numel() != 1 and shape_b not in ((1, n), (n, 1), (n,)):
        raise ShapeError(
            f"b_scale has shape {list(shape_b)}; N={n}, K={k} take [1], [1, {n}] or, with a_scale [{m}, {blocks}], "
            f"[{groups}, {blocks}]"
        )
    rows = n if b_scale.numel() == 1 else 1
    return ScaledProduct(a, b, a_scale.reshape(-1, 1), b_scale.reshape(-1, 1), block=k, b_rows=rows, bias=bias)


def _joined(matches: Sequence[Match]) -> Match:
    compared = sum(m.compared for m in matches)
    return Match(matches[0].schedule, sum(m.equal * m.compared for m in matches) / compared, compared)
