"""``fp8-oracle history``: many runs in one SQLite file, and how they went."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from oracle.cli.common import Commands, console
from oracle.errors import CaseError, OptionError
from oracle.fixtures import files as fixtures
from oracle.report import history
from oracle.report.record import read_report
from oracle.report.timeline import print_history, to_html


def add(commands: Commands) -> None:
    command = commands.add_parser("history", help="keep many runs in one file, and plot how they went")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    adding = actions.add_parser("add", help="add a run; one that is there already is not added again")
    adding.add_argument("record", type=Path, metavar="RECORD", help="a .jsonl record or a JSON report")
    adding.add_argument("--label", help="a name for the run, as a commit or a library version")
    adding.set_defaults(run=_add)
    show = actions.add_parser("show", help="one row for each run, and sparklines")
    show.add_argument("--contract", metavar="NAME", help="count this routine only")
    show.add_argument("--subject", metavar="NAME", help="count this subject only")
    show.add_argument("--last", type=int, metavar="N", help="only the last N runs")
    show.add_argument("--html", metavar="FILE", help="write one self-contained page with plots")
    show.set_defaults(run=_show)
    for action in (adding, show):
        action.add_argument("--db", type=Path, required=True, metavar="FILE", help="the history, an SQLite file")


def _add(arguments: argparse.Namespace) -> int:
    report, notes = read_report(arguments.record)
    for note in notes:
        print(f"fp8-oracle: {note}", file=sys.stderr)
    number, new = history.add(arguments.db, report, label=arguments.label or "")
    print(f"{arguments.db}: {'added as' if new else 'is already'} run {number}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    if arguments.last is not None and arguments.last < 1:
        raise OptionError(f"--last {arguments.last}: at least 1")
    points = history.points(arguments.db, contract=arguments.contract, subject=arguments.subject, last=arguments.last)
    if not points:
        raise CaseError(f"{arguments.db}: holds no run; add one with `fp8-oracle history add RECORD --db FILE`")
    print_history(points, console())
    if arguments.html is not None:
        what = " ".join(name for name in (arguments.contract, arguments.subject) if name) or "every routine and subject"
        fixtures.write_bytes(arguments.html, to_html(points, what).encode())
    return 0
