"""Calls of the layer on machines with Blackwell's instructions, each with the backend that must serve it; and every
argument of a call, changed.

``python -m tests.support.blackwell_rows [WORD ...]`` prints a line for each row (whose name has every word): the case,
the machine, the backend, the fake that was called, the verdict, and how many changed arguments were refused, of all.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

import kernels
import oracle
from kernels.config import Config
from kernels.plan import decisions
from kernels.platform import Machine
from kernels.records import Plan
from kernels.verbs import SERVED
from oracle.errors import OracleError
from oracle.routines import cases
from oracle.verdict.compare import Status
from tests.support.fake_blackwell import REAL, WRITTEN, Libraries, LibraryError, Made, simulated, stored_as

INVARIANT, CUTS = Config(batch_invariant=True), Config(split_k=True)
ALONE = "others"
"""The backend is the only one that is asked."""


class Row(NamedTuple):
    """A call, a machine, what is missing there, and the backend that serves it."""

    case: str
    arch: str
    without: tuple[str, ...]
    backend: str
    config: Config = Config()
    powers: bool = False
    """Whether scales are powers of two, and the call says that they are."""
    alphas: bool = False
    """Whether every row has an alpha of its own."""


MX8 = "mm_mxfp8/e4m3xe4m3-bf16/1x32/m=130,n=160,k=256"
NV4 = "mm_fp4/e2m1xe2m1-bf16/1x16/m=130,n=160,k=288"
MX4 = "mm_fp4/e2m1xe2m1-bf16/1x32/m=130,n=136,k=288"
FEW8 = "mm_mxfp8/e4m3xe4m3-f16/1x32/m=9,n=144,k=256"
FEW4 = "mm_fp4/e2m1xe2m1-f16/1x16/m=9,n=128,k=256"
SCALED8 = "scaled_mm/e4m3xe4m3-f32/1x32/m=33,n=144,k=256"
SCALED4 = "scaled_mm/e2m1xe2m1-bf16/1x16/m=33,n=144,k=256/levels=2"
BATCH = "bmm_mxfp8/e4m3xe4m3-bf16/1x32/m=128,n=128,k=160,g=2"
ONE = "bmm_mxfp8/e4m3xe4m3-bf16/1x32/m=17,n=160,k=160,g=1"
ROWS8 = "group_gemm_mxfp8_mxfp4_nt_groupwise/e4m3xe2m1-bf16/1x32/m=140,n=136,k=128,g=3"
ROWS4 = "group_gemm_nvfp4_nt_groupwise/e2m1xe2m1-bf16/1x16/m=140,n=136,k=128,g=3"
BLOCK = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=130,n=256,k=384"
LINEAR = (
    "cutlass_scaled_mm/e4m3xe4m3-bf16/tensor:tensor/m=33,n=144,k=384",
    "cutlass_scaled_mm/e4m3xe4m3-bf16/token:channel/m=33,n=144,k=384/bias=bf16",
)
BLOCK_LINEAR = "cutlass_scaled_mm/e4m3xe4m3-bf16/1x128:128x128/m=130,n=256,k=384"
GROUPED = "scaled_grouped_mm/e4m3xe4m3-bf16/token:channel/n=192,k=256,g=4,"
PER_TENSOR = "bmm_fp8/e4m3xe4m3-bf16/tensor:tensor/m=33,n=144,k=384,g=3"
TIGHT8 = "scaled_grouped_mm_mx/e4m3xe4m3-bf16/1x32/m=140,n=144,k=160,g=3"
TIGHT4 = "scaled_grouped_mm_mx/e2m1xe2m1-bf16/1x16/m=140,n=144,k=160,g=3"
TIGHT_OF_32 = TIGHT4.replace("1x16", "1x32")
MIX = "fp8_fp4_gemm_nt/e4m3xe2m1-bf16/1x128:1x32/m=40,n=128,k=640"
MIXES = (
    MIX,
    "fp8_fp4_gemm_nt/e2m1xe4m3-f32/1x32:1x32/m=33,n=64,k=256/c=1",
    MIX + "/scales=words",
    "fp8_fp4_gemm_nt/e2m1xe2m1-bf16/1x32:1x32/m=33,n=64,k=256",
    "m_grouped_fp8_fp4_gemm_nt_contiguous/e4m3xe2m1-bf16/1x128:1x32/m=384,n=64,k=256,g=3",
    "m_grouped_fp8_fp4_gemm_nt_masked/e4m3xe2m1-bf16/1x128:1x32/m=17,n=64,k=256,g=3",
    "m_grouped_fp8_fp4_gemm_nt_psum/e4m3xe2m1-bf16/1x128:1x32/m=384,n=64,k=256,g=3",
)
OF_POWERS = (
    # calls of DeepGEMM's FP8 products: weights of one block of rows and of several, words that are not full
    "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=130,n=192,k=640",
    "m_grouped_fp8_gemm_nt_contiguous/e4m3xe4m3-bf16/1x128:128x128/m=384,n=192,k=640,g=3",
    "fp8_m_grouped_gemm_nt_masked/e4m3xe4m3-bf16/1x128:128x128/m=17,n=192,k=640,g=3",
)
DYNAMIC = "dynamic_flashinfer_deepgemm_blockscale_gemm/bf16xe4m3-bf16/1x128:128x128/m=33,n=192,k=640"
OF_TORCH = (
    "torch_per_tensor_w8a8_scaled_mm/e4m3xe4m3-bf16/tensor:tensor/m=33,n=144,k=384",
    "torch_per_token_w8a8_scaled_mm/e4m3xe4m3-bf16/token:channel/m=33,n=144,k=384/bias=bf16",
)
PER_TENSOR_LAYER = "apply_fi_trtllm_fp8_per_tensor_moe/bf16xe4m3-bf16/tensor:tensor/t=17,g=6,e=3,h=160,i=80/weight=f32"
INDEXERS = (
    "fp8_mqa_logits/e4m3xe4m3-f32/tensor:token/m=5,n=256,h=64,d=128/clean=1",
    "fp8_mqa_logits/e4m3xe4m3-f32/tensor:token/m=17,n=192,h=32,d=64/clean=1",
    "fp8_paged_mqa_logits/e4m3xe4m3-f32/tensor:token/b=4,t=2,n=300,h=64,d=128",
)
RUNS = "group_gemm_fp8_nt_groupwise/e4m3xe4m3-bf16/1x128:128x128/m=148,n=256,k=640,g=3"
OF_EXPERTS = (
    # of float32 scales: tiles that name their expert, and a matrix for each
    "m_grouped_fp8_gemm_nt_contiguous/e4m3xe4m3-bf16/1x128:128x128/m=384,n=256,k=256,g=4",
    "fp8_m_grouped_gemm_nt_masked/e4m3xe4m3-bf16/1x128:128x128/m=17,n=256,k=640,g=3",
)
HEADS = "fp8_gemm_nt_skip_head_mid/e4m3xe4m3-bf16/1x128:128x128/m=33,n=384,k=256"
NV_LAYER, MIXED_LAYER = "nvfp4/bf16xe2m1-bf16/1x16:1x16", "mxfp8_mxfp4/bf16xe2m1-bf16/1x32:1x32"
LAYERS = (
    (NV_LAYER, "", "sm121"), (MIXED_LAYER, "", "sm103"), (MIXED_LAYER, "", "sm120"),
    ("mxfp8/bf16xe4m3-bf16/1x32:1x32", "", "sm100"), ("mxfp8/bf16xe4m3-bf16/1x32:1x32", "", "sm121"),
    (NV_LAYER, "", "sm100"), (NV_LAYER, "/gates=1", "sm103"), (NV_LAYER, "", "sm120"),
    (MIXED_LAYER, "", "sm100"), (MIXED_LAYER, "/gates=1", "sm121"),
    ("mxfp8/bf16xe4m3-bf16/1x32:1x32", "", "sm103"), ("mxfp8/bf16xe4m3-bf16/1x32:1x32", "/gates=1", "sm120"),
)  # fmt: skip  # a table, one row a line
FI, VLLM = "flashinfer_cutlass", "cutlass"
ROWS = (
    *(Row(MX8, arch, (), "flashinfer_cutlass") for arch in ("sm100", "sm103")),
    *(Row(MX8, arch, (), "flashinfer_b12x") for arch in ("sm120", "sm121")),
    *(Row(MX8, arch, ("cutlass_dsl",), "flashinfer_cutlass") for arch in ("sm120", "sm121")),
    *(Row(MX8, arch, ("flashinfer",), "torch") for arch in ("sm100", "sm103", "sm120", "sm121")),
    *(Row(FEW8, arch, ("torch",), "flashinfer_cute_dsl", CUTS) for arch in ("sm100", "sm103")),
    *(Row(MX8.replace("n=160", "n=144"), arch, ("torch", "cutlass_dsl"), "flashinfer_cudnn")
      for arch in ("sm100", "sm103", "sm120", "sm121")),
    *(Row(NV4, arch, (), VLLM) for arch in ("sm100", "sm103", "sm121")),
    Row(NV4, "sm120", (), "flashinfer_b12x"),
    Row(NV4, "sm120", ("cutlass_dsl",), VLLM),
    Row(NV4, "sm121", (ALONE,), "flashinfer_b12x"),
    *(Row(NV4, arch, ("vllm_ops", "cutlass_dsl"), FI) for arch in ("sm100", "sm103", "sm120", "sm121")),
    *(Row(NV4.replace("n=160", "n=144"), arch, ("cutlass_dsl",), "flashinfer_cudnn") for arch in ("sm100", "sm103")),
    *(Row(SCALED4, arch, ("flashinfer",), "torch") for arch in ("sm100", "sm103")),
    Row(NV4.replace("n=160", "n=136"), "sm100", ("cudnn",), "flashinfer_cute_dsl"),
    Row(FEW4.replace("n=128", "n=136"), "sm103", ("cudnn",), "flashinfer_cute_dsl", CUTS),
    *(Row(MX4, arch, (), "flashinfer_cute_dsl") for arch in ("sm100", "sm103")),
    *(Row(MX4, arch, (), "flashinfer_b12x") for arch in ("sm120", "sm121")),
    *(Row(MX4.replace("n=136", "n=144"), arch, ("cutlass_dsl",), "flashinfer_cudnn")
      for arch in ("sm100", "sm103", "sm120", "sm121")),
    *(Row(SCALED8, arch, (), "torch") for arch in ("sm100", "sm103", "sm120", "sm121")),
    *(Row(BATCH, arch, (), "flashinfer_cudnn") for arch in ("sm100", "sm103")),
    *(Row(BATCH, arch, (), FI) for arch in ("sm120", "sm121")),
    *(Row(ONE, arch, (), FI) for arch in ("sm120", "sm121")),
    *(Row(ROWS8, arch, (), FI) for arch in ("sm100", "sm103", "sm120", "sm121")),
    *(Row(ROWS4, arch, (), FI) for arch in ("sm120", "sm121")),
    *(Row(f"cutlass_fused_moe_{case}/t=4,e=3,h=128,i=128,k=2{options}", arch, (), FI)
      for case, options, arch in LAYERS),
    Row(TIGHT8, "sm100", (), "torch"),
    Row(TIGHT4, "sm100", ("vllm_ops",), "torch"),
    *(Row(TIGHT4 + levels, arch, (), VLLM)
      for arch, levels in (("sm100", ""), ("sm103", "/levels=2"), ("sm120", "/levels=2"), ("sm121", ""))),
    *(Row(TIGHT_OF_32, arch, (), VLLM) for arch in ("sm100", "sm103")),
    *(Row(case, arch, (), "deep_gemm") for case in MIXES for arch in ("sm100", "sm103", "sm120")),
    *(Row(case, arch, (), "deep_gemm", powers=True) for case in OF_POWERS for arch in ("sm100", "sm103", "sm120")),
    *(Row(HEADS, arch, (), "deep_gemm", powers=True) for arch in ("sm100", "sm103")),
    *(Row(DYNAMIC, arch, (), "deep_gemm", powers=True) for arch in ("sm100", "sm103", "sm120")),
    *(Row(case, arch, (), "torch") for case in OF_TORCH for arch in ("sm100", "sm103", "sm120", "sm121")),
    *(Row(PER_TENSOR_LAYER, arch, (), "flashinfer", powers=True) for arch in ("sm100", "sm103")),
    *(Row(case, arch, (), "deep_gemm") for case in INDEXERS for arch in ("sm100", "sm103", "sm120")),
    *(Row(RUNS, arch, (), FI) for arch in ("sm100", "sm103", "sm120", "sm121")),
    *(Row(case, arch, (), VLLM) for case in (*LINEAR, BLOCK_LINEAR) for arch in ("sm100", "sm103", "sm120", "sm121")),
    *(Row(GROUPED + size, arch, (), VLLM) for size in ("m=70", "m=40") for arch in ("sm100", "sm103")),
    *(Row(GROUPED + size, "sm100", ("vllm_ops",), "torch") for size in ("m=70", "m=40")),
    *(Row(PER_TENSOR, arch, (), "flashinfer") for arch in ("sm100", "sm103", "sm120", "sm121")),
    *(Row(BLOCK, arch, (), VLLM) for arch in ("sm100", "sm103", "sm120", "sm121")),
    *(Row(BLOCK, arch, ("vllm_ops",), FI) for arch in ("sm100", "sm103", "sm120", "sm121")),
    *(Row(BLOCK, arch, (ALONE,), "flashinfer_trtllm") for arch in ("sm100", "sm103")),
    *(Row(BLOCK, arch, ("deep_gemm",), VLLM, powers=True) for arch in ("sm100", "sm103", "sm120", "sm121")),
    *(Row(MX4.replace("n=136,k=288", "n=128,k=256") + "/alpha=none", arch, ("cutlass_dsl", "cudnn"), "deep_gemm")
      for arch in ("sm100", "sm103", "sm120")),
    *(Row(case, arch, (), FI) for case in OF_EXPERTS for arch in ("sm100", "sm103", "sm120", "sm121")),
    Row(NV4, "sm103", (ALONE,), FI, CUTS),
    *(Row(case, arch, (), "flashinfer_cute_dsl", alphas=True) for case in (NV4, MX4) for arch in ("sm100", "sm103")),
    Row(FEW4, "sm100", (), "flashinfer_cute_dsl", CUTS, alphas=True),
    Row(NV4.replace("n=160", "n=144"), "sm121", ("cutlass_dsl",), "flashinfer_cudnn"),
)  # fmt: skip  # a table, one row a line


def machine_of(row: Row) -> Machine:
    """The described machine without a row's packages; without torch's product: a torch that is too old for it."""
    machine = Machine.described(row.arch)
    for name in row.without:
        if name == "torch":
            machine = dataclasses.replace(machine, torch=(2, 9))
        elif name != ALONE:
            machine = machine.with_package(name, f"package {name} is not installed")
    return machine


def named(row: Row) -> str:
    return f"{row.arch}-{row.backend}-{row.case.split('/')[0]}-{row.case.split('/')[2]}"


class Served(NamedTuple):
    """A call through the layer: what it was given, what came back, the decision, and the libraries."""

    contract: str
    inputs: dict[str, Tensor]
    options: dict[str, Any]
    out: Tensor
    decision: Plan
    call: Made


SAYS_POWERS: dict[str, dict[str, bool]] = {"dynamic_blockscale": {"use_deep_gemm_e8m0": True}, "moe_trtllm": {}}
"""How a call of an operation says that scales are powers of two, where it does not by ``disable_ue8m0_cast``."""


def serve(row: Row, family: str = "randn") -> Served:
    """The row's case through the layer on its machine."""
    if row.backend == "torch" and REAL is None:
        pytest.skip(f"torch {torch.__version__} has no scaled_mm of recipes")
    case = cases.parse(f"{row.case}/family={family}/seed=3")
    inputs, options = case.inputs(), dict(case.call_options())
    extra = {"row_alignment": 4} if case.contract.startswith(("group_gemm_mx", "group_gemm_nv")) else {}
    if row.alphas:
        inputs["alpha"] = torch.tensor((0.5, 3.0, -0.75)).repeat(len(inputs["a"]))[: len(inputs["a"])]
    config = dataclasses.replace(row.config, backend=row.backend) if ALONE in row.without else row.config
    served = SERVED[case.contract]
    call = served.verb
    if row.powers:
        for name in (name for name in inputs if "scale" in name):
            inputs[name] = torch.exp2(inputs[name].log2().round())
        call = functools.partial(call, **SAYS_POWERS.get(served.operation, {"disable_ue8m0_cast": False}))
    with simulated(machine_of(row), config) as libraries, kernels.explain() as plans:
        out = served.adapter(call, inputs, options | extra)
    prepared = ("quant", "paged_metadata")  # decided on the way, and no product
    plan, *rest = [p for p in plans if p.backend != "eager" and not p.problem.op.startswith(prepared)]
    (call_made,) = libraries.calls
    assert all(other.backend == plan.backend for other in rest)
    assert isinstance(out, Tensor)
    if "input" in inputs:  # which the layer quantised: the product is judged by what its codes are
        made = oracle.reference("per_token_group_quant_fp8", {"x": inputs["input"]}, group_size=128, use_ue8m0=True)
        assert isinstance(made, dict)
        whole = {"a": made["q"], "a_scale": made["scale"], "b": inputs["weight"], "b_scale": inputs["weight_scale"]}
        return Served("fp8_gemm_nt", whole, {}, out, plan, call_made)
    return Served(case.contract, inputs, options, out, plan, call_made)


