"""Contracts of the order of weight-only weights, scales and zero points: exllama's words, Marlin's tiles and scales.

Each is bits in other places, or exact: right or wrong, bit by bit. Words are int32, the least bits first.

NaN is moved like any other value.
Source: vLLM csrc/quantization/gptq/q_gemm.cu, csrc/quantization/marlin, marlin_utils.py, marlin_utils_fp4.py,
marlin_utils_fp8.py. Not covered: machete's order, which is CuTe's.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import InputError, ShapeError
from oracle.numbers.formats import decode
from oracle.routines.base import E4M3, INTEGERS, Call, Inputs, Options, OptionSpec, Out, TensorSpec, register
from oracle.routines.layouts.contract import LayoutContract
from oracle.routines.traits import Kind
from oracle.routines.weight_only.kernels import HALVES, INT32, WORD
from oracle.truth import weight_only as truth
from oracle.verdict.sets import rounded_to

BITS = OptionSpec("num_bits", 4, (4, 8), "of a code")
EIGHT = OptionSpec("is_a_8bit", False, (False, True), "tiles of 32 x 32, for activations of 8 bits")
SCALES = TensorSpec("s", Kind.SCALES, HALVES, ("G", "N"), "scales of groups, or one row of columns")
PERM = "rows in this order; absent: as they are"


class MarlinLayout(LayoutContract):
    """Rows and columns of Marlin come in whole tiles; other extents are refused."""

    dispatched = False
    whole: ClassVar[int] = 64

    def columns(self, inputs: Inputs, options: Options) -> int:
        """Columns that have an order."""
        return next(iter(inputs.values())).shape[-1]

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (n := self.columns(inputs, options)) % self.whole or not n:
            raise ShapeError(f"{n} columns; {self.name} takes a multiple of {self.whole}: pad N")


def check_perm(perm: Tensor | None, k: int) -> None:
    """Refuse a ``perm`` ``[K]`` of integers that is no permutation of ``k`` rows. Raises InputError."""
    if perm is not None and not torch.equal(perm.sort().values.to(torch.int64), torch.arange(k, device=perm.device)):
        raise InputError(f"perm is no permutation of the {k} rows; pass argsort(g_idx)")


@register
class GptqShuffle(LayoutContract):
    """The rows of the codes come in the order ``q_perm``; then each word (three of 3 bits) is written anew. Of 2 and 4
    bits field ``i`` of a word holds its code ``2 i``, in the high half ``2 i + 1``. Of 3 bits word ``w`` of three holds
    codes ``10 w + 2 i`` in bits ``3 i`` and ``10 w + 2 i + 1`` in bits ``16 + 3 i``, ``i`` below 5; bit ``w`` of code
    30 is its bit 15, of code 31 its bit 31. Words of 8 bits stay. ``q_weight`` is written in place."""

    name = "gptq_shuffle"
    dispatched = False
    summary = "GPTQ's words with their rows permuted, in the order of exllama's kernels"
    source = (
        "vLLM 0.20.2 csrc/quantization/gptq/q_gemm.cu gptq_shuffle, qdq_2.cuh, qdq_3.cuh, qdq_4.cuh; "
        "SGLang gptq_shuffle"
    )
    inputs = (
        TensorSpec("q_weight", Kind.CODES, INT32, ("W", "N"), "words along K, W = K * bit / 32"),
        TensorSpec("q_perm", Kind.POSITIONS, INTEGERS, ("K",), PERM, optional=True),
    )
    options = (OptionSpec("bit", 4, (2, 3, 4, 8), "of a code"),)
    returns = ("q_weight",)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        bit, rows = int(options["bit"]), inputs["q_weight"].shape[0]
        if bit == 3 and rows % 3:
            raise ShapeError(f"q_weight has {rows} words a column; 32 codes of 3 bits take three")
        check_perm(inputs.get("q_perm"), rows * WORD // bit)

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        return {"q_weight": truth.gptq_shuffle(inputs["q_weight"], inputs.get("q_perm"), bit=int(options["bit"]))}


class Repack(MarlinLayout):
    """A tile is 16 rows by 64 columns, tiles row by row; it has 4 words for each of 32 threads ``t`` (of 8 bits 8),
    those of a thread one behind the other. Word ``v`` of thread ``t`` has the codes of rows ``2 (t % 4) + (0, 1, 8,
    9)`` of column ``16 v + t // 4``, then of column ``16 v + t // 4 + 8``, in the order 0 2 4 6 1 3 5 7; of 8 bits word
    ``2 v`` has the first four and word ``2 v + 1`` the others, in the order 0 2 1 3. With ``is_a_8bit`` a tile is 32 by
    32, and word ``v`` of thread ``t`` has rows ``4 (t % 4) + (0, 1, 2, 3)`` and those 16 below of column ``16 (v // 2)
    + 8 (v % 2) + t // 4``, in the order 0 4 1 5 2 6 3 7; of 8 bits in two words as they are."""

    options: ClassVar[tuple[OptionSpec, ...]] = (BITS, EIGHT)
    shapes: ClassVar[dict[str, str]] = {"out": "[K / 16, N * num_bits / 2]"}

    def codes(self, inputs: Inputs, options: Options) -> Tensor:
        """``[K, N]``, int64."""
        raise NotImplementedError

    def columns(self, inputs: Inputs, options: Options) -> int:
        k, n = self.codes(inputs, options).shape
        if not k or k % (tall := 32 if options["is_a_8bit"] else 16):
            raise ShapeError(f"K={k} is not a multiple of {tall}, the rows of a tile; pad K")
        return n

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        codes = self.codes(inputs, options)
        return {"out": truth.to_marlin(codes, int(options["num_bits"]), is_a_8bit=bool(options["is_a_8bit"]))}


@register
class GptqMarlinRepack(Repack):
    name = "gptq_marlin_repack"
    summary = "GPTQ's words as tiles of Marlin"
    source = "vLLM 0.20.2 csrc/quantization/marlin/gptq_marlin_repack.cu"
    inputs = (
        TensorSpec("b_q_weight", Kind.CODES, INT32, ("W", "N"), "words along K, W = K * num_bits / 32"),
        TensorSpec("perm", Kind.POSITIONS, INTEGERS, ("K",), PERM, optional=True),
    )

    def codes(self, inputs: Inputs, options: Options) -> Tensor:
        """Those of the words, rows in the order ``perm``. Raises InputError: it is no permutation."""
        codes, perm = truth.fields(inputs["b_q_weight"], int(options["num_bits"])), inputs.get("perm")
        check_perm(perm, codes.shape[0])
        return codes if perm is None else codes[perm.to(torch.int64)]


@register
class AwqMarlinRepack(Repack):
    name = "awq_marlin_repack"
    summary = "AWQ's words as tiles of Marlin"
    source = "vLLM 0.20.2 csrc/quantization/marlin/awq_marlin_repack.cu"
    inputs = (TensorSpec("b_q_weight", Kind.CODES, INT32, ("K", "C"), "AWQ's words, N = 32 C / num_bits"),)

    def codes(self, inputs: Inputs, options: Options) -> Tensor:
        """Column ``j`` of eight from nibble ``(0 4 1 5 2 6 3 7)[j]``; of four bytes from byte ``(0 2 1 3)[j]``."""
        return truth.awq_fields(inputs["b_q_weight"], int(options["num_bits"]))


@register
class MarlinPermuteScales(MarlinLayout):
    """Of scales of groups (``group_size`` is not -1 and below ``size_k``, without ``is_a_8bit``) columns ``8 i + j`` of
    every 64 are columns ``i + 8 j``; else columns ``8 i + j`` of every 32 are ``2 i + (0, 1, 8, 9, 16, 17, 24,
    25)[j]``."""

    name = "marlin_permute_scales"
    summary = "scales in the order of Marlin's threads"
    source = "vLLM 0.20.2 marlin_utils.py marlin_permute_scales"
    inputs = (SCALES,)
    shapes: ClassVar[dict[str, str]] = {"out": "[G, N]"}
    options = (
        OptionSpec("size_k", 128, None, "rows of the weight"),
        OptionSpec("group_size", -1, (-1, 16, 32, 64, 128), "rows that share a scale; -1: all"),
        EIGHT,
    )
    whole = 32

    def columns(self, inputs: Inputs, options: Options) -> int:
        n, group = inputs["s"].shape[1], int(options["group_size"])
        if n % 64 and group != -1 and group < int(options["size_k"]) and not options["is_a_8bit"]:
            raise ShapeError(f"{n} columns; scales of groups come in 64: pad N")
        return n

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        size, group = int(options["size_k"]), int(options["group_size"])
        eight = bool(options["is_a_8bit"])
        return {"out": truth.marlin_permute_scales(inputs["s"], size_k=size, group_size=group, is_a_8bit=eight)}


@register
class MarlinPermuteBias(MarlinLayout):
    """Elements ``8 i + j`` of every 32 are ``2 i + (0, 1, 8, 9, 16, 17, 24, 25)[j]``."""

    name = "marlin_permute_bias"
    summary = "a bias in the order of Marlin's threads"
    source = "vLLM 0.20.2 marlin_utils.py marlin_permute_bias"
    inputs = (TensorSpec("s", Kind.BIAS, HALVES, ("N",), "bias"),)
    whole = 32
    function = staticmethod(truth.marlin_permute_bias)


class ZeroPoints(MarlinLayout):
    """Columns ``8 i + j`` of every 64 are columns ``i + 8 j``; then, without ``is_a_8bit``, eight of them (of 8 bits
    four) in the order 0 2 4 6 1 3 5 7 (0 2 1 3), and words along N."""

    options: ClassVar[tuple[OptionSpec, ...]] = (BITS, EIGHT)
    shapes: ClassVar[dict[str, str]] = {"out": "[G, N * num_bits / 32]"}


@register
class MarlinZeroPoints(ZeroPoints):
    name = "marlin_zero_points"
    summary = "zero points in the order of Marlin's threads, in words"
    source = "vLLM 0.20.2 marlin_utils.py marlin_zero_points"
    inputs = (TensorSpec("zp", Kind.CODES, INT32, ("G", "N"), "zero points, one each"),)
    function = staticmethod(truth.marlin_zero_points)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if bool(((inputs["zp"] < 0) | (inputs["zp"] >= 1 << int(options["num_bits"]))).any()):
            raise InputError(f"zp holds {int(inputs['zp'].max())}; a zero point has {options['num_bits']} bits")


@register
class AwqToMarlinZeroPoints(ZeroPoints):
    name = "awq_to_marlin_zero_points"
    summary = "AWQ's words of zero points in the order of Marlin's threads"
    source = "vLLM 0.20.2 marlin_utils.py awq_to_marlin_zero_points"
    inputs = (TensorSpec("q_zp_packed", Kind.CODES, INT32, ("G", "C"), "AWQ's words, N = 32 C / num_bits"),)
    function = staticmethod(truth.awq_to_marlin_zero_points)

    def columns(self, inputs: Inputs, options: Options) -> int:
        return inputs["q_zp_packed"].shape[1] * WORD // int(options["num_bits"])


@register
class Nvfp4MarlinProcessScales(MarlinLayout):
    """``v = s * f * 2^7`` in float16, 0 below 2; the byte is 8 times its biased exponent (5 bits) plus 3 bits of the
    fraction, without a sign, columns 1 and 2 of every four exchanged. ``f`` is ``scale_factor`` or, where it is 0, the
    largest power of two with ``max(s) * f <= 448``, at least 1; of float16 (``a_half``) 1. The scales are values of
    E4M3 and not negative."""

    name = "nvfp4_marlin_process_scales"
    summary = "NVFP4's scales as Marlin's bytes of 5 and 3 bits"
    source = "vLLM 0.20.2 marlin_utils_fp4.py nvfp4_marlin_process_scales"
    inputs = (TensorSpec("marlin_scales", Kind.SCALES, HALVES, ("R", "N"), "values of E4M3"),)
    options = (
        OptionSpec("scale_factor", 0, (0, 1, 2, 8), "a power of two; 0: computed"),
        OptionSpec("a_half", False, (False, True), "activations are float16"),
    )
    returns = ("out", "factor")
    shapes: ClassVar[dict[str, str]] = {"factor": "[1]"}
    whole = 4

    def refuse(self, inputs: Inputs, options: Options) -> None:
        value = decode(inputs["marlin_scales"])
        exact = decode(rounded_to(value, torch.float8_e4m3fn)) == value
        if not bool((exact & (value >= 0)).all()) or float(value.max()) * self.factor(inputs, options) > 448:
            raise InputError("marlin_scales are values of E4M3, not negative, and times the factor at most 448")

    def factor(self, inputs: Inputs, options: Options) -> float:
        """``f``."""
        given = 1 if options["a_half"] and not options["scale_factor"] else int(options["scale_factor"])
        return float(given) if given else truth.lift_of(inputs["marlin_scales"])

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        factor = self.factor(inputs, options)
        lifted = torch.tensor([factor], dtype=torch.float32, device=inputs["marlin_scales"].device)
        return {"out": truth.nvfp4_marlin_scales(inputs["marlin_scales"], factor), "factor": lifted}


@register
class MxMarlinProcessScales(MarlinLayout):
    """Powers of two as bytes of E8M0, columns 1 and 2 of every four exchanged; with ``is_a_8bit`` (E4M3 activations)
    in their order, and 64 times as large: E2M1 is read as E4M3."""

    name = "mxfp4_marlin_process_scales"
    summary = "E8M0 scales in the order of Marlin's dequantisation"
    source = (
        "vLLM 0.20.2 marlin_utils_fp4.py mxfp4_marlin_process_scales, marlin_utils_fp8.py mxfp8_marlin_process_scales"
    )
    inputs = (TensorSpec("marlin_scales", Kind.SCALES, HALVES, ("R", "N"), "powers of two"),)
    options = (EIGHT,)
    whole = 4

    def refuse(self, inputs: Inputs, options: Options) -> None:
        value = decode(inputs["marlin_scales"])
        if not bool(((torch.frexp(value)[0] == 0.5) & (value < 2.0**122)).all()):
            raise InputError("marlin_scales are powers of two below 2^122; pass those of E8M0 in 16 bits")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        scale, eight = decode(inputs["marlin_scales"]), bool(options["is_a_8bit"])
        placed = scale * 64 if eight else truth.reordered(scale, (0, 2, 1, 3))
        return {"out": (torch.frexp(placed)[1] + 126).to(torch.uint8)}

    def outputs(self, call: Call) -> dict[str, Out]:
        return {"out": Out(tuple(call.inputs["marlin_scales"].shape), (torch.uint8, torch.float8_e8m0fnu))}


@register
class Fp8FusedExponentBias(MarlinLayout):
    """``s * 2^120`` in bfloat16, ``s * 2^8`` in float16: the kernel reads E4M3's exponent as one of the wider format.
    Infinite beyond its range."""

    name = "fp8_fused_exponent_bias_into_scales"
    section = "Quantisation"
    summary = "scales times the difference of the exponent biases"
    source = "vLLM 0.20.2 marlin_utils_fp8.py fp8_fused_exponent_bias_into_scales"
    inputs = (TensorSpec("scales", Kind.SCALES, HALVES, ("G", "N"), "scales"),)
    whole = 1
    computed = True

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        dtype = inputs["scales"].dtype
        return {"out": rounded_to(decode(inputs["scales"]) * 2.0 ** (120 if dtype is torch.bfloat16 else 8), dtype)}


@register
class PackFp8ToInt32(LayoutContract):
    """Four codes of consecutive rows of K a word, the first in the low byte: int32 ``[K / 4, N]`` of ``[K, N]``, or
    ``[N, K / 4]`` of ``[N, K]`` where K comes last."""

    name = "pack_fp8_to_int32"
    dispatched = False
    summary = "FP8 weights as words along K"
    source = "vLLM 0.20.2 marlin_utils_fp8.py pack_fp8_to_int32"
    inputs = (TensorSpec("fp8_tensor", Kind.CODES, E4M3, ("R", "C"), "[K, N], or [N, K]"),)
    options = (OptionSpec("size_k_first", True, (True, False), "K is the first axis"),)
    shapes: ClassVar[dict[str, str]] = {"out": "[K / 4, N], or [N, K / 4]"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (k := inputs["fp8_tensor"].shape[0 if options["size_k_first"] else 1]) % 4 or not k:
            raise ShapeError(f"K={k} is not a multiple of the 4 codes of a word; pad K")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        codes = inputs["fp8_tensor"].view(torch.uint8)
        down = codes if options["size_k_first"] else codes.t()
        packed = truth.words(down, 8)
        return {"out": packed if options["size_k_first"] else packed.t().contiguous()}
