"""``validate``: judge a kernel by name, in a worker process, and report it as a run; ``fingerprint``: how it computes.

What is found goes to the screen, and as outcomes (:mod:`oracle.report.findings`) into the record and every kind of
report that ``verify`` writes. ``--json`` is the whole validation: every finding, its notes, what was covered.
"""

from __future__ import annotations

import argparse
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from oracle.bindings.known import find
from oracle.cli import common
from oracle.cli.common import CALLED
from oracle.errors import OptionError, counted
from oracle.harness import provenance, recording, sources
from oracle.harness.endurance import OVER, Soak, seed_of, soak
from oracle.harness.probing import probe, probe_block_scaled
from oracle.harness.report import INTERRUPTED, LIMIT, LOAD, NUMBERS, Finding, Report, Told
from oracle.harness.validation import PROFILES, SEEDS, SOAK, validate
from oracle.report import console as words
from oracle.report import record
from oracle.report.findings import findings as read_findings
from oracle.report.outcome import Outcome
from oracle.report.outcome import Report as Run
from oracle.routines.domain import EXAMPLE
from oracle.tensorcore.block_probes import KINDS, BlockFingerprint, Kind
from oracle.tensorcore.fingerprint import Fingerprint
from oracle.tensorcore.instructions import F8F6F4 as FORMATS
from oracle.verdict.compare import Status, Verdict

# What the command and the verb of that name call alike.
ASKED = (
    "adapter",
    "device",
    "arch",
    "numerics",
    "profile",
    "seed",
    "case",
    "calls",
    "require",
    "limit",
    "seconds",
    "domain",
    "untrusted",
    "explain",
    "jobs",
)
SELECTED = ("contract", "adapter", "device", "arch", "numerics", "profile", "seed", "domain", "limit")


def add_validate(commands: common.Commands) -> None:
    command = common.add_command(
        commands,
        "validate",
        _validate,
        "judge a kernel by name, in a worker process, and watch what it does to memory",
        f"Run MODULE:CALLABLE over the cases of a contract, with data and some shapes drawn for this run. {CALLED} "
        "Such calls are moved to calls that it takes; `fp8-oracle list contracts --contract NAME` prints the names. "
        "Exit 0 when it conforms, 1 when not or when too little could be tried (UNTESTED), 2 when it could not be "
        "judged, 130 when interrupted; then the reports hold what was judged, and nothing conforms.",
    )
    command.add_argument("kernel", metavar="MODULE:CALLABLE")
    text = "see `fp8-oracle list`; needless where `fp8-oracle list bindings` has the kernel under one contract"
    command.add_argument("--contract", metavar="NAME", help=text)
    command.add_argument("--adapter", **ADAPTER)
    command.add_argument("--device", **DEVICE)
    command.add_argument("--arch", help="whose arithmetic is admitted (default: that of the device)")
    command.add_argument("--numerics", metavar="NAME", help="the declared schedule, as sm90.promote128")
    common.add_recipe(command)
    common.add_explain_level(command)
    command.add_argument("--profile", choices=PROFILES, default="quick")
    text = "repeat a run: fixes what it draws; 0 has the published cases"
    command.add_argument("--seed", type=common.whole(0), help=text)
    example = EXAMPLE.replace("%", "%%")
    command.add_argument("--domain", metavar="CONDITIONS", help=f"extents that the kernel takes, as '{example}'")
    command.add_argument("--case", action="append", metavar="ID", help="only this case; may be repeated")
    text = "only the calls in these files, as `cases from-checkpoint`, oracle.sample and --save write them"
    command.add_argument("--cases", dest="calls", type=Path, metavar="FILE|DIR", help=text)
    common.repeated(
        command,
        "--require",
        "WATCH",
        "'batch invariance' must hold; 'threads': right numbers while other threads call it; 'large offsets' "
        "makes a call beyond 2^31 elements (as a soak of five minutes does)",
    )
    command.add_argument("--limit", **LIMITED)
    command.add_argument("--seconds", type=float, metavar="S", help="length of a soak (default: 600)")
    command.add_argument(
        "--untrusted",
        action="store_true",
        help="run the kernel in a sandbox without the oracle, network or files to write, on data of a fresh seed; "
        "exit 2 where this machine makes no sandbox",
    )
    common.add_jobs(command)
    command.add_argument("-x", "--exitfirst", action="store_true", help="stop after the first case that fails")
    text = "append every outcome to this file as soon as it is known; with --profile soak every stretch"
    command.add_argument("--record", type=Path, metavar="FILE.jsonl", help=text)
    text = "continue --record with its seed: cases that the same code has judged are not called again"
    command.add_argument("--resume", action="store_true", help=text)
    text = "with --profile soak: stretches with a failure after which it ends (default: %(default)d)"
    command.add_argument("--stop-after", type=common.whole(1), default=3, metavar="N", help=text)
    command.add_argument("--save", metavar="FILE", help="minimise the first failing case into this safetensors file")
    common.add_output_arguments(command)
    common.add_volume_arguments(command)


