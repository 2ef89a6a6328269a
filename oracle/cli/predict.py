"""``fp8-oracle predict``: the bits that a schedule of the hardware produces."""

from __future__ import annotations

import argparse
from pathlib import Path

from torch import Tensor

import oracle
from oracle.cli.common import Commands, add_file_arguments, inputs_of, pairs
from oracle.fixtures import files as fixtures
from oracle.routines import get, options


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "predict",
        help="write the bits that a schedule of the hardware produces",
        description="Predict the output of a routine under a schedule and write it as tensor `out` "
        "(`out.NAME` for a routine with several outputs).",
    )
    add_file_arguments(command)
    command.add_argument("--numerics", required=True, metavar="NAME", help="the schedule, as sm90.promote128")
    command.add_argument("--write", required=True, type=Path, metavar="OUT.safetensors")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    contract = get(arguments.contract)
    tensors = fixtures.read_tensors(arguments.file)
    inputs = inputs_of(contract, tensors, pairs(arguments.input, "--input"), arguments.file)
    call = options.parse(contract, pairs(arguments.option, "--option"))
    found = oracle.predict(arguments.contract, inputs, numerics=arguments.numerics, **call)
    outputs = {"out": found} if isinstance(found, Tensor) else {f"out.{name}": t for name, t in found.items()}
    fixtures.write_tensors(arguments.write, outputs)
    for name, tensor in outputs.items():
        print(f"{arguments.write}: {name} {list(tensor.shape)} {tensor.dtype}, bits of {arguments.numerics}")
    return 0
