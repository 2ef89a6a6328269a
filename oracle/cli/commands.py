"""Every command, and the parser that has them all. Importing this file imports torch."""

from __future__ import annotations

import argparse
from typing import Any

import shtab

from oracle.cli import (
    across,
    bisect,
    calls,
    cases,
    evaluate,
    examples,
    findings,
    firstlight,
    fixtures,
    gallery,
    installed,
    lint,
    runs,
    selftest,
    tool,
    validate,
    watch,
)
from oracle.cli.common import Commands, add_command
from oracle.errors import among

SHELLS = tuple(shtab.SUPPORTED_SHELLS)


def add_completion(commands: Commands) -> None:
    command = add_command(
        commands,
        "completion",
        _completion,
        "print the completion script of a shell",
        "Print a script that completes commands, flags and choices; load it where your shell loads such.",
    )
    command.add_argument("shell", choices=SHELLS)


def _completion(arguments: argparse.Namespace) -> int:
    print(shtab.complete(parser(), arguments.shell))
    return 0


COMMANDS = {
    "verify": runs.add_verify, "validate": validate.add_validate, "judge": calls.add_judge,
    "explain": calls.add_explain, "mutate": selftest.add_mutate, "predict": calls.add_predict,
    "identify": calls.add_identify, "fingerprint": validate.add_fingerprint, "doctor": tool.add_doctor,
    "list": tool.add_list, "fixtures": fixtures.add, "conformance": selftest.add_conformance, "plan": tool.add_plan,
    "report": runs.add_report, "merge": runs.add_merge, "compare": runs.add_compare, "history": runs.add_history,
    "across": across.add, "gallery": gallery.add, "lint": lint.add, "cases": cases.add, "evaluate": evaluate.add,
    "watch": watch.add, "bisect": bisect.add, "findings": findings.add, "firstlight": firstlight.add,
    "completion": add_completion,
}  # fmt: skip  # a table, one row a line


class Parser(argparse.ArgumentParser):
    """A parser that names the choice that was probably meant."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # argparse has no public place for it
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; {among(value, action.choices)}")


def parser(command: str = "") -> argparse.ArgumentParser:
    """The parser with every command; with the arguments of ``command`` alone where that is one, a tenth of the time."""
    text = "Exact references, sound bounds and verdicts for FP8 kernels."
    result = Parser(prog="fp8-oracle", description=text)
    result.add_argument("--version", action="version", version=f"%(prog)s {installed.version_here()}")
    commands: Any = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, add in COMMANDS.items():
        if command == name or command not in COMMANDS:
            add(commands)
    examples.install(commands.choices)
    return result
