"""``fp8-oracle gallery``: kernels of other projects, each validated under its contract, as one record and one page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.table import Table
from rich.text import Text

from oracle.cli.common import Commands, add_command, console, repeated, say, whole, write_json
from oracle.errors import OptionError
from oracle.harness import gallery, provenance
from oracle.harness.validation import PROFILES
from oracle.report.gallery import Row, Run, beside, page, read

FOLDER = Path("tests/hardware/gallery")
ROWS, PAGE = "gallery.json", "gallery.md"
STYLES = {"CONFORMS": "green", "FAILED": "bold red", "CRASHED": "bold red", "UNTESTED": "yellow", "UNSUPPORTED": "dim"}


def add(commands: Commands) -> None:
    command = add_command(
        commands, "gallery", lambda arguments: 2, "kernels of other projects, each judged under its contract",
        "A gallery is a folder with a file for each project. `run` validates its kernels and leaves a record, a "
        "report of each kernel and a page; `page` writes the page of a record, `compare` what changed between two.",
    )  # fmt: skip
    verbs = command.add_subparsers(dest="verb", required=True, metavar="VERB")
    listed = add_command(verbs, "list", _list, "the projects and kernels of a gallery")
    _folder(listed)
    run = add_command(
        verbs, "run", _run, "validate the kernels of a gallery",
        "Exit 0 when every kernel that ran conforms, 1 when one does not, 2 when none could run.",
    )  # fmt: skip
    _folder(run)
    run.add_argument("--out", type=Path, required=True, metavar="DIR", help=f"gets {ROWS}, {PAGE}, reports/ and calls/")
    repeated(run, "--only", "NAME", "a project, PROJECT.KERNEL or a contract; may be repeated")
    run.add_argument("--device", default="cuda", help="cuda (default), cuda:1, or cpu")
    run.add_argument("--profile", choices=PROFILES[:2], default="quick")
    run.add_argument("--seed", type=whole(0), default=0, help="of what is drawn; runs with one seed compare")
    run.add_argument("--limit", type=float, metavar="S", help="seconds for one call")
    run.add_argument("--resume", action="store_true", help="keep the rows that DIR has, and run the other kernels")
    told = add_command(verbs, "page", _page, "the page of a run, or of the parts of one")
    told.add_argument("records", type=Path, nargs="+", metavar=ROWS)
    told.add_argument("--out", type=Path, metavar="DIR", help=f"gets {ROWS} and {PAGE} of all; printed without")
    moved = add_command(verbs, "compare", _compare, "what changed between two records", "Exit 1 when a kernel broke.")
    moved.add_argument("old", type=Path, metavar="OLD")
    moved.add_argument("new", type=Path, metavar="NEW")


def _folder(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--folder", type=Path, default=FOLDER, metavar="DIR", help=f"the gallery (default: {FOLDER} of a checkout)"
    )


def _list(arguments: argparse.Namespace) -> int:
    table = Table("project", "kernel", "contract", "installed", "carried")
    for project in gallery.load(arguments.folder):
        here = ", ".join(f"{name} {found}" for name, found in project.versions().items())
        for kernel in project.kernels:
            table.add_row(*map(Text, (project.name, kernel.named, kernel.contract, here or "no", project.carried)))
    console().print(table)
    return 0


def _run(arguments: argparse.Namespace) -> int:
    projects = gallery.load(arguments.folder)
    out = arguments.out
    kept: list[Row] = list(read(out / ROWS).rows) if arguments.resume and (out / ROWS).exists() else []
    wanted = gallery.chosen(projects, arguments.only)
    done = {row.key for row in kept}
    left = [f"{p.name}.{k.named}/{k.contract}" for p, k in wanted]
    if (out / ROWS).exists() and not arguments.resume:
        raise OptionError(f"{out / ROWS} exists; give --resume to add to it, or another --out")
    for name in ("reports", "calls"):
        (out / name).mkdir(parents=True, exist_ok=True)
    only = [name for name in left if name not in done]
    screen, shown = console(stderr=True), sys.stderr.isatty()
    with screen.status("") as status:
        if shown:
            status.update(f"0 of {len(only)} kernels")
        ran = gallery.run(
            projects, only=only, device=arguments.device, profile=arguments.profile, seed=arguments.seed,
            limit=arguments.limit, save=out / "calls",
        )  # fmt: skip
        for number, (row, report) in enumerate(ran if only else (), 1):
            kept.append(row)
            if report is not None:
                name = f"{row.project}.{row.kernel}.{row.contract}.json"
                write_json(str(out / "reports" / name), {**report.to_json(), "versions": dict(row.versions)})
            Run(provenance.machine(), tuple(kept)).write(out / ROWS)  # after each: a run may be ended
            why = f": {row.why}" if row.why else ""
            say(f"{row.verdict:<11} {row.key}  {row.identified} of {row.judged} identified, {row.seconds:.0f} s{why}")
            if shown:
                status.update(f"{number} of {len(only)} kernels")
    (out / PAGE).write_text(page(Run(provenance.machine(), tuple(kept))))
    tried = [row for row in kept if row.verdict != "UNSUPPORTED"]
    say(f"{len(tried)} of {len(kept)} kernels ran; {out / PAGE}")
    if not tried:
        return 2
    return 0 if all(row.verdict == "CONFORMS" for row in tried) else 1


def _page(arguments: argparse.Namespace) -> int:
    parts = [read(path) for path in arguments.records]
    rows = {row.key: row for part in parts for row in part.rows}
    whole = Run(parts[0].machine, tuple(rows.values()))
    if other := [path for path, part in zip(arguments.records, parts, strict=True) if part.machine != whole.machine]:
        raise OptionError(f"{other[0]} is of another machine than {arguments.records[0]}; a page is of one")
    if arguments.out is None:
        say(page(whole).rstrip())
    else:
        whole.write(arguments.out / ROWS)
        (arguments.out / PAGE).write_text(page(whole))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    old, new = read(arguments.old), read(arguments.new)
    lines = list(beside(old, new))
    say("\n".join(lines) if lines else "nothing changed")
    return 1 if any(" broke: " in line for line in lines) else 0
