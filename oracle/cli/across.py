"""``fp8-oracle across``: the same calls by every architecture's arithmetic, and where two of them legally differ."""

from __future__ import annotations

import argparse
import time
from contextlib import closing

from oracle.cli.common import Bar, Commands, add_command, add_jobs, add_json, console, write_json, write_text
from oracle.diagnosis.across import Compared, Same
from oracle.errors import CaseError, OptionError, among
from oracle.fixtures import files as fixtures
from oracle.harness import across, provenance
from oracle.report.across import Across, print_across, to_html, to_json
from oracle.routines import get, profiles, registered
from oracle.tensorcore.instructions import arches


def add(commands: Commands) -> None:
    command = add_command(
        commands,
        "across",
        _across,
        "where right outputs of two architectures differ, and by which step",
        "Predict the same calls by the arithmetic of every arch, and compare every two: equal bits, largest distance, "
        "which step of the arithmetic makes the difference, and whether an output of the one passes on the other. "
        "Captured outputs stand for the arch that gave them.",
    )
    text = "architectures, separated by commas (default: %(default)s)"
    command.add_argument("--arches", default=",".join(across.ARCHES), metavar="LIST", help=text)
    command.add_argument("--contract", metavar="NAME", help="only this routine")
    text = "every case of this profile (default: a few cases of each routine)"
    command.add_argument("--profile", choices=profiles.PROFILES, help=text)
    command.add_argument("--case", metavar="ID", help="only this case")
    command.add_argument("--fixtures", metavar="DIR", help="the fixtures folder; `none` replays no captured output")
    add_jobs(command)
    add_json(command, "every comparison")
    command.add_argument("--html", metavar="FILE", help="write one self-contained page")
    command.add_argument("-v", "--verbose", action="store_true", help="the routines of every pair of architectures")


def _across(arguments: argparse.Namespace) -> int:
    asked = _arches(arguments.arches)
    folder = None if arguments.fixtures == "none" else fixtures.folder(arguments.fixtures)
    wanted = across.tasks(
        asked, contract=arguments.contract, profile=arguments.profile, case=arguments.case, folder=folder
    )
    if not wanted:
        raise CaseError(f"{arguments.contract} has no case and no captured output; nothing can be compared")
    screen = console(stderr="-" in (arguments.json, arguments.html))
    start, compared, same, notes = time.perf_counter(), list[Compared](), list[Same](), list[str]()
    with Bar(screen, len(wanted)) as bar:
        running = across.run(
            wanted, asked, folder, jobs=arguments.jobs, started=lambda number: bar.runs(wanted[number].contract)
        )
        with closing(running) as result:
            for part in result:
                bar.advance()
                compared += [one for one in part if isinstance(one, Compared)]
                same += [one for one in part if isinstance(one, Same)]
                notes += [one for one in part if isinstance(one, str)]
    seconds = time.perf_counter() - start
    report = Across(asked, tuple(compared), tuple(same), tuple(notes), provenance.machine(), seconds)
    print_across(report, screen, verbose=arguments.verbose)
    write_json(arguments.json, to_json(report))
    if arguments.html is not None:
        write_text(arguments.html, to_html(report))
    return 1 if any(one.otherwise for one in same) else 0


def _arches(text: str) -> tuple[str, ...]:
    """The architectures of a list; OptionError for one without any model, one that is named twice, or less than two."""
    names = tuple(name.strip() for name in text.split(","))
    every = dict.fromkeys((*arches(), *(arch for name in registered() for arch in get(name).numerics)))
    if unknown := [name for name in names if name not in every]:
        raise OptionError(f"--arches: no model for arch {unknown[0]!r}; {among(unknown[0], every)}")
    if len(set(names)) != len(names) or len(names) < 2:
        raise OptionError(f"--arches {text}: name two or more, each once")
    return names
