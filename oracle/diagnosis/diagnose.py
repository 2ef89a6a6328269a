"""What is wrong with an output: where it fails, since which K block, and which known faults reproduce it.

Every fault of the catalogue is a hypothesis (:mod:`oracle.diagnosis.hypotheses` weighs those about products). Where none of them
reproduces all that fails, :mod:`oracle.diagnosis.localise` looks for rows, tiles, experts and K blocks in the wrong place. Three
general findings need no hypothesis: failing rows that hold the right result of other rows, failing elements that all
hold one value, and the scale factors that the kernel really used (:mod:`oracle.diagnosis.effective_scales`).
Not covered: three faults at once; judging (a diagnosis changes no status).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from oracle.bounds import admissible
from oracle.bounds.engines import exact
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.diagnosis import localise as places
from oracle.diagnosis.effective_scales import Factors, factors
from oracle.diagnosis.explanations import LISTED, Explanation, ranked
from oracle.diagnosis.hypotheses import WHOLE, View, other_groups, work
from oracle.errors import NumericsError
from oracle.numbers.formats import codes_of, decode
from oracle.numbers.recipes import Recipe
from oracle.routines import get
from oracle.routines.base import Beyond, Call, Contract, Output, by_name
from oracle.routines.catalogue import Family, Fault, Stage, agree, faults_of, run
from oracle.routines.fault import Change
from oracle.routines.products.roles import quantised
from oracle.tensorcore.identify import subset
from oracle.tensorcore.schedules import Schedule
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth.gemm import rounded
from oracle.verdict.compare import Status, Verdict, compare
from oracle.verdict.pattern import describe, ranges
from oracle.verdict.products import Part, interval_of, wider_classes

TILE = 128  # columns of which the factors of the K blocks are found together
MOST = 4  # findings about K blocks
TRIED = 3  # admitted schedules that faults are put into, beside exact sums
CHEAP = 1 << 27  # products of one hypothesis up to which a judgement diagnoses by itself


@dataclass(frozen=True)
class Diagnosis:
    """What was found; ``explanations`` best first, ``findings`` general observations in words."""

    failing: int
    total: int
    where: str
    explanations: tuple[Explanation, ...] = ()
    findings: tuple[str, ...] = ()
    first_block: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What ``Verdict.explained_by`` says: every complete explanation, else those at work in the failing elements
        only, else the best one that covers half, else those by place."""
        complete = tuple(str(e) for e in self.explanations if e.complete)
        if complete:
            return complete
        local = tuple(str(e) for e in self.explanations if e.local)
        if local:
            return local
        if self.explanations and self.explanations[0].share >= LISTED:
            best = self.explanations[0]
            return tuple(
                str(e)
                for e in self.explanations
                if (e.explained, e.contradicted) == (best.explained, best.contradicted)
            )
        return tuple(str(e) for e in self.explanations if e.placed)


def diagnose(
    contract: str,
    inputs: Mapping[str, Tensor],
    output: Output,
    *,
    arch: str = "sm90",
    numerics: str | None = None,
    **options: object,
) -> Diagnosis:
    """Explain a failing output; arguments as :func:`oracle.judge`.

    Returns
    -------
    Diagnosis
        Without explanations when no fault of the catalogue reproduces half of the failing elements; empty when the
        output does not fail.
    """
    found = get(contract)
    judged = found.judge(inputs, output, arch=arch, numerics=numerics, **options)
    call = Call(found, inputs, options, arch=arch)
    if call.optional_operands is None and not faults_of(contract):
        raise NumericsError(f"{contract} has no catalogue of faults to explain an output with")
    return _of(judged, call, by_name(output), numerics)


def explain_verdict(
    verdict: Verdict,
    contract: Contract,
    inputs: Mapping[str, Tensor],
    output: Output,
    *,
    arch: str,
    numerics: str | None,
    **options: object,
) -> Verdict:
    """``verdict`` with ``explained_by`` filled in, where it failed, says nothing yet, and asking is cheap."""
    call = Call(contract, inputs, options, arch=arch)
    if verdict.status is not Status.FAILED or verdict.explained_by or not cheap(call):
        return verdict
    return replace(verdict, explained_by=_of(verdict, call, by_name(output), numerics).names)


