"""``fp8-oracle completion``: what a shell needs to complete commands and flags (written by shtab)."""

from __future__ import annotations

import argparse

import shtab

from oracle.cli.common import Commands

SHELLS = tuple(shtab.SUPPORTED_SHELLS)


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "completion",
        help="print the completion script of a shell",
        description="Print a script that completes commands, flags and choices; load it where your shell loads such.",
    )
    command.add_argument("shell", choices=SHELLS)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from oracle.cli import parser

    print(shtab.complete(parser(), arguments.shell))
    return 0