def verdict(served: Served, out: Tensor, arch: str, numerics: str | None = None) -> Status:
    options = {name: value for name, value in served.options.items() if name != "out_dtype"}
    for inputs, rows in by_alpha(served.inputs):
        whole = out
        if rows is not None:  # what the contract, which has one alpha, says of these rows
            stored = {**options, **stored_as(served.contract, out)}
            if numerics is None:
                made = oracle.reference(served.contract, inputs, **stored)
            else:
                made = oracle.predict(served.contract, inputs, numerics=numerics, **stored)
            assert isinstance(made, Tensor)
            whole = made
            whole[rows] = out[rows]
        judged = oracle.judge(served.contract, inputs, whole, arch=arch, numerics=numerics, explain="off", **options)
        if judged.status is not Status.PASSED:
            return judged.status
    return Status.PASSED


def by_alpha(inputs: dict[str, Tensor]) -> Iterator[tuple[dict[str, Tensor], Tensor | None]]:
    """The inputs with one alpha, and the rows ``[M]`` that have it; None for all."""
    alpha = inputs.get("alpha")
    if alpha is None or alpha.shape != inputs["a"].shape[:1] or len(alpha) == 1:
        yield inputs, None
        return
    for factor in alpha.unique():
        yield {**inputs, "alpha": factor.reshape(1)}, alpha == factor


