"""What one run found, as records that every report is a pure function of. No tensors here.

The JSON form is versioned (``fp8-oracle.report/1``); fields are only ever added.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

from oracle.verdict.compare import Status, Verdict

SCHEMA = "fp8-oracle.report/1"

# From worst to best: a group of outcomes shows the first of these that occurs in it.
SEVERITY = (
    Status.CRASHED,
    Status.FAILED,
    Status.UNTESTED,
    Status.MISTRUSTED,
    Status.PASSED,
    Status.UNSUPPORTED,
    Status.SKIPPED,
)


def quoted(text: str) -> str:
    """``text`` as one word of a shell, always in quotes."""
    word = shlex.quote(text)
    return word if word.startswith("'") else f"'{word}'"


@dataclass(frozen=True)
class Outcome:
    """One judged (or unjudgeable) case of one subject.

    ``id`` is a case id, ``captures/<file>/<output>``, or ``pytest/<node id>`` (then ``#2`` and so on, where one test
    judges several outputs); ``known`` is the ledger's reason when the failure is a known one, and such an outcome does
    not fail the run.
    """

    id: str
    contract: str
    subject: str
    arch: str
    verdict: Verdict
    seconds: float = 0.0
    known: str | None = None

    @property
    def status(self) -> Status:
        return self.verdict.status

    @property
    def fails(self) -> bool:
        return self.status.is_failure and self.known is None

    @property
    def repro(self) -> str:
        """The command that runs this outcome alone; ids that are no case have none."""
        if "/" not in self.id:
            return ""
        if self.id.startswith("pytest/"):
            return f"pytest {shlex.quote(re.sub('#[0-9]+$', '', self.id.removeprefix('pytest/')))}"
        live = "" if self.id.startswith("captures/") else f" --subject {quoted(self.subject)}"
        return f"fp8-oracle verify --case {quoted(self.id)}{live}"

    def to_json(self) -> dict[str, object]:
        return {
            "id": self.id,
            "contract": self.contract,
            "subject": self.subject,
            "arch": self.arch,
            "seconds": round(self.seconds, 6),
            "known_failure": self.known,
            "fails": self.fails,
            "repro": self.repro,
            "verdict": self.verdict.to_json(),
        }


@dataclass(frozen=True)
class Group:
    """All outcomes of one contract, subject and arch: a row of the table."""

    contract: str
    subject: str
    arch: str
    outcomes: tuple[Outcome, ...]

    @property
    def status(self) -> Status:
        open_ones = {o.status for o in self.outcomes if o.known is None}
        return min(open_ones or {o.status for o in self.outcomes}, key=SEVERITY.index)

    @property
    def known(self) -> int:
        return sum(o.known is not None for o in self.outcomes)

    @property
    def judged(self) -> int:
        """Outcomes with a comparison behind them."""
        return sum(o.status in (Status.PASSED, Status.FAILED, Status.MISTRUSTED) for o in self.outcomes)

    @property
    def margin(self) -> float | None:
        """The largest margin of the passing outcomes: 0 is the correctly rounded value, 1 the edge of the bound."""
        margins = [o.verdict.margin for o in self.outcomes if o.status in (Status.PASSED, Status.MISTRUSTED)]
        return max(margins, default=None)


@dataclass(frozen=True)
class Report:
    """A whole run: its outcomes, what the known-failures ledger complains of, and the machine.

    ``versions`` is all that a verdict may depend on beside its case; ``started`` an ISO time in UTC; ``unfinished``
    counts what an interrupted run did not come to, and such a run is not ok.
    """

    outcomes: tuple[Outcome, ...]
    complaints: tuple[str, ...] = ()
    machine: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    started: str = ""
    unfinished: int = 0

    @property
    def failures(self) -> tuple[Outcome, ...]:
        return tuple(o for o in self.outcomes if o.fails)

    @property
    def ok(self) -> bool:
        """Something was judged, nothing fails, nothing is left to do, and the ledger is true."""
        judged = any(o.status in (Status.PASSED, Status.FAILED, Status.MISTRUSTED) for o in self.outcomes)
        return judged and not self.failures and not self.complaints and not self.unfinished

    def groups(self) -> list[Group]:
        """Outcomes by contract, subject and arch, in order of first appearance."""
        rows: dict[tuple[str, str, str], list[Outcome]] = {}
        for o in self.outcomes:
            rows.setdefault((o.contract, o.subject, o.arch), []).append(o)
        return [Group(*key, tuple(group)) for key, group in rows.items()]

    def counts(self) -> dict[str, int]:
        """Number of outcomes per status; known failures under ``"KNOWN"``, every status present."""
        counted = {str(status): 0 for status in Status} | {"KNOWN": 0}
        for o in self.outcomes:
            counted["KNOWN" if o.known is not None else str(o.status)] += 1
        return counted

    def to_json(self) -> dict[str, object]:
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "counts": self.counts(),
            "complaints": list(self.complaints),
            "machine": self.machine,
            "versions": self.versions,
            "started": self.started,
            "unfinished": self.unfinished,
            "seconds": round(self.seconds, 3),
            "outcomes": [o.to_json() for o in self.outcomes],
        }
