"""Contracts of rows sorted by expert: where each pair of token and slot goes, the rows there, the sizes of products.

Everything is exact. Where atomic counters decide the order of one expert's rows, it is free: an output is first put in
the order of pairs (:meth:`SortedRows.in_pairs`) and then compared bit by bit. Rows that no pair has may hold anything.

NaN bytes are moved like any others.
Source: vLLM 0.20.2 csrc/moe/permute_unpermute_kernels, csrc/quantization/w8a8/cutlass/moe/moe_data.cu,
csrc/moe/moe_align_sum_kernels.cu, layers/fused_moe/deep_gemm_utils.py and experts/gpt_oss_triton_kernels_moe.py;
sglang-kernel 0.4.4 csrc/moe/cutlass_moe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import InputError, ShapeError
from oracle.numbers.formats import decode
from oracle.routines.base import F32, Call, Inputs, Options, OptionSpec, TensorSpec, positive, register
from oracle.routines.layouts.contract import ONE_BYTE
from oracle.routines.layouts.experts import IDS, INT32, MAP, ExpertIntegers, check_ids, local_ids
from oracle.routines.traits import Kind
from oracle.truth.layout import align, ceil_div
from oracle.verdict.compare import Verdict
from oracle.verdict.sets import Found, Property, Sets, bits_of, judge_bits, rounded_to, worst_of

ROWS = (torch.bfloat16, torch.float16, *ONE_BYTE[:2])
COUNTED = OptionSpec("num_experts", None, None, "experts that are counted")
INTERMEDIATE, HIDDEN = OptionSpec("n", None, None, "intermediate size"), OptionSpec("k", None, None, "hidden size")
SWAPPED_UP_TO = 64
"""Pairs up to which the weight is the left operand."""
SCALE_TILE = 128
"""Rows of which the scales of an expert take a multiple."""
SIZES = {"problem_sizes1": "[E, 3], int32", "problem_sizes2": "[E, 3], int32"}


def starts_of(counts: Tensor, alignment: int = 1) -> Tensor:
    """First rows of experts with ``counts`` ``[E]`` rows, each a multiple of ``alignment``, and the end of the last:
    int64 ``[E + 1]``."""
    taken = (counts + alignment - 1) // alignment * alignment
    return torch.cat([taken.new_zeros(1), taken.cumsum(0)])


def problem_sizes(counts: Tensor, options: Options, swapped: bool, gated: bool = True) -> dict[str, Tensor]:
    """Rows, columns and depth of both products of each expert, int32 ``[E, 3]``; ``counts`` ``[E]``. Raises
    OptionError."""
    n, k = positive(options, "n"), positive(options, "k")
    order = [1, 0, 2] if swapped else [0, 1, 2]
    pairs = {"problem_sizes1": ((2 if gated else 1) * n, k), "problem_sizes2": (k, n)}
    return {
        name: torch.stack([counts, *(torch.full_like(counts, s) for s in two)], dim=1)[:, order].to(torch.int32)
        for name, two in pairs.items()
    }


class SortedRows(ExpertIntegers):
    """Pair ``p = t k + j`` belongs to expert ``topk_ids[t, j]``, or ``expert_map`` of it, or to none. The pairs of an
    expert have consecutive places.

    Subclasses
    ----------
    ``positions`` is the output that has the place of each pair, ``alignment`` what each expert's first place is a
    multiple of; ``gathered`` outputs have an entry at each place.
    """

    positions: ClassVar[str]
    gathered: ClassVar[tuple[str, ...]] = ()

    def experts(self, inputs: Inputs, options: Options) -> int:
        """Experts of this rank."""
        return positive(options, "num_experts")

    def alignment(self, options: Options) -> int:
        """Of the first place of each expert."""
        return 1

    def refuse(self, inputs: Inputs, options: Options) -> None:
        check_ids(inputs, self.experts(inputs, options), -1)

    def placed(self, inputs: Inputs, options: Options) -> tuple[Tensor, Tensor, Tensor]:
        """Counts ``[E]``, first places ``[E + 1]`` and the place of each pair ``[T k]`` (-1 for none), int64, with the
        pairs of an expert ascending."""
        ids, experts = local_ids(inputs), self.experts(inputs, options)
        counts = torch.bincount(ids[ids >= 0], minlength=experts)
        starts, at = starts_of(counts, self.alignment(options)), torch.full_like(ids, -1)
        for expert in range(experts):
            own = torch.nonzero(ids == expert).flatten()
            at[own] = starts[expert] + torch.arange(len(own), device=ids.device)
        return counts, starts, at

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [Property(lambda outputs: self._judge(call, outputs))]

    def _judge(self, call: Call, found: Found) -> Verdict:
        due = self.in_pairs(call, call.truth)
        own = self.in_pairs(call, found)
        return worst_of([judge_bits(own[name], due[name], output=name) for name in due if due[name].numel()])

    def in_pairs(self, call: Call, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs of which the order of an expert's rows says nothing: places ascending within each expert, and what
        lies there by pairs."""
        ids = local_ids(call.inputs).cpu()
        at, used = outputs[self.positions].flatten().cpu().long(), ids >= 0
        sorted_places = torch.full_like(at, -1)
        for expert in torch.unique(ids[used]).tolist():
            own = torch.nonzero(ids == expert).flatten()
            sorted_places[own] = at[own].sort().values
        ordered = {self.positions: torch.where(used, sorted_places, self.unplaced(call, at))}
        for name in self.gathered:
            if name in outputs:
                rows = outputs[name].cpu()
                ordered[name] = bits_of(rows)[at[used].clamp(0, max(len(rows) - 1, 0))]
        return ordered | {name: x.cpu() for name, x in outputs.items() if name not in ordered}

    def unplaced(self, call: Call, at: Tensor) -> Tensor:
        """What counts of the places ``at`` ``[T k]``, int64, of pairs without an expert: nothing, ``[T k]`` of -1."""
        return torch.full_like(at, -1)


