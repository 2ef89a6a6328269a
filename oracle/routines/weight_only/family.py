"""Weight-only products and the order of their weights."""

from oracle.routines.family import RoutineFamily
from oracle.routines.weight_only import (
    cases,
    experts,
    faults,
    kernels,
    layer_cases,
    layer_faults,
    layers,
    layout_faults,
    layouts,
    prepared,
    prepared_cases,
    prepared_faults,
)

FAMILY = RoutineFamily(
    name="weight_only",
    contracts=(kernels, experts, layouts, prepared, layers),
    grammars={**cases.GRAMMARS, **prepared_cases.GRAMMARS, **layer_cases.GRAMMARS},
    faults=(faults.FAULTS, layout_faults.FAULTS, prepared_faults.FAULTS, layer_faults.FAULTS),
)
