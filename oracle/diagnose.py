"""What is wrong with an output: where it fails, since which K block, and which known faults reproduce it.

Every fault of the catalogue is a hypothesis: the right kernel with that fault in it predicts bits, and the hypothesis
is worth the failing elements whose bits it reproduces. It says nothing about elements that depend on memory beyond a
buffer, and a right result there speaks against it. Beside the catalogue, three general findings need no hypothesis:
failing rows that hold the right result of other rows, failing elements that all hold one value, and the scale factors
that the kernel really used (:mod:`oracle.effective_scales`).

A hypothesis is tried on all of a small call. Of a large one, faults inside the product are tried on a sample of its
rows and columns, faults of the output on all of it. Where no single fault explains half of the failing elements, pairs
of a fault and a wrong store are tried. Not covered: three faults at once; judging (a diagnosis changes no status).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.compare import Status, Verdict
from oracle.contracts import get
from oracle.contracts.base import Contract, Output
from oracle.contracts.gemm import ProductContract, only
from oracle.contracts.quantize import QuantiserContract
from oracle.effective_scales import Factors, factors
from oracle.errors import NumericsError
from oracle.faults import Beyond, Call, Fault, Stage, agree, faults_of, run
from oracle.faults.engine import LOGITS, accumulated, products, stored, write
from oracle.faults.layers import CONTRACTS as LAYERS
from oracle.faults.roles import quantised
from oracle.formats import codes_of, decode, same_bits
from oracle.judging import Part
from oracle.pattern import describe, ranges
from oracle.tensorcore.schedules import Schedule
from oracle.tensorcore.schedules import get as get_schedule

CHEAP = 1 << 27  # products of one hypothesis up to which a judgement diagnoses by itself
WHOLE = 1 << 28  # products of one hypothesis up to which all of the output is predicted
SAMPLE = (96, 192)  # rows and columns of a larger one
PAIR_SAMPLE = (12, 96)  # rows and columns on which pairs of faults are tried first
Grid = tuple[Tensor, Tensor]
CHANCE = 0.25  # share of right results beyond a buffer above which the hypothesis is contradicted there
LISTED = 0.5  # an explanation that covers less than half of the failing elements is not named


@dataclass(frozen=True)
class Explanation:
    """One hypothesis: of ``failing`` elements that it predicts, it reproduces ``explained``; of all it predicts
    ``known``, and contradicts ``contradicted``."""

    name: str
    numerics: str
    explained: int
    failing: int
    known: int
    contradicted: int
    met_in: str = ""

    @property
    def share(self) -> float:
        """Part of the failing elements whose bits it reproduces."""
        return self.explained / self.failing if self.failing else 0.0

    @property
    def complete(self) -> bool:
        """It reproduces every element that it predicts."""
        return self.contradicted == 0 and self.explained == self.failing > 0

    def __str__(self) -> str:
        if self.complete:
            return self.name
        return f"{self.name} ({100 * self.share:.3g}% of the failing elements)"


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
        """What ``Verdict.explained_by`` says: every complete explanation, else the best one that covers half."""
        complete = tuple(str(e) for e in self.explanations if e.complete)
        if complete:
            return complete
        if self.explanations and self.explanations[0].share >= LISTED:
            best = self.explanations[0]
            return tuple(
                str(e)
                for e in self.explanations
                if (e.explained, e.contradicted) == (best.explained, best.contradicted)
            )
        return ()


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
        Without explanations when no fault of the catalogue reproduces half of the failing elements; empty when every
        bit is that of the right kernel.
    """
    found = get(contract)
    if isinstance(found, ProductContract):
        return _product(found, inputs, only(output), arch, numerics, options)
    if isinstance(found, QuantiserContract) or found.name in LAYERS | {LOGITS}:
        return _whole(found, inputs, output, options)
    raise NumericsError(f"{contract} has no catalogue of faults to explain an output with")


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
    if verdict.status is not Status.FAILED or verdict.explained_by or not cheap(contract, inputs):
        return verdict
    names = diagnose(contract.name, inputs, output, arch=arch, numerics=numerics, **options).names
    return replace(verdict, explained_by=names)


