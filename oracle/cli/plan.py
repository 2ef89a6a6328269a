"""``fp8-oracle plan``: which backend the production layer chooses, and why not the others.

The decision is ``kernels.plan``'s; this file reaches it by name only, and prints the words it returns.
"""

from __future__ import annotations

import argparse
from importlib import import_module

from oracle.cli.common import Commands, pairs
from oracle.errors import OptionError, SubjectError


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "plan",
        help="which backend the production layer chooses, and why not the others",
        description="Print the decision for one problem and every reason. Exit 1 when no backend serves it.",
    )
    command.add_argument("--op", required=True, help="operation or routine, as fp8_gemm_nt")
    command.add_argument("--arch", help="sm90, gfx942, cpu...; default: this machine")
    for dim in ("m", "n", "k"):
        command.add_argument(f"--{dim}", type=int)
    command.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="any other field of the problem"
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        plan, errors = import_module("kernels.plan"), import_module("kernels.errors")
    except ImportError as error:
        raise SubjectError(f"the production layer cannot be imported ({error}); see `fp8-oracle doctor`") from None
    given = {name: _value(text) for name, text in pairs(arguments.option, "--option").items()}
    if twice := sorted({"op", "arch", *(d for d in "mnk" if getattr(arguments, d) is not None)} & set(given)):
        raise OptionError(f"--option {twice[0]}=...: {twice[0]} has a flag of its own, --{twice[0]}")
    dims = {dim: getattr(arguments, dim) for dim in ("m", "n", "k") if getattr(arguments, dim) is not None}
    try:
        text = plan.describe(op=arguments.op, arch=arguments.arch, **{**given, **dims})
    except errors.KernelError as error:
        raise OptionError(str(error)) from None
    print(text)
    return 1 if text.splitlines()[0].endswith(plan.NO_BACKEND) else 0


def _value(text: str) -> object:
    return int(text) if text.isdecimal() else {"true": True, "false": False}.get(text, text)
