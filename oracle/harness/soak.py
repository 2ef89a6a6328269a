"""Random cases of one contract without end, the same ones for the same seed.

Extents are drawn: M from the heights on both sides of every tile and threshold, N and K as any multiple of the greatest
common divisor of those that the contract's listed cases have, within the volume of the largest listed case. Dtypes,
scheme, family and options are drawn from the grammar; what the contract refuses is drawn again. The random words are
those of :class:`oracle.routines.data.Stream` under the contract, the seed and the number of the draw.

Not covered: extents that depend on each other (experts, shards), which are taken from the listed cases.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from oracle.errors import OracleError
from oracle.routines import get, profiles
from oracle.routines.cases import Case, Grammar, grammars
from oracle.routines.data import Stream

HEIGHTS: tuple[int, ...] = (*range(1, 17), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
BLOCK = 128
LEAST_VOLUME = 1 << 18  # elements; judging so many takes well under a second in every contract
E5M2_COST = 8  # exact sums over the range of E5M2 take up to eight times as long as over that of E4M3
ATTEMPTS = 100  # draws for one case; more refusals in a row mean that the grammar is wrong


def drawn(contract: str, seed: int) -> Iterator[Case]:
    """Cases of ``contract`` without end; every one is a valid call.

    Raises CaseError: the contract refuses :data:`ATTEMPTS` draws in a row: the last refusal.
    """
    listed = profiles.cases(contract, "full")
    refused = 0
    for number in itertools.count():
        case = _one(listed, Stream(f"soak/{contract}/{seed}/{number}"))
        try:
            get(contract).check(case.inputs(), case.call_options())
        except OracleError:  # drawn extents that the contract does not take
            refused += 1
            if refused == ATTEMPTS:
                raise
            continue
        refused = 0
        yield case


def _one(listed: Sequence[Case], stream: Stream) -> Case:
    words: Iterator[int] = iter(stream.integers(0, 1 << 32, (64,)).tolist())
    base = listed[next(words) % len(listed)]
    grammar: Grammar = grammars()[base.contract]
    options = tuple(
        (key, values[next(words) % len(values)]) for key, values in grammar.options.items() if next(words) % 3 == 0
    )
    # One in three has ordinary data, because the watches run on such cases only.
    family = "randn" if "randn" in grammar.families and next(words) % 3 == 0 else _of(grammar.families, next(words))
    dtypes = _of(grammar.dtypes, next(words))
    return replace(
        base,
        dtypes=dtypes,
        scheme=_of(grammar.schemes, next(words)),
        extents=_extents(base, listed, words, cost=E5M2_COST if "e5m2" in dtypes else 1),
        options=options,
        family=family,
        seed=next(words),
    )


def _extents(base: Case, listed: Sequence[Case], words: Iterator[int], *, cost: int) -> tuple[tuple[str, int], ...]:
    """New extents for those that are free, the longest halved until the case is no larger than any listed one."""
    extents = dict(base.extents)
    free = base.grammar.free
    steps = {name: math.gcd(*(case[name] for case in listed)) for name in free}
    for name in free:
        longest = max(case[name] for case in listed)
        extents[name] = _extent(name, steps[name], longest, next(words), next(words))
    limit = max(LEAST_VOLUME, *(math.prod(extent for _, extent in case.extents) for case in listed)) // cost
    while math.prod(extents.values()) > limit:
        longer = [name for name in free if extents[name] > steps[name]]
        if not longer:
            break
        # M last: half a height is no longer next to a threshold
        name = max(longer, key=lambda n: (n != "m", extents[n] // steps[n]))
        extents[name] = extents[name] // 2 // steps[name] * steps[name]
    return tuple(extents.items())


def _extent(name: str, step: int, longest: int, kind: int, word: int) -> int:
    """A height next to a threshold, a multiple of a block, or any multiple of ``step`` up to twice the longest."""
    if name == "m" and step == 1 and kind % 4:
        return HEIGHTS[word % len(HEIGHTS)]
    whole = math.lcm(step, BLOCK)
    step = whole if kind % 2 and whole <= longest else step
    return step * (1 + word % max(1, 2 * longest // step))


def _of(values: Sequence[str], word: int) -> str:
    return values[word % len(values)]