def cheap(contract: Contract, inputs: Mapping[str, Tensor]) -> bool:
    """Whether every hypothesis about this call costs little."""
    if isinstance(contract, ProductContract):
        return _work(contract.parts(inputs)) <= CHEAP and not next(iter(inputs.values())).is_cuda
    if isinstance(contract, QuantiserContract):
        return inputs["x"].numel() <= CHEAP >> 6 and not inputs["x"].is_cuda
    return False


# --- scaled products ----------------------------------------------------------------------------------------


def _product(
    contract: ProductContract,
    inputs: Mapping[str, Tensor],
    output: Tensor,
    arch: str,
    numerics: str | None,
    options: Mapping[str, object],
) -> Diagnosis:
    inputs = quantised(contract, inputs)
    parts = contract.parts(inputs)
    flat = output.reshape(-1, output.shape[-1])
    best: Diagnosis | None = None
    for schedule in _schedules(contract, arch, numerics, parts, output.dtype):
        call = Call(contract, inputs, options, schedule, output.dtype, Beyond.UNKNOWN)
        view = _View(call, flat)
        if view.failing == 0:
            return Diagnosis(0, view.total, "")
        ranked = view.rank(faults_of(contract.name))
        if best is None or _better(ranked, best.explanations):
            best = _described(view, ranked)
        if ranked and ranked[0].complete:
            break
    assert best is not None, "there is at least one arithmetic to try"
    return best


def _schedules(
    contract: ProductContract, arch: str, numerics: str | None, parts: Sequence[Part], dtype: torch.dtype
) -> list[Schedule | None]:
    """The arithmetics to put faults into: the declared one, or the first admitted ones; None for exact sums."""
    names = contract.admitted(arch, numerics, parts, dtype)
    real = [name.removesuffix(".any") for name in names if not name.startswith("ieee32")]
    return [get_schedule(name) for name in real[:3]] or [None]


def _better(ranked: Sequence[Explanation], than: Sequence[Explanation]) -> bool:
    return bool(ranked) and (not than or ranked[0].explained > than[0].explained)


class _View:
    """One output seen against one arithmetic: the right prediction, what fails, and what a hypothesis explains."""

    def __init__(self, call: Call, output: Tensor) -> None:
        self.call, self.output = call, output
        self.right = write(call, products(call, ()), ())
        self.specified = self._specified()
        self.bad = self.specified & ~self._agree(self.output, self.right)
        self.failing, self.total = int(self.bad.sum()), int(self.specified.sum())

    def rank(self, faults: Sequence[Fault]) -> tuple[Explanation, ...]:
        """Explanations of at least one failing element that contradict less than they explain, best first."""
        fitting = [fault for fault in faults if fault.applies(self.call) is None]
        small = _work(self.call.parts) <= WHOLE
        sample = None if small else _Sample(self, SAMPLE)
        found = []
        for fault in fitting:
            at_end = set(fault.changes) <= {Stage.WRITE}
            explanation = (
                self._try((fault,)) if small or at_end else None if sample is None else sample.attempt((fault,))
            )
            if explanation is not None and explanation.explained > explanation.contradicted:
                found.append(explanation)
        if not any(e.share >= LISTED for e in found):
            found += self._pairs(fitting, sample)
        return _ranked(found)

    def _pairs(self, faults: Sequence[Fault], sample: _Sample | None) -> list[Explanation]:
        """Pairs of a fault and a wrong store: a few elements first, then what explains those."""
        stores = [fault for fault in faults if set(fault.changes) == {Stage.STORE}]
        inner = [fault for fault in faults if not set(fault.changes) & {Stage.STORE, Stage.WRITE}]
        few, found = _Sample(self, PAIR_SAMPLE), []
        for first in inner:
            pieces = few.sums((first,))
            for second in stores:
                guess = few.weigh((first, second), pieces)
                if guess is not None and guess.share > LISTED:
                    whole = self._try((first, second)) if sample is None else sample.attempt((first, second))
                    if whole is not None and whole.explained > whole.contradicted:
                        found.append(whole)
        return found

    def _try(self, faults: tuple[Fault, ...]) -> Explanation:
        if len(faults) == 1 and set(faults[0].changes) <= {Stage.WRITE}:
            predicted = faults[0].changes[Stage.WRITE](self.call, self.right)
        else:
            predicted = write(self.call, products(self.call, faults), faults)
        return self.weigh(faults, predicted, self.output, self.right, self.bad, self.specified)

    def weigh(
        self,
        faults: tuple[Fault, ...],
        predicted: Tensor,
        output: Tensor,
        right: Tensor,
        bad: Tensor,
        specified: Tensor,
    ) -> Explanation:
        """How well a prediction does on the elements that it speaks of."""
        unknown = torch.isnan(decode(predicted)) & ~torch.isnan(decode(right)) & ~torch.isnan(decode(output))
        unknown &= specified
        right_there = unknown & ~bad  # other data would seldom give the right bits
        known = specified & ~unknown
        if int(right_there.sum()) > CHANCE * int(unknown.sum()):
            known |= right_there
        agrees = self._agree(output, predicted)
        name = self.call.schedule.name if self.call.schedule is not None else "exact sums"
        return Explanation(
            " and ".join(fault.name for fault in faults),
            name,
            int((bad & known & agrees).sum()),
            int((bad & known).sum()),
            int(known.sum()),
            int((known & ~agrees).sum()),
            "; ".join(fault.met_in for fault in faults),
        )

    def _agree(self, output: Tensor, predicted: Tensor) -> Tensor:
        """Equal bits or, where the order of summation is unknown, values nearer than float32 sums differ."""
        if self.call.schedule is not None:
            return same_bits(output, predicted)
        x, y = decode(output), decode(predicted)
        k = self.call.parts[0].product.K
        step = torch.finfo(output.dtype).eps + k * 2.0**-24
        size = torch.maximum(
            y.abs(), decode(self.right).abs() if hasattr(self, "right") and self.right.shape == y.shape else y.abs()
        )
        near = torch.isfinite(x) & torch.isfinite(y) & ((x - y).abs() <= step * size)
        return near | (torch.isnan(x) & torch.isnan(y)) | (x == y)

    def _specified(self) -> Tensor:
        inside = torch.zeros(self.output.shape, dtype=torch.bool, device=self.output.device)
        for part in self.call.parts:
            inside[slice(None) if part.rows is None else part.rows] = True
        return inside