@register
class CutlassMoeData(SortedRows):
    """``expert_offsets[e]`` is the first row of expert ``e``, the last entry the end. ``output_permutation[p]`` is the
    row of pair ``p``, for an id of -1 the end; ``input_permutation[row]`` its token. ``problem_sizes1[e]`` is
    ``(m, 2 n, k)`` for ``m`` rows, without a gate ``(m, n, k)``, ``problem_sizes2[e]`` ``(m, k, n)``; without
    ``blockscale`` the first two of each are exchanged up to 64 pairs. ``blockscale_offsets`` are the first rows of
    scales, multiples of 128."""

    name = "get_cutlass_moe_mm_data"
    summary = "first rows of experts, the row of each pair, the token of each row, the sizes of both products"
    source = "vLLM 0.20.2 csrc/quantization/w8a8/cutlass/moe/moe_data.cu get_cutlass_moe_mm_data"
    inputs = (TensorSpec("topk_ids", Kind.IDS, INT32, ("T", "k"), "experts of each token, -1 for none"),)
    options = (
        COUNTED, INTERMEDIATE, HIDDEN,
        OptionSpec("blockscale", False, (False, True), "first rows of scales are due as well"),
        OptionSpec("is_gated", True, (True, False), "the first product gives gate and up"),
    )  # fmt: skip  # options that have a name
    returns = (
        "expert_offsets", "problem_sizes1", "problem_sizes2", "input_permutation", "output_permutation",
        "blockscale_offsets",
    )  # fmt: skip  # in the order of the call
    shapes: ClassVar[dict[str, str]] = {
        "expert_offsets": "[E + 1], int32",
        **SIZES,
        "input_permutation": "[T k], int32",
        "output_permutation": "[T k], int32",
        "blockscale_offsets": "[E + 1], int32",
    }
    positions = "output_permutation"
    gathered = ("input_permutation",)

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        counts, starts, at = self.placed(inputs, options)
        swapped = not options["blockscale"] and at.numel() <= SWAPPED_UP_TO
        tokens = torch.zeros_like(at)
        tokens[at[at >= 0]] = torch.nonzero(at >= 0).flatten() // inputs["topk_ids"].shape[1]
        made = {
            "expert_offsets": starts.to(torch.int32),
            **problem_sizes(counts, options, swapped, bool(options["is_gated"])),
            "input_permutation": tokens.to(torch.int32),
            "output_permutation": torch.where(at >= 0, at, starts[-1]).to(torch.int32),
        }
        if options["blockscale"]:
            made["blockscale_offsets"] = starts_of(counts, SCALE_TILE).to(torch.int32)
        return made

    def unplaced(self, call: Call, at: Tensor) -> Tensor:
        """``at`` ``[T k]``, int64, as it is (``[T k]``): the end of all rows is due."""
        return at


