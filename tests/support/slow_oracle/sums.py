"""Sums over the slots of a token, in fractions, rounded once."""

from __future__ import annotations

from fractions import Fraction

from tests.support.slow_oracle.numbers import Array, Value, add, encode, multiply

Inputs = dict[str, Array]
Options = dict[str, object]


def _out(terms: list[list[Value]], dtype: str) -> list[int]:
    """Codes of the sums of columns of ``terms``, one list a slot."""
    sums = []
    for column in zip(*terms, strict=True):
        total: Value = Fraction(0)
        for term in column:
            total = add(total, term)
        sums.append(encode(total, dtype))
    return sums


def _tokens(x: Array, slots: int) -> list[list[list[Value]]]:
    """Rows by token and slot."""
    width = x.shape[-1]
    values = x.values()
    rows = [values[at : at + width] for at in range(0, len(values), width)]
    return [rows[at : at + slots] for at in range(0, len(rows), slots)]


def plain(i: Inputs, o: Options) -> list[int]:
    """``moe_sum``, ``moe_sum_reduce``."""
    factor = Array("float32", (1,), [encode(Fraction(float(str(o.get("routed_scaling_factor", 1.0)))), "float32")])
    scale = factor.values()[0]
    out: list[int] = []
    for rows in _tokens(i["x"], i["x"].shape[1]):
        out += _out([[multiply(scale, v) for v in row] for row in rows], i["x"].dtype)
    return out


def weighted(i: Inputs, o: Options) -> list[int]:
    """``moe_fused_mul_sum``."""
    x, k = i["x"], i["x"].shape[1]
    out: list[int] = []
    for t, (rows, weights) in enumerate(zip(_tokens(x, k), i["topk_weights"].rows(), strict=True)):
        terms = [[Fraction(0)] * x.shape[2]]
        for j, (row, w) in enumerate(zip(rows, weights, strict=True)):
            if "expert_map" not in i or i["expert_map"].codes[i["topk_ids"].codes[t * k + j]] >= 0:
                terms.append([multiply(w, v) for v in row])  # type: ignore[misc]
        out += _out(terms, x.dtype)  # type: ignore[arg-type]
    return out


def unpermuted(i: Inputs, o: Options) -> list[int]:
    """``moe_unpermute``."""
    x, k = i["x"], i["topk_weights"].shape[1]
    rows, end = x.rows(), i["expert_first_token_offset"].codes[-1] if "expert_first_token_offset" in i else x.shape[0]
    out: list[int] = []
    for t, weights in enumerate(i["topk_weights"].rows()):
        terms = [[Fraction(0)] * x.shape[1]]
        for j, w in enumerate(weights):
            at = i["inv_permuted_idx"].codes[t * k + j]
            if at < end:
                terms.append([multiply(w, v) for v in rows[at]])  # type: ignore[misc]
        out += _out(terms, x.dtype)  # type: ignore[arg-type]
    return out


def identity(i: Inputs, o: Options) -> list[int]:
    """``zero_experts_compute_triton``."""
    x, k, first = i["hidden_states"], i["expert_indices"].shape[1], int(str(o["num_experts"]))
    out: list[int] = []
    for t, (row, weights) in enumerate(zip(x.rows(), i["expert_scales"].rows(), strict=True)):
        terms = [[Fraction(0)] * len(row)]
        for j, w in enumerate(weights):
            if i["expert_indices"].codes[t * k + j] >= first:
                terms.append([multiply(w, v) for v in row])  # type: ignore[misc]
        out += _out(terms, x.dtype)  # type: ignore[arg-type]
    return out


ROUTINES = {
    "moe_sum": plain,
    "moe_sum_reduce": plain,
    "moe_fused_mul_sum": weighted,
    "moe_unpermute": unpermuted,
    "zero_experts_compute_triton": identity,
}
