"""Shared by all tests: deterministic hypothesis, the fixtures folder, the command line in process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The tensors here are small: threads of one process, or of two test workers on two cores, only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
collect_ignore = ["support"]  # another project's suite; test_pytest_plugin.py runs it

settings.register_profile(
    "repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@dataclass(frozen=True)
class Ran:
    """What a command returned and printed."""

    status: int
    out: str
    err: str


Cli = Callable[..., Ran]


@pytest.fixture
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture
def fixtures_folder() -> Path:
    """The repository's fixtures, wherever the tests are started."""
    return ROOT / "fixtures"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fixtures_folder: Path) -> Cli:
    """Run the command line in this process; argparse's own exits become a status too."""
    import torch

    from oracle.cli import main

    threads = torch.get_num_threads()

    monkeypatch.setenv("FP8_ORACLE_FIXTURES", str(fixtures_folder))
    monkeypatch.setenv("COLUMNS", "300")

    def run(*arguments: object) -> Ran:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = int(stop.code or 0)
        torch.set_num_threads(threads)
        captured = capsys.readouterr()
        return Ran(status, captured.out, captured.err)

    return run
