"""``fp8-oracle report``: every kind of report from the record of a run, whole or cut short."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from oracle.cli.common import Commands, add_volume_arguments, console
from oracle.cli.outputs import add_output_arguments, takes_standard_output, write
from oracle.errors import CaseError
from oracle.report.console import print_report
from oracle.report.outcome import Report
from oracle.report.record import read_report


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "report",
        help="make any kind of report from the record of a run",
        description="Read what `verify --record` or `verify --json` wrote, print it, and write it in other forms. "
        "The exit status is that of the run: 0 when all was as it must be, 1 when not.",
    )
    command.add_argument("record", type=Path, metavar="RECORD", help="a .jsonl record or a JSON report")
    command.add_argument("--contract", metavar="NAME", help="only this routine; * and ? match")
    command.add_argument("--subject", metavar="NAME", help="only this subject; * and ? match")
    command.add_argument("--failures", action="store_true", help="only what fails, known failures included")
    add_output_arguments(command)
    add_volume_arguments(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    whole, notes = read_report(arguments.record)
    for note in notes:
        print(f"fp8-oracle: {note}", file=sys.stderr)
    report = _selected(whole, arguments)
    screen = console(stderr=takes_standard_output(arguments))
    print_report(report, screen, quiet=arguments.quiet, verbose=arguments.verbose)
    write(report, arguments)
    return 0 if whole.ok else 1


def _selected(report: Report, arguments: argparse.Namespace) -> Report:
    kept = tuple(
        o for o in report.outcomes
        if fnmatchcase(o.contract, arguments.contract or "*") and fnmatchcase(o.subject, arguments.subject or "*")
        and (o.status.is_failure or not arguments.failures)
    )  # fmt: skip
    if report.outcomes and not kept and not arguments.failures:
        known = ", ".join(sorted({o.contract for o in report.outcomes}))
        raise CaseError(f"{arguments.record}: nothing of that routine and subject; routines: {known}")
    return replace(report, outcomes=kept)
