"""A gallery: kernels of other projects, each with the contract that it is judged under, and what a run found of them.

The projects are those whose routines have bindings (:mod:`oracle.bindings`). A folder is a gallery too: every file
``NAME.py`` of it that does not begin with ``_`` describes one project with ``PROJECT = Project(...)``; a
:class:`Kernel` names its callable, and an adapter beside it brings the operands into the layout that the callable wants
and refuses, with ``NotImplementedError``, what the project does not document. A run is a validation of each kernel
(:func:`oracle.validate`).
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from oracle.bindings.known import bindings
from oracle.bindings.known import find as find_bound
from oracle.errors import DeviceError, OptionError, OracleError, SubjectError
from oracle.fixtures.call_file import SUFFIX, CallFile, write
from oracle.harness.jobs import Lost, Pool, divided
from oracle.harness.process import interrupted_by_every_end
from oracle.harness.report import BATCH, INTERRUPTED, LIMIT, LOAD, NUMBERS, Finding, Report, Told
from oracle.harness.session import UNWRITTEN
from oracle.harness.validation import arch_of, validate
from oracle.numbers.formats import same_bits
from oracle.numbers.recipe_table import recipes
from oracle.report.gallery import Row
from oracle.routines import cases, get
from oracle.routines.base import Contract
from oracle.verdict.compare import Status

RERUN, EXACT, UNTOUCHED = "rerun determinism", "the exact values", "what the memory held"
IN_TORCH = ("modelopt", "torch", "torchao", "transformer_engine")  # whose routines are, in part, operations of torch
COMPILING = 300.0  # seconds of a first call, where a project may compile
KEPT = 3  # calls of one scheme that nothing identifies
LARGEST = 1 << 18  # bytes of the inputs of such a call
JUDGED = (Status.PASSED, Status.FAILED, Status.MISTRUSTED)


@dataclass(frozen=True)
class Kernel:
    """One callable of a project under one contract.

    Parameters
    ----------
    contract : a name of :func:`oracle.contracts`.
    call : ``"MODULE:CALLABLE"`` of the project.
    adapter : ``(callable, inputs, options) -> output``, a function of the project's file; None where the callable has a
        binding, or takes the contract's inputs by name.
    name : how pages call it; by default the callable's name.
    numerics, domain : as for :func:`oracle.validate`.
    pinned : the configuration that an autotuned kernel is held to, in words.
    case : ids of the cases to judge, where a profile has too few that the kernel takes; by default a profile's.
    exempt : what the project excludes, as for :func:`oracle.validate`.
    """

    contract: str
    call: str
    adapter: Callable[..., Any] | None = None
    name: str = ""
    numerics: str | None = None
    domain: str | None = None
    pinned: str = ""
    case: tuple[str, ...] = ()
    exempt: Mapping[str, str] = field(default_factory=dict)

    @property
    def named(self) -> str:
        return self.name or self.call.rpartition(":")[2]


@dataclass(frozen=True)
class Project:
    """A project: ``distributions`` whose versions a run states (the first one must be there), ``carried``: how its code
    comes to a machine without network, and its kernels. ``devices`` are those on which its kernels run; ``compiles``:
    the seconds that a call may take because the project compiles at first use."""

    name: str
    distributions: tuple[str, ...]
    carried: str
    kernels: tuple[Kernel, ...]
    devices: tuple[str, ...] = ("cuda",)
    compiles: float = 0.0

    def versions(self) -> dict[str, str]:
        """The versions of the distributions that are installed here."""
        installed = {}
        for name in self.distributions:
            try:
                installed[name] = version(name)
            except PackageNotFoundError:  # not installed: it has no version to name
                continue
        return installed


def load(folder: Path) -> list[Project]:
    """The projects of a gallery, by name.

    Raises
    ------
    SubjectError
        The folder has no file of a project, one cannot be imported, or has no ``PROJECT``.
    """
    if not folder.is_dir():
        raise SubjectError(f"{folder} is no folder; name the one with a file for each project by --folder DIR")
    folder = folder.resolve()
    if not folder.name.isidentifier():
        raise SubjectError(f"{folder} cannot be imported by its name {folder.name!r}; rename it to an identifier")
    if str(folder.parent) not in sys.path:
        sys.path.insert(0, str(folder.parent))
    projects = []
    for path in sorted(folder.glob("[!_]*.py")):
        try:
            module = importlib.import_module(f"{folder.name}.{path.stem}")
        except Exception as error:  # a file of somebody else: whatever it raises is what is wrong with it
            raise SubjectError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
        project = getattr(module, "PROJECT", None)
        if not isinstance(project, Project):
            raise SubjectError(f"{path} has no PROJECT, a record of oracle.harness.gallery.Project")
        known = cases.grammars()
        for kernel in project.kernels:
            if kernel.contract not in known:
                raise SubjectError(f"{path}: {kernel.named} names contract {kernel.contract!r}, which has no cases")
        projects.append(project)
    if not projects:
        raise SubjectError(f"{folder} has no file of a project")
    return projects


def projects_of(folder: Path | None) -> list[Project]:
    """The projects of a gallery; None: those of the bindings. Raises as :func:`load`."""
    return of_bindings() if folder is None else load(folder)


def of_bindings() -> list[Project]:
    """The projects whose routines have bindings, by name; a row of a run says which are not installed here."""
    projects: dict[str, Project] = {}
    for one in bindings():
        name, _, routine = one.shown.partition(".")
        distribution = one.release.partition(" ")[0]
        here = dict(devices=("cpu", "cuda"), compiles=0.0) if name in IN_TORCH else dict(compiles=COMPILING)
        project = projects.setdefault(
            name, Project(name, (distribution,), f"its bindings are of {one.release}", (), **here)
        )
        kernel = Kernel(one.contract, one.target, name=routine, case=one.cases, exempt=one.exempt)
        projects[name] = replace(project, kernels=(*project.kernels, kernel))
    return [projects[name] for name in sorted(projects)]


def key_of(project: Project, kernel: Kernel) -> str:
    """The key of the row of a kernel."""
    return f"{project.name}.{kernel.named}/{kernel.contract}"


def chosen(projects: Sequence[Project], only: Sequence[str]) -> list[tuple[Project, Kernel]]:
    """The kernels whose project, ``PROJECT.KERNEL`` or contract is one of ``only``; all where it is empty.

    Raises
    ------
    OptionError
        One of ``only`` names nothing.
    """
    every = [(project, kernel) for project in projects for kernel in project.kernels]
    names = [{p.name, f"{p.name}.{k.named}", key_of(p, k), k.contract} for p, k in every]
    for one in only:
        if not any(one in known for known in names):
            there = ", ".join(project.name for project in projects)
            raise OptionError(f"{one!r} is no project, kernel or contract of the gallery; projects: {there}")
    return [pair for pair, known in zip(every, names, strict=True) if not only or known & set(only)]


@dataclass(frozen=True)
class Asked:
    """How the kernels of a run are validated.

    ``folder`` is the gallery; None: that of the bindings. ``seed`` fixes what a run draws, so that two runs meet the
    same cases. ``save`` is a folder for the minimised first failing case of each kernel, and for a few calls of each
    whose bits no schedule or recipe gives.
    """

    folder: Path | None
    device: str = "cuda"
    profile: str = "quick"
    seed: int = 0
    limit: float | None = None
    save: Path | None = None


def run(
    asked: Asked, keys: Sequence[str], *, jobs: int = 1, seconds: float = math.inf
) -> Generator[tuple[Row, Mapping[str, object] | None]]:
    """Validate the kernels of these keys (``PROJECT.KERNEL/CONTRACT``): of each, as soon as it is known, a row and the
    report behind it as JSON (None: not called).

    ``jobs`` kernels are validated at a time, each by a process of its own with one of the GPUs that the device names;
    they begin in the order of ``keys``. What has not ended after ``seconds``, or when the caller stops reading, is
    ended and left out.

    Raises
    ------
    DeviceError
        The device is none, or not here.
    KeyboardInterrupt
        A signal ended the run.
    """
    device, environments = places(asked.device)
    make = partial(_validating, replace(asked, device=device))
    if jobs == 1 and seconds == math.inf and environments == [{}]:
        with make() as validated:
            for key in keys:
                yield validated(key)
        return
    until, jobs = time.monotonic() + seconds, max(1, min(jobs, len(keys)))
    with interrupted_by_every_end(), Pool(make, jobs, divided(jobs, None), environments) as pool:
        numbers = {pool.submit(key): key for key in keys}
        for number, result in pool.finished(until):
            if isinstance(result, Lost):
                project, _, rest = numbers[number].partition(".")
                kernel, _, contract = rest.rpartition("/")
                yield Row(project, kernel, contract, "CRASHED", why=result.cause), None
            elif isinstance(result, BaseException):
                raise result
            else:
                yield result


def places(device: str) -> tuple[str, list[dict[str, str]]]:
    """The device that every process names, and the variables that give each process a GPU of those that are meant."""
    if not device.startswith("cuda"):
        return device, [{}]
    count = torch.cuda.device_count()
    if not count:
        arch_of(device)  # says so
    there = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    words = device.split(",") if device != "cuda" else [f"cuda:{number}" for number in range(count)]
    devices = [f"cuda:{number}" for number in range(count)]
    if wrong := [word for word in words if word not in devices]:
        raise DeviceError(f"device {wrong[0]!r}: there are {devices[0]} to {devices[-1]}; name some, or cuda for all")
    if words == ["cuda:0"]:
        return "cuda", [{}]
    return "cuda", [{"CUDA_VISIBLE_DEVICES": there[int(word[5:])]} for word in words]


@contextmanager
def _validating(asked: Asked) -> Iterator[Callable[[str], tuple[Row, Mapping[str, object] | None]]]:
    """Validates the kernel of a key; KeyboardInterrupt where the validation was interrupted."""
    kernels = {key_of(project, kernel): (project, kernel) for project, kernel in chosen(projects_of(asked.folder), ())}

    def validated(key: str) -> tuple[Row, Mapping[str, object] | None]:
        project, kernel = kernels[key]
        base = Row(project.name, kernel.named, kernel.contract, "UNSUPPORTED", pinned=kernel.pinned)
        versions = project.versions()
        if project.distributions[0] not in versions:
            return replace(base, why=f"{project.distributions[0]} is not installed: {project.carried}"), None
        if asked.device not in project.devices:
            return replace(base, why=f"runs on {', '.join(project.devices)} alone", versions=versions), None
        place = None if asked.save is None else asked.save / f"{project.name}.{kernel.named}.{kernel.contract}"
        known = None if kernel.adapter is not None else find_bound(kernel.call, kernel.contract)
        if known is not None and (unserved := known.unserved(arch_of(asked.device))) is not None:
            return replace(base, why=unserved, versions=versions), None
        listener = _Identified(kernel, place)
        try:
            report = validate(
                kernel.call,
                kernel.contract,
                adapter=kernel.adapter,
                device=asked.device,
                numerics=kernel.numerics,
                domain=kernel.domain,
                profile=asked.profile,
                seed=asked.seed,
                case=kernel.case or None,
                limit=max(asked.limit or LIMIT, project.compiles),
                exempt=kernel.exempt,
                told=listener,
                save=None if place is None else Path(f"{place}{SUFFIX}"),
            )
        except OracleError as error:  # what the gallery asks of it is wrong: the other kernels are run
            return replace(base, verdict="UNTESTED", why=str(error), versions=versions), None
        if report.stopped == INTERRUPTED:
            raise KeyboardInterrupt
        return condensed(base, report, versions, listener.names), report.to_json() | {"versions": versions}

    yield validated


class _Identified(Told):
    """Names by case the arithmetic whose bits an output has where its judgement does not: one that the contract does
    not admit, or K cut into parts. Writes the first small calls of each scheme that nothing names, beside ``file``."""

    def __init__(self, kernel: Kernel, file: Path | None) -> None:
        self.names: dict[str, str] = {}
        self.file, self._kernel, self._kept = file, kernel, Counter[str]()
        self._about: Report | None = None

    def begins(self, about: Report, code: str, cases: int | None) -> Sequence[Finding]:
        self._about = about
        return ()

    def judged(
        self,
        finding: Finding,
        inputs: Mapping[str, Tensor],
        options: Mapping[str, object],
        output: Tensor | dict[str, Tensor],
    ) -> None:
        assert self._about is not None
        if finding.verdict.status not in JUDGED or _identified(finding):
            return
        if named := every_bit(self._kernel.contract, inputs, options, output, self._about.arch):
            self.names[finding.case] = named
            return
        scheme = cases.parse(finding.case).scheme
        size = sum(tensor.nbytes for tensor in inputs.values())
        if self.file is None or size > LARGEST or self._kept[scheme] == KEPT:
            return
        self._kept[scheme] += 1
        number, arch = sum(self._kept.values()), self._about.arch
        call = CallFile(
            self._kernel.contract, inputs, output, options, arch, self._kernel.numerics, self._kernel.call, finding.case
        )
        write(f"{self.file}.unidentified{number}{SUFFIX}", call)


def every_bit(
    contract: str,
    inputs: Mapping[str, Tensor],
    options: Mapping[str, object],
    output: Tensor | dict[str, Tensor],
    arch: str,
) -> str:
    """The schedule or recipe, admitted by the contract or not, that gives every bit of an output; "" for none.

    ``output`` is of any shape and dtype, or a mapping of several; one that has not the contract's shape gives "". Any
    NaN equals any other. The names are derived from :meth:`oracle.routines.base.Contract.identify`.
    """
    chosen = get(contract)
    if type(chosen).identify is Contract.identify:
        return ""
    try:
        best = next(iter(chosen.identify(inputs, output, arch=arch, **options)), None)
    except OracleError:  # no schedule computes such a call, or the output has another shape
        return ""
    if best is None or best.equal < 1:
        return ""
    if isinstance(output, dict) or best.compared >= output.numel():
        return best.schedule
    # seen in a sample of a large output
    due = chosen.predict(inputs, numerics=best.schedule, **{**options, "out_dtype": output.dtype})
    assert isinstance(due, Tensor), "one output"
    return best.schedule if bool(same_bits(due.to(output.device), output).all()) else ""


def condensed(
    base: Row, report: Report, versions: Mapping[str, str], names: Mapping[str, str] = MappingProxyType({})
) -> Row:
    """What a page says of a validation; ``names``: the arithmetic of outputs by case where no verdict names one."""
    numbers = [f for f in report.findings if f.watch == NUMBERS and f.verdict.status in JUDGED]
    errors = [f.verdict.error for f in numbers if f.verdict.error is not None]
    names_of_arithmetic = [name for f in numbers if (name := _identified(f) or names.get(f.case, ""))]
    finite = [error for error in errors if error.ulps < float("inf")]
    first = next(iter(report.failures), None)
    if report.conforms:
        text = "CONFORMS"
    elif any(f.watch == LOAD or f.verdict.status is Status.CRASHED for f in report.failures) and not numbers:
        text = "CRASHED"
    else:
        text = "UNTESTED" if report.untested else "FAILED"
    return replace(
        base,
        verdict=text,
        why="" if first is None else f"{first.watch}: {first.verdict.reason or first.verdict.summary}",
        judged=len(numbers),
        identified=len(names_of_arithmetic),
        matches=dict(Counter(names_of_arithmetic).most_common()),
        classes=dict(Counter(f.verdict.basis for f in numbers).most_common()),
        explained=dict(Counter(name for f in numbers for name in f.verdict.explained_by).most_common()),
        ulps=max((error.ulps for error in finite), default=None),
        sqnr=min((error.sqnr for error in finite if error.sqnr < float("inf")), default=None),
        batch=_held(report, BATCH),
        reruns=_held(report, RERUN),
        covered=tuple(report.coverage.lines())[:1] if report.coverage is not None else (),
        command=report.command(first) if first is not None else "",
        exempt=tuple(f"{watch}: {reason}" for watch, reason in report.exempt.items()),
        seconds=round(report.seconds, 1),
        versions=dict(versions),
        cases={
            f.case: f"{f.verdict.status} {f.verdict.matches or names.get(f.case) or f.verdict.basis}".strip()
            for f in numbers
        },
    )


def _identified(finding: Finding) -> str:
    """What an output equals in every bit: a schedule or recipe, one that explains why it fails, the exact values, or
    what its memory held before the call."""
    verdict = finding.verdict
    if verdict.matches is not None:
        return verdict.matches
    if verdict.explained_by == (UNWRITTEN,):
        return UNTOUCHED
    if named := [name for name in verdict.explained_by if name in recipes()]:
        return named[0]
    return EXACT if verdict.error is not None and verdict.error.ulps == 0 and not verdict.outside else ""


def _held(report: Report, watch: str) -> str:
    """Whether a watch held: "same", "differ" (a note is enough), or "" where it was not tried."""
    seen, bad = report.watches().get(watch, (0, 0))
    if bad or any(note.startswith(f"{watch}:") for note in report.notes):
        return "differ"
    return "same" if seen else ""
