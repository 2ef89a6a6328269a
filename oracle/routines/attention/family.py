"""FP8 attention."""

from oracle.routines.attention import cases, contract, faults
from oracle.routines.family import RoutineFamily

FAMILY = RoutineFamily(
    name="attention", contracts=(contract,), grammars=cases.GRAMMARS, faults=(faults.FAULTS,), goldens=cases.GOLDENS
)
