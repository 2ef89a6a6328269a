"""What the failing cases of a run share: the explanation of most of them, or what only they have.

    agreed    each failing case keeps the explanations that most of the failing cases share
    apart     where none is left: the inputs that lie in memory of longer rows in every case that fails, and in few of
              those that pass

A failure of some inputs' strides alone is evidence by its place among the cases: ``f`` failing ones of ``N``, of which
``P`` have that input apart, all lie there by chance with the probability ``(P / N)**f`` at most. It is said where that
is less than :data:`oracle.diagnosis.observed.BY_CHANCE` over the inputs that may lie apart.

NaN plays no part. Source: derived here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import replace

from oracle.diagnosis.observed import needed
from oracle.harness.report import NUMBERS, Finding
from oracle.harness.session import UNWRITTEN
from oracle.numbers.recipe_table import recipes
from oracle.report.outcome import JUDGED
from oracle.routines import cases
from oracle.verdict.compare import Status

WRONG = (Status.FAILED, Status.CRASHED)


def agreed(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings, each with the explanations that most of the failing cases share: a small failure may have the bits
    of several faults. As many failures without a name refute one (those of which something was observed), of recipes,
    of which every one was tried on every failure, more of any. Names of which no two cases have one refute each
    other."""
    explained = [finding for finding in findings if _was_explained(finding)]
    shared = Counter(mechanism for finding in explained for mechanism in _mechanisms(finding))
    nameless = [f.verdict for f in explained if not f.verdict.explained_by]
    of_recipes = {_mechanism(name) for f in explained for name in f.verdict.explained_by if _recipes(name)}
    without, seen = len(nameless), sum(bool(verdict.observed) for verdict in nameless)
    shared = Counter({name: n for name, n in shared.items() if (n >= without if name in of_recipes else n > seen)})
    most = max(shared.values(), default=0)
    if most == 1 and len(explained) - without > 1:
        shared = Counter()
    best = {mechanism for mechanism, count in shared.items() if count == most}
    having = [f for f in explained if best <= _mechanisms(f)] or [f for f in explained if best & _mechanisms(f)]
    if having:  # of equally many the larger failure decides
        best &= _mechanisms(max(having, key=lambda f: f.verdict.outside))
    return tuple(_sharing(finding, best) if _was_explained(finding) else finding for finding in findings)


def apart(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings on cases; where no failing one is explained, each is by the inputs whose rows lie apart in memory in
    all of them (``x:pitch`` in a case id), if the other cases make chance improbable (the head of this file)."""
    tried = [f for f in findings if f.watch == NUMBERS and f.verdict.status in (*JUDGED, Status.CRASHED)]
    failing = [f for f in tried if f.verdict.status in WRONG]
    if not failing or any(f.verdict.explained_by for f in failing):
        return tuple(findings)
    views = Counter(name for f in tried for name in cases.parse(f.case).pitches)
    of_failing = Counter(name for f in failing for name in cases.parse(f.case).pitches)
    names = [
        name
        for name, count in views.items()
        if of_failing[name] == len(failing) and len(failing) * math.log2(len(tried) / count) >= needed(len(views))
    ]
    if not names:
        return tuple(findings)
    text = f"strides of {' or '.join(names)} not followed: only calls with rows apart in memory fail"
    return tuple(
        replace(f, verdict=replace(f.verdict, explained_by=(text,), observed=())) if f in failing else f
        for f in findings
    )


def _was_explained(finding: Finding) -> bool:
    verdict = finding.verdict
    if finding.watch != NUMBERS or verdict.status is not Status.FAILED or verdict.explained_by == (UNWRITTEN,):
        return False
    return bool(verdict.explained_by or verdict.observed or verdict.tried)


def _recipes(name: str) -> bool:
    """Whether an explanation names recipes alone."""
    return all(word in recipes() for word in name.split("; or "))


def _mechanism(name: str) -> str:
    """An explanation without the numbers and places of its call."""
    return re.sub(r" ?\(.*?\)|\d+", "", name)


def _mechanisms(finding: Finding) -> frozenset[str]:
    return frozenset(map(_mechanism, finding.verdict.explained_by))


def _sharing(finding: Finding, best: Set[str]) -> Finding:
    """The finding with those of its explanations that are among the best."""
    names, observed = finding.verdict.explained_by, finding.verdict.observed
    left = tuple(name for name in names if _mechanism(name) in best)
    if names and not left:
        observed = (f"it has the bits of {'; or '.join(names)}, which explains fewer of the failing cases",)
    return replace(finding, verdict=replace(finding.verdict, explained_by=left, observed=observed))
