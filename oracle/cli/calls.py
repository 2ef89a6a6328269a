"""Commands about one recorded call: ``judge``, ``explain``, ``predict`` and ``identify`` a file of tensors.

A file carries the inputs under the contract's names, or under those that ``--input NAME=TENSOR`` gives; tensors whose
name begins with ``out`` are outputs. A file of :mod:`oracle.fixtures.call_file` says itself what was called, and
``judge`` takes a folder of such files.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from rich.text import Text
from torch import Tensor

import oracle
from oracle.cli import common
from oracle.diagnosis.explain import Diagnosis, diagnose
from oracle.diagnosis.level import explaining
from oracle.errors import FixtureError, NumericsError, OptionError, among, counted
from oracle.fixtures import call_file, captures
from oracle.fixtures import files as fixtures
from oracle.fixtures.call_file import CallFile
from oracle.harness import provenance, runner
from oracle.harness.runner import Item
from oracle.report import console as words
from oracle.report import record
from oracle.report.console import STYLES
from oracle.report.outcome import Report
from oracle.report.record import Run
from oracle.routines import Contract, get, options
from oracle.routines.base import Call
from oracle.tensorcore.identify import told_apart
from oracle.tensorcore.instructions import arches

_OUTPUT: dict[str, Any] = {"default": "*", "metavar": "PATTERN", "help": "only outputs that match, as out.mine*"}


def add_judge(commands: common.Commands) -> None:
    command = common.add_command(
        commands,
        "judge",
        _judge,
        "judge recorded outputs: a safetensors file, or a folder of calls",
        "Judge every tensor of FILE whose name begins with `out` (for a routine with several outputs: "
        "out.q and out.scale, or out.LABEL.q and out.LABEL.scale). The inputs carry the contract's names. "
        "A file that `validate --save` or oracle.sample wrote says itself what was called, and needs no --contract. Of "
        "a folder every such call. Exit 1 when an output is wrong, or nothing could be judged.",
    )
    _add_call_arguments(command, several=True)
    command.add_argument("--output", **_OUTPUT)
    command.add_argument("--arch", help="whose arithmetic is admitted (default: sm90, or what the file says)")
    command.add_argument("--numerics", metavar="NAME", help="the declared schedule, as sm90.promote128")
    common.add_recipe(command)
    common.add_explain_level(command)
    common.add_json(command, "the verdicts")
    for name, (_, text) in common.FORMATS.items():
        if name != "json":
            command.add_argument(f"--{name}", metavar="OUT", help=text)
    text = "write every outcome to this new file as soon as it is known"
    command.add_argument("--record", type=Path, metavar="OUT.jsonl", help=text)
    common.add_volume_arguments(command)


def add_explain(commands: common.Commands) -> None:
    command = common.add_command(
        commands,
        "explain",
        _explain,
        "explain a failing output in a safetensors file",
        "Explain the output in FILE: where it fails, since which K block, which known faults reproduce it. "
        "A file that `validate --save` wrote says itself what was called; any other is named as for `judge`.",
    )
    _add_call_arguments(command, optional=True)
    command.add_argument("--output", metavar="TENSOR", help="the output's name in the file (default: out)")
    command.add_argument("--arch", help="whose arithmetic is admitted (default: sm90, or what the file says)")
    command.add_argument("--numerics", metavar="NAME", help="the declared schedule")
    common.add_recipe(command)
    common.add_json(command, "the explanation")


def add_predict(commands: common.Commands) -> None:
    command = common.add_command(
        commands,
        "predict",
        _predict,
        "write the bits that a schedule of the hardware produces",
        "Predict the output of a routine under a schedule and write it as tensor `out` "
        "(`out.NAME` for a routine with several outputs).",
    )
    _add_call_arguments(command)
    command.add_argument("--numerics", required=True, metavar="NAME", help="the schedule, as sm90.promote128")
    command.add_argument("--write", required=True, type=Path, metavar="OUT.safetensors")


def add_identify(commands: common.Commands) -> None:
    command = common.add_command(
        commands,
        "identify",
        _identify,
        "rank the schedules that explain a recorded output",
        "For every matching output: the schedules of the arch, by the fraction of bits they reproduce.",
    )
    _add_call_arguments(command)
    command.add_argument("--output", **_OUTPUT)
    command.add_argument("--arch", help="only schedules of this arch")
    command.add_argument("--top", type=common.whole(1), default=5, metavar="N", help="schedules to print (default: 5)")


# --- a call in a file ---------------------------------------------------------------------------------------

_Call = tuple[Contract, dict[str, Tensor], dict[str, Tensor], dict[str, object]]


def _add_call_arguments(command: argparse.ArgumentParser, *, several: bool = False, optional: bool = False) -> None:
    command.add_argument("file", type=Path, metavar="FILE|DIR" if several else "FILE.safetensors")
    optional |= several
    text = "for a file that does not say it; see `fp8-oracle list`" if optional else "see `fp8-oracle list`"
    command.add_argument("--contract", required=not optional, metavar="NAME", help=text)
    text = "an input of the contract that has another name in the file; TENSOR.T is its transpose"
    common.repeated(command, "--input", "NAME=TENSOR", text)
    common.repeated(command, "--option", "NAME=VALUE", "an option, as out_dtype=bfloat16")


def _read_call(arguments: argparse.Namespace) -> _Call:
    """The contract, every tensor of the file, those that are the contract's inputs, and the options.

    Raises FixtureError: a required input is not there; the message lists what is. OptionError: ``--input`` names
    something that is no input of the contract.
    """
    contract, path = get(arguments.contract), arguments.file
    tensors, renamed = fixtures.read_tensors(path), common.pairs(arguments.input, "--input")
    input_names = [spec.name for spec in contract.inputs]
    if unknown := [name for name in renamed if name not in input_names]:
        raise OptionError(
            f"--input {unknown[0]}=...: {contract.name} has no such input; {among(unknown[0], input_names)}"
        )
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
    return contract, tensors, inputs, options.parse(contract, common.pairs(arguments.option, "--option"))


# --- judge --------------------------------------------------------------------------------------------------


def _judge(arguments: argparse.Namespace) -> int:
    if arguments.file.is_dir():
        return _judge_folder(arguments)
    outputs: Mapping[str, Tensor | dict[str, Tensor]]
    if arguments.contract is None:
        case = _said(arguments)
        contract, inputs, call = get(case.contract), case.inputs, case.options
        arch, numerics = arguments.arch or case.arch or "sm90", common.declared(arguments) or case.numerics
        outputs = _matching({"out": case.output}, arguments.output, arguments.file)
    else:
        contract, tensors, inputs, call = _read_call(arguments)
        arch, numerics = arguments.arch or "sm90", common.declared(arguments)
        outputs = _outputs(contract, tensors, arguments.output, arguments.file)
    asked: dict[str, Any] = {"arch": arch, "numerics": numerics, "explain": arguments.explain, **call}
    items = [
        Item(
            f"calls/{arguments.file}",
            contract.name,
            label,
            arch,
            partial(oracle.judge, contract.name, inputs, output, **asked),
            fixtures.digest(arguments.file),
            flags=_flags(arguments, label),
        )
        for label, output in outputs.items()
    ]
    report = _run(items, arguments)
    verdicts = {outcome.subject: outcome.verdict for outcome in report.outcomes}
    screen = common.screen_of(arguments)
    for label, verdict in verdicts.items():
        if not arguments.quiet or verdict.status.is_failure:
            screen.print(common.verdict_line(verdict, f"{label}: {verdict.summary}"), soft_wrap=True)
    common.write_reports(report, arguments, but=("json",))
    failing = any(verdict.status.is_failure for verdict in verdicts.values())
    judgement = {
        "schema": "fp8-oracle.judgement/1",
        "file": str(arguments.file),
        "contract": contract.name,
        "arch": arch,
        "numerics": numerics,
        "options": {option: options.word(value) for option, value in call.items()},
        "ok": not failing,
        "outputs": {label: verdict.to_json() for label, verdict in verdicts.items()},
    }
    common.write_json(arguments.json, judgement)
    return 1 if failing else 0


def _flags(arguments: argparse.Namespace, output: str) -> str:
    """What `explain` of a file needs beside its name, to say the same call and this output of it."""
    asked = {name: getattr(arguments, name) for name in ("contract", "arch", "numerics", "recipe")}
    asked["output"] = output if arguments.contract is not None else None
    words = [word for name, value in asked.items() if value is not None for word in (f"--{name}", value)]
    for name in ("input", "option"):
        words += [word for value in getattr(arguments, name) or () for word in (f"--{name}", value)]
    return shlex.join(words)


def _run(items: Sequence[Item], arguments: argparse.Namespace) -> Report:
    """Judge the items one after the other, and record each where a record was asked for."""
    started, start = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    run = Run(started, provenance.machine(), provenance.versions(()), {"calls": str(arguments.file)}, len(items))
    recorder = None if arguments.record is None else record.start(arguments.record, run, resume=False)
    outcomes = []
    for item in items:
        outcomes.append(item.outcome())
        if recorder is not None:
            key = record.key_of(item.id, item.subject, item.arch, item.stamp, run)
            recorder.append(key, outcomes[-1])
    seconds = time.perf_counter() - start
    if recorder is not None:
        recorder.end((), seconds, 0)
    return Report(tuple(outcomes), (), run.machine, seconds, run.versions, started)


def _judge_folder(arguments: argparse.Namespace) -> int:
    """Judge every call of a folder; a table, what fails, and a closing line."""
    items, left_out = _items(arguments)
    for line in left_out:
        common.say(f"fp8-oracle: {line}", stderr=True)
    if not items:
        dumped = "; `fp8-oracle cases from-flashinfer` makes calls of FlashInfer's dumps"
        raise FixtureError(f"{arguments.file}: holds no call, no file that ends in {call_file.SUFFIX}{dumped}")
    with explaining(arguments.explain):
        report = _run(items, arguments)
    words.print_report(report, common.screen_of(arguments), quiet=arguments.quiet, verbose=arguments.verbose)
    common.write_reports(report, arguments)
    return 0 if report.ok else 1


def _items(arguments: argparse.Namespace) -> tuple[list[Item], list[str]]:
    """What is to be judged of a folder, and what is left out of it, in words. A call is read when it is judged."""
    folder, numerics = arguments.file, common.declared(arguments)
    if arguments.input or arguments.option:
        raise OptionError("--input and --option name the call of one file; the files of a folder say it themselves")
    if arguments.output != _OUTPUT["default"]:
        raise OptionError("--output chooses outputs of one file; a call of a folder has one")
    asked = {"arch": arguments.arch, "numerics": arguments.numerics, "recipe": arguments.recipe}
    flags = " ".join(f"--{name} {shlex.quote(value)}" for name, value in asked.items() if value is not None)
    paths, left_out = call_file.within(folder)
    items = []
    for path in paths:
        name, kernel, arch = "-", "-", arguments.arch
        try:
            metadata = fixtures.read_metadata(path)
            name, kernel = metadata.get("contract", "-"), metadata.get("kernel") or "-"
            arch = arch or metadata.get("arch") or "sm90"
        except FixtureError:  # its verdict says it again
            pass
        if arguments.contract in (None, name) or name == "-":
            judge = partial(runner.judge_call, partial(call_file.read, path), arch or "-", numerics)
            stamp = fixtures.digest(path)
            items.append(Item(f"calls/{path}", name, kernel, arch or "-", judge, stamp, flags=flags))
    return items, left_out


def _outputs(
    contract: Contract, tensors: dict[str, Tensor], pattern: str, path: Path
) -> Mapping[str, Tensor | dict[str, Tensor]]:
    """Outputs by name; for a contract with several outputs, groups by the name before the last dot."""
    names, single = [name for name in tensors if name.startswith("out")], contract.returns == ("out",)
    outputs: dict[str, Tensor | dict[str, Tensor]] = {}
    if single:
        outputs = {name: tensors[name] for name in sorted(names)}
    else:
        ends = tuple(f".{output}" for output in contract.returns)
        for group in sorted({name.rpartition(".")[0] for name in names if name.endswith(ends)}):
            if missing := [output for output in contract.returns if f"{group}.{output}" not in tensors]:
                raise FixtureError(
                    f"{path}: {group} lacks {group}.{missing[0]}; {contract.name} has the outputs "
                    f"{', '.join(contract.returns)}"
                )
            outputs[group] = {output: tensors[f"{group}.{output}"] for output in contract.returns}
    if not outputs:
        wanted = "out*" if single else " and ".join(f"out.{o}" for o in contract.returns)
        tensor_names = ", ".join(sorted(tensors))
        raise FixtureError(
            f"{path}: no output matches {pattern!r} (tensors named {wanted} are judged); it holds {tensor_names}"
        )
    return _matching(outputs, pattern, path)


def _matching(
    results: Mapping[str, Tensor | dict[str, Tensor]], pattern: str, path: Path
) -> Mapping[str, Tensor | dict[str, Tensor]]:
    """The outputs whose names match."""
    matching = {name: output for name, output in results.items() if fnmatchcase(name, pattern)}
    if not matching:
        raise FixtureError(f"{path}: no output matches {pattern!r}; of outputs {among(pattern, results)}")
    return matching


# --- explain ------------------------------------------------------------------------------------------------


def _explain(arguments: argparse.Namespace) -> int:
    case = _said(arguments) if arguments.contract is None else _named(arguments)
    arch, numerics = arguments.arch or case.arch or "sm90", common.declared(arguments) or case.numerics
    verdict = get(case.contract).judge(case.inputs, case.output, arch=arch, numerics=numerics, **case.options)
    result = diagnose(case.contract, case.inputs, case.output, arch=arch, numerics=numerics, **case.options)
    screen = common.console(stderr=arguments.json == "-")
    text = Text.assemble((str(verdict.status), STYLES[verdict.status]), f" {verdict.summary}")
    operands = Call(get(case.contract), case.inputs, case.options, arch=arch).optional_operands
    held = None
    has_model = arch in arches()  # there is no class of arithmetic for a CPU
    if result.failing and has_model and operands is not None and operands.parts and operands.given:
        held = oracle.classify(case.contract, case.inputs, case.output, arch=arch, **case.options)
    classes = [] if held is None else [f"  of what is known of {arch}: {held}"]
    for line in (text, *classes, *_lines(result)):
        screen.print(line, soft_wrap=True)
    facts = (
        "name",
        "numerics",
        "explained",
        "failing",
        "contradicted",
        "placed",
        "beyond",
        "local",
        "where",
        "complete",
        "met_in",
    )
    diagnosis = {name: getattr(result, name) for name in ("failing", "total", "where", "first_block")} | {
        "findings": list(result.words),
        "explanations": [{name: getattr(e, name) for name in facts} for e in result.explanations],
    }
    within = None if held is None else held.name
    head = {"schema": "fp8-oracle.explanation/1", "contract": case.contract, "class": within}
    common.write_json(arguments.json, head | {"verdict": verdict.to_json(), "diagnosis": diagnosis})
    return 1 if verdict.status.is_failure else 0


def _said(arguments: argparse.Namespace) -> CallFile:
    """The call that a saved case says of itself; OptionError for flags that name another one."""
    case = call_file.read(arguments.file)
    if arguments.input or arguments.option:
        flag = "--input" if arguments.input else "--option"
        raise OptionError(f"{flag}: {arguments.file} says what was called; name another call with --contract")
    return case


def _named(arguments: argparse.Namespace) -> CallFile:
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
    return CallFile(contract.name, inputs, single, call, arguments.arch or "sm90", common.declared(arguments))


def _lines(result: Diagnosis) -> list[str]:
    """A diagnosis as lines of text."""
    if not result.failing:
        return ["  no element fails: there is nothing to explain"]
    lines = [f"  {result.failing} of {counted(result.total, 'element')} fail: {result.where}"]
    lines += [f"  {finding}" for finding in result.words]
    for rank, e in enumerate(result.explanations[:5], 1):
        met_in = f"; met in {e.met_in}" if e.met_in else ""
        lines.append(f"  {rank}. {e.name}: {e.said} ({e.numerics}{met_in})")
    if not result.explanations:
        lines.append("  no fault of the catalogue reproduces half of the failing elements")
    return lines


# --- predict and identify -----------------------------------------------------------------------------------


def _predict(arguments: argparse.Namespace) -> int:
    _, _, inputs, call = _read_call(arguments)
    predicted = oracle.predict(arguments.contract, inputs, numerics=arguments.numerics, **call)
    outputs = (
        {"out": predicted} if isinstance(predicted, Tensor) else {f"out.{name}": t for name, t in predicted.items()}
    )
    fixtures.write_tensors(arguments.write, outputs)
    for name, tensor in outputs.items():
        common.say(f"{arguments.write}: {name} {list(tensor.shape)} {tensor.dtype}, bits of {arguments.numerics}")
    return 0


def _ties(names: Sequence[str]) -> str | None:
    """What would tell schedules with every bit apart, in one line; None for fewer than two, and for what is none."""
    try:
        return f"  {len(names)} give every bit here: {told_apart(names)}" if len(names) > 1 else None
    except NumericsError:  # recipes, ways to combine experts
        return None


def _identify(arguments: argparse.Namespace) -> int:
    _, tensors, inputs, call = _read_call(arguments)
    names = [name for name in sorted(tensors) if name.startswith("out") and fnmatchcase(name, arguments.output)]
    if not names:
        raise FixtureError(f"{arguments.file}: no output matches {arguments.output!r}; it holds {', '.join(tensors)}")
    ranked = {
        name: oracle.identify(arguments.contract, inputs, tensors[name], arch=arguments.arch, **call) for name in names
    }
    for name, matches in ranked.items():
        common.say(name)
        for match in matches[: arguments.top]:
            print(f"  {100 * match.equal:9.4f}% of {counted(match.compared, 'element')}  {match.schedule}")
        if arguments.top > 1 and (text := _ties([match.schedule for match in matches if match.equal == 1.0])):
            print(text)
    return 0
