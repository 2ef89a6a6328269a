"""Every step of a device's approximate instructions from the correctly rounded value, in one file.

    python tests/hardware/approximations.py --out DIR          # about a minute; DIR/approximations.npz, some 15 MB
    python tests/hardware/approximations.py --tangent          # every float32 of tanh.approx beside its model

``rcp``: ``rcp.approx.ftz`` of the 2^23 values of [1, 2). ``ex2_*``: ``ex2.approx.ftz`` of the binades whose sums the
libraries' exponentials ask for. ``rsqrt_*``: ``rsqrt.approx.ftz`` of [1, 2) and [2, 4). An entry is int8:
the float32 step from the value rounded to nearest, which the CPU computes in float64.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from oracle.numbers import mufu

BINADE = 1 << 23
BLOCK = 1024
ONE = 127 << 23
NEGATIVE = -(1 << 31)
RANGES = {
    "rcp": ("rcp", ONE),
    "rsqrt_1": ("rsqrt", ONE),
    "rsqrt_2": ("rsqrt", ONE + BINADE),
    **{f"ex2_{2.0**e:g}": ("ex2", ONE + e * BINADE) for e in (-4, -3, -2, -1, 0, 1, 2)},
    **{f"ex2_-{2.0**e:g}": ("ex2", ONE + e * BINADE + NEGATIVE) for e in (-4, -3, -2, -1, 0, 1, 2)},
}
"""Names of tables: the instruction, and the bits of the first of 2^23 values."""
RIGHT: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rcp": lambda x: 1.0 / x,
    "ex2": np.exp2,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
}


@triton.jit
def _kernel(x, y, WHAT: tl.constexpr, N: tl.constexpr):
    index = tl.program_id(0) * N + tl.arange(0, N)
    value = tl.load(x + index)
    made = tl.inline_asm_elementwise(WHAT, "=f,f", [value], tl.float32, True, 1)
    tl.store(y + index, made)


def steps(name: str, first: int, device: str) -> np.ndarray:
    """The steps of an instruction over the binade that begins at these bits, int8."""
    bits = torch.arange(BINADE, dtype=torch.int64) + first
    x = bits.to(torch.int32).view(torch.float32)
    made: Tensor = torch.empty(BINADE, device=device)
    _kernel[(BINADE // BLOCK,)](x.to(device), made, WHAT=f"{name}.approx.ftz.f32 $0, $1;", N=BLOCK)
    right = RIGHT[name](x.numpy().astype(np.float64)).astype(np.float32)
    found = made.cpu().numpy().view(np.int32).astype(np.int64) - right.view(np.int32).astype(np.int64)
    return np.clip(found, -128, 127).astype(np.int8)


def tangent(device: str) -> int:
    """Values of which ``tanh.approx`` has other bits than its model, of every binade and both signs."""
    made, other = torch.empty(BINADE, device=device), 0
    for first in range(-256, 256):
        bits = torch.arange(BINADE, dtype=torch.int32, device=device) + first * BINADE
        x = bits.view(torch.float32)
        _kernel[(BINADE // BLOCK,)](x, made, WHAT="tanh.approx.f32 $0, $1;", N=BLOCK)
        due = mufu.tanh(x.to(torch.float64)).to(torch.float32)
        other += int(((due.view(torch.int32) != made.view(torch.int32)) & ~(x.isnan() & made.isnan())).sum())
    print(f"tanh.approx: {other} of {512 * BINADE} float32 differ from the model")
    return other


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tangent", action="store_true")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    if arguments.tangent:
        return int(tangent(arguments.device) > 0)
    if arguments.out is None:
        parser.error("pass --out DIR, or --tangent")
    tables = {}
    for table, (name, first) in RANGES.items():
        tables[table] = steps(name, first, arguments.device)
        kinds, counts = np.unique(tables[table], return_counts=True)
        print(table, dict(zip(kinds.tolist(), counts.tolist(), strict=True)), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.out / "approximations.npz", **tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
