"""Contracts of quantisers and dequantisers that are a few operations of torch, each rounded to its own dtype.

    scaled_quantize                    s = 448 / amax of a group in T,  q = e4m3(clamp(RN_T(x s))),  scale 1 / s
    dynamic_per_batched_tensor_quant   the same of a whole tensor
    convert_bf16_scales_to_fp8         scales of a row as codes of its own scale, codes an eighth, that scale eightfold
    scaled_dequantize, block_dequant   RN(f32(code * scale)), groups of rows and columns

Every operation has one result, so that an output is right or wrong bit by bit; the alternatives are the orders in which
torch and its compiler compute a quotient, and whether intermediates are rounded to T.

NaN in a group gives NaN codes and a NaN scale, an infinity the scale infinity, codes 0, and NaN for itself.
Source: vLLM 0.20.2 quant_utils.py, mla_attention.py, int8_utils.py, deepep_ll.py. Not covered: float16, whose floor is
0.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import ShapeError
from oracle.numbers.formats import FP32, decode, of_dtype
from oracle.numbers.rounding import f32
from oracle.routines.base import E4M3, F32, Call, Inputs, Options, OptionSpec, TensorSpec, positive, register
from oracle.routines.layouts.contract import LayoutContract
from oracle.routines.traits import Kind
from oracle.truth.layout import ceil_div
from oracle.truth.moe import nearest
from oracle.verdict.sets import Bits, Sets, rounded_to

TOP = 448.0
WIDE = (torch.bfloat16, torch.float32)
ROWS = OptionSpec("group_rows", 1, None, "rows that share a scale")
COLUMNS = OptionSpec("group_columns", 128, None, "columns that share a scale")


class TorchForm(LayoutContract):
    """Exact in the order of its operations."""

    section = "Quantisation"
    dispatched = False
    computed = True

    def forms(self, inputs: Inputs, options: Options) -> list[dict[str, Tensor]]:
        """The outputs by each order of the operations, the usual one first."""
        return [self.made(inputs, options)]

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        mistrust = self.why_mistrust(call.inputs)
        return [Bits(form, mistrust, self.strided, self.computed) for form in self.forms(call.inputs, call.resolved)]


class ByMaximum(TorchForm):
    """``s = RN_T(448 * RN_T(1 / amax))`` as torch divides a number by a tensor, or ``RN_T(448 / amax)``; a compiler
    keeps intermediates in float32. The scale is ``f32(1 / s)``."""

    floor: ClassVar[float]
    returns: ClassVar[tuple[str, ...]] = ("q", "scale")

    def grouped(self, inputs: Inputs, options: Options) -> Tensor:
        """The values of each group in the last axis: ``[..., n]``, float64. Raises OptionError."""
        raise NotImplementedError

    def ungrouped(self, x: Tensor, inputs: Inputs, options: Options) -> Tensor:
        """Bytes ``x`` ``[..., n]`` of groups back in place: the shape of the values, uint8. Raises OptionError."""
        raise NotImplementedError

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        return self._by(inputs, options, divided=False, narrow=True)

    def forms(self, inputs: Inputs, options: Options) -> list[dict[str, Tensor]]:
        """Torch's order first, then those of a compiler."""
        ways = ((divided, narrow) for narrow in (True, False) for divided in (False, True))
        return [self._by(inputs, options, divided=divided, narrow=narrow) for divided, narrow in ways]

    def _by(self, inputs: Inputs, options: Options, *, divided: bool, narrow: bool) -> dict[str, Tensor]:
        fmt = of_dtype(inputs["x"].dtype) if narrow and options.get("compute_dtype") is None else FP32
        x = self.grouped(inputs, options)
        amax = x.abs().amax(dim=-1, keepdim=True)
        least = nearest(torch.full_like(amax, self.floor), fmt)
        amax = torch.where(torch.isnan(amax), amax, torch.maximum(amax, least))
        s = nearest(TOP / amax if divided else nearest(1.0 / amax, fmt) * TOP, fmt)
        codes = rounded_to(nearest(x * s, fmt).clamp(-TOP, TOP), torch.float8_e4m3fn)
        q = self.ungrouped(codes.view(torch.uint8), inputs, options).contiguous().view(torch.float8_e4m3fn)
        return {"q": q, "scale": rounded_to(f32(1.0 / s), torch.float32).squeeze(-1)}


