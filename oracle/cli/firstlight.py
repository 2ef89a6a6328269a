"""``fp8-oracle firstlight``: all that is asked of a machine whose GPU nobody has measured, in one command."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from rich.text import Text

from oracle.cli import common
from oracle.errors import DeviceError, OptionError, among, counted
from oracle.harness import firstlight
from oracle.harness.validation import arch_of

BUDGET = 480.0
"""Seconds; the answers of a machine with every library installed fit."""
STYLES = {firstlight.DONE: "green", firstlight.FAILED: "bold red", firstlight.LATE: "yellow", firstlight.LEFT: "dim"}


def add(commands: common.Commands) -> None:
    command = common.add_command(
        commands,
        "firstlight",
        _firstlight,
        "what a GPU that nobody has measured yet computes, in one command",
        "Ask this machine's GPU what the suite knows of others: what is installed, how its tensor cores accumulate, "
        "which reading of its block-scaled instructions holds, which installed kernels conform, whether each routine "
        "that the layer plans is right. Settings are only read. Run again with the same folder, it goes on where it "
        f"was stopped. {firstlight.PAGE} is the page of answers; DIR.zip is what to send back. Exit 0 when every "
        "question has an answer, 1 when one has none, 2 where there is no GPU.",
    )
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="gets the answers")
    text = "all questions together end after S seconds (default: %(default)g)"
    command.add_argument("--seconds", type=float, default=BUDGET, metavar="S", help=text)
    common.repeated(command, "--only", "NAME", "this question, by the name of its log; may be repeated")


def _firstlight(arguments: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise DeviceError("there is no GPU that torch can see: firstlight asks what a GPU computes")
    folder: Path = arguments.out
    arch, screen = arch_of("cuda"), common.console()
    every = firstlight.steps(arch, folder)
    names = [step.name for step in every]
    if unknown := [name for name in arguments.only if name not in names]:
        raise OptionError(f"--only {unknown[0]}: {among(unknown[0], names)}")
    chosen = [step for step in every if not arguments.only or step.name in arguments.only]
    ran = {}
    for one in firstlight.run(chosen, folder, arch=arch, seconds=arguments.seconds):
        ran[one.name] = one
        line = Text.assemble(
            (f"{one.status:<15}", STYLES[one.status]), f" {one.seconds:6.1f} s  {one.name}: {one.said}"
        )
        screen.print(line, soft_wrap=True)
    common.write_text(str(folder / firstlight.PAGE), firstlight.page(chosen, ran, folder, arch))
    packed = shutil.make_archive(str(folder), "zip", folder)
    answered = sum(one.status == firstlight.DONE for one in ran.values())
    known = firstlight.answered(folder, arch)
    for fact, answer, status in known:
        if status == firstlight.DIFFERS:
            common.say(f"{fact.what}: {answer}, where {fact.expected} was expected")
    if known:
        common.say(firstlight.counts(known, arch))
    common.say(f"{answered} of {counted(len(ran), 'question')} answered; {packed} is what to send back")
    return 0 if answered == len(ran) else 1
