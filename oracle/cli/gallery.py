"""``fp8-oracle gallery``: kernels of other projects, each validated under its contract, as one record and one page."""

from __future__ import annotations

import argparse
import math
import sys
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from rich.table import Table
from rich.text import Text

from oracle.cli.common import Commands, add_command, console, repeated, say, whole, write_json
from oracle.errors import OptionError
from oracle.fixtures import files as fixtures
from oracle.harness import gallery, provenance
from oracle.harness.validation import PROFILES
from oracle.report.gallery import Run, beside, page, read, stored, verdicts_beside

STORED = Path("fixtures/gallery/gallery.json")
ROWS, PAGE = "gallery.json", "gallery.md"
STYLES = {"CONFORMS": "green", "FAILED": "bold red", "CRASHED": "bold red", "UNTESTED": "yellow", "UNSUPPORTED": "dim"}


def add(commands: Commands) -> None:
    command = add_command(
        commands,
        "gallery",
        lambda arguments: 2,
        "kernels of other projects, each judged under its contract",
        "The kernels are the routines that have bindings (`fp8-oracle list bindings`), of whatever is installed. `run` "
        "validates them and leaves a record, a report of each kernel and a page; `page` writes the page of a record, "
        "`compare` what changed between two, `beside` whether the verdicts of one are those of another, `store` puts "
        "one into another.",
    )
    verbs = command.add_subparsers(dest="verb", required=True, metavar="VERB")
    listed = add_command(verbs, "list", _list, "the projects and kernels of a gallery")
    _folder(listed)
    run = add_command(
        verbs,
        "run",
        _run,
        "validate the kernels of a gallery",
        "Exit 0 when every kernel that ran conforms, 1 when one does not or --seconds left some, "
        "2 when none could run.",
    )
    _folder(run)
    run.add_argument("--out", type=Path, required=True, metavar="DIR", help=f"gets {ROWS}, {PAGE}, reports/ and calls/")
    repeated(run, "--only", "NAME", "a project, PROJECT.KERNEL or a contract; may be repeated")
    run.add_argument(
        "--device",
        default="cuda",
        help="cuda (default; every GPU that is seen, one for each job in turn), cuda:0,cuda:1 (these), or cpu",
    )
    text = "kernels that are validated at the same time, each by processes of its own (default: 1)"
    run.add_argument("--jobs", type=whole(1), default=1, metavar="N", help=text)
    text = "end after S seconds, by ending what runs; the kernels without a row are left to --resume"
    run.add_argument("--seconds", type=float, metavar="S", help=text)
    text = "an earlier record: what took long there begins first, and what is not in it before that"
    run.add_argument("--like", type=Path, metavar=ROWS, help=text)
    run.add_argument("--profile", choices=PROFILES[:2], default="quick")
    run.add_argument("--seed", type=whole(0), default=0, help="of what is drawn; runs with one seed compare")
    run.add_argument("--limit", type=float, metavar="S", help="seconds for one call")
    run.add_argument("--resume", action="store_true", help="keep the rows that DIR has, and run the other kernels")
    paging = add_command(verbs, "page", _page, "the page of a run, or of the parts of one")
    paging.add_argument("records", type=Path, nargs="+", metavar=ROWS)
    paging.add_argument("--out", type=Path, metavar="DIR", help=f"gets {ROWS} and {PAGE} of all; printed without")
    text = f"keep of each kernel what its line needs, for a {ROWS} in a repository; `compare` then knows verdicts alone"
    paging.add_argument("--brief", action="store_true", help=text)
    storing = add_command(
        verbs,
        "store",
        _store,
        "put the rows of a run into a record that is kept",
        "A kernel that ran replaces the rows of its project and contract; every other row stays, and says where it was "
        "recorded. Prints what changed.",
    )
    storing.add_argument("new", type=Path, metavar="NEW", help=f"{ROWS} of a run")
    text = f"the record that is kept (default: {STORED} of a checkout)"
    storing.add_argument("--into", type=Path, metavar=ROWS, default=STORED, help=text)
    again = add_command(
        verbs,
        "beside",
        _beside,
        "whether the verdicts of a run are those of the record that is kept",
        "Kernels of one project under one contract are compared, whatever their names. Exit 1 where a kernel has a "
        "verdict that none of the record has.",
    )
    again.add_argument("new", type=Path, metavar="NEW", help=f"{ROWS} of a run")
    text = f"the record that is kept (default: {STORED} of a checkout)"
    again.add_argument("--of", type=Path, metavar=ROWS, default=STORED, help=text)
    moved = add_command(verbs, "compare", _compare, "what changed between two records", "Exit 1 when a kernel broke.")
    moved.add_argument("old", type=Path, metavar="OLD")
    moved.add_argument("new", type=Path, metavar="NEW")


def _folder(command: argparse.ArgumentParser) -> None:
    text = "a gallery of yours, with a file for each project (default: the routines that have bindings)"
    command.add_argument("--folder", type=Path, metavar="DIR", help=text)


