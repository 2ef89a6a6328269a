"""Which cases a profile runs.

``quick`` and ``full`` list what the grammar of a contract lists (:class:`oracle.routines.case.Grammar`): shapes where
kernels change behaviour on ordinary data, every family at one of them; ``full`` more shapes and seeds. ``compact`` is
``quick`` thinned out, for outputs that are to be stored: every dtype, option and family once, every dtype on ordinary
data, every scheme once at each shape.

Not covered: shapes of real models (:func:`oracle.routines.drawn.real_cases`).
"""

from __future__ import annotations

from collections.abc import Iterable

from oracle.errors import CaseError, among
from oracle.routines.cases import Case, grammars, parse

PROFILES = ("quick", "full", "compact")


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
    return [parse(text) for text in dict.fromkeys(grammars()[contract].ids(contract, profile))]


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
