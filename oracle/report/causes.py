"""What needs attention, together where the cause is one: the order in which every report for readers names it.

A cause is one subject of one routine on one arch, with one kind of trouble and one known reason. Routines that nothing
exercises are one cause. Open failures come before known ones, wrong numbers before crashes before missing tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oracle.report.outcome import Outcome, Report
from oracle.verdict.compare import Status

_ORDER = (Status.FAILED, Status.CRASHED, Status.UNTESTED)


@dataclass(frozen=True)
class Cause:
    """Outcomes that fail for one reason, as far as is known."""

    status: Status
    known: str | None
    outcomes: tuple[Outcome, ...]
    tried: int

    @property
    def word(self) -> str:
        """FAILED, CRASHED, UNTESTED, or KNOWN FAILURE."""
        return "KNOWN FAILURE" if self.known is not None else str(self.status)

    @property
    def title(self) -> str:
        first = self.outcomes[0]
        if self.status is Status.UNTESTED:
            return f"{len(self.outcomes)} routines" if len(self.outcomes) > 1 else first.contract
        return first.subject

    @property
    def where(self) -> str:
        """Routine, arch and how many of the subject's cases, in words."""
        first, count = self.outcomes[0], len(self.outcomes)
        if self.status is Status.UNTESTED:
            return "nothing on this machine and no capture exercises " + ("them" if count > 1 else "it")
        what = "wrong" if self.status is Status.FAILED else "without a result that can be judged"
        arch = "" if first.arch == "-" else f" on {first.arch}"
        return f"{first.contract}{arch}: {count} of {self.tried} outputs {what}"

    @property
    def explained_by(self) -> tuple[str, ...]:
        """Every explanation that some outcome has, most frequent first."""
        counted: dict[str, int] = {}
        for outcome in self.outcomes:
            for name in outcome.verdict.explained_by:
                counted[name] = counted.get(name, 0) + 1
        return tuple(sorted(counted, key=lambda name: -counted[name]))

    @property
    def why(self) -> str:
        """One sentence: the known reason, else the explanation, else what was seen."""
        if self.known is not None:
            return self.known
        if self.explained_by:
            return "; or ".join(self.explained_by)
        if self.status is Status.UNTESTED:
            return ", ".join(o.contract for o in self.outcomes)
        said = {o.verdict.reason or o.verdict.pattern or o.verdict.summary for o in self.outcomes}
        first = self.outcomes[0].verdict
        return (first.reason or first.pattern or first.summary) + ("" if len(said) == 1 else " (others differ)")


def causes(report: Report) -> list[Cause]:
    """Every failure of a report, open or known, by cause."""
    tried: dict[tuple[str, str, str], int] = {}
    found: dict[tuple[object, ...], list[Outcome]] = {}
    for o in report.outcomes:
        of = (o.contract, o.subject, o.arch)
        tried[of] = tried.get(of, 0) + (o.status not in (Status.UNSUPPORTED, Status.SKIPPED))
        if o.status.is_failure:
            one = () if o.status is Status.UNTESTED else of
            found.setdefault((o.status, o.known, *one), []).append(o)
    result = [_cause(outcomes, tried) for outcomes in found.values()]
    return sorted(result, key=lambda c: (c.known is not None, _ORDER.index(c.status)))


def _cause(outcomes: Sequence[Outcome], tried: dict[tuple[str, str, str], int]) -> Cause:
    first = outcomes[0]
    return Cause(first.status, first.known, tuple(outcomes), tried[first.contract, first.subject, first.arch])
