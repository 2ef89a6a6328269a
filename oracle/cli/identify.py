"""``fp8-oracle identify``: which known arithmetic produced the bits of a recorded output."""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase

import oracle
from oracle.cli.common import Commands, add_file_arguments, inputs_of, pairs, whole
from oracle.errors import FixtureError
from oracle.fixtures import files as fixtures
from oracle.routines import get, options


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "identify",
        help="rank the schedules that explain a recorded output",
        description="For every matching output: the schedules of the arch, by the fraction of bits they reproduce.",
    )
    add_file_arguments(command)
    command.add_argument("--output", default="*", metavar="PATTERN", help="only outputs that match, as out.mine*")
    command.add_argument("--arch", help="only schedules of this arch")
    command.add_argument("--top", type=whole(1), default=5, metavar="N", help="schedules to print (default: 5)")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    contract = get(arguments.contract)
    tensors = fixtures.read_tensors(arguments.file)
    inputs = inputs_of(contract, tensors, pairs(arguments.input, "--input"), arguments.file)
    call = options.parse(contract, pairs(arguments.option, "--option"))
    names = [name for name in sorted(tensors) if name.startswith("out") and fnmatchcase(name, arguments.output)]
    if not names:
        raise FixtureError(f"{arguments.file}: no output matches {arguments.output!r}; it holds {', '.join(tensors)}")
    for name in names:
        print(name)
        matches = oracle.identify(arguments.contract, inputs, tensors[name], arch=arguments.arch, **call)
        for match in matches[: arguments.top]:
            print(f"  {100 * match.equal:9.4f}% of {match.compared} elements  {match.schedule}")
    return 0
