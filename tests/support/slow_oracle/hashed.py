"""Weights of experts that a table names, in decimal numbers of fifty digits."""

from __future__ import annotations

from decimal import Decimal, localcontext
from fractions import Fraction

from tests.support.slow_oracle.numbers import Array, encode

F32 = "float32"


def weights(i: dict[str, Array], o: dict[str, object]) -> dict[str, list[int]]:
    """Ids of the table and roots of softplus over their sum; a shared expert behind them."""
    logits, table = i["logits"].rows(), i["tid2eid"].code_rows()
    shared, ids, found = bool(o.get("num_fused_shared_experts")), list[int](), list[int]()
    with localcontext() as context:
        context.prec = 50
        for row, token in zip(logits, i["input_ids"].codes, strict=True):
            experts = table[token]
            numbers = [row[e] for e in experts]
            assert all(isinstance(x, Fraction) for x in numbers)
            exact = [Decimal(x.numerator) / Decimal(x.denominator) for x in numbers if isinstance(x, Fraction)]
            scores = [(1 + x.exp()).ln().sqrt() for x in exact]
            found += [encode(Fraction(s / sum(scores)), F32) for s in scores]
            ids += experts
            if shared:
                ids.append(len(row))
                found.append(encode(1 / Fraction(float(str(o["routed_scaling_factor"]))), F32))
    return {"topk_weights": found, "topk_ids": ids}
