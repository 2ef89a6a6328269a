"""Quantisers and the casts of their scales."""

from oracle.routines.family import RoutineFamily
from oracle.routines.products.faults import inside
from oracle.routines.quantisers import cases, contract, faults

FAMILY = RoutineFamily(
    name="quantisers",
    contracts=(contract,),
    grammars=cases.GRAMMARS,
    faults=(faults.FAULTS, inside.FAULTS),
    goldens=cases.GOLDENS,
)
