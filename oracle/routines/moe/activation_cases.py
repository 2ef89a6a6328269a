"""Cases of the activations of :mod:`oracle.routines.moe.activations`: one grammar, whose options are those of the row.

``heavy`` data reach a limit of 7; ``special`` and ``nan`` have infinities and NaN. Where rows belong to experts, some
ids are -1, and ``map=1`` sends every other expert to another rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from oracle.routines import data
from oracle.routines.case import Case, Grammar, seeds
from oracle.routines.moe.activations import CONTRACTS, Row

VALUES: Mapping[str, tuple[str, ...]] = {
    "limit": ("0.5", "7.03"),  # 7.03 is no value of bfloat16 or float16
    "alpha": ("1.702", "0.5"),
    "beta": ("1", "-0.3"),
    "linear": ("0", "1.5", "-1.5"),
}
"""Of each parameter values beside the default."""
FAMILIES = ("randn", "heavy", "ties", "special", "nan", "outlier")


def _inputs(case: Case) -> dict[str, Tensor]:
    row, (dtype,), m = CONTRACTS[case.contract].row, case.operand_dtypes, case["m"]
    width = case["i"] * (2 if row.formula.gated else 1)
    inputs = {"x": data.activations(case.label("x"), case.family, m, width, dtype=dtype)}
    if case.family == "randn" and row.options:
        inputs["x"] = inputs["x"] * 4  # a limit is reached, and is not
    if not row.rows:
        return inputs
    experts = 300 if case.option("ids") == "many" else 6
    drawn = torch.from_numpy(case.stream("topk_ids").integers(-1, experts, (m,)))
    drawn[0] = 1  # the map keeps it
    inputs["topk_ids"] = drawn.to(torch.int32)
    if case.option("map") == "1":
        place = torch.arange(experts, dtype=torch.int32, device="cpu")
        inputs["expert_map"] = torch.where(place % 2 == 1, place // 2, -1)
    return inputs


def _call(case: Case) -> dict[str, object]:
    options = CONTRACTS[case.contract].row.options
    return {name: float(value) for name in options if (value := case.option(name)) is not None}


def _listed(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    """The first dtype on every family, each option on ordinary and heavy data; the others on what rounds hardest."""
    head, shape = f"{contract}/{grammar.dtypes[0]}/-", "m=9,i=40"
    single = [f"{name}={value}/" for name, values in grammar.options.items() for value in values]
    for seed in seeds(profile):
        yield from (f"{head}/{shape}/family={family}/seed={seed}" for family in grammar.families)
        yield from (
            f"{head}/{shape}/{option}family={family}/seed={seed}" for option in single for family in ("randn", "heavy")
        )
    for dtypes in grammar.dtypes[1:]:
        yield from (f"{contract}/{dtypes}/-/{shape}/family={family}/seed=1" for family in ("randn", "heavy", "special"))
        yield from (f"{contract}/{dtypes}/-/{shape}/{option}family=randn/seed=1" for option in single)
    yield from (f"{head}/{other}/family=randn/seed=1" for other in ("m=1,i=1", "m=3,i=1000"))


def _grammar(row: Row) -> Grammar:
    words = {name: VALUES[of] for name, (of, _) in row.options.items()}
    words |= {"map": ("1",), "ids": ("many",)} if row.rows else {}
    return Grammar(("m", "i"), ("bf16", "f16", "f32"), ("-",), FAMILIES, _inputs, _call, words, listed=_listed)


GRAMMARS = {name: _grammar(contract.row) for name, contract in CONTRACTS.items()}
