"""What a contract admits and none of some cases has: options, dtypes, widths, optional inputs, edges, data of kinds.

:func:`gaps` asks that of any list of cases. :data:`EXEMPT` names what the default cases of ``validate``
(:func:`oracle.routines.drawn.default_cases`) leave out, each with the reason. Not covered: values of an option that
admits any name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from oracle.errors import OracleError
from oracle.routines import changes, patterns
from oracle.routines.base import Call, Contract
from oracle.routines.case import Case
from oracle.routines.changes import option_word, word_of
from oracle.routines.edges import domain_of, valid, volume
from oracle.routines.family import get

NAN = "nan"  # the family of data with NaN: a contract that has it says what NaN gives
OFFSETS = (0, 1, -1)  # of an extent, from an edge that its dims name

EXEMPT: Mapping[str, str] = {
    "trtllm_fp8_block_scale_moe: another value topk_group=not 1": "two groups do not divide three experts",
    "trtllm_fp8_per_tensor_scale_moe: another value topk_group=not 1": "two groups do not divide three experts",
    "fp8_gemm_nt_skip_head_mid: another value left=not 128": "N is a multiple of left and right: both change with N",
    "fp8_gemm_nt_skip_head_mid: another value right=not 128": "N is a multiple of left and right: both change with N",
}
"""Gaps of the default cases, as ``contract: gap``, each with the reason for which no case closes it."""


@dataclass(frozen=True)
class Gap:
    """One admitted value that is not reached: what it is of, its name, its word."""

    what: str
    name: str
    word: str

    def __str__(self) -> str:
        return f"{self.what} {self.name}={self.word}"


OPTION, DTYPE, WIDTH, PRESENCE, EDGE, OTHER = "option", "dtype", "width", "optional", "edge", "another value"
PATTERN = "data"
LOOKED_AT = 4  # cases that a word of data is tried on
UNEVEN = (20, 12)  # neither a power of two nor whole vectors of 8; of groups and pages more than 8
TOGETHER = 3  # inputs that have other data in one case
ENOUGH = 1 << 25  # volume of a case on which a word shows as well as on a larger one, unless it is everywhere
ABSENT, PRESENT = "absent", "given"


@dataclass(frozen=True)
class Seen:
    """What one call has: the words of its options, the dtypes and ranks of its inputs."""

    options: Mapping[str, str]
    dtypes: Mapping[str, str]
    ranks: Mapping[str, int]


def missing(contract: Contract, reached: Sequence[Seen]) -> list[Gap]:
    """The admitted options, dtypes and presences that none of these calls has."""
    lacking: list[Gap] = []
    for option in contract.options:
        words = {seen.options[option.name] for seen in reached}
        if option.choices is not None:
            lacking += [Gap(OPTION, option.name, w) for w in map(option_word, option.choices) if w not in words]
        elif len(words) == 1 and not option.names and (option.default is None or _is_numeric(option.default)):
            lacking.append(Gap(OTHER, option.name, f"not {option_word(option.default)}"))
    for spec in contract.inputs:
        dtypes = {seen.dtypes.get(spec.name) for seen in reached}
        if spec.optional:
            lacking += [Gap(PRESENCE, spec.name, ABSENT)] if None not in dtypes else []
            lacking += [Gap(PRESENCE, spec.name, PRESENT)] if dtypes == {None} else []
        what = WIDTH if spec.kind.is_integer else DTYPE
        lacking += [Gap(what, spec.name, w) for w in map(word_of, spec.dtypes) if w not in dtypes]
    return lacking


def gaps(contract: str, chosen: Sequence[Case]) -> list[Gap]:
    """What of a contract none of these cases reaches: option values, dtypes, widths, optional inputs, edges of dims,
    data of the kinds of its inputs.

    Of the cases of one dtype, scheme, option and change the smallest is made, which is like the others; a word of data
    is looked for in all of them before it counts as a gap.
    """
    kinds: dict[object, Case] = {}
    for case in chosen:
        key = case.dtypes, case.scheme, case.options, case.changes
        if key not in kinds or volume(case) < volume(kinds[key]):
            kinds[key] = case
    calls = Calls()
    lacking = missing(get(contract), [calls.seen(case) for case in kinds.values()])
    for name, widths in edges_of(get(contract)).items():
        extents = {dict(case.extents).get(name, 0) for case in chosen}
        for width, offset in itertools.product(widths if extents != {0} else (), OFFSETS):
            if not any(extent % width == offset % width for extent in extents) and _possible(
                chosen, name, width, offset
            ):
                lacking.append(Gap(EDGE, name, f"{width}n{offset:+d}" if offset else f"{width}n"))
    words = patterned(changed_first(chosen), chosen, calls)[1]
    return [*lacking, *(word for word in words if not has_word(chosen, word, calls))]


def has_word(chosen: Iterable[Case], gap: Gap, calls: Calls) -> bool:
    """Whether any of these cases has a word of data: the smallest of its kind need not, where the seed decides."""
    return any((gap.name, gap.word) in calls.shown(case) for case in chosen if calls.admits(case))


def changed_first(chosen: Iterable[Case]) -> list[Case]:
    """The cases on which :func:`patterned` tries a word of data: those with changes, then the others."""
    return sorted(chosen, key=lambda case: not case.changes)


def patterned(tried: Sequence[Case], chosen: Sequence[Case], calls: Calls) -> tuple[list[Case], list[Gap]]:
    """Cases with the words of data of each input that no chosen case has, and these words.

    They are the first of :data:`LOOKED_AT` of the ``tried`` cases that take the word; one that none takes is left out.
    Words of up to :data:`TOGETHER` inputs share a case; NaN and infinity hide others, and have their own, as has what
    is drawn in some calls alone. Of the chosen
    cases the smallest of each family, option and change is made, which is like the others.
    """
    contract, grammar = get(chosen[0].contract), chosen[0].grammar
    alike: dict[object, Case] = {}
    for case in sorted(chosen, key=volume):
        alike.setdefault((case.family, case.options, case.changes), case)
    reached = {one for case in alike.values() if calls.admits(case) for one in calls.shown(case)}
    wanted = [(spec.name, word) for spec in contract.inputs for word in patterns.words_of(spec)]
    drawn: list[tuple[frozenset[tuple[str, str]], Case]] = []
    closed: list[Gap] = []
    for name, word in wanted:
        pattern = patterns.DATA[word]
        alone, fitting = pattern.stated or pattern.on is not None, tried
        if (name, word) in reached or (pattern.stated and NAN not in grammar.families):
            continue
        if pattern.on is not None:
            fitting = [case for case in tried if calls.given(case, name, pattern.on)]
            fitting = [case for case in fitting if case.family == "randn"] or fitting
        if not fitting:
            continue
        shared = [at for at, (had, _) in enumerate(drawn) if 0 < len(had) < TOGETHER and name not in dict(had)]
        if pattern.everywhere:  # the largest show most
            order = sorted(fitting, key=volume, reverse=True)
        else:
            few, many = ([case for case in fitting if (volume(case) > ENOUGH) == large] for large in (False, True))
            order = [
                part[(len(drawn) + step) % len(part)]
                for part in (few, many)
                for step in range(min(len(part), LOOKED_AT))
            ]
        places = [*shared[:1], *range(-len(order), 0)] if not alone else range(-len(order), 0)
        for at in places:
            had, case = drawn[at] if at >= 0 else (frozenset(), order[at])
            new = with_data(case, name, word)
            due = had | {(name, word)}
            if name in calls.seen(case).dtypes and calls.admits(new) and due <= calls.shown(new):
                pair = (frozenset[tuple[str, str]]() if alone else due, new)
                drawn = [*drawn[:at], pair, *drawn[at + 1 :]] if at >= 0 else [*drawn, pair]
                reached |= calls.shown(new)
                closed.append(Gap(PATTERN, name, word))
                break
    return [case for _, case in drawn], closed


def with_data(case: Case, name: str, word: str) -> Case:
    """The case with other data of an input, instead of those that a change gives it."""
    others = [(key, value) for key, value in case.changes if key != name or value not in patterns.DATA]
    return replace(case, changes=changes.ordered(get(case.contract), [*others, (name, word)]))


def _possible(chosen: Sequence[Case], name: str, width: int, offset: int) -> bool:
    """Whether the contract takes an extent that lies so beside an edge, asked near one of the cases."""
    if name not in chosen[0].grammar.free:
        return False
    domain = domain_of(chosen[0].contract)
    near = [at(chosen[0], name, width * blocks + offset) for blocks in (1, 2)]
    return any(domain.holds(dict(case.extents)) and valid(case) for case in near)


def _is_numeric(value: object) -> bool:
    """A number, or extents, of which another value can be made."""
    return isinstance(value, (int, float, tuple)) and not isinstance(value, bool)


class Calls:
    """The calls of cases, each built once, and what a contract says of them; cases that differ in changes share what
    the grammar builds."""

    def __init__(self) -> None:
        self._made: dict[Case, dict[str, Tensor]] = {}
        self._calls: dict[Case, Call | None] = {}
        self._shown: dict[Case, frozenset[tuple[str, str]]] = {}

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
        except OracleError:  # the contract takes no such call
            return None
        return call

    def given(self, case: Case, name: str, holds: Callable[[patterns.Input], bool]) -> bool:
        """Whether the contract takes a call that has an input of which this holds."""
        call = self._calls[case] if self.admits(case) else None
        if call is None or name not in call.inputs:
            return False
        return holds(patterns.Input(next(spec for spec in call.contract.inputs if spec.name == name), call))

    def elements(self, case: Case) -> int:
        """The elements of the largest input of the call of an admitted case."""
        call = self._calls[case] if self.admits(case) else None
        assert call is not None, f"{case} is no call of its contract"
        return max((x.numel() for x in call.inputs.values()), default=0)

    def shown(self, case: Case) -> frozenset[tuple[str, str]]:
        """Each input of the call of an admitted case with each word of data that it has."""
        if case not in self._shown:
            call = self._calls[case] if self.admits(case) else None
            assert call is not None, f"{case} is no call of its contract"
            self._shown[case] = patterns.shown(call)
        return self._shown[case]

    def seen(self, case: Case) -> Seen:
        """What the call of an admitted case has."""
        call = self._calls[case] if self.admits(case) else None
        assert call is not None, f"{case} is no call of its contract"
        return Seen(
            {name: option_word(value) for name, value in call.resolved.items()},
            {name: word_of(x.dtype) for name, x in call.inputs.items()},
            {name: x.dim() for name, x in call.inputs.items()},
        )


def edges_of(contract: Contract) -> dict[str, tuple[int, ...]]:
    """The divisors that the dims of a contract name, by extent: ``K/128`` gives ``{"k": (128,)}``."""
    divisors: dict[str, set[int]] = {}
    for spec in contract.inputs:
        for dim in spec.dims or ():
            for alternative in dim.split("|"):
                symbol, _, divisor = alternative.partition("/")
                if divisor:
                    divisors.setdefault(symbol.lower(), set()).add(int(divisor))
    return {name: tuple(sorted(widths)) for name, widths in divisors.items()}


def at(case: Case, name: str, extent: int) -> Case:
    """The case with one extent replaced."""
    return replace(case, extents=tuple((key, extent if key == name else value) for key, value in case.extents))
