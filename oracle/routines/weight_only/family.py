"""Weight-only products and the order of their weights."""

from oracle.routines.family import RoutineFamily
from oracle.routines.weight_only import cases, faults, kernels

FAMILY = RoutineFamily(
    name="weight_only",
    contracts=(kernels,),
    grammars=cases.GRAMMARS,
    faults=(faults.FAULTS,),
    goldens=cases.GOLDENS,
)
