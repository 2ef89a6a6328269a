"""Cases that are drawn from what a contract says of itself, and what no default case reaches.

*Factors* of a contract are the parts of its case ids (dtypes, scheme, each option), its extents, each option of the
contract, the dtype and the presence of each input, and pitches. A part of an id has the levels that the grammar lists;
an option, a dtype or a presence has as levels what no part of an id reaches, as changes
(:mod:`oracle.routines.changes`); extents lie below, at and above the edges that the dims name. :func:`drawn_cases` is a
covering array of strength two: each pair of levels of two factors stands in one case, unless the contract takes no call
with both, which it is asked. Families of data take turns, every second case has ordinary data.

:func:`gaps` says which admitted values no case of a list has. :data:`EXEMPT` names those that remain, with the reason.

Not covered: pairs of levels of which each alone needs another part of an id than the usual one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from allpairspy import AllPairs
from torch import Tensor

from oracle.errors import OracleError
from oracle.routines import changes, profiles
from oracle.routines.base import Call, Contract, TensorSpec
from oracle.routines.case import Case
from oracle.routines.changes import Changes, option_word, word_of
from oracle.routines.edges import DEEP, TILE, _smallest, domain_of, edge_cases, valid
from oracle.routines.family import get

OFFSETS = (0, 1, -1)  # of an extent, from an edge that its dims name
LARGEST = 1 << 22  # elements of the volume of a drawn case: it takes milliseconds
NARROW = 16  # the edge of an extent whose dims name none, if it is not summed over


@dataclass(frozen=True)
class Level:
    """One level of a factor: what it replaces in a case, and what it changes of the call."""

    parts: tuple[tuple[str, object], ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    changes: Changes = ()

    def of(self, case: Case) -> Case:
        """The case with this level."""
        chosen = {**dict(case.options), **dict(self.options)}
        kept = tuple((key, chosen[key]) for key in case.grammar.options if key in chosen)
        changed = changes.ordered(get(case.contract), (*case.changes, *self.changes))
        return replace(case, options=kept, changes=changed, **dict(self.parts))  # type: ignore[arg-type]


USUAL = Level()


def default_cases(contract: str, seed: int, profile: str = "quick") -> list[Case]:
    """The cases of a contract that ``validate`` makes: those of a profile, edges, and drawn ones that differ."""
    listed = [replace(case, seed=case.seed + seed) for case in profiles.cases(contract, profile)]
    return list(dict.fromkeys([*listed, *edge_cases(contract, seed), *drawn_cases(contract, seed)]))


def drawn_cases(contract: str, seed: int) -> list[Case]:
    """The covering array of a contract: the same calls for every seed, on data of this seed; valid all of them."""
    return [replace(case, seed=seed) for case in _array(contract)]


# --- the covering array -------------------------------------------------------------------------------------


class _Calls:
    """The calls of cases, each built once, and what a contract says of them; cases that differ in changes share what
    the grammar builds."""

    def __init__(self) -> None:
        self._made: dict[Case, dict[str, Tensor]] = {}
        self._calls: dict[Case, Call | None] = {}

    def admits(self, case: Case) -> bool:
        """Whether the contract takes the call, and has outputs for it."""
        if case not in self._calls:
            self._calls[case] = self._call(case)
        return self._calls[case] is not None

    def _call(self, case: Case) -> Call | None:
        contract, plain = get(case.contract), replace(case, changes=())
        try:
            if plain not in self._made:
                self._made[plain] = plain.inputs()
            inputs, options = self._made[plain], case.call_options()
            if case.changes:
                inputs = changes.changed(contract, inputs, options, case.changes, str(case))
            call = Call(contract, inputs, options).checked()
            contract.outputs(call)
        except OracleError:
            return None
        return call

    def seen(self, case: Case) -> Seen:
        """What the call of an admitted case has."""
        call = self._calls[case] if self.admits(case) else None
        assert call is not None, f"{case} is no call of its contract"
        return Seen(
            {name: option_word(value) for name, value in call.resolved.items()},
            {name: word_of(x.dtype) for name, x in call.inputs.items()},
            {name: x.dim() for name, x in call.inputs.items()},
        )


@cache
def _array(contract: str) -> tuple[Case, ...]:
    base = replace(_smallest(contract), options=(), seed=0)
    usual = ("randn",) if "randn" in base.grammar.families else base.grammar.families[:1]
    base, calls = replace(base, family=usual[0]), _Calls()
    admits = calls.admits
    if not admits(base):
        base = replace(_smallest(contract), seed=0)
    factors, alone, apart = _factors(base, calls)
    found: dict[Case, None] = {}
    covered: set[frozenset[Level]] = set()

    def add(levels: Sequence[Level]) -> None:
        kept: list[Level] = []
        case = _with(base, levels)
        if admits(case):
            kept = [level for level in levels if level != USUAL]
        else:  # as many of its levels as fit together
            case = base
            for level in levels:
                if level != USUAL and admits(more := level.of(case)):
                    case, kept = more, [*kept, level]
        covered.update(frozenset(pair) for pair in itertools.combinations(kept, 2))
        covered.update(frozenset((level,)) for level in kept)
        found[case] = None

    if len(factors) > 1:
        for row in AllPairs([list(range(len(levels))) for levels in factors]):
            add([levels[at] for levels, at in zip(factors, row, strict=True)])
    pairs = [
        (one, other)
        for first, second in itertools.combinations(factors, 2)
        for one, other in itertools.product(first, second)
        if USUAL not in (one, other)
    ]
    singles = [(level,) for levels in factors for level in levels if level != USUAL]
    for wanted in (*singles, *pairs):
        if frozenset(wanted) not in covered and admits(_with(base, wanted)):
            add(wanted)
    found |= dict.fromkeys(apart)
    for gap in missing(get(contract), [calls.seen(case) for case in found]):  # what a part of an id alone has
        found |= dict.fromkeys(case for case in alone if gap not in missing(get(contract), [calls.seen(case)]))
    families = [family for family in base.grammar.families if family != base.family] or [base.family]
    drawn = []
    for at, case in enumerate(found):
        other = replace(case, family=families[at // 2 % len(families)])
        drawn.append(other if at % 2 and admits(other) else case)
    return tuple(dict.fromkeys(drawn))


def _with(case: Case, levels: Iterable[Level]) -> Case:
    for level in levels:
        case = level.of(case)
    return case


def _factors(base: Case, calls: _Calls) -> tuple[list[list[Level]], list[Case], list[Case]]:
    """The factors, the usual level of each first; the cases with one other part of an id; and cases of their own for
    what needs another part of an id.
    """
    grammar, contract, admits = base.grammar, get(base.contract), calls.admits
    parts = [
        [
            USUAL,
            *(Level((("dtypes", value),)) for value in (*grammar.dtypes, *grammar.also_dtypes) if value != base.dtypes),
        ]
    ]
    parts += [
        [
            USUAL,
            *(
                Level((("scheme", value),))
                for value in (*grammar.schemes, *grammar.also_schemes)
                if value != base.scheme
            ),
        ]
    ]
    parts += [[USUAL, *(Level((), ((key, value),)) for value in of)] for key, of in grammar.options.items()]
    parts = [[USUAL, *(level for level in levels[1:] if admits(level.of(base)))] for levels in parts]
    singles = [base, *(level.of(base) for levels in parts for level in levels[1:])]
    reached = [calls.seen(case) for case in singles]
    singles += [case for name, _ in base.extents if admits(case := _at(base, name, 1))]
    rest: dict[str, list[Level]] = {}
    apart: list[Case] = []
    for gap in missing(contract, reached):
        for wanted in _ways(contract, gap):
            home = next((case for case in singles if admits(wanted.of(case))), None)
            if home is base:
                rest.setdefault(gap.name, [USUAL]).append(wanted)
            elif home is not None:
                apart.append(wanted.of(home))
            if home is not None:
                break
    pitches = [USUAL]
    for spec in contract.inputs:
        if not spec.contiguous and spec.name in reached[0].dtypes and spec.kind.is_integer is False:
            level = Level((), (), ((spec.name, changes.PITCH),))
            if reached[0].ranks[spec.name] > 1 and admits(level.of(base)):
                pitches.append(level)
    everything = [levels for levels in (*parts, *rest.values(), pitches, _ladder(base, admits)) if len(levels) > 1]
    return everything, singles, apart


def _ladder(base: Case, admits: Callable[[Case], bool]) -> list[Level]:
    """Extents at, above and below the edges of their dims, one offset apart from each other; then each edge alone that
    these have not."""
    free, edge = base.grammar.free, edges_of(get(base.contract))
    if not free:
        return [USUAL]
    domain = domain_of(base.contract)
    sizes = {name: edge.get(name, (TILE if name in DEEP else NARROW,)) for name in free}
    turns = [
        {name: (max(of), OFFSETS[(turn + place) % len(OFFSETS)]) for place, (name, of) in enumerate(sizes.items())}
        for turn in range(len(OFFSETS))
    ]
    alone = [{name: (size, offset)} for name in free for size in edge.get(name, ()) for offset in OFFSETS]
    found: list[Level] = []
    reached: set[tuple[str, int, int]] = set()
    for wanted in (*turns, *alone):
        if reached.issuperset((name, size, offset % size) for name, (size, offset) in wanted.items()):
            continue
        near = domain.nearest(
            {**dict(base.extents), **{n: max(1, size + at) for n, (size, at) in wanted.items()}}, free
        )
        if near is None or math.prod(near.values()) > max(LARGEST, _volume(base)):
            continue
        level = Level((("extents", tuple(near.items())),))
        if admits(level.of(base)):
            found.append(level)
            reached |= {(name, size, near[name] % size) for name in free for size in sizes[name]}
    return found if len(found) > 1 else [USUAL, *found]


def edges_of(contract: Contract) -> dict[str, tuple[int, ...]]:
    """The divisors that the dims of a contract name, by extent: ``K/128`` gives ``{"k": (128,)}``."""
    found: dict[str, set[int]] = {}
    for spec in contract.inputs:
        for dim in spec.dims or ():
            for alternative in dim.split("|"):
                symbol, _, divisor = alternative.partition("/")
                if divisor:
                    found.setdefault(symbol.lower(), set()).add(int(divisor))
    return {name: tuple(sorted(widths)) for name, widths in found.items()}


# --- what is reached ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gap:
    """One admitted value that is not reached: what it is of, its name, its word."""

    what: str
    name: str
    word: str

    def __str__(self) -> str:
        return f"{self.what} {self.name}={self.word}"


OPTION, DTYPE, WIDTH, PRESENCE, EDGE, OTHER = "option", "dtype", "width", "optional", "edge", "another value"
ABSENT, PRESENT = "absent", "given"


@dataclass(frozen=True)
class Seen:
    """What one call has: the words of its options, the dtypes and ranks of its inputs."""

    options: Mapping[str, str]
    dtypes: Mapping[str, str]
    ranks: Mapping[str, int]


def missing(contract: Contract, reached: Sequence[Seen]) -> list[Gap]:
    """The admitted options, dtypes and presences that none of these calls has."""
    found: list[Gap] = []
    for option in contract.options:
        words = {seen.options[option.name] for seen in reached}
        if option.choices is not None:
            found += [Gap(OPTION, option.name, w) for w in map(option_word, option.choices) if w not in words]
        elif len(words) == 1 and _is_number(option.default):
            found.append(Gap(OTHER, option.name, f"not {option_word(option.default)}"))
    for spec in contract.inputs:
        dtypes = {seen.dtypes.get(spec.name) for seen in reached}
        if spec.optional:
            found += [Gap(PRESENCE, spec.name, ABSENT)] if None not in dtypes else []
            found += [Gap(PRESENCE, spec.name, PRESENT)] if dtypes == {None} else []
        what = WIDTH if spec.kind.is_integer else DTYPE
        found += [Gap(what, spec.name, w) for w in map(word_of, spec.dtypes) if w not in dtypes]
    return found


def gaps(contract: str, chosen: Sequence[Case]) -> list[Gap]:
    """What of a contract none of these cases reaches: option values, dtypes, widths, optional inputs, edges of dims.

    Of the cases of one dtype, scheme, option and change the smallest is made, which is like the others.
    """
    kinds: dict[object, Case] = {}
    for case in chosen:
        key = case.dtypes, case.scheme, case.options, case.changes
        if key not in kinds or _volume(case) < _volume(kinds[key]):
            kinds[key] = case
    calls = _Calls()
    found = missing(get(contract), [calls.seen(case) for case in kinds.values()])
    for name, widths in edges_of(get(contract)).items():
        extents = {dict(case.extents).get(name, 0) for case in chosen}
        for width, offset in itertools.product(widths if extents != {0} else (), OFFSETS):
            if not any(extent % width == offset % width for extent in extents) and _possible(
                chosen, name, width, offset
            ):
                found.append(Gap(EDGE, name, f"{width}n{offset:+d}" if offset else f"{width}n"))
    return found


def _possible(chosen: Sequence[Case], name: str, width: int, offset: int) -> bool:
    """Whether the contract takes an extent that lies so beside an edge, asked near one of the cases."""
    if name not in chosen[0].grammar.free:
        return False
    domain = domain_of(chosen[0].contract)
    near = [_at(chosen[0], name, width * blocks + offset) for blocks in (1, 2)]
    return any(domain.holds(dict(case.extents)) and valid(case) for case in near)


def _at(case: Case, name: str, extent: int) -> Case:
    return replace(case, extents=tuple((key, extent if key == name else value) for key, value in case.extents))


def _ways(contract: Contract, gap: Gap) -> Iterator[Level]:
    """Changes that would close a gap, the smallest first."""
    if gap.what == OTHER:
        default = next(spec.default for spec in contract.options if spec.name == gap.name)
        assert isinstance(default, (int, float))
        for value in (default * 2, default // 2 if isinstance(default, int) else default / 2, default + 1):
            yield Level((), (), ((gap.name, option_word(value)),))
        return
    if gap.what == OPTION:
        yield Level((), (), ((gap.name, gap.word),))
        return
    spec = next(spec for spec in contract.inputs if spec.name == gap.name)
    if gap.what == PRESENCE:
        word = changes.NONE if gap.word == ABSENT else word_of(spec.dtypes[0])
        yield Level((), (), ((gap.name, word),))
        return
    yield Level((), (), ((gap.name, gap.word),))
    alike = [other for other in contract.inputs if other.dtypes == spec.dtypes and not other.optional]
    yield Level((), (), tuple((other.name, gap.word) for other in _first(spec, alike)))
    held = [other for other in contract.inputs if gap.word in map(word_of, other.dtypes)]
    yield Level((), (), tuple((other.name, gap.word) for other in _first(spec, held)))


def _first(spec: TensorSpec, others: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [spec, *(other for other in others if other.name != spec.name and other.kind.is_integer is False)]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _volume(case: Case) -> int:
    return math.prod(extent for _, extent in case.extents)
