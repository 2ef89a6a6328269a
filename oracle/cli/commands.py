"""Every command, and the parser that has them all. Importing this file imports torch."""

from __future__ import annotations

import argparse
from typing import Any

from oracle.cli import (
    calls,
    cases,
    evaluate,
    examples,
    fixtures,
    gallery,
    installed,
    lint,
    runs,
    selftest,
    tool,
    validate,
)
from oracle.errors import among

COMMANDS = (
    *(runs.add_verify, validate.add_validate, calls.add_judge, calls.add_explain, selftest.add_mutate),
    *(calls.add_predict, calls.add_identify, validate.add_fingerprint, tool.add_doctor, tool.add_list, fixtures.add),
    *(selftest.add_conformance, tool.add_plan, runs.add_report, runs.add_merge, runs.add_compare, runs.add_history),
    *(gallery.add, lint.add, cases.add, evaluate.add, tool.add_completion),
)


class Parser(argparse.ArgumentParser):
    """A parser that names the choice that was probably meant."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # argparse has no public place for it
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; {among(value, action.choices)}")


def parser() -> argparse.ArgumentParser:
    """The parser with every command."""
    said = "Exact references, sound bounds and verdicts for FP8 kernels."
    result = Parser(prog="fp8-oracle", description=said)
    result.add_argument("--version", action="version", version=f"%(prog)s {installed.version_here()}")
    commands: Any = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    examples.install(commands.choices)
    return result
