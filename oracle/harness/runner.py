"""Runs what is to be judged, one item at a time: live subjects over cases, and captured outputs.

The id, contract, subject and arch of an item are known before anything is computed; ``--list`` prints them. A live
subject gets copies of the inputs; whatever it raises is its verdict (CRASHED; UNSUPPORTED for ``NotImplementedError``)
and does not end the run. A contract that nothing judges is UNTESTED.

Not covered: subjects that end, hang or damage their process (:mod:`oracle.harness.isolated`), guard zones, reruns.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from oracle.diagnosis.explain import explain_verdict
from oracle.diagnosis.level import Explain, explain_level
from oracle.errors import OptionError, OracleError, ProcessError
from oracle.fixtures import captures
from oracle.fixtures.call_file import CallFile
from oracle.harness import sources
from oracle.harness import subjects as registry
from oracle.harness.isolated import Crash, Isolated
from oracle.harness.protocol import frames_of
from oracle.harness.subjects import Provider, Subject
from oracle.report.outcome import Outcome
from oracle.routines import get, profiles, registered
from oracle.routines.base import Call, Contract
from oracle.routines.cases import Case
from oracle.verdict.compare import Status, Verdict

Outputs = Tensor | dict[str, Tensor]
Keep = Callable[[Subject, Case, Mapping[str, Tensor], Outputs], None]
"""Called with what was judged: a subject, its case, the inputs and the output."""
Documented = Callable[[str, Verdict], bool]
"""Whether the ledger of known failures has this verdict on the item of this id."""


@dataclass(frozen=True)
class Item:
    """One thing to judge; ``judge()`` computes its verdict, which depends on the id, subject, arch and ``stamp``: the
    declared numerics and device, or what was recorded. ``source`` is where the subject's code stands."""

    id: str
    contract: str
    subject: str
    arch: str
    judge: Callable[[], Verdict] = field(compare=False)
    stamp: str = ""
    source: str = ""
    flags: str = ""
    """What the command that repeats it says beside the case and the subject."""
    call: str = ""
    """Which call it judges an output of: what follows from the call alone is computed once for the items that a process
    judges of it one after the other."""

    def outcome(self) -> Outcome:
        start = time.perf_counter()
        return self.told(self.judge(), start)

    def told(self, verdict: Verdict, start: float | None = None) -> Outcome:
        """The outcome with this verdict, and the time since ``start``."""
        verdict = verdict.settled()
        seconds = 0.0 if start is None else time.perf_counter() - start
        plain = Outcome(self.id, self.contract, self.subject, self.arch, verdict, seconds, source=self.source)
        return plain if not self.flags or not plain.repro else replace(plain, command=f"{plain.repro} {self.flags}")


@dataclass(frozen=True)
class Filter:
    """What to keep: exact contract, subject and arch names, one id, patterns of subjects; empty keeps everything."""

    contract: str | None = None
    subject: str | None = None
    id: str | None = None
    subjects: tuple[str, ...] = ()
    arch: str | None = None

    def __bool__(self) -> bool:
        return any((self.contract, self.subject, self.id, self.subjects, self.arch))

    def keeps(self, item: Item) -> bool:
        facts = (item.contract, item.subject, item.id, item.arch)
        wanted = zip((self.contract, self.subject, self.id, self.arch), facts, strict=True)
        named = not self.subjects or any(fnmatchcase(item.subject, pattern) for pattern in self.subjects)
        return named and all(want is None or want == fact for want, fact in wanted)