def _validate(arguments: argparse.Namespace) -> int:
    if arguments.contract is None and (binding := find(arguments.kernel)) is not None:
        arguments.contract = binding.contract
    arguments.numerics = common.declared(arguments)
    if arguments.resume and arguments.record is None:
        raise OptionError("--resume continues a record; name it with --record FILE.jsonl")
    several = arguments.device == "cuda" and torch.cuda.device_count() > 1
    drawn = arguments.profile == "soak" and not arguments.case and arguments.calls is None
    if drawn and (several or arguments.jobs > 1 or arguments.record):
        return _soak(arguments)
    if arguments.resume and arguments.seed is None:
        arguments.seed = _seed_in(arguments.record)
    asked = {name: getattr(arguments, name) for name in ASKED}
    save = None if arguments.save is None else Path(arguments.save)
    screen, live = common.screen_of(arguments), _Live(arguments, provenance.machine(), provenance.versions(()))
    with live:
        report = validate(
            arguments.kernel, arguments.contract, save=save, first_only=arguments.exitfirst, told=live, **asked
        )
    run = live.run(report)
    print_report(report, screen, quiet=arguments.quiet, verbose=arguments.verbose)
    if arguments.json is not None:
        provenance_json = recording.provenance_of(live.machine, live.versions, command_of(arguments, report.seed))
        common.write_json(arguments.json, report.to_json() | {"provenance": provenance_json})
    common.write_reports(run, arguments, but=("json",))
    if report.stopped == INTERRUPTED:
        print("fp8-oracle: interrupted", file=sys.stderr)
    return report.exit_code


def _seed_in(path: Path) -> int | None:
    """The seed of a record that is continued; None where there is none yet."""
    if not path.is_file() or not path.stat().st_size:
        return None
    seed = record.read(path).run.selection.get("seed", "")
    return int(seed) if seed.isdecimal() else None


