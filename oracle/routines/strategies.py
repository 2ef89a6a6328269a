"""Hypothesis strategies of the calls of any contract, which shrink: ``oracle.strategies.calls("cutlass_scaled_mm")``.

    from hypothesis import given, settings
    import oracle

    @settings(deadline=None)  # the first judgement of a process compiles
    @given(oracle.strategies.calls("cutlass_scaled_mm", domain="n % 16 == 0, k % 16 == 0"))
    def test_my_gemm(call):
        out = my_gemm(**call.inputs)
        assert not oracle.judge(call.contract.name, call.inputs, out, arch="cpu", **call.options).status.is_failure

A drawn call is that of a case (:func:`cases`); its id, which makes the same inputs everywhere, is printed for the
smallest failing example. Extents shrink towards the smallest that the contract (and ``domain``) admits, dtypes, schemes
and options towards the usual ones, data towards small exact integers, seeds towards 0. Needs ``hypothesis``, which is
loaded by the first call of a strategy and is no dependency of this package.

What is drawn is read off the grammar of the cases (:class:`oracle.routines.case.Grammar`): its free extents, or where
it names none every extent up to 64, or twice the smallest listed one; those that depend on each other (experts, shards,
pages) are those of listed cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oracle.errors import CaseError, OptionError, among
from oracle.routines import profiles
from oracle.routines.base import Call
from oracle.routines.cases import Case, grammars
from oracle.routines.domain import Domain, parse
from oracle.routines.edges import domain_of, valid
from oracle.routines.family import get

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

LARGEST = 300  # two tiles or scale blocks of 128 and a tail: judged in milliseconds
SMALL = 64  # of extents that all multiply: tensors of at most a million elements
EXACT_FIRST = ("exact", "integers", "randn")  # what a family shrinks to, the first that a contract has
SEEDS = 1 << 31


def cases(
    contract: str,
    *,
    dtypes: Sequence[str] | None = None,
    schemes: Sequence[str] | None = None,
    families: Sequence[str] | None = None,
    options: bool = True,
    domain: str | None = None,
    largest: int = LARGEST,
) -> SearchStrategy[Case]:
    """Cases of ``contract``, every one a valid call.

    Parameters
    ----------
    dtypes, schemes, families : parts of case ids to draw from; by default all that the grammar of the contract has.
    options : whether options (a bias, rounding modes) are drawn.
    domain : conditions that the extents satisfy (:mod:`oracle.routines.domain`).
    largest : of any extent that is drawn.

    Raises
    ------
    CaseError
        No contract of that name has cases, or it has no such dtypes, scheme or family.
    OptionError
        ``domain`` does not parse or admits nothing up to ``largest``; or hypothesis is not installed.
    """
    try:
        from hypothesis import assume, note
        from hypothesis import strategies as st
    except ImportError:
        raise OptionError("strategies need hypothesis, which is not installed: pip install hypothesis") from None
    if contract not in grammars():
        way_out = among(contract, sorted(grammars()), see="fp8-oracle list contracts")
        raise CaseError(f"no contract with cases is named {contract!r}; {way_out}")
    grammar = grammars()[contract]
    everything = (*grammar.families, *grammar.edge_families)
    first = next((family for family in EXACT_FIRST if family in everything), everything[0])
    asked = {
        "dtypes": _known(dtypes, grammar.dtypes, f"dtypes of {contract}"),
        "scheme": _known(schemes, grammar.schemes, f"scheme of {contract}"),
        "family": _known(families, tuple(dict.fromkeys((first, *everything))), f"family of {contract}"),
    }
    stated = Domain() if domain is None else parse(domain, grammar.extents)
    free = grammar.free or (() if grammar.fixed else grammar.extents)
    whole = Domain((*stated.conditions, *domain_of(contract, free).conditions))
    listed = sorted(profiles.cases(contract, "quick"), key=lambda case: sum(extent for _, extent in case.extents))

    def most(name: str) -> int:
        """Where every extent is drawn, at least twice the smallest one listed: head dims are multiples of 64, say."""
        small = max(SMALL, 2 * min(case[name] for case in listed))
        return largest if grammar.free else min(largest, small)

    values = {name: _values(whole, name, most(name)) for name in free}

    @st.composite
    def drawn(draw: Any) -> Case:
        base = draw(st.sampled_from(listed))
        extents = {**dict(base.extents), **{name: draw(st.sampled_from(choices)) for name, choices in values.items()}}
        assume(whole.holds(extents))
        parts = {name: draw(st.sampled_from(choices)) for name, choices in asked.items()}
        chosen = {key: draw(st.sampled_from(("", *of))) for key, of in grammar.options.items()} if options else {}
        example: Case = replace(
            base,
            extents=tuple(extents.items()),
            options=tuple((k, v) for k, v in chosen.items() if v),
            seed=draw(st.integers(0, SEEDS - 1)),
            **parts,
        )
        assume(valid(example))
        note(str(example))
        return example

    strategy: SearchStrategy[Case] = drawn()
    return strategy


def calls(contract: str, **asked: Any) -> SearchStrategy[Call]:
    """Calls of ``contract``: records with ``contract``, ``inputs`` and ``options``.

    Arguments and errors are those of :func:`cases`."""
    return cases(contract, **asked).map(lambda case: Call(get(contract), case.inputs(), case.call_options()))


def _known(asked: Sequence[str] | None, admitted: tuple[str, ...], what: str) -> tuple[str, ...]:
    for value in asked or ():
        if value not in admitted:
            raise CaseError(f"{value!r} is no {what}; {among(value, admitted)}")
    return tuple(asked or admitted)


def _values(domain: Domain, name: str, largest: int) -> list[int]:
    """The values of one extent that what is said of it alone admits."""
    alone = [condition for condition in domain.conditions if condition.names == {name}]
    values = [value for value in range(1, largest + 1) if all(c.holds({name: value}) for c in alone)]
    if not values:
        raise OptionError(f"domain={str(domain)!r} leaves no {name} up to {largest}; widen it, or pass largest=")
    return values
