"""How long the backends of the production layer take here: dense products of a few rows, of some, of a tile.

Every subject of the layer that this machine can run is timed on one call of its contract at each number of rows, with
N = K = 4096. A record is a line of JSON, written when it is known; what is in the file is not timed again, so that a
run that was stopped goes on. On a GPU the time is that of the device between two events around several calls, the
fewest microseconds of several such runs.

NaN and infinity: none in the operands. Source: written here.
Not covered: grouped products and quantisers, caches that a real model would have filled, clocks (they are left alone).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oracle.errors import CaseError
from oracle.extensions import Expired, within
from oracle.harness.subjects import Subject
from oracle.routines import cases, profiles
from oracle.routines.cases import Case

ROWS, DEPTH = (1, 16, 128), 4096
CALLS, RUNS = 20, 5
FIRST = 20.0
"""Seconds of a first call, in which a library may compile."""


def calls(contract: str, rows: Sequence[int] = ROWS, depth: int = DEPTH) -> list[Case]:
    """One ordinary case of a dense product at each number of rows; none of another contract."""
    listed = [c for c in profiles.cases(contract, "quick") if c.family == "randn" and not c.options and not c.changes]
    if not listed or {name for name, _ in listed[0].extents} != {"m", "n", "k"}:
        return []
    result = []
    for m in rows:
        extents = {"m": m, "n": depth, "k": depth}
        whole = replace(listed[0], extents=tuple((name, extents[name]) for name, _ in listed[0].extents))
        try:
            result.append(cases.parse(str(whole)))
        except CaseError:  # a contract that does not take these extents is not timed
            return []
    return result


def timed(
    subjects: Sequence[Subject], path: Path, seconds: float, rows: Sequence[int] = ROWS, depth: int = DEPTH
) -> Iterator[dict[str, Any]]:
    """The record of each subject and case, those of the file first; new ones until ``seconds`` are over.

    A record has ``contract``, ``backend``, ``case``, and ``microseconds`` or ``why`` there are none.
    """
    ends = time.monotonic() + seconds
    known = {}
    if path.is_file():
        known = {(one["case"], one["backend"]): one for one in map(json.loads, path.read_text().splitlines())}
    yield from known.values()
    by_contract: dict[str, list[Subject]] = {}
    for subject in subjects:
        by_contract.setdefault(subject.contract, []).append(subject)
    for contract, serving in by_contract.items():
        for case in calls(contract, rows, depth):
            new = [subject for subject in serving if (str(case), subject.name) not in known]
            inputs = case.inputs() if new else {}
            for subject in new:
                if time.monotonic() > ends:
                    return
                result = _timed(subject, inputs, dict(case.call_options()))
                record = {"contract": contract, "backend": subject.name, "case": str(case), **result}
                with path.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                yield record


def _timed(subject: Subject, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> dict[str, Any]:
    inputs = {name: x.to(subject.device) for name, x in inputs.items()}

    def call() -> None:
        subject.run(inputs, options)

    try:
        with within(FIRST):
            call()
    except Expired:
        return {"why": f"no answer within {FIRST:g} s"}
    except Exception as error:  # whatever a kernel of a library raises is its row
        return {"why": f"{type(error).__name__}: {error}"[:400]}
    burst = _on_gpu if subject.device == "cuda" else _on_cpu
    return {"microseconds": round(min(burst(call) for _ in range(RUNS)), 2)}


def _on_gpu(call: Callable[[], None]) -> float:
    event: Any = torch.cuda.Event  # torch is untyped here
    first, last = (event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(CALLS):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1000 / CALLS


def _on_cpu(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e6
