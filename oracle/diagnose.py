"""What is wrong with an output: where it fails, since which K block, and which known faults reproduce it.

Every fault of the catalogue is a hypothesis (:mod:`oracle.hypotheses` weighs those about products). Beside the
catalogue, three general findings need no hypothesis: failing rows that hold the right result of other rows, failing
elements that all hold one value, and the scale factors that the kernel really used (:mod:`oracle.effective_scales`).
Not covered: three faults at once; judging (a diagnosis changes no status).
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
from oracle.faults import Beyond, Call, agree, faults_of, run
from oracle.faults.engine import LOGITS, REFERENCES
from oracle.faults.roles import quantised
from oracle.formats import codes_of, decode
from oracle.hypotheses import LISTED, WHOLE, Explanation, View, ranked, work
from oracle.judging import Part
from oracle.pattern import describe, ranges
from oracle.tensorcore.schedules import Schedule
from oracle.tensorcore.schedules import get as get_schedule

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
        """What ``Verdict.explained_by`` says: every complete explanation, else the best one that covers half, else
        those by place."""
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
        Without explanations when no fault of the catalogue reproduces half of the failing elements; empty when every
        bit is that of the right kernel.
    """
    found = get(contract)
    if isinstance(found, ProductContract):
        return _product(found, inputs, only(output), arch, numerics, options)
    if isinstance(found, QuantiserContract) or found.name in REFERENCES | {LOGITS}:
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
        return work(contract.parts(inputs)) <= CHEAP and not next(iter(inputs.values())).is_cuda
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
        view = View(call, flat)
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


def _described(view: View, ranked: tuple[Explanation, ...]) -> Diagnosis:
    findings = list(_experts(view))
    findings += _other_rows(view)
    findings += _one_value(view)
    used: Factors | None = None
    if len(view.call.parts) == 1 and work(view.call.parts) <= WHOLE:
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


def _experts(view: View) -> list[str]:
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
    if "offsets" in call.inputs:
        ends = call.inputs["offsets"].tolist()
        return [g for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False)) if end > start]
    return [g for g, count in enumerate(call.inputs["masked_m"].tolist()) if count]


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
    best = ranked(found)
    where = "; ".join(f"{name}: {describe(mask)}" for name, mask in masks.items() if bool(mask.any()))
    return Diagnosis(failing, total, where, best[:12])


def _named(output: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    return {"out": output} if isinstance(output, Tensor) else output
