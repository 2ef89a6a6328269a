"""``fp8-oracle conformance``: the instruction models against published hardware vectors."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table

from oracle.cli.common import Commands, console
from oracle.tensorcore.vectors import conformance


def add(commands: Commands) -> None:
    command = commands.add_parser("conformance", help="compare the instruction models with published hardware vectors")
    command.add_argument(
        "--vectors", required=True, type=Path, metavar="DIR", help="folder of a_*.txt, b_*, c_*, d_* sets"
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    rows = conformance(arguments.vectors)
    table = Table(title="mismatches", title_justify="left")
    for column in ("gpu", "format", "output", "instruction"):
        table.add_column(column)
    table.add_column("vectors", justify="right")
    table.add_column("mismatches", justify="right")
    table.add_column("first mismatch, note", overflow="fold")
    for row in rows:
        said = "; ".join(text for text in (row.first, row.note) if text)
        style = "bold red" if row.mismatches else None
        table.add_row(
            row.gpu, row.format, row.output, row.instruction, str(row.vectors), str(row.mismatches), said, style=style
        )
    console().print(table)
    return 1 if any(row.mismatches for row in rows) else 0
