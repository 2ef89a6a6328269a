"""One case is one string, and the string is all that is needed to make its inputs again.

    cutlass_scaled_mm/e4m3xe4m3-bf16/token:channel/m=7,n=512,k=640/family=randn/seed=41
    contract          dtypes         scheme        extents          what the data are

``dtypes`` is ``AxB-OUT`` for products and ``X-Q`` for quantisers; ``scheme`` names the granularity of the scales
(``tensor``, ``token``, ``channel``, ``1x128``, ``128x128``; ``-`` where there is none). Options that change the call
stand in a segment of their own before the family, as in ``/bias=bf16/``. Data come from :mod:`oracle.routines.data`
under a label that contains the whole string, so two cases never share a tensor.

What no part above says of a call stands in a segment before the family too, as ``/slot_mapping:i64,x:pitch/``: any
option of the contract, the dtype of an input, whether an optional one is there, and strides
(:mod:`oracle.routines.changes`). The other inputs are those of the case without that segment.

Not covered: running anything (:mod:`oracle.harness.runner`), and what a routine promises (:mod:`oracle.routines`).
"""

from __future__ import annotations

from oracle.errors import CaseError, among, counted
from oracle.routines import changes
from oracle.routines.case import Case, Grammar
from oracle.routines.family import get, grammars

__all__ = ["Case", "Grammar", "grammars", "parse"]

DEFAULT_FAMILY = "randn"
EXAMPLE = "cutlass_scaled_mm/e4m3xe4m3-bf16/token:channel/m=7,n=512,k=640/family=randn/seed=41"


def parse(text: str) -> Case:
    """The case of an id.

    The family may be left out (``randn``); everything else is required.

    Raises
    ------
    CaseError
        Names the part that does not fit and what would.
    """
    parts = text.strip().split("/")
    if len(parts) < 5:
        raise CaseError(
            f"{text!r} has {counted(len(parts), 'part')}; a case is contract/dtypes/scheme/extents[/options]"
            f"[/changes]/family=F/seed=S, for example {EXAMPLE}"
        )
    contract, dtypes, scheme, *rest = parts
    if contract not in grammars():
        way_out = among(contract, sorted(grammars()), see="fp8-oracle list contracts")
        raise CaseError(f"no contract with cases is named {contract!r}; {way_out}")
    grammar = grammars()[contract]
    _member(dtypes, (*grammar.dtypes, *grammar.also_dtypes), f"dtypes of {contract}")
    _member(scheme, (*grammar.schemes, *grammar.also_schemes), f"scheme of {contract}")
    changing = [segment for segment in rest if ":" in segment and "=" not in segment]
    named = _named([segment for segment in rest if segment not in changing], text)
    extents = tuple((name, _extent(named, name, contract)) for name in grammar.extents)
    families = (*grammar.families, *grammar.edge_families)
    family = _member(named.pop("family", DEFAULT_FAMILY), families, f"family of {contract}")
    seed = _natural(named.pop("seed", None), "seed", contract)
    options = tuple((key, named.pop(key)) for key in grammar.options if key in named)
    for key, value in options:
        _member(value, grammar.options[key], f"option {key} of {contract}")
    if named:
        known = [*grammar.extents, *grammar.options, "family", "seed"]
        raise CaseError(f"{contract} has no {(first := next(iter(named)))!r} in a case; {among(first, known)}")
    changed = changes.parse(get(contract), ",".join(changing)) if changing else ()
    return Case(contract, dtypes, scheme, extents, family, seed, options, grammar, changed)


# --- parsing ------------------------------------------------------------------------------------------------


def _member(value: str, admitted: tuple[str, ...], what: str) -> str:
    if value not in admitted:
        raise CaseError(f"{value!r} is no {what}; {among(value, admitted)}")
    return value


def _named(segments: list[str], text: str) -> dict[str, str]:
    named: dict[str, str] = {}
    for segment in segments:
        for pair in segment.split(","):
            key, equals, value = pair.partition("=")
            if not (key and equals and value):
                raise CaseError(f"{pair!r} in {text!r} is not of the form name=value")
            if key in named:
                raise CaseError(f"{key!r} stands twice in {text!r}")
            named[key] = value
    return named


def _extent(named: dict[str, str], dim: str, contract: str) -> int:
    extent = _natural(named.pop(dim, None), dim, contract)
    if extent == 0:
        raise CaseError(f"{dim}=0 in a case of {contract}: there would be nothing to compute; use {dim}=1 or more")
    return extent


def _natural(value: str | None, what: str, contract: str) -> int:
    if value is None:
        raise CaseError(f"the case of {contract} does not say {what}=...")
    if not (value.isascii() and value.isdigit()):
        raise CaseError(f"{what}={value!r} is not a non-negative integer")
    if value != str(int(value)):
        raise CaseError(f"{what}={value!r} has leading zeros; write {what}={int(value)}")
    return int(value)
