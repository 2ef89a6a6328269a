"""Experts of MXFP8, MXFP4 and NVFP4 by pipeline: every row on the CPU is what its contract says, and bad calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels.errors import KernelError
from kernels.mx_moe import LAYERS, OWN
from kernels.platform import Machine, use_machine
from kernels.subjects import subjects
from oracle.routines import get, profiles
from oracle.routines.moe import block_layers
from oracle.truth.moe import Activation

CONTRACTS = {name: contract for name, contract in block_layers.CONTRACTS.items() if contract.dispatched}
with use_machine(Machine.described("cpu")):
    CPU = {s.contract: s for s in subjects() if s.contract in LAYERS}
SOME = "cutlass_fused_moe_mxfp8"


def test_the_rows_are_those_of_the_contracts() -> None:
    assert set(LAYERS) == {*OWN, *CONTRACTS} and set(CPU) == set(CONTRACTS)
    for name, contract in CONTRACTS.items():
        row, mine = LAYERS[name], contract.row
        assert (row.up_first, row.packed, row.rows == "nvfp4") == (mine.up_first, mine.packed, mine.leveled), name
        assert {way.upper() for way in row.combine} == {way.name for way in mine.ways}, name
        assert row.wide is (mine.steps.activation is Activation.NONE), name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CONTRACTS)
def test_right(name: str) -> None:
    """Of the last listed way, with biases, with gates and with a map where the row has them; another row is wrong."""
    listed = profiles.cases(name, "quick")
    asked = ("bias", "gates", "map", "combine")
    chosen = {next((key for key in asked if c.option(key)), ""): c for c in listed}
    for case in chosen.values():
        inputs, options = case.inputs(), case.call_options()
        out = CPU[name].run({key: x.clone() for key, x in inputs.items()}, options)
        verdict = get(name).judge(inputs, out, arch="cpu", numerics="ieee32.any", **options)
        assert bool(verdict), verdict.summary
        assert isinstance(out, Tensor)
        assert get(name).judge(inputs, out.roll(1, 1), arch="cpu", numerics=None, **options).status.is_failure


def arguments(name: str = SOME) -> dict[str, Any]:
    given = dict(profiles.cases(name, "quick")[0].inputs())
    scales = {key: kernels.swizzle_scale(given[key]) for key in ("w13_scale", "w2_scale")}
    return {**given, **scales, "layer": name}


def test_another_row_is_another_result() -> None:
    """The negative test: gate rows for up rows."""
    given = arguments()
    out = kernels.moe_block_experts(**given | {"layer": "mxfp8"})
    assert not torch.equal(out, kernels.moe_block_experts(**given, combine="stored"))
    inputs = profiles.cases(SOME, "quick")[0].inputs()
    assert get(SOME).judge(inputs, out, arch="cpu", numerics=None).status.is_failure


def test_longer_rows_give_the_bits() -> None:
    given = arguments("cutlass_moe_mxfp4")
    wide, stored = dict(given), profiles.cases("cutlass_moe_mxfp4", "quick")[0].inputs()
    for name in ("w13", "w2"):
        wide[name] = torch.nn.functional.pad(given[name], (0, 32))
        wide[f"{name}_scale"] = kernels.swizzle_scale(torch.nn.functional.pad(stored[f"{name}_scale"], (0, 2)))
    assert torch.equal(kernels.moe_block_experts(**wide), kernels.moe_block_experts(**given))


def test_no_tokens_and_other_dtypes() -> None:
    given = arguments("cutlass_moe_mxfp4") | {"layer": "mxfp4"}
    few = {key: given[key][:0] for key in ("x", "topk_ids", "topk_weights")}
    assert kernels.moe_block_experts(**given | few).shape == few["x"].shape
    for dtype in (torch.float16, torch.float32):
        assert kernels.moe_block_experts(**given | {"x": given["x"].to(dtype)}).dtype is dtype
    assert kernels.moe_block_experts(**given, out_dtype=torch.float32).dtype is torch.float32


ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer": "marlin"}, "marlin"),
        ({"combine": "running"}, "running"),
        ({"w13_scale": torch.zeros(3, 128, dtype=torch.uint8)}, "w13_scale"),
        ({"w13": torch.zeros(3, 127, 32, dtype=torch.uint8)}, "w13 is"),
        ({"w2": torch.zeros(3, 64, 16, dtype=torch.uint8)}, "w2 is"),
        ({"w2": torch.zeros(3, 64, 32)}, "w2"),
        ({"a1_gscale": ONES, "a2_gscale": ONES}, "a1_gscale is of layers in NVFP4"),
        ({"alpha1": torch.ones(2)}, "alpha1"),
        ({"b2": torch.ones(3, 63)}, "b2"),
        ({"gates": ONES}, "gates"),
        ({"topk_weights": torch.ones(4, 3)}, "topk_weights"),
        ({"x": torch.ones(4, 64).to("meta")}, "meta"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(KernelError, match=said):
        kernels.moe_block_experts(**arguments("cutlass_moe_mxfp4") | change)