@register
class CutlassW4a8MoeData(ExpertIntegers):
    """``expert_offsets[e]`` is the first row of expert ``e``, the last entry the end; ``problem_sizes1[e]`` is ``(2 n,
    m, k)`` for ``m`` rows, ``problem_sizes2[e]`` ``(k, m, n)``. Ids of -1 are no expert's. The routine's two
    permutations are not written."""

    name = "get_cutlass_w4a8_moe_mm_data"
    summary = "first rows of experts and the sizes of both products, the weight as the left operand"
    source = "sglang-kernel 0.4.4 csrc/moe/cutlass_moe/w4a8/w4a8_moe_data.cu get_cutlass_w4a8_moe_mm_data"
    inputs = CutlassMoeData.inputs
    options = (COUNTED, INTERMEDIATE, HIDDEN)
    returns = ("expert_offsets", "problem_sizes1", "problem_sizes2")
    shapes: ClassVar[dict[str, str]] = {"expert_offsets": "[E + 1], int32", **SIZES}

    def refuse(self, inputs: Inputs, options: Options) -> None:
        check_ids(inputs, positive(options, "num_experts"), -1)

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        ids = local_ids(inputs)
        counts = torch.bincount(ids[ids >= 0], minlength=positive(options, "num_experts"))
        return {"expert_offsets": starts_of(counts).to(torch.int32), **problem_sizes(counts, options, True)}


class ExpertCounts(ExpertIntegers):
    """What follows from the number of rows of each expert."""

    inputs = (TensorSpec("expert_num_tokens", Kind.COUNTS, INT32, ("E",), "rows of each expert"),)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        counts = inputs["expert_num_tokens"]
        most = next((positive(options, n) for n in ("padded_m", "max_tokens_per_batch") if n in options), None)
        if bool((counts < 0).any()) or (most is not None and bool((counts > most).any())):
            raise InputError(f"expert_num_tokens are {counts.tolist()}; pass 0 to {most or 'any number'}")


@register
class CutlassBatchedMoeData(ExpertCounts):
    """``expert_offsets[e] = e padded_m``. ``problem_sizes1[e]`` is ``(m, 2 n, k)`` for ``m`` rows,
    ``problem_sizes2[e]`` ``(m, k, n)``; the first two of each are exchanged where ``E padded_m`` is 64 at most."""

    name = "get_cutlass_batched_moe_mm_data"
    summary = "first rows of experts with room for as many each, and the sizes of both products"
    source = "vLLM 0.20.2 csrc/quantization/w8a8/cutlass/moe/moe_data.cu get_cutlass_batched_moe_mm_data"
    options = (OptionSpec("padded_m", None, None, "rows for which every expert has room"), INTERMEDIATE, HIDDEN)
    returns = ("expert_offsets", "problem_sizes1", "problem_sizes2")
    shapes: ClassVar[dict[str, str]] = {"expert_offsets": "[E], int32", **SIZES}

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        counts, room = inputs["expert_num_tokens"], positive(options, "padded_m")
        offsets = torch.arange(len(counts), dtype=torch.int32, device=counts.device) * room
        swapped = len(counts) * room <= SWAPPED_UP_TO
        return {"expert_offsets": offsets, **problem_sizes(counts, options, swapped)}


