"""Scaled products: dense, grouped, and layers that quantise their input."""

from oracle.routines.family import RoutineFamily
from oracle.routines.products import cases, contract, flashinfer, grouped, linear
from oracle.routines.products.faults import FAULTS

FAMILY = RoutineFamily(
    name="products", contracts=(contract, flashinfer, grouped, linear), grammars=cases.GRAMMARS, faults=(FAULTS,),
    goldens=cases.GOLDENS,
)