def _of(verdict: Verdict, call: Call, output: Mapping[str, Tensor], numerics: str | None) -> Diagnosis:
    if not verdict.status.is_failure:
        return Diagnosis(0, verdict.total, "")
    operands = call.optional_operands
    if operands is not None and operands.parts:
        return _product(call, output["out"], numerics, refuted=bool(verdict.explained_by))
    return _whole(call, output)


def cheap(call: Call) -> bool:
    """Whether every hypothesis about this call costs little."""
    operands = call.optional_operands
    if operands is None or next(iter(call.inputs.values())).is_cuda:
        return False
    if operands.parts:
        return work(operands.parts) <= CHEAP
    return torch.Size(operands.shape).numel() <= CHEAP >> 6


# --- scaled products ----------------------------------------------------------------------------------------


def _product(asked: Call, output: Tensor, numerics: str | None, *, refuted: bool) -> Diagnosis:
    """``refuted``: the bits were called wrong, however near they are."""
    contract, given, options = asked.contract, asked.inputs, asked.options
    base = Call(contract, quantised(asked), options, None, output.dtype, Beyond.UNKNOWN, given, asked.arch)
    parts = base.parts
    flat = output.reshape(-1, output.shape[-1])
    names = contract.arithmetics(base, numerics)
    outside = torch.ones_like(flat, dtype=torch.bool) if refuted else _outside(parts, flat, names[0])
    views = []
    for schedule in _schedules(names, exact_too=not refuted and numerics is None):
        call = replace(base, schedule=schedule)
        views.append(View(call, flat, outside))
    first = max(views, key=lambda view: view.equal)
    scheduled = [view for view in views if view.call.schedule is not None]
    chosen = list(dict.fromkeys([first, *scheduled[:TRIED], views[-1]]))
    faults, single = faults_of(contract.name), dict[View, tuple[Explanation, ...]]()
    for view in chosen:
        single[view] = view.rank(faults)
        if _complete(single[view]):
            return _described(view, single[view])
    best = _best(single)
    if not refuted:
        classes = (names[0], *(wider_classes(names) if numerics is None else ()))
        fewest = min(views, key=lambda view: view.failing)
        placed = places.found(fewest, classes, single[best])
        if placed:
            return _described(fewest, ranked([*placed, *single[best]]))
    every = dict[View, tuple[Explanation, ...]]()
    for view in chosen:
        every[view] = view.further(faults, single[view])
        if _complete(every[view]):
            return _described(view, every[view])
    best = _best(every)
    return _described(best, every[best])


def _outside(parts: Sequence[Part], output: Tensor, name: str) -> Tensor:
    """Elements of ``output [R, N]`` outside the interval of this numerics, bool."""
    found = torch.zeros(output.shape, dtype=torch.bool, device=output.device)
    for part in parts:
        value, own = exact(part.product), part.of(output)
        admitted = admissible(value, rounded(part.product, value, output.dtype), interval_of(part.product, name))
        found[part.place] = compare(own, admitted).bad
    return found


def _schedules(names: Sequence[str], *, exact_too: bool) -> list[Schedule | None]:
    """The arithmetics to put faults into: those admitted, without doubles, and last exact sums (None), which stand for
    float32 in any order."""
    real = dict.fromkeys(name.removesuffix(".any") for name in names if name != IEEE32)
    found: list[Schedule | None] = [get_schedule(name) for name in real]
    return [*found, None] if exact_too or not found else found


def _complete(ranked: Sequence[Explanation]) -> bool:
    return bool(ranked) and ranked[0].complete


