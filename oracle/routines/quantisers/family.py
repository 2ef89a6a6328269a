"""Quantisers and the casts of their scales."""

from oracle.routines.family import RoutineFamily
from oracle.routines.quantisers import cases, contract, scale_casts
from oracle.routines.quantisers.faults import internal, quantiser

FAMILY = RoutineFamily(
    name="quantisers",
    contracts=(contract, scale_casts),
    grammars=cases.GRAMMARS,
    faults=(quantiser.faults, internal.faults),
    goldens=cases.GOLDENS,
)
