"""How much of a contract a validation reaches when the kernel refuses calls.

A call that raises ``NotImplementedError`` is refused. A refused case is moved to the nearest call that the kernel
takes, with fresh data: into the stated domain, or into one that is learned by asking
(:func:`oracle.routines.domain.learned`); a kind of call (dtypes, scheme, options) that it takes at no shape is
exchanged for one that it takes.

*The least that must be reached* (:meth:`Reach.complaints`), where anything was refused:

- Three values of each extent, or as many as were asked. A tile gives an extent three kinds of values: below a tile, a
  whole number of tiles, and beyond one with a tail. Fewer than three values leave a kind out.
- Three shapes, or as many as were asked, whatever the stated domain is: with one of each kind for one extent alone.
- Every family of data that was asked. Data are no part of a domain: a kernel cannot know them beforehand.
- No refusal inside the domain: what steps and limits of single extents cannot say must be stated. Otherwise any list of
  shapes would be a domain.

Kinds of calls that are refused throughout are reported and not required: they say what the kernel does not offer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from oracle.errors import counted
from oracle.routines import profiles
from oracle.routines.cases import Case, grammars
from oracle.routines.domain import Domain, Extents, learned
from oracle.routines.edges import domain_of, valid

LEAST = 3  # values of an extent, and shapes
BATCH = 32  # refused cases after which they are moved, for runs without end
ALIGNED = (128, 256)  # extents that any kernel takes which takes any: whole tiles and scale blocks
LISTED = 6  # values of an extent that are printed
Kind = tuple[str, str, tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Coverage:
    """What was reached: values of each extent, families, kinds of calls offered, and what was refused why.

    ``asked`` and ``judged`` hold values by name: of every extent, of ``family``, ``dtypes``, ``scheme`` and of every
    option. ``shapes`` counts the shapes judged and asked, ``moved`` the cases that were judged at another call than the
    one asked. ``refused`` has one entry for each reason: how many of the cases, the first of them, the reason.
    ``domain`` is the stated one, or what was learned of each kind of call.
    """

    shapes: tuple[int, int]
    asked: Mapping[str, tuple[object, ...]]
    judged: Mapping[str, tuple[object, ...]]
    moved: int
    refused: tuple[tuple[int, str, str], ...]
    domain: str
    stated: bool
    complaints: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        refused = [{"cases": count, "case": case, "reason": reason} for count, case, reason in self.refused]
        reached = {name: {"judged": list(self.judged[name]), "asked": len(self.asked[name])} for name in self.asked}
        return {
            "shapes": {"judged": self.shapes[0], "asked": self.shapes[1]},
            "reached": reached,
            "moved": self.moved,
            "refused": refused,
            "domain": self.domain,
            "domain_stated": self.stated,
            "complaints": list(self.complaints),
        }

    def lines(self) -> Iterator[str]:
        """The sentences that are printed: what was judged of what was asked, and what was refused."""
        if self.domain:
            yield f"domain {self.domain} ({'stated' if self.stated else 'learned from refusals'})"
        extents = [name for name, values in self.judged.items() if values and isinstance(values[0], int)]
        text = ", ".join(f"{name} {_span(self.judged[name])}" for name in extents)
        yield f"covered {counted(self.shapes[0], 'shape')} of {self.shapes[1]} asked: {text}"
        others = [name for name in self.asked if name not in extents and self.asked[name]]
        yield "covered " + ", ".join(_of(name, self.judged[name], self.asked[name]) for name in others)
        for count, case, reason in self.refused:
            yield f"refused {count} of the cases: {reason} ({case})"
        if self.moved:
            yield f"moved {self.moved} of them to the nearest calls that the kernel takes"


class Reach:
    """The cases of one validation on their way to the kernel; ``ask`` says why it refuses a case, or None."""

    def __init__(self, contract: str, stated: Domain | None, ask: Callable[[Case], str | None], *, move: bool) -> None:
        self.contract, self.stated, self.ask, self.move = contract, stated, ask, move
        self._within: Domain | None = None  # the stated domain and the contract's own
        self._given: dict[tuple[tuple[str, int], ...], None] = {}
        self._asked: dict[Case, None] = {}
        self._taken: dict[Case, None] = {}
        self._refused: dict[Case, str] = {}
        self._domains: dict[Kind, Domain] = {}
        self._closed: dict[Kind, str] = {}
        self._why: dict[Kind, str] = {}
        self._broken: dict[str, None] = {}
        self._lost: list[tuple[Case, str]] = []
        self._moved = 0

    # --- the cases ------------------------------------------------------------------------------------------

    def cases(self, chosen: Iterable[Case]) -> Iterator[Case]:
        """Every case to call, once: those of ``chosen`` in the stated domain, then what the refused ones become.

        :meth:`saw` is to be called with the outcome of each before the next is taken.
        """
        waiting: list[Case] = []
        for planned in chosen:
            self._given[planned.extents] = None
            case = self._placed(planned)
            if case is None:
                self._lost.append((planned, "no shape near it lies in the stated domain"))
                continue
            self._asked[case] = None
            if case in self._taken or case in self._refused:
                continue
            if (domain := self._domains.get(kind_of(case))) is not None and not domain.holds(dict(case.extents)):
                self._refused[case] = self._why[kind_of(case)]  # as its like was: it need not be called
            else:
                yield case
            if case not in self._refused or not self.move or case.changes:
                continue  # what a case changes of a call may be refused, and stands for no shape
            if self._domain(case) is None:
                waiting.append(case)  # until something of its kind is taken
            else:
                yield from self._moved_now(case)
            if len(waiting) >= BATCH:
                for case in waiting:
                    yield from self._moved_now(case)
                waiting = []
        for case in waiting:
            yield from self._moved_now(case)
        for family in sorted({case.family for case in self._asked}) if self.move else ():
            yield from self._with_data(family)

    def _with_data(self, family: str) -> Iterator[Case]:
        """Calls with a family of data that was asked for in refused kinds of calls alone, until one is taken."""
        volume = lambda case: math.prod(extent for _, extent in case.extents)  # noqa: E731
        for other in sorted(self._taken, key=volume)[:LEAST]:
            if any(case.family == family for case in self._taken):
                return
            if (case := replace(other, family=family)) not in self._refused and valid(case):
                yield case
                self._moved += case in self._taken

    def saw(self, case: Case, refused: str | None) -> None:
        """The outcome of one call: the reason for which it was refused, or None."""
        if refused is None:
            self._taken[case] = None
            self._closed.pop(kind_of(case), None)
        else:
            self._refused[case] = refused

    def _placed(self, case: Case) -> Case | None:
        if self.stated is None or not self.move:
            return case
        if self._within is None:
            conditions = domain_of(self.contract).conditions if self.stated.conditions else ()
            self._within = Domain((*self.stated.conditions, *conditions))
        if self.stated.holds(dict(case.extents)):
            return case
        nearest = _shaped(case, self._within.nearest(dict(case.extents), case.grammar.free))
        return nearest if nearest is not None and valid(nearest) else None

    def _moved_now(self, case: Case) -> Iterator[Case]:
        for target in self._targets(case):
            if target not in self._taken and target not in self._refused:
                yield target
            if target in self._taken:
                self._moved += 1
                return
        self._lost.append((case, self._refused[case]))

    def _targets(self, case: Case) -> Iterator[Case]:
        """Calls in the place of a refused one, the nearest first."""
        kind, outside = kind_of(case), ""
        domain = self._domain(case)
        if domain is not None:
            near = _shaped(case, domain.nearest(dict(case.extents), case.grammar.free))
            if near is not None and valid(near):
                yield near
                outside = f"{_extents(near)} is refused inside the domain {domain or 'of every shape'}"
        siblings = sorted((c for c in self._taken if kind_of(c) == kind), key=lambda other: _apart(case, other))
        for other in siblings[:1]:
            same = replace(case, extents=other.extents)
            if outside:
                self._broken[outside] = None
            yield same
            if same in self._refused:  # then it is not the shape
                self._broken.pop(outside, None)
                at = f"{_extents(same)} is taken with family={other.family} and refused with family={same.family}"
                self._broken[at] = None
        if siblings:
            return
        if self._taken:  # nothing of this kind: the same shape and data in a kind that is taken
            other = min(self._taken, key=lambda other: _unlike(case, other)[:3])
            there = replace(
                case, dtypes=other.dtypes, scheme=other.scheme, options=other.options, changes=other.changes
            )
            if valid(there):
                yield there
                if there in self._refused and (domain := self._domain(there)) is not None:
                    near = _shaped(there, domain.nearest(dict(there.extents), there.grammar.free))
                    if near is not None and valid(near):
                        yield near

    # --- learning -------------------------------------------------------------------------------------------

    def _domain(self, case: Case) -> Domain | None:
        """The domain of the kind of a refused case; None when no call of that kind is taken."""
        kind = kind_of(case)
        if self.stated is not None:
            any_taken = any(kind_of(c) == kind for c in self._taken)
            return self.stated if any_taken else None
        if kind in self._domains or kind in self._closed:
            return self._domains.get(kind)
        taken_ones = [c for c in self._taken if kind_of(c) == kind]
        volume = lambda case: math.prod(extent for _, extent in case.extents)  # noqa: E731
        base = min(taken_ones, key=volume) if taken_ones else self._first(case)
        self._why.setdefault(kind, self._refused[case])
        if base is None:
            self._closed[kind] = self._refused[case]
            return None
        for known in dict.fromkeys(self._domains.values()):  # the domain of another kind, where it fits
            near = _shaped(case, known.nearest(dict(case.extents), case.grammar.free))
            if known.holds(dict(base.extents)) and near is not None and valid(near) and self._admits(near):
                self._domains[kind] = known
                return known
        asked = [*self._asked, *profiles.cases(self.contract, "quick")]
        largest = {name: max((c[name] for c in asked), default=base[name]) for name in base.grammar.free}
        extents, free = dict(base.extents), base.grammar.free

        def admits(extents: Extents) -> bool:
            return self._admits(replace(base, extents=tuple(extents.items())))

        self._domains[kind], _ = learned(admits, extents, free, {**extents, **largest})
        return self._domains[kind]

    def _first(self, case: Case) -> Case | None:
        """A call of the kind of ``case`` that is taken: at a shape taken otherwise, or at whole tiles."""
        free = case.grammar.free
        others = sorted(self._taken, key=lambda other: _unlike(case, other))[:1]
        tried = [replace(other, dtypes=case.dtypes, scheme=case.scheme, options=case.options) for other in others]
        tried += [_aligned(case, {name: tile for name in free}) for tile in ALIGNED]
        tried += [_aligned(case, {name: -(-case[name] // 128) * 128 for name in free})]
        return next((probe for probe in tried if self._admits(probe)), None)

    def _admits(self, probe: Case) -> bool:
        return probe in self._taken or (probe not in self._refused and valid(probe) and self.ask(probe) is None)

    # --- what was reached -----------------------------------------------------------------------------------

    def coverage(self) -> Coverage:
        """What was reached, and why that is too little where it is."""
        reasons: dict[str, list[Case]] = {}
        for case, reason in [*((c, self._refused[c]) for c in self._asked if c in self._refused), *self._lost]:
            cases_of_reason = reasons.setdefault(reason, [])
            cases_of_reason += [case] if case not in cases_of_reason else []
        refused = tuple((len(cases), str(cases[0]), reason) for reason, cases in reasons.items())
        asked, judged = _values(self.contract, self._asked), _values(self.contract, self._taken)
        shapes = len({c.extents for c in self._taken}), len({c.extents for c in self._asked})
        learned_ones = dict.fromkeys(str(domain) for domain in self._domains.values() if domain.conditions)
        domain = "; or ".join(learned_ones) if self.stated is None else str(self.stated)
        coverage = Coverage(shapes, asked, judged, self._moved, refused, domain, self.stated is not None)
        return replace(coverage, complaints=tuple(self.complaints()))

    def complaints(self) -> Iterator[str]:
        """Why too little was reached (see the head of this file); nothing where no call was refused."""
        if not self._refused and not self._lost and self.stated is None:
            return
        if not self._taken:
            yield f"every call is refused: {next(iter([*self._refused.values(), *(why for _, why in self._lost)]))}"
            return
        for name in grammars()[self.contract].extents:
            asked, judged = ({case[name] for case in cases} for cases in (self._asked, self._taken))
            if len(judged) < (due := min(LEAST, len(asked))):
                values = " and ".join(map(str, sorted(judged)))
                yield f"{name} is judged at {values} only, of {len(asked)} values asked (at least {due})"
        shapes, due = len({c.extents for c in self._taken}), min(LEAST, len(self._given))
        if shapes < due:
            yield f"{shapes} {'shape is' if shapes == 1 else 'shapes are'} judged (at least {due})"
        families = {c.family for c in self._asked} | {c.family for c, _ in self._lost}
        if missing := sorted(families - {c.family for c in self._taken}):
            yield f"no call with data of {', '.join(missing)} is taken"
        if self._broken:
            few = list(self._broken)[:2]
            more = f", and {len(self._broken) - 2} more" if len(self._broken) > 2 else ""
            yield f"{', '.join(few)}{more}; state what the kernel takes with --domain"


def kind_of(case: Case) -> Kind:
    """What of a case is neither its shape nor its data: dtypes, scheme, options, changes."""
    return case.dtypes, case.scheme, case.options, case.changes


def _values(contract: str, cases: Iterable[Case]) -> dict[str, tuple[object, ...]]:
    cases, grammar = list(cases), grammars()[contract]
    values: dict[str, tuple[object, ...]] = {n: tuple(sorted({c[n] for c in cases})) for n in grammar.extents}
    for name in ("family", "dtypes", "scheme"):
        values[name] = tuple(sorted({str(getattr(c, name)) for c in cases}))
    for name in grammar.options:
        values[name] = tuple(sorted({c.option(name) or "-" for c in cases}))
    return values


def _shaped(case: Case, extents: Extents | None) -> Case | None:
    return None if extents is None else replace(case, extents=tuple(extents.items()))


def _aligned(case: Case, extents: Extents) -> Case:
    return replace(case, extents=tuple((name, extents.get(name, extent)) for name, extent in case.extents))


def _apart(case: Case, other: Case) -> float:
    pairs = zip(case.extents, other.extents, strict=True)
    return sum(abs(math.log(new / old)) for (_, old), (_, new) in pairs)


def _unlike(case: Case, other: Case) -> tuple[bool, bool, int, float]:
    same_options = len(set(case.options) ^ set(other.options))
    return case.scheme != other.scheme, case.dtypes != other.dtypes, same_options, _apart(case, other)


def _extents(case: Case) -> str:
    return ",".join(f"{name}={extent}" for name, extent in case.extents)


def _span(values: tuple[object, ...]) -> str:
    if len(values) <= LISTED:
        return " ".join(map(str, values))
    return f"{len(values)} values {values[0]} to {values[-1]}"


def _of(name: str, judged: tuple[object, ...], asked: tuple[object, ...]) -> str:
    if len(judged) == len(asked):
        return f"{name} {len(judged)} of {len(asked)}"
    return f"{name} {len(judged)} of {len(asked)} ({' '.join(map(str, judged)) or 'none'})"
