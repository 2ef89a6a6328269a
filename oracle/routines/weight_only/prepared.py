"""Contracts of weights, scales and zero points as a layer is given them after loading: experts for Marlin, AllSpark's
order, words of integers, and integers as scales.

Each is bits in other places, or exact: right or wrong, bit by bit.

NaN is moved like any other value.
Source: vLLM 0.20.2 quantization/utils (marlin_utils_fp8.py, marlin_utils_fp4.py, marlin_utils.py, quant_utils.py),
csrc/quantization/gptq_allspark/allspark_repack.cu. Not covered: biases of MXFP4 experts, which are
``marlin_permute_bias``, and activations of 8 bits.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import InputError, OptionError, ShapeError
from oracle.numbers.formats import decode
from oracle.numbers.rounding import f32
from oracle.routines.base import E4M3, F32, Inputs, Options, OptionSpec, TensorSpec, register
from oracle.routines.layouts.contract import LayoutContract
from oracle.routines.mx.contract import unpack
from oracle.routines.traits import Kind
from oracle.routines.weight_only.kernels import BYTES, E8M0, HALVES, INT32, WORD
from oracle.routines.weight_only.layouts import Fp8FusedExponentBias, MxMarlinProcessScales
from oracle.truth import weight_only as truth
from oracle.truth.layout import align, ceil_div
from oracle.verdict.sets import rounded_to

DTYPE = OptionSpec("params_dtype", torch.bfloat16, HALVES, "T, the dtype of the layer")
EACH = ("w13", "w2")


class Prepared(LayoutContract):
    """Weights of a layer after loading."""

    dispatched = False


class MarlinExperts(Prepared):
    """Each expert's weight as ``gptq_marlin_repack`` of its words along K, its scales ``[G, N]`` in T as
    ``marlin_permute_scales`` orders them, then as the format has them. R and H are multiples of 64, H and I of 16."""

    bits: ClassVar[int] = 8
    group: ClassVar[int] = 32

    def experts(self, inputs: Inputs) -> dict[str, Tensor]:
        """The codes of both weights, int64 ``[E, N, K]``."""
        if self.bits == 8:
            return {name: inputs[name].view(torch.uint8).to(torch.int64) for name in EACH}
        return {name: torch.stack([unpack(x) for x in inputs[name].view(torch.uint8)]).to(torch.int64) for name in EACH}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        for name, codes in self.experts(inputs).items():
            if (n := codes.shape[1]) % 64 or (k := codes.shape[2]) % 16 or k % self.group:
                raise ShapeError(f"{name} has {n} rows, {codes.shape[2]} columns; pad to 64 and {max(16, self.group)}")

    def repacked(self, inputs: Inputs) -> dict[str, Tensor]:
        """Both weights, int32 ``[E, K / 16, N * bits / 2]``."""
        return {
            name: torch.stack([truth.to_marlin(x.t(), self.bits) for x in codes])
            for name, codes in self.experts(inputs).items()
        }

    def ordered(self, scales: Tensor, k: int, group: int) -> Tensor:
        """``scales`` ``[G, N]`` of one expert, any dtype, in Marlin's order: ``[G, N]``, the same dtype."""
        return truth.marlin_permute_scales(scales.contiguous(), size_k=k, group_size=group, is_a_8bit=False)


W8 = tuple(
    TensorSpec(name, Kind.CODES, E4M3, dims, doc)
    for name, dims, doc in (("w13", ("E", "R", "H"), "gate rows, then up rows"), ("w2", ("E", "H", "I"), "down"))
)
W4 = tuple(
    TensorSpec(name, Kind.CODES, BYTES, dims, doc)
    for name, dims, doc in (("w13", ("E", "R", "P"), "gate rows, then up rows"), ("w2", ("E", "H", "Q"), "down"))
)


