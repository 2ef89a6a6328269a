"""Scaled products: dense, grouped, and layers that quantise their input."""

from oracle.routines.family import RoutineFamily
from oracle.routines.products import cases, contract, dynamic, flashinfer, grouped, linear
from oracle.routines.products.faults import (
    arithmetic,
    cast,
    movement,
    movement_grouped,
    scale_index,
    scale_layout,
    scale_value,
)

FAMILY = RoutineFamily(
    name="products",
    contracts=(contract, dynamic, flashinfer, grouped, linear),
    grammars=cases.GRAMMARS,
    faults=(
        scale_index.faults,
        scale_layout.faults,
        scale_value.faults,
        cast.faults,
        movement.faults,
        movement_grouped.faults,
        arithmetic.faults,
    ),
    goldens=cases.GOLDENS,
)
