"""Kernels on a GPU that are wrong in a graph or on streams only are found by ``validate`` with default settings."""

from __future__ import annotations

import pytest
import torch

from oracle.harness.report import THREADS
from oracle.harness.validation import validate
from oracle.harness.watches import JOINED

GEMM = "fp8_gemm_nt"
CASE = [f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=33,n=192,k=384/family=randn/seed=1"]
GRAPH, SIDE = "CUDA graph", "side stream"
KERNELS = "tests.support.subjects.streams_and_graphs:"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU here")


@pytest.mark.parametrize("kernel", ["right", "returns", "joined"])
def test_right_kernels(kernel: str) -> None:
    """Nothing fails; each way of launching it has a finding."""
    report = validate(KERNELS + kernel, GEMM, device="cuda", case=CASE, limit=60)
    assert report.conforms, [(f.watch, f.verdict.summary) for f in report.failures]
    assert report.watches()[GRAPH] == (4, 0) and report.watches()[JOINED] == (2, 0) and SIDE in report.watches()


# kernel, its watch, words of a summary
WRONG = (
    ("unjoined", JOINED, "changed after the caller's stream was done"),
    ("unjoined_own", JOINED, "read on the caller's stream while all others sleep: "),
    ("unforked", JOINED, "inputs written on the caller's stream just before: "),
    ("bakes_inputs", GRAPH, "replayed with other inputs in place: "),
    ("first_replay_only", GRAPH, "replayed with other inputs in place: "),
    ("shares_workspace", GRAPH, "the first of two calls in one graph: "),
)


@pytest.mark.parametrize(("kernel", "watch", "words"), WRONG, ids=[w[0] for w in WRONG])
def test_sabotaged_kernels(kernel: str, watch: str, words: str) -> None:
    """Each by its watch; plain calls of those that are wrong in graphs are right."""
    report = validate(KERNELS + kernel, GEMM, device="cuda", case=CASE, limit=60)
    said = [f.verdict.summary for f in report.failures if f.watch == watch]
    assert report.exit_code == 1 and any(words in what for what in said), said
    assert watch == JOINED or {f.watch for f in report.failures} == {GRAPH}


def test_a_kernel_that_cannot_be_captured() -> None:
    """Said by a finding that does not fail."""
    report = validate(KERNELS + "uncapturable", GEMM, device="cuda", case=CASE, limit=60)
    said = [f.verdict.summary for f in report.findings if f.watch == GRAPH]
    assert report.conforms and said and all("not permitted when stream is capturing" in what for what in said)


def test_a_hang_on_another_stream() -> None:
    """It fails, and is waited for once."""
    kernel = KERNELS + "hangs_on_another_stream"
    report = validate(kernel, GEMM, device="cuda", case=CASE, limit=30)
    (only,) = report.failures
    assert only.watch == SIDE and "no answer within 30 s" in only.verdict.summary
    assert THREADS not in report.watches() and report.workers == 1
