"""Which cases a profile runs.

``quick`` and ``full`` list what the grammar of a contract lists (:class:`oracle.routines.case.Grammar`): shapes where
kernels change behaviour on ordinary data, every family at one of them; ``full`` more shapes and seeds. ``compact`` is
``quick`` thinned out, for outputs that are to be stored: every dtype, option and family once, every dtype on ordinary
data, every scheme once at each shape. ``brief`` is what a greedy cover takes of ``quick`` to show every class of it
(:func:`classes`), for an answer in a minute: no list, and the same cases each time.

Not covered: shapes of real models (:func:`oracle.routines.drawn.real_cases`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from oracle.errors import CaseError, among
from oracle.routines.cases import Case, grammars, parse

PROFILES = ("brief", "quick", "full", "compact")


def cases(contract: str, profile: str) -> list[Case]:
    """The cases of one contract in one profile; empty for a contract that no case exists for.

    Raises
    ------
    CaseError
        The profile does not exist.
    """
    if profile not in PROFILES:
        raise CaseError(f"no profile {profile!r}; {among(profile, PROFILES)}")
    if contract not in grammars():
        return []
    if profile == "compact":
        return _thinned(cases(contract, "quick"))
    if profile == "brief":
        return _covering(cases(contract, "quick"))
    return [parse(text) for text in dict.fromkeys(grammars()[contract].ids(contract, profile))]


def count(contract: str, profile: str) -> int:
    """How many cases ``quick`` or ``full`` has of one contract, without parsing them."""
    return len(set(grammars()[contract].ids(contract, profile))) if contract in grammars() else 0


def _thinned(chosen: Iterable[Case]) -> list[Case]:
    """Those that show something for the first time."""
    seen: set[tuple[object, ...]] = set()
    thinned = []
    for case in chosen:
        shows = {(case.dtypes, case.extents), (case.scheme, case.extents), ("family", case.family)}
        shows |= set(case.options)
        if case.family == "randn":  # on exact data equal scales hide much
            shows.add(("ordinary", case.dtypes))
        if shows - seen:
            thinned.append(case)
        seen |= shows
    return thinned


Class = tuple[object, ...]


def classes(case: Case, extremes: Mapping[str, tuple[int, int]]) -> set[Class]:
    """What a case is one of: each value of each part of its id but the seed, each change of the call, and the least and
    the most that is listed of each extent (``extremes``)."""
    parts = {(part, getattr(case, part)) for part in ("dtypes", "scheme", "family")}
    ends = {("extent", name, n) for name, n in case.extents if n in extremes[name]}
    return {*parts, *ends, *(("option", *o) for o in case.options), *(("change", *c) for c in case.changes)}


def extremes(chosen: list[Case]) -> dict[str, tuple[int, int]]:
    """The least and the most of each extent among cases of one contract."""
    names = [name for name, _ in chosen[0].extents] if chosen else []
    return {name: (min(case[name] for case in chosen), max(case[name] for case in chosen)) for name in names}


def _covering(chosen: list[Case]) -> list[Case]:
    """A greedy cover of the classes of the cases, in their order: the case with most classes that no other one has
    shown, of several the smallest, then the first."""
    ends = extremes(chosen)
    left = {case: classes(case, ends) for case in chosen}
    size = {case: (prod(n for _, n in case.extents), number) for number, case in enumerate(chosen)}
    taken = set()
    while any(left.values()):
        best = min(left, key=lambda case: (-len(left[case]), size[case]))
        shown = left.pop(best)
        taken.add(best)
        left = {case: rest - shown for case, rest in left.items()}
    return [case for case in chosen if case in taken]
