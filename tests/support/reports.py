"""Synthetic reports for the tests of reports: every status, known failures, evidence, and thousands of cases."""

from __future__ import annotations

import random
from functools import cache

from oracle.report.outcome import Outcome, Report
from oracle.report.record import report_from_json
from oracle.verdict.compare import Status, Verdict, Worst
from oracle.verdict.heatmap import Element, Evidence

WORST = Worst((3, 5), -2.5, 1.0, 1.25, 1.125, float("inf"))
HOSTILE = "<script>alert('x')</script> & \"quoted\" \x00 | `code`"


@cache
def evidence(seed: int = 0, *, rows: int = 64, columns: int = 64) -> Evidence:
    """A picture of noise, the hardest one to compress."""
    rng = random.Random(seed)
    levels = tuple("".join(rng.choice("0123456789ab.") for _ in range(columns)) for _ in range(rows))
    element = Element((3, 5), -2.5, 1.0, 1.25, 1.125, float("inf"), "c020", "3f90", 32912)
    return Evidence(
        "out",
        "bfloat16",
        (rows * 4, columns * 2),
        (1, 8, 7),
        (4, 2),
        (128, 128),
        levels,
        (10,) * 12,
        (element,) * 8,
        (0.5,) * 16,
        (0, 64),
    )


def outcome(
    name: str = "c/case/seed=1",
    status: Status = Status.PASSED,
    *,
    subject: str = "s",
    arch: str = "sm90",
    known: str | None = None,
    seen: Evidence | None = None,
    margin: float = 0.25,
    matches: str | None = None,
    outside: int | None = None,
    explained_by: tuple[str, ...] = (),
    said: str | None = None,
) -> Outcome:
    """One outcome of the contract that its id begins with."""
    reason = "because of this" if status.needs_reason else None
    wrong = outside if outside is not None else 7 if status is Status.FAILED else 0
    verdict = Verdict(
        status,
        said or f"said {status}",
        wrong,
        99,
        WORST if wrong else None,
        matches,
        explained_by,
        "a bound",
        "row 3 only" if wrong else "",
        float("inf") if wrong else margin,
        0,
        reason,
        seen,
    )
    return Outcome(name, name.partition("/")[0], subject, arch, verdict, 0.25, known)


def read_outcome(record: object) -> Outcome:
    """The outcome that a JSON report with this one holds."""
    (read,) = report_from_json({**Report(()).to_json(), "outcomes": [record]}).outcomes
    return read


def every_status() -> Report:
    """One outcome of each status, two known failures, hostile text, a complaint, an unfinished run."""
    outcomes = [outcome(f"c/{status}/seed=1", status) for status in Status if status is not Status.UNTESTED]
    outcomes += [
        Outcome("d", "d", "-", "-", outcome("d", Status.UNTESTED).verdict),
        outcome("c/red/seed=2", Status.FAILED, seen=evidence(), explained_by=("scale of the previous row",)),
        outcome("c/hostile/seed=3", Status.FAILED, subject=HOSTILE, said=HOSTILE),
        outcome("c/k1/seed=4", Status.FAILED, subject="lib", known="documented", seen=evidence(1)),
        outcome("c/k2/seed=4", Status.FAILED, subject="lib", known="documented", seen=evidence(2)),
        outcome("e/equal/seed=1", arch="cpu", matches="sm90.promote128", margin=0.0),
    ]
    facts = {"python": "3.11", "machine": "x86_64", "torch": "2.13"}
    return Report(tuple(outcomes), ("an entry rots",), facts, 2.0, {"fp8-oracle": "1"}, "2026-01-02T03:04:05+00:00", 4)


def many(count: int, *, failing: bool) -> Report:
    """``count`` outcomes of 40 routines; with ``failing`` every one of them fails with its own picture."""
    outcomes = []
    for i in range(count):
        name = f"routine_{i % 40}/e4m3xe4m3-bf16/1x128:128x128/m=33,n=256,k=384/family=randn/seed={i}"
        if failing:
            said = f"{i} of 8448 elements outside the bound; worst out[3, 5]: actual -2.5, admissible [1, 1.25]"
            outcomes.append(outcome(name, Status.FAILED, subject=f"lib{i % 7}", seen=evidence(i % 50), said=said))
        else:
            outcomes.append(outcome(name, subject=f"lib{i % 7}", margin=i / count))
    return Report(tuple(outcomes), (), {"python": "3.11"}, 100.0)