class _Live(Told):
    """The bar, and the record that grows, while a validation runs; a context manager."""

    def __init__(self, arguments: argparse.Namespace, machine: dict[str, str], versions: dict[str, str]) -> None:
        self.arguments, self.machine, self.versions = arguments, machine, versions
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self._found: list[Finding] = []
        self._bar: common.Bar | None = None
        self._recorder: record.Recorder | None = None
        self._written: dict[str, Outcome] = {}

    def __enter__(self) -> _Live:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.__exit__()

    def begins(self, about: Report, code: str, cases: int | None) -> Sequence[Finding]:
        self._about = about
        if self.arguments.record is not None:
            self.versions |= {"kernel": f"{about.kernel}+{code}"}
            values = {name: getattr(about, name) for name in SELECTED}
            selection = {"kernel": about.kernel} | {n: str(v) for n, v in values.items() if v is not None}
            selection |= {"untrusted": "yes"} if about.untrusted else {}
            selection |= {"require": ", ".join(self.arguments.require)} if self.arguments.require else {}
            selection |= {"case": " ".join(self.arguments.case)} if self.arguments.case else {}
            selection |= {"cases": str(self.arguments.calls)} if self.arguments.calls else {}
            first = record.Run(self.started, self.machine, self.versions, selection, cases or 0)
            self._recorder = record.start(self.arguments.record, first, resume=self.arguments.resume)
            for note in self._recorder.notes:
                common.say(f"fp8-oracle: {note}", stderr=True)
            self._found += read_findings(self._recorder.finished.values())
            self._written = {o.id: o for o in self._outcomes()}
        self._bar = common.Bar(common.screen_of(self.arguments), cases)
        self._bar.__enter__()
        for _ in range(sum(not o.watch for o in self._written.values())):
            self._bar.advance()
        return tuple(self._found)

    def runs(self, case: str) -> None:
        assert self._bar is not None
        failing = sum(finding.fails for finding in self._found)
        self._bar.runs((f"[bold red]{failing} failing[/] " if failing else "") + escape(case.partition("/")[2]))

    def found(self, findings: Sequence[Finding]) -> None:
        assert self._bar is not None
        self._found += findings
        if findings:
            self._bar.advance()
        if self._recorder is not None:
            for outcome in reversed(self._outcomes()):  # a case is recorded when all of its watches are
                written = self._written.get(outcome.id)
                moved = written is not None and bool(outcome.watch) and written.repro != outcome.repro
                if written is None or written.status != outcome.status or moved:
                    self._written[outcome.id] = outcome
                    run = self._recorder.run
                    self._recorder.append(record.key_of(outcome.id, outcome.subject, outcome.arch, "", run), outcome)

    def run(self, report: Report) -> Run:
        """The whole as a run, which ends the record."""
        unfinished = report.unfinished
        # a run that was stopped is not good, also where no planned case is left, as of a soak
        complaints = (f"the validation ended early: {report.stopped}",) if report.stopped and not unfinished else ()
        if self._recorder is not None:
            self._recorder.end(complaints, report.seconds, unfinished)
        machine, versions = self.machine, self.versions
        return Run(report.outcomes, complaints, machine, report.seconds, versions, self.started, unfinished)

    def _outcomes(self) -> tuple[Outcome, ...]:
        return replace(self._about, findings=tuple(self._found)).outcomes


def _soak(arguments: argparse.Namespace) -> int:
    """A soak on every device, in stretches."""
    if arguments.save is not None:
        raise OptionError("--save: repeat the stretch that failed with its --seed and --save")
    seed = secrets.randbelow(SEEDS) if arguments.seed is None else arguments.seed
    if arguments.resume and arguments.seed is None:
        seed = seed_of(arguments.record, seed)
    passed = ("adapter", "arch", "numerics", "require", "limit", "domain", "untrusted", "explain")
    screen = common.screen_of(arguments)
    terminal = screen.is_terminal
    result = soak(
        arguments.kernel,
        arguments.contract,
        seconds=arguments.seconds or SOAK,
        seed=seed,
        device=arguments.device,
        lanes=None if arguments.jobs == 1 else arguments.jobs,
        record=arguments.record,
        most=1 if arguments.exitfirst else arguments.stop_after,
        resume=arguments.resume,
        said=lambda line: screen.print(line, soft_wrap=True) if terminal else None,
        **{name: getattr(arguments, name) for name in passed},
    )
    for line in result.lines():
        screen.print(line, soft_wrap=True)
    screen.print(f"seed {seed}; --seed {seed} repeats this run", soft_wrap=True)
    common.write_json(arguments.json, {**result.about, "ended": result.ended, "stretches": result.stretches})
    common.write_reports(run_of(result, arguments.arch or "-"), arguments, but=("json",))
    return result.exit_code


