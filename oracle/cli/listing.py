"""``fp8-oracle list``: contracts, cases, subjects, captures, numerics, and which routine is covered how."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rich.table import Table

from oracle.cli.common import Commands, console
from oracle.errors import OptionError
from oracle.fixtures import captures
from oracle.fixtures import files as fixtures
from oracle.harness import coverage, subjects
from oracle.routines import Contract, profiles, registered
from oracle.routines.options import word
from oracle.tensorcore.schedules import schedules

WHAT = ("contracts", "cases", "subjects", "captures", "numerics")


def add(commands: Commands) -> None:
    command = commands.add_parser("list", help="list contracts, cases, subjects, captures or numerics")
    command.add_argument("what", nargs="?", choices=WHAT, default="contracts")
    command.add_argument("--profile", choices=profiles.PROFILES, default="quick")
    command.add_argument("--fixtures", metavar="DIR", help="the fixtures folder")
    command.add_argument("--coverage", action="store_true", help="the legs of every routine: P, R, D, G and H by arch")
    command.add_argument("--markdown", action="store_true", help="with --coverage: as Markdown, CPU subjects only")
    command.add_argument(
        "--update", type=Path, metavar="FILE", help="with --coverage: write it between the markers of a Markdown file"
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.coverage:
        return _coverage(arguments)
    if arguments.markdown or arguments.update is not None:
        raise OptionError("--markdown and --update print the coverage table; add --coverage")
    for line in _LINES[arguments.what](arguments):
        print(line)
    return 0


def _coverage(arguments: argparse.Namespace) -> int:
    """The table; what goes into a file holds the CPU subjects only, so that it is the same on every machine."""
    portable = arguments.markdown or arguments.update is not None
    providers = subjects.providers()
    live = [s for provider in providers for s in provider.subjects if not portable or s.device == "cpu"]
    packages = sorted({provider.target.partition(":")[0].partition(".")[0] for provider in providers})
    rows = coverage.rows(live, fixtures.folder(arguments.fixtures), lambda name: _exposed(packages, name))
    if arguments.update is not None:
        changed = coverage.place(arguments.update, coverage.markdown(rows))
        print(f"{arguments.update}: {'written' if changed else 'as it was'}")
    elif arguments.markdown:
        print(coverage.markdown(rows), end="")
    else:
        console().print(_table(rows))
    return 0


def _table(rows: Sequence[coverage.Row]) -> Table:
    table = Table(title="coverage", title_justify="left", caption=coverage.LEGEND, caption_justify="left")
    for column in ("section", "routine", *"PRDGH", "missing"):
        table.add_column(column)
    for row in rows:
        style = "yellow" if row.missing else None
        table.add_row(row.routine.section, row.routine.name, *row.cells(), row.missing, style=style)
    return table


def _exposed(packages: Sequence[str], attribute: str) -> bool:
    """Whether a package of the subjects has this (dotted) attribute."""
    for package in packages:
        found: object = import_module(package)
        for name in attribute.split("."):
            found = getattr(found, name, None)
        if found is not None:
            return True
    return False


def _contracts(arguments: argparse.Namespace) -> list[str]:
    return [line for contract in registered().values() for line in _describe(contract, arguments.profile)]


def _describe(contract: Contract, profile: str) -> list[str]:
    inputs = [
        f"{spec.name} [{', '.join(spec.dims)}]" if spec.dims is not None else f"{spec.name} ({spec.doc})"
        for spec in contract.inputs
    ]
    lines = [
        contract.name,
        f"  {contract.summary}",
        f"  inputs: {', '.join(inputs)}; outputs: {', '.join(contract.outputs)}",
    ]
    for option in contract.options:
        choices = "" if option.choices is None else f" (of {', '.join(str(word(c)) for c in option.choices)})"
        lines.append(f"  option {option.name}={word(option.default)}{choices}")
    if numerics := getattr(contract, "numerics", {}):
        lines.append(f"  numerics: {'; '.join(f'{arch}: {names[0]}' for arch, names in numerics.items())}")
    lines.append(f"  cases: {len(profiles.cases(contract.name, profile))} in profile {profile}")
    return lines


def _cases(arguments: argparse.Namespace) -> list[str]:
    return [str(case) for name in registered() for case in profiles.cases(name, arguments.profile)]


def _subjects(arguments: argparse.Namespace) -> list[str]:
    lines = []
    for provider in subjects.providers():
        if provider.problem is not None:
            lines.append(provider.problem)
        for subject in provider.subjects:
            reason = subject.why_not()
            state = f"declares {subject.numerics}" if reason is None else f"not here: {reason}"
            lines.append(f"{subject.contract} [{subject.name}, {subject.arch}] {state}")
    return lines


def _captures(arguments: argparse.Namespace) -> list[str]:
    folder = fixtures.folder(arguments.fixtures) / "captures"
    return [f"{c.id}\t{c.contract}\t{c.recording.arch}" for c in captures.load(folder)]


def _numerics(arguments: argparse.Namespace) -> list[str]:
    return [f"{schedule.name}\t{schedule.status.value}\t{schedule.seen_in}" for schedule in schedules()]


_LINES = {
    "contracts": _contracts,
    "cases": _cases,
    "subjects": _subjects,
    "captures": _captures,
    "numerics": _numerics,
}
