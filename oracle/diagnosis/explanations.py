"""What a hypothesis explains of a failing output, as a record, and which of several comes first.

Not covered: how it was weighed (:mod:`oracle.diagnosis.hypotheses`, :mod:`oracle.diagnosis.localise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

LISTED = 0.5  # an explanation that covers less than half of the failing elements is not named


@dataclass(frozen=True)
class Explanation:
    """One hypothesis: of ``failing`` elements that it predicts, it reproduces ``explained``; of all it predicts
    ``known``, and contradicts ``contradicted``. ``placed``: the elements that fail, where they are those that it leaves
    unwritten or, ``beyond``, sums with scales from beyond a buffer. ``local``: what it contradicts is right without it.
    ``where``: its place, where that was found on the output (:mod:`oracle.diagnosis.localise`); it reproduces all that fails there.
    """

    name: str
    numerics: str
    explained: int
    failing: int
    known: int
    contradicted: int
    met_in: str = ""
    placed: int = 0
    local: bool = False
    beyond: bool = False
    where: str = ""

    @property
    def share(self) -> float:
        """Part of the failing elements whose bits it reproduces."""
        return self.explained / self.failing if self.failing else 0.0

    @property
    def complete(self) -> bool:
        """It reproduces every element that it predicts."""
        return self.contradicted == 0 and self.explained == self.failing > 0

    def __str__(self) -> str:
        if self.complete:
            return f"{self.name} ({self.where})" if self.where else self.name
        if self.local:
            return f"{self.name} (in the failing elements only, all of which it reproduces)"
        if self.beyond:
            return f"{self.name} (every failing row is such a sum, with scales from beyond the buffer)"
        if self.placed:
            return f"{self.name} (by place: every failing element, and nothing else, lies there)"
        return f"{self.name} ({100 * self.share:.3g}% of the failing elements)"


def ranked(found: Sequence[Explanation]) -> tuple[Explanation, ...]:
    """Complete explanations, those of half of what fails, those by place, the rest; within each the local ones first,
    then by the elements explained less those contradicted; ties as they came."""

    def rank(e: Explanation) -> tuple[int, bool, int]:
        tier = 0 if e.complete else 1 if e.local or e.share >= LISTED else 2 if e.placed else 3
        return tier, not e.local, e.contradicted - e.explained

    return tuple(sorted(found, key=rank))


def joined(x: Explanation, y: Explanation) -> Explanation:
    """One hypothesis weighed on two parts of an output."""
    return replace(
        x,
        explained=x.explained + y.explained,
        failing=x.failing + y.failing,
        known=x.known + y.known,
        contradicted=x.contradicted + y.contradicted,
        local=_all_local(x, y),
    )


def _all_local(x: Explanation, y: Explanation) -> bool:
    """Whether two parts of one explanation are local, those that speak of nothing left aside."""
    return (x.local or y.local) and all(e.local or (e.failing == e.contradicted == 0) for e in (x, y))
