"""Recording on a GPU: no call waits, strides and padding are kept, and a graph that is captured is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import oracle
from oracle.fixtures import call_file
from oracle.harness.validation import arch_of
from oracle.routines import cases
from tests.support.subjects import right

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

CASE = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=33,n=192,k=384/family=exact/seed=1"


def padded(x: Tensor) -> Tensor:
    """The same codes in rows with 16 bytes of padding."""
    memory = torch.full((x.shape[0], x.shape[1] + 16), 7, dtype=torch.uint8, device=x.device)
    memory[:, : x.shape[1]] = x.view(torch.uint8)
    return memory.view(x.dtype)[:, : x.shape[1]]


def test_no_call_waits_and_a_graph_is_left_alone(tmp_path: Path) -> None:
    """A copy that waits raises under torch's check; what is written is what the call had, though it changes later."""
    given = {name: t.cuda() for name, t in cases.parse(CASE).inputs().items()}
    given["a"] = padded(given["a"])
    made = right.gemm(**given, out_dtype=torch.bfloat16)

    def kernel(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
        out.copy_(made)

    gemm = oracle.sample(kernel, every=1, to=tmp_path, contract="fp8_gemm_nt")
    out = torch.zeros_like(made)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)  # the copies have to wait for it, the call has not
        gemm(**given, out=out)
        given["a_scale"].zero_()
        out.zero_()
        assert gemm.sampler.recorded == 0
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert gemm.sampler.flush(60) and gemm.sampler.problems == [] and gemm.sampler.recorded == 1
    call = call_file.read(call_file.within(tmp_path)[0][0])
    assert call.inputs["a"].stride() == given["a"].stride() and call.arch == arch_of("cuda")
    assert isinstance(call.output, Tensor) and torch.equal(call.output, made.cpu())
    assert oracle.judge("fp8_gemm_nt", call.inputs, call.output, arch=call.arch, numerics="ieee32.any")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm(**given, out=out)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, made) and gemm.sampler.flush(60) and gemm.sampler.recorded == 1
