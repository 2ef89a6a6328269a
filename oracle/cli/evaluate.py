"""``fp8-oracle evaluate``: the judge of a kernel-evaluation suite."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.text import Text

from oracle.cli.common import Commands, add_command, console, pairs, repeated, whole, write_text
from oracle.errors import OptionError
from oracle.fixtures import suite
from oracle.harness.evaluation import evaluate
from oracle.harness.report import LIMIT
from oracle.routines import get
from oracle.routines import options as grammar

PASSED = "PASSED"


def add(commands: Commands) -> None:
    command = add_command(
        commands,
        "evaluate",
        _evaluate,
        "judge a solution of a kernel-evaluation suite",
        "Run a solution on the workloads of a definition, in the JSON of flashinfer-bench, and write its traces with "
        "the verdict of a contract as the evaluation. Exit 0 when every workload is PASSED.",
    )
    for name, text in (("definition", "what is computed"), ("solution", "sources in Python or Triton")):
        command.add_argument(f"--{name}", type=Path, required=True, metavar="FILE.json", help=text)
    text = "a workload a line, alone or in a trace"
    command.add_argument("--workload", type=Path, required=True, metavar="FILE.jsonl", help=text)
    text = "what judges the outputs (default: the one that a tag of the definition names)"
    command.add_argument("--contract", metavar="NAME", help=text)
    repeated(command, "--input", "NAME=INPUT", "an input of the contract under its name there; X.T is transposed")
    repeated(command, "--option", "NAME=VALUE", "an option of the contract")
    text = "where paths begin (default: the folder of the workloads, or its parent where that is called workloads)"
    command.add_argument("--root", type=Path, metavar="DIR", help=text)
    command.add_argument("--traces", default="-", metavar="OUT.jsonl", help="where the traces go (default: -)")
    command.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    command.add_argument("--arch", help="whose arithmetic is admitted (default: that of the device)")
    command.add_argument("--numerics", metavar="NAME", help="the declared schedule")
    text = "run the solution in a sandbox without the oracle, network or files to write"
    command.add_argument("--untrusted", action="store_true", help=text)
    text = "seconds for one call, and for the import (default: %(default)g)"
    command.add_argument("--limit", type=float, default=LIMIT, metavar="S", help=text)
    command.add_argument("--seed", type=whole(0), help="of random inputs (default: a new one for each run)")


def _evaluate(arguments: argparse.Namespace) -> int:
    definition = suite.read_definition(arguments.definition)
    workloads = suite.read_workloads(arguments.workload, definition)
    solution = suite.read_solution(arguments.solution, definition)
    name = arguments.contract or next(iter(definition.tagged("contract")), None)
    if name is None:
        raise OptionError(f"{arguments.definition}: no tag names a contract; pass --contract, see `fp8-oracle list`")
    tagged = dict(text.partition("=")[::2] for text in definition.tagged("option"))
    options = grammar.parse(get(name), {**tagged, **pairs(arguments.option, "--option")})
    folder = arguments.workload.resolve().parent
    root = arguments.root or (folder.parent if folder.name == "workloads" else folder)
    names = ("device", "arch", "numerics", "untrusted", "limit", "seed")
    asked = {key: getattr(arguments, key) for key in names}
    renamed = pairs(arguments.input, "--input")
    traces, screen = [], console(stderr=arguments.traces == "-")
    for trace in evaluate(definition, workloads, solution, name, root=root, renamed=renamed, options=options, **asked):
        traces.append(trace)
        status, sentence = trace["evaluation"]["status"], trace["evaluation"]["log"].partition("\n")[0]
        style = "green" if status == PASSED else "bold red"
        screen.print(Text.assemble((status, style), f" {trace['workload']['uuid']}: {sentence}"), soft_wrap=True)
    write_text(arguments.traces, "".join(json.dumps(trace, allow_nan=False) + "\n" for trace in traces))
    good = sum(trace["evaluation"]["status"] == PASSED for trace in traces)
    screen.print(f"{solution.name}: {good} of {len(traces)} workloads PASSED, judged as {name}", soft_wrap=True)
    return 0 if good == len(traces) else 1
