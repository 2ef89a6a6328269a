"""Contracts of the dense scaled products: DeepGEMM's, FlashInfer's, CUTLASS' and torch's linear kernels.

Each contract says how its inputs name the operands of one :class:`oracle.truth.gemm.ScaledProduct` and which numerics its
kernels use on which arch; truth, prediction and judgement are shared. Shapes: ``M`` tokens, ``N`` output features,
``K`` input features. Scales multiply on dequantisation. A NaN code or scale gives NaN in every element it reaches.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.errors import InputError, NumericsError, ShapeError
from oracle.routines.base import FP8, Contract, OptionSpec, Output, TensorSpec, check_output, register
from oracle.tensorcore.identify import Match, identify_product
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth.gemm import ScaledProduct
from oracle.verdict.compare import Verdict
from oracle.verdict.products import Part, accumulation_faults, judge_parts, predict_parts, truth, wider_classes

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 128  # DeepSeek-V3's 1x128 x 128x128 scaling; every block-scaled kernel of the suite uses it
OUT_DTYPE = OptionSpec("out_dtype", None, (None, *OUT_DTYPES), "dtype of the output; None takes the output's own")

BLOCK_NUMERICS: Mapping[str, tuple[str, ...]] = {
    "sm90": (
        "sm90.promote128",
        "sm90.promote128.muladd",
        "sm90.promote128.row_then_col",
        "sm90.mma_sync.promote128",
        "sm90.mma_sync.promote128.muladd",
    ),
    "sm89": ("sm89.promote128", "sm89.promote128.muladd", "sm89.promote128.row_then_col"),
    "sm100": ("sm100.chain_ue8m0", "sm100.promote128", "sm100.promote128.muladd"),
    "sm120": ("sm120.chain_ue8m0", "sm120.promote128", "sm120.promote128.muladd"),
    "cpu": (IEEE32,),
}
ROW_NUMERICS: Mapping[str, tuple[str, ...]] = {
    "sm90": (
        "sm90.chain",
        "sm90.chain.row_then_col",
        "sm90.chain.product",
        "sm90.promote128.scale_after",
        "sm90.promote128.scale_after.row_then_col",
        "sm90.promote128.scale_after.product",
        "sm90.mma_sync.chain",
    ),
    "sm89": ("sm89.chain", "sm89.chain.row_then_col", "sm89.chain.product", "sm89.promote128.scale_after"),
    "sm100": ("sm100.chain", "sm100.chain.row_then_col", "sm100.chain.product"),
    "sm120": ("sm120.chain", "sm120.chain.row_then_col", "sm120.chain.product"),
    "cpu": (IEEE32,),
}


class ProductContract(Contract):
    """A contract whose output consists of scaled products; subclasses say which (:meth:`parts`)."""

    options: ClassVar[tuple[OptionSpec, ...]] = (OUT_DTYPE,)
    numerics: ClassVar[Mapping[str, tuple[str, ...]]]

    @abstractmethod
    def parts(self, inputs: Mapping[str, Tensor]) -> list[Part]:
        """The products that make up the output, for checked inputs."""

    @abstractmethod
    def shape(self, inputs: Mapping[str, Tensor]) -> tuple[int, ...]:
        """The output's shape; its last axis is N."""

    def reference(self, inputs: Mapping[str, Tensor], **options: object) -> Tensor:
        out_dtype = self.check(inputs, options)["out_dtype"]
        assert out_dtype is None or isinstance(out_dtype, torch.dtype)
        shape = self.shape(inputs)
        return truth(self.parts(inputs), _rows(shape), out_dtype).view(shape)

    def predict(self, inputs: Mapping[str, Tensor], *, numerics: str | None, **options: object) -> Tensor:
        out_dtype = self.check(inputs, options)["out_dtype"]
        out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
        assert isinstance(out_dtype, torch.dtype)
        shape, parts = self.shape(inputs), self.parts(inputs)
        schedule = get_schedule(numerics or self.admitted("sm90", None, parts, out_dtype)[0])
        for part in parts:
            schedule.check(part.product, out_dtype=out_dtype)
        return predict_parts(parts, _rows(shape), schedule, out_dtype).view(shape)

    def judge(
        self, inputs: Mapping[str, Tensor], output: Output, *, arch: str, numerics: str | None, **options: object
    ) -> Verdict:
        out_dtype = self.check(inputs, options)["out_dtype"]
        shape, parts = self.shape(inputs), self.parts(inputs)
        tensor = only(output)
        check_output(tensor, name="out", shape=shape, dtypes=_stores(out_dtype), device=parts[0].product.a.device)
        names = self.admitted(arch, numerics, parts, tensor.dtype)
        faults = () if names[0].endswith(".any") else accumulation_faults(get_schedule(names[0]))
        wider = wider_classes(names) if numerics is None else ()
        flat = tensor.reshape(_rows(shape), shape[-1])
        return judge_parts(parts, flat, numerics=names, wider=wider, faults=faults)

    def identify(
        self, inputs: Mapping[str, Tensor], output: Output, *, arch: str | None, **options: object
    ) -> list[Match]:
        """Schedules by the fraction of equal bits over all parts, best first; a sample of each large part."""
        out_dtype = self.check(inputs, options)["out_dtype"]
        shape, parts = self.shape(inputs), self.parts(inputs)
        tensor = only(output)
        check_output(tensor, name="out", shape=shape, dtypes=_stores(out_dtype), device=parts[0].product.a.device)
        flat = tensor.reshape(_rows(shape), shape[-1])
        found: dict[str, list[Match]] = {}
        for part in parts:
            for match in identify_product(part.product, part.of(flat), arch):
                found.setdefault(match.schedule, []).append(match)
        return sorted((_joined(m) for m in found.values() if len(m) == len(parts)), key=lambda m: -m.equal)

    def admitted(
        self, arch: str, numerics: str | None, parts: Sequence[Part], out_dtype: torch.dtype
    ) -> tuple[str, ...]:
        """Names of the numerics that this contract admits, the declared or usual one first."""
        return _admitted(self.name, self.numerics, arch, numerics, parts, out_dtype)


