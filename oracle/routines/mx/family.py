"""MX and NVFP4: quantisers, their inverses, scale bytes in tiles; training forms, experts, casts."""

from oracle.routines.family import RoutineFamily
from oracle.routines.mx import (
    cases,
    casts,
    columns,
    contract,
    elements,
    experts,
    faults,
    flashinfer,
    fp4_norms,
    more_cases,
    more_faults,
    norm_cases,
    norm_faults,
    norms,
    tokens,
    training,
)

FAMILY = RoutineFamily(
    name="mx",
    contracts=(contract, columns, flashinfer, norms, elements, training, tokens, experts, casts, fp4_norms),
    grammars={**cases.GRAMMARS, **more_cases.GRAMMARS, **norm_cases.GRAMMARS},
    faults=(faults.FAULTS, more_faults.FAULTS, norm_faults.FAULTS),
)
