"""Contracts of the sum over a token's slots: what its experts gave it, weighted or not, in one row.

``moe_sum``                  no weights; float32 or, slot by slot, rounded to the dtype of the rows
``moe_sum_reduce``           no weights; a factor of all
``moe_fused_mul_sum``        weights of each slot; slots of other ranks left out
``moe_unpermute``            weights of each slot; rows that were sorted by expert, found by their place
``zero_experts_compute_triton``  experts that give back what they get: the token's row times the sum of their weights

Products and sums in float32, in any order and with fused operations or without, then one rounding to T, the dtype of
the rows: the interval of :func:`oracle.routines.moe.moe_ranges.float32_sum`. Sums that are rounded to T slot by slot
have one value.

NaN and infinities: IEEE's sum of the terms. Where a float32 sum may overflow nothing is claimed.
Source: the source of each class. Not covered: ``moe_sum`` of one slot in another order, which is a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.product import may_overflow
from oracle.errors import InputError, ShapeError
from oracle.numbers.formats import decode, of_dtype
from oracle.numbers.quantize import WIDE
from oracle.routines.base import (
    F32,
    INTEGERS,
    Call,
    Contract,
    Inputs,
    Options,
    OptionSpec,
    Out,
    TensorSpec,
    positive,
    register,
)
from oracle.routines.moe.moe_ranges import float32_sum
from oracle.routines.traits import Kind
from oracle.truth.moe import nearest, running_sum
from oracle.truth.routing import Span
from oracle.verdict.compare import Admissible
from oracle.verdict.sets import Elements, Sets, mostly_zero, rounded_to

SLOTS = TensorSpec("x", Kind.VALUES, WIDE, ("T", "k", "H"), "a row of each slot")
IDS = TensorSpec("topk_ids", Kind.IDS, INTEGERS, ("T", "k"), "experts of each token", optional=True)
MAP = TensorSpec("expert_map", Kind.IDS, (torch.int32,), ("X",), "local expert of each, -1 elsewhere", optional=True)
WEIGHTS = TensorSpec("topk_weights", Kind.WEIGHTS, WIDE, ("T", "k"), "weight of each slot")
ROUNDED_SLOTS = range(2, 5)
"""Slots for which a sum of its own is compiled, which rounds after each of them."""


@dataclass(frozen=True)
class Terms:
    """The terms ``[k, T, H]``, float64, 0 where a slot gives nothing, and a factor of their sum."""

    of: Tensor
    factor: float = 1.0


class SlotSum(Contract):
    """``out[t] = RN_T(factor * sum over j of term[j, t])``, ``[T, H]`` in the dtype of the rows."""

    section = "MoE"
    dispatched = False
    rows: ClassVar[str] = "x"
    shapes: ClassVar[dict[str, str]] = {"out": "[T, H], in the dtype of the rows"}

    def terms(self, inputs: Inputs, options: Options) -> Terms:
        """The terms of a checked call."""
        raise NotImplementedError

    def _chained(self, terms: Terms) -> bool:
        """Whether sums may be rounded slot by slot."""
        return False

    def _sum(self, terms: Terms) -> Tensor:
        return terms.of.sum(dim=0) * terms.factor

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        """The exact sum, rounded once."""
        resolved = self.check(inputs, options)
        return rounded_to(self._sum(self.terms(inputs, resolved)), inputs[self.rows].dtype)

    def outputs(self, call: Call) -> dict[str, Out]:
        x = call.inputs[self.rows]
        return {"out": Out(tuple(self.terms(call.inputs, call.resolved).of.shape[1:]), (x.dtype,))}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        terms, dtype = self.terms(call.inputs, call.resolved), call.inputs[self.rows].dtype
        mistrust = lambda outputs: mostly_zero(decode(outputs["out"]))  # noqa: E731

        def chain() -> tuple[dict[str, Admissible], str]:
            value = running_sum(terms.of, dtype)
            return {"out": Admissible(value, value, value)}, f"sums of {dtype}, slot by slot"

        def once() -> tuple[dict[str, Admissible], str]:
            return {"out": self._interval(terms, dtype)}, "sums of float32, one rounding"

        makes = [chain, once] if self._chained(terms) else [once]
        return [Elements(make, mistrust=mistrust) for make in makes]

    def _interval(self, terms: Terms, dtype: torch.dtype) -> Admissible:
        fmt, ieee = of_dtype(dtype), self._sum(terms)
        special = ~torch.isfinite(terms.of).all(dim=0)
        finite = terms.of.masked_fill(special, 0.0) * terms.factor
        span = float32_sum(Span(finite, finite))
        due = nearest(ieee, fmt)
        low, high = (torch.where(special, due, nearest(edge, fmt)) for edge in (span.low, span.high))
        # a sum without its factor may overflow as well
        size = finite.abs().sum(dim=0) / min(1.0, abs(terms.factor) or 1.0)
        return Admissible(low, high, due, open=~special & may_overflow(size))


@register
class MoeSum(SlotSum):
    """``out[t] = sum over j of x[t, j]``: in float32 and rounded once, or with 2 to 4 slots rounded to T after each."""

    name = "moe_sum"
    summary = "the rows of a token's slots added, in float32 or rounded after each of 2 to 4 slots"
    source = "vLLM 0.20.2 csrc/moe/moe_align_sum_kernels.cu moe_sum; sglang-kernel 0.4.4 moe_sum"
    inputs = (SLOTS,)

    def _chained(self, terms: Terms) -> bool:
        return terms.of.shape[0] in ROUNDED_SLOTS

    def terms(self, inputs: Inputs, options: Options) -> Terms:
        """As of :meth:`SlotSum.terms`."""
        return Terms(decode(inputs["x"]).transpose(0, 1))


@register
class MoeSumReduce(SlotSum):
    """``out[t] = routed_scaling_factor * sum over j of x[t, j]``; the factor is a float32."""

    name = "moe_sum_reduce"
    summary = "the rows of a token's slots added in float32, times a factor"
    source = "sglang-kernel 0.4.4 csrc/moe/moe_sum_reduce.cu moe_sum_reduce"
    inputs = (SLOTS,)
    options = (OptionSpec("routed_scaling_factor", 1.0, None, "factor of the sum"),)

    def terms(self, inputs: Inputs, options: Options) -> Terms:
        """As of :meth:`SlotSum.terms`."""
        factor = torch.tensor(options["routed_scaling_factor"], dtype=torch.float32, device="cpu")
        return Terms(decode(inputs["x"]).transpose(0, 1), float(factor))


@register
class MoeFusedMulSum(SlotSum):
    """``out[t] = sum over j of topk_weights[t, j] * x[t, j]``; with ``expert_map`` only the slots whose expert has an
    entry of 0 or more, whatever the others hold. Ids and map go together, and no id is -1."""

    name = "moe_fused_mul_sum"
    summary = "the rows of a token's slots times their weights, added in float32"
    source = "vLLM 0.20.2 layers/fused_moe/moe_fused_mul_sum.py"
    inputs = (SLOTS, WEIGHTS, IDS, MAP)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if ("topk_ids" in inputs) != ("expert_map" in inputs):
            raise InputError("topk_ids and expert_map go together; pass both, or none")
        if "topk_ids" in inputs:
            ids, count = inputs["topk_ids"], inputs["expert_map"].numel()
            if bool((ids < 0).any()) or bool((ids >= count).any()):
                raise InputError(f"topk_ids reach from {int(ids.min())} to {int(ids.max())}; pass 0 to {count - 1}")

    def terms(self, inputs: Inputs, options: Options) -> Terms:
        """As of :meth:`SlotSum.terms`."""
        x = decode(inputs["x"]) * decode(inputs["topk_weights"])[:, :, None]
        if "expert_map" in inputs:
            absent = inputs["expert_map"][inputs["topk_ids"].long()] < 0
            x = x.masked_fill(absent[:, :, None], 0.0)
        return Terms(x.transpose(0, 1))


@register
class MoeUnpermute(SlotSum):
    """``out[t] = sum over j of topk_weights[t, j] * x[r]``, ``r = inv_permuted_idx[t k + j]``; with
    ``expert_first_token_offset`` only rows below its last entry. Rows that are left out may hold anything."""

    name = "moe_unpermute"
    summary = "rows sorted by expert back in the order of tokens, times their weights, added in float32"
    source = "vLLM 0.20.2 csrc/moe/permute_unpermute_kernels finalizeMoeRoutingKernel"
    inputs = (
        TensorSpec("x", Kind.VALUES, WIDE, ("R", "H"), "rows sorted by expert"),
        TensorSpec("topk_weights", Kind.WEIGHTS, F32, ("T", "k"), "weight of each slot"),
        TensorSpec("inv_permuted_idx", Kind.POSITIONS, (torch.int32,), ("P",), "the row of each pair, P = T k"),
        TensorSpec(
            "expert_first_token_offset", Kind.OFFSETS, (torch.int64,), ("F",), "E + 1 first rows", optional=True
        ),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        at, rows, pairs = inputs["inv_permuted_idx"], inputs["x"].shape[0], inputs["topk_weights"].numel()
        if at.numel() != pairs:
            raise ShapeError(f"inv_permuted_idx has {at.numel()} entries for {pairs} weights; pass one for each")
        read = at if "expert_first_token_offset" not in inputs else at[at < self._valid(inputs)]
        if bool((at < 0).any()) or bool((read >= rows).any()):
            raise InputError(f"inv_permuted_idx reaches from {int(at.min())} to {int(at.max())}; there are {rows} rows")

    def _valid(self, inputs: Inputs) -> int:
        """Rows in use."""
        ends = inputs.get("expert_first_token_offset")
        return inputs["x"].shape[0] if ends is None else int(ends[-1])

    def terms(self, inputs: Inputs, options: Options) -> Terms:
        """As of :meth:`SlotSum.terms`."""
        w, at = decode(inputs["topk_weights"]), inputs["inv_permuted_idx"].long().view_as(inputs["topk_weights"])
        absent, last = at >= self._valid(inputs), max(inputs["x"].shape[0] - 1, 0)
        x = decode(inputs["x"])[at.clamp(max=last)] * w[:, :, None]
        return Terms(x.masked_fill(absent[:, :, None], 0.0).transpose(0, 1))


@register
class ZeroExperts(SlotSum):
    """Experts from ``num_experts`` on are the identity: ``out[t] = sum over their slots j of expert_scales[t, j] *
    hidden_states[t]``, H a multiple of 256. The routine then clears their slots in
    its two inputs, which is not judged."""

    name = "zero_experts_compute_triton"
    summary = "the token's row times the weights of its experts that are the identity"
    source = "vLLM 0.20.2 layers/fused_moe/fused_moe.py zero_experts_compute_triton"
    rows = "hidden_states"
    inputs = (
        TensorSpec("expert_indices", Kind.IDS, INTEGERS, ("T", "k"), "experts of each token"),
        TensorSpec("expert_scales", Kind.WEIGHTS, F32, ("T", "k"), "weight of each slot"),
        TensorSpec("hidden_states", Kind.VALUES, WIDE, ("T", "H"), "rows of tokens"),
    )
    options = (OptionSpec("num_experts", None, None, "experts before the first identity"),)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        positive(options, "num_experts")
        if (h := inputs["hidden_states"].shape[1]) % 256:
            raise ShapeError(f"H={h} is no multiple of 256, behind which nothing is computed; pad H")

    def terms(self, inputs: Inputs, options: Options) -> Terms:
        """As of :meth:`SlotSum.terms`."""
        others = inputs["expert_indices"] < positive(options, "num_experts")
        scale = decode(inputs["expert_scales"]).masked_fill(others, 0.0)
        return Terms((decode(inputs["hidden_states"])[:, None, :] * scale[:, :, None]).transpose(0, 1))
