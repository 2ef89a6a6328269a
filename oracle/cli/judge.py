"""``fp8-oracle judge``: the verdict on recorded outputs."""

from __future__ import annotations

import argparse
import json
from fnmatch import fnmatchcase
from pathlib import Path

from rich.text import Text
from torch import Tensor

from oracle.cli.common import Commands, add_file_arguments, console, inputs_of, pairs
from oracle.diagnosis.explain import explain_verdict
from oracle.errors import FixtureError
from oracle.fixtures import files as fixtures
from oracle.report.console import STYLES
from oracle.routines import Contract, get, options
from oracle.verdict.compare import Verdict

SCHEMA = "fp8-oracle.judgement/1"


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "judge",
        help="judge recorded outputs in a safetensors file",
        description="Judge every tensor of FILE whose name begins with `out` (for a routine with several outputs: "
        "out.q and out.scale, or out.LABEL.q and out.LABEL.scale). The inputs carry the contract's names.",
    )
    add_file_arguments(command)
    command.add_argument("--output", default="*", metavar="PATTERN", help="only outputs that match, as out.mine*")
    command.add_argument("--arch", default="sm90", help="whose arithmetic is admitted (default: sm90)")
    command.add_argument("--numerics", metavar="NAME", help="the declared schedule, as sm90.promote128")
    command.add_argument("--json", metavar="FILE", help="write the verdicts as JSON; `-` is the standard output")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    contract = get(arguments.contract)
    tensors = fixtures.read_tensors(arguments.file)
    inputs = inputs_of(contract, tensors, pairs(arguments.input, "--input"), arguments.file)
    call = options.parse(contract, pairs(arguments.option, "--option"))
    outputs = _outputs(contract, tensors, arguments.output, arguments.file)
    verdicts = {
        name: explain_verdict(
            contract.judge(inputs, output, arch=arguments.arch, numerics=arguments.numerics, **call),
            contract, inputs, output, arch=arguments.arch, numerics=arguments.numerics, **call,
        )  # fmt: skip
        for name, output in outputs.items()
    }
    screen = console(stderr=arguments.json == "-")
    for name, verdict in verdicts.items():
        line = Text.assemble((str(verdict.status), STYLES[verdict.status]), f" {name}: {verdict.summary}")
        if verdict.explained_by:
            line.append(f"\n  explained by: {', '.join(verdict.explained_by)}")
        screen.print(line, soft_wrap=True)
    if arguments.json is not None:
        record = _record(arguments, call, verdicts)
        text = json.dumps(record, indent=2, allow_nan=False) + "\n"
        if arguments.json == "-":
            print(text, end="")
        else:
            fixtures.write_bytes(arguments.json, text.encode())
    return 1 if any(verdict.status.is_failure for verdict in verdicts.values()) else 0


def _outputs(
    contract: Contract, tensors: dict[str, Tensor], pattern: str, path: Path
) -> dict[str, Tensor | dict[str, Tensor]]:
    """Outputs by name; for a contract with several outputs, groups by the name before the last dot."""
    names = [name for name in tensors if name.startswith("out")]
    if contract.outputs == ("out",):
        found: dict[str, Tensor | dict[str, Tensor]] = {name: tensors[name] for name in sorted(names)}
    else:
        ends = tuple(f".{output}" for output in contract.outputs)
        groups = sorted({name.rpartition(".")[0] for name in names if name.endswith(ends)})
        found = {group: _group(contract, tensors, group, path) for group in groups}
    matching = {name: output for name, output in found.items() if fnmatchcase(name, pattern)}
    if not matching:
        wanted = "out*" if contract.outputs == ("out",) else " and ".join(f"out.{o}" for o in contract.outputs)
        known = f"; outputs: {', '.join(found)}" if found else f"; it holds {', '.join(sorted(tensors))}"
        raise FixtureError(f"{path}: no output matches {pattern!r} (tensors named {wanted} are judged){known}")
    return matching


def _group(contract: Contract, tensors: dict[str, Tensor], group: str, path: Path) -> dict[str, Tensor]:
    if missing := [output for output in contract.outputs if f"{group}.{output}" not in tensors]:
        raise FixtureError(
            f"{path}: {group} lacks {group}.{missing[0]}; {contract.name} has the outputs {', '.join(contract.outputs)}"
        )
    return {output: tensors[f"{group}.{output}"] for output in contract.outputs}


def _record(arguments: argparse.Namespace, call: dict[str, object], verdicts: dict[str, Verdict]) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "file": str(arguments.file),
        "contract": arguments.contract,
        "arch": arguments.arch,
        "numerics": arguments.numerics,
        "options": {name: options.word(value) for name, value in call.items()},
        "ok": not any(verdict.status.is_failure for verdict in verdicts.values()),
        "outputs": {name: verdict.to_json() for name, verdict in verdicts.items()},
    }
