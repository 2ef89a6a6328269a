"""How much of what there is a run of profile ``brief`` has judged, in words.

A pure function of the outcomes and of the cases that exist. Not covered: cases that ``validate`` draws.
"""

from __future__ import annotations

from collections.abc import Iterable

from oracle.errors import counted
from oracle.report.outcome import Outcome
from oracle.routines import profiles

BRIEF = "brief"
"""The profile of a run that names none."""


def part_of(profile: str | None, outcomes: Iterable[Outcome]) -> str:
    """The sentence for a run of this profile; empty where it is another one, or judged no case of it."""
    listed = [o for o in outcomes if "/" in o.id and not o.watch]
    captures = sum(o.id.startswith("captures/") for o in listed)
    groups = {(o.contract, o.subject, o.arch) for o in listed if not o.id.startswith("captures/")}
    if profile != BRIEF or not groups:
        return ""
    quick, full = (sum(profiles.count(contract, name) for contract, *_ in groups) for name in ("quick", "full"))
    also = f", and {counted(captures, 'capture')}" if captures else ""
    return (
        f"profile brief: {len(listed) - captures} of {quick} cases, one of each class{also}; `--profile quick` judges "
        f"all of them, `--profile full` {full}"
    )
