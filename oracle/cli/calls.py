"""Commands about one recorded call: ``judge``, ``explain``, ``predict`` and ``identify`` a file of tensors.

A file carries the inputs under the contract's names, or under those that ``--input NAME=TENSOR`` gives; tensors whose
name begins with ``out`` are outputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.text import Text
from torch import Tensor

import oracle
from oracle.cli.common import (
    Commands,
    add_command,
    add_explain_level,
    add_json,
    add_recipe,
    console,
    declared,
    pairs,
    repeated,
    say,
    verdict_line,
    whole,
    write_json,
)
from oracle.diagnosis.explain import Diagnosis, diagnose
from oracle.errors import FixtureError, OptionError, among, counted
from oracle.fixtures import captures, failing_case
from oracle.fixtures import files as fixtures
from oracle.fixtures.failing_case import FailingCase
from oracle.report.console import STYLES
from oracle.routines import Contract, get, options
from oracle.routines.base import Call
from oracle.tensorcore.instructions import arches

_OUTPUT: dict[str, Any] = {"default": "*", "metavar": "PATTERN", "help": "only outputs that match, as out.mine*"}


def add_judge(commands: Commands) -> None:
    command = add_command(
        commands, "judge", _judge, "judge recorded outputs in a safetensors file",
        "Judge every tensor of FILE whose name begins with `out` (for a routine with several outputs: "
        "out.q and out.scale, or out.LABEL.q and out.LABEL.scale). The inputs carry the contract's names. "
        "A file that `validate --save` wrote says itself what was called, and needs no --contract.",
    )  # fmt: skip
    _add_call_arguments(command, required=False)
    command.add_argument("--output", **_OUTPUT)
    command.add_argument("--arch", help="whose arithmetic is admitted (default: sm90, or what the file says)")
    command.add_argument("--numerics", metavar="NAME", help="the declared schedule, as sm90.promote128")
    add_recipe(command)
    add_explain_level(command)
    add_json(command, "the verdicts")


def add_explain(commands: Commands) -> None:
    command = add_command(
        commands, "explain", _explain, "explain a failing output in a safetensors file",
        "Explain the output in FILE: where it fails, since which K block, which known faults reproduce it. "
        "A file that `validate --save` wrote says itself what was called; any other is named as for `judge`.",
    )  # fmt: skip
    _add_call_arguments(command, required=False)
    command.add_argument("--output", metavar="TENSOR", help="the output's name in the file (default: out)")
    command.add_argument("--arch", help="whose arithmetic is admitted (default: sm90, or what the file says)")
    command.add_argument("--numerics", metavar="NAME", help="the declared schedule")
    add_recipe(command)
    add_json(command, "the explanation")


def add_predict(commands: Commands) -> None:
    command = add_command(
        commands, "predict", _predict, "write the bits that a schedule of the hardware produces",
        "Predict the output of a routine under a schedule and write it as tensor `out` "
        "(`out.NAME` for a routine with several outputs).",
    )  # fmt: skip
    _add_call_arguments(command)
    command.add_argument("--numerics", required=True, metavar="NAME", help="the schedule, as sm90.promote128")
    command.add_argument("--write", required=True, type=Path, metavar="OUT.safetensors")


def add_identify(commands: Commands) -> None:
    command = add_command(
        commands, "identify", _identify, "rank the schedules that explain a recorded output",
        "For every matching output: the schedules of the arch, by the fraction of bits they reproduce.",
    )  # fmt: skip
    _add_call_arguments(command)
    command.add_argument("--output", **_OUTPUT)
    command.add_argument("--arch", help="only schedules of this arch")
    command.add_argument("--top", type=whole(1), default=5, metavar="N", help="schedules to print (default: 5)")


# --- a call in a file ---------------------------------------------------------------------------------------

_Call = tuple[Contract, dict[str, Tensor], dict[str, Tensor], dict[str, object]]


def _add_call_arguments(command: argparse.ArgumentParser, *, required: bool = True) -> None:
    command.add_argument("file", type=Path, metavar="FILE.safetensors")
    said = "see `fp8-oracle list`" if required else "for a file that does not say it; see `fp8-oracle list`"
    command.add_argument("--contract", required=required, metavar="NAME", help=said)
    said = "an input of the contract that has another name in the file; TENSOR.T is its transpose"
    repeated(command, "--input", "NAME=TENSOR", said)
    repeated(command, "--option", "NAME=VALUE", "an option, as out_dtype=bfloat16")


def _read_call(arguments: argparse.Namespace) -> _Call:
    """The contract, every tensor of the file, those that are the contract's inputs, and the options.

    Raises FixtureError: a required input is not there; the message lists what is. OptionError: ``--input`` names
    something that is no input of the contract.
    """
    contract, path = get(arguments.contract), arguments.file
    tensors, renamed = fixtures.read_tensors(path), pairs(arguments.input, "--input")
    known = [spec.name for spec in contract.inputs]
    if unknown := [name for name in renamed if name not in known]:
        raise OptionError(f"--input {unknown[0]}=...: {contract.name} has no such input; {among(unknown[0], known)}")
    inputs: dict[str, Tensor] = {}
    for spec in contract.inputs:
        tensor = renamed.get(spec.name, spec.name)
        if spec.name in renamed or tensor in tensors:
            inputs[spec.name] = captures.pick(tensors, tensor, path)
        elif not spec.optional:
            raise FixtureError(
                f"{path}: has no tensor {spec.name!r}, an input of {contract.name}; it holds "
                f"{', '.join(sorted(tensors))}; name the right one with --input {spec.name}=TENSOR"
            )
    return contract, tensors, inputs, options.parse(contract, pairs(arguments.option, "--option"))


# --- judge --------------------------------------------------------------------------------------------------


def _judge(arguments: argparse.Namespace) -> int:
    outputs: Mapping[str, Tensor | dict[str, Tensor]]
    if arguments.contract is None:
        case = _said(arguments)
        contract, inputs, call = get(case.contract), case.inputs, case.options
        arch, numerics = arguments.arch or case.arch, declared(arguments) or case.numerics
        outputs = _matching({"out": case.output}, arguments.output, arguments.file)
    else:
        contract, tensors, inputs, call = _read_call(arguments)
        arch, numerics = arguments.arch or "sm90", declared(arguments)
        outputs = _outputs(contract, tensors, arguments.output, arguments.file)
    verdicts = {
        name: oracle.judge(contract.name, inputs, output, arch=arch, numerics=numerics, explain=arguments.explain,
                           **call)
        for name, output in outputs.items()
    }  # fmt: skip
    screen = console(stderr=arguments.json == "-")
    for name, verdict in verdicts.items():
        screen.print(verdict_line(verdict, f"{name}: {verdict.summary}"), soft_wrap=True)
    failing = any(verdict.status.is_failure for verdict in verdicts.values())
    record = {
        "schema": "fp8-oracle.judgement/1",
        "file": str(arguments.file),
        "contract": contract.name,
        "arch": arch,
        "numerics": numerics,
        "options": {name: options.word(value) for name, value in call.items()},
        "ok": not failing,
        "outputs": {name: verdict.to_json() for name, verdict in verdicts.items()},
    }
    write_json(arguments.json, record)
    return 1 if failing else 0


def _outputs(
    contract: Contract, tensors: dict[str, Tensor], pattern: str, path: Path
) -> Mapping[str, Tensor | dict[str, Tensor]]:
    """Outputs by name; for a contract with several outputs, groups by the name before the last dot."""
    names, single = [name for name in tensors if name.startswith("out")], contract.returns == ("out",)
    found: dict[str, Tensor | dict[str, Tensor]] = {}
    if single:
        found = {name: tensors[name] for name in sorted(names)}
    else:
        ends = tuple(f".{output}" for output in contract.returns)
        for group in sorted({name.rpartition(".")[0] for name in names if name.endswith(ends)}):
            if missing := [output for output in contract.returns if f"{group}.{output}" not in tensors]:
                raise FixtureError(
                    f"{path}: {group} lacks {group}.{missing[0]}; {contract.name} has the outputs "
                    f"{', '.join(contract.returns)}"
                )
            found[group] = {output: tensors[f"{group}.{output}"] for output in contract.returns}
    if not found:
        wanted = "out*" if single else " and ".join(f"out.{o}" for o in contract.returns)
        held = ", ".join(sorted(tensors))
        raise FixtureError(
            f"{path}: no output matches {pattern!r} (tensors named {wanted} are judged); it holds {held}"
        )
    return _matching(found, pattern, path)


def _matching(
    found: Mapping[str, Tensor | dict[str, Tensor]], pattern: str, path: Path
) -> Mapping[str, Tensor | dict[str, Tensor]]:
    """The outputs whose names match."""
    matching = {name: output for name, output in found.items() if fnmatchcase(name, pattern)}
    if not matching:
        raise FixtureError(f"{path}: no output matches {pattern!r}; of outputs {among(pattern, found)}")
    return matching


# --- explain ------------------------------------------------------------------------------------------------


def _explain(arguments: argparse.Namespace) -> int:
    case = _said(arguments) if arguments.contract is None else _named(arguments)
    arch, numerics = arguments.arch or case.arch, declared(arguments) or case.numerics
    verdict = get(case.contract).judge(case.inputs, case.output, arch=arch, numerics=numerics, **case.options)
    found = diagnose(case.contract, case.inputs, case.output, arch=arch, numerics=numerics, **case.options)
    screen = console(stderr=arguments.json == "-")
    said = Text.assemble((str(verdict.status), STYLES[verdict.status]), f" {verdict.summary}")
    operands = Call(get(case.contract), case.inputs, case.options, arch=arch).optional_operands
    held = None
    known = arch in arches()  # there is no class of arithmetic for a CPU
    if found.failing and known and operands is not None and operands.parts and operands.given:
        held = oracle.classify(case.contract, case.inputs, case.output, arch=arch, **case.options)
    classes = [] if held is None else [f"  of what is known of {arch}: {held}"]
    for line in (said, *classes, *_lines(found)):
        screen.print(line, soft_wrap=True)
    facts = ("name", "numerics", "explained", "failing", "contradicted", "placed", "beyond", "local", "where",
             "complete", "met_in")  # fmt: skip
    diagnosis = {name: getattr(found, name) for name in ("failing", "total", "where", "first_block")} | {
        "findings": list(found.findings),
        "explanations": [{name: getattr(e, name) for name in facts} for e in found.explanations],
    }
    within = None if held is None else held.name
    head = {"schema": "fp8-oracle.explanation/1", "contract": case.contract, "class": within}
    write_json(arguments.json, head | {"verdict": verdict.to_json(), "diagnosis": diagnosis})
    return 1 if verdict.status.is_failure else 0


def _said(arguments: argparse.Namespace) -> FailingCase:
    """The call that a saved case says of itself; OptionError for flags that name another one."""
    case = failing_case.read(arguments.file)
    if arguments.input or arguments.option:
        flag = "--input" if arguments.input else "--option"
        raise OptionError(f"{flag}: {arguments.file} says what was called; name another call with --contract")
    return case


def _named(arguments: argparse.Namespace) -> FailingCase:
    """The call that the arguments name, for a file that does not say what was called."""
    contract, tensors, inputs, call = _read_call(arguments)
    name = arguments.output or "out"
    names = {o: name if contract.returns == ("out",) else f"{name}.{o}" for o in contract.returns}
    if missing := [n for n in names.values() if n not in tensors]:
        raise FixtureError(
            f"{arguments.file}: has no tensor {missing[0]!r}; outputs in it: "
            f"{', '.join(sorted(n for n in tensors if n.startswith('out'))) or 'none'}; name one with --output"
        )
    output = {o: tensors[n] for o, n in names.items()}
    single = output["out"] if contract.returns == ("out",) else output
    return FailingCase(contract.name, inputs, single, call, arguments.arch or "sm90", declared(arguments))


def _lines(found: Diagnosis) -> list[str]:
    """A diagnosis as lines of text."""
    if not found.failing:
        return ["  no element fails: there is nothing to explain"]
    lines = [f"  {found.failing} of {counted(found.total, 'element')} fail: {found.where}"]
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


# --- predict and identify -----------------------------------------------------------------------------------


def _predict(arguments: argparse.Namespace) -> int:
    _, _, inputs, call = _read_call(arguments)
    found = oracle.predict(arguments.contract, inputs, numerics=arguments.numerics, **call)
    outputs = {"out": found} if isinstance(found, Tensor) else {f"out.{name}": t for name, t in found.items()}
    fixtures.write_tensors(arguments.write, outputs)
    for name, tensor in outputs.items():
        say(f"{arguments.write}: {name} {list(tensor.shape)} {tensor.dtype}, bits of {arguments.numerics}")
    return 0


def _identify(arguments: argparse.Namespace) -> int:
    _, tensors, inputs, call = _read_call(arguments)
    names = [name for name in sorted(tensors) if name.startswith("out") and fnmatchcase(name, arguments.output)]
    if not names:
        raise FixtureError(f"{arguments.file}: no output matches {arguments.output!r}; it holds {', '.join(tensors)}")
    ranked = {
        name: oracle.identify(arguments.contract, inputs, tensors[name], arch=arguments.arch, **call) for name in names
    }
    for name, matches in ranked.items():
        say(name)
        for match in matches[: arguments.top]:
            print(f"  {100 * match.equal:9.4f}% of {counted(match.compared, 'element')}  {match.schedule}")
    return 0
