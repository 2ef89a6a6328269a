"""Where two recordings part (:mod:`oracle.harness.bisecting`), in words and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from oracle.errors import counted
from oracle.report import console as words
from oracle.report.outcome import Outcome
from oracle.verdict.compare import Verdict

SCHEMA = "fp8-oracle.bisect/1"
MEANINGS = {
    "SAME": "every pair of calls has equal bits",
    "LEGAL": "the outputs differ for equal inputs, and everything that was judged is admissible",
    "FAULT": "a call is inadmissible",
    "UNSEEN": "inputs differ before any recorded output does: what makes the difference was not recorded",
}
STYLES = {"SAME": "bold green", "LEGAL": "bold green", "FAULT": "bold red", "UNSEEN": "bold yellow"}


@dataclass(frozen=True)
class Side:
    """A call of one recording (``which``: A or B) and its verdict."""

    which: str
    file: str
    kernel: str
    layer: str
    arch: str
    verdict: Verdict

    @property
    def outcome(self) -> Outcome:
        """The call as an outcome, with the command that repeats it."""
        return Outcome(f"calls/{self.file}", "", self.kernel, self.arch, self.verdict)

    @property
    def said(self) -> str:
        """The verdict in words, with the schedule that has the bits, or the proof."""
        verdict = self.verdict
        if verdict.status.is_failure:
            return f"{verdict.status}, {'; or '.join(verdict.explained_by) or verdict.reason or verdict.summary}"
        by = f"the bits of {verdict.matches}" if verdict.matches else f"within the {verdict.basis}"
        return f"{verdict.status}, {by}"


@dataclass(frozen=True)
class Difference:
    """How many of the ``elements`` of an output differ, and by how many ulps at most; None where nothing can be
    counted: other shapes or dtypes."""

    output: str
    differing: int | None
    elements: int
    ulps: float | None

    def __str__(self) -> str:
        if self.differing is None:
            return f"{self.output} has another shape or dtype"
        by = "" if self.ulps is None else f", by {self.ulps:.3g} ulps at most"
        return f"{self.differing} of {counted(self.elements, 'element')} of {self.output} differ{by}"


@dataclass(frozen=True)
class Parting:
    """The first pair of calls that differ: in ``inputs`` (and options), by name, and in ``outputs``."""

    layer: str
    contract: str
    occurrence: int
    inputs: tuple[str, ...]
    outputs: tuple[Difference, ...]
    sides: tuple[Side, Side]


@dataclass(frozen=True)
class Bisected:
    """Two recordings: ``pairs`` calls of both, of which the first ``equal`` have equal bits; ``alone`` counts the calls
    of either that the other has not; ``wrong`` are the first inadmissible calls, of one side or both."""

    one: str
    other: str
    pairs: int
    equal: int
    alone: tuple[int, int]
    parting: Parting | None
    wrong: tuple[Side, ...]
    seconds: float

    @property
    def word(self) -> str:
        """SAME, LEGAL, FAULT or UNSEEN."""
        if self.wrong:
            return "FAULT"
        if self.parting is None:
            return "SAME"
        return "UNSEEN" if self.parting.inputs else "LEGAL"

    @property
    def ok(self) -> bool:
        return self.word in ("SAME", "LEGAL")

    def lines(self) -> Iterator[str]:
        """What is to be said, before the closing line."""
        for which, folder, left in zip("AB", (self.one, self.other), self.alone, strict=True):
            more = f"; {counted(left, 'call')} that the other has not" if left else ""
            yield f"{which}: {folder}{more}"
        if self.parting is None:
            return
        p = self.parting
        before = f"{counted(self.equal, 'pair')} before it equal"
        yield f"they part in {p.layer}, call {p.occurrence} of {p.contract}; {before}"
        if p.inputs:
            yield f"  inputs differ: {', '.join(p.inputs)}; nothing that was recorded before makes them differ"
        for difference in p.outputs:
            yield f"  {'' if p.inputs else 'equal inputs; '}{difference}"
        for side in p.sides:
            yield f"  {side.which} [{side.kernel}, {side.arch}]: {side.said}"


def print_bisected(report: Bisected, screen: Console) -> None:
    """Where they part, what is inadmissible, and the answer."""
    for line in report.lines():
        screen.print(line, soft_wrap=True)
    for side in report.wrong:
        screen.print(Text(f"the first inadmissible call of {side.which}, in {side.layer}:"), soft_wrap=True)
        screen.print(words.sentence(side.outcome), soft_wrap=True)
    text = f"  {MEANINGS[report.word]}; {counted(report.pairs, 'pair')} of calls, {report.seconds:.1f} s"
    screen.print(Text.assemble((report.word, STYLES[report.word]), text), soft_wrap=True)


def to_json(report: Bisected) -> dict[str, object]:
    """A JSON-ready dict; an infinite distance becomes the string ``"inf"``."""
    p = report.parting
    parting = None
    if p is not None:
        outputs = [{**vars(each), "ulps": _plain(each.ulps)} for each in p.outputs]
        parting = {
            "layer": p.layer,
            "contract": p.contract,
            "occurrence": p.occurrence,
            "inputs": list(p.inputs),
            "outputs": outputs,
            "sides": list(map(_side, p.sides)),
        }
    names = ("word", "ok", "one", "other", "pairs", "equal")
    head = {name: getattr(report, name) for name in names}
    more = {"alone": list(report.alone), "parting": parting, "wrong": list(map(_side, report.wrong))}
    return {"schema": SCHEMA, **head, **more, "seconds": round(report.seconds, 3)}


def _side(side: Side) -> dict[str, object]:
    return {**vars(side), "verdict": side.verdict.to_json(), "repro": side.outcome.repro}


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