@register
class Fp8GemmNt(ProductContract):
    name = "fp8_gemm_nt"
    summary = "a [M, K] times b [N, K] transposed, 1x128 scales on a, 128x128 scales on b"
    source = "DeepGEMM fp8_gemm_nt; DeepSeek-V3 report, 3.3.2"
    numerics = BLOCK_NUMERICS
    inputs = (
        TensorSpec("a", FP8, ("M", "K"), "activation codes"),
        TensorSpec("a_scale", (torch.float32,), ("M", "K/128"), "logical 1x128 scales", contiguous=True),
        TensorSpec("b", FP8, ("N", "K"), "weight codes"),
        TensorSpec("b_scale", (torch.float32,), ("N/128", "K/128"), "128x128 scales", contiguous=True),
    )

    def parts(self, inputs: Mapping[str, Tensor]) -> list[Part]:
        return [Part(block_scaled(inputs["a"], inputs["b"], inputs["a_scale"], inputs["b_scale"]))]

    def shape(self, inputs: Mapping[str, Tensor]) -> tuple[int, ...]:
        return inputs["a"].shape[0], inputs["b"].shape[0]


@register
class CutlassScaledMm(ProductContract):
    """Scale kinds are read off the shapes: ``[1]`` or ``[1, 1]`` per tensor; ``[M, 1]`` per token for ``a``;
    ``[1, N]``, ``[N, 1]`` or ``[N]`` per channel for ``b``; ``[M, ceil(K/128)]`` with ``[ceil(N/128), ceil(K/128)]``
    for blocks."""

    name = "cutlass_scaled_mm"
    summary = "a [M, K] times b [N, K] transposed; per-tensor, per-token, per-channel or block scales; optional bias"
    source = "vLLM csrc cutlass_scaled_mm"
    numerics = ROW_NUMERICS
    inputs = (
        TensorSpec("a", FP8, ("M", "K"), "activation codes"),
        TensorSpec("b", FP8, ("N", "K"), "weight codes, logical [N, K]"),
        TensorSpec("a_scale", (torch.float32,), None, "[1], [M, 1] or [M, K/128]", contiguous=True),
        TensorSpec("b_scale", (torch.float32,), None, "[1], [1, N] or [N/128, K/128]", contiguous=True),
        TensorSpec("bias", FLOATS, ("N",), "added in float32 before the output is rounded", optional=True),
    )

    def parts(self, inputs: Mapping[str, Tensor]) -> list[Part]:
        a, b, bias = inputs["a"], inputs["b"], inputs.get("bias")
        return [Part(scaled_by_shape(a, b, inputs["a_scale"], inputs["b_scale"], bias))]

    def shape(self, inputs: Mapping[str, Tensor]) -> tuple[int, ...]:
        return inputs["a"].shape[0], inputs["b"].shape[0]

    def extents(self, inputs: Mapping[str, Tensor]) -> dict[str, int]:
        bound = super().extents(inputs)
        self.parts(inputs)
        return bound

    def admitted(
        self, arch: str, numerics: str | None, parts: Sequence[Part], out_dtype: torch.dtype
    ) -> tuple[str, ...]:
        product = parts[0].product
        blocks = product.B > 1 or 1 < product.b_rows < product.N
        table = BLOCK_NUMERICS if blocks and numerics is None else ROW_NUMERICS
        return _admitted(self.name, table, arch, numerics, parts, out_dtype)


