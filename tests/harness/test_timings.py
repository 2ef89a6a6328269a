"""Timings of backends: of dense products alone, each once, in a file that a later run goes on with."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from oracle import cli
from oracle.harness import timings


@dataclass
class Timed:
    """A subject on the CPU that counts its calls, or raises."""

    name: str
    contract: str = "fp8_gemm_nt"
    arch: str = "cpu"
    numerics: str | None = None
    device: str = "cpu"
    calls: list[int] = field(default_factory=list)

    def why_not(self) -> str | None:
        return None

    def run(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> Tensor:
        if self.name == "broken":
            raise RuntimeError("no kernel")
        if self.name == "compiles":
            time.sleep(30)
        self.calls.append(inputs["a"].shape[0])
        return inputs["a"]


def test_each_is_timed_once(tmp_path: Path) -> None:
    path, right, broken, other = tmp_path / "t.jsonl", Timed("right"), Timed("broken"), Timed("other", "mxfp8_quantize")
    made = list(timings.timed([right, broken, other], path, 60.0, rows=(1, 3), depth=128))
    assert [(one["backend"], "microseconds" in one) for one in made] == [("right", True), ("broken", False)] * 2
    assert set(right.calls) == {1, 3} and not other.calls and "no kernel" in made[1]["why"]
    calls = len(right.calls)
    assert list(timings.timed([right, broken], path, 60.0, rows=(1, 3), depth=128)) == made
    assert len(right.calls) == calls and len(path.read_text().splitlines()) == 4
    assert list(timings.timed([Timed("late")], tmp_path / "late.jsonl", -1.0, rows=(1,), depth=128)) == []


def test_a_first_call_that_compiles_for_long_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is timed; nothing of the timer stays."""
    monkeypatch.setattr(timings, "FIRST", 0.2)
    before = signal.getsignal(signal.SIGALRM)
    made = list(timings.timed([Timed("compiles"), Timed("right")], tmp_path / "t.jsonl", 60.0, rows=(1,), depth=128))
    assert made[0]["why"] == "no answer within 0.2 s" and "microseconds" in made[1]
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_calls_are_those_of_a_model() -> None:
    found = timings.calls("fp8_gemm_nt")
    assert [(case["m"], case["n"], case["k"]) for case in found] == [(m, 4096, 4096) for m in (1, 16, 128)]
    assert timings.calls("silu_and_mul") == []


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["plan", "--timings", str(tmp_path / "t.jsonl")]) == 2
    assert "there is no GPU" in capsys.readouterr().err and not (tmp_path / "t.jsonl").exists()
