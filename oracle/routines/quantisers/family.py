"""Quantisers and the casts of their scales."""

from oracle.routines.family import RoutineFamily
from oracle.routines.products.faults import inside
from oracle.routines.quantisers import cases, contract, faults, torch_cases, torch_faults, torch_forms

FAMILY = RoutineFamily(
    name="quantisers",
    contracts=(contract, torch_forms),
    grammars={**cases.GRAMMARS, **torch_cases.GRAMMARS},
    faults=(faults.FAULTS, inside.FAULTS, torch_faults.FAULTS),
)
