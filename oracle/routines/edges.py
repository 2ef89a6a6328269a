"""Edge cases of any contract, made from its grammar: tails of every residue class, and data at the limits of a store.

*Tails.* A kernel takes an extent in vectors and tiles of ``2**j`` elements, so whether the last one is whole depends on
the largest power of two that divides the extent, and on how much of the last 128 is left. :data:`RESIDUES` holds, for
each ``j`` below 7, one residue modulo 128 that ``2**j`` divides and ``2**(j + 1)`` does not, just above a multiple of
128 and just below one; each occurs below 128 as well (a K smaller than a scale block, a tile larger than the output)
and above. 72 stands for a K of 200, of which vectors of 8 and no larger ones fit. Extents that the contract takes in
steps only are rounded up to their step (:func:`oracle.routines.domain.learned`, asked of the contract's own check).

The schemes of a contract take the tails in turn, which begins elsewhere for another seed.

*Limits.* Every family of :data:`oracle.routines.data.EDGE_FAMILIES` that the grammar names, for every scheme and every
output dtype on which it shows something, at a small shape with tails.

How many multiples of 128 lie below a residue, and the last :data:`DRAWN` shapes, are drawn from ``seed``: whoever wrote
the kernel does not know them. The same seed gives the same cases. Not covered: extents that depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from oracle.errors import OracleError
from oracle.routines import profiles
from oracle.routines.base import Call
from oracle.routines.case import Case
from oracle.routines.cases import grammars
from oracle.routines.data import EDGE_FAMILIES, Stream
from oracle.routines.domain import EVERYTHING, Domain, Extents, learned, parse
from oracle.routines.family import get

TILE = 128
RESIDUES = (1, 127, 16, 64, 2, 126, 4, 124, 8, 120, 112, 32, 96, 72)
TWICE = (1, 16, 64, 127)  # residues that occur below 128 and above it in every run
# Residues of the other extents, in an order of their own: no two extents have the same residue throughout.
OTHERS = (127, 1, 8, 33, 64, 120, 15, 2, 96, 31, 72, 63, 17)
DRAWN = 6
LARGEST = 320  # of a drawn extent: two tiles of 128 and a tail, or a scale block between two others
BIGGEST = 1 << 22  # elements of the volume of an edge case, or the largest listed volume: it takes milliseconds
DEEP = ("k", "i", "h", "n", "c", "t")
"""The extent that gets :data:`RESIDUES`, the first that is free: one that is summed over, where there is one."""


def edge_cases(contract: str, seed: int) -> list[Case]:
    """The edge cases of a contract, valid calls all of them; none for one without free extents and edge families.

    Raises CaseError: no contract of that name has cases.
    """
    listed = profiles.cases(contract, "quick")
    cases = [*_tails(contract, listed, seed), *_limits(contract, listed, seed)]
    return list({case: None for case in cases if str(case) not in {str(other) for other in listed}})


@cache
def domain_of(contract: str, free: tuple[str, ...] | None = None) -> Domain:
    """The extents that the contract itself takes: what its grammar says, and its own check of calls near its smallest
    case, for the extents in ``free`` (by default those that the grammar draws)."""
    base = smallest(contract)
    free = base.grammar.free if free is None else free
    domain = parse(base.grammar.domain, base.grammar.extents) if base.grammar.domain else EVERYTHING

    def admits(extents: Extents) -> bool:
        return domain.holds(extents) and valid(replace(base, extents=tuple(extents.items())))

    largest = {name: 2 * TILE for name in free}
    drawn = base.grammar.free
    extents = {name: -(-extent // TILE) * TILE if name in drawn else extent for name, extent in base.extents}
    start = extents if admits(extents) else dict(base.extents)
    return learned(admits, start, free, {**dict(base.extents), **largest})[0]


def valid(case: Case) -> bool:
    """Whether a case is a call that its contract takes, and has outputs for; its inputs wait for the first call."""
    contract = get(case.contract)
    try:
        inputs = case.inputs()
        contract.outputs(Call(contract, inputs, case.call_options()).checked())
    except OracleError:
        return False
    case.prepare(inputs)
    return True


def _tails(contract: str, listed: list[Case], seed: int) -> Iterator[Case]:
    ordinary = _ordinary(listed)
    free = ordinary[0].grammar.free
    if not free:
        return
    stream, domain = Stream(f"edges/{contract}/{seed}"), domain_of(contract)
    deep = next((name for name in DEEP if name in free), "")  # rows of a table have no tails
    tails = (*RESIDUES, *TWICE) if deep else ()
    most = max(BIGGEST, *map(volume, listed))
    words: Iterator[int] = iter(stream.integers(0, 1 << 32, (64 * (len(RESIDUES) + len(TWICE) + DRAWN),)).tolist())
    shapes: list[dict[str, int]] = []
    for at, residue in enumerate(tails):
        again = at >= len(RESIDUES)
        blocks = 1 + next(words) % 2 if again or residue == 72 else 0 if residue in TWICE else next(words) % 3
        shapes.append({deep: TILE * blocks + residue})
        for place, name in enumerate(name for name in free if name != deep):
            rest = OTHERS[(at + place * 5) % len(OTHERS)]
            whole = next(words) % 5 == 0 or (name == "n" and rest in (1, 127))  # a tail of N behind a whole tile
            shapes[-1][name] = TILE * whole + rest
    shapes += [{name: 1 + next(words) % LARGEST for name in free} for _ in range(DRAWN)]
    usual = [case for case in ordinary if case.dtypes == case.grammar.dtypes[0]] or ordinary
    schemes = list({case.scheme: case for case in reversed(usual)}.values())
    turn = next(words)
    for at, shape in enumerate(shapes):
        drawn = at >= len(shapes) - DRAWN
        base = ordinary[(turn + at) % len(ordinary)] if drawn else schemes[(turn + at) % len(schemes)]
        extents = domain.nearest({**dict(base.extents), **shape}, free)
        case = None if extents is None else replace(base, extents=tuple(extents.items()), seed=seed)
        if case is not None and volume(case) <= most and valid(case):
            yield case


def _limits(contract: str, listed: list[Case], seed: int) -> Iterator[Case]:
    grammar = grammars()[contract]
    base = smallest(contract)
    domain = domain_of(contract) if grammar.edge_families else EVERYTHING
    wanted: Mapping[str, int] = {"m": 9, "n": 136, "k": 200}
    extents = domain.nearest(
        {name: wanted.get(name, extent) if name in grammar.free else extent for name, extent in base.extents},
        grammar.free,
    )
    stored: set[str] = set()
    for dtypes in grammar.dtypes:
        store = dtypes.partition("-")[2]
        if store in stored:
            continue  # other operand dtypes are stored alike
        stored.add(store)
        for scheme in grammar.schemes:
            for family in grammar.edge_families:
                if store not in EDGE_FAMILIES[family].stores or extents is None:
                    continue
                case = replace(base, dtypes=dtypes, scheme=scheme, family=family, seed=seed, options=())
                case = replace(case, extents=tuple(extents.items()))
                if valid(case):
                    yield case


def _ordinary(listed: list[Case]) -> list[Case]:
    """The cases of ordinary data without options; all of them where there are none."""
    usual = [case for case in listed if case.family in ("randn", case.grammar.families[0]) and not case.options]
    return usual or listed


def smallest(contract: str) -> Case:
    """The smallest listed case that has more than one of every group, where one has."""
    listed = profiles.cases(contract, "quick")
    several = [case for case in listed if dict(case.extents).get("g", 2) > 1] or listed
    return min(several, key=lambda case: (bool(case.options), volume(case)))


def volume(case: Case) -> int:
    """The product of the extents."""
    return math.prod(extent for _, extent in case.extents)
