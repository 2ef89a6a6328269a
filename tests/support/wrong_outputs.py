"""A block-scaled product, and outputs of it by what was done to the right one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import oracle
from oracle.routines import get
from oracle.routines.catalogue import Call, run
from oracle.routines.catalogue import get as get_fault
from oracle.tensorcore.schedules import get as get_schedule
from tests.support.products import block_scaled

GEMM = "fp8_gemm_nt"
FAULTS = ("A scale of the previous K block", "store truncates")


def outputs(m: int, n: int, k: int, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inputs of a call, and outputs by what was done to the right one."""
    p = block_scaled("randn", m, n, k, seed=1)
    named = {"a": p.a, "a_scale": p.a_scale, "b": p.b, "b_scale": p.b_scale}
    inputs = {name: tensor.to(device) for name, tensor in named.items()}
    call = Call(get(GEMM), inputs, schedule=get_schedule("sm90.promote128"))
    right = run(call)
    assert isinstance(right, Tensor)
    found = {name: right.clone() for name in ("right", "one element", "moved row", "moved tile", "two faults")}
    found["one element"][3, 5] = 2 * right[3, 5] + 1
    found["moved row"][7] = right[8]
    half = m // 2
    found["moved tile"][:half, :128] = right[half : 2 * half, :128]
    found["two faults"][7] = right[8]
    found["two faults"][:, 3] = 0
    found["garbage"] = torch.randn(right.shape, generator=torch.Generator().manual_seed(1)).to(right)
    found["NaN"] = torch.full_like(right, torch.nan)
    nearest = oracle.reference(GEMM, inputs, out_dtype=right.dtype)
    assert isinstance(nearest, Tensor)
    found["no known bits"] = nearest
    for name in FAULTS:
        wrong = run(replace(call), get_fault(name))
        assert isinstance(wrong, Tensor)
        found[name] = wrong
    return inputs, found
