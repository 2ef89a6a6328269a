"""What a validation found, and what a caller is told while it runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from oracle.diagnosis.level import Explain
from oracle.errors import counted
from oracle.fixtures.call_file import SUFFIX
from oracle.harness.reach import Coverage
from oracle.report.findings import NUMBERS, WHOLE, Finding, outcomes
from oracle.report.outcome import Outcome, quoted
from oracle.verdict.compare import Status

__all__ = [
    "BATCH",
    "COVERAGE",
    "GRAPH",
    "INTERRUPTED",
    "JOINED",
    "LARGE",
    "LIMIT",
    "LOAD",
    "NUMBERS",
    "OPEN",
    "OPTIONAL",
    "PITCHED",
    "SIDE",
    "THREADS",
    "Finding",
    "Report",
    "Told",
]

SCHEMA = "fp8-oracle.validation/1"
LOAD, COVERAGE = "load", "coverage"
INTERRUPTED = "interrupted"
"""Why a run was stopped that a signal ended."""
LIMIT = 120.0  # seconds for one call; kernels that compile at first use take up to a minute

BATCH, THREADS, LARGE = "batch invariance", "threads", "large offsets"
OPTIONAL = (BATCH, THREADS, LARGE)
"""Watches of ``require``: two that make notes unless they are required, and one that takes gigabytes."""
IN_PLACE = (
    "a kernel that writes in place is run through --adapter: clone the input, call the kernel on the clone, return the "
    "clone"
)
"""The way out of the watch of inputs, where an output has the name of an input."""
PITCHED, SIDE, JOINED, GRAPH = "non-contiguous inputs", "side stream", "stream order", "CUDA graph"
OPEN = (PITCHED, SIDE, JOINED, GRAPH, THREADS)
"""Watches of what a kernel may exclude by its documentation: how it is given its operands, and how it is launched."""


class Told:
    """What a caller is told of a validation while it runs; this one does nothing with it."""

    def begins(self, about: Report, code: str, cases: int | None) -> Sequence[Finding]:
        """Before the first call: what is asked, as a report without findings, a digest of the kernel's code, and how
        many cases there are (None: without end). Returns what earlier runs of the same have found: their cases are not
        called again."""
        return ()

    def runs(self, case: str) -> None:
        """This case is called now."""

    def judged(
        self,
        finding: Finding,
        inputs: Mapping[str, Tensor],
        options: Mapping[str, object],
        output: Tensor | dict[str, Tensor],
    ) -> None:
        """The finding on the numbers of a case, and the call; ``output`` is what the kernel returned, of any shape and
        dtype, NaN included. The verdict is derived in :mod:`oracle.verdict`."""

    def found(self, findings: Sequence[Finding]) -> None:
        """All that was found of one case, or of the whole."""


@dataclass(frozen=True)
class Report:
    """A whole validation. ``notes`` do not decide whether it conforms; ``saved`` is the file of the smallest case;
    ``seed`` and ``profile`` make the same cases again (None where the cases were given). ``planned`` cases were to be
    judged (None for a soak, which ends when its time is over), and ``unfinished`` of them have no outcome. ``stopped``
    says why a run ended early, and is empty for a whole run. ``source`` is where the kernel stands, ``exempt`` the
    watches that were not tried, each with the reason."""

    kernel: str
    contract: str
    device: str
    arch: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    machine: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    workers: int = 0
    saved: str | None = None
    printed: str = ""
    adapter: str | None = None
    numerics: str | None = None
    profile: str | None = None
    seed: int | None = None
    domain: str | None = None
    coverage: Coverage | None = None
    untrusted: bool = False
    limit: float = LIMIT
    explain: str | None = None
    stopped: str = ""
    unfinished: int = 0
    source: str = ""
    exempt: Mapping[str, str] = field(default_factory=dict)
    planned: int | None = None

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """The findings as outcomes of a run."""
        names = {"contract": self.contract, "subject": self.kernel, "arch": self.arch, "source": self.source}
        return outcomes(self.findings, **names, command=self.command)

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that fail by themselves."""
        return tuple(f for f in self.findings if f.fails)

    @property
    def judged(self) -> int:
        """Cases with a verdict on numbers."""
        good = (Status.PASSED, Status.FAILED, Status.MISTRUSTED)
        return sum(f.watch == NUMBERS and f.verdict.status in good for f in self.findings)

    @property
    def incomplete(self) -> str:
        """Why the run shows less than was planned, in words; empty for a whole run."""
        if not self.stopped and not self.unfinished:
            return ""
        left = "" if self.planned is None else f"{self.unfinished} of {counted(self.planned, 'case')} not judged"
        return "; ".join(filter(None, (self.stopped, left)))

    @property
    def conforms(self) -> bool:
        """Something was judged, nothing fails, and no planned case is left: an incomplete run never conforms."""
        return self.judged > 0 and not self.failures and not self.incomplete

    @property
    def untested(self) -> bool:
        """Nothing is wrong, but too little was tried: every failure is UNTESTED."""
        return bool(self.failures) and all(f.verdict.status is Status.UNTESTED for f in self.failures)

    @property
    def exit_code(self) -> int:
        """0 conforms, 1 does not or is untested, 2 could not be judged, 130 the run was interrupted."""
        if self.conforms:
            return 0
        if self.stopped == INTERRUPTED:
            return 130
        return 1 if any(f.watch != LOAD for f in self.failures) else 2

    def watches(self) -> dict[str, tuple[int, int]]:
        """Per watch: how many findings, how many of them fail."""
        table: dict[str, tuple[int, int]] = {}
        for f in self.findings:
            seen, failed = table.get(f.watch, (0, 0))
            table[f.watch] = (seen + 1, failed + f.fails)
        return table

    def command(self, finding: Finding) -> str:
        """The command that repeats one finding, safe to paste into a shell."""
        whole = finding.case == WHOLE  # of the run, not of a case
        names = ("contract", "adapter", "device", "arch", "numerics", *(("profile", "seed") if whole else ()), "domain")
        called = [(name, getattr(self, name)) for name in names]
        called += [("limit", f"{self.limit:g}")] if self.limit != LIMIT else []
        called += [("explain", self.explain)] if self.explain not in (None, Explain.QUICK) else []
        flags = [f"--{name} {shlex.quote(str(value))}" for name, value in called if value is not None]
        flags += ["--untrusted"] if self.untrusted else []
        flags += [f"--require {shlex.quote(finding.watch)}"] if finding.watch in OPTIONAL else []
        flag = "--cases" if finding.case.endswith(SUFFIX) else "--case"  # a call in a file, or a case id
        flags += [] if whole else [f"{flag} {quoted(finding.case)}"]
        return f"fp8-oracle validate {shlex.quote(self.kernel)} {' '.join(flags)}"

    def to_json(self) -> dict[str, object]:
        names = (
            "kernel",
            "adapter",
            "contract",
            "numerics",
            "device",
            "arch",
            "profile",
            "seed",
            "domain",
            "untrusted",
            "conforms",
            "untested",
            "exit_code",
            "judged",
            "planned",
            "source",
        )
        return {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in names},
            "watches": {name: {"findings": n, "failed": bad} for name, (n, bad) in self.watches().items()},
            "stopped": self.stopped,
            "unfinished": self.unfinished,
            "coverage": None if self.coverage is None else self.coverage.to_json(),
            "notes": list(self.notes),
            "exempt": dict(self.exempt),
            "machine": dict(self.machine),
            "seconds": round(self.seconds, 3),
            **{name: getattr(self, name) for name in ("workers", "saved", "printed")},
            "findings": [f.to_json() for f in self.findings],
        }
