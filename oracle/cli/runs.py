"""Commands about runs: ``verify`` makes one, ``report``, ``compare`` and ``history`` read what it wrote.

Every report is a pure function of the run's outcomes (:class:`oracle.report.outcome.Report`).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import platform
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from oracle.cli import common
from oracle.diagnosis.level import Explain, explaining
from oracle.errors import CaseError, OptionError, SubjectError, among, counted
from oracle.fixtures import files as fixtures
from oracle.harness import jobs, on_ray, provenance, recording, runner, subjects
from oracle.harness.isolated import HANGS, Host
from oracle.harness.jobs import Lost
from oracle.harness.process import interrupted_by_every_end
from oracle.harness.recording import CaptureWriter
from oracle.harness.report import LIMIT
from oracle.harness.runner import Filter, Item, Shard
from oracle.harness.subjects import Provider
from oracle.report import changes, history, ledger, merge, record
from oracle.report import console as words
from oracle.report.ledger import Entry
from oracle.report.outcome import Outcome, Report
from oracle.report.part import BRIEF, part_of
from oracle.report.record import Recorder, Run
from oracle.routines import cases, get, profiles, registered
from oracle.verdict.compare import Status, Verdict

Pool = Callable[..., Generator["Outcome | Lost"]]
MANY = 500  # items that take longer than the start of another process
MOST_JOBS = 4  # processes of a run that names no number: each takes most of a gigabyte


def add_verify(commands: common.Commands) -> None:
    command = common.add_command(
        commands,
        "verify",
        _verify,
        "judge every subject on this machine over the cases, and replay the captures",
        "Judge every subject on this machine over the cases, and replay the captured outputs. "
        "Exit 0 when all is as it must be, 1 when not, 130 when interrupted; then the reports hold what was judged.",
    )
    text = "which cases: one of each class (brief, the default), all that differ (quick), more shapes and seeds (full)"
    command.add_argument("--profile", choices=profiles.PROFILES, default=BRIEF, help=text)
    command.add_argument("--contract", metavar="NAME", help="only this routine")
    command.add_argument("--subject", metavar="NAME", help="only this subject (a backend, or a captured call)")
    command.add_argument("--case", metavar="ID", help="only this case or capture, as a failing row prints it")
    command.add_argument("--arch", metavar="NAME", help="only what ran or runs on this arch, as sm90")
    text = "also the subjects that this function returns; may be repeated"
    common.repeated(command, "--provider", "MODULE:CALLABLE", text)
    common.add_explain_level(command)
    command.add_argument("--list", action="store_true", help="print the ids that would run, and stop")
    command.add_argument("--fixtures", metavar="DIR", help="the fixtures folder; `none` replays nothing")
    text = (
        "processes that judge at the same time (default: 1, and for more than {} cases on CPUs as many as cores, up to "
    )
    text = text.format(MANY) + f"{MOST_JOBS}); what is written is the same with any number"
    command.add_argument("--jobs", type=common.whole(1), metavar="N", help=text)
    text = "judge on the machines of a Ray cluster, at ADDRESS as auto or host:6379 (default: the one Ray finds)"
    command.add_argument("--ray", nargs="?", const="", metavar="ADDRESS", help=text)
    text = "the i-th of n parts of all cases, the same on every machine; `fp8-oracle merge` joins their records"
    command.add_argument("--shard", metavar="I/N", help=text)
    text = "CPU threads of one case (default: 1 for a profile, whose cases are small; all of them for --case)"
    command.add_argument("--threads", type=int, metavar="N", help=text)
    text = "seconds that a subject may take for one case (default: %(default)g)"
    command.add_argument("--limit", type=float, default=LIMIT, metavar="S", help=text)
    text = "times that a subject may exceed --limit before it is not called again (default: %(default)d)"
    command.add_argument("--hangs", type=common.whole(1), default=HANGS, metavar="N", help=text)
    text = "begin no case after S seconds, one of each routine first; what was judged is reported, the status is 130"
    command.add_argument("--seconds", type=float, default=math.inf, metavar="S", help=text)
    text = "append every outcome to this file as soon as it is known"
    command.add_argument("--record", type=Path, metavar="FILE.jsonl", help=text)
    text = "continue --record; what the same code has judged is not run again"
    command.add_argument("--resume", action="store_true", help=text)
    text = "keep the judged outputs as a captures folder, for `fixtures adopt`"
    command.add_argument("--keep", type=Path, metavar="DIR", help=text)
    common.add_output_arguments(command)
    common.add_volume_arguments(command)


def add_report(commands: common.Commands) -> None:
    command = common.add_command(
        commands,
        "report",
        _report,
        "make any kind of report from the record of a run",
        "Read what --record or --json of a run wrote (verify, validate, judge, pytest), print it, and write it in "
        "other forms. The exit status is that of the run: 0 when all was as it must be, 1 when not, or when outcomes "
        "are missing.",
    )
    command.add_argument("record", type=Path, metavar="RECORD", help="a .jsonl record or a JSON report")
    command.add_argument("--contract", metavar="NAME", help="only this routine; * and ? match")
    command.add_argument("--subject", metavar="NAME", help="only this subject; * and ? match")
    command.add_argument("--failures", action="store_true", help="only what fails, known failures included")
    common.add_output_arguments(command)
    common.add_volume_arguments(command)


def add_merge(commands: common.Commands) -> None:
    command = common.add_command(
        commands,
        "merge",
        _merge,
        "join the records of the shards of a run",
        "Join records of one version and one selection, as the shards of a run, in any order. A case that was judged "
        "twice with different results, and a shard that is missing, are complaints. The exit status is that of the "
        "whole: 0 when all was as it must be, 1 when not.",
    )
    command.add_argument("records", type=Path, nargs="+", metavar="RECORD", help="a .jsonl record")
    command.add_argument("--record", type=Path, metavar="FILE.jsonl", help="write the whole here: a new file")
    common.add_output_arguments(command)
    common.add_volume_arguments(command)


def add_compare(commands: common.Commands) -> None:
    command = common.add_command(
        commands,
        "compare",
        _compare,
        "what broke, healed and moved between two runs",
        "Compare two runs, by records or JSON reports: what broke, what healed, where the numerics or the "
        "margin is another. Exit 1 when something broke, a new case fails, or one of the runs is incomplete.",
    )
    command.add_argument("old", type=Path, metavar="OLD")
    command.add_argument("new", type=Path, metavar="NEW")
    text = "compare this subject of the old run with that one of the new run, and nothing else"
    common.repeated(command, "--pair", "OLD=NEW", text)
    common.add_json(command, "the changes")
    text = "write the changes as the comment of a pull request; `-` is the standard output"
    command.add_argument("--markdown", metavar="FILE", help=text)
    text = "with --markdown: its heading, and in its hidden first line what tells it from others (default: %(default)s)"
    command.add_argument("--title", default=changes.TITLE, metavar="NAME", help=text)
    common.add_volume_arguments(command)


def add_history(commands: common.Commands) -> None:
    command = commands.add_parser("history", help="keep many runs in one file, and plot how they went")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    adding = common.add_command(actions, "add", _history_add, "add a run; one that is there already is not added again")
    adding.add_argument("record", type=Path, metavar="RECORD", help="a .jsonl record or a JSON report")
    adding.add_argument("--label", help="a name for the run, as a commit or a library version")
    show = common.add_command(actions, "show", _history_show, "one row for each run, and sparklines")
    show.add_argument("--contract", metavar="NAME", help="count this routine only")
    show.add_argument("--subject", metavar="NAME", help="count this subject only")
    show.add_argument("--last", type=int, metavar="N", help="only the last N runs")
    show.add_argument("--html", metavar="FILE", help="write one self-contained page with plots")
    for action in (adding, show):
        action.add_argument("--db", type=Path, required=True, metavar="FILE", help="the history, an SQLite file")


def _read(path: Path) -> Report:
    """The report in a record or JSON file; what is wrong with the file goes to the standard error."""
    report, notes = record.read_report(path)
    for note in notes:
        common.say(f"fp8-oracle: {note}", stderr=True)
    return report


# --- verify -------------------------------------------------------------------------------------------------


def _verify(arguments: argparse.Namespace) -> int:
    if arguments.contract is not None:
        get(arguments.contract)
    if arguments.resume and arguments.record is None:
        raise OptionError("--resume continues a record; name it with --record FILE.jsonl")
    writer = None
    if arguments.keep is not None:
        if arguments.resume:
            raise OptionError("--keep needs every output, and --resume skips what its record holds; use one of them")
        if (arguments.jobs or 1) > 1 or arguments.ray is not None:
            raise OptionError("--keep collects outputs in one process; use it without --jobs and --ray")
        recording.require_empty(arguments.keep)
        writer = CaptureWriter()
    configured = () if arguments.subject or arguments.case else getattr(arguments, "subjects", ())
    case = arguments.case
    if case is not None and not case.startswith("captures/"):
        case = str(cases.parse(case))  # as every id is spelled
    wanted = Filter(arguments.contract, arguments.subject, case, configured, arguments.arch)
    shard = None if arguments.shard is None else Shard.parse(arguments.shard)
    folder = None if arguments.fixtures == "none" else fixtures.folder(arguments.fixtures)
    threads_asked = arguments.threads
    if threads_asked is not None and threads_asked < 1:
        raise OptionError(f"--threads {threads_asked}: at least 1")
    if not 0 < arguments.limit < math.inf:
        raise OptionError(f"--limit {arguments.limit:g}: give a positive number of seconds")
    if not arguments.seconds > 0:
        raise OptionError(f"--seconds {arguments.seconds:g}: give a positive number of seconds")
    until, left = time.monotonic() + arguments.seconds, dict[int, Outcome | Lost]()
    # a profile's cases are so small that several threads would wait
    threads = min(threads_asked or 1, os.cpu_count() or 1) if threads_asked is not None or wanted.id is None else None
    points = subjects.points(arguments.provider)
    # The host comes first: its processes must inherit nothing that was computed here.
    named_in, hangs = _folder(arguments.provider), arguments.hangs
    with (
        tempfile.TemporaryDirectory() as told,
        Host(points, limit=arguments.limit, threads=threads, folder=named_in, hangs=hangs, told=Path(told)) as host,
    ):
        if threads is not None:
            torch.set_num_threads(threads)
        providers = host.providers()
        named = providers[len(points) - len(arguments.provider) :]
        for problem in (p.problem for p in named if p.problem is not None):
            raise SubjectError(problem)
        items = _items(wanted, folder, arguments.profile, providers, writer, shard, _flags(arguments, providers))
        if arguments.list:
            for item in items:
                common.say(f"{item.id}\t{item.subject}")
            return 0
        count = _processes(arguments, items, providers)
        here, each = count == 1, jobs.divided(count, threads_asked or 1)
        versions = None if arguments.ray is None else provenance.versions(providers)
        asked = (
            wanted,
            folder,
            arguments.profile,
            arguments.provider,
            shard,
            arguments.limit,
            hangs,
            told,
            each,
            arguments.explain,
            versions,
        )
        make = partial(_here, items) if here else partial(_apart, *asked)

        def pool(new: Sequence[int], started: Callable[[int], None]) -> Generator[Outcome | Lost]:
            return jobs.in_order(
                make,
                new,
                jobs=count,
                threads=each,
                started=started,
                together=_together(items, new, each=until < math.inf),
                meanwhile=lambda number: items[number].outcome(),
                until=until,
                left=left,
            )

        if arguments.ray is not None:
            if not here:
                raise OptionError(f"--jobs {arguments.jobs} divides one machine, --ray schedules by itself; use one")
            devices = {(s.contract, s.name, s.arch): s.device for p in providers for s in p.subjects}

            def gpus(number: int) -> bool:
                item = items[number]
                return devices.get((item.contract, item.subject, item.arch), "cpu").startswith("cuda")

            def lost(number: int, cause: str) -> None:
                item = items[number]
                common.say(f"fp8-oracle: {item.id} [{item.subject}] is run again: {cause}", stderr=True)

            make = partial(_apart, *asked)
            address = arguments.ray or None
            pool = partial(on_ray.in_order, make, address=address, threads=each, gpus=gpus, lost=lost)
        with explaining(arguments.explain):
            return _run(arguments, wanted, folder, providers, items, writer, pool, left, until)


def _processes(arguments: argparse.Namespace, items: Sequence[Item], providers: Sequence[Provider]) -> int:
    """How many processes judge: those asked for, else as many as a run of many items on CPUs is worth."""
    if arguments.jobs is not None:
        return int(arguments.jobs)
    alone = arguments.ray is not None or arguments.keep is not None or len(items) <= MANY
    on_cpu = all(s.device == "cpu" or s.why_not() is not None for p in providers for s in p.subjects)
    return 1 if alone or not on_cpu else min(MOST_JOBS, jobs.cores())


def _together(items: Sequence[Item], numbers: Iterable[int], *, each: bool = False) -> list[list[int]]:
    """The items in the order in which processes take them, those of one call together. Sums of known arithmetic come
    first: the process that takes the first ones compiles the kernels for them, if they are not, while others take the
    last ones. ``each``: the first call of every contract comes before the second one of any."""
    calls: dict[tuple[str, str], list[int]] = {}
    for number in numbers:
        item = items[number]
        calls.setdefault((item.contract, item.call or f"{number}"), []).append(number)
    known, seen, ranks = registered(), Counter[str](), dict[int, int]()
    for group in calls.values():
        seen[items[group[0]].contract] += 1
        ranks[group[0]] = seen[items[group[0]].contract] if each else 0

    def place(group: Sequence[int]) -> tuple[int, bool]:
        return ranks[group[0]], not getattr(known.get(items[group[0]].contract), "takes_numerics", 0)

    return sorted(calls.values(), key=place)


def _folder(named: Sequence[str]) -> str | None:
    """The folder in which providers that the command line names are looked for first."""
    return os.getcwd() if named else None


def _flags(arguments: argparse.Namespace, providers: Sequence[Provider]) -> Callable[[Item], str]:
    """What the command that repeats an item says beside its case and subject."""
    asked = (
        ("threads", arguments.threads),
        ("limit", None if arguments.limit == LIMIT else f"{arguments.limit:g}"),
        ("explain", None if arguments.explain == Explain.QUICK else arguments.explain),
    )
    always = [f"--{name} {shlex.quote(str(value))}" for name, value in asked if value is not None]
    named: dict[tuple[str, str, str], str] = {}
    arches: dict[tuple[str, str], set[str]] = {}
    for provider in providers:
        for s in provider.subjects:
            arches.setdefault((s.contract, s.name), set()).add(s.arch)
            if provider.target in arguments.provider:
                named[s.contract, s.name, s.arch] = provider.target

    def flags(item: Item) -> str:
        target = named.get((item.contract, item.subject, item.arch))
        provider = [] if target is None else [f"--provider {shlex.quote(target)}"]
        if item.id.startswith("captures/"):
            folder = [] if arguments.fixtures is None else [f"--fixtures {shlex.quote(str(arguments.fixtures))}"]
            return " ".join([*folder, *always])
        several = len(arches.get((item.contract, item.subject), ())) > 1
        return " ".join([*([f"--arch {item.arch}"] if several else []), *provider, *always])

    return flags


def _run(
    arguments: argparse.Namespace,
    wanted: Filter,
    folder: Path | None,
    providers: Sequence[Provider],
    items: Sequence[Item],
    writer: CaptureWriter | None,
    pool: Pool,
    left: Mapping[int, Outcome | Lost],
    until: float,
) -> int:
    """Judge the items, and report; the exit status."""
    entries = ledger.load(folder / ledger.FILE) if folder is not None else []
    screen = common.screen_of(arguments)
    asked_for = {
        "profile": None if wanted.id else arguments.profile,
        "contract": wanted.contract,
        "subject": wanted.subject or ", ".join(wanted.subjects),
        "case": wanted.id,
        "arch": wanted.arch,
        "fixtures": "none" if folder is None else None,
        "shard": arguments.shard and str(Shard.parse(arguments.shard)),
    }
    selection = {name: value for name, value in asked_for.items() if value}
    started = datetime.now(UTC).isoformat(timespec="seconds")
    # The first line of a record: the machine, the versions, and what was asked for.
    about = Run(started, provenance.machine(), provenance.versions(providers), selection, len(items))
    recorder = None if arguments.record is None else record.start(arguments.record, about, resume=arguments.resume)
    for note in () if recorder is None else recorder.notes:
        common.say(f"fp8-oracle: {note}", stderr=True)
    keys = [record.key_of(item.id, item.subject, item.arch, item.stamp, about) for item in items]
    # An id without a slash is no case but a fact about this machine, which is found again.
    finished = {} if recorder is None else recorder.finished
    earlier = [finished.get(key) if "/" in item.id else None for item, key in zip(items, keys, strict=True)]
    start = time.perf_counter() - sum(o.seconds for o in earlier if o is not None)
    outcomes = _judge(items, keys, earlier, screen, entries, recorder, pool, left, verbose=arguments.verbose)
    unfinished = len(items) - len(outcomes)
    marked, complaints = ledger.apply(
        outcomes, entries, whole=not wanted and arguments.shard is None and folder is not None and not unfinished
    )
    seconds = time.perf_counter() - start
    part = part_of(selection.get("profile"), marked) if arguments.shard is None else ""
    report = Report(marked, complaints, about.machine, seconds, about.versions, about.started, unfinished, part=part)
    if recorder is not None:
        recorder.end(complaints, seconds, unfinished)
    words.print_report(report, screen, quiet=arguments.quiet)
    common.write_reports(report, arguments)
    if writer is not None:
        asked = [f"--{name} {value}" for name, value in about.selection.items()]
        asked += [f"--provider {target}" for target in arguments.provider]
        command = " ".join(["fp8-oracle", "verify", *asked, "--keep DIR"])
        facts = recording.provenance_of(about.machine, about.versions, command)
        for line in writer.write(arguments.keep, provenance=facts):
            screen.print(line, soft_wrap=True)
    if unfinished:
        late = f"not judged in {arguments.seconds:g} s: {counted(unfinished, 'case')}; --record with --resume goes on"
        print(f"fp8-oracle: {late if time.monotonic() >= until else 'interrupted'}", file=sys.stderr)
        return 130
    return 0 if report.ok else 1


def _items(
    wanted: Filter,
    folder: Path | None,
    profile: str,
    providers: Sequence[Provider],
    writer: CaptureWriter | None,
    shard: Shard | None,
    flags: Callable[[Item], str] = lambda item: "",
) -> list[Item]:
    """What is wanted of the captures and of the subjects here; of a ``shard``, which may be empty, its part."""
    items = [replace(item, flags=flags(item)) for item in _wanted_items(wanted, folder, profile, providers, writer)]
    return items if shard is None else [item for item in items if shard.holds(item)]


def _wanted_items(
    wanted: Filter, folder: Path | None, profile: str, providers: Sequence[Provider], writer: CaptureWriter | None
) -> list[Item]:
    whole = folder is not None and profile == BRIEF and not wanted  # such a run explains nothing that is documented
    entries = ledger.load(folder / ledger.FILE) if whole and folder is not None else []
    replayed = [] if folder is None else runner.replay(folder / "captures", partial(ledger.documents, entries))
    if wanted.id is not None and wanted.id.startswith("captures/"):
        items = replayed
    else:
        available = [subject for provider in providers for subject in provider.subjects]
        one = None if wanted.id is None else [cases.parse(wanted.id)]
        keep = None if writer is None else writer.add
        items = runner.live(available, profile=profile, cases=one, keep=keep) + replayed
        if wanted.id is None and wanted.arch is None:
            items = runner.broken(providers) + items
    chosen = [item for item in items if wanted.keeps(item)]
    if wanted.id is None and wanted.subject is None and not wanted.subjects and wanted.arch is None:
        contracts = list(registered()) if wanted.contract is None else [wanted.contract]
        chosen += runner.untested(chosen, contracts)
    if chosen:
        return chosen
    if wanted.subject is not None and wanted.subject not in {item.subject for item in items}:
        known = sorted({item.subject for item in items})
        text = among(wanted.subject, known, see="fp8-oracle list subjects")
        raise CaseError(f"no subject {wanted.subject!r} on this machine; {text}")
    arches = sorted({item.arch for item in items} - {"-"})
    if wanted.arch is not None and wanted.arch not in arches:
        raise CaseError(f"no arch {wanted.arch!r} in what can be run here; {among(wanted.arch, arches)}")
    if wanted.id is not None and wanted.id.startswith("captures/") and wanted.id not in {i.id for i in items}:
        text = among(wanted.id, (item.id for item in items), see="fp8-oracle verify --list")
        raise CaseError(f"no capture {wanted.id!r}; {text}")
    asked = [str(part) for part in (wanted.id, wanted.contract, wanted.subject, wanted.arch) if part is not None]
    raise CaseError(
        f"nothing to run for {', '.join(asked)} (arches: {', '.join(arches)}); `fp8-oracle verify --list` prints "
        "every id"
    )


def _judge(
    items: Sequence[Item],
    keys: Sequence[str],
    earlier: Sequence[Outcome | None],
    screen: Console,
    entries: Sequence[Entry],
    recorder: Recorder | None,
    pool: Pool,
    left: Mapping[int, Outcome | Lost],
    *,
    verbose: bool,
) -> list[Outcome]:
    """The outcomes in order, fewer than items when interrupted. Each is recorded when all before it are; where the
    run ends early, what other processes had judged by then (``left``) follows."""
    done: list[Outcome] = []

    def judged(number: int, outcome: Outcome) -> None:
        ((outcome,), _) = ledger.apply([outcome], entries, whole=False)
        if recorder is not None and earlier[number] is None:
            recorder.append(keys[number], outcome)
        if verbose:
            screen.print(words.line(outcome), soft_wrap=True)
        done.append(outcome)

    with contextlib.ExitStack() as stack:
        stack.enter_context(interrupted_by_every_end())
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))  # reported as unfinished, with exit status 130
        bar = stack.enter_context(common.Bar(screen, len(items)))

        def started(number: int) -> None:
            failing, item = sum(o.fails for o in done), items[number]
            so_far = f"[bold red]{failing} failing[/] " if failing else ""
            bar.runs(f"{so_far}{item.contract} \\[{item.subject}]")

        new = [number for number, result in enumerate(earlier) if result is None]
        running = stack.enter_context(contextlib.closing(pool(new, started=started)))
        outcomes = (_told(items[number], text) for number, text in zip(new, running, strict=False))
        for number, result in enumerate(earlier):
            outcome = next(outcomes, None) if result is None else replace(result, known=None)
            if outcome is None:
                break  # the time is up
            judged(number, outcome)
            bar.advance()
    for number, result in list(enumerate(earlier))[len(done) :]:
        if number in left or result is not None:
            judged(number, replace(result, known=None) if result else _told(items[number], left[number]))
    return done


@contextlib.contextmanager
def _here(items: Sequence[Item]) -> Iterator[Callable[[int], Outcome]]:
    """Judges by number in this process."""
    yield lambda number: items[number].outcome()


@contextlib.contextmanager
def _apart(
    wanted: Filter,
    folder: Path | None,
    profile: str,
    named: Sequence[str],
    shard: Shard | None,
    limit: float,
    hangs: int,
    told: str,
    threads: int,
    explain: str,
    versions: Mapping[str, str] | None,
) -> Iterator[Callable[[int], Outcome]]:
    """Judges by number, in a process of its own, what :func:`_items` lists there as here."""
    points = subjects.points(named)
    beside = Path(told)
    shared = beside if beside.is_dir() else None  # on another machine of a cluster there is no such folder
    host_of_points = Host(points, limit=limit, threads=threads, folder=_folder(named), hangs=hangs, told=shared)
    with host_of_points as host, explaining(explain):
        providers = host.providers()
        mine = versions if versions is None else provenance.versions(providers)
        if versions != mine:
            raise SubjectError(f"{_difference(versions or {}, mine or {})}; install the same on every machine")
        items = _items(wanted, folder, profile, providers, None, shard)
        yield lambda number: items[number].outcome()


def _difference(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    name = next(n for n in sorted({*here, *there}) if here.get(n) != there.get(n))
    return f"{name} is {there.get(name, 'none')} on {platform.node()}, {here.get(name, 'none')} where the run began"


def _told(item: Item, said: Outcome | Lost) -> Outcome:
    """The outcome of an item that another process judged."""
    if isinstance(said, Lost):
        verdict = Verdict(Status.CRASHED, f"CRASHED: {said.cause}", reason=said.cause)
        return item.told(verdict)
    if (said.id, said.subject, said.arch) != (item.id, item.subject, item.arch):
        raise SubjectError(
            f"a process of --jobs lists {said.id} [{said.subject}] where this one lists {item.id} "
            f"[{item.subject}]: a provider gives other subjects from time to time; run with --jobs 1"
        )
    return replace(said, command=item.told(said.verdict).command)


# --- report, compare, history -------------------------------------------------------------------------------


def _report(arguments: argparse.Namespace) -> int:
    whole = _read(arguments.record)
    filtered = tuple(
        o
        for o in whole.outcomes
        if fnmatchcase(o.contract, arguments.contract or "*")
        and fnmatchcase(o.subject, arguments.subject or "*")
        and (o.status.is_failure or not arguments.failures)
    )
    if whole.outcomes and not filtered and not arguments.failures:
        for what in ("contract", "subject"):
            known = sorted({getattr(o, what) for o in whole.outcomes})
            if (asked := getattr(arguments, what)) is not None and not any(fnmatchcase(name, asked) for name in known):
                raise CaseError(f"{arguments.record}: holds no {what} {asked!r}; {among(asked, known)}")
        raise CaseError(f"{arguments.record}: holds nothing of {arguments.contract} by {arguments.subject}")
    # with --failures, where nothing fails, the whole is good
    report = replace(whole, outcomes=filtered) if filtered else whole
    quiet = arguments.quiet or not filtered
    words.print_report(report, common.screen_of(arguments), quiet=quiet, verbose=arguments.verbose)
    common.write_reports(report, arguments)
    return 0 if whole.ok else 1


def _merge(arguments: argparse.Namespace) -> int:
    target = arguments.record
    whole = merge.merged(arguments.records)
    for note in whole.notes:
        common.say(f"fp8-oracle: {note}", stderr=True)
    if target is not None:
        if target.exists():
            raise OptionError(f"{target} exists; name another file")
        fixtures.write_bytes(target, merge.to_bytes(whole))
    report = whole.report()
    words.print_report(report, common.screen_of(arguments), quiet=arguments.quiet, verbose=arguments.verbose)
    common.write_reports(report, arguments)
    return 0 if report.ok else 1


def _compare(arguments: argparse.Namespace) -> int:
    old, new = _read(arguments.old), _read(arguments.new)
    renamed = common.pairs(arguments.pair, "--pair") or None
    for names, supplied, report in (
        (renamed or (), arguments.old, old),
        ((renamed or {}).values(), arguments.new, new),
    ):
        subjects = {o.subject for o in report.outcomes}
        if unknown := [name for name in names if name not in subjects]:
            raise OptionError(
                f"--pair: {supplied} has no subject {unknown[0]!r}; {among(unknown[0], sorted(subjects))}"
            )
    comparison = changes.between(old, new, renamed=renamed)
    comment = None if arguments.markdown is None else changes.to_markdown(comparison, arguments.title)
    screen = common.console(stderr="-" in (arguments.json, arguments.markdown))
    changes.print_comparison(comparison, screen, verbose=arguments.verbose, quiet=arguments.quiet)
    common.write_json(arguments.json, comparison.to_json())
    if comment is not None:
        common.write_text(arguments.markdown, comment)
    return 0 if comparison.ok else 1


def _history_add(arguments: argparse.Namespace) -> int:
    number, new = history.add(arguments.db, _read(arguments.record), label=arguments.label or "")
    print(f"{arguments.db}: {'added as' if new else 'is already'} run {number}")
    return 0


def _history_show(arguments: argparse.Namespace) -> int:
    if arguments.last is not None and arguments.last < 1:
        raise OptionError(f"--last {arguments.last}: at least 1")
    points = history.points(arguments.db, contract=arguments.contract, subject=arguments.subject, last=arguments.last)
    if not points:
        raise CaseError(f"{arguments.db}: holds no run; add one with `fp8-oracle history add RECORD --db FILE`")
    history.print_history(points, common.console())
    if arguments.html is not None:
        what = " ".join(name for name in (arguments.contract, arguments.subject) if name) or "every routine and subject"
        fixtures.write_bytes(arguments.html, history.to_html(points, what).encode())
    return 0
