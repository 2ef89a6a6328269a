"""What one judgement calls, and how often it moves from file to file, for a right output and a wrong one.

    python -m tests.support.walk

A *move* is a call from a function of one file of ``oracle`` to one of another; a *climb* is a move to a room after the
caller's (``tests/support/figures.py``). Calls of functions that come from no file (constructors of records) are
not counted. Each judgement is made once before it is counted: what is compiled or cached for the process is no part of
the way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

import oracle
from oracle import cases
from tests.support.figures import RANK
from tests.support.paths import ROOT

CONTRACT = "fp8_gemm_nt"
CASE = f"{CONTRACT}/e4m3xe4m3-bf16/1x128:128x128/m=9,n=136,k=256/family=randn/seed=1"
FOLDER = ROOT / "oracle"


@dataclass(frozen=True)
class Walk:
    """``called``: ``(function, file)`` in the order of their first calls; ``moves`` and ``climbs`` are counts."""

    called: tuple[tuple[str, str], ...]
    moves: int
    climbs: int


def walk(action: Callable[[], object]) -> Walk:
    """The walk of an ``action``, which is run twice and counted the second time."""
    action()
    called, counts = dict[tuple[str, str], None](), [0, 0]

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (file := inside(frame.f_code.co_filename)) is None:
            return
        called.setdefault((frame.f_code.co_qualname, file))
        caller: FrameType | None = frame.f_back
        while caller is not None and (before := inside(caller.f_code.co_filename)) is None:
            caller = caller.f_back
        if caller is not None and before is not None and before != file:
            counts[0] += 1
            counts[1] += room(file) > room(before)

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return Walk(tuple(called), *counts)


@cache
def inside(filename: str) -> str | None:
    """The file of a code object, below ``oracle``; None elsewhere. Asked of every call, so that a path is read once."""
    path = Path(filename)
    return path.relative_to(FOLDER).as_posix() if path.is_relative_to(FOLDER) else None


def room(file: str) -> int:
    """The place of a file's room in the line; -1 of a file in none, which every room may call."""
    return RANK.get(file.split("/")[0].removesuffix(".py"), -1)


def judgement(out: Tensor) -> Callable[[], oracle.Verdict]:
    """The judgement of ``out`` ``[M, N]`` for :data:`CASE`."""
    inputs = cases.parse(CASE).inputs()
    return lambda: oracle.judge(CONTRACT, inputs, out)


def right() -> Tensor:
    """A right output of :data:`CASE`: the bits of its usual schedule."""
    out = oracle.predict(CONTRACT, cases.parse(CASE).inputs(), out_dtype=torch.bfloat16)
    assert isinstance(out, Tensor)
    return out


def wrong() -> Tensor:
    """The exact result of :data:`CASE` with one row duplicated."""
    out = oracle.reference(CONTRACT, cases.parse(CASE).inputs(), out_dtype=torch.bfloat16)
    assert isinstance(out, Tensor)
    out = out.clone()
    out[3] = out[2]
    return out


if __name__ == "__main__":
    for name, out in (("passing", right()), ("failing", wrong())):
        found = walk(judgement(out))
        print(f"{name}: {len(found.called)} functions, {found.moves} moves between files, {found.climbs} climbs")
