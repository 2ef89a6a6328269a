"""``fp8-oracle cases``: calls of real layers, and of FlashInfer's dumps, as files."""

from __future__ import annotations

import argparse
from pathlib import Path

from oracle.cli.common import Commands, add_command, pairs, repeated, say, whole
from oracle.fixtures import flashinfer_dumps, layers, suite


def add(commands: Commands) -> None:
    command = commands.add_parser("cases", help="calls of real layers and engines, as files")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    making = add_command(
        actions,
        "from-checkpoint",
        _from_checkpoint,
        "write a call for layers of a checkpoint",
        "Write a call for each chosen linear layer: its weight and scales as they are, activations drawn or given. "
        "`fp8-oracle validate KERNEL --contract NAME --cases OUT` runs a kernel on them.",
    )
    making.add_argument("folder", type=Path, metavar="DIR", help="a checkpoint as `fp8-oracle lint` reads it")
    making.add_argument("--to", type=Path, required=True, metavar="OUT", help="the folder of the calls, which is made")
    text = "layers that match, as 'model.layers.3.*' (default: the first of every kind)"
    making.add_argument("--layer", metavar="PATTERN", help=text)
    text = "rows of the activations (default: %(default)d)"
    making.add_argument("--tokens", type=whole(1), default=layers.TOKENS, metavar="N", help=text)
    text = "activations [..., K], named as the layer or one tensor for all (default: drawn)"
    making.add_argument("--activations", type=Path, metavar="FILE.safetensors", help=text)
    making.add_argument("--seed", type=whole(0), default=0, help="other draws (default: 0)")
    reading = add_command(
        actions,
        "from-flashinfer",
        _from_flashinfer,
        "write the calls that FlashInfer dumped",
        "Read the folders that FlashInfer writes with FLASHINFER_LOGLEVEL=10, and write every finished call of a "
        "contract as a file; `fp8-oracle judge OUT` judges them.",
    )
    reading.add_argument("folder", type=Path, metavar="DUMPS", help="FLASHINFER_DUMP_DIR, or one call in it")
    reading.add_argument("--to", type=Path, required=True, metavar="OUT", help="the folder of the calls, which is made")
    reading.add_argument("--contract", metavar="NAME", help="where the function has no contract's name")
    repeated(reading, "--input", "NAME=PARAMETER", "an input of the contract that has another name; X.T is transposed")
    repeated(reading, "--option", "NAME=VALUE", "an option of the contract that the call does not say")
    writing = add_command(
        actions,
        "to-suite",
        _to_suite,
        "write calls as definitions and workloads of an evaluation suite",
        "Write the calls of a folder as definitions and workloads in the JSON of flashinfer-bench, for "
        "`fp8-oracle evaluate` and for the suite itself. Codes of four bits are left out: the schema lacks the dtype.",
    )
    writing.add_argument("folder", type=Path, metavar="CALLS", help="call files, with or without outputs")
    writing.add_argument("--to", type=Path, required=True, metavar="OUT", help="the folder of the suite, which is made")


def _to_suite(arguments: argparse.Namespace) -> int:
    for line in suite.write(arguments.folder, arguments.to):
        say(line)
    return 0


def _from_flashinfer(arguments: argparse.Namespace) -> int:
    renamed, options = pairs(arguments.input, "--input"), pairs(arguments.option, "--option")
    asked = {"contract": arguments.contract, "renamed": renamed, "options": options}
    for line in flashinfer_dumps.calls(arguments.folder, arguments.to, **asked):
        say(line)
    return 0


def _from_checkpoint(arguments: argparse.Namespace) -> int:
    names = ("layer", "tokens", "activations", "seed")
    for line in layers.calls(arguments.folder, arguments.to, **{name: getattr(arguments, name) for name in names}):
        say(line)
    return 0
