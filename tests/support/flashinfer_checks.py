"""FlashInfer's own checks of what the layer would pass, asked on tensors without memory; a process of its own.

    python -m tests.support.flashinfer_checks     with FlashInfer on PYTHONPATH; a JSON record on standard output

``admitted``   calls that the layer's plan admits: how many, and those that the library refuses, with its reason
``refused``    calls that the plan refuses, and the library too: it can say no
``rows``       the library's orders of rows of weights, by number of rows and tile

The machine is pretended: its capability, CUDA and cuDNN are replaced in every loaded module of the library.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kernels.backends import flashinfer_mx
from kernels.backends.declaration import Product, Rows, Scales
from kernels.config import Config
from kernels.platform import Machine, use_machine
from kernels.records import Problem
from kernels.support import ALIGNED, BLACKWELL, BLOCKS, MX_LAYERS, RUNS
from tests.support.fake_blackwell import grid, tiles

CUDA = "13.0"
CUDNN = 91900
SEEN: dict[str, Any] = {"is_cute_dsl_available": True, "_b12x_mxfp8_dsl_supported": True}
"""What the library's questions about its compiler are answered with."""
E4M3, UE8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def pretend(sm: int) -> None:
    """Let every loaded module of the library see a machine."""
    from packaging.version import Version

    torch.version.cuda = CUDA
    sys.modules.setdefault("cudnn", SimpleNamespace()).backend_version = lambda: CUDNN  # type: ignore[attr-defined, arg-type]
    for name, module in list(sys.modules.items()):
        if name.startswith("flashinfer"):
            for what, value in {
                **SEEN,
                "get_compute_capability": divmod(sm, 10),
                "get_cuda_version": Version(CUDA),
            }.items():
                if what in vars(module):
                    setattr(module, what, lambda *_, value=value: value)


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def arguments(name: str, p: Problem) -> tuple[str, dict[str, Any]]:
    """The operation whose routine the layer calls for a problem, and what it passes, on tensors without memory."""
    passed: list[tuple[str, dict[str, Any]]] = []
    m, n, k, groups = p.m or 1, p.n or 128, p.k or 128, p.groups or 1
    out_dtype = getattr(torch, p.out_dtype)
    backend, kept = flashinfer_mx.BACKENDS[name], flashinfer_mx._run
    flashinfer_mx._run = lambda name, op, given: passed.append((op, dict(given)))
    try:
        if p.op == BLOCKS:
            operands = (empty(m, k, dtype=E4M3), empty(m, k // 128, dtype=torch.float32))
            weight = (empty(n, k, dtype=E4M3), empty(n // 128, k // 128, dtype=torch.float32))
            backend.block_product(*operands, *weight, empty(m, n, dtype=out_dtype), None, True)
            return passed[0]
        if p.op == RUNS:
            operands = (empty(m, k, dtype=E4M3), empty(m, k // 128, dtype=torch.float32))
            weight = (empty(groups, n, k, dtype=E4M3), empty(groups, n // 128, k // 128, dtype=torch.float32))
            backend.block_runs(*operands, *weight, empty(m, n, dtype=out_dtype), empty(groups + 1, dtype=torch.int32))
            return passed[0]
        if p.op in ALIGNED:
            masked = p.op == "grouped_masked"
            rows = (groups, m) if masked else (m,)
            operands = (empty(*rows, k, dtype=E4M3), empty(*rows, k // 128, dtype=torch.float32))
            weight = (empty(groups, n, k, dtype=E4M3), empty(groups, n // 128, k // 128, dtype=torch.float32))
            named = empty(groups if masked else m, dtype=torch.int32)
            more = (m, True) if masked else (True,)
            getattr(backend, p.op)(*operands, *weight, empty(*rows, n, dtype=out_dtype), named, *more)
            return passed[0]
        batched, grouped = p.op == "mxfp8_batched", p.op.endswith("grouped")
        width = 16 if p.op.startswith("nvfp4") else 32
        dtype = E4M3 if width == 16 else UE8M0
        codes = [torch.uint8 if d == "uint8" else getattr(torch, d) for d in (p.a_dtype, p.b_dtype)]
        rows = m * groups if batched else m
        several = groups if batched or grouped else 1
        high = (rows + 127 * groups) // 128 * 128 if grouped else rows
        a = empty(rows, k // (2 if codes[0] is torch.uint8 else 1), dtype=codes[0])
        b = empty(several, n, k // (2 if codes[1] is torch.uint8 else 1), dtype=codes[1])
        tall = tiles(n * several, k // width) if batched else several * tiles(n, k // width)
        left, right = (Scales(empty(size, dtype=dtype), width, "128x4") for size in (tiles(high, k // width), tall))
        table = Rows(empty(4, groups, dtype=torch.int32)) if batched or grouped else None
        out = empty(rows, n, dtype=out_dtype)
        getattr(backend, p.op)(Product(a, left, b, right, out, table, alpha=None, bias=None, accumulate=False))
    finally:
        flashinfer_mx._run = kept
    return passed[0]


def checker(routine: str) -> tuple[Callable[..., Any], Callable[..., bool], Callable[..., bool]]:
    """A routine of the library, its check of a problem, and its claim of a backend and a capability."""
    function = decorated = getattr(importlib.import_module("flashinfer.gemm"), routine)
    while "_is_problem_size_supported" not in inspect.getclosurevars(function).nonlocals:
        function = function.__wrapped__
    inside = inspect.getclosurevars(function).nonlocals
    return decorated, inside["_is_problem_size_supported"], inside["is_backend_supported"]


def answers(problems: Iterator[tuple[str, int, Problem]]) -> tuple[int, list[str]]:
    """How many were asked, and which the library refuses."""
    asked, refusals = 0, []
    for name, sm, p in problems:
        machine = Machine.described(f"sm{sm}")
        with use_machine(machine):
            op, given = arguments(name, p)
        routine = flashinfer_mx.routine_of(op, machine)
        if routine not in flashinfer_mx.ROUTINES.values():
            continue  # it has no check beside its call's
        decorated, sized, claimed = checker(routine)
        bound = inspect.signature(decorated).bind(**given)
        bound.apply_defaults()
        asked += 1
        pretend(sm)
        try:
            right = sized(**bound.arguments) and ("backend" not in given or claimed(given["backend"], sm))
            why = "" if right else "False"
        except Exception as error:  # whatever a foreign library raises is its refusal
            right, why = False, f"{type(error).__name__}: {error}"
        if not right:
            refusals.append(f"{name} sm{sm} {p}: {why}")
    return asked, refusals


def admitted() -> Iterator[tuple[str, int, Problem]]:
    """Every backend, capability and problem that the plan admits."""
    for name, backend in flashinfer_mx.BACKENDS.items():
        for op in flashinfer_mx.ROUTINES:
            if op in MX_LAYERS or not backend.declares(op):
                continue
            for sm in BLACKWELL:
                machine = Machine.described(f"sm{sm}")
                for p in grid(op):
                    if backend.why_not(p, machine, Config(split_k=True)) is None:
                        yield name, sm, p


def refused() -> Iterator[tuple[str, int, Problem]]:
    """Problems that the plan refuses, and the library's Python too."""
    p = next(p for p in grid("mxfp8_product") if (p.n, p.k, p.out_dtype) == (128, 128, "bfloat16"))
    yield "flashinfer_cutlass", 100, dataclasses.replace(p, n=96)
    yield "flashinfer_b12x", 100, p
    yield "flashinfer_cutlass", 100, dataclasses.replace(p, out_dtype="float32")


def orders() -> dict[str, list[int]]:
    """The library's orders of rows: ``rows-tile`` and ``gated-rows``."""
    core = importlib.import_module("flashinfer")
    found: dict[str, list[int]] = {}
    for n in (128, 4096):
        numbers = torch.arange(n, dtype=torch.int32).view(n, 1).expand(n, 16).contiguous()
        found[f"gated-{n}"] = core.reorder_rows_for_gated_act_gemm(numbers)[:, 0].tolist()
        for tile in (64, 128):
            raw = core.shuffle_matrix_a(numbers.view(torch.uint8), tile).view(torch.int32)
            found[f"{n}-{tile}"] = raw[:, 0].tolist()
    return found


if __name__ == "__main__":
    importlib.import_module("flashinfer.gemm")
    counted, wrong = answers(admitted())
    asked, kept_out = answers(refused())
    print(json.dumps({"admitted": [counted, wrong], "refused": [asked, kept_out], "rows": orders()}))