def _best(ranked: Mapping[View, tuple[Explanation, ...]]) -> View:
    """The view with the best first explanation; of equal ones the first."""
    return reduce(lambda best, view: view if _better(ranked[view], ranked[best]) else best, ranked)


def _better(ranked: Sequence[Explanation], than: Sequence[Explanation]) -> bool:
    def worth(e: Explanation) -> tuple[bool, bool, int]:
        return e.complete, e.local, e.explained - e.contradicted

    return bool(ranked) and (not than or worth(ranked[0]) > worth(than[0]))


def _described(view: View, ranked: tuple[Explanation, ...]) -> Diagnosis:
    findings = list(_experts(view))
    findings += _other_rows(view)
    findings += _one_value(view)
    found = _kept_factors(view)
    firsts = [first for _, used in found if (first := used.first_block()) is not None]
    findings += _blocks(found)[:MOST]
    first = min(firsts, default=None)
    return Diagnosis(view.failing, view.total, describe(view.bad), ranked[:12], tuple(findings), first)


def _kept_factors(view: View) -> list[tuple[Tensor, Factors]]:
    """The factors of each N tile's failing columns (of the others nothing is to be learnt), with these columns."""
    if len(view.call.parts) != 1 or work(view.call.parts) > WHOLE:
        return []
    (part,) = view.call.parts
    bad, output, found = part.of(view.bad), part.of(view.output), []
    rows = torch.arange(part.product.M, device=bad.device)
    for start in range(0, part.product.N, TILE):
        columns = start + torch.nonzero(bad[:, start : start + TILE].any(dim=0))[:, 0]
        if not len(columns):
            continue
        used = factors(subset(part.product, rows, columns), output[:, columns])
        if used is not None and used.first_block() is not None:
            found.append((columns, used))
    return found


def _blocks(found: Sequence[tuple[Tensor, Factors]]) -> list[str]:
    """Which K blocks of which rows and columns enter with a wrong weight; tiles alike are joined."""
    joined: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[Tensor, Factors]]] = {}
    for columns, used in found:
        wrong = used.wrong()
        places = tuple(tuple(torch.nonzero(wrong.any(dim=axis))[:, 0].tolist()) for axis in (1, 0))
        joined.setdefault((places[0], places[1]), []).append((columns, used))
    return [_said(rows, blocks, tiles) for (rows, blocks), tiles in joined.items()]


def _said(rows: Sequence[int], blocks: Sequence[int], tiles: Sequence[tuple[Tensor, Factors]]) -> str:
    values = torch.cat([used.factor[used.wrong()] for _, used in tiles])
    columns = [int(c) for of, _ in tiles for c in of]
    spread = f"{float(values.min()):.4g} to {float(values.max()):.4g}" if len(values) > 1 else f"{float(values[0]):.4g}"
    return (
        f"the accumulation leaves the right path at K block {blocks[0]} (k = {blocks[0] * tiles[0][1].block}); blocks "
        f"{ranges(list(blocks))} of rows {ranges(list(rows))} and failing columns {min(columns)} to {max(columns)} "
        f"enter with {spread} times their right weight"
    )


def _experts(view: View) -> list[str]:
    """Which groups fail, where there are several."""
    parts = view.call.parts
    if len(parts) < 2:
        return []
    failing = [i for i, part in enumerate(parts) if bool(part.of(view.bad).any())]
    names = places.group_names(view.call)
    only_those = [f"experts {ranges([names[i] for i in failing])} only, of {len(parts)} in use"]
    borrowed = [
        f"expert {names[i]} follows a product with the weight {what} of expert {names[j]}"
        for i, j, what in other_groups(view)
    ]
    return ([] if len(failing) == len(parts) else only_those) + borrowed[:4]


