"""The command line: one small file for each command.

Exit status: 0 everything is as it must be, 1 it is not, 2 the question could not be asked (one line on the
standard error says why and what to do), 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from oracle.cli import (
    conformance,
    doctor,
    fingerprint,
    fixtures,
    identify,
    judge,
    listing,
    plan,
    predict,
    verify,
)
from oracle.errors import OracleError

COMMANDS = (verify, judge, predict, identify, fingerprint, doctor, listing, fixtures, conformance, plan)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except OracleError as error:
        print(f"fp8-oracle: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fp8-oracle: interrupted", file=sys.stderr)
        return 130
    return status


def parser() -> argparse.ArgumentParser:
    """The parser with every command."""
    result = argparse.ArgumentParser(
        prog="fp8-oracle", description="Exact references, sound bounds and verdicts for FP8 kernels."
    )
    result.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add(commands)
    return result


def _version() -> str:
    try:
        return version("fp8-oracle")
    except PackageNotFoundError:
        return "(not installed)"
