"""``fp8-oracle fixtures``: check the stored files, or make them again from what was recorded."""

from __future__ import annotations

import argparse
from pathlib import Path

from oracle import captures, fixtures, ledger
from oracle.cli.common import Commands


def add(commands: Commands) -> None:
    command = commands.add_parser("fixtures", help="check or rebuild the stored fixtures")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="read every file and compare it with its manifest")
    check.set_defaults(run=_check)
    rebuild = actions.add_parser(
        "import",
        help="make the captures again from recorded files",
        description="Make fixtures/captures again from a folder of recorded safetensors files, as the manifest's "
        "`source` entries say: tensors are renamed, unit scales added, digests and provenance renewed.",
    )
    rebuild.add_argument("recorded", type=Path, metavar="DIR")
    rebuild.set_defaults(run=_import)
    for action in (check, rebuild):
        action.add_argument("--fixtures", metavar="DIR", help="the fixtures folder")


def _check(arguments: argparse.Namespace) -> int:
    folder = fixtures.folder(arguments.fixtures)
    for line in captures.check(folder / "captures"):
        print(line)
    print(f"{ledger.FILE}: {len(ledger.load(folder / ledger.FILE))} known failures")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    for line in captures.rebuild(fixtures.folder(arguments.fixtures) / "captures", arguments.recorded):
        print(line)
    return 0
