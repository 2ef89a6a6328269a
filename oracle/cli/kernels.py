"""``fingerprint``: find out how a kernel by name computes, in a worker process (``validate`` judges it)."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from oracle.cli.common import Commands, add_command, say, whole
from oracle.errors import OptionError
from oracle.harness.probing import probe, probe_block_scaled
from oracle.harness.report import LIMIT
from oracle.tensorcore.block_probes import KINDS, BlockFingerprint, Kind
from oracle.tensorcore.fingerprint import Fingerprint
from oracle.tensorcore.instructions import F8F6F4 as FORMATS

OUT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ADAPTER: dict[str, Any] = {"metavar": "MODULE:CALLABLE", "help": "called as adapter(kernel, inputs, options)"}
DEVICE: dict[str, Any] = {"default": "cpu", "help": "cpu (default) or cuda"}
LIMITED: dict[str, Any] = {
    "type": float, "default": LIMIT, "metavar": "S", "help": f"seconds for one call (default: {LIMIT:g})"
}  # fmt: skip


def add_fingerprint(commands: Commands) -> None:
    command = add_command(
        commands, "fingerprint", _fingerprint, "find out how a kernel computes by probing it",
        "Probe MODULE:CALLABLE with products of [128, K] by [K, 128], and print what the answers give "
        "away. It is called as `fp8-oracle validate` calls it: in a worker process, with the contract's inputs by "
        "name, and out_dtype and out if it takes them. With --block-scaled it is one that applies block scales inside "
        "the instruction: one call tells which of the named readings it follows. Exit 2 when it raises, crashes, hangs "
        "or is no scaled product.",
    )  # fmt: skip
    command.add_argument("kernel", metavar="MODULE:CALLABLE")
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--contract", metavar="NAME", help="a product; see `fp8-oracle list`")
    said = "called with a, b [128, 256], a_scale, b_scale [128, 256 / block] (not swizzled) and out_dtype"
    what.add_argument("--block-scaled", choices=KINDS, help=said)
    for side in ("a", "b"):
        said = f"with --block-scaled mxf8f6f4: of {side} (default: {FORMATS[0]}); FP6 is one code a byte, FP4 packed"
        command.add_argument(f"--{side}-format", choices=FORMATS, help=said)
    command.add_argument("--adapter", **ADAPTER)
    command.add_argument("--k", type=int, default=512, help="with --contract: a multiple of 128 (default: 512)")
    said = "(default: bfloat16; with --block-scaled float32)"
    command.add_argument("--out-dtype", choices=sorted(OUT_DTYPES), help=said)
    command.add_argument("--device", **DEVICE)
    command.add_argument("--seed", type=whole(0), default=0)
    command.add_argument("--limit", **LIMITED)


def _fingerprint(arguments: argparse.Namespace) -> int:
    asked = {name: getattr(arguments, name) for name in ("adapter", "device", "limit")}
    if arguments.block_scaled is None:
        if arguments.a_format or arguments.b_format:
            raise OptionError("--a-format and --b-format belong to --block-scaled mxf8f6f4")
        asked |= {"k": arguments.k, "seed": arguments.seed, "out_dtype": OUT_DTYPES[arguments.out_dtype or "bfloat16"]}
        found: Fingerprint | BlockFingerprint = probe(arguments.kernel, arguments.contract, **asked)
    else:
        kind = Kind.of(arguments.block_scaled, arguments.a_format, arguments.b_format)
        out_dtype = OUT_DTYPES[arguments.out_dtype or "float32"]
        found = probe_block_scaled(arguments.kernel, kind, out_dtype=out_dtype, **asked)
    for line in found.lines():
        say(line)
    return 0