@dataclass(frozen=True)
class Shard:
    """One of ``total`` parts of everything, ``number`` from 1: a digest of what an item is says which part has it, so
    each machine finds its own items without the others."""

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """``i/n``; OptionError for anything else."""
        match = re.fullmatch("([0-9]{1,6})/([0-9]{1,6})", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise OptionError(f"--shard {text!r} is not i/n with i from 1 to n, as 2/8")
        return cls(int(match[1]), int(match[2]))

    def holds(self, item: Item) -> bool:
        """Whether the item belongs to this part."""
        digest = hashlib.sha256(f"{item.id} {item.subject} {item.arch}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % self.total == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


def live(
    subjects: Iterable[Subject], *, profile: str, cases: Sequence[Case] | None = None, keep: Keep | None = None
) -> list[Item]:
    """Items of every subject over its contract's cases in a profile, or over the given cases.

    ``keep`` is called with every output that a contract could judge, whatever the verdict.
    """
    items: list[Item] = []
    for subject in subjects:
        if (reason := subject.why_not()) is not None:
            items.append(_fixed(subject, Status.SKIPPED, reason))
        elif subject.contract not in registered():
            why = f"the oracle has no contract {subject.contract!r} to judge it by"
            items.append(_fixed(subject, Status.UNSUPPORTED, why))
        else:
            chosen = profiles.cases(subject.contract, profile) if cases is None else cases
            stamp = f"{subject.numerics} on {subject.device}"
            code = getattr(subject, "source", subject.run)
            source = code if isinstance(code, str) else sources.of(code)  # a text from a subject in another process
            for case in (case for case in chosen if case.contract == subject.contract):
                judge, about = partial(_judge_live, subject, case, keep), (case.contract, subject.name, subject.arch)
                items.append(Item(str(case), *about, judge, stamp, source, call=str(case)))
    return items


def replay(folder: Path, documented: Documented = lambda identity, verdict: False) -> list[Item]:
    """Items of every capture of a captures folder; a failure that is ``documented`` is not explained again."""
    items = []
    for c in captures.load(folder):
        words, tensors = dict(c.option_words), dict(c.tensors)
        call = (c.contract, dict(c.inputs_from), words, c.numerics, c.unsupported, c.case, tensors)
        stamp = f"{c.recording.sha256} {call}"
        judge = partial(_judge_capture, c, documented)
        items.append(Item(c.id, c.contract, c.subject, c.recording.arch, judge, stamp, call=c.called))
    return items


def broken(providers: Iterable[Provider]) -> list[Item]:
    """One CRASHED item for each provider of subjects that cannot be loaded."""
    unloaded = [(provider, provider.problem) for provider in providers if provider.problem is not None]
    return [
        Item(p.name, "-", p.target, "-", partial(_without_numbers, Status.CRASHED, why), "", sources.of_name(p.target))
        for p, why in unloaded
    ]


def untested(items: Iterable[Item], contracts: Iterable[str]) -> list[Item]:
    """One item for each contract that no case and no capture among ``items`` judges: UNTESTED, or SKIPPED where the
    production package does not compute it."""
    tried, known = {item.contract for item in items if "/" in item.id}, registered()
    wanted = _without_numbers(Status.UNTESTED, "no subject on this machine and no capture exercises it")
    foreign = _without_numbers(Status.SKIPPED, "the layer does not dispatch it; give a subject with --provider")
    left = [name for name in contracts if name not in tried]
    return [Item(name, name, "-", "-", partial(_own, wanted if known[name].dispatched else foreign)) for name in left]


def _own(verdict: Verdict) -> Verdict:
    return verdict


def judge_outputs(
    contract: Contract,
    inputs: dict[str, Tensor],
    output: Outputs,
    *,
    arch: str,
    numerics: str | None,
    call: dict[str, object],
) -> Verdict:
    """The verdict of a contract, explained where it fails and that is cheap; CRASHED with the reason for an output that
    cannot be judged."""
    return Asked(contract, inputs, call).judge(output, arch, numerics)


@dataclass(frozen=True)
class Asked:
    """A call whose outputs are judged: what does not depend on an output is computed once for all of them."""

    contract: Contract
    inputs: dict[str, Tensor]
    options: dict[str, object]
    _calls: dict[tuple[str, torch.dtype], Call] = field(default_factory=dict, compare=False)

    def judge(
        self, output: Outputs, arch: str, numerics: str | None, documented: Callable[[Verdict], bool] = lambda v: False
    ) -> Verdict:
        """The verdict as of :func:`judge_outputs`; a failure that is ``documented`` is not explained."""
        self.contract.check(self.inputs, self.options)
        try:
            call = self._call(output, arch)
            verdict = self.contract.judged(call, output, numerics)
        except OracleError as error:
            return _without_numbers(Status.CRASHED, f"the output cannot be judged: {error}")
        explain = Explain.OFF if documented(verdict) and explain_level(None) is Explain.QUICK else None
        return explain_verdict(verdict, call, output, numerics=numerics, explain=explain)

    def _call(self, output: Outputs, arch: str) -> Call:
        new = self.contract.asked(self.inputs, output, arch=arch, **self.options)
        key = arch, new.out_dtype
        if key not in self._calls:
            like = next((call for (_, other), call in self._calls.items() if other == new.out_dtype), None)
            self._calls[key] = new if like is None else like.on(arch)
        return self._calls[key]


_last: dict[str, Asked] = {}


def _asked(name: str, contract: Contract, call: Case | captures.Capture) -> Asked:
    """The call of this name: the last one, which is kept, or a new one."""
    if name not in _last or _last[name].contract is not contract:
        options = call.call_options() if isinstance(call, Case) else call.call()
        asked = Asked(contract, call.inputs(), options)
        _last.clear()
        _last[name] = asked
    return _last[name]


def judge_call(read: Callable[[], CallFile], arch: str, numerics: str | None) -> Verdict:
    """The verdict on a recorded call; UNTESTED for one that cannot be read, or that the contract refuses."""
    try:
        call = read()
        get(call.contract).check(call.inputs, call.options)
    except OracleError as error:  # UNTESTED is no pass, and says why
        return _without_numbers(Status.UNTESTED, str(error))
    supplied, asked, declared = dict(call.inputs), dict(call.options), numerics or call.numerics
    return judge_outputs(get(call.contract), supplied, call.output, arch=arch, numerics=declared, call=asked)


def _judge_live(subject: Subject, case: Case, keep: Keep | None) -> Verdict:
    """Run on the subject's device, judge on the CPU: the verdict is the one that a replay will give."""
    asked = _asked(str(case), get(case.contract), case)
    inputs, call = asked.inputs, asked.options
    asked.contract.check(inputs, call)
    # A subject is foreign code and may raise anything; that must not end the run.
    try:
        run = subject.run if isinstance(subject, Isolated) else partial(registry.called, subject)
        output = run(inputs, call)
    except NotImplementedError as error:
        return _without_numbers(Status.UNSUPPORTED, registry.one_line(error))
    except Crash as error:
        return replace(_without_numbers(Status.CRASHED, str(error)), frames=error.frames)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | ProcessError):
            raise  # the user's, or the system's
        return replace(_without_numbers(Status.CRASHED, registry.described(error)), frames=frames_of(error))
    verdict = asked.judge(output, subject.arch, subject.numerics)
    if keep is not None and verdict.status is not Status.CRASHED:
        keep(subject, case, inputs, output)
    return verdict


def _judge_capture(capture: captures.Capture, documented: Documented) -> Verdict:
    why_not = capture.unsupported
    if why_not is None and capture.contract not in registered():
        why_not = f"the oracle has no contract {capture.contract!r} to judge it by"
    if why_not is not None:
        return _without_numbers(Status.UNSUPPORTED, why_not)
    asked = _asked(capture.called, get(capture.contract), capture)
    capture.checked(asked.inputs)
    output = capture.outputs(asked.contract.returns)
    return asked.judge(output, capture.recording.arch, capture.numerics, partial(documented, capture.id))


def _fixed(subject: Subject, status: Status, reason: str) -> Item:
    judge = partial(_without_numbers, status, reason)
    return Item(subject.contract, subject.contract, subject.name, subject.arch, judge)


def _without_numbers(status: Status, reason: str) -> Verdict:
    return Verdict(status, f"{status}: {reason}", reason=reason)
