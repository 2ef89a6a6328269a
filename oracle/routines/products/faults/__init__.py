"""Faults of scaled products, in the order in which a kernel would make them."""

from oracle.routines.fault import Family
from oracle.routines.products.faults import arithmetic, forms, movement, scales

FAULTS = tuple(
    fault
    for family in Family
    for module in (scales, arithmetic, movement, forms)
    for fault in module.FAULTS
    if fault.family is family
)
