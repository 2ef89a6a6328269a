"""Validate one kernel against one contract: cases, watches, report."""

from __future__ import annotations

import io
import math
import platform
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from oracle.bindings.known import adapter_of, find
from oracle.diagnosis.explain import explain_verdict
from oracle.diagnosis.level import explaining
from oracle.diagnosis.minimise import extents, minimise
from oracle.diagnosis.mutation import poisoned
from oracle.errors import CaseError, DeviceError, OptionError, OracleError, SubjectError, among
from oracle.fixtures import call_file
from oracle.fixtures import files as fixtures
from oracle.fixtures.call_file import CallFile, write
from oracle.harness import offsets, sources, watches
from oracle.harness.agreement import agreed, apart
from oracle.harness.jobs import Pool, divided
from oracle.harness.process import Worker
from oracle.harness.program import PACKAGE
from oracle.harness.reach import Reach
from oracle.harness.report import (
    BATCH,
    COVERAGE,
    INTERRUPTED,
    LARGE,
    LIMIT,
    LOAD,
    NUMBERS,
    OPEN,
    OPTIONAL,
    PITCHED,
    THREADS,
    Finding,
    Report,
    Told,
)
from oracle.harness.session import Answer, Session, failed, verdict_on
from oracle.harness.soak import drawn
from oracle.report.findings import WHOLE
from oracle.report.outcome import JUDGED
from oracle.routines import cases, get
from oracle.routines.base import Call
from oracle.routines.cases import Case
from oracle.routines.domain import EVERYTHING
from oracle.routines.domain import parse as parse_domain
from oracle.routines.drawn import default_cases
from oracle.verdict.compare import Status, Verdict

PROFILES = ("quick", "full", "soak")
WATCHED = {"quick": 2, "full": 6, "soak": 12}  # cases on which the watches that need several calls run
SOAK = 600.0  # seconds of a soak
LONG = 300.0  # a soak this long or longer makes the call beyond 2^31 elements, which takes minutes on a CPU
GIVE_UP = 3  # losses of the worker in a row after which the rest is not tried
EXPLAINED = 2  # failing cases of one scheme of scales whose output is explained
MORE = 2  # further ones, each with more than LARGER times the failing elements of any that was explained before
LARGER = 4
AHEAD = 4  # answers for each judging process that may wait
SEEDS = 1 << 31  # seeds that a run draws from
DATA = "data of "  # a family of data, among what is exempt
T = TypeVar("T")


