"""A gallery: kernels of other projects, each with the contract that it is judged under, and what a run found of them.

A folder is a gallery; every file ``NAME.py`` of it that does not begin with ``_`` describes one project with
``PROJECT = Project(...)``. Nothing of a project is copied: a :class:`Kernel` names its callable, and an adapter beside
it brings the operands into the layout that the callable wants and refuses, with ``NotImplementedError``, what the
project does not document. A run is a validation of each kernel (:func:`oracle.validate`).
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import Tensor

from oracle.errors import OptionError, SubjectError
from oracle.fixtures.call_file import SUFFIX, CallFile, write
from oracle.harness.report import BATCH, LOAD, NUMBERS, Finding, Report, Told
from oracle.harness.validation import validate
from oracle.numbers.recipes import recipes
from oracle.report.gallery import Row
from oracle.routines import cases
from oracle.verdict.compare import Status

RERUN, EXACT = "rerun determinism", "the exact values"
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
    adapter : ``(callable, inputs, options) -> output``, a function of the project's file; None where the callable takes
        the contract's inputs by name.
    name : how pages call it; by default the callable's name.
    numerics, domain : as for :func:`oracle.validate`.
    pinned : the configuration that an autotuned kernel is held to, in words.
    case : ids of the cases to judge, where a profile has too few that the kernel takes; by default a profile's.
    """

    contract: str
    call: str
    adapter: Callable[..., Any] | None = None
    name: str = ""
    numerics: str | None = None
    domain: str | None = None
    pinned: str = ""
    case: tuple[str, ...] = ()

    @property
    def named(self) -> str:
        return self.name or self.call.rpartition(":")[2]


@dataclass(frozen=True)
class Project:
    """A project: ``distributions`` whose versions a run states (the first one must be there), ``carried``: how its code
    comes to a machine without network, and its kernels. ``devices`` are those on which its kernels run."""

    name: str
    distributions: tuple[str, ...]
    carried: str
    kernels: tuple[Kernel, ...]
    devices: tuple[str, ...] = ("cuda",)

    def versions(self) -> dict[str, str]:
        """The versions of the distributions that are installed here."""
        found = {}
        for name in self.distributions:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
        return found


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
    found = []
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
        found.append(project)
    if not found:
        raise SubjectError(f"{folder} has no file of a project")
    return found


def chosen(projects: Sequence[Project], only: Sequence[str]) -> list[tuple[Project, Kernel]]:
    """The kernels whose project, ``PROJECT.KERNEL`` or contract is one of ``only``; all where it is empty.

    Raises
    ------
    OptionError
        One of ``only`` names nothing.
    """
    every = [(project, kernel) for project in projects for kernel in project.kernels]
    names = [{p.name, f"{p.name}.{k.named}", f"{p.name}.{k.named}/{k.contract}", k.contract} for p, k in every]
    for one in only:
        if not any(one in known for known in names):
            there = ", ".join(project.name for project in projects)
            raise OptionError(f"{one!r} is no project, kernel or contract of the gallery; projects: {there}")
    return [pair for pair, known in zip(every, names, strict=True) if not only or known & set(only)]


def run(
    projects: Sequence[Project], *, only: Sequence[str] = (), device: str = "cuda", profile: str = "quick",
    seed: int = 0, limit: float | None = None, save: Path | None = None,
) -> Iterator[tuple[Row, Report | None]]:  # fmt: skip
    """Validate each chosen kernel, one after the other: a row, and the report behind it (None: not called).

    ``seed`` fixes what a run draws, so that two runs meet the same cases. ``save`` is a folder for the minimised first
    failing case of each kernel, and for a few calls of each whose bits no schedule or recipe gives.
    """
    for project, kernel in chosen(projects, only):
        base = Row(project.name, kernel.named, kernel.contract, "UNSUPPORTED", pinned=kernel.pinned)
        versions = project.versions()
        if project.distributions[0] not in versions:
            yield replace(base, why=f"{project.distributions[0]} is not installed: {project.carried}"), None
            continue
        if device.partition(":")[0] not in project.devices:
            yield replace(base, why=f"runs on {', '.join(project.devices)} alone", versions=versions), None
            continue
        asked: dict[str, Any] = {} if limit is None else {"limit": limit}
        if save is not None:
            name = save / f"{project.name}.{kernel.named}.{kernel.contract}"
            asked |= {"save": Path(f"{name}.safetensors"), "told": _Unidentified(name, kernel)}
        report = validate(
            kernel.call, kernel.contract, adapter=kernel.adapter, device=device, numerics=kernel.numerics,
            domain=kernel.domain, profile=profile, seed=seed, case=kernel.case or None, **asked,
        )  # fmt: skip
        yield condensed(base, report, versions), report


