"""What one run found, as records: outcomes, groups of them, the whole report, and failures grouped by cause.

Every report for readers is a pure function of :class:`Report`. The JSON form is versioned (``fp8-oracle.report/1``);
fields are only ever added. No tensors here.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median_low

from oracle.errors import counted
from oracle.verdict.compare import Status, Verdict
from oracle.verdict.loss import share

SCHEMA = "fp8-oracle.report/1"

# From worst to best.
SEVERITY = tuple(map(Status, ("CRASHED", "FAILED", "UNTESTED", "MISTRUSTED", "PASSED", "UNSUPPORTED", "SKIPPED")))
JUDGED = (Status.PASSED, Status.FAILED, Status.MISTRUSTED)
"""The statuses with a comparison behind them."""
PASSING = (Status.PASSED, Status.MISTRUSTED)
KNOWN = "KNOWN FAILURE"


# Control characters but tab and line feed, what reorders a line, and halves of surrogate pairs, which are no text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """``text`` with ``?`` for every character that a terminal or a page would obey instead of showing it."""
    return _CONTROL.sub("?", text)


def quoted(text: str) -> str:
    """``text`` as one word of a shell, always in quotes."""
    word = shlex.quote(text)
    return word if word.startswith("'") else f"'{word}'"


@dataclass(frozen=True)
class Outcome:
    """One judged (or unjudgeable) case of one subject.

    ``id`` is a case id, ``captures/<file>/<output>``, ``calls/<path>`` of a recorded call, ``pytest/<node id>`` (then
    ``#2`` and so on, where one test judges several outputs), or ``CONTRACT/WATCH`` of a validation
    (:mod:`oracle.report.findings`); ``known`` is the ledger's reason when the failure is a known one, and such an
    outcome does not fail the run. ``command`` repeats it: None where the id alone says how. ``watch`` is what was
    watched, empty for numbers; ``also`` the watches that fail only because the numbers do. ``source`` is where the
    kernel or the test stands, as ``FILE:LINE``, or "".
    """

    id: str
    contract: str
    subject: str
    arch: str
    verdict: Verdict
    seconds: float = 0.0
    known: str | None = None
    command: str | None = None
    watch: str = ""
    also: tuple[str, ...] = ()
    source: str = ""

    @property
    def status(self) -> Status:
        return self.verdict.status

    @property
    def fails(self) -> bool:
        return self.status.is_failure and self.known is None

    @property
    def called(self) -> bool:
        """Whether it is a case that ran: no watch over several, none that the subject or the machine refused."""
        return not self.watch and self.status not in (Status.UNSUPPORTED, Status.SKIPPED)

    @property
    def word(self) -> str:
        """The status, or KNOWN FAILURE."""
        return KNOWN if self.known is not None else str(self.status)

    @property
    def repro(self) -> str:
        """The command that runs this outcome alone; empty for an id that is no case."""
        if self.command is not None:
            return self.command
        if "/" not in self.id:
            return ""
        if self.id.startswith("pytest/"):
            return f"pytest {shlex.quote(re.sub('#[0-9]+$', '', self.id.removeprefix('pytest/')))}"
        if self.id.startswith("calls/"):
            return f"fp8-oracle explain {quoted(self.id.removeprefix('calls/'))}"
        live = "" if self.id.startswith("captures/") else f" --subject {quoted(self.subject)}"
        return f"fp8-oracle verify --case {quoted(self.id)}{live}"

    def to_json(self) -> dict[str, object]:
        return {
            **{name: getattr(self, name) for name in ("id", "contract", "subject", "arch")},
            "seconds": round(self.seconds, 6),
            "known_failure": self.known,
            "fails": self.fails,
            "repro": self.repro,
            "source": self.source,
            "verdict": self.verdict.to_json(),
            **({"watch": self.watch} if self.watch else {}),
            **({"also": list(self.also)} if self.also else {}),
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
        """The worst failure, else PASSED where anything passed: a MISTRUSTED case beside it makes nothing wrong."""
        open_ones = {o.status for o in self.outcomes if o.known is None}
        worst = min(open_ones or {o.status for o in self.outcomes}, key=SEVERITY.index)
        return Status.PASSED if worst is Status.MISTRUSTED and Status.PASSED in open_ones else worst

    @property
    def known(self) -> int:
        return sum(o.known is not None for o in self.outcomes)

    @property
    def others(self) -> str:
        """Outcomes that the word of the group does not tell of: ``2 known, 1 mistrusted``."""
        mistrusted = sum(o.status is Status.MISTRUSTED for o in self.outcomes)
        counted = ((self.known, "known"), (mistrusted if self.status is not Status.MISTRUSTED else 0, "mistrusted"))
        return ", ".join(f"{n} {word}" for n, word in counted if n)

    @property
    def judged(self) -> int:
        """Outcomes with a comparison behind them; a watch over many cases is none."""
        return sum(o.status in JUDGED and not o.watch for o in self.outcomes)

    @property
    def failing(self) -> str:
        """``79 of 101 fail``: of the cases that were called; watches, which look at many of them, are counted apart."""
        cases = [o for o in self.outcomes if o.called]
        counts = (sum(o.fails for o in cases), len(cases)), (sum(o.fails for o in self.watches), len(self.watches))
        ends = " fail", f" {'watch' if len(self.watches) == 1 else 'watches'} fail"
        return ", ".join(f"{n} of {most}{end}" for (n, most), end in zip(counts, ends, strict=True) if n)

    @property
    def watches(self) -> tuple[Outcome, ...]:
        return tuple(o for o in self.outcomes if o.watch)

    @property
    def size(self) -> str:
        """``101 cases, 13 watches``."""
        return extent(self.outcomes)

    @property
    def word(self) -> str:
        """The status, or KNOWN FAILURE where every outcome is one."""
        return KNOWN if self.known == len(self.outcomes) else str(self.status)

    @property
    def margin(self) -> float | None:
        """The largest margin of the passing outcomes: 0 is the correctly rounded value, 1 the edge of the bound."""
        return max((o.verdict.margin for o in self.outcomes if o.status in PASSING), default=None)


@dataclass(frozen=True)
class Report:
    """A whole run: its outcomes, the complaints of the known-failures ledger, and the machine.

    ``versions`` is all that a verdict may depend on beside its case; ``started`` an ISO time in UTC; ``unfinished``
    counts the cases that an interrupted run did not run; ``gaps`` says what else of the run the file that was read
    lacks. A run with either is not ok. ``part`` says how much of what exists was judged, where it is a part.
    """

    outcomes: tuple[Outcome, ...]
    complaints: tuple[str, ...] = ()
    machine: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    started: str = ""
    unfinished: int = 0
    gaps: tuple[str, ...] = ()
    part: str = ""

    @property
    def failures(self) -> tuple[Outcome, ...]:
        return tuple(o for o in self.outcomes if o.fails)

    @property
    def ok(self) -> bool:
        """Something was judged, nothing fails, nothing is missing, and the ledger agrees with the outcomes."""
        judged = any(o.status in JUDGED for o in self.outcomes)
        return judged and not self.failures and not self.problems and not self.unfinished

    @property
    def problems(self) -> tuple[str, ...]:
        """The complaints and the gaps."""
        return (*self.complaints, *self.gaps)

    def groups(self) -> list[Group]:
        """Outcomes by contract, subject and arch, in order of first appearance."""
        rows: dict[tuple[str, str, str], list[Outcome]] = {}
        for o in self.outcomes:
            rows.setdefault((o.contract, o.subject, o.arch), []).append(o)
        return [Group(*key, tuple(group)) for key, group in rows.items()]

    def counts(self) -> dict[str, int]:
        """Number of outcomes per status; known failures under ``"KNOWN"``, every status present."""
        return counts_of(self.outcomes)

    @property
    def parts(self) -> tuple[dict[str, int], dict[str, int]]:
        """The counts of the cases, and those of the watches."""
        cases, watches = ([o for o in self.outcomes if bool(o.watch) == watch] for watch in (False, True))
        return counts_of(cases), counts_of(watches)

    @property
    def words(self) -> str:
        """``3 passed, 1 failed``, and what became of the watches."""
        texts = [", ".join(f"{n} {name.lower()}" for name, n in counts.items() if n) for counts in self.parts]
        return "; watches: ".join(filter(None, texts)) or "nothing was judged"

    def to_json(self) -> dict[str, object]:
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "counts": self.counts(),
            "complaints": list(self.problems),
            **{name: getattr(self, name) for name in ("machine", "versions", "started", "unfinished")},
            "seconds": round(self.seconds, 3),
            **({"part": self.part} if self.part else {}),
            "outcomes": [o.to_json() for o in self.outcomes],
        }


def extent(outcomes: Iterable[Outcome]) -> str:
    """``101 cases, 13 watches``."""
    watches = [bool(o.watch) for o in outcomes]
    cases, more = counted(watches.count(False), "case"), counted(sum(watches), "watch", "watches")
    return f"{cases}, {more}" if any(watches) else cases


def counts_of(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Number of outcomes per status; known failures under ``"KNOWN"``, every status present."""
    counts = {str(status): 0 for status in Status} | {"KNOWN": 0}
    for o in outcomes:
        counts["KNOWN" if o.known is not None else str(o.status)] += 1
    return counts


LOSS = "loss of quantisers: median of the cases (worst); no verdict depends on it"
LOSS_COLUMNS = ("routine", "subject", "arch", "cases", "SQNR dB", "relative error", "saturated", "lost to zero")


def losses(report: Report) -> list[tuple[str, ...]]:
    """For each contract, subject and arch with a measured loss the cells of :data:`LOSS_COLUMNS`."""
    rows: list[tuple[str, ...]] = []
    for group in report.groups():
        measured = [o.verdict.loss for o in group.outcomes if o.verdict.loss is not None]
        if measured:
            cells = (
                _middle([x.sqnr for x in measured], lambda x: f"{x:.1f}", min),
                _middle([x.relative for x in measured], lambda x: f"{x:.3g}", max),
                _middle([x.saturated for x in measured], share, max),
                _middle([x.zeros for x in measured], share, max),
            )
            rows.append((group.contract, group.subject, group.arch, str(len(measured)), *cells))
    return rows


def _middle(values: list[float], words: Callable[[float], str], worst: Callable[[list[float]], float]) -> str:
    """The lower median and the worst of some figures."""
    return f"{words(median_low(values))} ({words(worst(values))})"


@dataclass(frozen=True)
class Cause:
    """Outcomes that fail for one reason, as far as is known.

    One subject of one routine on one arch, with one status, one watch and one known reason; routines that nothing
    exercises are one cause. ``tried`` counts the subject's outcomes that ran.
    """

    outcomes: tuple[Outcome, ...]
    tried: int

    @property
    def status(self) -> Status:
        return self.outcomes[0].status

    @property
    def missing(self) -> bool:
        """Whether it is routines that nothing exercises."""
        return self.status is Status.UNTESTED and not self.outcomes[0].watch

    @property
    def known(self) -> str | None:
        return self.outcomes[0].known

    @property
    def word(self) -> str:
        """FAILED, CRASHED, UNTESTED, or KNOWN FAILURE."""
        return self.outcomes[0].word

    @property
    def title(self) -> str:
        first = self.outcomes[0]
        if self.missing:
            return f"{len(self.outcomes)} routines" if len(self.outcomes) > 1 else first.contract
        return first.subject

    @property
    def where(self) -> str:
        """Routine, arch and how many of the subject's outputs."""
        first, count = self.outcomes[0], len(self.outcomes)
        if self.missing:
            return "nothing on this machine and no capture exercises " + ("them" if count > 1 else "it")
        what = "wrong" if self.status is Status.FAILED else "without a result that can be judged"
        arch = "" if first.arch == "-" else f" on {first.arch}"
        if first.watch:
            return f"{first.contract}{arch}: {first.watch}"
        return f"{first.contract}{arch}: {count} of {counted(self.tried, 'output')} {what}"

    @property
    def explained_by(self) -> tuple[str, ...]:
        """Every explanation that some outcome has, most frequent first."""
        counted = Counter(name for o in self.outcomes for name in o.verdict.explained_by)
        return tuple(name for name, _ in counted.most_common())

    @property
    def why(self) -> str:
        """One sentence: the known reason, else the explanation, else what was seen."""
        if self.known is not None:
            return self.known
        if self.explained_by:
            return "; or ".join(self.explained_by)
        if self.missing:
            return ", ".join(o.contract for o in self.outcomes)
        reasons = {o.verdict.reason or o.verdict.pattern or o.verdict.summary for o in self.outcomes}
        first = self.outcomes[0].verdict
        return (first.reason or first.pattern or first.summary) + ("" if len(reasons) == 1 else " (others differ)")


def causes(report: Report) -> list[Cause]:
    """Every failure of a report by cause: open ones before known ones, wrong numbers, crashes, then missing tests."""
    tried: Counter[tuple[str, str, str]] = Counter()
    groups: dict[tuple[object, ...], list[Outcome]] = {}
    for o in report.outcomes:
        of = (o.contract, o.subject, o.arch)
        tried[of] += o.called
        if o.status.is_failure:
            missing = o.status is Status.UNTESTED and not o.watch
            groups.setdefault((o.status, o.known, *(() if missing else (*of, o.watch))), []).append(o)
    result = [Cause(tuple(os), tried[os[0].contract, os[0].subject, os[0].arch]) for os in groups.values()]
    order = (Status.FAILED, Status.CRASHED, Status.UNTESTED)
    return sorted(result, key=lambda c: (c.known is not None, order.index(c.status)))