def validate(
    kernel: str | Callable[..., object],
    contract: str | None = None,
    *,
    adapter: str | Callable[..., object] | None = None,
    device: str = "cpu",
    arch: str | None = None,
    numerics: str | None = None,
    profile: str = "quick",
    seed: int | None = None,
    case: str | Sequence[str] | None = None,
    calls: str | Path | None = None,
    require: Sequence[str] = (),
    limit: float = LIMIT,
    seconds: float | None = None,
    save: Path | None = None,
    domain: str | None = None,
    untrusted: bool = False,
    explain: str | None = None,
    jobs: int = 1,
    first_only: bool = False,
    exempt: Mapping[str, str] | None = None,
    told: Told | None = None,
) -> Report:
    """Run ``kernel`` over the cases of ``contract`` in a worker process, judge it and watch it.

    The cases are those of a profile with fresh data, edge cases (:mod:`oracle.routines.edges`), some of them at shapes
    drawn for this run, and combinations of options, dtypes and pitches (:mod:`oracle.routines.drawn`). A call that the
    kernel refuses (``NotImplementedError``) is moved to one that it takes; where too little is left to judge the
    kernel is UNTESTED (:mod:`oracle.harness.reach`).

    Parameters
    ----------
    kernel : ``"MODULE:CALLABLE"`` or a function of an importable module
        Called with the contract's inputs by name, the options that it takes, and, if it has a parameter ``out``, a
        poisoned output. Returns the output, a tuple or dict of several, or None after writing ``out``.
    contract : a name of :func:`oracle.contracts`; by default that of the kernel's binding (:mod:`oracle.bindings`).
    adapter : ``(kernel, inputs, options) -> output`` for kernels with another calling convention; by default the
        kernel's binding, where it has one, which says its domain and numerics too.
    device : ``"cpu"`` or ``"cuda"``.
    arch : whose arithmetic is admitted; by default that of the device.
    numerics : the declared schedule, as for :func:`oracle.judge`.
    profile : ``"quick"``, ``"full"``, or ``"soak"`` (random cases until ``seconds`` are over, 600 by default; no call
        starts after that).
    seed : added to the seeds of the profile's cases (0 gives the published ids), and seeds the drawing of shapes and of
        a soak's cases. By default drawn for each run; the report has it, so that a run can be repeated.
    case : judge these case ids only.
    calls : make these calls and no cases: a folder of call files (:mod:`oracle.fixtures.call_file`), or one; those of
        other contracts are left out. What they hold as an output is not looked at.
    require : watches asked for by name: ``"batch invariance"`` and ``"threads"`` (the right numbers while other
        threads call the kernel) fail instead of making a note, ``"large offsets"`` makes one call beyond 2^31
        elements where memory allows.
    limit : seconds for one call.
    seconds : length of a soak.
    save : minimise the first case with wrong numbers and write it to this safetensors file.
    domain : the extents that the kernel takes, as ``"m % 4 == 0, n % 128 == 0"`` (:mod:`oracle.routines.domain`): no
        other call is made. By default learned from what the kernel refuses.
    untrusted : run the kernel in a sandbox, where it cannot import the oracle, write outside of a private folder, or
        reach the network (:mod:`oracle.harness.sandbox`). On the CPU alone: CUDA does not start there.
    explain : how much is said of why an output fails, as for :func:`oracle.judge`.
    jobs : processes that judge what the kernel, in its one process, has answered; the findings are those of one job.
    first_only : stop after the first case that fails.
    exempt : what the kernel's documentation excludes, each with what it says: watches of
        :data:`oracle.harness.report.OPEN`, which are not tried, and ``"data of FAMILY"``, of which no call is made.
    told : gets what runs and every finding, and gives the findings of earlier runs.

    Returns
    -------
    Report
        ``exit_code`` 0 when the kernel conforms, 1 when not or when too little of the contract could be tried
        (UNTESTED), 2 when it could not be judged, 130 when the run was interrupted (SIGINT, SIGTERM, SIGHUP). An
        interrupted run gives what was found so far and does not raise: ``stopped`` is ``"interrupted"``, ``unfinished``
        counts the planned cases without an outcome, and ``conforms`` is False, as for every run that left a case.

    Raises
    ------
    OracleError
        The question is wrong (contract, case, device, profile); never for a wrong kernel.
    """
    own = adapter is None and isinstance(kernel, str) and not untrusted  # a sandbox has no oracle, nor its bindings
    if own and (binding := find(str(kernel), contract)) is not None:
        if binding.arches and (why := binding.unserved(arch or arch_of(device))) is not None:
            raise DeviceError(f"{why}; validate it on such a GPU, or name another arch")
        contract, adapter = binding.contract, adapter_of(binding)
        domain, numerics = domain or binding.domain or None, numerics or binding.numerics
    if contract is None:
        raise OptionError("name the contract that the kernel is judged under; only a bound routine has one of its own")
    routine = get(contract)
    if untrusted and device != "cpu":
        raise OptionError(
            f"untrusted runs a kernel on the CPU alone, not on {device}: CUDA does not start inside the sandbox "
            "(error 304 on an H100); validate a kernel that you trust without it"
        )
    if profile not in PROFILES:
        raise CaseError(f"no profile {profile!r}; {among(profile, PROFILES)}")
    for what, value in (("limit", limit), ("seconds", seconds)):
        if value is not None and not 0 < value < math.inf:
            raise OptionError(f"{what}={value:g} is no number of seconds; give a positive one")
    if seed is not None and seed < 0:
        raise OptionError(f"seed={seed} is negative; a case id holds 0 or more")
    if unknown := [name for name in require if name not in OPTIONAL]:
        raise OptionError(f"require={unknown[0]!r} is no optional watch; {among(unknown[0], OPTIONAL)}")
    exempt = dict(exempt or {})
    grammar = cases.grammars().get(contract)
    families = () if grammar is None else (*grammar.families, *grammar.edge_families)
    excludable = (*OPEN, *(f"{DATA}{family}" for family in families))
    if unknown := [name for name in exempt if name not in excludable]:
        raise OptionError(f"exempt={unknown[0]!r} may not be excluded; {among(unknown[0], excludable)}")
    if both := [name for name in require if name in exempt]:
        raise OptionError(f"{both[0]!r} is required and exempt; leave out one")
    if calls is None and not cases.grammars().get(contract):
        message = among(contract, cases.grammars(), see="fp8-oracle list contracts")
        raise CaseError(f"no contract with cases is named {contract!r}; {message}")
    files = None if calls is None else _files(Path(calls), contract)
    if files is not None and (case is not None or profile == "soak"):
        raise OptionError("calls in files (--cases) are judged alone; leave out --case and the profile soak")
    stated = None if domain is None else parse_domain(domain, cases.grammars()[contract].extents)
    run_seed = secrets.randbelow(SEEDS) if seed is None else seed
    arch = arch_of(device) if arch is None else arch
    if numerics is None and arch == "cpu" and routine.numerics and "cpu" not in routine.numerics:
        raise OptionError(f"{contract} has no model of {arch}; name arch= or numerics=")
    name, start = importable(kernel), time.perf_counter()
    called = None if adapter is None else importable(adapter)
    threads = divided(jobs, None)
    with ExitStack() as stack:
        stack.enter_context(explaining(explain))
        make = partial(_judging, contract, arch, numerics)
        pool = None if jobs == 1 else stack.enter_context(Pool(make, jobs, threads))
        worker = stack.enter_context(Worker(name, adapter=called, device=device, limit=limit, untrusted=untrusted))
        session = Session(worker, routine, device=device, arch=arch, numerics=numerics, domain=stated or EVERYTHING)
        soaks = profile == "soak" and case is None
        drawn = _cases(contract, profile, run_seed, case) if files is None else iter(())
        drawn = (one for one in drawn if f"{DATA}{one.family}" not in exempt)
        drawn = (one for one in drawn if not (one.pitches and PITCHED in exempt) and not (called and one.leaves_out))
        chosen: Iterable[Case] = drawn if soaks else list(drawn)
        planned = len(files or list(chosen)) if not soaks else None
        told, progress = told or Told(), _Progress()
        targets = [target for target in (name, called) if target is not None]
        code = worker.ask({"op": "code", "targets": targets, "but": str(PACKAGE)}) if type(told) is not Told else None
        about = Report(
            name,
            contract,
            device,
            arch,
            (),
            adapter=called,
            numerics=numerics,
            domain=domain,
            untrusted=untrusted,
            profile=profile if case is None and files is None else None,
            seed=run_seed if case is None and files is None else None,
            limit=limit,
            explain=explain,
            source=sources.of_name(name),
            exempt=exempt,
            planned=planned,
        )
        earlier = told.begins(about, code.text if code is not None and code.ok else "unknown", planned)
        start -= sum(finding.seconds for finding in earlier)
        probed: list[Finding] = []
        refuses = lambda probe: _probe(session, probe, probed, told)  # noqa: E731
        reach = Reach(contract, stated, refuses, move=case is None and not files)
        length = (SOAK if seconds is None else seconds) if soaks else math.inf
        large = LARGE in require or (soaks and length >= LONG)
        watching = _Watching(WATCHED[profile], frozenset(require), large, start + length, exempt)
        judges = None if pool is None else Judges(pool, jobs)
        findings, notes, stopped = list(earlier), list[watches.Note](), ""
        known = {finding.case: finding.verdict for finding in earlier if finding.watch == NUMBERS}
        try:
            if files is None:
                groups = _run(session, progress.taking(chosen), watching, reach, judges, known, progress, told)
            else:
                groups = _recorded(session, progress.taking(files), known, progress, told)
            for group in groups:
                found_now = [item for item in group if isinstance(item, Finding)]
                told.found(found_now)
                findings += found_now
                progress.report(found_now)
                notes += [item for item in group if isinstance(item, watches.Note)]
                if first_only and any(item.fails and item.watch != LOAD for item in found_now):
                    stopped = "a case failed"
                    break
            if watching.lost >= GIVE_UP:
                stopped = f"{GIVE_UP} calls in a row gave no answer"
        except KeyboardInterrupt:
            stopped, save = INTERRUPTED, None
        loaded = not any(f.watch == LOAD for f in findings)
        last = [*probed, *(() if stopped == INTERRUPTED else watches.late(session))]
        told.found(last)
        findings += last
        # a required watch without a finding or note did not run
        if not stopped and loaded:
            tried = {f.watch for f in findings} | {note.watch for note in notes}
            why = "required but not tried: no ordinary case with right numbers that it applies to"
            untried = Verdict(Status.UNTESTED, why, reason=why)
            rest = [Finding(WHOLE, watch, untried) for watch in require if watch not in tried]
            coverage = None if files else reach.coverage()
            # a run that found faults may end early
            if coverage is not None and coverage.complaints and not any(f.fails for f in (*findings, *rest)):
                why = "; ".join(coverage.complaints)
                verdict = Verdict(Status.UNTESTED, f"too little is reached: {why}", reason=why)
                rest.append(Finding(WHOLE, COVERAGE, verdict))
            told.found(rest)
            findings += rest
        noted: dict[tuple[str, str], list[str]] = {}
        for note in notes:
            noted.setdefault((note.watch, note.text), []).append(note.case)
        saved = None
        try:
            saved = None if save is None else _saved(session, findings, name, save)
        except KeyboardInterrupt:  # the report says that it was interrupted, and does not conform
            stopped = INTERRUPTED
        machine = {"python": platform.python_version(), "torch": str(torch.__version__)}
        machine["kernel_seconds"] = f"{session.kernel_seconds:.3f}"
        if device.startswith("cuda"):
            machine |= {"device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
            machine["memory"] = "shared on the device" if worker.place != "cpu" else "copied to it by the worker"
        return replace(
            about,
            findings=agreed(findings) if files else apart(agreed(findings)),
            notes=(
                *(f"{name}: not tried: {reason}" for name, reason in exempt.items()),
                *(f"{w}: {text} ({at[0]}{', ...' if at[1:] else ''})" for (w, text), at in noted.items()),
            ),
            machine=machine,
            seconds=time.perf_counter() - start,
            workers=worker.starts,
            saved=saved,
            printed=worker.output[-2000:],
            coverage=None if files else reach.coverage(),
            stopped=stopped,
            unfinished=progress.left(planned) if planned is not None and loaded else 0,
        )


def _files(place: Path, contract: str) -> list[Path]:
    """The files with calls of a contract.

    Raises FixtureError: there is nothing to read. CaseError: no call is one of this contract.
    """
    paths = call_file.within(place)[0] if place.is_dir() else [place]
    names = [fixtures.read_metadata(path).get("contract", "") for path in paths]
    chosen = [path for path, name in zip(paths, names, strict=True) if name == contract]
    if not chosen:
        other = ", ".join(sorted(filter(None, set(names)))) or "none"
        raise CaseError(f"{place}: has no call of {contract}; those in it are of {other}")
    return chosen


def _recorded(
    session: Session, files: Iterable[Path], known: Mapping[str, Verdict], progress: _Progress, told: Told
) -> Iterator[list[Finding | watches.Note]]:
    """The calls in files, each judged when it is answered, with what is watched of memory; ``known`` ones are not
    made again."""
    for path in files:
        if str(path) in known:
            continue
        told.runs(str(path))
        progress.call(str(path))
        call = call_file.read(path, made=False)
        session.contract.check(call.inputs, call.options)
        answer = session.call(call.inputs, call.options)
        finding = session.numbers(str(path), call.inputs, call.options, answer)
        if answer.hopeless:
            yield [Finding(str(path), LOAD, finding.verdict)]
            return
        if finding.verdict.status is Status.FAILED and answer.outputs:
            finding = _explained(session, finding, call.inputs, call.options, answer)
        memory = watches.memory(session, str(path), answer)
        yield [finding, *memory, *watches.row_major(session, str(path), answer)]


@dataclass
class _Watching:
    """What is left for the watches of a run: on how many cases, whether to make the large call, until when."""

    cases: int
    required: frozenset[str]
    large: bool  # until it was made once
    deadline: float
    exempt: Mapping[str, str]
    threads: bool = True  # until they ran once
    viewed: set[str] = field(default_factory=set)  # inputs that were given as views
    lost: int = 0  # calls in a row without an answer

    @property
    def over(self) -> bool:
        return time.perf_counter() >= self.deadline


class _Progress:
    """Which of the planned cases have an outcome."""

    def __init__(self) -> None:
        self._taken = 0
        self._called: dict[str, None] = {}  # without an outcome so far

    def taking(self, planned: Iterable[T]) -> Iterator[T]:
        """The planned cases, each counted when it is taken."""
        for one in planned:
            self._taken += 1
            yield one

    def call(self, case: str) -> None:
        """This case is called now."""
        self._called[case] = None

    def report(self, findings: Iterable[Finding]) -> None:
        """These findings are reported; one on the numbers of a case is its outcome."""
        for finding in findings:
            if finding.watch == NUMBERS:
                self._called.pop(finding.case, None)

    def left(self, planned: int) -> int:
        """How many of the planned cases have no outcome: those never taken, and those whose call or judgement did not
        end."""
        return planned - self._taken + len(self._called)


def _run(
    session: Session,
    chosen: Iterator[Case],
    watching: _Watching,
    reach: Reach,
    judges: Judges | None,
    known: Mapping[str, Verdict],
    progress: _Progress,
    told: Told,
) -> Iterator[list[Finding | watches.Note]]:
    """What is found of each case, in their order, all of it at once."""
    explained, largest = Counter[str](), Counter[str]()
    for asked in _asked_ahead(session, chosen, watching, reach, judges, known, progress, told):
        case, inputs, options, answer = asked.case, asked.inputs, asked.options, asked.answer
        finding = asked.finding()
        if answer.hopeless:
            yield [Finding(WHOLE, LOAD, finding.verdict)]
            return
        if finding.verdict.status is Status.FAILED and answer.outputs:
            larger = finding.verdict.outside > LARGER * largest[case.scheme]
            if explained[case.scheme] < EXPLAINED + MORE * larger:
                explained[case.scheme] += 1
                largest[case.scheme] = max(largest[case.scheme], finding.verdict.outside)
                finding = _explained(session, finding, inputs, options, answer)
        if answer.outputs:
            told.judged(finding, inputs, options, answer.output)
        watched = [finding, *asked.watched]
        watching.lost = watching.lost + 1 if finding.verdict.status is Status.CRASHED else 0
        judged = finding.verdict.status is not Status.CRASHED and answer.problem is None
        views = set(watches.viewable(session.contract, inputs)) - watching.viewed
        if judged and _ordinary(case) and (watching.cases or (views and PITCHED not in watching.exempt)):
            calls, begun = watches.Calls(session, str(case)), time.perf_counter()
            calls.know(inputs, options, answer, finding.verdict)
            if watching.cases:
                watching.cases -= 1
                result = _watched(calls, case, inputs, options, answer, watching)
            else:  # no case that was watched has these inputs
                result = _strided(calls, inputs, options, watching)
            for item in result:
                now = time.perf_counter()
                watched.append(item if isinstance(item, watches.Note) else replace(item, seconds=now - begun))
                begun = now
            watching.cases = 0 if calls.hung else watching.cases
        yield watches.folded(watched)
        if watching.lost >= GIVE_UP:
            return


@dataclass(frozen=True)
class _Call:
    """One answered call: what was found beside the numbers, and the finding on these."""

    case: Case
    inputs: Mapping[str, Tensor]
    options: Mapping[str, object]
    answer: Answer
    watched: Sequence[Finding | watches.Note]
    finding: Callable[[], Finding]


def _asked_ahead(
    session: Session,
    chosen: Iterator[Case],
    watching: _Watching,
    reach: Reach,
    judges: Judges | None,
    known: Mapping[str, Verdict],
    progress: _Progress,
    told: Told,
) -> Iterator[_Call]:
    """Every call, answered in the order of the cases. With ``judges`` the kernel is called some cases ahead of what is
    judged, but never while the watches may call it."""
    waiting = deque[_Call]()
    for case in reach.cases(chosen):
        if watching.over:
            break
        if (before := known.get(str(case))) is not None:  # an earlier run has judged it, and watched it
            reach.saw(case, before.reason or before.summary if before.status is Status.UNSUPPORTED else None)
            watching.cases -= bool(watching.cases and _ordinary(case) and before.status in JUDGED)
            continue
        told.runs(str(case))
        progress.call(str(case))
        inputs, options = _asked(session, case)
        must = None if not case.changes else [name for name in case.changed if name in inputs or name in options]
        answer = session.call(inputs, options, lead=case.pitches, must=must)
        reach.saw(case, _refused(answer))
        watched = [*watches.memory(session, str(case), answer), *watches.row_major(session, str(case), answer)]
        find: Callable[[], Finding]
        if judges is None:
            find = partial(session.numbers, str(case), inputs, options, answer)
        else:
            find = judges.finding(session, str(case), inputs, options, answer)
        waiting.append(_Call(case, inputs, options, answer, watched, find))
        at_once = judges is None or answer.problem is not None or (watching.cases and _ordinary(case))
        while waiting and (at_once or len(waiting) > AHEAD * judges.jobs):  # type: ignore[union-attr]
            yield waiting.popleft()
    yield from waiting


class Judges:
    """Processes that judge; the kernel is called by its own one."""

    def __init__(self, pool: Pool[Verdict | OracleError], jobs: int) -> None:
        self.pool, self.jobs = pool, jobs

    def finding(
        self, session: Session, case: str, inputs: Mapping[str, Tensor], options: Mapping[str, object], answer: Answer
    ) -> Callable[[], Finding]:
        """The finding on the numbers of an answer, as :meth:`Session.numbers` gives it, once a process has judged."""
        start, number = time.perf_counter(), None
        if answer.problem is None:
            stream = io.BytesIO()  # torch's own form: pickle has none for tensors of every dtype
            torch.save((dict(inputs), dict(options), answer.output), stream)
            number = self.pool.submit(stream.getvalue())

        def found() -> Finding:
            result = answer.problem if number is None else self.pool.result(number)
            if isinstance(result, BaseException) and not isinstance(result, OracleError):
                raise result
            assert result is not None
            verdict = session.settled(inputs, options, answer, result)
            return Finding(case, NUMBERS, verdict, time.perf_counter() - start + answer.seconds)

        return found


@contextmanager
def _judging(contract: str, arch: str, numerics: str | None) -> Iterator[Callable[[bytes], Verdict | OracleError]]:
    """Judges one answer, in a process of its own."""
    routine = get(contract)
    yield lambda asked: verdict_on(routine, arch, numerics, *torch.load(io.BytesIO(asked), weights_only=False))


def _refused(answer: Answer) -> str | None:
    """Why the kernel does not take a call, in its words; None when it takes it."""
    problem = answer.problem
    return problem.reason or problem.summary if problem is not None and problem.status is Status.UNSUPPORTED else None


def _probe(session: Session, case: Case, results: list[Finding], told: Told) -> str | None:
    """Why the kernel refuses a case that asks for its domain; what is wrong with an answer is found."""
    inputs, options = _asked(session, case)
    answer = session.call(inputs, options)
    watched = (*watches.memory(session, str(case), answer), *watches.row_major(session, str(case), answer))
    numbers = session.numbers(str(case), inputs, options, answer)
    if numbers.fails and answer.outputs:
        told.judged(numbers, inputs, options, answer.output)
    results += [finding for finding in (numbers, *watched) if isinstance(finding, Finding) and finding.fails]
    return _refused(answer)


def _asked(session: Session, case: Case) -> tuple[Mapping[str, Tensor], dict[str, object]]:
    """Inputs, with NaN in the rows that the contract leaves unspecified, and options of a case, but for what the kernel
    does not declare."""
    call = Call(get(case.contract), case.inputs(), case.call_options())
    return poisoned(call), {n: value for n, value in call.options.items() if n not in session.undeclared}


def _watched(
    calls: watches.Calls,
    case: Case,
    inputs: watches.Inputs,
    options: watches.Options,
    answer: Answer,
    watching: _Watching,
) -> Iterator[Finding | watches.Note]:
    """The watches that make calls of their own, one after the other until the time is over or the kernel hangs."""
    other, required = _asked(calls.session, replace(case, seed=case.seed + 1)), watching.required
    beside = watches.alike(inputs, other[0])
    for watch in (
        watches.repeats(calls, inputs, options, other),
        watches.mixed(calls, inputs, options, other[0]),
        () if PITCHED in watching.exempt else _strided(calls, inputs, options, watching),
        watches.metamorphic(calls, inputs, options),
        watches.batch(calls, inputs, options, required=BATCH in required),
        watches.launched(calls, inputs, options, beside, exempt=watching.exempt),
    ):
        if watching.over or calls.hung:
            return
        yield from watch
        yield from calls.findings()
    if watching.threads and THREADS not in watching.exempt and not (watching.over or calls.hung):
        tried = yield from watches.threads(calls, inputs, options, beside, required=THREADS in required)
        yield from calls.findings()
        watching.threads = not tried
    if watching.large and not (watching.over or calls.hung):
        large = list(offsets.large_offsets(calls, inputs, options, scheme=case.scheme))
        yield from large
        yield from calls.findings()
        watching.large = not large


def _strided(
    calls: watches.Calls, inputs: watches.Inputs, options: watches.Options, watching: _Watching
) -> Iterator[Finding | watches.Note]:
    """The inputs of several elements as views, those of a call that is not watched where no other had them."""
    names = watches.viewable(calls.session.contract, inputs)
    watching.viewed.update(names)
    yield from watches.strided(calls, inputs, options, names)
    yield from calls.findings()


def _explained(
    session: Session, finding: Finding, inputs: Mapping[str, Tensor], options: Mapping[str, object], answer: Answer
) -> Finding:
    if answer.problem is not None:
        return finding  # another shape or dtype than the call declares needs no explanation
    asked = session.contract.asked(inputs, answer.output, arch=session.arch, **options)
    return replace(finding, verdict=explain_verdict(finding.verdict, asked, answer.output, numerics=session.numerics))


def _saved(session: Session, findings: Sequence[Finding], kernel: str, path: Path) -> str | None:
    """The first case with wrong numbers, minimised by running the kernel again, as a file."""
    wrong = next((f for f in findings if f.watch == NUMBERS and f.verdict.status is Status.FAILED), None)
    if wrong is None:
        return None
    named = wrong.verdict.explained_by
    if wrong.case.endswith(call_file.SUFFIX):
        call = call_file.read(wrong.case, made=False)
        asked, options = call.inputs, dict(call.options)
    else:
        asked, options = _asked(session, cases.parse(wrong.case))

    def fails(inputs: Mapping[str, Tensor]) -> bool:
        """Whether these inputs fail too, and by the same faults where an explanation was found."""
        answer = session.call(inputs, options)
        if not answer.outputs or session.judge(inputs, options, answer).status is not Status.FAILED:
            return False
        finding = Finding(wrong.case, NUMBERS, failed(""))
        return not named or _explained(session, finding, inputs, options, answer).verdict.explained_by == named

    smallest = minimise(session.contract, asked, fails)
    answer = session.call(smallest.inputs, options)
    if not answer.outputs or session.judge(smallest.inputs, options, answer).status is not Status.FAILED:
        return None
    note = f"{wrong.case}, minimised to {extents(session.contract, smallest.inputs)}"
    result = (smallest.inputs, answer.output, options, session.arch, session.numerics, kernel, note)
    write(path, CallFile(session.contract.name, *result))
    return str(path)


def _cases(contract: str, profile: str, seed: int, given: str | Sequence[str] | None) -> Iterator[Case]:
    """The given cases; those of a profile, edges and drawn ones, ordinary data first; or random ones without end."""
    if given is not None:
        parsed = [cases.parse(text) for text in ([given] if isinstance(given, str) else given)]
        if other := [case for case in parsed if case.contract != contract]:
            raise CaseError(
                f"{other[0]} is a case of {other[0].contract}, and the kernel is judged as {contract}; give cases of "
                f"{contract}, or contract {other[0].contract}"
            )
        yield from parsed
        return
    if profile == "soak":
        yield from drawn(contract, seed)
        return
    # the first cases are watched: strides and rows show nothing in an extent of 1
    yield from sorted(
        default_cases(contract, seed, profile),
        key=lambda case: (not _ordinary(case), 1 in dict(case.extents).values()),
    )


def _ordinary(case: Case) -> bool:
    """Whether a case has the data that are watched: normal ones, or the first family of a contract without them."""
    families = case.grammar.families
    return case.family == ("randn" if "randn" in families else families[0])


def importable(kernel: str | Callable[..., object]) -> str:
    """``MODULE:CALLABLE`` of a kernel, for the worker; SubjectError when it is no such name or has none."""
    if isinstance(kernel, str):
        module, colon, path = kernel.partition(":")
        if not (module and colon and path):
            raise SubjectError(f"{kernel!r} is not of the form MODULE:CALLABLE, as mypackage.ops:my_gemm")
        if module.endswith(".py") or "/" in module:
            named = module.removesuffix(".py").strip("./").replace("/", ".")
            raise SubjectError(f"{module!r} is a file; name the module: {named}:{path}, from a folder where it imports")
        return kernel
    module, path = getattr(kernel, "__module__", "__main__"), getattr(kernel, "__qualname__", "")
    if module == "__main__" or "<" in path or not path:
        raise SubjectError(
            f"{path or kernel!r} of {module} cannot be imported by the worker process; put it into a module and pass "
            "that function or its name MODULE:CALLABLE"
        )
    return f"{module}:{path}"


def arch_of(device: str) -> str:
    """The arch of a device of this machine; DeviceError for any other."""
    if device == "cpu":
        return "cpu"
    if not device.startswith("cuda"):
        raise DeviceError(f"device {device!r} is neither cpu nor cuda")
    if not torch.cuda.is_available():
        raise DeviceError("device cuda: torch sees no GPU on this machine; validate on the cpu or on another machine")
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"