def _other_rows(view: View) -> list[str]:
    """Failing rows whose bits are the right result of another row."""
    place = {bytes(codes_of(row).cpu().numpy().tobytes()): i for i, row in reversed(list(enumerate(view.right)))}
    moved = []
    for i in torch.nonzero(view.bad.any(dim=1))[:, 0].tolist():
        j = place.get(bytes(codes_of(view.output[i]).cpu().numpy().tobytes()))
        if j is not None and j != i:
            moved.append((i, j))
    if not moved:
        return []
    shown = ", ".join(f"{i} that of row {j}" for i, j in moved[:6])
    return [
        f"{len(moved)} failing rows hold the right result of another row: {shown}{', ...' if len(moved) > 6 else ''}"
    ]


def _one_value(view: View) -> list[str]:
    values = decode(view.output)[view.bad]
    if bool(torch.isnan(values).all()):
        return ["every failing element is NaN"]
    if len(values) > 1 and bool((values == values[0]).all()):
        return [f"every failing element is {float(values[0]):.9g}"]
    right = decode(view.right)[view.bad]
    ratio = values / right
    if len(ratio) > 3 and bool((ratio == ratio[0]).all()):
        return [f"every failing element is {float(ratio[0]):.9g} times the right result"]
    return []


# --- quantisers and logits ----------------------------------------------------------------------------------


def _whole(asked: Call, given: Mapping[str, Tensor]) -> Diagnosis:
    """Every fault on the whole call; outputs are compared tensor by tensor."""
    call = replace(asked, beyond=Beyond.UNKNOWN)
    base, right = _nearest(call, given)
    masks = _inadmissible(call, given, right)
    failing, total = sum(int(m.sum()) for m in masks.values()), sum(m.numel() for m in masks.values())
    found = []
    for fault in faults_of(call.contract.name):
        if fault.applies(call) is not None:
            continue
        predicted = by_name(run(call, *base, fault))
        if any(predicted[name].shape != given[name].shape for name in given):
            continue
        same = {name: agree(given[name], predicted[name]) for name in given}
        changed = {name: ~agree(predicted[name], right[name]) for name in given}
        explained = sum(int((masks[name] & same[name] & changed[name]).sum()) for name in given)
        wrong = sum(int((~same[name] & (changed[name] | masks[name])).sum()) for name in given)
        if explained > wrong:
            found.append(Explanation(fault.name, "declared recipe", explained, failing, total, wrong, fault.met_in))
    best = ranked(found)
    where = "; ".join(f"{name}: {describe(mask)}" for name, mask in masks.items() if bool(mask.any()))
    return Diagnosis(failing, total, where, best[:12])


def _nearest(call: Call, given: Mapping[str, Tensor]) -> tuple[tuple[Fault, ...], dict[str, Tensor]]:
    """The right output nearest to ``given`` by equal bits: of a quantiser's admitted recipes, the one that has most of
    them, as a change of the call's own (none for that and for other contracts)."""
    best: tuple[Fault, ...] = ()
    right = by_name(run(call))
    operands = call.optional_operands
    equal = _equal(given, right)
    for recipe in operands.recipes[1:] if operands is not None else ():
        name = call.contract.name
        other = Fault(recipe.name, Family.CAST, name, {Stage.RECIPE: _always(recipe)}, frozenset({name}))
        made = by_name(run(call, other))
        if (count := _equal(given, made)) > equal:
            best, right, equal = (other,), made, count
    return best, right


def _always(recipe: Recipe) -> Change:
    return lambda call, _: recipe


def _equal(given: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> int:
    return sum(int(agree(given[name], right[name]).sum()) for name in right)


def _inadmissible(call: Call, given: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The elements that fail: those that differ from ``right``. Of a quantiser those that the judgement refuses too,
    a code only where it is wrong for the published scale and for the right one."""
    wrong = {name: ~agree(given[name], right[name]) for name in right}
    bad = call.contract.refused(call, given, right)
    if bad is None:
        return wrong
    if any(bad[name].numel() != mask.numel() for name, mask in wrong.items()):
        return wrong
    refused = {name: mask & bad[name].reshape(mask.shape) for name, mask in wrong.items()}
    return refused if any(bool(mask.any()) for mask in refused.values()) else wrong
