"""``fp8-oracle explain``: what is wrong with a recorded output, and which known faults reproduce it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.text import Text

from oracle.cli.common import Commands, console, inputs_of, pairs
from oracle.diagnosis.explain import Diagnosis, diagnose
from oracle.errors import FixtureError
from oracle.fixtures import files as fixtures
from oracle.fixtures.failing_case import FailingCase, read
from oracle.report.console import STYLES
from oracle.routines import get, options

SCHEMA = "fp8-oracle.explanation/1"


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "explain",
        help="explain a failing output in a safetensors file",
        description="Explain the output in FILE: where it fails, since which K block, which known faults reproduce it. "
        "A file that `validate --save` wrote says itself what was called; any other is named as for `judge`.",
    )
    command.add_argument("file", type=Path, metavar="FILE.safetensors")
    command.add_argument("--contract", metavar="NAME", help="for a file that does not say it; see `fp8-oracle list`")
    command.add_argument("--input", action="append", default=[], metavar="NAME=TENSOR", help="as for `judge`")
    command.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="as for `judge`")
    command.add_argument("--output", metavar="TENSOR", help="the output's name in the file (default: out)")
    command.add_argument("--arch", help="whose arithmetic is admitted (default: sm90, or what the file says)")
    command.add_argument("--numerics", metavar="NAME", help="the declared schedule")
    command.add_argument("--json", metavar="FILE", help="write the explanation as JSON; `-` is the standard output")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    case = read(arguments.file) if arguments.contract is None else _named(arguments)
    arch, numerics = arguments.arch or case.arch, arguments.numerics or case.numerics
    contract = get(case.contract)
    verdict = contract.judge(case.inputs, case.output, arch=arch, numerics=numerics, **case.options)
    found = diagnose(case.contract, case.inputs, case.output, arch=arch, numerics=numerics, **case.options)
    screen = console(stderr=arguments.json == "-")
    screen.print(Text.assemble((str(verdict.status), STYLES[verdict.status]), f" {verdict.summary}"), soft_wrap=True)
    for line in words(found):
        screen.print(line, soft_wrap=True)
    if arguments.json is not None:
        record = {
            "schema": SCHEMA,
            "contract": case.contract,
            "verdict": verdict.to_json(),
            "diagnosis": to_json(found),
        }
        text = json.dumps(record, indent=2, allow_nan=False) + "\n"
        if arguments.json == "-":
            print(text, end="")
        else:
            fixtures.write_bytes(arguments.json, text.encode())
    return 1 if verdict.status.is_failure else 0


def words(found: Diagnosis) -> list[str]:
    """A diagnosis in lines."""
    if not found.failing:
        return ["  no element fails: there is nothing to explain"]
    lines = [f"  {found.failing} of {found.total} elements fail: {found.where}"]
    lines += [f"  {finding}" for finding in found.findings]
    for rank, e in enumerate(found.explanations[:5], 1):
        said = f"{e.explained} of {e.failing} failing elements, {e.contradicted} contradicted"
        if e.local:
            said = f"all {e.explained} failing elements, and the rest is right without it"
        if e.where:
            said = f"{e.where}: all {e.explained} failing elements are right results of that"
        if e.beyond:
            said = f"all {e.placed} failing elements are its sums, some with scales from beyond the buffer"
        elif e.placed:
            said = f"all {e.placed} failing elements lie where it writes nothing, and whatever it writes is right"
        met_in = f"; met in {e.met_in}" if e.met_in else ""
        lines.append(f"  {rank}. {e.name}: {said} ({e.numerics}{met_in})")
    if not found.explanations:
        lines.append("  no fault of the catalogue reproduces half of the failing elements")
    return lines


def to_json(found: Diagnosis) -> dict[str, object]:
    """A JSON-ready dict."""
    return {
        "failing": found.failing,
        "total": found.total,
        "where": found.where,
        "first_block": found.first_block,
        "findings": list(found.findings),
        "explanations": [
            {
                "name": e.name,
                "numerics": e.numerics,
                "explained": e.explained,
                "failing": e.failing,
                "contradicted": e.contradicted,
                "placed": e.placed,
                "beyond": e.beyond,
                "local": e.local,
                "where": e.where,
                "complete": e.complete,
                "met_in": e.met_in,
            }
            for e in found.explanations
        ],
    }


def _named(arguments: argparse.Namespace) -> FailingCase:
    contract = get(arguments.contract)
    tensors = fixtures.read_tensors(arguments.file)
    inputs = inputs_of(contract, tensors, pairs(arguments.input, "--input"), arguments.file)
    call = options.parse(contract, pairs(arguments.option, "--option"))
    name = arguments.output or "out"
    names = [name] if contract.outputs == ("out",) else [f"{name}.{output}" for output in contract.outputs]
    if missing := [n for n in names if n not in tensors]:
        raise FixtureError(
            f"{arguments.file}: has no tensor {missing[0]!r}; outputs in it: "
            f"{', '.join(sorted(n for n in tensors if n.startswith('out'))) or 'none'}; name one with --output"
        )
    output = tensors[name] if contract.outputs == ("out",) else {o: tensors[f"{name}.{o}"] for o in contract.outputs}
    return FailingCase(contract.name, inputs, output, call, arguments.arch or "sm90", arguments.numerics)
