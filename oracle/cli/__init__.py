"""The command line: one small file for each command.

Exit status: 0 everything is as it must be, 1 it is not, 2 the question could not be asked (one line on the
standard error says why and what to do), 130 interrupted, 141 nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from oracle.cli import (
    compare,
    completion,
    conformance,
    doctor,
    examples,
    explain,
    fingerprint,
    fixtures,
    history,
    identify,
    judge,
    listing,
    mutate,
    plan,
    predict,
    report,
    settings,
    validate,
    verify,
)
from oracle.errors import OracleError

COMMANDS = (
    verify,
    validate,
    judge,
    explain,
    mutate,
    predict,
    identify,
    fingerprint,
    doctor,
    listing,
    fixtures,
    conformance,
    plan,
    report,
    compare,
    history,
    completion,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        commands = parser()
        settings.install(commands, settings.load())
        arguments = commands.parse_args(argv)
        status: int = arguments.run(arguments)
    except OracleError as error:
        print(f"fp8-oracle: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fp8-oracle: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has enough, as `head`; what is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
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
    examples.install(commands.choices)
    return result


def _version() -> str:
    try:
        return version("fp8-oracle")
    except PackageNotFoundError:
        return "(not installed)"
