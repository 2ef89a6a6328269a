"""Faults of the integers of a layer of experts: counts, blocks, maps and sizes that are another's.

The right kernel is the reference; a fault changes what it reads (READ), its options (OPTIONS) or its output (WRITE).

Source: the threads that each declaration names (``seen``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.numbers.formats import decode
from oracle.routines.fault import CAST, INDEX, VALUE, Faults, entry, need, way
from oracle.routines.ideas import rolled
from oracle.routines.layouts import experts
from oracle.routines.traits import of_class, returns, takes
from oracle.truth.layout import ceil_div

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
            ("sorted_token_ids", lambda ids: ids % ids.max()),
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
