"""What several commands share: consoles, ``name=value`` arguments, tensors of a user's file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from torch import Tensor

from oracle.errors import FixtureError, OptionError
from oracle.fixtures import captures
from oracle.routines.base import Contract

# argparse has no public name for what add_subparsers returns.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
PIPE_WIDTH = 160  # columns of a table that does not go to a terminal


class _Console(Console):
    """A console that leaves a closed pipe to the command line; rich would exit as if something had failed."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough for the table when there is none."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return _Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def whole(least: int) -> Callable[[str], int]:
    """A type of argparse: an integer that is at least ``least``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return parse


def pairs(given: Sequence[str], flag: str) -> dict[str, str]:
    """``["k=v", ...]`` as a dict; OptionError names what is not of that form or stands twice."""
    result: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise OptionError(f"{flag} {text!r} is not of the form name=value")
        if name in result:
            raise OptionError(f"{flag} gives {name!r} twice")
        result[name] = value
    return result


def inputs_of(
    contract: Contract, tensors: Mapping[str, Tensor], renamed: Mapping[str, str], path: Path
) -> dict[str, Tensor]:
    """The contract's inputs out of a file: by their own names, or as ``--input name=tensor`` says.

    Raises
    ------
    FixtureError
        A required input is not there; the message lists what is.
    OptionError
        ``--input`` names something that is no input of the contract.
    """
    known = [spec.name for spec in contract.inputs]
    if unknown := [name for name in renamed if name not in known]:
        raise OptionError(f"--input {unknown[0]}=...: {contract.name} takes {', '.join(known)}")
    found: dict[str, Tensor] = {}
    for spec in contract.inputs:
        tensor = renamed.get(spec.name, spec.name)
        if spec.name in renamed or tensor in tensors:
            found[spec.name] = captures.pick(tensors, tensor, path)
        elif not spec.optional:
            raise FixtureError(
                f"{path}: has no tensor {spec.name!r}, an input of {contract.name}; it holds "
                f"{', '.join(sorted(tensors))}; name the right one with --input {spec.name}=TENSOR"
            )
    return found


def add_volume_arguments(command: argparse.ArgumentParser) -> None:
    """``--quiet`` and ``--verbose``."""
    volume = command.add_mutually_exclusive_group()
    volume.add_argument("-q", "--quiet", action="store_true", help="only what fails, and the closing line")
    volume.add_argument("-v", "--verbose", action="store_true", help="a line for every case")


def add_file_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments with which a file of tensors and a contract are named."""
    command.add_argument("file", type=Path, metavar="FILE.safetensors")
    command.add_argument("--contract", required=True, metavar="NAME", help="see `fp8-oracle list`")
    command.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=TENSOR",
        help="an input of the contract that has another name in the file; TENSOR.T is its transpose",
    )
    command.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="an option, as out_dtype=bfloat16"
    )
