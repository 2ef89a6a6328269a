"""The script that runs again what is stored of other projects' kernels, on a machine without any of them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from oracle.bindings.known import bindings
from oracle.harness import gallery
from oracle.report.gallery import Row, Run

sys.path.append(str(Path(__file__).resolve().parents[1]))

from hardware import reproduce


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stored gallery of two kernels of torch, of which the product of tokens is the older one, and a finding."""
    monkeypatch.setattr(reproduce, "STORED", tmp_path / "stored")
    for name in ("stored", "out"):
        (tmp_path / name).mkdir()
    older = Row("torch", "_scaled_mm", "torch_per_token_w8a8_scaled_mm", "FAILED", recorded={"date": "2026-01-01"})
    newer = Row("torch", "_scaled_mm", "torch_per_tensor_w8a8_scaled_mm", "CONFORMS")
    rows = (newer, older, Row("nothing", "f", "fp8_gemm_nt", "CONFORMS"))
    Run({"date": "2026-02-02"}, rows).write(tmp_path / "stored" / reproduce.ROWS)
    scripts = {"one": {"status": "there", "said": "3"}, "two": {"status": "there", "said": "4"}}
    (tmp_path / "stored" / reproduce.SCRIPTS).write_text(json.dumps({"scripts": scripts}))
    return tmp_path


def test_the_oldest_rows_come_first(stored: Path) -> None:
    """Kernels that the record has and whose library is here; a project that is not installed has none."""
    keys = reproduce.kernels(reproduce.read(stored / "stored" / reproduce.ROWS))
    assert [key.partition("/")[2] for key in keys] == [
        "torch_per_token_w8a8_scaled_mm",
        "torch_per_tensor_w8a8_scaled_mm",
    ]
    assert {*keys} <= {gallery.key_of(p, k) for p in gallery.of_bindings() for k in p.kernels} and bindings()


def test_on_a_gpu_the_gate_comes_first(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "find_spec", lambda name: object())
    names = [step.name for step in reproduce.steps(stored / "out", 2, "cuda")]
    assert names == ["gate", "watch", "findings", "gallery", "gallery"]
    assert [step.name for step in reproduce.steps(stored / "out", 2, "cpu")] == ["findings", "gallery", "gallery"]


@pytest.mark.parametrize(
    ("verdict", "status", "decides", "due"),
    [("FAILED", "there", 0, 0), ("CONFORMS", "there", 0, 1), ("FAILED", "healed", 0, 1), ("FAILED", "there", 1, 1)],
)
def test_what_ran_beside_what_is_stored(
    stored: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verdict: str,
    status: str,
    decides: int,
    due: int,
) -> None:
    """Another verdict, a finding that is healed and a step that fails are told; a script that did not run is not."""
    out = stored / "out"
    scripts = {"one": {"status": status, "said": "3"}, "two": {"status": "did not run", "said": "no library"}}
    record = json.dumps({"scripts": scripts})
    row = Row("torch", "_scaled_mm", "torch_per_token_w8a8_scaled_mm", verdict)
    write = f"import pathlib; pathlib.Path({str(out / reproduce.SCRIPTS)!r}).write_text({record!r})"
    Run({}, (row, replace(row, contract="other"), replace(row, verdict="UNSUPPORTED"))).write(out / reproduce.ROWS)
    steps = [
        reproduce.Step("findings", (sys.executable, "-c", write), 60, False),
        reproduce.Step("gate", (sys.executable, "-c", f"raise SystemExit({decides})"), 60, True),
        reproduce.Step("late", (sys.executable, "-c", "1 / 0"), -1, True),
    ]
    monkeypatch.setattr(reproduce, "steps", lambda *_: iter(steps))
    assert reproduce.main(["--out", str(out)]) == due
    said = capsys.readouterr().out
    assert ("MOVED" in said) == (verdict != "FAILED" or status != "there")
    assert "finding two" not in said and "not on the page" in said and "late: no time is left" in said


def test_nothing_ran(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "steps", lambda *_: iter(()))
    assert reproduce.main(["--out", str(stored / "out")]) == 2


def test_a_step_without_an_end(
    stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reproduce, "ENDING", 0.2)
    sleeps = (sys.executable, "-c", "import time; time.sleep(60)")
    monkeypatch.setattr(reproduce, "steps", lambda *_: iter([reproduce.Step("gate", sleeps, 0.5, True)]))
    assert reproduce.main(["--out", str(stored / "out")]) == 1 and "no end in time" in capsys.readouterr().out
