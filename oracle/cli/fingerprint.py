"""``fp8-oracle fingerprint``: how a black-box kernel computes, found by probing it in a worker process."""

from __future__ import annotations

import argparse

import torch

from oracle.cli.common import Commands, whole
from oracle.harness.probing import SCALES, probe
from oracle.harness.validation import LIMIT

OUT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "fingerprint",
        help="find out how a kernel computes by probing it",
        description="Probe MODULE:CALLABLE with products of [128, K] by [K, 128], and print what the answers give "
        "away. It is called as `fp8-oracle validate` calls it: in a worker process, with the contract's inputs by "
        "name, and out_dtype and out if it takes them. Exit 2 when it raises, crashes, hangs or is no scaled product.",
    )
    command.add_argument("kernel", metavar="MODULE:CALLABLE")
    command.add_argument("--contract", required=True, choices=sorted(SCALES))
    command.add_argument("--adapter", metavar="MODULE:CALLABLE", help="called as adapter(kernel, inputs, options)")
    command.add_argument("--k", type=int, default=512, help="a multiple of 128 (default: 512)")
    command.add_argument("--out-dtype", choices=sorted(OUT_DTYPES), default="bfloat16")
    command.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    command.add_argument("--seed", type=whole(0), default=0)
    command.add_argument(
        "--limit", type=float, default=LIMIT, metavar="S", help=f"seconds for one call (default: {LIMIT:g})"
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    found = probe(
        arguments.kernel,
        arguments.contract,
        adapter=arguments.adapter,
        device=arguments.device,
        k=arguments.k,
        out_dtype=OUT_DTYPES[arguments.out_dtype],
        seed=arguments.seed,
        limit=arguments.limit,
    )
    for line in found.lines():
        print(line)
    return 0
