"""Fused quantisers: activation or norm and quantiser in one kernel."""

from oracle.routines.family import RoutineFamily
from oracle.routines.fused import cases, faults, groups, norm, rope, silu

FAMILY = RoutineFamily(
    name="fused", contracts=(silu, norm, rope, groups), grammars=cases.GRAMMARS,
    faults=(faults.INSIDE, faults.QUANTISER, faults.VALUES, faults.NORMS, faults.ROTARY), goldens=cases.GOLDENS,
)  # fmt: skip
