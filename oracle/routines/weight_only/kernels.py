"""The routines: GPTQ's and AWQ's products of packed words, Marlin's and machete's of every type, and BF16 times NVFP4.

A kernel that wants its weight in another order (``gptq_shuffle``, Marlin's tiles, machete's, the layouts of
:mod:`oracle.routines.weight_only.layouts`) gets it from its wrapper: here a code stands at its row and column.

NaN and infinities: those of :class:`oracle.routines.weight_only.contract.WeightOnly`.
Sources: those of each class.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import DtypeError, InputError, OptionError, ShapeError
from oracle.numbers.formats import E2M1, E4M3FN, Format, decode
from oracle.routines.base import E4M3, F32, INTEGERS, Call, Inputs, Options, OptionSpec, TensorSpec, register
from oracle.routines.mx.contract import unpack
from oracle.routines.traits import Kind
from oracle.routines.weight_only.contract import Plan, Step, Way, WeightOnly, groups
from oracle.truth.weight_only import Form, Weights, awq_fields, fields
from oracle.verdict.compare import Admissible
from oracle.verdict.sets import Elements, Sets, rounded_to

HALVES = (torch.bfloat16, torch.float16)
INT32, BYTES, F16 = (torch.int32,), (torch.uint8,), (torch.float16,)
E8M0 = torch.float8_e8m0fnu
WORD, SLICE, CHAIN = 32, 64, 128
"""Bits of a word; rows of K that a block of Marlin takes at least; those that a block of GPTQ's kernels takes."""
TYPES: dict[str, tuple[int, int, Format | None]] = {
    "uint4": (4, 0, None),
    "uint4b8": (4, 8, None),
    "uint8": (8, 0, None),
    "uint8b128": (8, 128, None),
    "float8_e4m3fn": (8, 0, E4M3FN),
    "float4_e2m1f": (4, 0, E2M1),
}
"""By name of a type: bits of a code, what is taken off it, and its format where it is no integer."""
G_IDX = TensorSpec(
    "g_idx", Kind.IDS, INTEGERS, ("K",), "group of each row, act-order; absent: equal runs", optional=True
)


def by_index(inputs: Inputs, k: int, rows: int) -> Tensor:
    """The group of each row, int64 ``[K]``.

    Raises InputError: an index names no group."""
    if (index := inputs.get("g_idx")) is None:
        return groups(k, rows)
    if bool(((index < 0) | (index >= rows)).any()):
        raise InputError(f"g_idx has {int(index.min())} to {int(index.max())}; the scales have {rows} groups")
    return index.to(torch.int64)


# --- AWQ ----------------------------------------------------------------------------------------------------

QWEIGHT = TensorSpec("qweight", Kind.CODES, INT32, ("K", "C"), "eight codes of 4 bits a word along N, N = 8 C")
AWQ_SCALES = TensorSpec("scales", Kind.SCALES, HALVES, ("G", "N"), "one for K / G rows of a column")


def zeros_of(name: str) -> TensorSpec:
    """Zero points in AWQ's words."""
    return TensorSpec(name, Kind.CODES, INT32, ("G", "C"), "zero points, in words as the codes are")


class Awq(WeightOnly):
    """Column ``j`` of every eight lies in nibble ``(0 4 1 5 2 6 3 7)[j]`` of a word, the least bits first."""

    zeros: ClassVar[str]

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if inputs["scales"].shape[1] != (n := 8 * inputs["qweight"].shape[1]):
            raise ShapeError(f"scales has N={inputs['scales'].shape[1]}; the words of qweight have N={n}")
        groups(inputs["qweight"].shape[0], inputs["scales"].shape[0])

    def weights(self, inputs: Inputs, options: Options) -> Weights:
        codes, zeros = (awq_fields(inputs[name]).to(torch.float64) for name in ("qweight", self.zeros))
        return Weights(codes, decode(inputs["scales"]), zeros, groups(codes.shape[0], zeros.shape[0]))


