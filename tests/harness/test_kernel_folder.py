"""The table of a folder of kernels counts what was refused and named, and complains of what is wrong in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import kernel_folder

KERNELS = """
import torch


def right(x):
    return torch.where(x < 0, 0, x.float()).square().to(x.dtype)


def not_squared(x):
    return torch.where(x < 0, 0, x)


def another(x, gate):
    return x
"""
WRONG = {"kernel": "of_a_stranger:not_squared", "contract": "relu2_no_mul", "right": False, "does": "not squared"}
RIGHT = {"kernel": "of_a_stranger:right", "contract": "relu2_no_mul", "right": True, "does": ""}
ANOTHER = {"kernel": "of_a_stranger:another", "contract": "relu2_no_mul", "right": False, "does": "one more input"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two kernels that can be called, and one that cannot."""
    (tmp_path / "of_a_stranger.py").write_text(KERNELS)
    (tmp_path / kernel_folder.TABLE).write_text(json.dumps([RIGHT, WRONG, ANOTHER]))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    return tmp_path


def ran(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Exit status of the command."""
    monkeypatch.setattr(sys, "argv", ["kernel_folder", *map(str, words)])
    return kernel_folder.main()


def found(kernel: dict[str, Any], status: str, *names: str, **more: object) -> dict[str, Any]:
    """A row of a record."""
    empty = {"words": {}, "messages": {}, "watches": {"numbers": 1}}
    return kernel | {"status": status, "names": dict.fromkeys(names, 1)} | empty | more


@pytest.mark.usefixtures("forked_workers")
def test_kernels_are_judged(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The right kernel conforms, the wrong one is refused, the third is not judged."""
    out = folder / "record.json"
    assert ran(monkeypatch, folder, "--out", out, "--seed", 0) == 0
    assert [row["status"] for row in json.loads(out.read_text())] == ["conforms", "refused", "other interface"]
    told = capsys.readouterr().out
    assert "refused: 1 of 1 = 100.0%" in told
    assert "other interface: of_a_stranger:another: asks for gate, which no call has" in told


def table(folder: Path, monkeypatch: pytest.MonkeyPatch, *rows: dict[str, Any], judged: object = None) -> int:
    """The table of rows; what a reader said of their names is ``judged``."""
    record, reader = folder / "record.json", folder / "judged.json"
    record.write_text(json.dumps(rows))
    reader.write_text(json.dumps(judged or {}))
    return ran(monkeypatch, folder, "--table", record, "--judged", reader)


def test_a_wrong_kernel_that_conforms_and_a_right_one_that_does_not_are_complaints(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each by itself."""
    assert table(folder, monkeypatch, found(RIGHT, "conforms"), found(WRONG, "conforms")) == 1
    assert "conforms: of_a_stranger:not_squared: not squared" in capsys.readouterr().out
    assert table(folder, monkeypatch, found(RIGHT, "refused"), found(WRONG, "refused", "a name")) == 1
    assert "refused: of_a_stranger:right: right" in capsys.readouterr().out
    assert table(folder, monkeypatch, found(RIGHT, "conforms"), found(WRONG, "refused", "a name")) == 0


@pytest.mark.parametrize(
    ("names", "judged", "line", "status"),
    [
        (["square left out"], {"names": ["square left out"], "right": True}, "named rightly: 1", 0),
        (["square left out"], {"names": ["square left out"], "right": False}, "named wrongly: 1", 1),
        (["something else"], {"names": ["square left out"], "right": True}, "named, not read: 1", 0),
        ([], None, "unnamed: 1", 0),
    ],
)
def test_names_count_as_a_reader_judged_them(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    names: list[str],
    judged: object,
    line: str,
    status: int,
) -> None:
    """A judgement of other names does not count."""
    known = {WRONG["kernel"]: judged} if judged else {}
    row = found(WRONG, "refused", *names)
    assert table(folder, monkeypatch, found(RIGHT, "conforms"), row, judged=known) == status
    assert line in capsys.readouterr().out


def test_words_count_for_themselves(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the elements show, and a message of the dtype."""
    table(folder, monkeypatch, found(WRONG, "refused", words={"every failing element is 0": 1}))
    assert "words: 1" in capsys.readouterr().out
    table(folder, monkeypatch, found(WRONG, "refused", messages={"out is torch.float32": 1}))
    assert "a message of dtype, shape or strides: 1" in capsys.readouterr().out
