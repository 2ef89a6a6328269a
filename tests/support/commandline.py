"""What tests of the command line share: the type of the ``cli`` fixture, a small case, the registered subjects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest

CASE = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=5,n=256,k=256/family=randn/seed=7"


@dataclass(frozen=True)
class Ran:
    """What a command returned and printed."""

    status: int
    out: str
    err: str


Cli = Callable[..., Ran]


def provide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make the named example subjects the only ones that are registered."""
    points = [EntryPoint(name, f"example_subjects:{name}", "fp8_oracle.subjects") for name in names]
    monkeypatch.setattr("oracle.harness.subjects.entry_points", lambda group: points)


def only_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every profile is the one small case."""
    from oracle.routines import cases

    monkeypatch.setattr("oracle.routines.profiles.cases", lambda contract, profile: [cases.parse(CASE)])