def run_of(found: Soak, arch: str) -> Run:
    """A soak as a run: an outcome for each stretch, and one for each failure."""
    kernel, contract = found.about["kernel"], found.about["contract"]
    outcomes, source = [], sources.of_name(str(kernel))
    for one in found.stretches:
        name = f"{contract}/soak/lane {one['lane']}/stretch {one['number']}"
        passed = Verdict(Status.PASSED, f"{counted(one['cases'], 'case')} judged")
        outcomes += [Outcome(name, contract, kernel, arch, passed, one["seconds"], command="", source=source)]
        for number, failure in enumerate(one["failures"], 1):
            verdict = Verdict(
                Status(failure["verdict"]["status"]),
                failure["verdict"]["summary"],
                reason=failure["verdict"]["summary"],
            )
            watch = "" if failure["watch"] == NUMBERS else failure["watch"]
            outcomes.append(
                Outcome(
                    f"{name}/failure {number}", contract, kernel, arch, verdict, command="", watch=watch, source=source
                )
            )
    early = () if found.failures or found.ended == OVER else (f"the soak ended early: {found.ended}",)
    return Run(tuple(outcomes), early, provenance.machine(), found.seconds, provenance.versions(()), "")


def command_of(arguments: argparse.Namespace, seed: int | None) -> str:
    """The command as it was given, with the seed that the run drew and without where its results went, safe to paste
    into a shell."""
    words = ["fp8-oracle", "validate", arguments.kernel]
    for name in ("contract", "adapter", "device", "arch", "numerics", "profile", "seed", "seconds", "domain"):
        value = seed if name == "seed" else getattr(arguments, name)
        words += [] if value is None else [f"--{name}", str(value)]
    words += ["--untrusted"] if arguments.untrusted else []
    words += [word for case in arguments.case or [] for word in ("--case", case)]
    words += [] if arguments.calls is None else ["--cases", str(arguments.calls)]
    return shlex.join([*words, *(word for watch in arguments.require for word in ("--require", watch))])


def print_report(report: Report, screen: Console, *, quiet: bool = False, verbose: bool = False) -> None:
    """The table of watches, the failures by cause with their commands, the notes, one closing line."""
    if not quiet:
        screen.print(f"{report.kernel} as {report.contract}", style="italic", soft_wrap=True)  # a title wraps in names
    loaded = LOAD not in report.watches()
    if not quiet and loaded:
        table = Table(header_style="bold")
        table.add_column("watch")
        table.add_column("checks", justify="right")
        table.add_column("failed", justify="right")
        for name, (count, bad) in report.watches().items():
            table.add_row(name, str(count), Text(str(bad), style="bold red" if bad else "green"))
        screen.print(table)
    outcomes = report.outcomes
    if verbose:
        for outcome in outcomes:
            screen.print(words.line(outcome), soft_wrap=True)
    words.print_failures([o for o in outcomes if o.fails], screen)
    if not quiet:
        for note in report.notes:
            screen.print(Text.assemble(("note ", "yellow"), note), soft_wrap=True)
        if report.saved is not None:
            command = f"fp8-oracle explain {shlex.quote(report.saved)}"
            screen.print(f"smallest failing case: {report.saved}; `{command}`", soft_wrap=True)
        coverage = report.coverage if loaded and report.judged else None
        if coverage is not None and (report.profile is not None or coverage.refused):
            for line in coverage.lines():
                screen.print(line, soft_wrap=True)
        if loaded and report.seed is not None:
            screen.print(f"seed {report.seed}; --seed {report.seed} repeats this run", soft_wrap=True)
    if report.incomplete:
        screen.print(f"stopped: {report.incomplete}", soft_wrap=True)
    word = _closing(report)
    where = report.device if report.device == report.arch else f"{report.device} ({report.arch})"
    judged = counted(report.judged, "case")
    if report.incomplete and report.planned is not None:
        judged = f"{report.judged} of {counted(report.planned, 'case')}"
    closing = f"  {judged} judged on {where}, {counted(report.workers, 'worker')}, {report.seconds:.1f} s"
    screen.print(Text.assemble((word, "bold green" if report.conforms else "bold red"), closing), soft_wrap=True)


