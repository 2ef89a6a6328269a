"""Cases of RMS norms to FP4: rows of every family, sums over experts and slots whose terms round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from oracle.routines import data
from oracle.routines.case import Case, Grammar, seeds
from oracle.routines.mx.contract import LAYOUTS, LINEAR

FAMILIES = ("randn", "fp4ties", "heavy", "special", "nan")
SHAPES = "m=1,k=64", "m=130,k=160", "m=17,k=192"
EXPERTS, ROUTED = "trtllm_moe_allreduce_fusion", "trtllm_moe_finalize_allreduce_fusion"
SCALE = 2688.0 / 16.0
"""A global scale of norms up to 16."""


def _inputs(case: Case) -> dict[str, Tensor]:
    (dtype,), m, k = case.operand_dtypes, case["m"], case["k"]

    def rows(name: str, count: int = m) -> Tensor:
        return data.activations(case.label(name), case.family, count, k, dtype=dtype)

    def normal(name: str, *shape: int) -> Tensor:
        return data.normal(case.label(name), shape, dtype=dtype)

    inputs = {"x": rows("x"), "weight": normal("weight", k)}
    if case.contract == ROUTED:
        inputs["x"] = rows("x", 2 * m)
        stream = case.stream("slots")
        inputs["slots"] = torch.from_numpy(stream.integers(-1, 2 * m, (m, 3))).to(torch.int32)
        if case.option("factors") != "none":
            held = dtype if case.option("factors") == "narrow" else torch.float32
            inputs["factors"] = data.normal(case.label("factors"), (m, 3), dtype=held)
        if case.option("shared") == "1":
            inputs["shared"] = normal("shared", m, k)
    if case.contract == EXPERTS:
        inputs["experts"] = rows("experts", 3 * m).reshape(3, m, k)
        inputs["factors"] = data.normal(case.label("factors"), (3, m), dtype=torch.float32)
    if not case.contract.startswith("rmsnorm"):
        inputs["residual"] = normal("residual", m, k)
    if case.granularity[0] == "1x16":
        value = {None: SCALE, "one": 1.0, "inf": torch.inf}[case.option("global")]
        inputs["global_scale"] = torch.tensor([value], dtype=torch.float32, device="cpu")
    if case.option("global") == "inf":  # 2688/0 of a tensor of zeros
        values = {"x", "residual", "experts", "shared"} & {*inputs}
        inputs |= {name: torch.zeros_like(inputs[name]) for name in values}
    return inputs


def _options(case: Case) -> dict[str, object]:
    default = LINEAR if "rmsnorm" in case.contract else LAYOUTS[0]
    chosen: dict[str, object] = {"epsilon": float(case.option("epsilon") or 1e-6)}
    chosen["layout"] = case.option("layout") or default
    if (bias := case.option("bias")) is not None:
        chosen["weight_bias"] = float(bias)
    if (factor := case.option("rsf")) is not None:
        chosen["routed_scaling_factor"] = float(factor)
    return chosen


def _listed(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    """Every shape; every family; every option; the other dtype."""
    dtype, scheme = grammar.dtypes[0], grammar.schemes[0]
    head = f"{contract}/{dtype}/{scheme}"
    for shape in SHAPES:
        yield f"{head}/{shape}/family=randn/seed=1"
    for family in grammar.families:
        for seed in seeds(profile):
            yield f"{head}/{SHAPES[-1]}/family={family}/seed={seed}"
    for key, values in grammar.options.items():
        for value in values:
            yield f"{head}/{SHAPES[-1]}/{key}={value}/family=randn/seed=1"
    for family in grammar.families:
        yield f"{contract}/{grammar.dtypes[1]}/{scheme}/{SHAPES[-1]}/family={family}/seed=1"


_EPSILON, _BIAS, _ONE = {"epsilon": ("1e-5",)}, {"bias": ("1",)}, {"global": ("one", "inf")}
_SUMS = {"layout": ("8x4", "linear"), **_EPSILON, **_BIAS, **_ONE}
GRAMMARS: Mapping[str, Grammar] = {
    name: Grammar(
        ("m", "k"), ("bf16", "f16"), (scheme,), FAMILIES, _inputs, _options, options, listed=_listed,
        domain="k % 32 == 0",
    )
    for name, scheme, options in (
        ("rmsnorm_fp4quant", "1x16", {"layout": ("128x4",), **_EPSILON, **_ONE}),
        ("add_rmsnorm_fp4quant", "1x16", {"layout": ("128x4",), **_EPSILON, **_ONE}),
        ("rmsnorm_mxfp4quant", "1x32", {"layout": ("128x4",), **_EPSILON}),
        ("add_rmsnorm_mxfp4quant", "1x32", {"layout": ("128x4",), **_EPSILON}),
        ("allreduce_fusion_fp4", "1x16", _SUMS),
        (EXPERTS, "1x16", _SUMS),
        (ROUTED, "1x16", {**_SUMS, "factors": ("none", "narrow"), "shared": ("1",), "rsf": ("2.5",)}),
    )
}  # fmt: skip  # a table, one row a line