def cropped(out: Tensor, like: Tensor) -> Tensor:
    """The first rows of an output, or of each of its matrices, in the shape of another."""
    if out.dim() == 2 and like.dim() == 3:
        out = out.view(like.shape[0], -1, like.shape[2])
    if out.dim() == 3 and out.shape[0] == like.shape[0]:
        return out[:, : like.shape[1]]
    return out.reshape(-1)[: like.numel()].view(like.shape)


def codes(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Wrong codes in the layout of the right ones."""
    lies = x if x.is_contiguous() else x.mT
    raw = lies.view(torch.uint8)
    for name, moved in (("a row on", raw.roll(1, -2)), ("a block on", raw.roll(32, -1)), ("a sign", raw ^ 0x88)):
        wrong = moved.view(lies.dtype)
        yield name, wrong if x.is_contiguous() else wrong.mT
    yield "rows for columns", lies.mT if x.is_contiguous() else lies.reshape(x.shape)


def scales(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Wrong scales in the layout of the right ones."""
    lies = x if x.is_contiguous() else x.mT
    raw = lies.reshape(-1).view(torch.uint8)
    rows = raw.view(-1, 32, 4, 4).transpose(1, 2)
    for name, moved in (("a byte on", raw.roll(1)), ("tiles undone", rows.reshape(-1)), ("one up", raw ^ 0x08)):
        wrong = moved.contiguous().view(lies.dtype).view(lies.shape)
        yield name, wrong if x.is_contiguous() else wrong.mT
    if x.dim() > 1:
        yield "not transposed", x.mT
    half = x.shape[0] // 2 if x.is_contiguous() else x.shape[1] // 2
    yield "memory ends before", x[:half] if x.is_contiguous() else x[:, :half]


def words(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Wrong words of four exponents in the layout of the right ones."""
    raw = x.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    turned = raw.unflatten(-1, (-1, 4)).flip(-1).flatten(-2)
    for how, moved in (("a row on", raw.roll(1, -2)), ("bytes from the other end", turned), ("one up", raw + 1)):
        yield how, torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(moved.contiguous().view(x.dtype))
    if x.shape[-1] > 1:
        yield "row by row", x.contiguous()
    yield "as numbers", torch.exp2(raw.float() - 127)


def numbers(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Wrong numbers in the layout of the right ones."""
    lies = x if x.is_contiguous() else x.mT
    across = lies.mT.contiguous().view(lies.shape) if lies.dim() > 1 else lies
    for how, moved in (("one on", lies.roll(1)), ("transposed", across), ("a half", lies / 2)):
        if not torch.equal(moved, lies):  # one number has no neighbour
            yield how, moved if x.is_contiguous() else moved.mT


CODES = (
    "a", "b", "A", "B", "mat_a", "mat_b", "mat1", "mat2", "a_tensors", "b_tensors", "q", "hidden_states",
    "gemm1_weights", "gemm2_weights",
)  # fmt: skip
"""Arguments that are one matrix of codes, or one for each expert."""
LISTS = (
    "token_selected_experts", "m_indptr", "grouped_layout", "masked_m", "offs", "problem_sizes", "expert_offsets",
    "sf_offsets", "a_strides", "b_strides", "c_strides", "ks", "ke", "context_lens", "block_table", "schedule_meta",
)  # fmt: skip
"""Arguments that say which rows belong to whom."""


def mutants(call: Made) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every argument of a call, changed: its name, how, and what is passed instead."""
    given = call.arguments
    for name, value in given.items():
        if name in ("a", "b") and isinstance(value, tuple):
            yield from ((name, how, {name: (x, value[1])}) for how, x in codes(value[0]))
            yield from ((name, how, {name: (value[0], x)}) for how, x in words(value[1]))
            yield name, "the other operand", {name: given["b" if name == "a" else "a"]}
        elif name == "kv":
            yield from ((name, how, {name: (x, value[1])}) for how, x in codes(value[0]))
            yield from ((name, how, {name: (value[0], x)}) for how, x in numbers(value[1]))
        elif name == "kv_cache":
            yield name, "a token on", {name: value.roll(1, 1)}
            yield name, "a block on", {name: value.roll(1, 0)}
        elif name in ("weights", "routing_logits"):
            yield from ((name, how, {name: x}) for how, x in numbers(value))
        elif name in CODES:
            if value.dtype is getattr(torch, "float4_e2m1fn_x2", None):
                made = (
                    (how, x.view(value.dtype))
                    for how, x in codes(
                        value.view(torch.uint8) if value.is_contiguous() else value.mT.view(torch.uint8).mT
                    )
                )
                yield from ((name, how, {name: x}) for how, x in made)
            else:
                yield from ((name, how, {name: x}) for how, x in codes(value))
        elif name in ("scale_a", "scale_b") and isinstance(value, list):
            yield from ((name, how, {name: [x, *value[1:]]}) for how, x in scales(value[0]))
            if len(value) == 2:
                yield name, "second twice", {name: [value[0], value[1] * 2]}
        elif "scale" in name and isinstance(value, Tensor) and value.dtype is torch.float32:
            yield from ((name, how, {name: x}) for how, x in numbers(value))
        elif name == "scale_major_mode" and value is not None:
            yield name, "the other", {name: "K"}
        elif name == "scale_granularity_mnk":
            yield name, "of 64", {name: (1, 64, 128)}
        elif "scale" in name and isinstance(value, Tensor):
            yield from ((name, how, {name: x}) for how, x in scales(value))
        elif name == "alpha" and value is not None:
            yield name, "twice", {name: value * value}
            yield name, "not at all", {name: torch.ones_like(value)}
            if value.numel() > 1:
                yield name, "of the row before", {name: value.roll(1)}
                yield name, "of the first row", {name: value[:1]}
        elif name == "alphas" or name.startswith("swiglu") and value is not None:
            yield name, "twice", {name: value * 2}
            if name != "alphas":
                yield name, "not at all", {name: None}
        elif name in ("input", "token_final_scales"):
            for how, x in (
                ("a row on", value.view(torch.uint8).roll(1, 0).view(value.dtype)),
                ("halves", value.half()),
            ):
                yield name, how, {name: x}
        elif name in ("fc1_expert_weights", "fc2_expert_weights"):
            raw = value.view(torch.uint8)
            yield from ((name, how, {name: x.view(value.dtype)}) for how, x in codes(raw) if x.is_contiguous())
            yield name, "of the expert before", {name: value.roll(1, 0)}
        elif name == "quant_scales":
            for at, part in enumerate(value):
                words_of = part.dtype is torch.int32
                made = scales(part.view(torch.uint8)) if words_of else iter([("twice", part * 2)])
                for how, x in made:
                    whole = x.contiguous().view(torch.int32) if words_of else x
                    yield name, f"{at} {how}", {name: [*value[:at], whole, *value[at + 1 :]]}
            yield name, "the second first", {name: [value[1], value[0], *value[2:]]}
            yield name, "one less", {name: value[:-1]}
        elif name == "input_sf":
            yield from ((name, how, {name: x}) for how, x in (scales(value) if value is not None else ()))
        elif name == "output_dtype" and "quant_scales" in given:
            yield name, "the other", {name: torch.float16}
        elif isinstance(value, int) and not isinstance(value, bool) and name not in FREE:
            yield name, "one more", {name: value + 1}
        elif name in LISTS:
            for how, x in (
                ("of the expert before", value.roll(1, 0)),
                ("less by 4", (value - 4).clamp(min=0)),
                ("wider", value.long()),
            ):
                if x.dtype is not value.dtype or not torch.equal(x, value):  # strides are those of every expert
                    yield name, how, {name: x}
        elif name in ("recipe_a", "recipe_b") and value is not None:
            yield name, "the other", {name: (1, 160 - value[1])}
        elif name == "recipe" and value is not None:
            yield name, "of every row", {name: (1, 1, 128)}
        elif name == "head_splits":
            left, mid, right = value
            yield name, "the gap first", {name: (mid, left, right)}
            yield name, "64 on", {name: (left - 64, mid, right + 64)}
        elif name in ("c", "bias") and value is not None:
            yield name, "none", {name: None}
            yield name, "twice", {name: value * 2}
        elif name in ("out_dtype", "dtype", "output_dtype") and value is not None:
            yield name, "the other", {name: torch.float16 if value is not torch.float16 else torch.bfloat16}
        elif isinstance(value, bool):
            if name != "swizzled_input_sf" or given["input_sf"] is not None:
                yield name, "not", {name: not value}
        elif name == "block_size":
            yield name, "the other", {name: 48 - value}
        elif name == "backend":
            for other in ("auto", "cutlass", "cudnn", "b12x", "cute-dsl", "trtllm"):
                if other != value:
                    yield name, other, {name: other}
        elif name.startswith(("scale_recipe", "swizzle")):
            yield name, "reversed", {name: [*value, value[0]]}
        elif name in WRITTEN and value is not None:
            yield name, "transposed", {name: value.mT}
    for left, right in PAIRS:
        if left in given:
            yield left, "exchanged", {left: given[right], right: given[left]}


PAIRS = (
    ("a_descale", "b_descale"), ("a_scale", "b_scale"), ("block_scale_a", "block_scale_b"),
    ("a_blockscale", "b_blockscales"),
)  # fmt: skip
FREE = {
    # arguments that change no number: which kernel of equal arithmetic runs, when it starts, what padding holds
    "swap_ab", "tile_m", "tile_n", "tile_k", "mma_sm", "enable_pdl", "contraction_dim", "compiled_dims",
    "expected_m", "ensure_zero_padding", "tune_max_num_tokens", "swizzled_input_sf",
}  # fmt: skip


def claimed(decision: Plan) -> str | None:
    """The schedule that the plan names; None where it says that bounds alone hold."""
    return None if decision.numerics.startswith("bounds only") else decision.numerics


def changes(served: Served, arch: str) -> Iterator[tuple[str, str, bool]]:
    """Each changed argument and how, and whether that is seen: the library refuses it, the plan names another kernel,
    or an element lies outside of what any order of sums may give."""
    options = {name: value for name, value in served.options.items() if name != "out_dtype"}
    options |= {"combine": "STORED"} if "topk_ids" in served.inputs else stored_as(served.contract, served.out)
    low = high = torch.zeros(served.out.shape, dtype=torch.float64)
    for inputs, rows in by_alpha(served.inputs):
        bounds = oracle.interval(served.contract, inputs, arch=arch, **options)["out"]
        mine = True if rows is None else rows[:, None]
        low, high = (torch.where(torch.as_tensor(mine), x, y) for x, y in ((bounds.low, low), (bounds.high, high)))
    due = ~(torch.isinf(low) & torch.isinf(high) & (low < high))  # what any value may hold

    def admissible(out: Tensor) -> bool:
        out = out.to(served.out.dtype)  # as the layer stores what it is given in float32
        return bool(((out >= low) & (out <= high))[due].all())

    right = served.call.again()  # of more rows where the layer pads them
    assert admissible(cropped(right, served.out))
    for name, how, instead in mutants(served.call):
        if name in FREE:
            continue
        try:
            out = served.call.again(**instead)
        except (LibraryError, OracleError, RuntimeError):  # refused: by the fake, the oracle, or torch on its shapes
            yield name, how, True
            continue
        other = "backend" in instead and f'(backend="{instead["backend"]}")' not in served.decision.kernel
        alike = out.dtype is right.dtype and out.shape == right.shape
        yield name, how, other or not alike or not admissible(cropped(out, served.out))


class Planned(NamedTuple):
    """What a row of the plan says: what is multiplied, how it is scaled, where, and by which library's routine."""

    op: str
    scales: tuple[object, object]
    arch: str
    backend: str
    kernel: str


def of_libraries(machine: Machine) -> dict[str, Planned]:
    """What ``fp8-oracle plan`` names for a machine, by routine, without the kernels of this package."""
    named = {}
    for line in decisions(machine):
        problem, backend = line["problem"], str(line["backend"])
        assert isinstance(problem, dict)
        if line["backend"] is not None and backend != "eager" and not backend.startswith("triton"):
            scales = problem["a_scale"], problem["b_scale"]
            named[str(line["routine"])] = Planned(problem["op"], scales, machine.arch, backend, str(line["kernel"]))
    return named


def planned(row: Row) -> Planned:
    """What the layer decides for a row, whose call multiplies nothing."""
    with mock.patch.object(Libraries, "multiply", lambda self, contract, inputs, out, *_, **__: out):
        decision = serve(row).decision
    problem = decision.problem
    return Planned(problem.op, (problem.a_scale, problem.b_scale), row.arch, decision.backend, decision.kernel)


def table(words: Iterable[str]) -> Iterator[str]:
    """The lines of the module's command."""
    seen = total = 0
    chosen = [row for row in ROWS if all(word in f"{row.case} {named(row)}" for word in words)]
    for row in chosen:
        served = serve(row)
        status = verdict(served, served.out, row.arch, claimed(served.decision)).name
        refused = [refusal for _, _, refusal in changes(served, row.arch)]
        seen, total = seen + sum(refused), total + len(refused)
        sums = served.decision.numerics
        yield (
            f"{row.case:<88} {row.arch} {served.decision.backend:<19} {served.call.name:<37} {status} "
            f"{sum(refused)}/{len(refused)} {sums}"
        )
    yield f"{len(chosen)} rows, {seen} of {total} changes refused"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for text in table(sys.argv[1:]):
        print(text, flush=True)
