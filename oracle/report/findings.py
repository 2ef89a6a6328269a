"""What a validation found, case by case, and the same as outcomes of a run, which every report and record takes.

A *finding* is one watch of one case: its numbers, its guard zones, the bits of a second call. As outcomes they are

    CONTRACT/.../seed=1          the numbers of one case, as `verify` has them
    CONTRACT/WATCH               a watch over all cases: the first finding that fails, else one that passes

so that a record, a page and a comparison have one line for each case and one for each cause. A finding that only
*follows* from another one of its case (where its numbers are wrong, those of other data, strides and rows are wrong
too) is no outcome: the outcome of that other one names its watch under ``also``.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from oracle.report.outcome import SEVERITY, Outcome
from oracle.verdict.compare import Verdict

NUMBERS = "numbers"
WHOLE = "-"  # the case of a finding on the whole run


@dataclass(frozen=True)
class Finding:
    """One watch of one case: ``watch`` is ``"numbers"`` or the name of what was watched.

    ``follows``: the watch of the case whose failure is all that is needed for this one, empty where there is none.
    """

    case: str
    watch: str
    verdict: Verdict
    seconds: float = 0.0
    follows: str = ""

    @property
    def fails(self) -> bool:
        """Whether this finding alone makes the kernel not conform."""
        return self.verdict.status.is_failure and not self.follows

    def to_json(self) -> dict[str, object]:
        named = {"case": self.case, "watch": self.watch, "seconds": round(self.seconds, 6), "fails": self.fails}
        return {**named, "follows": self.follows, "verdict": self.verdict.to_json()}


def outcomes(
    findings: Iterable[Finding],
    *,
    contract: str,
    subject: str,
    arch: str,
    source: str,
    command: Callable[[Finding], str],
) -> tuple[Outcome, ...]:
    """The outcomes of findings, cases first, each with the command that repeats it and where the kernel stands."""
    cases: dict[str, Finding] = {}
    watches: dict[str, Finding] = {}
    also: dict[str, dict[str, None]] = {}
    spent: dict[str, float] = {}
    for finding in findings:
        if finding.follows:
            also.setdefault(finding.case if finding.follows == NUMBERS else finding.follows, {})[finding.watch] = None
            continue
        numbers = finding.watch == NUMBERS and finding.case != WHOLE
        table, key = (cases, finding.case) if numbers else (watches, finding.watch)
        if not numbers:
            spent[key] = spent.get(key, 0.0) + finding.seconds
        worst = table.setdefault(key, finding)
        if SEVERITY.index(finding.verdict.status) < SEVERITY.index(worst.verdict.status):
            table[key] = finding
    rows = [
        Outcome(
            case,
            contract,
            subject,
            arch,
            finding.verdict,
            finding.seconds,
            command=command(finding),
            also=tuple(also.get(case, ())),
            source=source,
        )
        for case, finding in cases.items()
    ]
    rows += [
        Outcome(
            f"{contract}/{watch}",
            contract,
            subject,
            arch,
            finding.verdict,
            spent[watch],
            command=command(finding),
            watch=watch,
            also=tuple(also.get(watch, ())),
            source=source,
        )
        for watch, finding in watches.items()
    ]
    return tuple(rows)


def findings(recorded: Iterable[Outcome]) -> tuple[Finding, ...]:
    """The findings of recorded outcomes: those of the cases, and for each watch the one that was recorded."""
    rows = []
    for outcome in recorded:
        words = shlex.split(outcome.repro)
        case = words[words.index("--case") + 1] if "--case" in words else WHOLE
        watch, seen = (outcome.watch, case) if outcome.watch else (NUMBERS, outcome.id)
        rows.append(Finding(seen, watch, outcome.verdict, outcome.seconds))
        followed = replace(outcome.verdict, summary=f"follows from {watch}: {outcome.verdict.summary}")
        rows += [Finding(seen, name, followed, follows=watch) for name in outcome.also]
    return tuple(rows)


def told(record: Mapping[str, object]) -> tuple[str, str, float, str]:
    """Case, watch, seconds and ``follows`` of a finding in JSON; ValueError where one is of another kind."""
    case, watch, seconds, follows = (record.get(name) for name in ("case", "watch", "seconds", "follows"))
    if not isinstance(case, str) or not isinstance(watch, str) or not isinstance(seconds, int | float):
        raise ValueError("a finding lacks its case, watch or seconds")
    return case, watch, float(seconds), follows if isinstance(follows, str) else ""
