"""``fp8-oracle compare``: what changed between two runs; fails when something broke."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from oracle.cli.common import Commands, add_volume_arguments, console, pairs
from oracle.errors import OptionError
from oracle.fixtures import files as fixtures
from oracle.report import changes
from oracle.report.differences import print_comparison
from oracle.report.record import read_report


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "compare",
        help="what broke, healed and moved between two runs",
        description="Compare two runs, by records or JSON reports: what broke, what healed, where the numerics or the "
        "margin is another. Exit 1 when something broke or a new case fails.",
    )
    command.add_argument("old", type=Path, metavar="OLD")
    command.add_argument("new", type=Path, metavar="NEW")
    command.add_argument(
        "--pair", action="append", default=[], metavar="OLD=NEW",
        help="compare this subject of the old run with that one of the new run, and nothing else",
    )  # fmt: skip
    command.add_argument("--json", metavar="FILE", help="write the changes as JSON; `-` is the standard output")
    add_volume_arguments(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    (old, old_notes), (new, new_notes) = read_report(arguments.old), read_report(arguments.new)
    for note in (*old_notes, *new_notes):
        print(f"fp8-oracle: {note}", file=sys.stderr)
    renamed = pairs(arguments.pair, "--pair") or None
    if renamed is not None:
        for name, given, report in (
            *((o, arguments.old, old) for o in renamed),
            *((n, arguments.new, new) for n in renamed.values()),
        ):
            if name not in (known := {o.subject for o in report.outcomes}):
                raise OptionError(f"--pair: {given} has no subject {name!r}; it has {', '.join(sorted(known))}")
    found = changes.between(old, new, renamed=renamed)
    screen = console(stderr=arguments.json == "-")
    print_comparison(found, screen, verbose=arguments.verbose, quiet=arguments.quiet)
    text = json.dumps(found.to_json(), indent=2, allow_nan=False) + "\n"
    if arguments.json == "-":
        print(text, end="")
    elif arguments.json is not None:
        fixtures.write_bytes(arguments.json, text.encode())
    return 0 if found.ok else 1
