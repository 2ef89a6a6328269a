"""``fp8-oracle verify``: judge every subject of this machine over the cases, and replay the captures."""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from oracle import cases, fixtures, ledger, profiles, runner, subjects
from oracle.cli.common import Commands, console
from oracle.contracts import get, registered
from oracle.errors import CaseError, OptionError
from oracle.outcome import Outcome, Report
from oracle.report import console as words
from oracle.report.files import to_json, to_junit
from oracle.runner import Filter, Item


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "verify",
        help="judge every subject on this machine over the cases, and replay the captures",
        description="Judge every subject on this machine over the cases, and replay the captured outputs. "
        "Exit 0 when all is as it must be, 1 when not.",
    )
    command.add_argument("--profile", choices=profiles.PROFILES, default="quick")
    command.add_argument("--contract", metavar="NAME", help="only this routine")
    command.add_argument("--subject", metavar="NAME", help="only this subject (a backend, or a captured call)")
    command.add_argument("--case", metavar="ID", help="only this case or capture, as a failing row prints it")
    command.add_argument("--list", action="store_true", help="print the ids that would run, and stop")
    command.add_argument("--fixtures", metavar="DIR", help="the fixtures folder; `none` replays nothing")
    command.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads of one case (default: 1 for a profile, whose cases are small; all of them for --case)",
    )
    command.add_argument("--json", metavar="FILE", help="write the report as JSON; `-` is the standard output")
    command.add_argument("--junit", metavar="FILE", help="write the report as JUnit XML")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.contract is not None:
        get(arguments.contract)
    wanted = Filter(arguments.contract, arguments.subject, _canonical(arguments.case))
    folder = None if arguments.fixtures == "none" else fixtures.folder(arguments.fixtures)
    items = _items(wanted, folder, arguments.profile)
    if arguments.list:
        for item in items:
            print(f"{item.id}\t{item.subject}")
        return 0
    _use_threads(arguments.threads, wanted)
    screen = console(stderr=arguments.json == "-")
    start = time.perf_counter()
    outcomes = _run(items, screen)
    entries = ledger.load(folder / ledger.FILE) if folder is not None else []
    whole = not wanted and folder is not None
    marked, complaints = ledger.apply(outcomes, entries, whole=whole)
    report = Report(marked, complaints, _machine(), time.perf_counter() - start)
    words.print_report(report, screen)
    _write(report, arguments.json, arguments.junit)
    return 0 if report.ok else 1


def _use_threads(given: int | None, wanted: Filter) -> None:
    """Threads of a small case wait for each other longer than they compute, most of all on a busy machine."""
    if given is not None and given < 1:
        raise OptionError(f"--threads {given}: at least 1")
    if given is not None or wanted.id is None:
        torch.set_num_threads(given or 1)


def _canonical(case: str | None) -> str | None:
    return case if case is None or case.startswith("captures/") else str(cases.parse(case))


def _items(wanted: Filter, folder: Path | None, profile: str) -> list[Item]:
    replayed = [] if folder is None else runner.replay(folder / "captures")
    if wanted.id is not None and wanted.id.startswith("captures/"):
        items = replayed
    else:
        providers = subjects.providers()
        available = [subject for provider in providers for subject in provider.subjects]
        one = None if wanted.id is None else [cases.parse(wanted.id)]
        items = runner.live(available, profile=profile, cases=one) + replayed
        if wanted.id is None:
            items = runner.broken(providers) + items
    kept = [item for item in items if wanted.keeps(item)]
    if wanted.id is None and wanted.subject is None:
        contracts = list(registered()) if wanted.contract is None else [wanted.contract]
        kept += runner.untested(kept, contracts)
    if not kept:
        raise CaseError(_nothing(wanted, items))
    return kept


def _nothing(wanted: Filter, items: Sequence[Item]) -> str:
    if wanted.subject is not None and wanted.subject not in {item.subject for item in items}:
        known = ", ".join(sorted({item.subject for item in items})) or "none; is the package installed?"
        return f"no subject {wanted.subject!r} on this machine; there are: {known}"
    return f"nothing to run for {wanted.id or wanted.contract!r}; `fp8-oracle verify --list` prints every id"


def _run(items: Sequence[Item], screen: Console) -> list[Outcome]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    outcomes: list[Outcome] = []
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task("", total=len(items))
        for item in items:
            progress.update(task, description=f"{item.contract} [{item.subject}]")
            outcomes.append(item.outcome())
            progress.advance(task)
    return outcomes


def _write(report: Report, json_file: str | None, junit_file: str | None) -> None:
    if json_file == "-":
        print(to_json(report), end="")
    elif json_file is not None:
        fixtures.write_bytes(json_file, to_json(report).encode())
    if junit_file is not None:
        fixtures.write_bytes(junit_file, to_junit(report).encode())


def _machine() -> dict[str, str]:
    facts = {
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }
    for package in ("torch", "numpy", "numba"):
        facts[package] = version(package)
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts
