"""Scaled products: dense, grouped, and layers that quantise their input."""

from oracle.routines.family import RoutineFamily
from oracle.routines.products import batched_cases, cases, roles
from oracle.routines.products.faults import FAULTS

FAMILY = RoutineFamily(
    name="products",
    contracts=roles.PRODUCT_MODULES,
    grammars=roles.GRAMMARS,
    faults=(FAULTS,),
    goldens=(*cases.GOLDENS, *batched_cases.GOLDENS),
)
