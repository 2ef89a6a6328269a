"""What the pytest plugin does once torch is loaded: the cases of a marker, and a verdict as the outcome of a test.

Apart from :mod:`oracle.pytest_plugin`, which every pytest run of every project imports and which must not load torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from torch import Tensor

from oracle.errors import CaseError, InputError, among
from oracle.harness import provenance, runner
from oracle.report import record
from oracle.report.console import sentence
from oracle.report.outcome import Outcome
from oracle.routines import cases as grammar
from oracle.routines import get, options, profiles
from oracle.routines.cases import Case
from oracle.verdict.compare import Status


@dataclass(frozen=True)
class Test:
    """The test that runs: its node id, the part of it that an outcome's id holds, the subject, the command."""

    __test__ = False  # pytest collects classes of this name

    node: str
    id: str
    subject: str
    command: str


OUTSIDE = Test("", "", "-", "")
PASS_THEM = ": oracle_case.call(kernel), or **oracle_case.call_options(), passes it to the kernel"


@dataclass(frozen=True)
class TestOutcome(Outcome):
    """An outcome whose subject is a test with its parameters but for the case.

    ``test`` is the node id with its parameters ("" outside pytest), ``asked`` the case id or contract that was judged.
    """

    __test__ = False  # pytest collects classes of this name

    test: str = ""
    asked: str = ""
    numerics: str | None = None
    call: Mapping[str, object] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """The words of ``fp8-oracle verify``, under the name of what was asked."""
        return sentence(replace(self, id=self.asked)).plain

    def to_json(self) -> dict[str, object]:
        words = {name: options.word(value) for name, value in self.call.items()}
        more = {"test": self.test, "asked": self.asked, "numerics": self.numerics, "options": words}
        return {**super().to_json(), **more}


def judge(
    output: Tensor | Mapping[str, Tensor],
    contract: str | Case,
    inputs: Mapping[str, Tensor] | None,
    *,
    arch: str,
    numerics: str | None,
    given: Mapping[str, object],
    test: Test,
    source: str,
    ordinal: int,
) -> TestOutcome:
    """The outcome of one output, the ``ordinal``-th of a test that stands at ``source``.

    ``output`` is of any shape and dtype, or a mapping of several; a shape or dtype that the contract does not admit is
    CRASHED, and the contract says which elements must be NaN or infinite. Arguments are those of
    :func:`oracle.pytest_plugin.assert_conforms`; the verdict is derived in :mod:`oracle.verdict`.

    Raises InputError: there are neither inputs nor a case to make them.
    """
    if isinstance(output, str | Case):
        raise InputError("the plugin's assert_conforms takes the output first: assert_conforms(out, contract, inputs)")
    start = time.perf_counter()
    case = contract if isinstance(contract, Case) else None
    routine = get(contract.contract if isinstance(contract, Case) else contract)
    call = {**({} if case is None else case.call_options()), **given}
    if inputs is None and case is None:
        names = ", ".join(spec.name for spec in routine.inputs)
        raise InputError(f"{routine.name}: no inputs; pass a mapping with {names}, or a case instead of the name")
    operands = _on_device_of(output, case.inputs()) if inputs is None and case is not None else dict(inputs or {})
    outputs = dict(output) if isinstance(output, Mapping) else output
    verdict = runner.judge_outputs(routine, operands, outputs, arch=arch, numerics=numerics, call=call)
    defaults = {spec.name: spec.default for spec in routine.options}
    if verdict.status is Status.CRASHED and (asked_of := {k: v for k, v in call.items() if v != defaults[k]}):
        due = ", ".join(f"{name}={options.word(value)}" for name, value in asked_of.items())
        verdict = replace(verdict, summary=f"{verdict.summary}; the call has {due}{'' if case is None else PASS_THEM}")
    name = f"pytest/{test.id}" + (f"#{ordinal}" if ordinal > 1 else "")
    asked, seconds = routine.name if case is None else str(case), time.perf_counter() - start
    more: dict[str, Any] = {"test": test.node, "asked": asked, "numerics": numerics, "call": call, "source": source}
    verdict = verdict.settled()
    return TestOutcome(name, routine.name, test.subject, arch, verdict, seconds, command=test.command, **more)


def line(outcome: TestOutcome) -> dict[str, object]:
    """The outcome as a line of a record (:mod:`oracle.report.record`)."""
    run = this_run()
    key = record.key_of(outcome.id, outcome.subject, outcome.arch, outcome.numerics or "", run)
    return {"kind": "outcome", "key": key, "versions": run.stamp, "outcome": outcome.to_json()}


def known(line: dict[str, Any], reason: str) -> dict[str, object]:
    """A line whose failure the test expects (``xfail``): known, and no failure of the run."""
    outcome = line["outcome"]
    if not outcome["fails"]:
        return line
    why = reason.removeprefix("reason: ") or "expected by the test"
    return {**line, "outcome": {**outcome, "known_failure": why, "fails": False}}


@lru_cache(maxsize=1)
def this_run() -> record.Run:
    """The machine and the versions of this process: the first line of a record."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return record.Run(started, provenance.machine(), provenance.versions([]), {"selection": "pytest"}, 0)


def marked(
    default: str,
    contract: str,
    *,
    profile: str | None = None,
    cases: Sequence[str] | None = None,
    where: Callable[[Case], bool] | None = None,
) -> list[Case]:
    """The cases of one ``oracle_cases`` marker; none is an error, because pytest would skip the test silently."""
    get(contract)
    chosen = profiles.cases(contract, profile or default) if cases is None else [grammar.parse(i) for i in cases]
    if other := [case for case in chosen if case.contract != contract]:
        raise CaseError(f"{other[0]} is no case of {contract}")
    filtered = [case for case in chosen if where is None or where(case)]
    if not filtered and chosen:
        raise CaseError(f"`where` is true for none of the {len(chosen)} cases of {contract}")
    if not filtered:
        text = among(contract, sorted(grammar.grammars()), see="fp8-oracle list contracts")
        raise CaseError(f"no contract with cases is named {contract!r}; {text}")
    return filtered


def _on_device_of(output: Tensor | Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs where the output lies; an output that is no tensor is refused later, with its reason."""
    first = next(iter(output.values()), None) if isinstance(output, Mapping) else output
    device = first.device if isinstance(first, Tensor) else "cpu"
    return {name: tensor.to(device) for name, tensor in inputs.items()}
