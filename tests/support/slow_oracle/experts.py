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


def _problems(counts: list[int], o: dict[str, object], swapped: bool) -> dict[str, Codes]:
    n, k, wide = int(str(o["n"])), int(str(o["k"])), 2 if o.get("is_gated", True) else 1
    one: list[int] = []
    two: list[int] = []
    for m in counts:
        one += [wide * n, m, k] if swapped else [m, wide * n, k]
        two += [k, m, n] if swapped else [m, k, n]
    return {"problem_sizes1": one, "problem_sizes2": two}


def _running(counts: list[int], step: int = 1) -> list[int]:
    """First rows of experts and the end, each a multiple of ``step``."""
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + -(-count // step) * step)
    return ends


def _own(i: Inputs, experts: int) -> list[list[int]]:
    """The pairs of each expert."""
    return [[pair for pair, e in enumerate(_experts(i)) if e == expert] for expert in range(experts)]


def cutlass_data(i: Inputs, o: dict[str, object]) -> dict[str, Codes]:
    """``get_cutlass_moe_mm_data``, the pairs of an expert ascending."""
    own, k, pairs = _own(i, int(str(o["num_experts"]))), i["topk_ids"].shape[1], len(i["topk_ids"].codes)
    rows = [pair for pairs_of in own for pair in pairs_of]
    counts, scales = [len(x) for x in own], bool(o["blockscale"])
    made: dict[str, Codes] = {
        "expert_offsets": _running(counts),
        **_problems(counts, o, not scales and pairs <= 64),
        "input_permutation": [pair // k for pair in rows] + [None] * (pairs - len(rows)),
        "output_permutation": [rows.index(p) if p in rows else len(rows) for p in range(pairs)],
    }
    return made | ({"blockscale_offsets": _running(counts, 128)} if scales else {})


def cutlass_w4a8_data(i: Inputs, o: dict[str, object]) -> dict[str, Codes]:
    """``get_cutlass_w4a8_moe_mm_data``."""
    counts = [len(x) for x in _own(i, int(str(o["num_experts"])))]
    return {"expert_offsets": _running(counts), **_problems(counts, o, True)}


def cutlass_batched_data(i: Inputs, o: dict[str, object]) -> dict[str, Codes]:
    """``get_cutlass_batched_moe_mm_data``."""
    counts, room = i["expert_num_tokens"].codes, int(str(o["padded_m"]))
    return {"expert_offsets": [e * room for e in range(len(counts))], **_problems(counts, o, len(counts) * room <= 64)}


def batches(i: Inputs, o: dict[str, object]) -> dict[str, Codes]:
    """``batched_moe_align_block_size``, place by place."""
    counts, room, block = i["expert_num_tokens"].codes, int(str(o["max_tokens_per_batch"])), int(str(o["block_size"]))
    none = len(counts) * room
    most = len(counts) * -(-room // block)
    places, owners, total = [none] * (most * block), [-1] * most, 0
    for expert, count in enumerate(counts):
        for row in range(count):
            places[total + row] = expert * room + row
        for place in range(total, total + count, block):
            owners[place // block] = expert
        total += -(-count // block) * block
    return {"sorted_ids": places, "expert_ids": owners, "num_tokens_post_pad": [total]}


def rounded_up(i: Inputs, o: dict[str, object]) -> dict[str, Codes]:
    """``expert_num_tokens_round_up_and_sum``."""
    return {"out": [_running(i["expert_num_tokens"].codes, int(str(o["alignment"])))[-1]]}


def _moved(i: Inputs, name: str, pairs: list[int | None]) -> Codes:
    """The rows of the tokens of pairs; None for none."""
    rows, k = i[name].code_rows(), i["topk_ids"].shape[1]
    return [code for pair in pairs for code in (rows[pair // k] if pair is not None else [None] * len(rows[0]))]


def permuted(i: Inputs, o: dict[str, object]) -> dict[str, Codes]:
    """``moe_permute``; the places of pairs of no expert, behind all, are any."""
    own = _own(i, int(str(o["n_local_expert"])))
    rows = [pair for pairs_of in own for pair in pairs_of]
    pairs = len(i["topk_ids"].codes)
    filled: list[int | None] = [*rows, *[None] * (pairs - len(rows))]
    made: dict[str, Codes] = {"permuted_hidden_states": _moved(i, "hidden_states", filled)}
    if "a1q_scale" in i:
        made["a1q_scale"] = _moved(i, "a1q_scale", filled)
    return made | {
        "expert_first_token_offset": _running([len(x) for x in own]),
        "inv_permuted_idx": [rows.index(p) if p in rows else None for p in range(pairs)],
        "permuted_idx": [pairs if p is None else p for p in filled],
    }


def deep_gemm_permuted(i: Inputs, o: dict[str, object]) -> dict[str, Codes]:
    """``deepgemm_moe_permute``, the pairs of an expert ascending."""
    experts, step = int(str(o["local_num_experts"])), int(str(o["alignment"]))
    own, pairs = _own(i, experts), len(i["topk_ids"].codes)
    room = -(-(pairs + experts * (step - 1)) // step) * step
    filled: list[int | None] = [None] * room
    owners = [-1] * room
    for expert, start in enumerate(_running([len(x) for x in own], step)[:-1]):
        for row, pair in enumerate(own[expert], start):
            filled[row], owners[row] = pair, expert
    at = [filled.index(p) if p in filled else None for p in range(pairs)]
    moved = {f"{name}_out": _moved(i, name, filled) for name in ("aq", "aq_scale")}
    return {**moved, "expert_ids": owners, "inv_perm": at}


ROUTINES = {
    "moe_align_block_size": blocks,
    "count_expert_num_tokens": counts,
    "get_cutlass_moe_mm_problem_sizes_from_expert_offsets": sizes,
    "trtllm_moe_pack_topk_ids_weights": packed,
    "get_cutlass_moe_mm_data": cutlass_data,
    "get_cutlass_w4a8_moe_mm_data": cutlass_w4a8_data,
    "get_cutlass_batched_moe_mm_data": cutlass_batched_data,
    "batched_moe_align_block_size": batches,
    "expert_num_tokens_round_up_and_sum": rounded_up,
    "moe_permute": permuted,
    "deepgemm_moe_permute": deep_gemm_permuted,
}
