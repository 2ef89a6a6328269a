"""``fp8-oracle watch``: the calls of the models that a command runs, by kernel and layer, each judged."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from oracle.cli import common
from oracle.diagnosis.level import explaining
from oracle.errors import OptionError
from oracle.harness import watched_process, watching
from oracle.harness.recording import require_empty
from oracle.report.watched import print_watched, to_html, to_json


def add(commands: common.Commands) -> None:
    command = common.add_command(
        commands,
        "watch",
        _watch,
        "judge the calls of the models that a command runs, by kernel and layer",
        "Run COMMAND and record the calls of known routines (`fp8-oracle list bindings`) in all its Python processes, "
        "under the path of the module that makes them; then judge them. Exit 1 when a call is inadmissible, nothing "
        "could be judged, or COMMAND fails.",
    )
    text = "of each kernel in each layer the first call, then one in N (default: 1)"
    command.add_argument("--every", type=common.whole(1), default=1, metavar="N", help=text)
    text = "size of the recorded calls, and seconds of their copies in a process (default: %(default)s)"
    command.add_argument("--budget", default="2 GiB, 60 s", metavar="TEXT", help=text)
    text = "keep the recorded calls in this new folder, for `judge` and `bisect`"
    command.add_argument("--to", type=Path, metavar="DIR", help=text)
    text = "judge what an earlier watch recorded in this folder, and run nothing"
    command.add_argument("--recorded", type=Path, metavar="DIR", help=text)
    command.add_argument("--arch", help="whose arithmetic is admitted (default: that of the device)")
    command.add_argument("-q", "--quiet", action="store_true", help="only what fails, and the closing line")
    common.add_explain_level(command)
    common.add_json(command, "what was seen")
    command.add_argument("--html", metavar="FILE", help="write one self-contained page")
    command.add_argument("program", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what is run")


def _watch(arguments: argparse.Namespace) -> int:
    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if bool(program) == (arguments.recorded is not None):
        raise OptionError("name a command behind --, or a folder with --recorded")
    watching.parse_budget(arguments.budget)
    if arguments.recorded is not None:
        return _judged(arguments, arguments.recorded)
    if arguments.to is not None:
        require_empty(arguments.to)
        return _run(arguments, program, arguments.to)
    with tempfile.TemporaryDirectory(prefix="fp8-oracle-calls-") as folder:
        return _run(arguments, program, Path(folder))


def _run(arguments: argparse.Namespace, program: list[str], folder: Path) -> int:
    status = watched_process.run(
        program, to=folder, every=arguments.every, budget=arguments.budget, arch=arguments.arch
    )
    if status:
        common.say(f"fp8-oracle: the command ended with status {status}", stderr=True)
    return max(_judged(arguments, folder), int(status != 0))


def _judged(arguments: argparse.Namespace, folder: Path) -> int:
    screen = common.console(stderr="-" in (arguments.json, arguments.html))
    with common.Bar(screen, len(watching.ordered(folder))) as bar:

        def advance(layer: str) -> None:
            bar.runs(layer)
            bar.advance()

        with explaining(arguments.explain):
            report = watching.judged(folder, arch=arguments.arch, advance=advance)
    print_watched(report, screen, quiet=arguments.quiet)
    common.write_json(arguments.json, to_json(report))
    if arguments.html is not None:
        common.write_text(arguments.html, to_html(report))
    return 0 if report.ok else 1
