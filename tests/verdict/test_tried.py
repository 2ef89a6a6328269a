"""A failing quantiser lists the recipes that were tried, and how near its output came to each."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

import oracle
from oracle.errors import NonconformanceError
from oracle.report import schema
from oracle.report.record import _verdict
from oracle.verdict.compare import Tried, Verdict

X = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
NAME = "per_token_group_quant_fp8"
DECLARED = {"vllm_group", "torch_group", "sglang_group"}


def output() -> tuple[Tensor, Tensor]:
    """Right codes, as bytes, and scales."""
    made = oracle.reference(NAME, {"x": X})
    assert isinstance(made, dict)
    return made["q"].view(torch.uint8).clone(), made["scale"].clone()


def judged(q: Tensor, scale: Tensor) -> Verdict:
    return oracle.judge(NAME, {"x": X}, {"q": q.view(torch.float8_e4m3fn), "scale": scale}, explain="off")


def test_counts_and_distance() -> None:
    """One code is moved by three, another becomes NaN, one scale is wrong."""
    q, scale = output()
    q[0, 0] += 3
    scale[3, 1] *= 1.5
    verdict = judged(q, scale)
    assert {tried.recipe for tried in verdict.tried} == DECLARED
    vllm = next(tried for tried in verdict.tried if tried.recipe == "vllm_group")
    assert (vllm.equal_codes, vllm.codes, vllm.equal_scales, vllm.scales, vllm.farthest) == (1023, 1024, 7, 8, 3)
    assert min(tried.refused for tried in verdict.tried) == verdict.tried[0].refused == verdict.outside
    assert "vllm_group: 99.9% of the codes, the farthest 3 codes off, 87.5% of the scales" in str(vllm)


def test_nan_lies_one_code_beyond_the_largest() -> None:
    q, scale = output()
    largest = (q == 0x7E).nonzero()[0].tolist()
    q[largest[0], largest[1]] = 0x7F
    assert next(t for t in judged(q, scale).tried if t.recipe == "vllm_group").farthest == 1


def test_the_scales_alone_are_wrong() -> None:
    q, scale = output()
    tried = judged(q, scale * 2).tried[0]
    assert tried.equal_codes == tried.codes and tried.farthest == 0 and tried.equal_scales == 0
    assert "off" not in str(tried)


def test_a_pass_lists_nothing() -> None:
    verdict = judged(*output())
    assert verdict and verdict.tried == () and "tried" not in verdict.to_json()


def test_messages_and_json_have_them() -> None:
    q, scale = output()
    verdict = judged(q ^ 1, scale)
    with pytest.raises(NonconformanceError, match="tried vllm_group: "):
        verdict.raise_for_status()
    record = json.loads(json.dumps(verdict.to_json()))
    assert schema.problem(record, "verdict") is None
    assert _verdict(record).tried == verdict.tried and all(isinstance(t, Tried) for t in verdict.tried)
    record["tried"][0]["farthest"] = -1
    assert schema.problem(record, "verdict") is not None
