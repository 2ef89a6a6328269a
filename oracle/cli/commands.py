"""Every command, and the parser that has them all. Importing this file imports torch."""

from __future__ import annotations

import argparse

from oracle.cli import (
    calls,
    cases,
    evaluate,
    examples,
    fixtures,
    gallery,
    installed,
    kernels,
    lint,
    runs,
    selftest,
    tool,
)

COMMANDS = (
    *(runs.add_verify, kernels.add_validate, calls.add_judge, calls.add_explain, selftest.add_mutate),
    *(calls.add_predict, calls.add_identify, kernels.add_fingerprint, tool.add_doctor, tool.add_list, fixtures.add),
    *(selftest.add_conformance, tool.add_plan, runs.add_report, runs.add_merge, runs.add_compare, runs.add_history),
    *(gallery.add, lint.add, cases.add, evaluate.add, tool.add_completion),
)


def parser() -> argparse.ArgumentParser:
    """The parser with every command."""
    said = "Exact references, sound bounds and verdicts for FP8 kernels."
    result = argparse.ArgumentParser(prog="fp8-oracle", description=said)
    result.add_argument("--version", action="version", version=f"%(prog)s {installed.version_here()}")
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    examples.install(commands.choices)
    return result
