"""One kernel under validation: sends cases to the worker and turns its replies into findings."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from oracle.errors import NumericsError, OracleError
from oracle.fixtures.strides import restored
from oracle.harness.memory import is_poison
from oracle.harness.process import Worker
from oracle.harness.report import NUMBERS, Finding
from oracle.routines import cases
from oracle.routines.base import Call, Contract
from oracle.routines.domain import EVERYTHING, Domain
from oracle.verdict.compare import Status, Verdict

CAUSES = {
    "load": "cannot be loaded",
    "hang": "hangs",
    "lost": "crashed",
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
        """The output as a contract judges it: a tensor, or a dict for a contract with several."""
        return self.outputs["out"] if tuple(self.outputs) == ("out",) else dict(self.outputs)


class Session:
    """Calls of one kernel of one contract; ``arch`` and ``numerics`` say what is admitted, ``domain`` at which extents
    the kernel may be called."""

    def __init__(
        self, worker: Worker, contract: Contract, *, device: str, arch: str, numerics: str | None, folder: Path,
        domain: Domain = EVERYTHING,
    ) -> None:  # fmt: skip
        self.worker, self.contract, self.device = worker, contract, device
        self.arch, self.numerics, self.folder, self.domain = arch, numerics, folder, domain
        self.kernel_seconds, self.judged = 0.0, False

    def call(
        self,
        inputs: Mapping[str, Tensor],
        options: Mapping[str, object],
        *,
        poison: int = 0,
        lead: Mapping[str, int] | None = None,
        mode: str = "plain",
        beside: Mapping[str, Tensor] | None = None,
    ) -> Answer:
        """Run the kernel once; ``mode`` is "plain", "threads" (among calls of other threads, half of them on the inputs
        ``beside``) or one of :mod:`oracle.harness.launches`, which needs ``beside`` too."""
        given, result = self.folder / "inputs.safetensors", self.folder / "outputs.safetensors"
        other = None if beside is None else self.folder / "beside.safetensors"
        due = self._out(inputs, options)
        transposed = [name for name, t in inputs.items() if t.dim() == 2 and t.stride(0) == 1 and t.stride(1) != 1]
        for tensors, path in ((inputs, given), (beside, other)):
            if tensors is not None and path is not None:  # dense, transposed ones by their transpose
                views = {n: t.view(torch.uint8).t() if n in transposed else t for n, t in tensors.items()}
                dense = {n: view.contiguous().view(tensors[n].dtype) for n, view in views.items()}
                safetensors.torch.save_file(dense, path)
        request = {
            "op": "call",
            "inputs": str(given),
            "output": str(result),
            "transposed": transposed,
            "poison": poison,
            "lead": dict(lead or {}),
            "mode": mode,
            "beside": None if other is None else str(other),
            "names": list(self.contract.returns),
            "options": {n: str(value) if isinstance(value, torch.dtype) else value for n, value in options.items()},
            "out": due,
        }
        reply = self.worker.ask(request)
        if not reply["ok"]:
            kind, said = reply["kind"], reply["error"]
            refused = Verdict(Status.UNSUPPORTED, f"the kernel does not offer this call: {said}", reason=said)
            offered = kind not in ("unsupported", "uncapturable")
            problem = crashed(f"{CAUSES[kind]}: {said}") if offered else refused
            return Answer(problem=problem, hopeless=kind in ("load", "signature"), hung=kind == "hang")
        self.kernel_seconds += float(reply["seconds"])
        facts, made = reply["outputs"], safetensors.torch.load_file(result)
        found = {name: restored(made[name], facts[name]["stride"], made.get(f"memory.{name}")) for name in facts}
        guards, changed, seconds = tuple(reply["guards"]), tuple(reply["changed"]), float(reply["seconds"])
        late, disturbed = tuple(reply["late"]), bool(reply["disturbed"])
        return Answer(
            found, facts, guards, changed, seconds, self._undeclared(facts, due), late=late, disturbed=disturbed
        )

    def takes(self, case: str, **extents: int) -> bool:
        """Whether the kernel may be called with the extents of a case, some of them replaced."""
        return self.domain.holds({**dict(cases.parse(case).extents), **extents})

    def judge(self, inputs: Mapping[str, Tensor], options: Mapping[str, object], answer: Answer) -> Verdict:
        """The verdict on the numbers of an answer."""
        if answer.problem is not None:
            return answer.problem
        try:
            verdict = self.contract.judge(inputs, answer.output, arch=self.arch, numerics=self.numerics, **options)
        except OracleError as error:
            if isinstance(error, NumericsError) and not self.judged:
                raise  # nothing could be judged under this arch or numerics: the question is wrong, not the kernel
            return crashed(f"the output cannot be judged: {error}")
        self.judged = True
        if verdict.status is Status.FAILED and self._unwritten(inputs, options, answer):
            said = f"nothing was written: every specified element holds what was there before; {verdict.summary}"
            return replace(verdict, summary=said, explained_by=("nothing written",))
        return verdict

    def _unwritten(self, inputs: Mapping[str, Tensor], options: Mapping[str, object], answer: Answer) -> bool:
        """Whether every specified element of every output still holds the poison of the first kind."""
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
        self, facts: Mapping[str, Mapping[str, object]], due: Mapping[str, tuple[list[int], str]]
    ) -> Verdict | None:
        """A failure when a result has another dtype, shape or device than the call declares."""
        for name, fact in facts.items():
            if name in due:
                shape, dtype = due[name]
                if fact["dtype"] != f"torch.{dtype}":
                    return failed(f"{name} has dtype {fact['dtype']}, the call declares torch.{dtype}")
                if fact["shape"] != shape:
                    return failed(f"{name} has shape {fact['shape']}, these inputs give {shape}")
            if not str(fact["device"]).startswith(self.device.partition(":")[0]):
                return failed(f"{name} lies on {fact['device']}, the inputs on {self.device}")
        return None

    def _out(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> dict[str, tuple[list[int], str]]:
        """Shape and dtype of outputs where the call fixes them."""
        call = Call(self.contract, inputs, options)
        if call.optional_operands is None:
            return {}
        fixed = {name: due for name, due in self.contract.outputs(call).items() if due.shape is not None}
        return {n: (list(due.shape or ()), str(due.dtypes[0]).removeprefix("torch.")) for n, due in fixed.items()}


def failed(what: str) -> Verdict:
    """A failure that is no comparison of numbers."""
    return Verdict(Status.FAILED, what, reason=what)


def passed(what: str) -> Verdict:
    """A pass that is no comparison of numbers."""
    return Verdict(Status.PASSED, what)


def crashed(reason: str) -> Verdict:
    """The kernel gave nothing that could be judged."""
    return Verdict(Status.CRASHED, f"CRASHED: {reason}", reason=reason)