def _list(arguments: argparse.Namespace) -> int:
    table = Table("project", "kernel", "contract", "installed", "carried")
    for project in gallery.projects_of(arguments.folder):
        here = ", ".join(f"{name} {result}" for name, result in project.versions().items())
        for kernel in project.kernels:
            table.add_row(*map(Text, (project.name, kernel.named, kernel.contract, here or "no", project.carried)))
    console().print(table)
    return 0


def _run(arguments: argparse.Namespace) -> int:
    begun, out = time.monotonic(), arguments.out
    record = out / ROWS
    for name, value in (("--seconds", arguments.seconds), ("--limit", arguments.limit)):
        if value is not None and not 0 < value < math.inf:
            raise OptionError(f"{name} {value:g} is no number of seconds; give a positive one")
    if record.exists() and not arguments.resume:
        raise OptionError(f"{record} exists; give --resume to add to it, or another --out")
    projects = gallery.projects_of(arguments.folder)
    rows = {row.key: row for row in read(record).rows} if record.exists() else {}
    before = {row.key: row.seconds for row in read(arguments.like).rows} if arguments.like is not None else {}
    wanted = [gallery.key_of(*pair) for pair in gallery.chosen(projects, arguments.only)]
    only = sorted((key for key in wanted if key not in rows), key=lambda key: -before.get(key, math.inf))
    places = {gallery.key_of(*pair): number for number, pair in enumerate(gallery.chosen(projects, ()))}
    for name in ("reports", "calls"):
        (out / name).mkdir(parents=True, exist_ok=True)
    machine = {"date": datetime.now(UTC).date().isoformat(), **provenance.machine()}
    shown, done = sys.stderr.isatty(), 0

    def found() -> Run:
        return Run(machine, tuple(sorted(rows.values(), key=lambda row: places.get(row.key, len(places)))))

    asked = gallery.Asked(
        arguments.folder, arguments.device, arguments.profile, arguments.seed, arguments.limit, out / "calls"
    )
    left = math.inf if arguments.seconds is None else arguments.seconds - (time.monotonic() - begun)
    try:
        with (
            console(stderr=True).status("") as status,
            closing(gallery.run(asked, only, jobs=arguments.jobs, seconds=left)) as ran,
        ):
            if shown:
                status.update(f"0 of {len(only)} kernels")
            for done, (row, report) in enumerate(ran, 1):
                rows[row.key] = row
                if report is not None:
                    write_json(str(out / "reports" / f"{row.project}.{row.kernel}.{row.contract}.json"), report)
                found().write(record)  # after each: a run may be ended
                why = f": {row.why}" if row.why else ""
                counts = f"{row.identified} of {row.judged} identified, {row.seconds:.0f} s"
                say(f"{row.verdict:<11} {row.key}  {counts}{why}")
                sys.stdout.flush()
                if shown:
                    status.update(f"{done} of {len(only)} kernels")
    finally:
        if rows:
            fixtures.write_bytes(out / PAGE, page(found()).encode())
    if done < len(only):
        late = f"{len(only) - done} of {len(only)} kernels"
        say(f"{late} were not validated in {arguments.seconds:g} s; --resume goes on")
    tried = [row for row in rows.values() if row.verdict != "UNSUPPORTED"]
    say(f"{len(tried)} of {len(rows)} kernels ran; {out / PAGE}")
    if not tried:
        return 2
    return 0 if done == len(only) and all(row.verdict == "CONFORMS" for row in tried) else 1


def _page(arguments: argparse.Namespace) -> int:
    parts = [read(path) for path in arguments.records]
    rows = {row.key: row.brief() if arguments.brief else row for part in parts for row in part.rows}
    whole = Run(parts[0].machine, tuple(rows.values()))
    free = ("date", "threads")  # no verdict depends on them
    places = [{name: value for name, value in part.machine.items() if name not in free} for part in parts]
    if other := [path for path, place in zip(arguments.records, places, strict=True) if place != places[0]]:
        raise OptionError(f"{other[0]} is of another machine than {arguments.records[0]}; a page is of one")
    if arguments.out is None:
        say(page(whole).rstrip())
    else:
        whole.write(arguments.out / ROWS)
        fixtures.write_bytes(arguments.out / PAGE, page(whole).encode())
    return 0


def _store(arguments: argparse.Namespace) -> int:
    old, new = read(arguments.into), read(arguments.new)
    remaining = stored(old, new)
    remaining.write(arguments.into)
    say("\n".join(beside(old, remaining)) or "nothing changed")
    there = sum(1 for row in remaining.rows if not row.recorded)
    say(f"{len(remaining.rows)} rows in {arguments.into}, {there} recorded as {arguments.new}")
    return 0


def _beside(arguments: argparse.Namespace) -> int:
    lines, moved = verdicts_beside(read(arguments.new).rows, read(arguments.of).rows)
    say("\n".join(lines))
    return int(moved > 0)


def _compare(arguments: argparse.Namespace) -> int:
    old, new = read(arguments.old), read(arguments.new)
    lines = list(beside(old, new))
    say("\n".join(lines) if lines else "nothing changed")
    return 1 if any(" broke: " in line for line in lines) else 0