@register
class BatchedMoeAlign(ExpertCounts):
    """Expert ``e`` has rows ``e M`` to ``e M + c_e - 1``, M = ``max_tokens_per_batch``. ``sorted_ids`` has them, expert
    by expert, each padded with ``E M`` to whole blocks of B = ``block_size``, and ``E M`` behind them; ``expert_ids``
    the expert of each block and -1 behind the last; ``num_tokens_post_pad`` the places of all."""

    name = "batched_moe_align_block_size"
    summary = "rows of batches of experts, each expert's padded to whole blocks"
    source = "vLLM 0.20.2 csrc/moe/moe_align_sum_kernels.cu batched_moe_align_block_size"
    options = (
        OptionSpec("max_tokens_per_batch", None, None, "rows for which every expert has room"),
        OptionSpec("block_size", None, None, "places of a block"),
    )
    returns = ("sorted_ids", "expert_ids", "num_tokens_post_pad")
    shapes: ClassVar[dict[str, str]] = {
        "sorted_ids": "[E ceil(M / B) B], int32",
        "expert_ids": "[E ceil(M / B)], int32",
        "num_tokens_post_pad": "[1], int32",
    }

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        counts, room = inputs["expert_num_tokens"].tolist(), positive(options, "max_tokens_per_batch")
        block, device = positive(options, "block_size"), inputs["expert_num_tokens"].device
        places, owners = list[int](), list[int]()
        for expert, count in enumerate(counts):
            blocks = ceil_div(count, block)
            own = range(expert * room, expert * room + count)
            places += [*own, *[len(counts) * room] * (blocks * block - count)]
            owners += [expert] * blocks
        total, most = len(places), len(counts) * ceil_div(room, block)
        places += [len(counts) * room] * (most * block - total)
        owners += [-1] * (most - len(owners))
        rows = zip(self.returns, (places, owners, [total]), strict=True)
        return {name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in rows}


@register
class RoundedUpSum(ExpertCounts):
    """``out = sum over e of align(c_e, alignment)``."""

    name = "expert_num_tokens_round_up_and_sum"
    summary = "rows of all experts, each expert's rounded up"
    source = "vLLM 0.20.2 layers/fused_moe/deep_gemm_utils.py expert_num_tokens_round_up_and_sum"
    options = (OptionSpec("alignment", None, None, "rows of which each expert takes a multiple"),)
    shapes: ClassVar[dict[str, str]] = {"out": "[1], int64"}

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        return {"out": starts_of(inputs["expert_num_tokens"].long(), positive(options, "alignment"))[-1:]}