@register
class AwqDequantize(Awq):
    """``w`` itself, ``[K, N]`` in the dtype of ``scales``: one right value an element, -0 equal to +0."""

    name = "awq_dequantize"
    section = "Quantisation"
    summary = "AWQ's words as weights"
    source = "vLLM 0.20.2 csrc/quantization/awq/gemm_kernels.cu dequantize_weights; SGLang awq_dequantize"
    inputs = (QWEIGHT, AWQ_SCALES, zeros_of("zeros"))
    zeros = "zeros"
    shapes: ClassVar[dict[str, str]] = {"out": "[K, N]"}

    def activations(self, inputs: Inputs) -> Tensor:
        """None are multiplied: an empty ``[0, K]`` of the dtype of the weight."""
        return inputs["scales"].new_empty((0, inputs["qweight"].shape[0]))

    def shape(self, plans: list[Plan], inputs: Inputs) -> tuple[int, ...]:
        return tuple(plans[0].weights.codes.shape)

    def value(self, plans: list[Plan], inputs: Inputs) -> Tensor:
        """The weight ``[K, N]`` in the dtype of its scales."""
        plan = plans[0]
        return rounded_to(plan.weights.values(plan.form, plan.a.dtype), plan.a.dtype)

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        value = decode(call.truth["out"])
        return [Elements(lambda: ({"out": Admissible(value, value, value)}, "(q - z) * s, rounded once"))]


