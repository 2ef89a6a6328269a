"""Cases that are drawn from what a contract says of itself.

*Factors* of a contract are the parts of its case ids (dtypes, scheme, each option), its extents, each option of the
contract, the dtype and the presence of each input, and pitches. A part of an id has the levels that the grammar lists;
an option, a dtype or a presence has as levels what no part of an id reaches, as changes
(:mod:`oracle.routines.changes`); extents lie below, at and above the edges that the dims name. :func:`drawn_cases` is a
covering array of strength two: each pair of levels of two factors stands in one case, unless the contract takes no call
with both, which it is asked. Families of data take turns, every second case has ordinary data; each word of data of
each input (:data:`oracle.routines.patterns.DATA`) that no listed and no other drawn case has stands in one case more.

Of each extent some call has more than 1,024, no multiple of 16 where the contract takes that; the free ones of them
stand in the covering array, as do more rows than a tile has. Extents that are not free have uneven values, beside
many rows: more than 8 groups or pages, a page of 20. An option that is a whole number is more than its default in one
call and less in another; one with choices has each of them beside the usual inputs too.

:func:`real_cases` has sizes of real models: 7168 columns, 256 experts of which a token takes 8, heads of 128, ranks of
512, a batch of 64, and 65,536 rows, each where the call stays small enough for a quick run. Profile
``full`` has eight times as much room: the columns of a model for 4096 rows, or beside a weight of as many.

Not covered: pairs of levels of which each alone needs another part of an id than the usual one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from allpairspy import AllPairs

from oracle.cache import place, read, write
from oracle.routines import changes, profiles
from oracle.routines.base import Contract, TensorSpec
from oracle.routines.case import Case, Grammar
from oracle.routines.cases import parse
from oracle.routines.changes import Changes, option_word, word_of
from oracle.routines.edges import DEEP, TILE, domain_of, edge_cases, smallest, valid, volume
from oracle.routines.family import BUILT_IN, families, get
from oracle.routines.reached import (
    ABSENT,
    OFFSETS,
    OPTION,
    OTHER,
    PRESENCE,
    UNEVEN,
    Calls,
    Gap,
    at,
    changed_first,
    edges_of,
    missing,
    patterned,
)
from oracle.routines.traits import Kind

LARGEST = 1 << 22  # elements of the volume of a drawn case: it takes milliseconds
KEPT = 4096  # answers: those of every contract for some versions of the package
SMALL, FLOOR = 1e-2, 8.0  # instead of a smaller one, what is added to squares or bounds an amax: beyond ordinary data
EVEN = 2  # beyond an edge: two blocks into which the extent divides, of which none has the length of a block
SEVERAL = 3  # rows, or what integers count or name, where the smallest case has one: strides and widths show on none
SIZES = (200, 65, 17, 7)  # values of an option that has no default, the first that the contract takes
NARROW = 16  # the edge of an extent whose dims name none, if it is not summed over
LOOPS = 1024  # threads, columns or rows behind which a loop may end
ROOM = 1 << 19  # elements of the largest input of a call with several long extents
LONG = (1100, 1104, 1280)  # beyond it: with a tail of 12 of the last 16, in whole 16, in an even number of 128
BATCH = (300, 150, 100)  # rows of more than one tile, with a tail
ROWS_AT_ONCE = 1 << 24  # elements of the volume of a call of many rows


@dataclass(frozen=True)
class Level:
    """One level of a factor: what it replaces in a case, and what it changes of the call."""

    parts: tuple[tuple[str, object], ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    changes: Changes = ()

    def of(self, case: Case) -> Case:
        """The case with this level."""
        chosen = {**dict(case.options), **dict(self.options)}
        options = tuple((key, chosen[key]) for key in case.grammar.options if key in chosen)
        changed = changes.ordered(get(case.contract), changes.added(case.changes, self.changes))
        return replace(case, options=options, changes=changed, **dict(self.parts))  # type: ignore[arg-type]


USUAL = Level()


def default_cases(contract: str, seed: int, profile: str = "quick") -> list[Case]:
    """The cases of a contract that ``validate`` makes: those of a profile, edges, and drawn ones that differ."""
    listed = [replace(case, seed=case.seed + seed) for case in profiles.cases(contract, profile)]
    real = real_cases(contract, seed, FULL if profile == "full" else REAL)
    drawn = (*edge_cases(contract, seed), *drawn_cases(contract, seed), *real)
    return list(dict.fromkeys([*listed, *drawn]))


def drawn_cases(contract: str, seed: int) -> list[Case]:
    """The covering array of a contract, on data of this seed, without the few calls that are none on these data."""
    return [case for case in (replace(case, seed=seed) for case in _array(contract)) if seed == 0 or valid(case)]


def real_cases(contract: str, seed: int, budget: int | None = None) -> list[Case]:
    """At most five cases at sizes of real models (:data:`WIDE`, :data:`MANY`, :data:`TALL`, :data:`BROAD`), with the
    optional inputs that their contract takes (the widest without optional scales too): as many extents of each as fit
    into ``budget`` elements (:data:`REAL` by default), the first ones first. The other extents are small. Of a larger
    budget what is left goes to the width, then to the rows (:data:`MORE`).
    """
    return [replace(case, seed=seed) for case in _real(contract, REAL if budget is None else budget)]


# --- sizes of real models -----------------------------------------------------------------------------------

Order = tuple[tuple[str, tuple[int, ...]], ...]
ROWS = ("rows", (64, 16, 4))
WIDE: tuple[int, Order] = (
    16,
    (("columns", (7168,)), ("head", (256, 128)), ("rank", (512,)), ROWS, ("width", (4096, 2048, 512))),
)
MANY: tuple[int, Order] = (16, (("experts", (512, 256)), ("depth", (8,)), ("batch", (64,)), ROWS))
TALL: tuple[int, Order] = (4, (("rows", (65536, 16384, 4096, 1024)),))
BROAD: tuple[int, Order] = (4, (("width", (4096, 2048)),))
"""The least size of the other extents, and the sizes that are tried of each, the largest first."""
SHOWN = {**{meaning: sizes for _, order in (WIDE, MANY, BROAD) for meaning, sizes in order}, "rows": TALL[1][0][1]}
PRODUCTS = 4  # multiplications of a product that are judged in the time of one element
UNNAMED = 512  # columns of a routine whose extents name none
MORE: Order = (
    ("width", (4096, 2048, 512, 256, 128)),
    ("rows", (65536, 16384, 4096, 1024, 256)),
)  # of what a budget leaves
REAL = 1 << 22  # elements: judged in a second or two
FULL = 1 << 25  # of profile ``full``: 4096 rows of 7168 columns, which a quick run on a CPU has no time for


def _meaning(grammar: Grammar, name: str) -> str | None:
    """What an extent counts, from its name and those beside it; None where it is no size of a model."""
    beside = set(grammar.extents)
    if name == "k" and "e" in beside and "k" not in grammar.free:
        return "depth"  # experts of a token
    if name == "h" and "d" in beside:
        return "head"
    if name in ("i", "n") and {"h", "k"} & beside & set(grammar.free):
        return "width"
    known = {"e": "experts", "g": "experts", "b": "batch", "r": "rank", "d": "head", "m": "rows", "t": "rows"}
    return "columns" if name in ("k", "h", "i", "c") else known.get(name)


@cache
def _real(contract: str, budget: int) -> tuple[Case, ...]:
    return _kept(_real_cases, contract, budget)


def _real_cases(contract: str, budget: int) -> tuple[Case, ...]:
    base, calls = _base(contract)
    grammar, cases = base.grammar, dict[Case, None]()
    widest: Order = WIDE[1] if budget <= REAL else (*WIDE[1], *MORE)
    for least, order in ((WIDE[0], widest), MANY, TALL, BROAD):
        case = base
        for name in grammar.free:
            small = _sized(case, name, least)
            case = small if small is not None and calls.admits(small) else case
        for meaning, sizes in order:
            for name in (name for name in grammar.extents if _meaning(grammar, name) == meaning):
                tried = (_sized(case, name, size) for size in sizes)
                fitting = (new for new in tried if new is not None and cost(new) <= budget)
                case = next((new for new in fitting if calls.admits(new)), case)
        if case != base and any(case[name] in SHOWN.get(_meaning(grammar, name) or "", ()) for name in grammar.extents):
            cases[_whole(case, calls)] = None
            if order is widest:  # scales that are not given are computed, of all columns
                cases[_whole(case, calls, but=Kind.SCALES)] = None
    return tuple(cases)


def _whole(case: Case, calls: Calls, *, but: Kind | None = None) -> Case:
    """The case with every optional input that its contract takes there, one after the other, then two at a time, those
    of the kind ``but`` left out."""
    optional = [spec for spec in get(case.contract).inputs if spec.optional and spec.kind is not but]
    for together in (*((spec,) for spec in optional), *itertools.combinations(optional, 2)):
        if calls.seen(case).dtypes.keys() & {spec.name for spec in together}:
            continue
        ways = itertools.product(*([(spec.name, word_of(dtype)) for dtype in spec.dtypes] for spec in together))
        case = next((new for way in ways if calls.admits(new := Level((), (), way).of(case))), case)
    return case


def _sized(case: Case, name: str, size: int) -> Case | None:
    """The case with an extent of about this size, which its domain takes."""
    if name not in case.grammar.free:
        return at(case, name, size)
    extents = domain_of(case.contract).nearest({**dict(case.extents), name: size}, (name,))
    return None if extents is None else replace(case, extents=tuple(extents.items()))


def cost(case: Case) -> int:
    """The elements of the largest operand of a call, or of as long a product; rows meet their own experts alone."""
    known = dict(case.extents)
    multiplies = "n" in known or {"h", "i"} <= set(known)
    whole = math.prod(n for name, n in known.items() if not (multiplies and name in "eg"))
    whole = whole // PRODUCTS if "n" in known else whole
    shapes = (spec.dims for spec in get(case.contract).inputs if spec.dims is not None)
    whole = max(whole, *(math.prod(known.get(dim.lower(), 1) for dim in dims) for dims in shapes), 1)
    named = {_meaning(case.grammar, name) for name in known} & {"columns", "head", "rank", "experts"}
    return whole if named else whole * UNNAMED


# --- the covering array -------------------------------------------------------------------------------------


@cache
def _array(contract: str) -> tuple[Case, ...]:
    return _kept(_covering, contract)


def _kept(draw: Callable[..., tuple[Case, ...]], contract: str, *more: object) -> tuple[Case, ...]:
    """The cases that are drawn for a contract, kept between processes where it is one of this package."""
    own = any(contract in family.grammars for family in families()[: len(BUILT_IN)])
    path = place("cases", draw.__name__, contract, more, torch.__version__, np.__version__) if own else None
    if (ids := read(path)) is not None:
        return tuple(parse(text) for text in ids.splitlines())
    cases = draw(contract, *more)
    write(path, "".join(f"{case}\n" for case in cases), KEPT)
    return cases


def _covering(contract: str) -> tuple[Case, ...]:
    base, calls = _base(contract)
    admits = calls.admits
    factors, alone, apart = _factors(base, calls)
    cases: dict[Case, None] = {}
    covered: set[frozenset[Level]] = set()

    def add(levels: Sequence[Level]) -> None:
        fitting: list[Level] = []
        case = _with(base, levels)
        if admits(case):
            fitting = [level for level in levels if level != USUAL]
        else:  # as many of its levels as fit together
            case = base
            for level in levels:
                if level != USUAL and admits(more := level.of(case)):
                    case, fitting = more, [*fitting, level]
        covered.update(frozenset(pair) for pair in itertools.combinations(fitting, 2))
        covered.update(frozenset((level,)) for level in fitting)
        cases[case] = None

    if len(factors) > 1:
        for row in AllPairs([list(range(len(levels))) for levels in factors]):
            add([levels[place] for levels, place in zip(factors, row, strict=True)])
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
    cases |= dict.fromkeys(apart)
    for gap in missing(get(contract), [calls.seen(case) for case in cases]):
        having = [case for case in alone if gap not in missing(get(contract), [calls.seen(case)])]
        if gap.what == OTHER or not having:  # not what a part of an id alone has: beside what other cases change
            ways = (wanted.of(case) for wanted in _ways(get(contract), gap) for case in tuple(cases))
            having = [case for case in ways if admits(case)][:1]
        cases |= dict.fromkeys(having)
    families = [family for family in base.grammar.families if family != base.family] or [base.family]
    drawn: dict[Case, None] = {}
    for turn, case in enumerate(cases):
        other = replace(case, family=families[turn // 2 % len(families)])
        drawn[other if turn % 2 and admits(other) else case] = None
    listed = [*profiles.cases(contract, "quick"), *edge_cases(contract, 0)]
    others = [*listed, *real_cases(contract, 0)]
    drawn |= dict.fromkeys(_beyond(base, calls))
    drawn |= dict.fromkeys(_sided(drawn, calls))
    while lost := patterned(changed_first([*listed, *drawn]), [*others, *drawn], calls)[0]:
        drawn |= dict.fromkeys(lost)
    return tuple(drawn)


def _sided(cases: Iterable[Case], calls: Calls) -> list[Case]:
    """Each whole number that an option is twice or half of, where none of the cases is on that side: in the largest
    case that takes it."""
    largest = sorted(cases, key=volume, reverse=True)
    contract, seen = get(largest[0].contract), [calls.seen(case).options for case in largest]
    added: list[Case] = []
    for option in contract.options:
        default = option.default
        if option.choices is not None or type(default) is not int or default < EVEN:
            continue
        known = [int(word) for words in seen if (word := words[option.name]).isdigit()]
        sides = ((2 * default, any(n > default for n in known)), (default // 2, any(n < default for n in known)))
        for value in (value for value, reached in sides if not reached):
            level = Level((), (), ((option.name, option_word(value)),))
            plain = (case for case in largest if option.name not in case.changed)
            added += [new for new in (level.of(case) for case in plain) if calls.admits(new)][:1]
    return added


def _base(contract: str) -> tuple[Case, Calls]:
    """The smallest listed case, of ordinary data and without options where the contract takes that.

    Integers count, place or name several things in it: the width of one alone does not show, nor whose it is."""
    calls, listed = Calls(), replace(smallest(contract), seed=0)
    usual = "randn" if "randn" in listed.grammar.families else listed.grammar.families[0]
    plain = replace(listed, options=(), family=usual)
    base = plain if calls.admits(plain) else listed
    named = {dim.lower() for spec in get(contract).inputs if spec.kind.is_integer for dim in (spec.dims or ())[:1]}
    for name in (name for name, extent in base.extents if name in named and extent == 1):
        wider = (at(base, name, size) for size in (SEVERAL, 2) if name not in base.grammar.free)
        base = next((case for case in wider if calls.admits(case)), base)
    for name in (name for name in dict(base.extents) if _meaning(base.grammar, name) == "depth"):
        if base[name] < SEVERAL <= base["e"] and calls.admits(more := at(base, name, SEVERAL)):
            base = more  # of two summands every order of roundings is one
    return base, calls


def _with(case: Case, levels: Iterable[Level]) -> Case:
    for level in levels:
        case = level.of(case)
    return case


def _factors(base: Case, calls: Calls) -> tuple[list[list[Level]], list[Case], list[Case]]:
    """The factors, the usual level of each first; the cases with one other part of an id; and cases of their own for
    what needs another part of an id.
    """
    grammar, contract, admits = base.grammar, get(base.contract), calls.admits
    dtypes, schemes = (*grammar.dtypes, *grammar.also_dtypes), (*grammar.schemes, *grammar.also_schemes)
    parts = [[USUAL, *(Level((("dtypes", value),)) for value in dtypes if value != base.dtypes)]]
    parts += [[USUAL, *(Level((("scheme", value),)) for value in schemes if value != base.scheme)]]
    parts += [[USUAL, *(Level((), ((key, value),)) for value in of)] for key, of in grammar.options.items()]
    parts = [[USUAL, *(level for level in levels[1:] if admits(level.of(base)))] for levels in parts]
    singles = [base, *(level.of(base) for levels in parts for level in levels[1:])]
    reached = [calls.seen(case) for case in singles]
    singles += [case for name, _ in base.extents if admits(case := at(base, name, 1))]
    rest: dict[str, list[Level]] = {}
    apart: list[Case] = []
    many = _many(base, admits) or base
    for gap in missing(contract, reached):
        for wanted in _ways(contract, gap):
            home = next((case for case in singles if admits(wanted.of(case))), None)
            if home is base:
                rest.setdefault(gap.name, [USUAL]).append(wanted)
            elif home is not None:
                large = wanted.of(replace(home, extents=many.extents))
                apart.append(large if admits(large) else wanted.of(home))
            if home is not None:
                break
    for option in contract.options:
        usual = reached[0].options
        alike = [seen.options for seen in reached if seen.dtypes.keys() == reached[0].dtypes.keys()]
        alone = {seen[option.name] for seen in alike if {**seen, option.name: ""} == {**usual, option.name: ""}}
        for word in map(option_word, option.choices or ()):
            level = Level((), (), ((option.name, word),))
            if word not in alone and level not in rest.get(option.name, ()) and admits(level.of(base)):
                rest.setdefault(option.name, [USUAL]).append(level)
    ranks = reached[0].ranks
    strided = [spec for spec in contract.inputs if not spec.contiguous]
    absent = {
        spec.name: ((spec.name, word_of(spec.dtypes[0])),)
        for spec in strided
        if spec.name not in ranks and not spec.kind.is_integer
    }
    wide = [s.name for s in strided if s.name in absent or ranks.get(s.name, 0) > (0 if s.optional else 1)]
    pitches = [USUAL, *(Level((), (), (*absent.get(name, ()), (name, changes.PITCH))) for name in wide)]
    pitches = [level for level in pitches if admits(level.of(base))]
    apart += _together([*singles, *apart, *_listed(base.contract)], calls)
    apart += _shaped(singles, calls)
    rows = (*parts, *(list(dict.fromkeys(levels)) for levels in rest.values()), pitches, _ladder(base, admits))
    return [levels for levels in rows if len(levels) > 1], singles, apart


def _listed(contract: str) -> list[Case]:
    """The smallest listed case of each combination of dtypes and scheme."""
    smallest: dict[object, Case] = {}
    for case in sorted((replace(case, seed=0) for case in profiles.cases(contract, "quick")), key=volume):
        smallest.setdefault((case.dtypes, case.scheme), case)
    return list(smallest.values())


def _together(chosen: Sequence[Case], calls: Calls) -> Iterator[Case]:
    """Pairs of optional inputs that none of these cases has, each with all others that the contract takes there."""
    optional = [spec for spec in get(chosen[0].contract).inputs if spec.optional]
    reached = {pair for case in chosen if calls.admits(case) for pair in _pairs(calls.seen(case).dtypes, optional)}
    for case in filter(calls.admits, chosen) if len(optional) > 1 else ():
        whole = _whole(case, calls)
        if (pairs := _pairs(calls.seen(whole).dtypes, optional)) - reached:
            reached |= pairs
            yield whole


def _pairs(present: Iterable[str], optional: Sequence[TensorSpec]) -> set[tuple[str, str]]:
    names = [spec.name for spec in optional if spec.name in present]
    return set(itertools.combinations(names, 2))


def _shaped(singles: Sequence[Case], calls: Calls) -> Iterator[Case]:
    """Each other shape of an input (:data:`oracle.routines.changes.SHAPES`) that the contract takes, with every
    optional input, where all extents are equal: rows or columns?"""
    contract, grammar = get(singles[0].contract), singles[0].grammar
    square = [dict.fromkeys(grammar.free, TILE)] if len(grammar.free) > 1 else []
    domain = domain_of(contract.name)
    for spec in contract.inputs:
        for word in changes.SHAPES if spec.dims is None and not spec.kind.is_integer else ():
            for case in reversed(singles):
                near = domain.nearest({**dict(case.extents), **square[0]}, grammar.free) if square else None
                level = Level(() if near is None else (("extents", tuple(near.items())),), (), ((spec.name, word),))
                plain, new = Level(level.parts).of(case), level.of(case)
                if spec.name not in calls.seen(case).dtypes or not calls.admits(plain) or not calls.admits(new):
                    continue
                if calls.seen(new).ranks[spec.name] != calls.seen(plain).ranks[spec.name]:
                    yield _whole(new, calls)
                    break


def _ladder(base: Case, admits: Callable[[Case], bool]) -> list[Level]:
    """Extents at, above and below the edges of their dims, one offset apart from each other; then each edge alone that
    these have not; then several rows, where all of these have one."""
    levels = [USUAL, *_edges(base, admits)]
    reached = [level.of(base) for level in levels]
    single = [name for name, n in base.extents if n == 1 and _meaning(base.grammar, name) in ("rows", "batch")]
    case = base
    for name in (name for name in single if all(one[name] == 1 for one in reached)):
        more = _sized(case, name, SEVERAL)
        case = more if more is not None and admits(more) else case
    return levels if case == base else [*levels, Level((("extents", case.extents),))]


def _edges(base: Case, admits: Callable[[Case], bool]) -> list[Level]:
    free, edge = base.grammar.free, edges_of(get(base.contract))
    domain = domain_of(base.contract)
    sizes = {name: edge.get(name, (TILE if name in DEEP else NARROW,)) for name in free}
    turns = [
        {name: (max(of), OFFSETS[(turn + place) % len(OFFSETS)]) for place, (name, of) in enumerate(sizes.items())}
        for turn in range(len(OFFSETS))
    ]
    rows = [name for name in free if _meaning(base.grammar, name) == "rows"]
    alone = [{name: (size, offset)} for name in free for size in edge.get(name, ()) for offset in OFFSETS]
    alone += [{name: (max(of), EVEN)} for name, of in edge.items() if name in free]
    levels: list[Level] = []
    reached: set[tuple[str, int, int]] = set()
    for wanted in (*turns, *alone):
        if reached.issuperset((name, size, offset % size) for name, (size, offset) in wanted.items()):
            continue
        asked = {name: max(1, size + offset) for name, (size, offset) in wanted.items()}
        long = {  # each extent in one of the turns
            name: size * (LOOPS // size + 2) + offset
            for name, (size, offset) in wanted.items()
            if len(wanted) == len(free) and offset > 0 and name not in rows
        }
        few = {name: min(asked[name], NARROW + wanted[name][1]) for name in rows if long and name not in edge}
        for extents in ({**asked, **long, **few}, asked) if long else (asked,):
            near = domain.nearest({**dict(base.extents), **extents}, free)
            if near is None or math.prod(near.values()) > max(LARGEST, volume(base)):
                continue
            level = Level((("extents", tuple(near.items())),))
            if admits(level.of(base)):
                levels.append(level)
                reached |= {(name, size, near[name] % size) for name in free for size in sizes[name]}
                break
    many = _many(base, admits)
    return levels if many is None else [*levels, Level((("extents", many.extents),))]


def _many(base: Case, admits: Callable[[Case], bool]) -> Case | None:
    """The case with more rows than a tile has, a tail of them, and few of the other extents."""
    case, result = base, False
    for name in sorted(base.grammar.free, key=lambda name: _meaning(base.grammar, name) == "rows"):
        rows = _meaning(base.grammar, name) == "rows"
        tried = (_sized(case, name, size) for size in (BATCH if rows else (NARROW + 1,)))
        new = next((new for new in tried if new is not None and volume(new) <= ROWS_AT_ONCE and admits(new)), None)
        case, result = case if new is None else new, result or (rows and new is not None)
    return case if result else None


def _beyond(base: Case, calls: Calls) -> list[Case]:
    """Calls beyond what a loop may hold, of ordinary data: each extent that the ladder has not beyond :data:`LOOPS`, as
    many of them in a call as it has room for; uneven extents of those that are not free, beside many rows; many rows,
    with rows of zeros where a family has them.
    """
    grammar, many = base.grammar, _many(base, calls.admits) or base
    wanted = _short(grammar, [level.of(base) for level in _ladder(base, calls.admits)])
    cases: list[Case] = []
    while wanted:
        case, left = base, list[str]()
        for name in wanted:
            long = _fitting(case, name, LONG, calls, LARGEST if case == base else ROOM)
            case, left = (case, [*left, name]) if long is None else (long, left)
        if case == base:
            break
        cases, wanted = [*cases, case], left
    uneven = many
    for name in (name for name in grammar.extents if name not in {*grammar.free, *_heads(grammar)}):
        sizes = (*BATCH, *UNEVEN) if _meaning(grammar, name) == "rows" else UNEVEN
        uneven = _fitting(uneven, name, sizes, calls) or uneven
    cases += [] if uneven == many else [uneven]
    edges = (*itertools.chain(*edges_of(get(base.contract)).values()), TILE)
    square = base
    for name in grammar.free if len(grammar.free) > 1 else ():  # all of one length: rows or columns?
        square = _sized(square, name, max(edges)) or square
    if square != base and volume(square) <= max(LARGEST, volume(base)) and calls.admits(square):
        cases.append(square)
    zeros = next((family for family in ("special", "zeros") if family in grammar.families), None)
    if zeros is not None and many != base and calls.admits(case := replace(many, family=zeros)):
        cases.append(case)
    return cases


def short(chosen: Sequence[Case]) -> list[str]:
    """Extents that none of these cases of a contract has beyond :data:`LOOPS`, and a small call of it can have.

    Left out are numbers of experts and of heads, and free rows (:func:`real_cases`).
    """
    base, calls = _base(chosen[0].contract)
    return [name for name in _short(base.grammar, chosen) if _fitting(base, name, LONG, calls) is not None]


def _short(grammar: Grammar, chosen: Sequence[Case]) -> list[str]:
    counted = {name for name in grammar.extents if _meaning(grammar, name) in ("experts", "depth")} | _heads(grammar)
    counted |= {name for name in grammar.free if _meaning(grammar, name) == "rows"}
    reached = {name for case in chosen for name, n in case.extents if n > LOOPS}
    return [name for name in grammar.extents if name not in counted | reached]


def _heads(grammar: Grammar) -> set[str]:
    """The number of heads and the width of one, which kernels are compiled for."""
    return {name for name in ("h", "d") if _meaning(grammar, name) == "head"} if "h" in grammar.extents else set()


def _fitting(case: Case, name: str, sizes: Sequence[int], calls: Calls, room: int = LARGEST) -> Case | None:
    """The case with the first of the sizes of an extent that its contract takes and that keeps it within ``room``
    elements."""
    for size in sizes:
        new = _sized(case, name, size)
        if new is None or new[name] < min(sizes) or calls.elements(case) * new[name] > room * case[name]:
            continue
        small = case.grammar.fixed or volume(new) <= ROWS_AT_ONCE  # rows of a cache meet no others
        if small and calls.admits(new) and calls.elements(new) <= room:
            return new
    return None


def _ways(contract: Contract, gap: Gap) -> Iterator[Level]:
    """Changes that would close a gap, the smallest first."""
    if gap.what == OTHER:
        default = next(spec.default for spec in contract.options if spec.name == gap.name)
        if isinstance(default, tuple):
            halves = [
                tuple(max(1, n // 2) if at in of else n for at, n in enumerate(default))
                for of in ((len(default) - 1,), range(len(default)))
            ]
            yield from (Level((), (), ((gap.name, option_word(value)),)) for value in halves)
            return
        if default is None:  # an extent of the output, most often
            for size in SIZES:
                yield Level((), (), ((gap.name, option_word(size)),))
            return
        assert isinstance(default, (int, float))
        half = default // 2 if isinstance(default, int) else default / 2
        least = (FLOOR,) if isinstance(default, float) and 0 < default < SMALL else ()
        for value in (value for value in (*least, default * 2, half, default + 1, default - 1) if value != default):
            yield Level((), (), ((gap.name, option_word(value)),))
        return
    if gap.what == OPTION:
        yield Level((), (), ((gap.name, gap.word),))
        for other in contract.options:  # beside the default of another one
            if other.name != gap.name:
                yield Level((), (), ((gap.name, gap.word), (other.name, option_word(other.default))))
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
