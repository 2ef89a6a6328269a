"""Fused quantisers: activation or norm and quantiser in one kernel."""

from oracle.routines.family import RoutineFamily
from oracle.routines.fused import cases, faults, silu

FAMILY = RoutineFamily(
    name="fused", contracts=(silu,), grammars=cases.GRAMMARS, faults=(faults.INSIDE, faults.QUANTISER, faults.VALUES), goldens=cases.GOLDENS,
)
