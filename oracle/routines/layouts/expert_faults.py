"""Faults of the integers of a layer of experts: counts, blocks, maps and sizes that are another's.

The right kernel is the reference; a fault changes what it reads (READ), its options (OPTIONS) or its output (WRITE).

Source: the threads that each declaration names (``seen``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.numbers.formats import decode
from oracle.routines.base import Call
from oracle.routines.fault import CAST, INDEX, VALUE, Faults, entry, need, way
from oracle.routines.ideas import OfTensor, first_for_all, itself, option, rolled
from oracle.routines.layouts import expert_rows, experts
from oracle.routines.traits import of_class, returns, takes
from oracle.truth.layout import align, ceil_div
from oracle.verdict.sets import bits_of

Outputs = dict[str, Tensor]
MINE = "no public thread: "
PLACED = of_class(experts.ExpertIntegers)
BLOCKS, SIZES, PACKED = of_class(experts.MoeAlignBlockSize), of_class(experts.ProblemSizes), of_class(experts.PackTopk)
FAULTS = Faults(PLACED)
fault = FAULTS.declare
EQUAL = "it changes nothing"
mapped = need(lambda call: "expert_map" in call.inputs, "there is no map")

fault(
    "integers of experts: {}",
    INDEX,
    on=PLACED & takes("expert_map"),
    needs=mapped,
    over=(
        way("map of experts off by one", rolled(1), seen="flashinfer 3547"),
        way("experts of other ranks taken for the first one", lambda known: known.clamp(min=0), seen="vllm 42118"),
    ),
    read=lambda change: entry("expert_map", lambda known: change(known)),
    same_if=EQUAL,
)
fault(
    "integers of experts: {}",
    INDEX,
    on=BLOCKS,
    over=(
        way("blocks named by the next expert", ("expert_ids", rolled(-1)), seen=MINE + "a block too far"),
        way(
            "padding holds the first pair",
            ("sorted_token_ids", lambda ids: ids % ids.max().clamp(min=1)),
            seen=MINE + "an index kept in range",
        ),
        way("one block more counted", ("num_tokens_post_pad", lambda n: n + 1), seen=MINE + "an inclusive sum"),
        way("tokens in place of pairs", ("sorted_token_ids", lambda ids: ids // 2), seen=MINE + "the slot dropped"),
    ),
    write=lambda change: entry(change[0], lambda x: change[1](x)),
    same_if=EQUAL,
)
fault(
    "integers of experts: blocks of twice the size",
    VALUE,
    seen=MINE + "the block of another kernel",
    on=BLOCKS,
    write=lambda call, outputs: (
        outputs | {"num_tokens_post_pad": _doubled(call.truth["num_tokens_post_pad"], int(call.resolved["block_size"]))}
    ),
    same_if="they hold as many",
)


def _doubled(total: Tensor, block: int) -> Tensor:
    """Places ``[1]``, int32, in blocks of twice the size ``block``."""
    return total.new_tensor([ceil_div(int(total), 2 * block) * 2 * block])


fault(
    "integers of experts: {}",
    VALUE,
    on=of_class(experts.CountExpertNumTokens),
    over=(
        way("running sums for counts", lambda n: n.cumsum(0).to(n.dtype), seen=MINE + "offsets for counts"),
        way("counts of the next expert", rolled(-1), seen="flashinfer 3547", family=INDEX),
        way("counts of 8 bits", lambda n: n % 256, seen=MINE + "a narrow counter"),
    ),
    write=lambda change: entry("out", lambda x: change(x)),
    same_if=EQUAL,
)
fault(
    "integers of experts: {}",
    INDEX,
    on=SIZES,
    over=(
        way("sizes of the other product", lambda one, two: (two, one), seen=MINE + "two buffers exchanged"),
        way(
            "the weight as the other operand",
            lambda *both: [x[:, [1, 0, 2]] for x in both],
            seen=MINE + "operands exchanged twice",
        ),
        way("rows of the next expert", lambda *both: [x.roll(-1, 0) for x in both], seen="flashinfer 3547"),
    ),
    write=lambda change: (
        lambda call, outputs: dict(zip(outputs, (x.contiguous() for x in change(*outputs.values())), strict=True))
    ),
    same_if=EQUAL,
)
fault(
    "integers of experts: gate and up counted once",
    VALUE,
    seen=MINE + "the size of an ungated layer",
    on=SIZES & returns("problem_sizes1"),
    write=entry(
        "problem_sizes1",
        lambda call, x: torch.where(x == 2 * int(call.resolved["n"]), int(call.resolved["n"]), x),
    ),
)


def _packed(ids: Tensor, low: Tensor) -> Tensor:
    return ids.to(torch.int32) * (1 << 16) + low.to(torch.int32)


fault(
    "integers of experts: {}",
    CAST,
    on=PACKED,
    over=(
        way("weight cut to bfloat16", lambda i, w: _packed(i, decode(w).to(torch.float32).view(torch.int32) >> 16),
            seen=MINE + "the high half of float32"),
        way("weight in float16", lambda i, w: _packed(i, decode(w).to(torch.float16).view(torch.int16)),
            seen=MINE + "the other half format"),
        way("expert below the weight", lambda i, w: i.to(torch.int32) + (1 << 16) * (
            decode(w).to(torch.bfloat16).view(torch.int16).to(torch.int32)), seen=MINE + "halves exchanged"),
    ),
    write=lambda change: entry(
        "out", lambda call, out: change(call.inputs["topk_ids"], call.inputs["topk_weights"]).to(out.dtype)
    ),
    same_if=EQUAL,
)  # fmt: skip  # a table, one row a line
fault(
    "integers of experts: weight of the next slot",
    INDEX,
    seen="flashinfer 3547",
    on=PACKED,
    read=entry("topk_weights", rolled(-1, 1)),
    same_if="a token has one slot",
)

# --- rows sorted by expert ----------------------------------------------------------------------------------

SORTED = of_class(expert_rows.SortedRows)
DATA = PLACED & returns("problem_sizes1") - SIZES


def _sorted(call: Call) -> expert_rows.SortedRows:
    assert isinstance(call.contract, expert_rows.SortedRows)
    return call.contract


def _changed(call: Call, outputs: Outputs, names: tuple[str, ...], change: OfTensor) -> Outputs:
    """Some outputs changed, those that are there."""
    return outputs | {name: change(outputs[name]) for name in names if name in outputs}


def _fitted(call: Call, outputs: Outputs) -> Outputs:
    """Outputs of rows without padding, in memory of the size of those that have it."""
    due = call.truth
    for name in ("aq_out", "aq_scale_out", "expert_ids"):
        rows = torch.zeros_like(bits_of(due[name]))
        rows[: len(outputs[name])] = bits_of(outputs[name])[: len(rows)]
        outputs = outputs | {name: rows.view(due[name].dtype)}
    return outputs


several = need(lambda call: call.inputs["topk_ids"].numel() > 1, "there is one pair")
fault(
    "integers of experts: {}",
    INDEX,
    on=DATA,
    over=(
        way("operands not exchanged, or exchanged", lambda x: x[:, [1, 0, 2]].contiguous(), seen="vllm PR 20762"),
        way("rows of the next expert in its product", rolled(-1), seen="flashinfer 3547"),
        way("gate and up counted twice", lambda x: torch.where(x == 96, 192, x), seen=MINE + "two sizes of w13",
            same_if="there is no gate"),
    ),
    write=lambda change: entry("problem_sizes1", lambda x: change(x)),
    same_if=EQUAL,
)  # fmt: skip  # a table, one row a line
fault(
    "integers of experts: sizes of the first product for the second",
    INDEX,
    seen=MINE + "two buffers exchanged",
    on=DATA,
    write=lambda call, outputs: outputs | {"problem_sizes2": outputs["problem_sizes1"].clone()},
)
fault(
    "integers of experts: {}",
    VALUE,
    on=PLACED & returns("expert_offsets"),
    over=(
        way("ends for starts", rolled(-1), seen=MINE + "an inclusive sum", family=INDEX),
        way("offsets of the rows before in bytes", lambda x: x * 2, seen=MINE + "a unit mistaken"),
    ),
    write=lambda change: entry("expert_offsets", lambda x: change(x)),
    same_if=EQUAL,
)
fault(
    "integers of experts: scales placed as close as rows",
    INDEX,
    seen="vllm 42118",
    on=of_class(expert_rows.CutlassMoeData),
    write=lambda call, outputs: (
        outputs | {"blockscale_offsets": outputs["expert_offsets"].clone()}
        if "blockscale_offsets" in outputs
        else outputs
    ),
    needs=need(lambda call: call.resolved["blockscale"], "there are no scales"),
    same_if=EQUAL,
)


fault(
    "integers of experts: {}",
    INDEX,
    on=SORTED,
    over=(
        way("places of the next pair", lambda x: x.flatten().roll(-1).view(x.shape), seen="flashinfer 3547",
            needs=several),
        way("places from the last row down", lambda x: (x.max() - x).to(x.dtype), seen=MINE + "a descending sort"),
        way("every place the first", lambda x: torch.zeros_like(x), seen=MINE + "no counter of an expert"),
    ),
    write=lambda change: lambda call, outputs: _changed(call, outputs, (_sorted(call).positions,), change),
    same_if=EQUAL,
)  # fmt: skip  # a table, one row a line
fault(
    "integers of experts: {}",
    INDEX,
    on=SORTED,
    over=(
        way("what lies at a place is the next row's", rolled(-1), seen="vllm 48895"),
        way("what lies at a place is the first row's", first_for_all(), seen=MINE + "a stride of 0"),
    ),
    write=lambda change: lambda call, outputs: _changed(call, outputs, _sorted(call).gathered, change),
    same_if=EQUAL,
)
fault(
    "integers of experts: scales not moved with their rows",
    INDEX,
    seen="vllm 42118",
    on=SORTED & (takes("a1q_scale") | takes("aq_scale")),
    write=lambda call, outputs: _changed(call, outputs, ("a1q_scale", "aq_scale_out"), rolled(1)),
    needs=need(lambda call: "a1q_scale" in call.inputs or "aq_scale" in call.inputs, "there are no scales"),
    same_if=EQUAL,
)
fault(
    "integers of experts: {}",
    VALUE,
    on=of_class(expert_rows.MoePermute),
    over=(
        way("tokens for pairs", lambda call, x: x // call.inputs["topk_ids"].shape[1], seen=MINE + "the slot dropped",
            same_if="a token has one slot"),
        way("pairs of no expert listed", lambda call, x: torch.arange(len(x), dtype=x.dtype, device=x.device),
            seen="vllm 42118"),
    ),
    write=lambda change: entry("permuted_idx", change),
    same_if=EQUAL,
)  # fmt: skip  # a table, one row a line
fault(
    "integers of experts: first rows that are counts",
    VALUE,
    seen=MINE + "a sum left out",
    on=of_class(expert_rows.MoePermute),
    write=entry("expert_first_token_offset", lambda x: torch.cat([x[:1], x.diff()])),
    same_if=EQUAL,
)
fault(
    "integers of experts: experts without padding between them",
    INDEX,
    seen="deep_gemm PR 20: rows of a tile with two experts",
    on=of_class(expert_rows.DeepGemmMoePermute),
    options=option(alignment=1),
    write=lambda call, outputs: _fitted(call, outputs),
    same_if="every expert has whole tiles, or one has rows",
)
fault(
    "integers of experts: {}",
    VALUE,
    on=of_class(expert_rows.DeepGemmMoePermute),
    over=(
        way("padding named by its expert", lambda x: torch.cummax(x, 0).values, seen="deep_gemm PR 192",
            same_if="there is no padding behind a row"),
        way("rows named by the next expert", rolled(-1), seen=MINE + "a row too far", family=INDEX),
    ),
    write=lambda change: entry("expert_ids", lambda x: change(x)),
    same_if=EQUAL,
)  # fmt: skip  # a table, one row a line
fault(
    "integers of experts: {}",
    INDEX,
    on=of_class(expert_rows.BatchedMoeAlign),
    over=(
        way("rows counted through", ("sorted_ids", lambda x: torch.where(
            x < x.max(), torch.cumsum(x < x.max(), 0).to(x.dtype) - 1, x)), seen=MINE + "batches taken as packed"),
        way("padding names row 0", ("sorted_ids", lambda x: x % x.max()), seen=MINE + "an index kept in range"),
        way("blocks behind the last named 0", ("expert_ids", lambda x: x.clamp(min=0)), seen=MINE + "zeros for -1"),
        way("one place more counted", ("num_tokens_post_pad", lambda x: x + 1), seen=MINE + "an inclusive sum"),
    ),
    write=lambda change: entry(change[0], lambda x: change[1](x)),
    same_if=EQUAL,
)  # fmt: skip  # a table, one row a line
fault(
    "integers of experts: {}",
    VALUE,
    on=of_class(expert_rows.RoundedUpSum),
    over=(
        way("the sum rounded up once", lambda call, x: x.new_tensor([align(
            int(call.inputs["expert_num_tokens"].sum()), int(call.resolved["alignment"]))]), seen=MINE + "once"),
        way("one tile more for each expert", lambda call, x: x + int(call.resolved["alignment"]),
            seen=MINE + "a quotient plus one"),
    ),
    write=lambda change: entry("out", change),
    same_if=EQUAL,
)  # fmt: skip  # a table, one row a line


def _descending(call: Call, outputs: Outputs) -> Outputs:
    """Pairs of one expert from the last to the first."""
    ids = call.inputs["topk_ids"].flatten().long()
    pairs = torch.nonzero(ids >= 0).flatten().flip(0)
    gathered = outputs["gather_indx"].clone()
    gathered[: len(pairs)] = pairs[torch.argsort(ids[pairs], stable=True)].to(torch.int32)
    return outputs | {"gather_indx": gathered}


def _of_kept(call: Call, outputs: Outputs) -> Outputs:
    """Pairs numbered without those that have no expert."""
    number = (call.inputs["topk_ids"].flatten() >= 0).cumsum(0) - 1
    gathered = outputs["gather_indx"].long()
    return outputs | {"gather_indx": torch.where(gathered >= 0, number[gathered], -1).to(torch.int32)}


fault(
    "integers of experts: {}",
    INDEX,
    on=of_class(expert_rows.MakeRoutingData),
    over=(
        way("weights of the pairs in their own order",
            entry("gate_scal", lambda call, _: expert_rows.MakeRoutingData.weights(call.inputs)),
            seen=MINE + "the permutation forgotten"),
        way("pairs of one expert in descending order", _descending, seen=MINE + "a sort that is not stable"),
        way("pairs numbered without those of no expert", _of_kept,
            seen="triton_kernels 3.6 make_bitmatrix_metadata_torch: argsort of the filtered ids"),
        way("places and pairs exchanged", lambda call, out: out | {"gather_indx": out["scatter_indx"],
            "scatter_indx": out["gather_indx"]}, seen=MINE + "source for destination"),
        way("pairs of no expert counted for the first", lambda call, out: out | {"expt_hist": torch.bincount(
            call.inputs["topk_ids"].flatten().long().clamp(min=0), minlength=len(out["expt_hist"])).to(torch.int32)},
            seen="vllm gpt_oss_triton_kernels_moe.py: valid = indices >= 0"),
    ),
    write=itself,
    same_if=EQUAL,
)  # fmt: skip  # a table, one row a line
