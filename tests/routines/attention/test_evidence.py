"""Samples of what ``python -m tests.support.attention_evidence`` counts; compiled walks beside their definition."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oracle.bounds import attention as bounds
from oracle.bounds.attention import Scores, codes_bound, pipeline_bound
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


@pytest.mark.interpreter
@pytest.mark.turns(4)
def test_the_walk_of_a_device_has_every_bit(root: Path) -> None:
    """Of several problems at once, in Triton's interpreter; one changed bit of the sums is noticed."""
    pytest.importorskip("triton", reason="Triton is not installed; the tox factor `interpreter` has it")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.interpreted_attention"]
    ran = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    different = json.loads(ran.stdout.splitlines()[-1])
    assert different.pop("a changed bit") > 0
    assert len(different) == 12 and not any(different.values())


class TestColumn:
    """The compiled sums of one column of a row are those among all columns, a little wider."""

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("keys", [1, 70, 330])
    def test_holds_the_bound_of_the_row(self, name: str, keys: int) -> None:
        p, row = problem(keys, 20, keys, 32, sink=True), 11
        known = Scores.of(p, torch.tensor([row]))
        whole, alone = (
            codes_bound(p, pipeline(name), predicted=False, known=known, column=column) for column in (None, 7)
        )
        low, high = whole.low[:, 7:8], whole.high[:, 7:8]
        assert bool((alone.low <= low).all() and (alone.high >= high).all())
        assert bool(((alone.high - alone.low) <= (high - low) * (1 + 2.0**-20) + 1e-300).all())

    def test_other_values_leave_it(self) -> None:
        p = problem(3, 20, 97, 32)
        row = int((p.stop - p.start).argmax())
        known, other = Scores.of(p, torch.tensor([row])), replace(p, v=p.v.view(torch.uint8).flip(1).view(p.v.dtype))
        one, two = (codes_bound(x, pipeline(NAMES[0]), predicted=False, known=known, column=7) for x in (p, other))
        assert float(one.low) > float(two.high) or float(one.high) < float(two.low)

    def test_without_numba(self, monkeypatch: pytest.MonkeyPatch) -> None:
        p, name = problem(5, 20, 97, 32), pipeline(NAMES[0])
        known = Scores.of(p, torch.tensor([4]))
        compiled = codes_bound(p, name, predicted=False, known=known, column=7)
        monkeypatch.setattr(bounds, "_compiled", lambda: None)
        defined = codes_bound(p, name, predicted=False, known=known, column=7)
        assert torch.allclose(compiled.low, defined.low, rtol=2.0**-20)
