"""What the command line says without loading torch is what it says when it has loaded everything."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from oracle import cache
from oracle.cli import installed, main


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The folder of a user who has asked ``list numerics`` once; the process looks as if it had not loaded torch."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "__stdout__", sys.stdout)
        assert main(["list", "numerics"]) == 0
    (tmp_path / "said").write_text(capsys.readouterr().out)
    monkeypatch.delitem(sys.modules, "torch")
    return tmp_path / "fp8-oracle"


class TestList:
    def test_as_if_loaded(self, kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
        first = (kept.parent / "said").read_text()
        assert "sm90.promote128" in first and installed.answer(["list", "numerics"]) == first
        assert main(["list", "numerics"]) == 0
        assert capsys.readouterr().out == first
        assert installed.answer(["list", "cases"]) is None, "another question"
        assert installed.answer(["list", "subjects"]) is None, "depends on the machine"

    def test_a_changed_file_is_noticed(self, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The sabotage: the same package with one file touched."""
        stat = os.stat

        def touched(path: str) -> SimpleNamespace:
            facts = stat(path)
            return SimpleNamespace(st_size=facts.st_size, st_mtime_ns=facts.st_mtime_ns - path.endswith("schedules.py"))

        assert installed.answer(["list", "numerics"]) is not None
        monkeypatch.setattr(cache, "files", cache.files.__wrapped__)
        monkeypatch.setattr(cache, "os", SimpleNamespace(**{**vars(os), "stat": touched}))
        assert installed.answer(["list", "numerics"]) is None

    def test_a_file_that_changed_since_the_start_ends_it(self, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What the process has loaded may be older than what the digest would say."""
        monkeypatch.setattr(cache, "files", cache.files.__wrapped__)
        monkeypatch.setattr(cache, "BEGUN", max(p.stat().st_mtime_ns for p in cache.PACKAGE.rglob("*.py")) - 1)
        assert installed.answer(["list", "numerics"]) is None
        monkeypatch.setattr(cache, "BEGUN", cache.BEGUN + 1)
        assert installed.answer(["list", "numerics"]) is not None

    def test_old_answers_go(self, kept: Path) -> None:
        for number in range(installed.KEPT + 3):
            (kept / f"list-{number}.txt").write_text("")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "__stdout__", sys.stdout)
            with installed.kept(["list", "cases"]):
                pass
        assert len(list(kept.iterdir())) == installed.KEPT

    def test_a_process_that_has_loaded_torch_answers_afresh(self, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", sys)
        assert installed.answer(["list", "numerics"]) is None


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fp8-oracle {installed.version_here()}\n"
