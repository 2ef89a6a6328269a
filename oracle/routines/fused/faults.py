"""Faults of the fused quantisers: those of every quantiser, put into the value's; and those of the value itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from oracle.numbers.formats import FP32, decode
from oracle.routines.fault import (
    ARITHMETIC,
    CAST,
    INDEX,
    MOVEMENT,
    VALUE,
    Call,
    Fault,
    Faults,
    WhyNot,
    both,
    entry,
    need,
    ones,
)
from oracle.routines.fused.contract import FusedContract, Inner, matrix_of
from oracle.routines.quantisers import faults as quantisers
from oracle.routines.quantisers.contract import Amax
from oracle.truth.moe import nearest
from oracle.truth.routing import sigmoid
from oracle.verdict.sets import rounded_to

MASKED = frozenset({"silu_and_mul_masked_post_quant", "persistent_masked_m_silu_mul_quant"})
GROUPED = MASKED | {"silu_and_mul_per_block_quant"}
ROUNDED = MASKED | {"silu_and_mul_quant"}
GATED = GROUPED | {"silu_and_mul_quant"}
GIVEN = frozenset({"silu_and_mul_quant"})
COMPUTED = GROUPED
"""Contracts that compute their scale."""
FUSED = COMPUTED | GIVEN
"""Every contract of the folder."""
PREFIX = "fused: "
MINE = "no public thread: "
# A fault is a row: what is wrong and where it was met; the change; when it shows.
# fmt: off


# --- the quantiser's own, on the value ----------------------------------------------------------------------


class _Inside:
    """Every fault of the group quantiser, on the value that a fused kernel quantises."""

    def __iter__(self) -> Iterator[Fault]:
        for fault in quantisers.FAULTS:
            if "per_token_group_quant_fp8" in fault.contracts:
                where = FUSED if fault.family in (CAST, MOVEMENT) else COMPUTED  # a given scale is nobody's mistake
                yield replace(fault, name=PREFIX + fault.name, contracts=where, why_not=_inside(fault.why_not))


def _inside(why_not: WhyNot) -> WhyNot:
    """A need of the quantiser, asked of the call inside."""
    def asked(call: Call) -> str | None:
        if isinstance(call.contract, Inner):
            return why_not(call)
        assert isinstance(call.contract, FusedContract)
        return why_not(call.contract.inner(call))

    return asked


INSIDE = _Inside()


several_groups = _inside(quantisers.several_across)
float32_scale, powers = _inside(quantisers.float32_scale), _inside(quantisers.ue8m0)
QUANTISER = Faults(COMPUTED)
fault = QUANTISER.declare

fault("scale of the first K group for every group of the row", INDEX, seen="sglang PR 20819",
      amax=lambda amax: amax.right[:, :, :1].expand_as(amax.right), needs=several_groups,
      same_if="all groups have equal amax")
fault("scale for 224 instead of 448", VALUE, seen="sglang PR 30900", amax=lambda amax: amax.right * 2,
      same_if="amax lies below half of the floor")
fault("published scale below 1e-8 flushed to 0", VALUE, seen="flashinfer 2595, vllm 31394",
      scale=lambda scale: torch.where(scale < 1e-8, scale * 0.0, scale), same_if="no scale lies below 1e-8")
fault("multiplier of a power-of-two scale overflows in float16", VALUE, seen="sglang PR 33533",
      quotient=lambda values: values.altered(quotient=torch.where(
          (values.steps.scale < 2.0**-16) & (values.quotient != 0), values.quotient * torch.inf, values.quotient)),
      needs=both(powers, need(lambda call: call.inputs["x"].dtype == torch.float16, "x is not float16")),
      same_if="no scale lies below 2^-16")


@fault("amax of the value before it is rounded", VALUE, seen=MINE + "the scan reads the registers, the cast the stored value",
       contracts=ROUNDED & GROUPED, needs=need(lambda call: call.resolved.get("rounding") != "none", "the value is not rounded"),
       admissible_if="a power-of-two scale seldom changes with it", same_if="the largest values are bfloat16 values")
def amax_before_rounding(call: Call, amax: Amax) -> Tensor:
    contract = call.contract
    assert isinstance(contract, Inner) and isinstance(contract.outer.contract, FusedContract)
    outer = contract.outer
    wide = _gated(outer.inputs["x"], lambda gate: gate * sigmoid(gate))
    cells = amax.x.grid(amax.recipe.block)
    blocks = cells.split(matrix_of(wide, outer.contract.rows(outer.inputs)).double())
    right = blocks.nan_to_num(nan=0.0).abs().amax(dim=(1, 3), keepdim=True)
    return torch.where(torch.isfinite(amax.right), right, amax.right)


# --- the value: silu(gate) * up -----------------------------------------------------------------------------


def _gated(x: Tensor, active) -> Tensor:  # type: ignore[no-untyped-def]
    """``active(gate) * up`` in float32."""
    gate, up = decode(x).chunk(2, dim=-1)
    return rounded_to(nearest(active(gate) * up, FP32), torch.float32)


def _instead(active):  # type: ignore[no-untyped-def]
    """Another activation, rounded once to the dtype of the value."""
    def store(call: Call, value: Tensor) -> Tensor:
        return rounded_to(_gated(call.inputs["x"], active).double(), value.dtype)

    return store


def _halves(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.cat([up, gate], dim=-1)


def _up_moved(x: Tensor, by: int) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.cat([gate, torch.roll(up, by, dims=-1)], dim=-1)


def _gelu(gate: Tensor) -> Tensor:
    return gate * 0.5 * (1 + torch.erf(gate / 2.0**0.5))


VALUES = Faults(GATED)
fault = VALUES.declare
rounded = need(lambda call: call.resolved.get("rounding") != "none", "the value is not rounded")
twice = need(lambda call: call.resolved.get("rounding", "each") == "each", "silu is not rounded by itself")
unrounded = need(lambda call: call.resolved.get("rounding") == "none", "the value is rounded already")
narrow = need(lambda call: call.inputs["x"].dtype != torch.float32, "x is float32")

fault("gate and up exchanged in the fused activation", INDEX, seen="sglang PR 11081", read=entry("x", _halves))
fault("up half read one column off", INDEX, seen="flashinfer 2907, padded halves",
      read=entry("x", lambda x: _up_moved(x, -1)))
fault("fused activation without silu", ARITHMETIC, seen=MINE + "the activation argument ignored",
      store=_instead(lambda gate: gate))
fault("sigmoid in place of silu in the fused activation", ARITHMETIC, seen="sglang PR 39920", store=_instead(sigmoid))
fault("gelu in place of silu in the fused activation", ARITHMETIC, seen=MINE + "the activation argument ignored",
      store=_instead(_gelu))
fault("up half left out of the fused activation", MOVEMENT, seen=MINE + "a gated kernel on an ungated weight",
      read=entry("x", lambda x: torch.cat([x[..., : x.shape[-1] // 2], torch.ones_like(x[..., x.shape[-1] // 2 :])], -1)))
fault("value kept in float32 where its dtype is promised", CAST, seen="TensorRT-LLM PR 14464",
      contracts=ROUNDED - {"persistent_masked_m_silu_mul_quant"},
      options=lambda options: options | {"rounding": "none"},
      needs=both(rounded, narrow),
      same_if="every product is a value of its dtype")
fault("silu not rounded before the product", CAST, seen="vLLM csrc/activation_kernels.cu beside flashinfer 5128",
      contracts=ROUNDED - {"persistent_masked_m_silu_mul_quant"}, options=lambda options: options | {"rounding": "product"},
      needs=both(twice, narrow), same_if="every silu is a value of its dtype")
fault("value rounded to bfloat16 where float32 is promised", CAST, seen="TensorRT-LLM PR 14464",
      contracts=GATED - {"persistent_masked_m_silu_mul_quant"},
      store=lambda value: nearest_bf16(value), needs=unrounded, same_if="every value is a bfloat16 value")


def nearest_bf16(value: Tensor) -> Tensor:
    """Rounded to bfloat16, in the dtype it had."""
    return rounded_to(rounded_to(value.double(), torch.bfloat16).double(), value.dtype)


# --- scales that are given, bounds, rows in use -------------------------------------------------------------

fault("given scale multiplies the value", VALUE, seen="vllm PR 36297", contracts=GIVEN,
      read=entry("scale", lambda scale: 1.0 / scale), same_if="the scale is 1")
fault("given scale ignored", VALUE, seen="pytorch 190449, flashinfer 4979", contracts=GIVEN, read=entry("scale", ones),
      same_if="the scale is 1")
bounded = need(lambda call: "scale_ub" in call.inputs, "no bound is given")
fault("upper bound of the fused quantiser ignored", VALUE, seen=MINE + "an optional argument not passed on",
      contracts={"silu_and_mul_per_block_quant"}, needs=bounded,
      read=lambda given: {name: t for name, t in given.items() if name != "scale_ub"}, same_if="no scale reaches it")
fault("upper bound applied to amax instead of the scale", VALUE, seen="vllm PR 32996 beside PR 33255",
      contracts={"silu_and_mul_per_block_quant"}, needs=bounded,
      recipe=lambda recipe: replace(recipe, bounds_scale=False), same_if="no amax reaches it")
fault("floor 1e-10 on the scale in place of 1/(448 * 512)", VALUE, seen="vllm PR 32996, its first body",
      contracts={"silu_and_mul_per_block_quant"}, recipe=lambda recipe: replace(recipe, scale_floor=1e-10),
      same_if="no scale lies below 1/(448 * 512)")
several_experts = need(lambda call: call.inputs["masked_m"].numel() > 1, "there is one expert")
fault("rows in use of the previous expert", INDEX, seen="flashinfer 3547", contracts=MASKED, needs=several_experts,
      read=entry("masked_m", lambda rows: rows.roll(1)), same_if="all counts are equal")
fault("last row in use of every expert left out", MOVEMENT, seen="DeepGEMM 34", contracts=MASKED,
      read=entry("masked_m", lambda rows: (rows - 1).clamp(min=0)),
      needs=need(lambda call: int(call.inputs["masked_m"].max()) > 1, "no expert has two rows"))


@fault("rows of the next expert quantised", INDEX, seen="DeepGEMM PR 343", contracts=MASKED, needs=several_experts)
def read_next_expert(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return given | {"x": given["x"].roll(-1, dims=0)}