class TorchScaledMm(ProductContract):
    """torch's names: ``qinput [M, K]``, ``weight [K, N]`` (any strides; kernels want it column-major)."""

    numerics = ROW_NUMERICS
    source = "torch._scaled_mm as vLLM's w8a8_utils calls it"
    scale_dims: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]]

    def parts(self, inputs: Mapping[str, Tensor]) -> list[Part]:
        weight = inputs["weight"]
        b = weight.view(torch.uint8).t().contiguous().view(weight.dtype)
        scales = (inputs["scale_a"], inputs["scale_b"])
        return [Part(scaled_by_shape(inputs["qinput"], b, *scales, inputs.get("bias")))]

    def shape(self, inputs: Mapping[str, Tensor]) -> tuple[int, ...]:
        return inputs["qinput"].shape[0], inputs["weight"].shape[1]

    def extents(self, inputs: Mapping[str, Tensor]) -> dict[str, int]:
        bound = super().extents(inputs)
        for name, kinds in zip(("scale_a", "scale_b"), self.scale_dims, strict=True):
            shape = tuple(inputs[name].shape)
            shapes = {kind: tuple(bound.get(d, 1) for d in kind.split("x")) if kind != "[]" else () for kind in kinds}
            if shape not in shapes.values():
                raise ShapeError(
                    f"{name} has shape {list(shape)}; {self.name} takes "
                    f"{' or '.join(str(list(s)) for s in shapes.values())}"
                )
        return bound


def _torch_inputs() -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("qinput", FP8, ("M", "K"), "activation codes"),
        TensorSpec("weight", FP8, ("K", "N"), "weight codes, logical [K, N]"),
        TensorSpec("scale_a", (torch.float32,), None, "scale of qinput", contiguous=True),
        TensorSpec("scale_b", (torch.float32,), None, "scale of weight", contiguous=True),
        TensorSpec("bias", FLOATS, ("N",), "added in float32 before the output is rounded", optional=True),
    )


@register
class TorchPerTensor(TorchScaledMm):
    name = "torch_per_tensor_w8a8_scaled_mm"
    summary = "one scale for each operand"
    inputs = _torch_inputs()
    scale_dims = (("[]", "1", "1x1"), ("[]", "1", "1x1"))


@register
class TorchPerToken(TorchScaledMm):
    name = "torch_per_token_w8a8_scaled_mm"
    summary = "one scale for each row of qinput and each column of weight (row-wise kernel)"
    inputs = _torch_inputs()
    scale_dims = (("Mx1",), ("1xN", "Nx1", "N"))


