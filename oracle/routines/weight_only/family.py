"""Weight-only products and the order of their weights."""

from oracle.routines.family import RoutineFamily
from oracle.routines.weight_only import cases, experts, faults, kernels, layout_faults, layouts

FAMILY = RoutineFamily(
    name="weight_only",
    contracts=(kernels, experts, layouts),
    grammars=cases.GRAMMARS,
    faults=(faults.FAULTS, layout_faults.FAULTS),
    goldens=cases.GOLDENS,
)
