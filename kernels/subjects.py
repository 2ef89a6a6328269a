"""The layer's routines as subjects for a conformance tool, which finds them through an entry point.

:func:`subjects` lists one record per contract, backend and device, with the accumulation that it declares. Nothing is
imported from the tool; inputs and options carry the contracts' names.
What serves a contract is declared with the verb (:mod:`kernels.verbs`), decisions of integers in
:mod:`kernels.decisions`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from . import platform, routes
from .adapters import Inputs, Options, Outputs, Runner, by_row
from .config import current_config
from .decisions import DECISIONS, RECORDS
from .errors import DtypeError, LayoutError, OptionError
from .plan import TABLE, backend_of, order
from .records import Problem
from .support import BLACKWELL
from .verbs import SERVED, Served, serve

NUMERICS = {
    # (backend, operation) on sm90: how the kernel accumulates
    ("cutlass", "linear"): "sm90.chain",
    ("cutlass", "block_linear"): "sm90.promote128",
    ("torch", "linear"): "sm90.promote128.scale_after",
    ("torch", "torch_linear"): "sm90.promote128.scale_after",
    ("torch", "block_linear"): "sm90.promote128",
    ("deep_gemm", "fp8_gemm_nt"): "sm90.promote128",
    ("deep_gemm", "grouped_contiguous"): "sm90.promote128",
    ("deep_gemm", "grouped_masked"): "sm90.promote128",
    ("deep_gemm", "mqa_logits"): "sm90.mqa_logits",
    ("triton_gemm", "fp8_gemm_nt"): "sm90.promote128",
    ("triton_linear", "few_rows"): "sm90.promote128",
    ("triton_linear", "dynamic_blockscale"): "sm90.promote128",
    ("triton_gemm", "grouped_contiguous"): "sm90.promote128",
    ("triton_gemm", "grouped_masked"): "sm90.promote128",
    **{("deep_gemm", op): "sm90.promote128" for op in ("gemm_1d1d", "k_grouped", "skip_head_mid", "einsum")},
    ("vllm_fa3", "attention"): "sm90.fa3.tile",
    ("flashinfer", "bmm"): "sm90.chain.product",
    ("flashinfer", "blockscale_sm90"): "sm90.promote128",
    ("triton_mx", "mx_product"): "sm90.bf16.dequantised",
}
WIDENED = {f"sm{sm}": f"sm{sm}.f16.promote128" for sm in (80, 86)}
"""How the layer's Triton products accumulate where they turn codes into float16."""
SUMS = frozenset(op for _, op in NUMERICS) | {
    "paged_mqa_logits",
    "grouped_scaled",
    "dynamic_blockscale",
    "moe_trtllm",
    "attention_latent",
}
"""Operations that accumulate: on a CPU in float32, any order."""

SEVERAL = frozenset({"cutlass_scaled_mm", "Fp8LinearOp"})
"""Contracts whose scales choose the kernel, each with its own accumulation: none is declared."""


for _name, _decision in DECISIONS.items():
    serve(_name, "layout", _decision, by_row())
for _name, (_record, _fields) in RECORDS.items():
    serve(_name, "layout", _record, by_row(*_fields))


@dataclass(frozen=True)
class Subject:
    """One routine on one backend.

    Attributes
    ----------
    name
        The backend.
    contract
        The routine's public name.
    arch
        ``cpu``, or ``sm90`` and the like.
    numerics
        Declared accumulation (``ieee32.any``: float32 in any order), or None where no sum is taken or none is known.
    device
        Where the inputs must lie.
    """

    name: str
    contract: str
    arch: str
    numerics: str | None
    device: str
    runner: Served
    reason: str | None = None

    def why_not(self) -> str | None:
        """Why this subject cannot run on this machine; None when it can."""
        return self.reason

    @property
    def source(self) -> Callable[..., Any]:
        """The function whose file and line a report of a failure names."""
        return self.runner.verb

    def run(self, inputs: Inputs, options: Options) -> Outputs:
        """Run the routine on fresh outputs; inputs are never written to.

        Raises
        ------
        NotImplementedError
            The backend does not offer this call (a dtype, an option or strides outside its contract).
        """
        with routes.only(self.name):
            try:
                return self.runner(inputs, {k: v for k, v in options.items() if v is not None})
            except (DtypeError, LayoutError, OptionError) as error:
                raise NotImplementedError(str(error)) from error


def subjects() -> list[Subject]:
    """Every subject of this machine: CPU paths, and on a GPU its libraries, with reasons where they cannot run."""
    machine = platform.current_machine()
    devices = ["cpu"] if machine.vendor == "cpu" else ["cpu", "cuda"]
    subjects_here = []
    for contract, runner in SERVED.items():
        for device in devices:
            here = runner.native if device != "cpu" and machine.sm in BLACKWELL else ()
            listed: dict[str, list[str]] = {}
            for op in here or (runner.operation,):
                for backend in order(op, machine) if device != "cpu" else TABLE[op]:
                    listed.setdefault(backend, []).append(op)
            for backend, ops in listed.items():
                problems = [_typical(op, contract, device) for op in ops]
                reasons = [backend_of(backend).why_not(p, machine, current_config()) for p in problems]
                op, why = ops[0], None if None in reasons else reasons[0]  # it serves where it serves one of them
                if device == "cpu" and why is not None and len(TABLE[op]) > 1:
                    continue  # GPU libraries are no candidates for CPU tensors
                arch = "cpu" if device == "cpu" else machine.arch
                declared = None if contract in SEVERAL and arch != "cpu" else _numerics(backend, op, arch)
                subjects_here.append(Subject(backend, contract, arch, declared, device, runner, why))
    return subjects_here


def _typical(op: str, contract: str, device: str) -> Problem:
    kind = {"torch_per_token_w8a8_scaled_mm": "rowwise", "torch_channelwise_w8a8_scaled_mm": "unfused"}.get(contract)
    scales = ("token", "channel") if op == "grouped_scaled" else ("tensor", "tensor")
    return Problem(op, device=device, kernel=kind, a_scale=scales[0], b_scale=scales[1])


def _numerics(backend: str, op: str, arch: str) -> str | None:
    if op not in SUMS:
        return None
    if backend in ("triton_gemm", "triton_linear") and arch in WIDENED:
        return WIDENED[arch]
    return "ieee32.any" if arch == "cpu" else NUMERICS.get((backend, op)) if arch == "sm90" else None


def _called(runner: Runner, **arguments: object) -> Outputs:
    inputs = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    options = {name: value for name, value in arguments.items() if name not in inputs and value is not None}
    try:
        return runner(inputs, options)
    except (DtypeError, LayoutError, OptionError) as error:
        raise NotImplementedError(str(error)) from error


BY_CONTRACT = SimpleNamespace(**{name: partial(_called, runner) for name, runner in SERVED.items()})
"""Each routine as a function of its contract's inputs and options by name, on the backend that the plan chooses.

For tools that take ``MODULE:CALLABLE``: ``kernels.subjects:BY_CONTRACT.silu_and_mul``.
"""
