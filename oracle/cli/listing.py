"""``fp8-oracle list``: contracts, cases, subjects, captures, numerics."""

from __future__ import annotations

import argparse

from oracle import captures, fixtures, profiles, subjects
from oracle.cli.common import Commands
from oracle.contracts import Contract, registered
from oracle.options import word
from oracle.tensorcore.schedules import schedules

WHAT = ("contracts", "cases", "subjects", "captures", "numerics")


def add(commands: Commands) -> None:
    command = commands.add_parser("list", help="list contracts, cases, subjects, captures or numerics")
    command.add_argument("what", nargs="?", choices=WHAT, default="contracts")
    command.add_argument("--profile", choices=profiles.PROFILES, default="quick")
    command.add_argument("--fixtures", metavar="DIR", help="the fixtures folder")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    for line in _LINES[arguments.what](arguments):
        print(line)
    return 0


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
    return [f"{schedule.name}\t{schedule.status}\t{schedule.seen_in}" for schedule in schedules()]


_LINES = {
    "contracts": _contracts,
    "cases": _cases,
    "subjects": _subjects,
    "captures": _captures,
    "numerics": _numerics,
}
