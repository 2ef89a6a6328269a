"""Contracts of NVFP4 weights padded and placed for the kernels of FlashInfer and CUTLASS, experts and linear layers.

Padding is zeros: codes and scales of 0. Gate and up rows of a padded weight stand each in its own place; vLLM copies
them as one run, so that the up half begins before its place (as ``align_fp8_moe_weights_for_fi`` says of FP8).

NaN bytes are moved like any others.
Source: vLLM 0.20.2 quantization/utils (flashinfer_utils.py, nvfp4_utils.py, flashinfer_fp4_moe.py).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import ShapeError
from oracle.routines.base import E4M3, F32, Inputs, Options, OptionSpec, TensorSpec, positive, register
from oracle.routines.layouts.contract import LayoutContract
from oracle.routines.traits import Kind
from oracle.truth import tiles
from oracle.truth.layout import align, swap_w13_to_w31
from oracle.verdict.sets import bits_of

BYTES = (torch.uint8,)
WEIGHTS = (
    TensorSpec("w13", Kind.CODES, BYTES, ("E", "R", "P"), "gate rows, then up rows, P = H / 2"),
    TensorSpec("w13_scale", Kind.SCALES, E4M3, ("E", "R", "S"), "scales of 16 columns, S = H / 16"),
    TensorSpec("w2", Kind.CODES, BYTES, ("E", "H", "Q"), "down projection, Q = I / 2"),
    TensorSpec("w2_scale", Kind.SCALES, E4M3, ("E", "H", "C"), "scales of 16 columns, C = I / 16"),
)
NAMES = tuple(spec.name for spec in WEIGHTS)
SHAPES = {
    "w13": "[E, R', H' / 2]",
    "w13_scale": "[E, R', H' / 16]",
    "w2": "[E, H', I' / 2]",
    "w2_scale": "[E, H', I' / 16]",
}


def grown(x: Tensor, rows: int, columns: int, halves: int = 1) -> Tensor:
    """``x`` ``[..., R, C]`` of any dtype with zeros up to ``rows`` and ``columns``, each of the ``halves`` of its rows
    by itself; NaN is moved like any other value."""
    bits = bits_of(x)
    out = bits.new_zeros(*bits.shape[:-2], rows, columns)
    for part, target in zip(bits.chunk(halves, dim=-2), out.chunk(halves, dim=-2), strict=True):
        target[..., : part.shape[-2], : part.shape[-1]] = part
    return out.view(x.dtype)


class Padded(LayoutContract):
    """Weights padded with zeros."""

    dispatched = False


class PaddedExperts(Padded):
    """Codes and scales of both weights; R is I, or 2 I where there is a gate. H and I are multiples of 16."""

    section = "MoE"
    inputs: ClassVar[tuple[TensorSpec, ...]] = WEIGHTS
    returns: ClassVar[tuple[str, ...]] = NAMES
    shapes: ClassVar[dict[str, str]] = SHAPES

    def gated(self, options: Options) -> bool:
        """Whether w13 has an up half."""
        return bool(options.get("is_act_and_mul", True))

    def refuse(self, inputs: Inputs, options: Options) -> None:
        h, i = inputs["w2"].shape[1], 2 * inputs["w2"].shape[2]
        due = (inputs["w13"].shape[1], 2 * inputs["w13"].shape[2], 16 * inputs["w13_scale"].shape[2])
        if due != (i * (2 if self.gated(options) else 1), h, h) or 16 * inputs["w2_scale"].shape[2] != i:
            both = [list(inputs[name].shape) for name in ("w13", "w2")]
            raise ShapeError(f"w13 {both[0]}, w2 {both[1]} and their scales disagree")


@register
class AlignFp4Experts(PaddedExperts):
    """``I' = align(I, min_alignment)``, H' = H."""

    name = "align_fp4_moe_weights_for_fi"
    summary = "NVFP4 experts with their intermediate size padded with zeros, gate and up each in its place"
    source = "vLLM 0.20.2 flashinfer_utils.align_fp4_moe_weights_for_fi, with the halves placed apart"
    options = (
        OptionSpec("is_act_and_mul", True, (True, False), "w13 has a gate and an up half"),
        OptionSpec("min_alignment", 16, None, "of which the intermediate size is a multiple; itself of 16"),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (step := positive(options, "min_alignment")) % 16:
            raise ShapeError(f"min_alignment={step}; a scale has 16 columns, pass a multiple")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        h, i = inputs["w2"].shape[1], align(2 * inputs["w2"].shape[2], positive(options, "min_alignment"))
        halves = 2 if self.gated(options) else 1
        return {
            "w13": grown(inputs["w13"], halves * i, h // 2, halves),
            "w13_scale": grown(inputs["w13_scale"], halves * i, h // 16, halves),
            "w2": grown(inputs["w2"], h, i // 2),
            "w2_scale": grown(inputs["w2_scale"], h, i // 16),
        }


@register
class AlignTrtllmHidden(PaddedExperts):
    """``H' = align(H, min_alignment)``, I' = I."""

    name = "align_trtllm_fp4_moe_hidden_dim_for_fi"
    summary = "NVFP4 experts with their hidden size padded with zeros to a multiple of 256"
    source = "vLLM 0.20.2 flashinfer_utils.align_trtllm_fp4_moe_hidden_dim_for_fi"
    options = (OptionSpec("min_alignment", 256, None, "of which the hidden size is a multiple; itself of 16"),)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (step := positive(options, "min_alignment")) % 16:
            raise ShapeError(f"min_alignment={step}; a scale has 16 columns, pass a multiple")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        h, rows = align(inputs["w2"].shape[1], positive(options, "min_alignment")), inputs["w13"].shape[1]
        return {
            "w13": grown(inputs["w13"], rows, h // 2),
            "w13_scale": grown(inputs["w13_scale"], rows, h // 16),
            "w2": grown(inputs["w2"], h, inputs["w2"].shape[2]),
            "w2_scale": grown(inputs["w2_scale"], h, inputs["w2_scale"].shape[2]),
        }


@register
class PadNvfp4Weight(Padded):
    """Rows and columns (two in a byte) padded to a multiple of ``alignment``, and how many bytes a row grew by."""

    name = "pad_nvfp4_weight_for_cutlass"
    summary = "an NVFP4 weight padded with zeros to a multiple of 32 rows and columns"
    source = "vLLM 0.20.2 nvfp4_utils.py pad_nvfp4_weight_for_cutlass"
    inputs = (TensorSpec("weight", Kind.CODES, BYTES, ("N", "P"), "codes, P = K / 2"),)
    options = (OptionSpec("alignment", 32, None, "of rows and columns, even"),)
    returns = ("out", "padding_bytes")
    shapes: ClassVar[dict[str, str]] = {"out": "[align(N, A), align(K, A) / 2]", "padding_bytes": "[1], int64"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (step := positive(options, "alignment")) % 2:
            raise ShapeError(f"alignment={step}; a byte has two columns, pass an even number")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        x, step = inputs["weight"], positive(options, "alignment")
        wide = align(2 * x.shape[1], step) // 2
        more = torch.tensor([wide - x.shape[1]], dtype=torch.int64, device=x.device)
        return {"out": grown(x, align(x.shape[0], step), wide), "padding_bytes": more}


@register
class PadNvfp4Activation(Padded):
    """Rows ``weights_padding_bytes`` longer, zeros behind."""

    name = "pad_nvfp4_activation_for_cutlass"
    summary = "NVFP4 activations padded with the zeros that their weight has"
    source = "vLLM 0.20.2 nvfp4_utils.py pad_nvfp4_activation_for_cutlass"
    inputs = (TensorSpec("x_fp4", Kind.CODES, BYTES, ("M", "P"), "codes, P = K / 2"),)
    options = (OptionSpec("weights_padding_bytes", 0, None, "bytes that are added to a row"),)
    shapes: ClassVar[dict[str, str]] = {"out": "[M, P + weights_padding_bytes]"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        more = options["weights_padding_bytes"]
        if not isinstance(more, int) or isinstance(more, bool) or more < 0:
            raise ShapeError(f"weights_padding_bytes={more!r}; pass 0 or more")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        x = inputs["x_fp4"]
        return {"out": grown(x, x.shape[0], x.shape[1] + int(options["weights_padding_bytes"]))}


def in_tiles(scale: Tensor) -> Tensor:
    """``scale`` ``[E, M, C]``, E4M3, each expert in tiles of 128x4 with zeros in their padding: ``[E, align(M, 128),
    align(C, 4)]``."""
    rows, columns = (align(extent, step) for extent, step in zip(scale.shape[1:], (128, 4), strict=True))
    return tiles.to_blocked(scale).view(scale.dtype).reshape(len(scale), rows, columns)


A_SCALES = (
    TensorSpec("a13_scale", Kind.SCALES, F32, ("E", "s"), "of the input, one of gate and one of up, or one"),
    TensorSpec("a2_scale", Kind.SCALES, F32, ("E",), "of the intermediate"),
)
FUSED = (*NAMES, "a13_scale", "a2_scale")


@register
class PrepareNvfp4ForCutlass(PaddedExperts):
    """Scales of both weights in tiles of 128x4. Input scales of vLLM's CUTLASS kernel: ``a13_scale`` is the larger of
    gate and up, ``a2_scale`` as it is; of FlashInfer's (``shared``) the largest of all experts for each, and gate and
    up rows and scales exchanged. Rows of w13 are a multiple of 128."""

    name = "prepare_nvfp4_moe_layer_for_fi_or_cutlass"
    summary = "NVFP4 experts as CUTLASS takes them: scales in tiles, input scales shared or not"
    source = "vLLM 0.20.2 flashinfer_fp4_moe.py prepare_nvfp4_moe_layer_for_fi_or_cutlass of both CUTLASS backends"
    inputs = (*WEIGHTS, *A_SCALES)
    options = (OptionSpec("shared", False, (False, True), "FlashInfer's kernel: halves exchanged, one input scale"),)
    returns = FUSED
    shapes: ClassVar[dict[str, str]] = {
        "w13_scale": "[E, R, align(H / 16, 4)]",
        "w2_scale": "[E, align(H, 128), align(I / 16, 4)]",
        "a13_scale": "[E]",
    }

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (rows := inputs["w13"].shape[1]) % 128:
            raise ShapeError(f"w13 has {rows} rows; pad them to a multiple of 128, which a tile of scales has")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        made = {name: inputs[name] for name in FUSED}
        made["a13_scale"] = inputs["a13_scale"].amax(dim=1)
        if options["shared"]:
            made |= {name: swap_w13_to_w31(inputs[name]) for name in ("w13", "w13_scale")}
            made |= {n: made[n].max().expand(len(inputs["w13"])).contiguous() for n in ("a13_scale", "a2_scale")}
        return made | {name: in_tiles(made[name]) for name in ("w13_scale", "w2_scale")}


@register
class PrepareNvfp4ForCuteDsl(PaddedExperts):
    """Up rows before gate rows, then 64 of each in turn, with their scales; scales of each expert in tiles of 128x4, as
    memory that CuTe's six axes view; the largest input scale for all experts. I is a multiple of 64."""

    name = "prepare_nvfp4_moe_layer_for_flashinfer_cutedsl"
    summary = "NVFP4 experts as FlashInfer's CuTe DSL takes them: 64 rows of up and gate in turn, scales in tiles"
    source = "vLLM 0.20.2 flashinfer_fp4_moe.py prepare_nvfp4_moe_layer_for_flashinfer_cutedsl"
    inputs = (*WEIGHTS, *A_SCALES)
    returns = FUSED
    shapes: ClassVar[dict[str, str]] = {
        "w13_scale": "[E, 2 I, align(H / 16, 4)], the memory behind the six axes",
        "w2_scale": "[E, align(H, 128), align(I / 16, 4)], the memory behind the six axes",
        "a13_scale": "[E]",
    }

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (rows := inputs["w13"].shape[1]) % 128:
            raise ShapeError(f"w13 has {rows} rows; 64 of up and of gate in turn take a multiple of 128")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        made = {name: inputs[name] for name in FUSED}
        for name in ("w13", "w13_scale"):
            bits = bits_of(swap_w13_to_w31(inputs[name]))
            e, rows, columns = bits.shape
            turned = bits.reshape(e, 2, rows // 128, 64, columns).transpose(1, 2).reshape(bits.shape)
            made[name] = turned.contiguous().view(inputs[name].dtype)
        made |= {n: inputs[n].max().expand(len(inputs["w13"])).contiguous() for n in ("a13_scale", "a2_scale")}
        return made | {name: in_tiles(made[name]) for name in ("w13_scale", "w2_scale")}