@register
class PrepareFp8ForMarlin(MarlinExperts):
    """A scale is one of an expert ``[E]``, one of a row ``[E, N]``, or with ``block`` one of 128x128
    ``[E, ceil(N / 128), ceil(K / 128)]``; it is rounded to T, repeated for each row, and then
    ``fp8_fused_exponent_bias_into_scales``."""

    name = "prepare_fp8_moe_layer_for_marlin"
    summary = "FP8 experts and their scales in the order of Marlin"
    source = "vLLM 0.20.2 marlin_utils_fp8.py prepare_fp8_moe_layer_for_marlin"
    inputs = (
        *W8,
        TensorSpec("w13_scale", Kind.SCALES, F32, None, "[E], [E, R], or blocks"),
        TensorSpec("w2_scale", Kind.SCALES, F32, None, "[E], [E, H], or blocks"),
    )
    options = (DTYPE, OptionSpec("block", False, (False, True), "scales of 128x128"))
    returns = ("w13", "w2", "w13_scale", "w2_scale")
    group = 1
    shapes: ClassVar[dict[str, str]] = {f"{name}_scale": "[E, G, N], in params_dtype" for name in EACH}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        for name in EACH:
            e, n, k = inputs[name].shape
            due = {(e, ceil_div(n, 128), ceil_div(k, 128))} if options["block"] else {(e,), (e, n)}
            if tuple(inputs[f"{name}_scale"].shape) not in due:
                raise ShapeError(f"{name}_scale has shape {list(inputs[f'{name}_scale'].shape)}; pass {due}")
            if options["block"] and k % 128:
                raise ShapeError(f"{name} has {k} columns; scales of blocks take whole 128")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        made, t = self.repacked(inputs), options["params_dtype"]
        for name in EACH:
            _, n, k = inputs[name].shape
            scales, group = rounded_to(decode(inputs[f"{name}_scale"]), t), -1
            if options["block"]:
                spread, group = scales.transpose(1, 2).repeat_interleave(128, 2)[..., :n], 128
            else:
                spread = scales.reshape(len(scales), 1, -1).expand(-1, 1, n)
            placed = torch.stack([self.ordered(s, k, group) for s in spread])
            made[f"{name}_scale"] = Fp8FusedExponentBias().made({"scales": placed}, {})["out"]
        return made


class MxExperts(MarlinExperts):
    """E8M0 scales of 32 columns of K, as bytes with columns 1 and 2 of every four exchanged."""

    returns = ("w13", "w2", "w13_scale", "w2_scale")
    options = (DTYPE,)
    shapes: ClassVar[dict[str, str]] = {f"{name}_scale": "[E, K / 32, N], bytes of E8M0" for name in EACH}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        for name, codes in self.experts(inputs).items():
            scale = inputs[f"{name}_scale"]
            if tuple(scale.shape) != (*codes.shape[:2], codes.shape[2] // 32):
                raise ShapeError(f"{name}_scale has shape {list(scale.shape)}; a scale has 32 columns of {name}")
            if bool(((scale.view(torch.uint8) < 20) | (scale.view(torch.uint8) > 240)).any()):
                raise InputError(f"{name}_scale holds bytes beyond 20 to 240, which T may not hold")
            if options["params_dtype"] is torch.float16 and bool(
                ((scale.view(torch.uint8) < 113) | (scale.view(torch.uint8) > 142)).any()
            ):
                raise InputError(f"{name}_scale holds powers that float16 does not hold; pass bfloat16")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        made, t = self.repacked(inputs), options["params_dtype"]
        for name, codes in self.experts(inputs).items():
            scales = rounded_to(decode(inputs[f"{name}_scale"].view(E8M0)), t)
            each = [self.ordered(s.t(), codes.shape[2], 32) for s in scales]
            process = MxMarlinProcessScales().made
            made[f"{name}_scale"] = torch.stack(
                [process({"marlin_scales": s}, {"is_a_8bit": False})["out"] for s in each]
            )
        return made


def _mx_scales(*dtypes: torch.dtype) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(f"{name}_scale", Kind.SCALES, (*dtypes, torch.uint8), None, "[E, N, K / 32]: powers of two")
        for name in EACH
    )


@register
class PrepareMxfp8ForMarlin(MxExperts):
    name = "prepare_mxfp8_moe_layer_for_marlin"
    summary = "MXFP8 experts and their scales in the order of Marlin"
    source = "vLLM 0.20.2 marlin_utils_fp8.py prepare_mxfp8_moe_layer_for_marlin"
    inputs = (*W8, *_mx_scales(E8M0))


@register
class PrepareMxfp4ForMarlin(MxExperts):
    name = "prepare_moe_mxfp4_layer_for_marlin"
    summary = "MXFP4 experts and their scales in the order of Marlin"
    source = "vLLM 0.20.2 marlin_utils_fp4.py prepare_moe_mxfp4_layer_for_marlin"
    inputs = (*W4, *_mx_scales(E8M0))
    bits = 4