@register
class TorchChannelwise(TorchScaledMm):
    name = "torch_channelwise_w8a8_scaled_mm"
    summary = "unit-scale product to float32, then scale_a, scale_b and bias, then the output dtype"
    inputs = _torch_inputs()
    scale_dims = (("[]", "1", "1x1", "Mx1"), ("[]", "1", "1x1", "1xN", "Nx1", "N"))


def block_scaled(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> ScaledProduct:
    """The product with 1x128 scales on ``a`` and 128x128 (or, with one row per row of ``b``, 1x128) on ``b``."""
    per_row = b_scale.shape[0] == b.shape[0] and b.shape[0] > -(-b.shape[0] // BLOCK)
    return ScaledProduct(a, b, a_scale, b_scale, block=BLOCK, b_rows=1 if per_row else BLOCK)


def scaled_by_shape(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None = None
) -> ScaledProduct:
    """The product whose scale kinds are read off the shapes of ``a_scale`` and ``b_scale``.

    Raises
    ------
    ShapeError
        If a shape is of no kind, or block scales meet others.
    """
    (m, k), n = a.shape, b.shape[0]
    blocks, groups = -(-k // BLOCK), -(-n // BLOCK)
    shape_a, shape_b = tuple(a_scale.shape), tuple(b_scale.shape)
    if (blocks > 1 or groups > 1) and shape_a == (m, blocks) and shape_b == (groups, blocks):
        return ScaledProduct(a, b, a_scale, b_scale, block=BLOCK, b_rows=BLOCK, bias=bias)
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
    return ScaledProduct(
        a, b, a_scale.reshape(-1, 1), b_scale.reshape(-1, 1), block=k, b_rows=rows, bias=bias
    )


def only(output: Output) -> Tensor:
    """The single tensor of an output that may come as ``{"out": tensor}``."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and set(output) == {"out"}:
        return output["out"]
    what = ", ".join(map(str, output)) if isinstance(output, Mapping) else type(output).__name__
    raise InputError(f"the output is {what}; this contract has one output, pass the tensor or {{'out': tensor}}")


def _stores(out_dtype: object) -> tuple[torch.dtype, ...]:
    """Dtypes that an output may have under the option ``out_dtype``."""
    return (out_dtype,) if isinstance(out_dtype, torch.dtype) else OUT_DTYPES


def _joined(matches: Sequence[Match]) -> Match:
    compared = sum(m.compared for m in matches)
    return Match(matches[0].schedule, sum(m.equal * m.compared for m in matches) / compared, compared)


def _rows(shape: tuple[int, ...]) -> int:
    rows = 1
    for extent in shape[:-1]:
        rows *= extent
    return rows


def _admitted(
    contract: str,
    table: Mapping[str, tuple[str, ...]],
    arch: str,
    numerics: str | None,
    parts: Sequence[Part],
    out_dtype: torch.dtype,
) -> tuple[str, ...]:
    if numerics is not None:
        if numerics != IEEE32:
            for part in parts:
                get_schedule(numerics.removesuffix(".any")).check(part.product, out_dtype=out_dtype)
        return (numerics,)
    if arch not in table:
        raise NumericsError(
            f"{contract} has no numerics model for arch {arch!r}; known: {', '.join(table)}; or declare numerics="
        )
    reasons = {name: _why_not(name, parts, out_dtype) for name in table[arch]}
    fitting = tuple(name for name, reason in reasons.items() if reason is None)
    if not fitting:
        raise NumericsError(f"no model of {arch} fits {contract}: {'; '.join(filter(None, reasons.values()))}")
    return fitting


def _why_not(name: str, parts: Sequence[Part], out_dtype: torch.dtype) -> str | None:
    if name == IEEE32:
        return None
    schedule = get_schedule(name)
    return next((r for p in parts if (r := schedule.why_not(p.product, out_dtype=out_dtype))), None)
