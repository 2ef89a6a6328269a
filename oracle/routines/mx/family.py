"""MX and NVFP4: quantisers, their inverses, scale bytes in tiles."""

from oracle.routines.family import RoutineFamily
from oracle.routines.mx import cases, contract, faults

FAMILY = RoutineFamily(
    name="mx", contracts=(contract,), grammars=cases.GRAMMARS, faults=(faults.FAULTS,), goldens=cases.GOLDENS
)
