"""A watch on a GPU: calls are judged by the arithmetic of the device, graphs are left alone and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracle
from oracle.harness import runner, watching
from oracle.harness.validation import arch_of
from tests.support.watched_model import ScaledLinear

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(ScaledLinear(256, 256), ScaledLinear(256, 128)).cuda()


X = torch.randn(32, 256, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)


@pytest.mark.parametrize("recorded", [False, True])
def test_on_a_stream(recorded: bool, tmp_path: Path) -> None:
    """On a side stream, whose work a judge waits for; results are those without a watch."""
    layers, x = model(), X.cuda()
    plain = layers(x)
    with torch.cuda.stream(torch.cuda.Stream()), oracle.watch(to=tmp_path if recorded else None) as seen:
        out = layers(x)
    torch.cuda.synchronize()
    assert torch.equal(plain, out) and seen.ok
    assert [(row.layer, row.judged) for row in seen.report.rows] == [("0", 1), ("1", 1)]
    found = watching.ordered(tmp_path) if recorded else []
    assert {about["arch"] for _, about in found} == ({arch_of("cuda")} if recorded else set())


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative: the same calls, of which the judge sees one element moved."""
    layers, x = model(), X.cuda()
    judge = runner.judge_outputs

    def moved(contract: Any, inputs: Any, output: Tensor, **asked: Any) -> Any:
        return judge(contract, inputs, torch.cat([output[:-1], 2 * output[-1:] + 1]), **asked)

    monkeypatch.setattr(runner, "judge_outputs", moved)
    with oracle.watch() as seen:
        layers(x)
    assert seen.first is not None and seen.first.layer == "0" and "out[31, " in seen.first.outcome.verdict.summary


def test_a_graph_is_left_alone() -> None:
    """A capture and its replays are counted, and what is replayed is right."""
    layers, x = model(), X.cuda()
    plain = layers(x)
    with oracle.watch() as seen:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layers(x)
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(plain, out) and seen.report.judged == 0
    assert any("2 calls while a CUDA graph was captured" in note for note in seen.report.notes)
    assert any("1 replay of CUDA graphs" in note for note in seen.report.notes)
