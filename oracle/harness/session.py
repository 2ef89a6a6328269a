"""One kernel under validation: sends cases to the worker and turns its replies into findings.

The tensors of a call lie in memory of this process. What the worker replies is a claim: shape, dtype, strides and place
of an output are compared with the call and with that memory before a byte is read, and guard zones, inputs and outputs
are read here.

Source: the memory of a tensor is that of torch ``Tensor.as_strided``. Verdicts are derived in :mod:`oracle.verdict`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from oracle.errors import NumericsError, OracleError
from oracle.fixtures.strides import TMA_BYTES, padded_memory, restored
from oracle.harness.jobs import Lost
from oracle.harness.memory import GUARD, Guarded, Shared, Wanted, is_poison, settle
from oracle.harness.process import Worker
from oracle.harness.protocol import Claim
from oracle.harness.report import IN_PLACE, NUMBERS, Finding
from oracle.routines import cases
from oracle.routines.base import Call, Contract
from oracle.routines.domain import EVERYTHING, Domain
from oracle.verdict.compare import Status, Verdict

UNWRITTEN = "nothing written"
"""The fault of an output that holds what its memory held before the call."""
ROOM = 1 << 26
"""Bytes for results, of which those that are written take memory, beside 16 times what inputs and outputs take: the
widest padding that is kept."""
CAUSES = {
    "load": "cannot be loaded",
    "hang": "hangs",
    "lost": "crashed",
    "forged": "crashed",
    "exit": "ended the process",
    "memory": "ran out of memory",
    "device": "device error",
    "raised": "raised",
    "result": "gave no result",
    "signature": "has another signature",
}


@dataclass(frozen=True)
class Answer:
    """One call: its outputs by name; ``problem`` says why there are none, or why no number of them is looked at.

    ``late`` are outputs that changed after the caller's stream was done. ``disturbed``: the answer is one on the inputs
    beside, given among threads. ``hung``: the kernel did not return in time.
    """

    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    guards: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    seconds: float = 0.0
    problem: Verdict | None = None
    hopeless: bool = False  # the kernel cannot be loaded or called at all
    late: tuple[str, ...] = ()
    disturbed: bool = False
    hung: bool = False

    @property
    def output(self) -> Tensor | dict[str, Tensor]:
        """The output as a contract judges it, a tensor or a dict for a contract with several: of any shape and dtype,
        copied out of the memory of the call."""
        return self.outputs["out"] if tuple(self.outputs) == ("out",) else dict(self.outputs)


class Session:
    """Calls of one kernel of one contract; ``arch`` and ``numerics`` say what is admitted, ``domain`` at which extents
    the kernel may be called."""

    def __init__(
        self,
        worker: Worker,
        contract: Contract,
        *,
        device: str,
        arch: str,
        numerics: str | None,
        domain: Domain = EVERYTHING,
    ) -> None:
        self.worker, self.contract, self.device = worker, contract, device
        self.arch, self.numerics, self.domain = arch, numerics, domain
        self.kernel_seconds, self.judged = 0.0, False
        self.late: list[str] = []
        """Outputs that were written after their call had returned."""
        self._last: list[tuple[Guarded, Tensor]] = []

    def call(
        self,
        inputs: Mapping[str, Tensor],
        options: Mapping[str, object],
        *,
        poison: int = 0,
        lead: Mapping[str, int] | None = None,
        step: Mapping[str, int] | None = None,
        must: Sequence[str] | None = None,
        mode: str = "plain",
        beside: Mapping[str, Tensor] | None = None,
    ) -> Answer:
        """Run the kernel once; ``lead`` and ``step`` say how inputs lie (:meth:`Wanted.copy`). Where ``must`` names
        inputs and options, a kernel whose signature does not take one of them, or needs another, refuses the call; else
        it cannot be called at all. ``mode`` is "plain", "threads" (among calls of other threads, half of them on the
        inputs ``beside``) or one of :mod:`oracle.harness.launches`, which needs ``beside`` too.
        """
        self.look_back()
        asked, lead, step = Call(self.contract, inputs, options), lead or {}, step or {}
        written = asked.optional_operands is not None  # a kernel may write into memory that it is given
        due = self.contract.outputs(asked) if written or len(self.contract.returns) > 1 else {}
        allocated = {name: out for name, out in due.items() if written and out.shape is not None}
        absent = {spec.name for spec in self.contract.inputs if spec.optional} - inputs.keys()
        names = tuple(name for name in self.contract.returns if not due or name in due)  # of this call
        optional = [name for name in names if (due[name].optional if due else name in absent)]
        supplied = (*inputs.items(), *(beside or {}).items())
        wanted = [Wanted.copy(name, t, lead=lead.get(name, 0), step=step.get(name, 1)) for name, t in supplied]
        wanted += [Wanted.fresh(name, out.shape or (), out.dtypes[0]) for name, out in allocated.items()]
        ends = (len(inputs), len(inputs) + len(beside or {}), len(wanted))
        size = sum(one.size for one in wanted)
        shared = self.worker.memory(size + ROOM + TMA_BYTES * size)
        laid = shared.lay_out(wanted, poison, self.worker.place)
        before = [(result, result.snapshot()) for result, _ in laid[: ends[0]]]
        settle(self.worker.place)  # some modes put other inputs there first: no snapshot may be of those
        request = {
            "op": "call",
            "slots": [{"name": result.name, **spec} for result, spec in laid],
            "inputs": list(range(ends[0])),
            "beside": list(range(ends[0], ends[1])),
            "outputs": list(range(ends[1], ends[2])),
            "room": shared.room,
            "poison": poison,
            "mode": mode,
            "must": must,
            "names": list(names),
            "optional": optional,
            "others": len(self.contract.returns) - len(names),
            "options": {n: str(value) if isinstance(value, torch.dtype) else value for n, value in options.items()},
        }
        reply = self.worker.ask(request)
        if not reply.ok:
            reason, *frames = reply.text.split("\n")
            if reply.kind == "untested":
                return Answer(problem=Verdict(Status.UNTESTED, reason, reason=reason))
            text = f"the kernel does not offer this call: {reason}"
            refused = Verdict(Status.UNSUPPORTED, text, reason=reason)
            offered = reply.kind not in ("unsupported", "uncapturable")
            problem = replace(crashed(f"{CAUSES[reply.kind]}: {reason}"), frames=tuple(frames)) if offered else refused
            return Answer(problem=problem, hopeless=reply.kind in ("load", "signature"), hung=reply.kind == "hang")
        self.kernel_seconds += reply.seconds
        needed = tuple(name for name in names if name not in optional)
        names = needed if len(reply.outputs) == len(needed) else names
        claims = dict(zip(names, reply.outputs, strict=False))
        if len(claims) != len(names) or len(reply.outputs) != len(claims):
            return Answer(problem=crashed(f"{CAUSES['lost']}: a reply with {len(reply.outputs)} outputs"))
        facts = {
            name: {"dtype": str(c.dtype), "shape": list(c.shape), "stride": list(c.stride), "device": c.device}
            for name, c in claims.items()
        }
        outputs = {}
        for name, claim in claims.items():
            result = read(claim, shared, [result for result, _ in laid])
            if result is None:
                text = f"{name} {list(claim.shape)} with strides {list(claim.stride)}"
                return Answer(problem=crashed(f"{CAUSES['result']}: {text} does not lie in the memory of the call"))
            outputs[name] = result
        guards = [*(damage for result, _ in laid if (damage := result.damage())), *reply.text.splitlines()]
        changed = [result.name for result, old in before if result.changed(old)]
        self._last = [(result, result.snapshot()) for result, _ in laid[ends[1] :]]
        late = tuple(names[i] for i in reply.late)
        undeclared, disturbed = self._undeclared(asked, outputs, facts), reply.disturbed
        seen = (outputs, facts, tuple(guards), tuple(changed), reply.seconds, undeclared)
        return Answer(*seen, late=late, disturbed=disturbed)

    @cached_property
    def undeclared(self) -> frozenset[str]:
        """The options that say what a kernel does and that this one has no parameter for: it is judged without them."""
        names = [spec.name for spec in self.contract.options if spec.declares]
        reply = self.worker.ask({"op": "lacks", "names": names}) if names else None
        return frozenset(reply.text.split()) if reply is not None and reply.ok else frozenset()

    def look_back(self) -> None:
        """Note in ``late`` the outputs of the last call that have changed since it was answered."""
        self.late += [result.name for result, old in self._last if result.changed(old)]
        self._last = []

    def takes(self, case: str, **extents: int) -> bool:
        """Whether the kernel may be called with the extents of a case, some of them replaced. Names that are no extents
        of the case change nothing."""
        own = dict(cases.parse(case).extents)
        return self.domain.holds({**own, **{name: value for name, value in extents.items() if name in own}})

    def judge(self, inputs: Mapping[str, Tensor], options: Mapping[str, object], answer: Answer) -> Verdict:
        """The verdict on the numbers of an answer."""
        if answer.problem is not None:
            return answer.problem
        verdict = verdict_on(self.contract, self.arch, self.numerics, inputs, options, answer.output)
        return self.settled(inputs, options, answer, verdict)

    def settled(
        self,
        inputs: Mapping[str, Tensor],
        options: Mapping[str, object],
        answer: Answer,
        said: Verdict | OracleError | Lost,
    ) -> Verdict:
        """The verdict on an answer of which ``said`` is what :func:`verdict_on` gave, here or in another process."""
        if answer.problem is not None:
            return answer.problem
        if isinstance(said, Lost):
            return crashed(said.cause)
        if isinstance(said, OracleError):
            if isinstance(said, NumericsError) and not self.judged:
                raise said  # nothing could be judged under this arch or numerics: the question is wrong
            return crashed(f"the output cannot be judged: {said}")
        self.judged, verdict = True, said
        if verdict.status is Status.FAILED and self._unwritten(inputs, options, answer):
            text = "nothing was written: every specified element holds what was there before"
            if moved := [name for name in answer.outputs if name in answer.changed]:
                text = f"no output was written, but the inputs of their names ({', '.join(moved)}); {IN_PLACE}"
            text = f"{text}; {verdict.summary}"
            return replace(verdict, summary=text, explained_by=(UNWRITTEN,))
        return verdict

    def _unwritten(self, inputs: Mapping[str, Tensor], options: Mapping[str, object], answer: Answer) -> bool:
        """Whether every specified element of every output still holds the poison of the first kind; not of inputs with
        gaps, where that lies too: a NaN that is computed from it has its bits."""
        if any(map(_has_gaps, inputs.values())):
            return False
        call = Call(self.contract, inputs, options)
        due = self.contract.outputs(call)
        for name, output in answer.outputs.items():
            poison, specified = is_poison(output, 0), due[name].specified
            if not bool((poison if specified is None else poison | ~specified).all()):
                return False
        return bool(answer.outputs)

    def numbers(
        self, case: str, inputs: Mapping[str, Tensor], options: Mapping[str, object], answer: Answer
    ) -> Finding:
        """The finding on the numbers."""
        start = time.perf_counter()
        verdict = self.judge(inputs, options, answer)
        return Finding(case, NUMBERS, verdict, time.perf_counter() - start + answer.seconds)

    def _undeclared(
        self, asked: Call, outputs: Mapping[str, Tensor], facts: Mapping[str, Mapping[str, Any]]
    ) -> Verdict | None:
        """A failure when an output lies on another device than the inputs, or has a dtype or shape that the contract
        does not admit. Where the contract has no operands, its outputs are those of the reference, which the verdict
        computes: dtype and shape are left to the verdict there."""
        for name, fact in facts.items():
            if not str(fact["device"]).startswith(self.device.partition(":")[0]):
                return failed(f"{name} lies on {fact['device']}, the inputs on {self.device}")
        if asked.optional_operands is None:
            return None
        try:
            self.contract.validate_output(asked, outputs)
        except OracleError as error:
            return failed(str(error))
        return None


def verdict_on(
    contract: Contract,
    arch: str,
    numerics: str | None,
    inputs: Mapping[str, Tensor],
    options: Mapping[str, object],
    output: Tensor | dict[str, Tensor],
) -> Verdict | OracleError:
    """The verdict of a contract on ``output``, of any shape and dtype, or several by name; or why it has none.

    The contract says which elements must be NaN or infinite.
    """
    try:
        return contract.judge(inputs, output, arch=arch, numerics=numerics, **options)
    except OracleError as error:
        return error


def read(claim: Claim, shared: Shared, slots: Sequence[Guarded]) -> Tensor | None:
    """A copy of the output of a claim, with its shape and dtype, out of memory of this process; None when it does not
    lie where the claim says."""
    size, count = claim.dtype.itemsize, math.prod(claim.shape)
    reach = 1 + sum((n - 1) * s for n, s in zip(claim.shape, claim.stride, strict=True)) if count else 0
    if claim.slot >= len(slots) or claim.offset % size or max(count, reach) * size > shared.size:
        return None
    if claim.slot >= 0:  # an output of the call, or a part of one
        inside, start = slots[claim.slot].inside(), claim.offset - GUARD
        if start < 0 or start + reach * size > inside.numel():
            return None
        view = inside[start : start + (inside.numel() - start) // size * size].cpu().clone().view(claim.dtype)
        view = view.as_strided(claim.shape, claim.stride)
        return _plain(restored(view.contiguous(), claim.stride, padded_memory(view)))
    if claim.offset < shared.room or claim.offset + claim.length * size > shared.size:
        return None
    if claim.length < (reach if claim.padded else count):
        return None
    elements = shared.bytes[claim.offset : claim.offset + claim.length * size].clone().view(claim.dtype)
    if claim.padded:
        return _plain(restored(torch.zeros(claim.shape, dtype=claim.dtype, device="cpu"), claim.stride, elements))
    return _plain(restored(elements[:count].reshape(claim.shape), claim.stride))


def _plain(x: Tensor) -> Tensor:
    """A bool of other bytes than 0 and 1 as torch reads it nowhere else: true."""
    return x if x.dtype != torch.bool else x.view(torch.uint8) != 0


def failed(what: str) -> Verdict:
    """A failure that is no comparison of numbers."""
    return Verdict(Status.FAILED, what, reason=what)


def passed(what: str) -> Verdict:
    """A pass that is no comparison of numbers."""
    return Verdict(Status.PASSED, what)


def crashed(reason: str) -> Verdict:
    """The kernel gave nothing that could be judged."""
    return Verdict(Status.CRASHED, f"CRASHED: {reason}", reason=reason)


def _has_gaps(x: Tensor) -> bool:
    """Whether memory that is no element lies between the first and the last one."""
    return x.numel() > 0 and 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) > x.numel()