class _Unidentified(Told):
    """Writes small calls whose output equals nothing known, the first ones of each scheme of scales."""

    def __init__(self, name: Path, kernel: Kernel) -> None:
        self._name, self._kernel, self._kept = name, kernel, Counter[str]()
        self._about: Report | None = None

    def begins(self, about: Report, code: str, cases: int | None) -> Sequence[Finding]:
        self._about = about
        return ()

    def judged(
        self, finding: Finding, inputs: Mapping[str, Tensor], options: Mapping[str, object],
        output: Tensor | dict[str, Tensor],
    ) -> None:  # fmt: skip
        assert self._about is not None
        scheme = cases.parse(finding.case).scheme
        size = sum(tensor.nbytes for tensor in inputs.values())
        if finding.verdict.status not in JUDGED or size > LARGEST or self._kept[scheme] == KEPT or _identified(finding):
            return
        self._kept[scheme] += 1
        number, arch = sum(self._kept.values()), self._about.arch
        call = CallFile(
            self._kernel.contract, inputs, output, options, arch, self._kernel.numerics, self._kernel.call, finding.case
        )
        write(f"{self._name}.unidentified{number}{SUFFIX}", call)


def condensed(base: Row, report: Report, versions: Mapping[str, str]) -> Row:
    """What a page says of a validation."""
    numbers = [f for f in report.findings if f.watch == NUMBERS and f.verdict.status in JUDGED]
    errors = [f.verdict.error for f in numbers if f.verdict.error is not None]
    known = [name for name in map(_identified, numbers) if name]
    finite = [error for error in errors if error.ulps < float("inf")]
    first = next(iter(report.failures), None)
    if report.conforms:
        said = "CONFORMS"
    elif any(f.watch == LOAD or f.verdict.status is Status.CRASHED for f in report.failures) and not numbers:
        said = "CRASHED"
    else:
        said = "UNTESTED" if report.untested else "FAILED"
    return replace(
        base,
        verdict=said,
        why="" if first is None else f"{first.watch}: {first.verdict.reason or first.verdict.summary}",
        judged=len(numbers),
        identified=len(known),
        matches=dict(Counter(known).most_common()),
        classes=dict(Counter(f.verdict.basis for f in numbers).most_common()),
        explained=dict(Counter(name for f in numbers for name in f.verdict.explained_by).most_common()),
        ulps=max((error.ulps for error in finite), default=None),
        sqnr=min((error.sqnr for error in finite if error.sqnr < float("inf")), default=None),
        batch=_held(report, BATCH),
        reruns=_held(report, RERUN),
        covered=tuple(report.coverage.lines())[:1] if report.coverage is not None else (),
        command=report.command(first) if first is not None else "",
        seconds=round(report.seconds, 1),
        versions=dict(versions),
        cases={f.case: f"{f.verdict.status} {f.verdict.matches or f.verdict.basis}".strip() for f in numbers},
    )  # fmt: skip


def _identified(finding: Finding) -> str:
    """What an output equals in every bit: a schedule or recipe, one that explains why it fails, the exact values."""
    verdict = finding.verdict
    if verdict.matches is not None:
        return verdict.matches
    if named := [name for name in verdict.explained_by if name in recipes()]:
        return named[0]
    return EXACT if verdict.error is not None and verdict.error.ulps == 0 and not verdict.outside else ""


def _held(report: Report, watch: str) -> str:
    """Whether a watch held: "same", "differ" (a note is enough), or "" where it was not tried."""
    seen, bad = report.watches().get(watch, (0, 0))
    if bad or any(note.startswith(f"{watch}:") for note in report.notes):
        return "differ"
    return "same" if seen else ""
