"""``fp8-oracle findings``: the findings in kernels that ship, run again on this machine."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from rich.text import Text

from oracle.cli import common
from oracle.errors import FixtureError, OptionError, counted
from oracle.fixtures import files as fixtures
from oracle.harness import finding_scripts, provenance
from oracle.harness.finding_scripts import FOLDER, HEALED, LEFT, THERE

RECORD = "findings.json"
STYLES = {THERE: "bold red", HEALED: "green", LEFT: "dim"}


def add(commands: common.Commands) -> None:
    command = common.add_command(
        commands,
        "findings",
        _findings,
        "run the findings in kernels that ship again, all that this machine can",
        "Each finding is a script that calls a library as its page says and tells whether the fault is still there. "
        "Exit 1 where one is, 0 where all that ran are healed, 2 where none could run.",
    )
    text = f"the scripts (default: {FOLDER} of a checkout)"
    command.add_argument("--folder", type=Path, default=FOLDER, metavar="DIR", help=text)
    common.repeated(command, "--only", "NAME", "this script; may be repeated")
    text = "scripts that run at the same time (default: 1)"
    command.add_argument("--jobs", type=common.whole(1), default=1, metavar="N", help=text)
    text = "end a script after S seconds (default: %(default)g)"
    command.add_argument("--seconds", type=float, default=finding_scripts.SECONDS, metavar="S", help=text)
    command.add_argument(
        "--out", type=Path, metavar="DIR", help=f"gets {RECORD}: what each script said, and the machine"
    )
    text = f"keep what {RECORD} of --out has of scripts that ran, and run the others"
    command.add_argument("--resume", action="store_true", help=text)


def _findings(arguments: argparse.Namespace) -> int:
    chosen, screen = finding_scripts.scripts(arguments.folder, arguments.only), common.console()
    results: dict[str, dict[str, str]] = {}
    if arguments.resume:
        if arguments.out is None:
            raise OptionError("--resume needs the --out of the earlier run")
        if (arguments.out / RECORD).exists():
            kept = fixtures.read_json(arguments.out / RECORD).get("scripts")
            if not isinstance(kept, dict):
                raise FixtureError(f"{arguments.out / RECORD}: is no record of findings; name another --out")
            results = {name: ran for name, ran in kept.items() if ran["status"] != LEFT}
    left = [path for path in chosen if path.stem not in results]
    machine = {"date": datetime.now(UTC).date().isoformat(), **provenance.machine()}
    if arguments.out is not None:
        fixtures.make_folder(arguments.out)
    for ran in finding_scripts.run(left, jobs=arguments.jobs, seconds=arguments.seconds):
        results[ran.name] = {"status": ran.status, "said": ran.said}
        line = Text.assemble((f"{ran.status:<11}", STYLES[ran.status]), f" {ran.name}: {ran.said}")
        screen.print(line, soft_wrap=True)
        if arguments.out is not None:  # after each: a run may be ended
            ordered = {name: results[name] for name in sorted(results)}
            fixtures.write_json(arguments.out / RECORD, {"machine": machine, "scripts": ordered})
    ends = [results[path.stem]["status"] for path in chosen]
    common.say(f"{counted(len(ends), 'finding')}: " + ", ".join(f"{ends.count(end)} {end}" for end in STYLES))
    return 1 if THERE in ends else 0 if HEALED in ends else 2
