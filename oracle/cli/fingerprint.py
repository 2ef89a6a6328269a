"""``fp8-oracle fingerprint``: how a black-box kernel computes, found by probing it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from oracle.cli.common import Commands, whole
from oracle.errors import OptionError, OracleError, SubjectError
from oracle.faults.roles import ROLES, TORCH_NAMES
from oracle.harness.worker import Mismatch, by_name, takes
from oracle.tensorcore.fingerprint import Kernel, fingerprint
from oracle.tensorcore.probes import Shape

OUT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Scale blocks along K and rows of b that share a scale, for the contracts whose kernels can be probed.
SCALES: Mapping[str, tuple[int | None, int]] = {
    "fp8_gemm_nt": (128, 128),
    "fp8_blockscale_gemm_sm90": (128, 128),
    "cutlass_scaled_mm": (None, 1),
    "torch_per_token_w8a8_scaled_mm": (None, 1),
    "torch_channelwise_w8a8_scaled_mm": (None, 1),
}


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "fingerprint",
        help="find out how a kernel computes by probing it",
        description="Probe MODULE:CALLABLE with products of [128, K] by [K, 128], and print what the answers give "
        "away. It is called as `fp8-oracle validate` calls it, with the contract's inputs by name, and out_dtype and "
        "out if it takes them; but in this process, which ends with it.",
    )
    command.add_argument("kernel", metavar="MODULE:CALLABLE")
    command.add_argument("--contract", required=True, choices=sorted(SCALES))
    command.add_argument("--k", type=int, default=512, help="a multiple of 128 (default: 512)")
    command.add_argument("--out-dtype", choices=sorted(OUT_DTYPES), default="bfloat16")
    command.add_argument("--device", default="cpu")
    command.add_argument("--seed", type=whole(0), default=0)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.k < 128 or arguments.k % 128:
        raise OptionError(f"--k {arguments.k} is not a positive multiple of 128")
    kernel = _on(_load(arguments.kernel), arguments.kernel, arguments.contract, arguments.device)
    block, b_rows = SCALES[arguments.contract]
    shape = Shape(torch.float8_e4m3fn, arguments.k, block, b_rows)
    found = fingerprint(kernel, shape, out_dtype=OUT_DTYPES[arguments.out_dtype], seed=arguments.seed)
    for line in found.lines():
        print(line)
    return 0


def _load(target: str) -> Callable[..., Any]:
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise SubjectError(f"{target!r} is not of the form MODULE:CALLABLE")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    # Importing somebody's module may raise anything; that is the answer to the question, in one line.
    try:
        found = import_module(module)
    except Exception as error:
        raise SubjectError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error
    kernel = getattr(found, name, None)
    if not callable(kernel):
        raise SubjectError(f"{module} has no callable {name!r}")
    return kernel  # type: ignore[no-any-return]  # the user says that it is one; _on checks what it returns


def _on(kernel: Callable[..., Any], target: str, contract: str, device: str) -> Kernel:
    """The kernel on a device, called by the names of its contract, with its failures as one-line errors."""
    role = ROLES[contract]
    transposed = contract in TORCH_NAMES  # torch's weight is the column-major [K, N] view

    def run(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
        inputs = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}
        given = {role[name]: x.to(device) for name, x in inputs.items()}
        if transposed:
            given[role["b"]] = given[role["b"]].t()
        buffer = torch.full((a.shape[0], b.shape[0]), torch.nan, dtype=out_dtype, device=device)
        try:
            out = kernel(**by_name(kernel, given, {"out_dtype": out_dtype}, out=buffer))
        except OracleError:
            raise
        except Mismatch:
            raise SubjectError(
                f"{target} has other parameters than {contract}; it is called with {', '.join(given)} by name, and "
                "with out_dtype and out if it takes them"
            ) from None
        except Exception as error:
            raise SubjectError(f"{target} raised {type(error).__name__}: {error}") from error
        if out is None and takes(kernel, "out"):
            out = buffer
        if not isinstance(out, Tensor) or out.dtype != out_dtype:
            raise SubjectError(f"{target} returned {getattr(out, 'dtype', type(out).__name__)}, not {out_dtype}")
        return out

    return run