@register
class AwqGemm(Awq):
    """The kernel cuts K into ``split_k_iters`` partial sums, ``K`` block ``i`` of 32 in sum ``i % split_k_iters``, each
    stored in T; these are added in float32. One sum in float32 is right too (the weight dequantised first), and so is
    an accumulator in T."""

    name = "awq_gemm"
    summary = "16-bit activations times AWQ's words"
    source = "vLLM 0.20.2 csrc/quantization/awq/gemm_kernels.cu, awq_triton.py"
    inputs = (
        TensorSpec("input", Kind.VALUES, HALVES, ("M", "K"), "activations, of the dtype of scales"),
        QWEIGHT,
        AWQ_SCALES,
        zeros_of("qzeros"),
    )
    options = (OptionSpec("split_k_iters", 8, (1, 2, 4, 8, 16, 32), "partial sums"),)
    zeros = "qzeros"
    shapes: ClassVar[dict[str, str]] = {"out": "[M, N]"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if inputs["input"].dtype != inputs["scales"].dtype:
            raise DtypeError(f"input is {inputs['input'].dtype}, scales {inputs['scales'].dtype}; pass one dtype")

    def ways(self, inputs: Inputs, options: Options) -> list[Way]:
        return [Way(), Way(roundings=1), Way(roundings=inputs["input"].shape[1] + 4)]


# --- GPTQ ---------------------------------------------------------------------------------------------------


@register
class GptqGemm(WeightOnly):
    """Codes are a stream of fields down a column, least bits first: ``32 / bit`` rows a word, 32 rows three words of 3
    bits; zero points the same along a row. The zero point is the field plus 1 (checkpoints of GPTQ v1; 15 becomes 16),
    with ``use_v2_format`` the field. T is float16. Right arithmetics: the weight rounded and summed in float32; the
    exact weight, or ``RN(q * s - RN(z * s))``, in pieces of 4 to 32 products in T whose sums are added in T, 128 rows a
    block; or all in T."""

    name = "gptq_gemm"
    summary = "float16 activations times GPTQ's words of 2, 3, 4 or 8 bits, in any order of groups"
    source = "vLLM 0.20.2 csrc/quantization/gptq/q_gemm.cu; SGLang gptq_gemm"
    inputs = (
        TensorSpec("a", Kind.VALUES, F16, ("M", "K"), "activations"),
        TensorSpec("b_q_weight", Kind.CODES, INT32, ("W", "N"), "words of codes, W = K * bit / 32"),
        TensorSpec("b_gptq_qzeros", Kind.CODES, INT32, ("G", "V"), "words of zero points, V = N * bit / 32"),
        TensorSpec("b_gptq_scales", Kind.SCALES, F16, ("G", "N"), "one for each group of a column"),
        G_IDX,
    )
    options = (
        OptionSpec("bit", 4, (2, 3, 4, 8), "of a code"),
        OptionSpec("use_v2_format", False, (False, True), "zero points are stored as they are"),
    )
    shapes: ClassVar[dict[str, str]] = {"out": "[M, N]"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        bit, k, n = int(options["bit"]), inputs["a"].shape[1], inputs["b_q_weight"].shape[1]
        due = {"b_q_weight": (k * bit / WORD, 0, "K", k), "b_gptq_qzeros": (n * bit / WORD, 1, "N", n)}
        for name, (words, axis, letter, extent) in due.items():
            if inputs[name].shape[axis] != words:
                raise ShapeError(
                    f"{name} has {inputs[name].shape[axis]} words; {letter}={extent} codes of {bit} bits take {words:g}"
                )
        by_index(inputs, k, inputs["b_gptq_scales"].shape[0])

    def weights(self, inputs: Inputs, options: Options) -> Weights:
        bit = int(options["bit"])
        codes = fields(inputs["b_q_weight"], bit).to(torch.float64)
        zeros = fields(inputs["b_gptq_qzeros"].t(), bit).t().to(torch.float64) + (not options["use_v2_format"])
        group = by_index(inputs, codes.shape[0], zeros.shape[0])
        return Weights(codes, decode(inputs["b_gptq_scales"]), zeros, group)

    def ways(self, inputs: Inputs, options: Options) -> list[Way]:
        k = inputs["a"].shape[1]
        pieces = 40 + -(-k // CHAIN)
        return [Way(), Way(Form.EXACT, min(pieces, k + 4)), Way(Form.FUSED, min(pieces, k + 4)), Way(roundings=k + 4)]


# --- Marlin, machete ----------------------------------------------------------------------------------------

A = TensorSpec("a", Kind.VALUES, HALVES, ("M", "K"), "activations")
B_Q = TensorSpec("b_q", Kind.CODES, BYTES, ("K", "N"), "codes, one a byte")


class Typed(WeightOnly):
    """Codes are 0 to 15 or 255, less 8 (``uint4b8``) or 128 (``uint8b128``); those of ``float8_e4m3fn`` and
    ``float4_e2m1f`` are values of E4M3 and E2M1."""

    def codes(self, inputs: Inputs, options: Options) -> Tensor:
        """Float64 ``[K, N]``: NaN for a NaN code."""
        _, bias, fmt = TYPES[str(options["b_type"])]
        q = inputs["b_q"]
        return q.to(torch.float64) - bias if fmt is None else decode(q, fmt)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if int(inputs["b_q"].max()) >= 1 << (bits := TYPES[str(options["b_type"])][0]):
            raise InputError(f"b_q holds {int(inputs['b_q'].max())}; a code of {options['b_type']} has {bits} bits")


def steps_of(dtype: torch.dtype, *by: tuple[str, torch.dtype, Tensor | None]) -> tuple[Step, ...]:
    """The steps whose operand ``by`` is there, of any shape that broadcasts to ``[M, N]``: those of float32, the
    store in ``dtype``, the others."""
    present = [Step(word, of, x) for word, of, x in by if x is not None]
    store = [Step("store", dtype)]
    return (
        *(s for s in present if s.dtype is torch.float32),
        *store,
        *(s for s in present if s.dtype is not torch.float32),
    )


class Marlin(Typed):
    """Steps: ``x = f32(sum * global_scale)`` where it is given; rounded to T; plus ``b_bias``, rounded to T again. One
    scale a column (``G`` is 1) of an integer type without zero points, of ``uint4`` with codes as zero points, or of
    ``float8_e4m3fn`` in T multiplies behind the sum, and the weight is ``q - z``: in float32 before the cast for 8
    bits, in T behind it for 4 bits. Zero points belong to ``uint4`` and ``uint8``; a weight ``RN(q * s - RN(z * s))``
    is right there too, and the one of zero points of floats. ``float4_e2m1f`` has E4M3 scales of 16 rows and a
    ``global_scale``, or E8M0 scales of 32 rows in bfloat16, and ``float8_e4m3fn`` may have these too; no E4M3 scale has
    its sign bit set. Without ``use_fp32_reduce``, or with ``use_atomic_add``, up to ``ceil(K / 64)`` partial sums are
    stored and added in T, in any order."""


@register
class MarlinGemm(Marlin):
    name = "marlin_gemm"
    summary = "16-bit activations times weights of 4 or 8 bits of any type, zero points, global scale and bias"
    source = "vLLM 0.20.2 csrc/quantization/marlin/marlin_template.h, dequant.h"
    inputs = (
        A,
        B_Q,
        TensorSpec("b_scales", Kind.SCALES, (*HALVES, *E4M3, E8M0), ("G", "N"), "T, or E4M3 of 16 rows, E8M0 of 32"),
        TensorSpec("b_zeros", Kind.CODES, (torch.uint8, *HALVES), ("G", "N"), "codes, or in T", optional=True),
        TensorSpec("global_scale", Kind.ALPHA, F32, ("1",), "of the whole sum", optional=True),
        TensorSpec("b_bias", Kind.BIAS, HALVES, ("N",), "in T", optional=True),
        G_IDX,
    )
    options = (
        OptionSpec("b_type", "uint4b8", tuple(TYPES), "type of a code"),
        OptionSpec("use_atomic_add", False, (False, True), "blocks add to the output in memory"),
        OptionSpec("use_fp32_reduce", True, (True, False), "partial sums of blocks are added in float32"),
    )
    shapes: ClassVar[dict[str, str]] = {"out": "[M, N]"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        dtype, name, scales = inputs["a"].dtype, str(options["b_type"]), inputs["b_scales"]
        micro = {torch.float8_e4m3fn: 16, E8M0: 32}.get(scales.dtype)
        if other := [
            k
            for k in ("b_scales", "b_zeros", "b_bias")
            if k in inputs and inputs[k].dtype in HALVES and inputs[k].dtype != dtype
        ]:
            raise DtypeError(f"{other[0]} is {inputs[other[0]].dtype}, a is {dtype}; pass one dtype")
        if (
            micro is None
            and name == "float4_e2m1f"
            or micro
            and name not in ("float4_e2m1f", "float8_e4m3fn")[: micro // 16]
        ):
            raise DtypeError(f"b_scales of {name} are {scales.dtype}; E4M3 or E8M0 for float4_e2m1f, else {dtype}")
        if micro and (scales.shape[0] * micro != inputs["a"].shape[1] or "g_idx" in inputs):
            raise ShapeError(
                f"{scales.dtype} scales are those of {micro} rows each, in order; K={inputs['a'].shape[1]}"
            )
        if scales.dtype is E8M0 and dtype is not torch.bfloat16:
            raise DtypeError("E8M0 scales go with bfloat16 activations")
        if scales.dtype is torch.float8_e4m3fn and bool((scales.view(torch.uint8) >> 7).any()):
            raise InputError("b_scales has a sign bit set; NVFP4's scales are not negative")
        if ("b_zeros" in inputs) != (name in ("uint4", "uint8")):
            raise OptionError(f"b_zeros go with uint4 and uint8; b_type is {name}")
        if ("global_scale" in inputs) != (scales.dtype is torch.float8_e4m3fn):
            raise OptionError(f"global_scale goes with E4M3 scales; b_scales are {scales.dtype}")
        by_index(inputs, inputs["a"].shape[1], scales.shape[0])

    def behind(self, inputs: Inputs, options: Options) -> bool:
        """Whether the scale of a column multiplies behind the sum."""
        plain = inputs["b_zeros"].dtype is torch.uint8 and options["b_type"] == "uint4" if "b_zeros" in inputs else True
        return inputs["b_scales"].shape[0] == 1 and inputs["b_scales"].dtype in HALVES and plain

    def weights(self, inputs: Inputs, options: Options) -> Weights:
        codes, zero = self.codes(inputs, options), inputs.get("b_zeros")
        scale = None if self.behind(inputs, options) else decode(inputs["b_scales"])
        points = None if zero is None else zero.to(torch.float64)
        return Weights(codes, scale, points, by_index(inputs, codes.shape[0], inputs["b_scales"].shape[0]))

    def steps(self, inputs: Inputs, options: Options) -> tuple[Step, ...]:
        t = inputs["a"].dtype
        factor, bias = (decode(inputs[n]) if n in inputs else None for n in ("global_scale", "b_bias"))
        column = decode(inputs["b_scales"])[0] if self.behind(inputs, options) else None
        wide = torch.float32 if TYPES[str(options["b_type"])][0] == 8 else t
        return steps_of(t, ("times", torch.float32, factor), ("times", wide, column), ("plus", t, bias))

    def ways(self, inputs: Inputs, options: Options) -> list[Way]:
        zero = inputs.get("b_zeros")
        forms = [Form.DIFFERENCE] if zero is None or zero.dtype not in HALVES else []
        forms += [Form.FUSED] if zero is not None and not self.behind(inputs, options) else []
        blocks = -(-inputs["a"].shape[1] // SLICE)
        cut = blocks > 1 and (options["use_atomic_add"] or not options["use_fp32_reduce"])
        return [*(Way(form) for form in forms), *(Way(form, blocks + 1) for form in forms if cut)]


@register
class MacheteMm(Typed):
    """``w = RN(RN(q * s) + z)``, or in one fused multiply-add: zero points ``z`` in T are added, scaled and negated
    before (``-s * zero``). Without group scales the weight is the code. Steps: ``f32(sum * b_channel_scales[n])``, then
    ``f32(x * a_token_scales[m])``, then rounded to ``out_type`` (by default T)."""

    name = "machete_mm"
    summary = "16-bit activations times weights of 4 or 8 bits, scaled zero points, channel and token scales"
    source = "vLLM 0.20.2 csrc/quantization/machete/machete_mainloop.cuh, generate.py; its layer machete.py"
    inputs = (
        A,
        B_Q,
        TensorSpec("b_group_scales", Kind.SCALES, HALVES, ("G", "N"), "in T", optional=True),
        TensorSpec("b_group_zeros", Kind.BIAS, HALVES, ("G", "N"), "in T, added to the scaled code", optional=True),
        TensorSpec("b_channel_scales", Kind.SCALES, F32, ("N",), "one for each column", optional=True),
        TensorSpec("a_token_scales", Kind.SCALES, F32, ("M",), "one for each row", optional=True),
    )
    options = (
        OptionSpec("b_type", "uint4b8", ("uint4b8", "uint8b128", "uint4", "uint8"), "type of a code"),
        OptionSpec("out_type", None, (None, *HALVES), "dtype of the output; None: that of a"),
    )
    shapes: ClassVar[dict[str, str]] = {"out": "[M, N]"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        for name in ("b_group_scales", "b_group_zeros"):
            if name in inputs and inputs[name].dtype != inputs["a"].dtype:
                raise DtypeError(f"{name} is {inputs[name].dtype}, a is {inputs['a'].dtype}; pass one dtype")
        if "b_group_zeros" in inputs and (
            "b_group_scales" not in inputs or str(options["b_type"]) not in ("uint4", "uint8")
        ):
            raise OptionError("b_group_zeros go with b_group_scales and with uint4 or uint8")
        groups(inputs["a"].shape[1], inputs["b_group_scales"].shape[0] if "b_group_scales" in inputs else 1)

    def weights(self, inputs: Inputs, options: Options) -> Weights:
        codes = self.codes(inputs, options)
        scale, zero = (decode(inputs[n]) if n in inputs else None for n in ("b_group_scales", "b_group_zeros"))
        return Weights(codes, scale, zero, groups(codes.shape[0], 1 if scale is None else scale.shape[0]))

    def steps(self, inputs: Inputs, options: Options) -> tuple[Step, ...]:
        column, row = (decode(inputs[n]) if n in inputs else None for n in ("b_channel_scales", "a_token_scales"))
        each = ("times", torch.float32, None if row is None else row[:, None])
        return steps_of(options["out_type"] or inputs["a"].dtype, ("times", torch.float32, column), each)

    def ways(self, inputs: Inputs, options: Options) -> list[Way]:
        return [Way(Form.ADDED), Way(Form.ADDED_FUSED)] if "b_group_zeros" in inputs else [Way()]


@register
class MmBf16Fp4(WeightOnly):
    """E2M1 codes lie two in a byte, the even column in the low nibble, along K; times their E4M3 scale they are exact
    in bfloat16. ``f32(sum * alpha)``, rounded once. No scale has its sign bit set."""

    name = "mm_bf16_fp4"
    summary = "bfloat16 activations times NVFP4 weights, dequantised exactly, alpha"
    source = "FlashInfer 0.6.18 flashinfer/gemm/gemm_bf16_fp4.py"
    inputs = (
        TensorSpec("a", Kind.VALUES, (torch.bfloat16,), ("M", "K"), "activations"),
        TensorSpec("b", Kind.CODES, BYTES, ("N", "P"), "codes, P = K / 2"),
        TensorSpec("b_descale", Kind.SCALES, E4M3, ("N", "K/16"), "scales of 16 columns, logical"),
        TensorSpec("alpha", Kind.ALPHA, F32, ("1",), "of the whole sum", optional=True),
    )
    options = (OptionSpec("out_dtype", None, (None, *HALVES), "dtype of the output; None: bfloat16"),)
    shapes: ClassVar[dict[str, str]] = {"out": "[M, N]"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (k := inputs["a"].shape[1]) != 2 * inputs["b"].shape[1] or k % 16:
            raise ShapeError(f"a has K={k}, b {inputs['b'].shape[1]} bytes a row; K is twice that, a multiple of 16")
        if bool((inputs["b_descale"].view(torch.uint8) >> 7).any()):
            raise InputError("b_descale has a sign bit set; NVFP4's scales are not negative")

    def weights(self, inputs: Inputs, options: Options) -> Weights:
        codes = decode(unpack(inputs["b"]), E2M1).t()
        return Weights(codes, decode(inputs["b_descale"]).t(), None, groups(codes.shape[0], codes.shape[0] // 16))

    def steps(self, inputs: Inputs, options: Options) -> tuple[Step, ...]:
        alpha = decode(inputs["alpha"]) if "alpha" in inputs else None
        return steps_of(options["out_dtype"] or torch.bfloat16, ("times", torch.float32, alpha))


@register
class MmNvFp4Svdquant(WeightOnly):
    """``f32((a b^T + d l1^T) * alpha) + bias``, rounded once: codes times their scales are exact in bfloat16, so that
    NVFP4's columns and those of the low-rank part are terms of one float32 sum. ``l1`` is divided by ``alpha``
    beforehand. Scales lie in rows here, in the kernel's memory in tiles of 128x4; none has its sign bit set."""

    name = "mm_nvfp4_svdquant"
    summary = "NVFP4 activations times NVFP4 weights and a low-rank part in bfloat16, alpha, bias"
    source = "FlashInfer 0.6.18.post1 flashinfer/gemm/gemm_svdquant.py mm_nvfp4_svdquant"
    inputs = (
        TensorSpec("a", Kind.CODES, BYTES, ("M", "P"), "codes, P = K / 2"),
        TensorSpec("b", Kind.CODES, BYTES, ("N", "P"), "codes"),
        TensorSpec("a_sf", Kind.SCALES, E4M3, ("M", "S"), "scales of 16 columns, logical"),
        TensorSpec("b_sf", Kind.SCALES, E4M3, ("N", "S"), "scales of 16 columns, logical"),
        TensorSpec("alpha", Kind.ALPHA, F32, ("1",), "of the whole sum"),
        TensorSpec("d", Kind.VALUES, (torch.bfloat16,), ("M", "R"), "activations times the first low-rank factor"),
        TensorSpec("l1", Kind.WEIGHTS, (torch.bfloat16,), ("N", "R"), "the second one"),
        TensorSpec("bias", Kind.BIAS, (torch.bfloat16,), ("N",), "added in float32", optional=True),
    )
    shapes: ClassVar[dict[str, str]] = {"out": "[M, N]"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (k := 2 * inputs["a"].shape[1]) % 32 or k != 16 * inputs["a_sf"].shape[1] or inputs["b"].shape[0] % 32:
            raise ShapeError(f"K={k}, N={inputs['b'].shape[0]}: pass multiples of 32, and a scale for 16 columns")
        if (rank := inputs["d"].shape[1]) % 32 or not rank:
            raise ShapeError(f"d has {rank} columns; pass a multiple of 32")
        for name in ("a_sf", "b_sf"):
            if bool((inputs[name].view(torch.uint8) >> 7).any()):
                raise InputError(f"{name} has a sign bit set; NVFP4's scales are not negative")

    @staticmethod
    def side(inputs: Inputs, codes: str, low_rank: str) -> Tensor:
        """Values of one operand, bfloat16 ``[R, K + rank]``: codes times scales, which are exact, and its low-rank
        columns; NaN scales give NaN."""
        values = decode(unpack(inputs[codes]), E2M1) * decode(inputs[f"{codes}_sf"]).repeat_interleave(16, dim=1)
        return torch.cat([rounded_to(values, torch.bfloat16), inputs[low_rank]], dim=1)

    def activations(self, inputs: Inputs) -> Tensor:
        """Both parts of the left operand, bfloat16 ``[M, K + rank]``."""
        return self.side(inputs, "a", "d")

    def weights(self, inputs: Inputs, options: Options) -> Weights:
        codes = decode(self.side(inputs, "b", "l1")).t()
        return Weights(codes, None, None, torch.zeros(len(codes), dtype=torch.int64, device="cpu"))

    def steps(self, inputs: Inputs, options: Options) -> tuple[Step, ...]:
        bias = decode(inputs["bias"]) if "bias" in inputs else None
        return steps_of(
            torch.bfloat16, ("times", torch.float32, decode(inputs["alpha"])), ("plus", torch.float32, bias)
        )


# --- AllSpark, Triton ---------------------------------------------------------------------------------------


@register
class AllsparkGemm(WeightOnly):
    """``w = RN((q - 128 - z) * s)``, one scale a column; a zero point in T is a whole number. Partial sums of a cut K
    may be stored in T and are then added in float32."""

    name = "allspark_w8a16_gemm"
    summary = "16-bit activations times 8-bit weights with a scale and a zero point of each column"
    source = "vLLM 0.20.2 csrc/quantization/gptq_allspark/allspark_qgemm_w8a16.cu"
    inputs = (
        A,
        TensorSpec("b_qweight", Kind.CODES, BYTES, ("K", "N"), "codes, 128 is 0"),
        TensorSpec("b_scales", Kind.SCALES, HALVES, ("1", "N"), "of columns, in T"),
        TensorSpec("b_qzeros", Kind.BIAS, HALVES, ("1", "N"), "taken off the codes, in T", optional=True),
    )
    shapes: ClassVar[dict[str, str]] = {"out": "[M, N]"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        for name in ("b_scales", "b_qzeros"):
            if name in inputs and inputs[name].dtype != inputs["a"].dtype:
                raise DtypeError(f"{name} is {inputs[name].dtype}, a is {inputs['a'].dtype}; pass one dtype")
        if "b_qzeros" in inputs and bool(((z := decode(inputs["b_qzeros"])) != z.round()).any()):
            raise InputError("b_qzeros holds a fraction; a zero point is a whole number")

    def weights(self, inputs: Inputs, options: Options) -> Weights:
        codes = inputs["b_qweight"].to(torch.float64) - 128
        zero = decode(inputs["b_qzeros"]) if "b_qzeros" in inputs else None
        return Weights(codes, decode(inputs["b_scales"]), zero, groups(codes.shape[0], 1))

    def ways(self, inputs: Inputs, options: Options) -> list[Way]:
        return [Way(), Way(roundings=1)]


@register
class TritonW4a16(WeightOnly):
    """Column ``j`` of every eight lies in nibble ``j`` of a word. The zero point is that of ``qzeros``, packed alike,
    or ``zp_bias`` for all."""

    name = "triton_w4a16_gemm"
    summary = "16-bit activations times words of 4-bit codes along N"
    source = "vLLM 0.20.2 model_executor/kernels/linear/mixed_precision/triton_w4a16.py"
    inputs = (
        A,
        TensorSpec("b_q", Kind.CODES, INT32, ("K", "C"), "eight codes of 4 bits a word along N, N = 8 C"),
        TensorSpec("scales", Kind.SCALES, HALVES, ("G", "N"), "one for K / G rows of a column, in T"),
        TensorSpec("qzeros", Kind.CODES, INT32, ("G", "C"), "zero points, in words as the codes are", optional=True),
    )
    options = (OptionSpec("zp_bias", 8, None, "zero point without qzeros"),)
    shapes: ClassVar[dict[str, str]] = {"out": "[M, N]"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if inputs["scales"].dtype != inputs["a"].dtype:
            raise DtypeError(f"scales is {inputs['scales'].dtype}, a is {inputs['a'].dtype}; pass one dtype")
        if inputs["scales"].shape[1] != (n := 8 * inputs["b_q"].shape[1]):
            raise ShapeError(f"scales has N={inputs['scales'].shape[1]}; the words of b_q have N={n}")
        groups(inputs["b_q"].shape[0], inputs["scales"].shape[0])

    def weights(self, inputs: Inputs, options: Options) -> Weights:
        def of_words(x: Tensor) -> Tensor:
            return fields(x.t().contiguous(), 4).t().to(torch.float64)

        codes, scale = of_words(inputs["b_q"]), decode(inputs["scales"])
        zero = of_words(inputs["qzeros"]) if "qzeros" in inputs else torch.full_like(scale, float(options["zp_bias"]))
        return Weights(codes, scale, zero, groups(codes.shape[0], scale.shape[0]))
