"""``fp8-oracle verify``: judge every subject of this machine over the cases, and replay the captures."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from oracle.cli.common import Commands, add_volume_arguments, console
from oracle.cli.outputs import add_output_arguments, takes_standard_output, write
from oracle.errors import CaseError, OptionError
from oracle.fixtures import files as fixtures
from oracle.harness import keeping, provenance, runner, subjects
from oracle.harness.keeping import Keeper
from oracle.harness.runner import Filter, Item
from oracle.harness.subjects import Provider
from oracle.report import console as words
from oracle.report import ledger, record
from oracle.report.ledger import Entry
from oracle.report.outcome import Outcome, Report
from oracle.report.record import Recorder, Run
from oracle.routines import cases, get, profiles, registered


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "verify",
        help="judge every subject on this machine over the cases, and replay the captures",
        description="Judge every subject on this machine over the cases, and replay the captured outputs. "
        "Exit 0 when all is as it must be, 1 when not, 130 when interrupted; then the reports hold what was judged.",
    )
    command.add_argument("--profile", choices=profiles.PROFILES, default="quick")
    command.add_argument("--contract", metavar="NAME", help="only this routine")
    command.add_argument("--subject", metavar="NAME", help="only this subject (a backend, or a captured call)")
    command.add_argument("--case", metavar="ID", help="only this case or capture, as a failing row prints it")
    command.add_argument("--arch", metavar="NAME", help="only what ran or runs on this arch, as sm90")
    command.add_argument(
        "--provider",
        action="append",
        default=[],
        metavar="MODULE:CALLABLE",
        help="also the subjects that this function returns; may be repeated",
    )
    command.add_argument("--list", action="store_true", help="print the ids that would run, and stop")
    command.add_argument("--fixtures", metavar="DIR", help="the fixtures folder; `none` replays nothing")
    command.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads of one case (default: 1 for a profile, whose cases are small; all of them for --case)",
    )
    command.add_argument(
        "--record", type=Path, metavar="FILE.jsonl", help="append every outcome to this file as soon as it is known"
    )
    command.add_argument("--resume", action="store_true", help="continue --record; what it holds is not run again")
    command.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the judged outputs as a captures folder, for `fixtures adopt`"
    )
    add_output_arguments(command)
    add_volume_arguments(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.contract is not None:
        get(arguments.contract)
    if arguments.resume and arguments.record is None:
        raise OptionError("--resume continues a record; name it with --record FILE.jsonl")
    keeper = _keeper(arguments)
    configured = () if arguments.subject or arguments.case else getattr(arguments, "subjects", ())
    wanted = Filter(arguments.contract, arguments.subject, _canonical(arguments.case), configured, arguments.arch)
    folder = None if arguments.fixtures == "none" else fixtures.folder(arguments.fixtures)
    providers = subjects.providers() + [subjects.provider(target) for target in arguments.provider]
    items = _items(wanted, folder, arguments.profile, providers, keeper)
    if arguments.list:
        for item in items:
            print(f"{item.id}\t{item.subject}")
        return 0
    _use_threads(arguments.threads, wanted)
    entries = ledger.load(folder / ledger.FILE) if folder is not None else []
    screen = console(stderr=takes_standard_output(arguments))
    about = _about(wanted, arguments, folder, providers, len(items))
    recorder = None if arguments.record is None else record.start(arguments.record, about, resume=arguments.resume)
    keys = [record.key_of(item.id, item.subject, item.arch, item.stamp, about) for item in items]
    earlier = [_earlier(item, key, recorder) for item, key in zip(items, keys, strict=True)]
    start = time.perf_counter() - sum(o.seconds for o in earlier if o is not None)
    outcomes = _judge(items, keys, earlier, screen, entries, recorder, verbose=arguments.verbose)
    unfinished = len(items) - len(outcomes)
    marked, complaints = ledger.apply(
        outcomes, entries, whole=not wanted and folder is not None and not unfinished
    )
    report = Report(
        marked, complaints, about.machine, time.perf_counter() - start, about.versions, about.started, unfinished
    )
    if recorder is not None:
        recorder.end(complaints, report.seconds, unfinished)
    words.print_report(report, screen, quiet=arguments.quiet)
    write(report, arguments)
    if keeper is not None:
        for line in keeper.write(arguments.keep, provenance=_provenance(about, arguments)):
            screen.print(line, soft_wrap=True)
    if unfinished:
        print("fp8-oracle: interrupted", file=sys.stderr)
        return 130
    return 0 if report.ok else 1


def _keeper(arguments: argparse.Namespace) -> Keeper | None:
    if arguments.keep is None:
        return None
    if arguments.resume:
        raise OptionError("--keep needs every output, and --resume skips what its record holds; use one of them")
    keeping.require_empty(arguments.keep)
    return Keeper()


def _provenance(about: Run, arguments: argparse.Namespace) -> dict[str, str]:
    words = ["verify", *(f"--{name} {value}" for name, value in about.selection.items())]
    words += [f"--provider {target}" for target in arguments.provider]
    return keeping.provenance_of(about.machine, about.versions, " ".join(["fp8-oracle", *words, "--keep DIR"]))


def _use_threads(given: int | None, wanted: Filter) -> None:
    """Threads of a small case wait for each other longer than they compute, most of all on a busy machine."""
    if given is not None and given < 1:
        raise OptionError(f"--threads {given}: at least 1")
    if given is not None or wanted.id is None:
        torch.set_num_threads(min(given or 1, os.cpu_count() or 1))


def _canonical(case: str | None) -> str | None:
    return case if case is None or case.startswith("captures/") else str(cases.parse(case))


def _about(
    wanted: Filter, arguments: argparse.Namespace, folder: Path | None, providers: Sequence[Provider], planned: int
) -> Run:
    """The machine, the versions, and what was asked for."""
    asked = {
        "profile": None if wanted.id else arguments.profile,
        "contract": wanted.contract,
        "subject": wanted.subject or ", ".join(wanted.subjects),
        "case": wanted.id,
        "arch": wanted.arch,
        "fixtures": "none" if folder is None else None,
    }
    selection = {name: value for name, value in asked.items() if value}
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return Run(started, provenance.machine(), provenance.versions(providers), selection, planned)


def _items(
    wanted: Filter, folder: Path | None, profile: str, providers: Sequence[Provider], keeper: Keeper | None
) -> list[Item]:
    replayed = [] if folder is None else runner.replay(folder / "captures")
    if wanted.id is not None and wanted.id.startswith("captures/"):
        items = replayed
    else:
        available = [subject for provider in providers for subject in provider.subjects]
        one = None if wanted.id is None else [cases.parse(wanted.id)]
        keep = None if keeper is None else keeper.keep
        items = runner.live(available, profile=profile, cases=one, keep=keep) + replayed
        if wanted.id is None and wanted.arch is None:
            items = runner.broken(providers) + items
    kept = [item for item in items if wanted.keeps(item)]
    if wanted.id is None and wanted.subject is None and not wanted.subjects and wanted.arch is None:
        contracts = list(registered()) if wanted.contract is None else [wanted.contract]
        kept += runner.untested(kept, contracts)
    if not kept:
        raise CaseError(_nothing(wanted, items))
    return kept


def _nothing(wanted: Filter, items: Sequence[Item]) -> str:
    if wanted.subject is not None and wanted.subject not in {item.subject for item in items}:
        known = ", ".join(sorted({item.subject for item in items})) or "none; is the package installed?"
        return f"no subject {wanted.subject!r} on this machine; there are: {known}"
    asked = [str(part) for part in (wanted.id, wanted.contract, wanted.subject, wanted.arch) if part is not None]
    arches = ", ".join(sorted({item.arch for item in items} - {"-"}))
    return f"nothing to run for {', '.join(asked)} (arches: {arches}); `fp8-oracle verify --list` prints every id"


def _judge(
    items: Sequence[Item],
    keys: Sequence[str],
    earlier: Sequence[Outcome | None],
    screen: Console,
    entries: Sequence[Entry],
    recorder: Recorder | None,
    *,
    verbose: bool,
) -> list[Outcome]:
    """The outcomes in order, as many as there are when somebody interrupts; each is recorded before the next."""
    if recorder is not None:
        for note in recorder.notes:
            print(f"fp8-oracle: {note}", file=sys.stderr)
    done: list[Outcome] = []

    def one(number: int) -> Outcome:
        found = earlier[number]
        outcome = items[number].outcome() if found is None else replace(found, known=None)
        ((outcome,), _) = ledger.apply([outcome], entries, whole=False)
        if recorder is not None and found is None:
            recorder.keep(keys[number], outcome)
        if verbose:
            screen.print(words.line(outcome), soft_wrap=True)
        return outcome

    # What is done is reported as an unfinished run, with exit status 130.
    with contextlib.suppress(KeyboardInterrupt):
        _each(items, screen, one, done)
    return done


def _earlier(item: Item, key: str, recorder: Recorder | None) -> Outcome | None:
    """What a resumed record holds; an id without a slash is no case but a remark on this machine, made anew."""
    return recorder.finished.get(key) if recorder is not None and "/" in item.id else None


def _each(items: Sequence[Item], screen: Console, one: Callable[[int], Outcome], done: list[Outcome]) -> None:
    """Judge item after item into ``done``, with a bar where somebody looks."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task("", total=len(items))
        failing = 0
        for number, item in enumerate(items):
            so_far = f"[bold red]{failing} failing[/] " if failing else ""
            progress.update(task, description=f"{so_far}{item.contract} \\[{item.subject}]")
            done.append(one(number))
            failing += done[-1].fails
            progress.advance(task)
