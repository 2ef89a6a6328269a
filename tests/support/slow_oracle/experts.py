"""Integers of a layer of experts, by loops over pairs of token and slot."""

from __future__ import annotations

from tests.support.slow_oracle.numbers import Array, encode

Inputs = dict[str, Array]
Codes = list[int] | list[int | None]


def _experts(i: Inputs) -> list[int]:
    known = i["expert_map"].codes if "expert_map" in i else None
    return [e if e < 0 or known is None else known[e] for e in i["topk_ids"].codes]


def blocks(i: Inputs, o: dict[str, object]) -> dict[str, Codes]:
    """``moe_align_block_size``: pairs of an expert ascending; None behind the last block."""
    count, size = int(str(o["num_experts"])), int(str(o["block_size"]))
    found = _experts(i)
    rows: list[int | None] = []
    owners: list[int | None] = []
    for expert in range(count):
        own = [pair for pair, e in enumerate(found) if e == expert]
        while len(own) % size:
            own.append(len(found))
        rows += own
        owners += [expert] * (len(own) // size)
    total = len(rows)
    room = len(found) + count * (size - 1)
    if len(found) < count:
        room = min(room, len(found) * size)
    rows += [None] * (room - total)
    owners += [None] * (-(-room // size) - len(owners))
    return {"sorted_token_ids": rows, "expert_ids": owners, "num_tokens_post_pad": [total]}


def counts(i: Inputs, o: dict[str, object]) -> dict[str, Codes]:
    """``count_expert_num_tokens``."""
    found = _experts(i)
    return {"out": [found.count(e) for e in range(int(str(o["num_local_experts"])))]}


def sizes(i: Inputs, o: dict[str, object]) -> dict[str, Codes]:
    """``get_cutlass_moe_mm_problem_sizes_from_expert_offsets``."""
    n, k, ends = int(str(o["n"])), int(str(o["k"])), i["expert_first_token_offset"].codes
    one: list[int] = []
    two: list[int] = []
    for begin, end in zip(ends, ends[1:], strict=False):
        m = end - begin
        one += [2 * n, m, k] if o["swap_ab"] else [m, 2 * n, k]
        two += [k, m, n] if o["swap_ab"] else [m, k, n]
    return {"problem_sizes1": one, "problem_sizes2": two}


def packed(i: Inputs, o: dict[str, object]) -> dict[str, Codes]:
    """``trtllm_moe_pack_topk_ids_weights``."""
    weights = [encode(w, "bfloat16") for w in i["topk_weights"].values()]
    return {"out": [e << 16 | w for e, w in zip(i["topk_ids"].codes, weights, strict=True)]}


ROUTINES = {
    "moe_align_block_size": blocks,
    "count_expert_num_tokens": counts,
    "get_cutlass_moe_mm_problem_sizes_from_expert_offsets": sizes,
    "trtllm_moe_pack_topk_ids_weights": packed,
}
