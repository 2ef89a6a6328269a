"""Quantisers of libraries on machines with Blackwell's instructions: allowed by a switch, called, judged, mutated.

The fakes quantise by the recipes that the oracle has of the libraries (:mod:`tests.support.fake_blackwell`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import kernels
import oracle
from kernels.config import Config
from kernels.plan import considered
from kernels.platform import Machine
from kernels.records import Problem
from kernels.verbs import SERVED
from oracle.errors import OracleError
from oracle.routines import cases
from oracle.verdict.compare import Status
from tests.support.fake_blackwell import LibraryError, SfLayout, simulated

ALLOWED = Config(library_quantisers=True)


class Row(NamedTuple):
    """A call, a machine, what is missing there, and the backend that serves it."""

    case: str
    arch: str
    backend: str
    without: tuple[str, ...] = ()


NV, MX8, MX4 = "nvfp4_quantize/bf16/1x16", "mxfp8_quantize/bf16-e4m3/1x32", "mxfp4_quantize/f16/1x32"
ROWS = (
    *(Row(f"{NV}/m=130,k=96{layout}", arch, "flashinfer_quant")
      for arch, layout in (("sm100", ""), ("sm103", "/layout=8x4"), ("sm120", "/layout=linear"), ("sm121", ""))),
    *(Row(f"{NV}/m=130,k=96{layout}", arch, "cutlass", ("flashinfer",))
      for arch, layout in (("sm100", ""), ("sm120", "/layout=linear"))),
    *(Row(f"{MX8}/m=130,k=96{layout}", arch, "flashinfer_quant")
      for arch, layout in (("sm100", ""), ("sm103", "/layout=linear"), ("sm120", "/layout=8x4"))),
    *(Row(f"{MX4}/m=5,k=160{layout}", arch, "flashinfer_quant")
      for arch, layout in (("sm100", ""), ("sm121", "/layout=linear"))),
    Row("scaled_fp4_quant/bf16/1x16/m=5,k=96", "sm103", "cutlass", ("flashinfer",)),
)  # fmt: skip  # a table, one row a line


def changes(arguments: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every argument of a call, changed: its name, and what is passed instead."""
    for name, value in arguments.items():
        if name in ("input", "a"):
            for x in (value.roll(1, 0), value.roll(16, 1), -value, value.mT, value.float()):
                yield name, {name: x}
        elif name in ("a_global_sf", "input_scale"):
            yield name, {name: value * 2}
            yield name, {name: 1 / value}
        elif isinstance(value, SfLayout):
            yield from ((name, {name: other}) for other in SfLayout if other is not value)
        elif isinstance(value, bool) and (name != "is_sf_swizzled_layout" or "output" in arguments):
            yield name, {name: not value}
        elif name in ("alignment", "sf_vec_size"):
            yield name, {name: value + 16}
            yield name, {name: 128}
        elif name == "backend":
            yield name, {name: "cute-dsl"}
        elif name == "nvfp4_4over6":
            yield name, {name: "of the environment"}
        elif name == "output_scale":
            yield name, {name: torch.empty(value.shape[0] + 1, *value.shape[1:], dtype=value.dtype)}
        elif name == "output":
            yield name, {name: value.mT}


FREE = {"enable_pdl", "expanded_idx_to_permuted_idx", "out_scale", "is_sf_swizzled_layout"}
"""When a kernel starts; what other forms take; a flag beside the layout itself."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.arch}-{row.backend}-{row.case.split('/')[0]}")
def test_right_by_the_formula_of_the_library(row: Row) -> None:
    """Admissible by the contract, padding of zeros included; and no argument can be another one."""
    case = cases.parse(f"{row.case}/family=randn/seed=3")
    inputs, options = case.inputs(), dict(case.call_options())
    machine = Machine.described(row.arch)
    for name in row.without:
        machine = machine.with_package(name, f"package {name} is not installed")
    with simulated(machine, ALLOWED) as libraries, kernels.explain() as plans:
        out = SERVED[case.contract](inputs, options)
    (call,), (plan,) = libraries.calls, plans
    assert plan.backend == row.backend and call.name in plan.kernel
    assert isinstance(out, dict)

    def status(made: dict[str, Tensor]) -> Status:
        return oracle.judge(case.contract, inputs, made, arch=row.arch, explain="off", **options).status

    assert status(out) is Status.PASSED
    changed = set()
    for name, instead in changes(call.arguments):
        changed.add(name)
        arguments = {**call.arguments, **instead}
        if "output" in arguments:
            for written in {"output", "output_scale"} - set(instead):
                arguments[written] = torch.zeros_like(arguments[written])
        try:
            made = call.routine(**arguments)
        except (LibraryError, OracleError, RuntimeError):  # refused: by the fake, the oracle, or torch on its shapes
            continue
        q, scale = (arguments["output"], arguments["output_scale"]) if made is None else made
        memory = scale.view(torch.uint8).reshape(-1)
        if memory.numel() != out["scale"].numel() or q.shape != out["q"].shape:
            continue
        assert status({"q": q, "scale": memory.view(out["scale"].shape)}) is Status.FAILED, (name, instead)
    assert set(call.arguments) - changed - FREE == set()


@pytest.mark.parametrize("op", ["quant_mxfp8", "quant_mxfp4", "quant_nvfp4"])
def test_one_step_outside_is_refused(op: str) -> None:
    """Float32 is no input of a library; a switch that is off leaves plain torch; below sm100 the kernels are empty."""
    problem = Problem(op, k=96, tiles="128x4", a_dtype="bfloat16", recipe="usual")
    machine = Machine.described("sm100")
    for name in ("flashinfer_quant", "cutlass") if op == "quant_nvfp4" else ("flashinfer_quant",):
        assert considered(problem, machine, ALLOWED)[name] is None
        for field, value in (("a_dtype", "float32"), ("recipe", "other")):
            assert considered(dataclasses.replace(problem, **{field: value}), machine, ALLOWED)[name] is not None
        assert considered(problem, machine, Config())[name] is not None
        assert considered(problem, Machine.described("sm90"), ALLOWED)[name] is not None