def _closing(report: Report) -> str:
    """The verdict on the kernel, in words."""
    if report.conforms:
        return "CONFORMS"
    if report.untested:
        return "UNTESTED"
    if report.incomplete and not report.failures:
        return "UNFINISHED"
    return "DOES NOT CONFORM" if any(result.watch != LOAD for result in report.failures) else "NOT JUDGED"


# --- fingerprint --------------------------------------------------------------------------------------------


OUT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ADAPTER: dict[str, Any] = {"metavar": "MODULE:CALLABLE", "help": "called as adapter(kernel, inputs, options)"}
DEVICE: dict[str, Any] = {"default": "cpu", "help": "cpu (default) or cuda"}
LIMITED: dict[str, Any] = {
    "type": float,
    "default": LIMIT,
    "metavar": "S",
    "help": f"seconds for one call (default: {LIMIT:g})",
}


def add_fingerprint(commands: common.Commands) -> None:
    command = common.add_command(
        commands,
        "fingerprint",
        _fingerprint,
        "find out how a kernel computes by probing it",
        "Probe MODULE:CALLABLE with products of [128, K] by [K, 128], and print what the answers give "
        "away. It is called as `fp8-oracle validate` calls it: in a worker process, with the contract's inputs by "
        "name, and out_dtype and out if it takes them. With --block-scaled it is one that applies block scales inside "
        "the instruction: one call tells which of the named readings it follows. Exit 2 when it raises, crashes, hangs "
        "or is no scaled product.",
    )
    command.add_argument("kernel", metavar="MODULE:CALLABLE")
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--contract", metavar="NAME", help="a product; see `fp8-oracle list`")
    text = "called with a, b [128, 256], a_scale, b_scale [128, 256 / block] (not swizzled) and out_dtype"
    what.add_argument("--block-scaled", choices=KINDS, help=text)
    for side in ("a", "b"):
        text = f"with --block-scaled mxf8f6f4: of {side} (default: {FORMATS[0]}); FP6 is one code a byte, FP4 packed"
        command.add_argument(f"--{side}-format", choices=FORMATS, help=text)
    command.add_argument("--adapter", **ADAPTER)
    command.add_argument("--k", type=int, default=512, help="with --contract: a multiple of 128 (default: 512)")
    text = "(default: bfloat16; with --block-scaled float32)"
    command.add_argument("--out-dtype", choices=sorted(OUT_DTYPES), help=text)
    command.add_argument("--device", **DEVICE)
    command.add_argument("--seed", type=common.whole(0), default=0)
    command.add_argument("--limit", **LIMITED)


def _fingerprint(arguments: argparse.Namespace) -> int:
    asked = {name: getattr(arguments, name) for name in ("adapter", "device", "limit")}
    if arguments.block_scaled is None:
        if arguments.a_format or arguments.b_format:
            raise OptionError("--a-format and --b-format belong to --block-scaled mxf8f6f4")
        asked |= {"k": arguments.k, "seed": arguments.seed, "out_dtype": OUT_DTYPES[arguments.out_dtype or "bfloat16"]}
        fingerprint: Fingerprint | BlockFingerprint = probe(arguments.kernel, arguments.contract, **asked)
    else:
        kind = Kind.of(arguments.block_scaled, arguments.a_format, arguments.b_format)
        out_dtype = OUT_DTYPES[arguments.out_dtype or "float32"]
        fingerprint = probe_block_scaled(arguments.kernel, kind, out_dtype=out_dtype, **asked)
    for line in fingerprint.lines():
        common.say(line)
    return 0