class _Sample:
    """Some rows and columns of each part of a large call, failing ones among them."""

    def __init__(self, view: _View, size: tuple[int, int]) -> None:
        self.view = view
        self.columns = _some(view.bad.any(dim=0), size[1])
        self.rows = []
        for part in view.call.parts:
            own = view.bad if part.rows is None else view.bad[part.rows]
            self.rows.append(_some(own.any(dim=1), size[0]))

    def attempt(self, faults: tuple[Fault, ...]) -> Explanation | None:
        """The faults' explanation on the sample; None for faults that regroup the rows."""
        return self.weigh(faults, self.sums(faults))

    def sums(self, faults: tuple[Fault, ...]) -> list[tuple[Grid, Tensor]] | None:
        """Float32 results before the store on the sample of each part, with their places in the output."""
        call, found = self.view.call, []
        for (part, schedule), original, rows in zip(products(call, faults), call.parts, self.rows, strict=False):
            if part.product.M != original.product.M:
                return None
            product = part.product.take(rows)
            each = product.b_scale.repeat_interleave(product.b_rows, dim=0)[: product.N]
            b = codes_of(product.b)[self.columns].view(product.b.dtype)
            bias = None if product.bias is None else product.bias[self.columns]
            product = replace(product, b=b, b_scale=each[self.columns], b_rows=1, bias=bias)
            at = rows if original.rows is None else original.rows[rows]
            found.append(((at[:, None], self.columns[None, :]), accumulated(call, product, schedule, faults)))
        return found

    def weigh(self, faults: tuple[Fault, ...], pieces: list[tuple[Grid, Tensor]] | None) -> Explanation | None:
        """The explanation that these sums give once stored."""
        view, total = self.view, None
        for grid, acc in pieces or ():
            predicted = stored(view.call, acc, faults)
            cut = (view.output[grid], view.right[grid], view.bad[grid], view.specified[grid])
            one = view.weigh(faults, predicted, *cut)
            total = one if total is None else _sum(total, one)
        return total


def _ranked(found: Sequence[Explanation]) -> tuple[Explanation, ...]:
    return tuple(sorted(found, key=lambda e: (not e.complete, e.contradicted - e.explained)))


