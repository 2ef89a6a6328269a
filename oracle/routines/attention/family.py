"""Attention over FP8 keys and values."""

from oracle.routines.attention import cases, faults, merge, prefill, sage, wide
from oracle.routines.family import RoutineFamily

FAMILY = RoutineFamily(
    name="attention",
    contracts=(prefill, wide, sage, merge),
    grammars=cases.GRAMMARS,
    faults=(faults.FAULTS,),
    goldens=cases.GOLDENS,
)
