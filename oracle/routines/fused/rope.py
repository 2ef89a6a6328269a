"""Contracts of rotary embeddings with FP8 output: query and key, what is rotated and what is not, plain and MLA.

    rope: code((x cos - x' sin) * quant_scale)          nope: code(x * quant_scale)

``x'`` is the partner of ``x``: of neox style the element half a head away, else its neighbour (with the sign of its
place). ``quant_scale`` multiplies: it is the inverse of the scale that dequantises. Nothing is rounded in between but
float32 operations (:mod:`oracle.bounds.rotary`).

Source: FlashInfer flashinfer/rope.py, include/flashinfer/pos_enc.cuh RopeQuantizeKernel (0.6.18.post1). Not covered:
E5M2, a head dim that is rotated in part, appending to a paged cache.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.interval import Admissible
from oracle.bounds.rotary import FLUSHED, rotated
from oracle.errors import OptionError, ShapeError
from oracle.numbers import recipes
from oracle.numbers.formats import decode
from oracle.numbers.recipes import Recipe
from oracle.numbers.rounding import f32
from oracle.routines.base import E4M3, F32, INTEGERS, Call, Inputs, Options, OptionSpec, Out, TensorSpec, register
from oracle.routines.fused.contract import FusedContract, Value
from oracle.verdict.sets import Found

NARROW = (torch.bfloat16, torch.float16)
NAMES = ("q_rope", "k_rope", "q_nope", "k_nope")


def _factor(name: str, of: str) -> OptionSpec:
    return OptionSpec(name, 1.0, None, f"multiplies {of} before the cast")


@register
class RopeQuantizeFp8(FusedContract):
    name = "rope_quantize_fp8"
    summary = "rotary embedding of query and key, and their other columns, in E4M3"
    source = "FlashInfer flashinfer.rope.rope_quantize_fp8"
    returns = NAMES
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("q_rope", NARROW, ("T", "H", "D"), "columns of the query that are rotated"),
        TensorSpec("k_rope", NARROW, ("T", "G", "D"), "columns of the key that are rotated"),
        TensorSpec("q_nope", NARROW, ("T", "H", "N"), "the other columns of the query"),
        TensorSpec("k_nope", NARROW, ("T", "G", "N"), "the other columns of the key"),
        TensorSpec("cos_sin_cache", F32, ("S", "D"), "cosines, then sines, of each position"),
        TensorSpec("pos_ids", INTEGERS, ("T",), "position of each token"),
    )
    options = (
        OptionSpec("is_neox", True, (False, True), "partners half a head apart, else neighbours"),
        _factor("quant_scale_q", "the query"), _factor("quant_scale_kv", "the key"),
    )  # fmt: skip

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (depth := inputs["q_rope"].shape[-1]) % 2:
            raise ShapeError(f"D={depth} is odd; rotated columns come in pairs")
        for name in ("quant_scale_q", "quant_scale_kv"):
            value = options[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2.0**100:
                raise OptionError(f"{name}={value!r} is no positive number")
        positions, known = inputs["pos_ids"], inputs["cos_sin_cache"].shape[0]
        if bool((positions < 0).any()) or bool((positions >= known).any()):
            raise OptionError(f"pos_ids reach from {int(positions.min())} to {int(positions.max())}; there are {known}")

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return recipes.TORCH_STATIC, recipes.FLASHINFER_CVT

    def given(self, inputs: Inputs) -> dict[str, Tensor]:
        return {"scale": torch.ones(1, dtype=torch.float32, device=inputs["q_rope"].device)}

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        return 1, sum(inputs[name].numel() for name in NAMES)

    def value(self, inputs: Inputs, options: Options) -> Value:
        """All four tensors in one row."""
        made = [self._part(name, inputs, options) for name in NAMES]
        low, high, usual = (torch.cat([part[i].flatten() for part in made])[None] for i in range(3))
        return Value(Admissible(low, high, usual), torch.float32)

    def _part(self, name: str, inputs: Inputs, options: Options) -> tuple[Tensor, Tensor, Tensor]:
        x, factor = decode(inputs[name]), options["quant_scale_q" if name.startswith("q") else "quant_scale_kv"]
        times = float(f32(torch.tensor(float(factor), dtype=torch.float64, device=x.device)))
        if name.endswith("nope"):
            plain = f32(x * times)
            return f32(plain - FLUSHED * (1 + times)), f32(plain + FLUSHED * (1 + times)), plain
        half = x.shape[-1] // 2
        cache = decode(inputs["cos_sin_cache"])[inputs["pos_ids"].long()]
        cos, sin = torch.split(cache, half, dim=-1)
        if options["is_neox"]:
            beside = torch.cat([x[..., half:], -x[..., :half]], dim=-1)
            cos, sin = (torch.cat([t, t], dim=-1) for t in (cos, sin))
        else:
            beside = torch.stack([x[..., 1::2], -x[..., ::2]], dim=-1).flatten(-2)
            cos, sin = (t.repeat_interleave(2, dim=-1) for t in (cos, sin))
        if x.dim() == 3:
            cos, sin = cos[:, None], sin[:, None]
        return rotated(x, beside, cos, sin, times)

    def outputs(self, call: Call) -> dict[str, Out]:
        return {name: Out(tuple(call.inputs[name].shape), E4M3) for name in NAMES}

    def split(self, found: Found, call: Call) -> dict[str, Tensor]:
        flat = torch.cat([found[name].reshape(-1).view(torch.uint8) for name in NAMES])
        return {"q": flat[None].view(found[NAMES[0]].dtype), "scale": self.given(call.inputs)["scale"]}

    def codes(self, made: Tensor, inputs: Inputs, fill: float) -> dict[str, Tensor]:
        sizes = [inputs[name].numel() for name in NAMES]
        return {
            name: part.reshape(inputs[name].shape).contiguous()
            for name, part in zip(NAMES, torch.split(made.flatten(), sizes), strict=True)
        }


@register
class MlaRopeQuantizeFp8(RopeQuantizeFp8):
    name = "mla_rope_quantize_fp8"
    summary = "rotary embedding in E4M3 for MLA: one key head, without an axis of its own"
    source = "FlashInfer flashinfer.rope.mla_rope_quantize_fp8"
    inputs = tuple(
        TensorSpec(s.name, s.dtypes, tuple(d for d in s.dims or () if d != "G"), s.doc) for s in RopeQuantizeFp8.inputs
    )