@register
class MoePermute(SortedRows):
    """Row ``inv_permuted_idx[p]`` of ``permuted_hidden_states`` is row ``p // k`` of ``hidden_states``, and
    ``permuted_idx`` has ``p`` there; pairs of an expert ascend. ``expert_first_token_offset`` are the first rows of
    experts and the end. Pairs of no expert have places behind the end, where ``permuted_idx`` is ``T k`` and rows may
    hold anything. ``a1q_scale`` goes with the rows."""

    name = "moe_permute"
    summary = "rows of tokens sorted by expert, with their scales, and where each pair went"
    source = "vLLM 0.20.2 layers/fused_moe/moe_permute_unpermute.py moe_permute"
    inputs = (
        TensorSpec("hidden_states", Kind.CODES, ROWS, ("T", "H"), "rows of tokens"),
        TensorSpec("a1q_scale", Kind.SCALES, F32, ("T", "S"), "scales of tokens", optional=True),
        IDS, MAP,
    )  # fmt: skip  # inputs that have a name
    options = (OptionSpec("n_local_expert", None, None, "experts of this rank"),)
    returns = (
        "permuted_hidden_states", "a1q_scale", "expert_first_token_offset", "inv_permuted_idx", "permuted_idx",
    )  # fmt: skip  # in the order of the call
    shapes: ClassVar[dict[str, str]] = {
        "permuted_hidden_states": "[T k, H], in the dtype of hidden_states",
        "a1q_scale": "[T k, S], float32",
        "expert_first_token_offset": "[E + 1], int64",
        "inv_permuted_idx": "[T k], int32",
        "permuted_idx": "[T k], int32",
    }
    positions = "inv_permuted_idx"
    gathered = ("permuted_hidden_states", "a1q_scale")

    def experts(self, inputs: Inputs, options: Options) -> int:
        """Experts of this rank."""
        return positive(options, "n_local_expert")

    def refuse(self, inputs: Inputs, options: Options) -> None:
        x = inputs["hidden_states"]
        if x.shape[1] * x.itemsize % 16:
            raise ShapeError(f"a row of hidden_states has {x.shape[1] * x.itemsize} bytes; pad it to a multiple of 16")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        _, starts, at = self.placed(inputs, options)
        k, valid = inputs["topk_ids"].shape[1], at >= 0
        places = at.clone()
        places[~valid] = starts[-1] + torch.arange(int((~valid).sum()), device=at.device)
        pairs = torch.argsort(places)
        outputs = {
            name: inputs[source][pairs // k]
            for name, source in (("permuted_hidden_states", "hidden_states"), ("a1q_scale", "a1q_scale"))
            if source in inputs
        }
        used = torch.arange(len(pairs), device=at.device) < starts[-1]
        return outputs | {
            "expert_first_token_offset": starts,
            "inv_permuted_idx": places.to(torch.int32),
            "permuted_idx": torch.where(used, pairs, len(pairs)).to(torch.int32),
        }

    def in_pairs(self, call: Call, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The order is that of pairs: places as they are, those of no expert as the first row behind all."""
        at, end = outputs[self.positions].flatten(), int(call.truth["expert_first_token_offset"][-1])
        ordered = super().in_pairs(call, outputs)
        used = local_ids(call.inputs).cpu() >= 0
        places = at.cpu().long()
        return ordered | {self.positions: torch.where(used, places, places.clamp(max=end))}


@register
class DeepGemmMoePermute(SortedRows):
    """Row ``inv_perm[t, j]`` of ``aq_out`` and ``aq_scale_out`` are those of token ``t``. Each expert's rows begin at a
    multiple of ``alignment``, in any order; ``expert_ids`` has the expert of each row in use and -1 elsewhere."""

    name = "deepgemm_moe_permute"
    summary = "rows of tokens and their scales sorted by expert, each expert from a multiple of 128 on"
    source = "vLLM 0.20.2 layers/fused_moe/deep_gemm_utils.py deepgemm_moe_permute"
    inputs = (
        TensorSpec("aq", Kind.CODES, ROWS, ("T", "H"), "rows of tokens"),
        TensorSpec("aq_scale", Kind.SCALES, F32, ("T", "S"), "scales of tokens"),
        IDS, MAP,
    )  # fmt: skip  # inputs that have a name
    options = (
        OptionSpec("local_num_experts", None, None, "experts of this rank"),
        OptionSpec("alignment", SCALE_TILE, None, "rows of which every first row is a multiple"),
    )
    returns = ("aq_out", "aq_scale_out", "expert_ids", "inv_perm")
    shapes: ClassVar[dict[str, str]] = {
        "aq_out": "[R, H], R = align(T k + E (alignment - 1), alignment), in the dtype of aq",
        "aq_scale_out": "[R, S], float32",
        "expert_ids": "[R], int32",
        "inv_perm": "[T, k], int32",
    }
    positions = "inv_perm"
    gathered = ("aq_out", "aq_scale_out")

    def experts(self, inputs: Inputs, options: Options) -> int:
        """Experts of this rank."""
        return positive(options, "local_num_experts")

    def alignment(self, options: Options) -> int:
        """As the option says."""
        return positive(options, "alignment")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        counts, starts, at = self.placed(inputs, options)
        k, step = inputs["topk_ids"].shape[1], self.alignment(options)
        rows = align(at.numel() + len(counts) * (step - 1), step)
        out = {"aq_out": inputs["aq"].new_zeros(rows, inputs["aq"].shape[1])}
        out["aq_scale_out"] = inputs["aq_scale"].new_zeros(rows, inputs["aq_scale"].shape[1])
        pairs = torch.nonzero(at >= 0).flatten()
        for name, source in (("aq_out", "aq"), ("aq_scale_out", "aq_scale")):
            bits_of(out[name])[at[pairs]] = bits_of(inputs[source])[pairs // k]
        owners = torch.full((rows,), -1, dtype=torch.int32, device=at.device)
        for expert, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=False)):
            owners[start : start + count] = expert
        return out | {"expert_ids": owners, "inv_perm": at.to(torch.int32).view_as(inputs["topk_ids"])}


@register
class MakeRoutingData(ExpertIntegers):
    """Pairs by their expert, those of one ascending: place ``i`` holds pair ``gather_indx[i]``, and ``scatter_indx`` is
    the place of each pair; -1 behind the last place, and for a pair without an expert. ``gate_scal`` has the weights at
    the places, rounded to bfloat16, and behind them that of the last pair; a pair without an expert weighs -1.
    ``expt_hist`` counts the pairs of each expert, of whole words of 32. A token names an expert once."""

    name = "make_routing_data"
    summary = "pairs of tokens and experts sorted by expert, both ways, as OpenAI's Triton kernels read them"
    source = "vLLM 0.20.2 fused_moe/experts/gpt_oss_triton_kernels_moe.py make_routing_data; triton_kernels 3.6"
    inputs = (IDS, TensorSpec("topk_weights", Kind.WEIGHTS, (*F32, torch.bfloat16), ("T", "k"), "weights of the pairs"))
    options: ClassVar[tuple[OptionSpec, ...]] = (
        OptionSpec("num_local_experts", None, None, "experts of this rank, up to 32767"),
    )
    returns = ("gate_scal", "expt_hist", "gather_indx", "scatter_indx")
    shapes: ClassVar[dict[str, str]] = {
        "gate_scal": "[T k], bfloat16",
        "expt_hist": "[32 ceil(E / 32)], int32",
        "gather_indx": "[T k], int32",
        "scatter_indx": "[T k], int32",
    }

    def refuse(self, inputs: Inputs, options: Options) -> None:
        check_ids(inputs, positive(options, "num_local_experts"), -1)
        ids = inputs["topk_ids"].sort(dim=1).values
        if bool(((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)).any()):
            raise InputError("topk_ids names an expert twice for one token; a bit for each is kept")

    @staticmethod
    def weights(inputs: Inputs) -> Tensor:
        """The weights of the pairs in their own order, bfloat16 ``[T k]``; -1 of one without an expert."""
        weights = rounded_to(decode(inputs["topk_weights"].flatten()), torch.bfloat16)
        return weights.masked_fill(inputs["topk_ids"].flatten() == -1, -1.0)

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        ids = inputs["topk_ids"].flatten().long()
        pairs = torch.nonzero(ids >= 0).flatten()
        gathered = torch.full_like(ids, -1)
        gathered[: len(pairs)] = pairs[torch.argsort(ids[pairs], stable=True)]
        scattered = torch.full_like(ids, -1)
        scattered[gathered[: len(pairs)]] = torch.arange(len(pairs), device=ids.device)
        words = 32 * ceil_div(positive(options, "num_local_experts"), 32)
        return {
            "gate_scal": self.weights(inputs)[gathered],
            "expt_hist": torch.bincount(ids[pairs], minlength=words).to(torch.int32),
            "gather_indx": gathered.to(torch.int32),
            "scatter_indx": scattered.to(torch.int32),
        }
