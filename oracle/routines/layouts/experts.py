"""Contracts of the integers of a layer of experts: rows of an expert, their blocks, the sizes of its products.

Everything is exact. Only the order of one expert's rows is free, where atomic counters decide it.

No input holds NaN but the weights of the packed pairs, which refuse it.
Source: vLLM 0.20.2 csrc/moe/moe_align_sum_kernels.cu, layers/fused_moe/utils.py, csrc/quantization/w8a8/cutlass/moe.
Not covered: SGLang's operator counts ids of -1 as an expert before the first, and takes one expert more for it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import InputError
from oracle.numbers.formats import decode
from oracle.routines.base import Call, Inputs, Options, OptionSpec, TensorSpec, positive, register
from oracle.routines.layouts.contract import INTEGERS, LayoutContract
from oracle.routines.traits import Kind
from oracle.truth.layout import align, ceil_div
from oracle.verdict.compare import Verdict
from oracle.verdict.sets import Found, Property, Sets, judge_bits, rounded_to, worst_of

INT32 = (torch.int32,)
IDS = TensorSpec("topk_ids", Kind.IDS, INTEGERS, ("T", "k"), "experts of each token")
MAP = TensorSpec("expert_map", Kind.IDS, INT32, ("X",), "local expert of each global one, or -1", optional=True)


class ExpertIntegers(LayoutContract):
    """Integers that place rows of experts."""

    section = "MoE"
    dispatched = False


def local_ids(inputs: Inputs) -> Tensor:
    """The expert of each pair on this rank, int64 ``[T k]``; -1 for none, and for experts of other ranks."""
    ids = inputs["topk_ids"].flatten().long()
    known = inputs.get("expert_map")
    return ids if known is None else torch.where(ids >= 0, known.long()[ids.clamp(min=0)], -1)


def check_ids(inputs: Inputs, experts: int, least: int) -> None:
    """Refuse ids below ``least`` or beyond the experts, and a map that leads there. Raises InputError."""
    ids, known = inputs["topk_ids"], inputs.get("expert_map")
    count = experts if known is None else known.numel()
    if bool((ids < least).any()) or bool((ids >= count).any()):
        raise InputError(f"topk_ids reach from {int(ids.min())} to {int(ids.max())}; pass {least} to {count - 1}")
    if known is not None and (bool((known < -1).any()) or bool((known >= experts).any())):
        raise InputError(
            f"expert_map reaches from {int(known.min())} to {int(known.max())}; there are {experts} experts"
        )


@register
class MoeAlignBlockSize(ExpertIntegers):
    """Pair ``p = t k + j`` of token and slot belongs to expert ``topk_ids[t, j]``, or ``expert_map`` of it; a pair
    whose map is -1 is dropped. Expert ``e`` with ``c_e`` pairs takes ``align(c_e, B)`` places of
    ``sorted_token_ids``, B the ``block_size``, the experts in their order: first its pairs in any order, then
    ``T k``. ``expert_ids`` has the expert of each block of B places, ``num_tokens_post_pad`` the places of all. What
    lies behind them may be anything. With an ``expert_map`` experts are the local ones that it gives, in
    ``expert_ids`` too, and E, the ``num_experts``, is their number."""

    name = "moe_align_block_size"
    summary = "pairs of token and slot sorted by expert, each expert's padded to whole blocks"
    source = "vLLM 0.20.2 csrc/moe/moe_align_sum_kernels.cu moe_align_block_size"
    inputs = (IDS, MAP)
    options = (
        OptionSpec("num_experts", None, None, "experts that are counted"),
        OptionSpec("block_size", None, None, "places of a block"),
    )
    returns = ("sorted_token_ids", "expert_ids", "num_tokens_post_pad")
    shapes: ClassVar[dict[str, str]] = {
        "sorted_token_ids": "[P], P = T k + E (B - 1), at most T k B where T k is below E; int32",
        "expert_ids": "[ceil(P / B)], int32",
        "num_tokens_post_pad": "[1], int32",
    }

    def refuse(self, inputs: Inputs, options: Options) -> None:
        positive(options, "block_size")
        check_ids(inputs, positive(options, "num_experts"), 0)

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        experts, block = positive(options, "num_experts"), positive(options, "block_size")
        ids = local_ids(inputs)
        pairs = ids.numel()
        room = pairs + experts * (block - 1)
        room = min(room, pairs * block) if pairs < experts else room
        places = torch.full((room,), pairs, dtype=torch.int32, device=ids.device)
        owners = torch.zeros(ceil_div(room, block), dtype=torch.int32, device=ids.device)
        start = 0
        for expert in range(experts):
            own = torch.nonzero(ids == expert).flatten()
            end = start + align(len(own), block)
            places[start : start + len(own)] = own.to(torch.int32)
            owners[start // block : end // block] = expert
            start = end
        total = torch.tensor([start], dtype=torch.int32, device=ids.device)
        return {"sorted_token_ids": places, "expert_ids": owners, "num_tokens_post_pad": total}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [Property(lambda outputs: self._judge(call, outputs))]

    def _judge(self, call: Call, found: Found) -> Verdict:
        block, due = positive(call.resolved, "block_size"), call.truth
        total = int(due["num_tokens_post_pad"])
        padding = call.inputs["topk_ids"].numel()
        own = self._in_order(found["sorted_token_ids"][:total], due["expert_ids"][: total // block], block, padding)
        pairs = {
            "num_tokens_post_pad": (found["num_tokens_post_pad"], due["num_tokens_post_pad"]),
            "expert_ids": (found["expert_ids"][: total // block], due["expert_ids"][: total // block]),
            "sorted_token_ids": (own, due["sorted_token_ids"][:total]),
        }
        return worst_of([judge_bits(*both, output=name) for name, both in pairs.items() if both[1].numel()])

    def _in_order(self, places: Tensor, owners: Tensor, block: int, padding: int) -> Tensor:
        """Places ``[P]`` where the first of each expert, as many as are no padding, ascend."""
        out, group = places.clone(), owners.repeat_interleave(block).to(places.device)
        for expert in sorted(set(owners.tolist())):
            at = torch.nonzero(group == expert).flatten()
            used = at[: int((places[at] != padding).sum())]
            out[used] = places[used].sort().values
        return out


@register
class CountExpertNumTokens(ExpertIntegers):
    """``out[e]``: how many ids are ``e``, or have ``e`` in ``expert_map``. An id of -1 is no expert's."""

    name = "count_expert_num_tokens"
    summary = "pairs of token and slot of each expert of this rank"
    source = "vLLM 0.20.2 layers/fused_moe/utils.py count_expert_num_tokens"
    inputs = (IDS, MAP)
    options = (OptionSpec("num_local_experts", None, None, "experts of this rank"),)
    shapes: ClassVar[dict[str, str]] = {"out": "[num_local_experts], int32"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        check_ids(inputs, positive(options, "num_local_experts"), -1)

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        ids = local_ids(inputs)
        return {"out": torch.bincount(ids[ids >= 0], minlength=positive(options, "num_local_experts")).to(torch.int32)}


@register
class ProblemSizes(ExpertIntegers):
    """Expert ``e`` has ``m = offset[e + 1] - offset[e]`` rows. ``problem_sizes1[e]`` is ``(m, 2 n, k)``,
    ``problem_sizes2[e]`` ``(m, k, n)``; with ``swap_ab`` the first two of each are exchanged."""

    name = "get_cutlass_moe_mm_problem_sizes_from_expert_offsets"
    summary = "rows, columns and depth of the two products of each expert"
    source = "vLLM 0.20.2 csrc/quantization/w8a8/cutlass/moe/moe_data.cu"
    inputs = (TensorSpec("expert_first_token_offset", Kind.OFFSETS, (torch.int64,), ("F",), "E + 1 rows, the first 0"),)
    options = (
        OptionSpec("n", None, None, "intermediate size"),
        OptionSpec("k", None, None, "hidden size"),
        OptionSpec("swap_ab", False, (False, True), "the weight is the left operand"),
    )
    returns = ("problem_sizes1", "problem_sizes2")
    shapes: ClassVar[dict[str, str]] = {"problem_sizes1": "[F - 1, 3], int32", "problem_sizes2": "[F - 1, 3], int32"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        for size in ("n", "k"):
            positive(options, size)
        if (rows := inputs["expert_first_token_offset"].tolist()) != sorted(rows) or len(rows) < 2:
            raise InputError(f"expert_first_token_offset is {rows}; pass E + 1 offsets that never fall")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        m, n, k = inputs["expert_first_token_offset"].diff(), positive(options, "n"), positive(options, "k")
        order = [1, 0, 2] if options["swap_ab"] else [0, 1, 2]
        sizes = [torch.stack([m, *(torch.full_like(m, size) for size in two)], dim=1) for two in ((2 * n, k), (k, n))]
        return {name: x[:, order].to(torch.int32) for name, x in zip(self.returns, sizes, strict=True)}


@register
class PackTopk(ExpertIntegers):
    """``id * 2^16`` and the 16 bits of the weight in bfloat16, to nearest even, below it. Ids are 0 to 2^15 - 1,
    weights finite and not negative: a sign would spread over the id."""

    name = "trtllm_moe_pack_topk_ids_weights"
    summary = "expert and weight of each pair in an int32"
    source = "vLLM 0.20.2 layers/fused_moe/utils.py trtllm_moe_pack_topk_ids_weights"
    inputs = (
        IDS,
        TensorSpec(
            "topk_weights", Kind.WEIGHTS, (torch.float32, torch.bfloat16, torch.float16), ("T", "k"), "of the pairs"
        ),
    )
    shapes: ClassVar[dict[str, str]] = {"out": "[T, k], int32"}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        ids, weights = inputs["topk_ids"], decode(inputs["topk_weights"])
        if bool((ids < 0).any()) or bool((ids >= 1 << 15).any()):
            raise InputError(f"topk_ids reach from {int(ids.min())} to {int(ids.max())}; an id has 15 bits")
        if not bool((torch.isfinite(weights) & ~torch.signbit(weights)).all()):
            raise InputError("topk_weights hold a sign, NaN or infinity; pass what a router gives")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        low = rounded_to(decode(inputs["topk_weights"]), torch.bfloat16).view(torch.int16).to(torch.int32)
        return {"out": inputs["topk_ids"].to(torch.int32) * (1 << 16) + low}
