"""Calls with the output of a kernel that has a fault of the catalogue, for the tests of diagnosis."""

from __future__ import annotations

import torch

from oracle.routines import cases, get
from oracle.routines.catalogue import Call, run
from oracle.routines.catalogue import get as get_fault
from oracle.tensorcore.schedules import get as get_schedule

ROW_MAJOR = "row-major A scale read as [K/128, align(M, 4)]"
GEMM = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=40,n=256,k=640/family=randn/seed=5"


def mutant(
    text: str, fault: str, *, schedule: str = "sm90.promote128"
) -> tuple[Call, torch.Tensor | dict[str, torch.Tensor]]:
    """A call and the output of a kernel with this fault."""
    case = cases.parse(text)
    call = Call(get(case.contract), case.inputs(), case.call_options(), get_schedule(schedule), case.out_dtype)
    return call, run(call, get_fault(fault))