@register
class PrepareNvfp4ForMarlin(MarlinExperts):
    """Scales as ``nvfp4_marlin_process_scales`` with one factor for all experts of a weight, the largest that they
    allow (1 of float16). A global scale is multiplied by ``2^119`` (float16 ``2^7``) and divided by the factor."""

    name = "prepare_nvfp4_moe_layer_for_marlin"
    summary = "NVFP4 experts, their scales and global scales as Marlin takes them"
    source = "vLLM 0.20.2 marlin_utils_fp4.py prepare_nvfp4_moe_layer_for_marlin"
    inputs = (
        *W4,
        *(TensorSpec(f"{name}_scale", Kind.SCALES, E4M3, None, "[E, N, K / 16], not negative") for name in EACH),
        *(TensorSpec(f"{name}_scale_2", Kind.SCALES, F32, ("E",), "global scale, it multiplies") for name in EACH),
    )
    options = (DTYPE,)
    returns = ("w13", "w2", "w13_scale", "w2_scale", "w13_scale_2", "w2_scale_2")
    bits, group = 4, 16
    shapes: ClassVar[dict[str, str]] = {
        **{f"{name}_scale": "[E, K / 16, N], bytes of 5 and 3 bits" for name in EACH},
        **{f"{name}_scale_2": "[E], float32" for name in EACH},
    }

    def refuse(self, inputs: Inputs, options: Options) -> None:
        for name, codes in self.experts(inputs).items():
            scale = inputs[f"{name}_scale"]
            if tuple(scale.shape) != (*codes.shape[:2], codes.shape[2] // 16):
                raise ShapeError(f"{name}_scale has shape {list(scale.shape)}; a scale has 16 columns of {name}")
            if bool((scale.view(torch.uint8) >= 0x7F).any()):
                raise InputError(f"{name}_scale has a sign bit set or NaN; NVFP4's scales are not negative")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        made, half = self.repacked(inputs), options["params_dtype"] is torch.float16
        for name, codes in self.experts(inputs).items():
            scales = rounded_to(decode(inputs[f"{name}_scale"]), options["params_dtype"])
            factor = 1.0 if half else truth.lift_of(scales)
            each = [self.ordered(s.t(), codes.shape[2], 16) for s in scales]
            made[f"{name}_scale"] = torch.stack([truth.nvfp4_marlin_scales(s, factor) for s in each])
            lifted = f32(decode(inputs[f"{name}_scale_2"]) * 2.0 ** (7 if half else 119))
            made[f"{name}_scale_2"] = rounded_to(f32(lifted / factor), torch.float32)
        return {name: made[name] for name in self.returns}


@register
class AllsparkRepackWeight(Prepared):
    """A tile has 16 rows of K by 32 columns, 512 bytes in 8 rows of 64; code ``[k, n]`` lies in row ``n % 8``, at
    ``16 ((k % 8) // 2) + 8 ((n % 32) // 16) + 4 ((n % 16) // 8) + 2 ((k % 16) // 8) + k % 2``. Tiles of one K follow
    one another along rows of ``4 K`` bytes. Scale ``n`` of every 32 lies at ``4 (n % 8) + n // 8``. N is padded with
    zeros to a multiple of 32; K and N are multiples of 16."""

    name = "allspark_repack_weight"
    summary = "8-bit weights and their scales in the order of AllSpark's warps"
    source = "vLLM 0.20.2 csrc/quantization/gptq_allspark/allspark_repack.cu"
    inputs = (
        TensorSpec("qweight", Kind.CODES, BYTES, ("K", "N"), "codes"),
        TensorSpec("scale", Kind.SCALES, HALVES, ("1", "N"), "of columns"),
        TensorSpec("zero_point", Kind.BIAS, HALVES, ("1", "N"), "of columns", optional=True),
    )
    returns = ("qweight", "scale", "zero_point")
    shapes: ClassVar[dict[str, str]] = {
        "qweight": "[align(N, 32), K], uint8",
        "scale": "[1, align(N, 32)]",
        "zero_point": "[1, align(N, 32)]",
    }

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if any(extent % 16 for extent in inputs["qweight"].shape):
            shape = inputs["qweight"].shape
            raise ShapeError(f"qweight has shape {list(shape)}; pad both extents to a multiple of 16")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        rows, columns = inputs["qweight"].shape
        wide = align(columns, 32)
        k, n = torch.arange(rows, device="cpu")[:, None], torch.arange(columns, device="cpu")[None, :]
        inside = 16 * (k % 8 // 2) + 8 * (n % 32 // 16) + 4 * (n % 16 // 8) + 2 * (k % 16 // 8) + k % 2
        at = (n // 32 * 8 + n % 8) * 4 * rows + k // 16 * 64 + inside
        out = torch.zeros(wide * rows, dtype=torch.uint8, device=inputs["qweight"].device)
        out[at.flatten()] = inputs["qweight"].flatten()
        made, column = {"qweight": out.reshape(wide, rows)}, n.flatten()
        place = column // 32 * 32 + 4 * (column % 8) + column % 32 // 8
        for name in ("scale", "zero_point"):
            if name in inputs:
                made[name] = inputs[name].new_zeros(1, wide)
                made[name][0, place] = inputs[name][0]
        return made


class Words(Prepared):
    """Word ``[.., w, ..]`` has fields ``w 32 / bits`` to the next along ``packed_dim``, the first in the low bits."""

    options: ClassVar[tuple[OptionSpec, ...]] = (
        OptionSpec("num_bits", 4, (2, 4, 8, 16), "of a field"),
        OptionSpec("packed_dim", 0, (0, 1), "the axis of which words take fields"),
    )
    inputs: ClassVar[tuple[TensorSpec, ...]] = (TensorSpec("w_q", Kind.CODES, INT32, ("R", "C"), "integers"),)


@register
class PackQuantizedValues(Words):
    """Fields are the low bits of ``w_q``."""

    name = "pack_quantized_values_into_int32"
    summary = "integers as fields of words along one axis"
    source = "vLLM 0.20.2 quant_utils.py pack_quantized_values_into_int32"
    shapes: ClassVar[dict[str, str]] = {"out": "w_q's with num_bits / 32 of packed_dim"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        extent, each = inputs["w_q"].shape[int(options["packed_dim"])], WORD // int(options["num_bits"])
        if extent % each or not extent:
            raise ShapeError(f"w_q has {extent} along axis {options['packed_dim']}; a word has {each}: pad it")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        bits, turned = int(options["num_bits"]), options["packed_dim"] == 1
        w = inputs["w_q"].to(torch.int64) & ((1 << bits) - 1)
        packed = truth.words(w.t() if turned else w, bits)
        return {"out": packed.t().contiguous() if turned else packed}


@register
class UnpackQuantizedValues(Words):
    """Fields as int32, not negative."""

    name = "unpack_quantized_values_into_int32"
    summary = "fields of words along one axis as integers"
    source = "vLLM 0.20.2 quant_utils.py unpack_quantized_values_into_int32"
    shapes: ClassVar[dict[str, str]] = {"out": "w_q's with 32 / num_bits of packed_dim"}

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        bits, turned, w = int(options["num_bits"]), options["packed_dim"] == 1, inputs["w_q"]
        each = truth.fields(w.t() if turned else w, bits).to(torch.int32)
        return {"out": each.t().contiguous() if turned else each}


@register
class SignedInt4(Words):
    """Each of the eight fields of a word less 8, in two's complement of 4 bits. In place."""

    name = "convert_packed_uint4b8_to_signed_int4_inplace"
    summary = "words of 4-bit integers with 8 added as words of signed ones"
    source = "vLLM 0.20.2 quant_utils.py convert_packed_uint4b8_to_signed_int4_inplace"
    options = ()
    inputs = (TensorSpec("t", Kind.CODES, INT32, ("R", "C"), "words"),)
    returns = ("t",)

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        fields = truth.fields(inputs["t"], 4)
        return {"t": truth.words((fields + 8) % 16, 4)}


@register
class ActInt8Scales(Prepared):
    """``factor = f32(max(s) / 4096)``; ``out`` is ``rne(RN_T(s / max(s)) * 4096)`` as int16, whose bits are given as
    those of T. Scales are positive and finite."""

    name = "marlin_act_int8_process_scales"
    summary = "scales as 4096ths of the largest, and what each of these is"
    source = "vLLM 0.20.2 marlin_utils.py marlin_act_int8_process_scales"
    inputs = (TensorSpec("s", Kind.SCALES, HALVES, ("G", "N"), "scales of groups"),)
    returns = ("out", "factor")
    shapes: ClassVar[dict[str, str]] = {"out": "[G, N], int16 in the dtype of s", "factor": "[], float32"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if not bool(((s := decode(inputs["s"])) > 0).all()) or not bool(torch.isfinite(s).all()):
            raise OptionError("s holds a scale that is not positive and finite")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        s, t = decode(inputs["s"]), inputs["s"].dtype
        shares = decode(rounded_to(decode(rounded_to(s / s.max(), t)) * 4096.0, t))
        factor = torch.tensor(float(s.max()) / 4096.0, dtype=torch.float32, device=s.device)
        return {"out": torch.round(shares).to(torch.int16).view(t), "factor": factor}
