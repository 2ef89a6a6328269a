"""Products of MX and NVFP4 on machines with Blackwell's instructions: planned, prepared, called and judged.

The libraries are fakes that multiply with the oracle from the operands as they lie in memory
(:mod:`tests.support.fake_blackwell`). What the layer gives back must be right by the contract and by the schedule that
the plan names; every argument of every call (:mod:`tests.support.blackwell_rows`) is changed, and no change may pass.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

import kernels
import oracle
from kernels.config import Config
from kernels.plan import considered, decisions
from kernels.platform import Machine
from kernels.records import Problem
from kernels.support import BLOCKS, MIXED, MX_LAYERS, RUNS
from kernels.verbs import SERVED
from oracle.routines import cases
from oracle.verdict.compare import Status
from tests.support.blackwell_rows import (
    FI,
    FREE,
    ROWS,
    ROWS8,
    Planned,
    Row,
    changes,
    claimed,
    named,
    of_libraries,
    planned,
    serve,
    verdict,
)
from tests.support.fake_blackwell import simulated


@pytest.mark.sampled(6)
@pytest.mark.parametrize("row", ROWS, ids=named)
def test_right_by_the_schedule_that_the_plan_names(row: Row) -> None:
    """The planned backend is called by its name, and gives what is right: bit for bit where one chain is named."""
    served = serve(row)
    assert served.decision.backend == row.backend
    named_in_call = served.call.arguments.get("backend")
    assert "backend=" not in served.decision.kernel or f'(backend="{named_in_call}")' in served.decision.kernel
    assert served.call.name in served.decision.kernel or served.call.name == "scaled_mm"
    assert served.decision.numerics
    assert verdict(served, served.out, row.arch, claimed(served.decision)) is Status.PASSED
    excluded = any("excluded from tuning" in step for step in served.decision.steps)
    assert bool(served.call.excluded) == (excluded and not row.config.split_k)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("row", ROWS, ids=named)
def test_every_changed_argument_is_seen(row: Row) -> None:
    """No argument can be another one: the library refuses it, the plan names another kernel, or the verdict fails."""
    served = serve(row)
    made = list(changes(served, row.arch))
    assert not [(name, how) for name, how, seen in made if not seen]
    unchanged = set(served.call.arguments) - {name for name, _, _ in made} - FREE
    assert unchanged <= {name for name in unchanged if served.call.arguments[name] is None}


@functools.cache
def judged() -> frozenset[Planned]:
    return frozenset(planned(row) for row in ROWS)


def lacking(arch: str, rows: frozenset[Planned]) -> set[str]:
    """Routines that a library serves on a machine, which no row is about."""
    return {routine for routine, plan in of_libraries(Machine.described(arch)).items() if plan not in rows}


@pytest.mark.parametrize("arch", ["sm100", "sm103", "sm120", "sm121"])
def test_every_library_that_the_plan_names_is_judged(arch: str) -> None:
    """No library is named without a row here; the twin: without the rows of a backend its routines lack one."""
    assert not lacking(arch, judged())
    without = frozenset(plan for plan in judged() if plan.backend != "torch")
    assert "scaled_mm" in lacking(arch, without)


PROPOSED: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    # what is multiplied: operations of the plan, and by arch the libraries proposed for it in their order; `-` before
    # one that a row refuses, each with its reason
    "MXFP8": (("mxfp8_product",), {
        "sm100": "flashinfer_cutlass torch flashinfer_cute_dsl flashinfer_cudnn",
        "sm103": "flashinfer_cutlass torch flashinfer_cute_dsl flashinfer_cudnn",
        "sm120": "flashinfer_b12x flashinfer_cutlass torch flashinfer_cudnn",
        "sm121": "flashinfer_b12x flashinfer_cutlass torch flashinfer_cudnn"}),
    "NVFP4": (("nvfp4_product",), {
        "sm100": "cutlass flashinfer_cutlass flashinfer_cudnn torch flashinfer_cute_dsl",
        "sm103": "cutlass flashinfer_cutlass flashinfer_cudnn torch flashinfer_cute_dsl",
        "sm120": "flashinfer_b12x cutlass flashinfer_cutlass",
        "sm121": "cutlass flashinfer_cutlass flashinfer_cudnn flashinfer_b12x"}),
    "MXFP4": (("mxfp4_product",), {
        "sm100": "flashinfer_cute_dsl flashinfer_cudnn deep_gemm -torch",
        "sm103": "flashinfer_cute_dsl flashinfer_cudnn deep_gemm -torch",
        "sm120": "flashinfer_b12x flashinfer_cudnn deep_gemm",
        "sm121": "flashinfer_b12x flashinfer_cudnn -deep_gemm"}),
    "MXFP8, batched": (("mxfp8_batched",), {
        "sm100": "flashinfer_cudnn", "sm103": "flashinfer_cudnn", "sm120": "flashinfer_cutlass",
        "sm121": "flashinfer_cutlass"}),
    "FP8 blocks": ((BLOCKS,), {
        "sm100": "deep_gemm cutlass flashinfer_cutlass flashinfer_trtllm",
        "sm103": "deep_gemm cutlass flashinfer_cutlass flashinfer_trtllm",
        "sm120": "deep_gemm cutlass flashinfer_cutlass -flashinfer_trtllm",
        "sm121": "-deep_gemm cutlass flashinfer_cutlass -flashinfer_trtllm"}),
    "FP8, a scale of tensors, rows and columns": (("linear", "torch_linear", "bmm"), {
        "sm100": "cutlass torch flashinfer", "sm103": "cutlass torch flashinfer", "sm120": "cutlass torch flashinfer",
        "sm121": "cutlass torch flashinfer"}),
    "groups, a scale of rows and columns": (("grouped_scaled",), {
        "sm100": "cutlass torch", "sm103": "cutlass -torch", "sm120": "-cutlass -torch", "sm121": "-cutlass -torch"}),
    "groups of FP8 blocks": ((RUNS, "grouped_contiguous", "grouped_masked"), {
        "sm100": "deep_gemm flashinfer_cutlass", "sm103": "deep_gemm flashinfer_cutlass",
        "sm120": "deep_gemm flashinfer_cutlass", "sm121": "-deep_gemm flashinfer_cutlass"}),
    "groups of MXFP8 by MXFP4": (("mxfp8_mxfp4_grouped", *MIXED), {
        "sm100": "flashinfer_cutlass deep_gemm", "sm103": "flashinfer_cutlass deep_gemm",
        "sm120": "flashinfer_cutlass deep_gemm", "sm121": "flashinfer_cutlass -deep_gemm"}),
    "groups of NVFP4": (("nvfp4_grouped", "nvfp4_tight"), {
        "sm100": "cutlass -flashinfer_cudnn torch", "sm103": "cutlass -flashinfer_cudnn -torch",
        "sm120": "flashinfer_cutlass cutlass -flashinfer_cudnn", "sm121": "flashinfer_cutlass cutlass"}),
    "experts of MXFP8, NVFP4, MXFP4": (MX_LAYERS, {
        "sm100": "flashinfer_cutlass -flashinfer_trtllm -flashinfer_cute_dsl",
        "sm103": "flashinfer_cutlass -flashinfer_trtllm -flashinfer_cute_dsl",
        "sm120": "flashinfer_cutlass -flashinfer_b12x", "sm121": "flashinfer_cutlass -flashinfer_b12x"}),
    "experts of FP8, a scale of tensors": (("moe_trtllm",), {
        "sm100": "flashinfer", "sm103": "flashinfer", "sm120": "-flashinfer", "sm121": "-flashinfer"}),
}  # fmt: skip  # a table


@pytest.mark.parametrize("arch", ["sm100", "sm103", "sm120", "sm121"])
@pytest.mark.parametrize("what", PROPOSED)
def test_every_library_that_is_proposed_is_judged_or_refused(what: str, arch: str) -> None:
    """A row here, judged above, for each library of a proposed line; or the plan says why not, of every operation.
    Layers of FP8 experts by grouped products are judged below, quantisers in ``test_blackwell_quantisers``."""
    operations, proposed = PROPOSED[what]
    machine = Machine.described(arch)
    for name in proposed[arch].split():
        backend = name.removeprefix("-")
        if backend == name:
            assert any(plan.op in operations and (plan.arch, plan.backend) == (arch, backend) for plan in judged()), (
                backend
            )
            continue
        problems = [
            Problem(**line["problem"])
            for line in decisions(machine)
            if line["problem"]["op"] in operations  # type: ignore[index, arg-type]
        ]
        reasons = [considered(problem, machine, Config()).get(backend, "") for problem in problems]
        assert any(reasons) and None not in reasons, (backend, reasons)


@pytest.mark.parametrize("arch", ["sm100", "sm120"])
def test_a_layer_by_grouped_products(arch: str) -> None:
    """vLLM's layer in NVFP4 is two of its grouped products, and right as a whole (the twin: with the scales of another
    expert it is not)."""
    case = cases.parse("cutlass_moe_fp4/bf16xe2m1-bf16/1x16:1x16/t=4,e=3,h=64,i=64,k=2/map=1/family=randn/seed=3")
    inputs, options = case.inputs(), dict(case.call_options())
    with simulated(Machine.described(arch)) as libraries:
        out = SERVED[case.contract](inputs, options)
        wrong = SERVED[case.contract]({**inputs, "w2_scale": inputs["w2_scale"].roll(1, 0)}, options)
    assert [call.name for call in libraries.calls] == ["cutlass_fp4_group_mm"] * 4
    for made, status in ((out, Status.PASSED), (wrong, Status.FAILED)):
        assert isinstance(made, Tensor)
        assert oracle.judge(case.contract, inputs, made, arch=arch, explain="off", **options).status is status


@pytest.mark.parametrize("arch", ["sm120", "sm121"])
@pytest.mark.parametrize("borders", [(0, 3, 3, 10, 13), (0, 0, 5, 6, 12)])
def test_runs_of_any_length(arch: str, borders: tuple[int, ...]) -> None:
    """On sm120 runs need no alignment: scales of each expert begin at four columns of their own (the twin: they do not
    where they lie row behind row), and rows of no expert are zero."""
    case = cases.parse(
        "cutlass_blockwise_scaled_grouped_mm/e4m3xe4m3-bf16/1x128:128x128/m=13,n=256,k=256,g=4/family=randn/seed=3"
    )
    inputs, ends = case.inputs(), torch.tensor(borders, dtype=torch.int32)
    operands = (inputs["a"], inputs["b"], inputs["scales_a"], inputs["scales_b"])
    inputs["expert_offsets"], inputs["problem_sizes"][:, 0] = ends[:-1], ends.diff()
    with simulated(Machine.described(arch)) as libraries:
        out = kernels.group_gemm_fp8_nt_groupwise(*operands, ends)
    (call,) = libraries.calls
    assert call.name == "moe_gemm_fp8_nt_groupwise" and not bool(out[borders[-1] :].any())
    behind = torch.nn.functional.pad(inputs["scales_a"].t(), (0, call.arguments["a_scale"].shape[1] - 13)).contiguous()
    for made, status in ((out, Status.PASSED), (call.again(a_scale=behind), Status.FAILED)):
        made = made[: borders[-1]] if status is Status.FAILED else made
        real = {**inputs, "a": inputs["a"][: len(made)], "scales_a": inputs["scales_a"][: len(made)]}
        assert oracle.judge(case.contract, real, made, arch=arch, explain="off").status is status


@pytest.mark.parametrize("arch", ["sm100", "sm120"])
def test_tiles_of_experts_in_any_order(arch: str) -> None:
    """A last tile that is not full, experts that descend, a tile of no expert (the twin: by another's weight)."""
    case = cases.parse(
        "m_grouped_fp8_gemm_nt_contiguous/e4m3xe4m3-bf16/1x128:128x128/m=384,n=256,k=256,g=3/family=randn/seed=3"
    )
    inputs = {name: x[:300] if x.shape[0] == 384 else x for name, x in case.inputs().items()}
    inputs["m_indices"] = torch.tensor([2] * 128 + [-1] * 128 + [0] * 44, dtype=torch.int32)
    with simulated(Machine.described(arch)) as libraries:
        out = SERVED[case.contract](inputs, {})
        wrong = SERVED[case.contract]({**inputs, "b": inputs["b"].roll(1, 0)}, {})
    assert [call.arguments["m_indptr"].tolist() for call in libraries.calls] == [[0, 128, 128, 256]] * 2
    for made, status in ((out, Status.PASSED), (wrong, Status.FAILED)):
        assert isinstance(made, Tensor)
        assert oracle.judge(case.contract, inputs, made, arch=arch, explain="off").status is status


@pytest.mark.parametrize(
    ("arch", "backend"),
    [*((arch, "deep_gemm") for arch in ("sm100", "sm103", "sm120")),
     *((arch, FI) for arch in ("sm100", "sm103", "sm120", "sm121"))],
)  # fmt: skip  # a table, one row a line
def test_a_layer_of_fp8_by_grouped_products(arch: str, backend: str) -> None:
    """Two grouped products, DeepGEMM's of powers of two or FlashInfer's of float32 scales, and right as a whole (the
    twin: with the scales of another expert it is not)."""
    case = cases.parse("moe_fp8/bf16xe4m3-bf16/1x128:128x128/t=4,e=3,h=256,i=128,k=2/family=randn/seed=3")
    inputs, powers = case.inputs(), backend == "deep_gemm"
    if powers:
        inputs |= {name: torch.exp2(inputs[name].log2().round()) for name in ("w13_scale", "w2_scale")}

    def layer(**changed: Tensor) -> Tensor:
        return kernels.moe_block_scaled(**{**inputs, **changed}, ue8m0=powers, out_dtype=torch.bfloat16)

    machine = Machine.described(arch)
    for package in ("vllm_ops", "sgl_kernel"):  # plain torch quantises
        machine = machine.with_package(package, f"package {package} is not installed")
    with simulated(machine) as libraries:
        out, wrong = layer(), layer(w2_scale=inputs["w2_scale"].roll(1, 0))
    of_flashinfer = "group_gemm_fp8_nt_groupwise" if arch in ("sm100", "sm103") else "moe_gemm_fp8_nt_groupwise"
    due = "m_grouped_fp8_gemm_nt_contiguous" if powers else of_flashinfer
    assert [call.name for call in libraries.calls] == [due] * 4
    recipe = "deepgemm_1x128_ue8m0" if powers else None  # floors differ, which these data do not reach
    options = {"activation_rounding": "PRODUCT", "recipe": recipe}
    for made, status in ((out, Status.PASSED), (wrong, Status.FAILED)):
        assert oracle.judge(case.contract, inputs, made, arch="cpu", explain="off", **options).status is status


@pytest.mark.parametrize("arch", ["sm100", "sm103", "sm120", "sm121"])
def test_matrices_of_a_batch_one_by_one(arch: str) -> None:
    """Of several matrices whose rows end inside a tile each is multiplied by itself, in the chain that the plan names
    (the twin: by the scales of its neighbour)."""
    case = cases.parse("bmm_mxfp8/e4m3xe4m3-bf16/1x32/m=17,n=160,k=160,g=2/family=randn/seed=3")
    inputs, options = case.inputs(), dict(case.call_options())
    with simulated(Machine.described(arch)) as libraries, kernels.explain() as plans:
        out = SERVED[case.contract](inputs, options)
        wrong = SERVED[case.contract]({**inputs, "b_scale": inputs["b_scale"].flip(0)}, options)
    assert [call.name for call in libraries.calls] == ["mm_mxfp8"] * 4
    assert plans[0].backend == FI and plans[0].kernel == 'mm_mxfp8(backend="cutlass")'
    for made, status in ((out, Status.PASSED), (wrong, Status.FAILED)):
        assert isinstance(made, Tensor)
        verdict = oracle.judge(
            case.contract, inputs, made, arch=arch, numerics=plans[0].numerics, explain="off", **options
        )
        assert verdict.status is status


def test_what_is_free_stays_free() -> None:
    """The twin: with another tile the numbers are the same."""
    served = serve(Row(ROWS8, "sm100", (), FI))
    right = served.call.again()
    for other in ({"tile_n": 256}, {"tile_k": 256}, {"mma_sm": 2}, {"swap_ab": False}):
        assert torch.equal(served.call.again(**other), right)
