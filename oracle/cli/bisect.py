"""``fp8-oracle bisect A B``: where two recordings of a model part, and whether either is wrong there."""

from __future__ import annotations

import argparse
from pathlib import Path

from oracle.cli import common
from oracle.diagnosis.level import explaining
from oracle.harness import watching
from oracle.harness.bisecting import bisect
from oracle.report.bisected import print_bisected, to_json


def add(commands: common.Commands) -> None:
    command = common.add_command(
        commands,
        "bisect",
        _bisect,
        "where two recordings of the same prompts part, and which of them is wrong",
        "Compare two folders that `fp8-oracle watch --to` wrote, of two engines, releases or GPUs: the first call "
        "where they part, and the verdict on either side. SAME and LEGAL (both are right, by the arithmetic that is "
        "named) end with status 0; FAULT, and UNSEEN (what makes the difference was not recorded), with 1.",
    )
    for name in ("one", "other"):
        command.add_argument(name, type=Path, metavar=name.upper(), help="a folder of recorded calls")
    command.add_argument("--arch", help="whose arithmetic is admitted on both sides (default: what the files say)")
    text = "judge the call where they part, and none behind it"
    command.add_argument("--only-first", action="store_true", help=text)
    common.add_explain_level(command)
    common.add_json(command, "where they part")


def _bisect(arguments: argparse.Namespace) -> int:
    screen = common.console(stderr=arguments.json == "-")
    with common.Bar(screen, len(watching.ordered(arguments.one))) as bar, explaining(arguments.explain):

        def advance(layer: str) -> None:
            bar.runs(layer)
            bar.advance()

        asked = {"arch": arguments.arch, "only_first": arguments.only_first, "advance": advance}
        report = bisect(arguments.one, arguments.other, **asked)
    print_bisected(report, screen)
    common.write_json(arguments.json, to_json(report))
    return 0 if report.ok else 1