@register
class ScaledQuantize(ByMaximum):
    """Groups of ``group_rows`` by ``group_columns``; T is the dtype of ``x``, float32 with ``compute_dtype``."""

    name = "scaled_quantize"
    summary = "E4M3 codes and scales of groups by a few operations of torch"
    source = "vLLM 0.20.2 quantization/utils/quant_utils.py scaled_quantize"
    inputs = (TensorSpec("x", Kind.VALUES, WIDE, ("M", "K"), "values"),)
    options = (
        ROWS, COLUMNS,
        OptionSpec("compute_dtype", None, (None, torch.float32), "of the operations; None: that of x"),
    )  # fmt: skip  # options that have a name
    shapes: ClassVar[dict[str, str]] = {"scale": "[M / group_rows, K / group_columns], float32"}
    floor = 1e-12

    def refuse(self, inputs: Inputs, options: Options) -> None:
        for extent, name in zip(inputs["x"].shape, ("group_rows", "group_columns"), strict=True):
            if extent % (step := positive(options, name)):
                raise ShapeError(f"x has {extent} for {name}={step}; pad it to a multiple")

    def grouped(self, inputs: Inputs, options: Options) -> Tensor:
        """``[M / rows, K / columns, rows * columns]``, float64; NaN stays NaN. Raises OptionError."""
        rows, columns = positive(options, "group_rows"), positive(options, "group_columns")
        x = decode(inputs["x"])
        return x.reshape(x.shape[0] // rows, rows, -1, columns).transpose(1, 2).flatten(2)

    def ungrouped(self, x: Tensor, inputs: Inputs, options: Options) -> Tensor:
        """``[M, K]`` of bytes ``x`` ``[M / rows, K / columns, n]``, uint8. Raises OptionError."""
        rows, columns = positive(options, "group_rows"), positive(options, "group_columns")
        return x.reshape(*x.shape[:2], rows, columns).transpose(1, 2).reshape(inputs["x"].shape)


@register
class BatchedTensorQuant(ByMaximum):
    """One scale for all of ``x``."""

    name = "dynamic_per_batched_tensor_quant"
    summary = "E4M3 codes and one scale of a tensor by a few operations of torch"
    source = "vLLM 0.20.2 layers/attention/mla_attention.py dynamic_per_batched_tensor_quant"
    inputs = (TensorSpec("x", Kind.VALUES, WIDE, None, "values, any shape"),)
    shapes: ClassVar[dict[str, str]] = {"scale": "[], float32"}
    floor = 1e-10

    def grouped(self, inputs: Inputs, options: Options) -> Tensor:
        """``[n]``, float64; NaN stays NaN."""
        return decode(inputs["x"]).flatten()

    def ungrouped(self, x: Tensor, inputs: Inputs, options: Options) -> Tensor:
        """Bytes ``x`` ``[n]`` in the shape of the values, uint8."""
        return x.reshape(inputs["x"].shape)


@register
class Bf16ScalesToFp8(TorchForm):
    """Of each row of scales ``s = max(amax, 448 floor) / 448`` (or ``amax * (1 / 448)``), floor ``1 / (448 * 512)``,
    and codes ``q = e4m3(x / s)`` (or of ``x * (1 / s)``); then ``e4m3(q / 8)`` and ``8 s``. Scales are finite."""

    name = "convert_bf16_scales_to_fp8"
    summary = "group scales of a W4A8 weight as E4M3 codes and a scale for each row"
    source = "vLLM 0.20.2 quantization/utils/quant_utils.py convert_bf16_scales_to_fp8, QuantFP8 of each token"
    inputs = (TensorSpec("scales", Kind.SCALES, WIDE[:1], ("N", "G"), "scales of groups"),)
    returns = ("fp8_scales", "chan_scales")
    shapes: ClassVar[dict[str, str]] = {"fp8_scales": "[N, G]", "chan_scales": "[N, 1], float32"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if not bool(torch.isfinite(decode(inputs["scales"])).all()):
            raise ShapeError("scales holds NaN or infinity; pass scales of a weight")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        return self.forms(inputs, options)[0]

    def forms(self, inputs: Inputs, options: Options) -> list[dict[str, Tensor]]:
        """By quotients and by products, of the scale and of the code."""
        x = decode(inputs["scales"])
        amax, found = x.abs().amax(dim=1, keepdim=True), []
        inverse = f32(torch.full_like(amax, 1.0) / TOP)
        for scale in (f32(amax / TOP), f32(amax * inverse)):
            s = torch.maximum(scale, f32(torch.full_like(scale, 1.0 / (TOP * 512.0))))
            for quotient in (f32(x / s), f32(x * f32(1.0 / s))):
                q = decode(rounded_to(quotient.clamp(-TOP, TOP), torch.float8_e4m3fn))
                codes = rounded_to(q / 8.0, torch.float8_e4m3fn)
                found.append({"fp8_scales": codes, "chan_scales": rounded_to(s * 8.0, torch.float32)})
        return found


class Dequantised(TorchForm):
    """``RN(f32(code * scale))`` in ``out_dtype``."""

    def product(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Of float64 ``codes`` and ``scale`` of one shape."""
        return rounded_to(f32(codes * scale), dtype)


@register
class ScaledDequantize(Dequantised):
    """A scale has the rows and columns of ``x_q`` over its own; one of a row is one of all columns."""

    name = "scaled_dequantize"
    summary = "codes times the float32 scale of their group, rounded to float32, then to the output"
    source = (
        "vLLM 0.20.2 quantization/utils/quant_utils.py scaled_dequantize; prepare_finalize/deepep_ll.py dequant_fp8"
    )
    inputs = (
        TensorSpec("x_q", Kind.CODES, (*E4M3, torch.float8_e5m2), ("M", "K"), "codes"),
        TensorSpec("x_s", Kind.SCALES, F32, ("G", "C"), "G divides M, C divides K"),
    )
    options = (OptionSpec("out_dtype", torch.float32, (torch.float32, torch.bfloat16, torch.float16), "dtype of out"),)
    shapes: ClassVar[dict[str, str]] = {"out": "[M, K]"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        for whole, part in zip(inputs["x_q"].shape, inputs["x_s"].shape, strict=True):
            if not part or whole % part:
                raise ShapeError(f"x_s has {part} for {whole} of x_q along an axis; pass a divisor")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        codes, scale = decode(inputs["x_q"]), decode(inputs["x_s"])
        for axis in (0, 1):
            scale = scale.repeat_interleave(codes.shape[axis] // scale.shape[axis], axis)
        return {"out": self.product(codes, scale, options["out_dtype"])}


@register
class BlockDequant(Dequantised):
    """Blocks of ``block_n`` by ``block_k``, the last ones cut."""

    name = "block_dequant"
    summary = "int8 codes times the float32 scale of their block"
    source = "vLLM 0.20.2 quantization/utils/int8_utils.py block_dequant"
    inputs = (
        TensorSpec("x_q_block", Kind.CODES, (torch.int8,), ("N", "K"), "codes"),
        TensorSpec("x_s", Kind.SCALES, F32, ("G", "C"), "scales of blocks"),
    )
    options = tuple(OptionSpec(name, 128, None, "of a block") for name in ("block_n", "block_k"))
    shapes: ClassVar[dict[str, str]] = {"out": "[N, K], float32"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        sides = positive(options, "block_n"), positive(options, "block_k")
        due = [ceil_div(extent, side) for extent, side in zip(inputs["x_q_block"].shape, sides, strict=True)]
        if list(inputs["x_s"].shape) != due:
            raise ShapeError(f"x_s has shape {list(inputs['x_s'].shape)}; pass {due}")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        codes, scale = inputs["x_q_block"].to(torch.float64), decode(inputs["x_s"])
        spread = scale.repeat_interleave(positive(options, "block_n"), 0)[: codes.shape[0]]
        spread = spread.repeat_interleave(positive(options, "block_k"), 1)[:, : codes.shape[1]]
        return {"out": self.product(codes, spread, torch.float32)}
