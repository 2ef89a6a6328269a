"""``fp8-oracle doctor``: what is here, what is usable, and why not."""

from __future__ import annotations

import argparse

from rich.table import Table

from oracle import doctor
from oracle.cli.common import Commands, console


def add(commands: Commands) -> None:
    command = commands.add_parser("doctor", help="what is importable and usable here, and why not")
    command.add_argument("--fixtures", metavar="DIR", help="the fixtures folder")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    findings = doctor.examine(arguments.fixtures)
    table = Table(title="doctor", title_justify="left")
    table.add_column("what")
    table.add_column("state")
    table.add_column("found, or why not", overflow="fold")
    styles = {"ok": "green", "absent": "dim", "problem": "bold red"}
    for finding in findings:
        table.add_row(finding.what, finding.state, finding.said, style=styles[finding.state])
    console().print(table)
    return 1 if any(finding.state == "problem" for finding in findings) else 0