def _sum(x: Explanation, y: Explanation) -> Explanation:
    return replace(
        x,
        explained=x.explained + y.explained,
        failing=x.failing + y.failing,
        known=x.known + y.known,
        contradicted=x.contradicted + y.contradicted,
    )


def _some(wanted: Tensor, count: int) -> Tensor:
    """At most ``count`` places: wanted ones evenly, and as many of the others."""
    chosen = []
    for mask in (wanted, ~wanted):
        at = torch.nonzero(mask)[:, 0]
        step = max(1, -(-len(at) // (count // 2)))
        chosen.append(at[::step])
    return torch.cat(chosen).sort().values


def _work(parts: Sequence[Part]) -> int:
    return sum(part.product.M * part.product.N * part.product.K for part in parts)


def _described(view: _View, ranked: tuple[Explanation, ...]) -> Diagnosis:
    findings = list(_experts(view))
    findings += _other_rows(view)
    findings += _one_value(view)
    used: Factors | None = None
    if len(view.call.parts) == 1 and _work(view.call.parts) <= WHOLE:
        (part,) = view.call.parts
        used = factors(part.product, part.of(view.output))
    first = used.first_block() if used is not None else None
    if used is not None and first is not None:
        findings.append(_blocks(used, first))
    return Diagnosis(view.failing, view.total, describe(view.bad), ranked[:12], tuple(findings), first)


def _blocks(used: Factors, first: int) -> str:
    wrong = used.wrong()
    rows, blocks = torch.nonzero(wrong.any(dim=1))[:, 0].tolist(), torch.nonzero(wrong.any(dim=0))[:, 0].tolist()
    values = used.factor[wrong]
    spread = f"{float(values.min()):.4g} to {float(values.max()):.4g}" if len(values) > 1 else f"{float(values[0]):.4g}"
    return (
        f"the accumulation leaves the right path at K block {first} (k = {first * used.block}); blocks "
        f"{ranges(blocks)} of rows {ranges(rows)} enter with {spread} times their right weight"
    )


def _experts(view: _View) -> list[str]:
    """Which groups fail, where there are several."""
    parts = view.call.parts
    if len(parts) < 2:
        return []
    failing = [i for i, part in enumerate(parts) if bool(part.of(view.bad).any())]
    names = _group_names(view.call)
    if len(failing) == len(parts):
        return []
    return [f"experts {ranges([names[i] for i in failing])} only, of {len(parts)} in use"]


def _group_names(call: Call) -> list[int]:
    if "m_indices" in call.inputs:
        return [int(g) for g in torch.unique(call.inputs["m_indices"]).tolist() if g >= 0]
    return [g for g, count in enumerate(call.inputs["masked_m"].tolist()) if count]


def _other_rows(view: _View) -> list[str]:
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


def _one_value(view: _View) -> list[str]:
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


def _whole(
    contract: Contract, inputs: Mapping[str, Tensor], output: Output, options: Mapping[str, object]
) -> Diagnosis:
    """Every fault on the whole call; outputs are compared tensor by tensor."""
    call = Call(contract, inputs, options, beyond=Beyond.UNKNOWN)
    given = {"out": output} if isinstance(output, Tensor) else dict(output)
    right = _named(run(call))
    masks = {name: ~agree(given[name], right[name]) for name in right}
    failing, total = sum(int(m.sum()) for m in masks.values()), sum(m.numel() for m in masks.values())
    if failing == 0:
        return Diagnosis(0, total, "")
    found = []
    for fault in faults_of(contract.name):
        if fault.applies(call) is not None:
            continue
        predicted = _named(run(call, fault))
        if any(predicted[name].shape != given[name].shape for name in given):
            continue
        same = {name: agree(given[name], predicted[name]) for name in given}
        explained = sum(int((masks[name] & same[name]).sum()) for name in given)
        wrong = sum(int((~same[name]).sum()) for name in given)
        if explained > wrong:
            found.append(Explanation(fault.name, "declared recipe", explained, failing, total, wrong, fault.met_in))
    ranked = _ranked(found)
    where = "; ".join(f"{name}: {describe(mask)}" for name, mask in masks.items() if bool(mask.any()))
    return Diagnosis(failing, total, where, ranked[:12])


def _named(output: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    return {"out": output} if isinstance(output, Tensor) else output
