"""Samples of what ``python -m tests.support.attention_evidence`` counts; compiled walks beside their definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oracle.bounds.attention import pipeline_bound
from oracle.numbers.formats import same_bits
from oracle.tensorcore import attention
from oracle.tensorcore.attention import pipeline, predict_attention, walks
from oracle.truth import attention as truth
from tests.support.attention_evidence import outside, problem, reordered

NAMES = ("sm90.fa3.tile", "sm90.fa3.chain", "sm90.flashinfer.fp8", "sm90.attention.forward.24.lift0.tile")


class TestTruth:
    @pytest.mark.parametrize("seed", range(8))
    def test_within_its_slack_of_mpmath(self, seed: int) -> None:
        assert outside(problem(seed, 2, 1 + seed, 16, sink=bool(seed % 2))) == 0

    def test_a_wrong_truth_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        p = problem(1, 2, 9, 16)
        p = replace(p, start=torch.zeros_like(p.start), stop=torch.full_like(p.stop, 9))
        value = truth.exact(p)
        monkeypatch.setattr(
            "tests.support.attention_evidence.exact", lambda p: replace(value, out=value.out * (1 + 2.0**-40))
        )
        assert outside(p) > 0


class TestInterval:
    @pytest.mark.parametrize("seed", range(3))
    def test_holds_sums_in_other_orders(self, seed: int) -> None:
        assert not bool(reordered(problem(seed, 40, 250, 32), seed)[1].any())

    def test_refuses_other_codes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The interval of one lift and the sums of another."""
        chosen = walks
        monkeypatch.setattr(
            "tests.support.attention_evidence.walks", lambda p, record: chosen(p, replace(record, lift=0.0))
        )
        p, (right,) = problem(2, 40, 250, 32), chosen(problem(2, 40, 250, 32), pipeline(NAMES[0]))
        edges = pipeline_bound(right, pipeline(NAMES[0]))
        out = reordered(p, 2)[0]
        assert bool(((out < edges.low) | (out > edges.high)).any())


class TestCompiled:
    """The compiled rows and chains have the bits of the definition."""

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("keys", [1, 9, 97, 330])
    def test_every_bit(self, monkeypatch: pytest.MonkeyPatch, name: str, keys: int) -> None:
        p = problem(keys, 20, keys, 32, sink=True)
        k, v = p.k.clone(), p.v.clone()
        k.view(torch.uint8)[keys // 2, 3] = v.view(torch.uint8)[0, 5] = 0x7F
        for one in (p, replace(p, k=k, v=v)):
            found = predict_attention(one, pipeline(name))
            with monkeypatch.context() as patch:
                patch.setattr(attention, "_compiled", lambda name: None)
                defined = predict_attention(one, pipeline(name))
            assert bool(same_bits(found, defined).all())

    def test_another_code_is_noticed(self) -> None:
        p = problem(3, 20, 97, 32)
        one, other = (predict_attention(x, pipeline(NAMES[0])) for x in (p, replace(p, v=p.v.flip(0))))
        assert not bool(same_bits(one, other).all())
