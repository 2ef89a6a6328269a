"""Scaled products: dense, grouped, and layers that quantise their input."""

from oracle.routines.family import RoutineFamily
from oracle.routines.products import (
    batched,
    batched_cases,
    cases,
    contract,
    deep_gemm,
    flashinfer,
    grouped,
    linear,
    mixed,
)
from oracle.routines.products.faults import FAULTS

FAMILY = RoutineFamily(
    name="products",
    contracts=(contract, flashinfer, grouped, linear, deep_gemm, batched, mixed),
    grammars={**cases.GRAMMARS, **batched_cases.GRAMMARS},
    faults=(FAULTS,),
)
