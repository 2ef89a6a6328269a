"""What is said of every stored failure, one line each: two versions that explain alike write the same file.

    python -m tests.support.failures OUT [--cases 1] [CONTRACT ...]

Written are status, summary, numerics, and what explains it or was observed, of

    captures    every recorded output that does not pass, explained as ``verify`` does
    faults      each fault of the named contracts (``SAMPLE`` without names) in the right kernel, on the smallest cases
    outputs     the wrong outputs of the benchmark of failures at 64x256x2048, by sm90 and by any arch
    kinds       outputs of the named contracts (``KINDS`` without names) that no fault or only a placement explains
                (:func:`kinds`), on their largest cases, two by default

Cases, faults and captures are those of the version that runs it (``PYTHONPATH`` names another checkout).
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import oracle
from oracle.diagnosis.mutation import trials
from oracle.errors import OracleError
from oracle.harness import runner
from oracle.routines.catalogue import faults_of, run
from oracle.verdict.compare import Verdict
from tests.support.wrong_outputs import GEMM, outputs

FIXTURES = Path(inspect.getfile(oracle)).parents[1] / "fixtures"
SAMPLE = (
    "fp8_gemm_nt", "torch_per_token_w8a8_scaled_mm", "torch_per_tensor_w8a8_scaled_mm", "cutlass_scaled_mm",
    "fp8_gemm_tn", "m_grouped_fp8_gemm_nt_masked", "per_token_group_quant_fp8", "fp8_mqa_logits", "linear",
    "scaled_mm", "w8a8_block_fp8_linear",
)  # fmt: skip  # names, several a line
KINDS = (
    "fp8_gemm_nt", "cutlass_scaled_mm", "fp8_gemm_tn", "m_grouped_fp8_gemm_nt_contiguous",
    "fp8_m_grouped_gemm_nt_masked", "scaled_mm", "fp8_mqa_logits", "torch_per_token_w8a8_scaled_mm",
    "torch_per_tensor_w8a8_scaled_mm",
)  # fmt: skip  # names, several a line


def said(verdict: Verdict) -> str:
    parts = (verdict.status.name, verdict.summary, verdict.matches, verdict.explained_by, verdict.observed)
    return " | ".join(str(part).replace("\n", " ") for part in parts)


def of_captures() -> Iterator[tuple[str, str]]:
    for item in runner.replay(FIXTURES / "captures"):
        verdict = item.judge()
        if verdict.status.name != "PASSED":
            yield f"{item.id} [{item.subject}]", said(verdict)


def of_faults(contract: str, cases: int) -> Iterator[tuple[str, str]]:
    for trial in trials(contract, "quick")[:cases]:
        for fault in faults_of(contract):
            if fault.applies(trial.call) is not None:
                continue
            try:
                out = run(dataclasses.replace(trial.call), fault)
                judged = oracle.judge(
                    contract, trial.call.inputs, out, arch=trial.arch, numerics=trial.numerics, **trial.call.options
                )
            except OracleError as error:  # a line of the dump like another: what was said is compared
                yield f"{trial.case} {fault.name}", f"{type(error).__name__}: {error}"
                continue
            yield f"{trial.case} {trial.arch} {trial.numerics} {fault.name}", said(judged)


def kinds(right: Tensor) -> dict[str, Tensor]:
    """Wrong outputs by what was done to the ``right`` one, of its shape and dtype (floating)."""
    flat = right.reshape(-1, right.shape[-1])
    found = {name: flat.clone() for name in ("one element", "moved row", "two faults", "tail of K", "half the rows")}
    found["one element"][len(flat) // 2, 3] = 2 * flat[len(flat) // 2, 3] + 1
    found["moved row"][-1] = flat[0]
    found["two faults"][-1] = flat[0]
    found["two faults"][:, 3] = 0
    found["tail of K"] = (flat.float() * 0.97).to(flat.dtype)
    found["half the rows"][::2] = (flat[::2].float() * 1.03).to(flat.dtype)
    size = flat.float().nan_to_num(posinf=0, neginf=0).abs().mean()
    found["garbage"] = (size * torch.randn(flat.shape, generator=torch.Generator().manual_seed(1))).to(flat.dtype)
    found["zeros"] = torch.zeros_like(flat)
    return {name: out.reshape(right.shape) for name, out in found.items()}


def of_kinds(contract: str, cases: int) -> Iterator[tuple[str, str]]:
    tried = sorted(trials(contract, "quick"), key=lambda t: -sum(x.numel() for x in t.call.inputs.values()))
    for trial in [t for t in tried if sum(x.numel() for x in t.call.inputs.values()) <= 1 << 21][:cases]:
        right = run(trial.call)
        if not isinstance(right, Tensor) or right.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            continue
        for name, out in kinds(right).items():
            said_of = {"arch": trial.arch, "numerics": trial.numerics, **trial.call.options}
            judged = oracle.judge(contract, trial.call.inputs, out, **said_of)
            yield f"{trial.case} {trial.arch} {trial.numerics} {name}", said(judged)


def of_outputs() -> Iterator[tuple[str, str]]:
    inputs, found = outputs(64, 256, 2048)
    for name, out in found.items():
        yield f"benchmark {name}", said(oracle.judge(GEMM, inputs, out, arch="sm90"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("contracts", nargs="*")
    parser.add_argument("--kinds", action="store_true", help="the kinds alone")
    parser.add_argument("--cases", type=int, default=1, help="cases of each contract")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = [name for name in (options.contracts or SAMPLE) if name in oracle.contracts()]
    with options.out.open("w", encoding="utf-8") as file:
        sources = [of_captures(), of_outputs(), *(of_faults(name, options.cases) for name in names)]
        kinds_of = [of_kinds(name, 2 * options.cases) for name in options.contracts or KINDS]
        sources = kinds_of if options.kinds else [*sources, *kinds_of]
        for source in sources:
            for what, verdict in source:
                file.write(f"{what}\n    {verdict}\n")
                file.flush()


if __name__ == "__main__":
    sys.exit(main())
