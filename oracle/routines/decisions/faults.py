"""Faults of decisions about the machine: how many multiprocessors a grid is made for."""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.routines.decisions.contract import NumSms
from oracle.routines.fault import MOVEMENT, Call, Faults, entry
from oracle.routines.traits import of_class
from oracle.truth import decisions as platforms

# A fault is a row: what is wrong and where it was met; the change; when it shows.
FAULTS = Faults(of_class(NumSms))
fault = FAULTS.declare


def _as_sxm(call: Call, out: Tensor) -> Tensor:
    """132 for everything that is sm90."""
    numbers = [i for i, (_, capability, _) in enumerate(platforms.GPUS, start=1) if capability == 90]
    hopper = torch.isin(call.inputs["product"], torch.tensor(numbers, dtype=torch.int64, device="cpu"))
    return torch.where(hopper & (out > 0), 132, out)


fault("132 multiprocessors taken for every Hopper", MOVEMENT, seen="osayamenja/FlashMoE 3", write=entry("out", _as_sxm))
fault(
    "multiprocessors of the product, not of the device",
    MOVEMENT,
    seen="Neroued/ninfer PR 89",
    read=entry("reported", lambda reported: torch.full_like(reported, -1)),
)
