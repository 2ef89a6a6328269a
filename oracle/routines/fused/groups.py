"""Contracts of group quantisers whose rows or scales lie otherwise: of the rows that experts use, and packed in words.

The value is the input itself. Groups have any size that divides K (engines have kernels for 16 to 256).

*Packed*: the bytes of four powers of two in an int32, the first in the lowest byte, ``[M, ceil(G/4)]`` with strides
``(1, align(M, 4))``; bytes past the last group are 0. Byte 255 stands for NaN and for infinity.

Sources: vLLM csrc per_token_group_quant.cu ``per_token_group_fp8_quant_packed``; sgl-kernel
per_token_group_quant_8bit_v2.cu @037cd6e (``masked_m``, packed). Not covered: bytes of rows past M in the last lane.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.bounds.interval import Admissible
from oracle.errors import LayoutError, OptionError, ShapeError
from oracle.numbers import recipes
from oracle.numbers.formats import decode
from oracle.numbers.quantize import WIDE
from oracle.numbers.recipes import Recipe
from oracle.numbers.scaling import Block
from oracle.routines.base import Call, Inputs, Options, OptionSpec, Out, TensorSpec, positive, register
from oracle.routines.fused.contract import MASKED, FusedContract, Value
from oracle.verdict.sets import Found

GROUP = OptionSpec("group_size", 128, None, "elements that share a scale; K is a multiple of it")
EPS = OptionSpec("eps", 1e-10, None, "floor of amax")
WORD = 4


class _Groups(FusedContract):
    """The value is ``x``."""

    section = "Quantisation"

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (width := inputs["x"].shape[-1]) % (group := positive(options, "group_size")):
            raise ShapeError(f"K={width} is not a multiple of the group of {group}; pad K")
        eps = options["eps"]
        if not isinstance(eps, float) or not 0 < eps < 1:
            raise OptionError(f"eps={eps!r} is no float between 0 and 1")

    def value(self, inputs: Inputs, options: Options) -> Value:
        x = decode(inputs["x"])
        return Value(Admissible(x, x, x), inputs["x"].dtype)

    def families(self, options: Options, *, powers: bool) -> tuple[Recipe, ...]:
        """The recipes of the group quantiser, over these groups and with this floor."""
        plain = (recipes.TORCH_GROUP, recipes.VLLM_GROUP, recipes.SGLANG_GROUP)
        rounded = (
            recipes.TORCH_GROUP_UE8M0, recipes.VLLM_GROUP_UE8M0_BITS, recipes.SGLANG_GROUP_UE8M0,
            recipes.SGLANG_GROUP_V2_UE8M0,
        )  # fmt: skip
        block = Block(1, positive(options, "group_size"))
        return tuple(r.with_block(block).with_floor(options["eps"]) for r in (rounded if powers else plain))


@register
class PerTokenGroupQuantFp8Masked(_Groups):
    """Rows of an expert from ``masked_m[e]`` on are not specified."""

    name = "per_token_group_quant_fp8_masked"
    summary = "groups along K of the rows in use of every expert, scale max(amax, eps)/448"
    source = "sgl-kernel per_token_group_quant_8bit_v2.cu, masked_m"
    inputs = (TensorSpec("x", WIDE, ("E", "T", "K"), "values to quantise"), MASKED)
    options = (GROUP, EPS, OptionSpec("use_ue8m0", False, (False, True), "round the scale up to a power of two"))

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return self.families(options, powers=bool(options["use_ue8m0"]))


@register
class PerTokenGroupQuantFp8Packed(_Groups):
    name = "per_token_group_quant_fp8_packed"
    summary = "groups along K, power-of-two scales packed four to an int32, as DeepGEMM takes them on sm100"
    source = "vLLM per_token_group_fp8_quant_packed; sgl-kernel per_token_group_quant_8bit_v2.cu"
    inputs = (TensorSpec("x", WIDE, ("M", "K"), "values to quantise"),)
    options = (GROUP, EPS)
    interval = False

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return self.families(options, powers=True)

    def _words(self, inputs: Inputs, options: Options) -> tuple[int, int]:
        rows, width = inputs["x"].shape
        return rows, -(-(width // positive(options, "group_size")) // WORD)

    def outputs(self, call: Call) -> dict[str, Out]:
        return super().outputs(call) | {"scale": Out(self._words(call.inputs, call.resolved), (torch.int32,))}

    def publish(self, scale: Tensor, options: Options) -> Tensor:
        rows, groups = scale.shape
        byte = scale.contiguous().view(torch.int32) >> 23 & 0xFF
        byte = torch.nn.functional.pad(byte, (0, -groups % WORD)).to(torch.uint8)
        words = byte.view(torch.int32)
        lanes = torch.zeros(words.shape[1], rows + -rows % WORD, dtype=torch.int32, device=scale.device)
        lanes[:, :rows] = words.t()
        return lanes[:, :rows].t()

    def split(self, found: Found, call: Call) -> dict[str, Tensor]:
        """Byte 255 is read as the infinity that an infinite amax gives, else as NaN."""
        packed, (rows, words) = found["scale"], self._words(call.inputs, call.resolved)
        lead = rows + -rows % WORD
        for extent, stride, due in zip(packed.shape, packed.stride(), (1, lead), strict=True):
            if extent > 1 and stride != due:
                raise LayoutError(f"scale has strides {packed.stride()}; packed scales of {rows} rows have (1, {lead})")
        x = decode(call.inputs["x"])
        groups = x.reshape(rows, -1, positive(call.resolved, "group_size"))
        infinite = torch.isinf(groups).any(dim=-1) & ~torch.isnan(groups).any(dim=-1)
        byte = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8).reshape(rows, words * WORD)
        rest = byte[:, groups.shape[1] :]
        byte = byte[:, : groups.shape[1]].to(torch.int32)
        scale = (byte << 23).view(torch.float32)
        scale = torch.where((byte == 255) & ~infinite, torch.nan, torch.where(byte == 0, 2.0**-127, scale))
        spoilt = (rest != 0).any(dim=1, keepdim=True)  # a byte that nobody owns fails the last scale of its row
        last = torch.arange(groups.shape[1], device=scale.device) == groups.shape[1] - 1
        return {"q": found["q"], "scale": torch.where(spoilt & last, -1.0, scale)}

    def refused(self, call: Call, given: Found, right: Found) -> dict[str, Tensor] | None:
        """A word is refused where one of its bytes is."""
        inner = self.inner(call)
        bad = inner.contract.refused(inner, self.split(given, call), self.split(right, call))
        assert bad is not None
        rows, words = self._words(call.inputs, call.resolved)
        scale = torch.nn.functional.pad(bad["scale"], (0, words * WORD - bad["scale"].shape[1]))
        return {"q": bad["q"], "scale": scale.reshape(rows, words, WORD).any(dim=-1)}
