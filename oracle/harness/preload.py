"""What the processes of ``--jobs`` have loaded when they start: imported by the server that they are forked from.

Every contract is registered, and two judgements of a tiny call load the compiled kernels of products, which takes each
process most of a second otherwise. All of it on one thread: neither a pool of threads nor a CUDA context survives a
fork, and nothing here asks for a device.
"""

from __future__ import annotations

from typing import Any

import torch

from oracle.diagnosis import mutation  # noqa: F401  # what tasks of mutate import, and of verify
from oracle.diagnosis.explain import explain_verdict
from oracle.harness import recording, runner, validation  # noqa: F401
from oracle.routines import cases, get
from oracle.routines.products.contract import Fp8GemmNt

CASE = f"{Fp8GemmNt.name}/e4m3xe4m3-bf16/1x128:128x128/m=8,n=128,k=256/family=randn/seed=1"


def load() -> None:
    """Judge a right output and a wrong one, and explain why."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    case = cases.parse(CASE)
    contract, inputs = get(case.contract), case.inputs()
    right: Any = contract.predict(inputs, numerics="sm90.promote128", out_dtype=torch.bfloat16)
    for output in (right, torch.zeros_like(right)):
        asked = contract.asked(inputs, output)
        explain_verdict(contract.judged(asked, output), asked, output, numerics=None)
    torch.set_num_threads(threads)


load()
