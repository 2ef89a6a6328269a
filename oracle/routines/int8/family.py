"""Int8 quantisers and the product with a zero point."""

from oracle.routines.family import RoutineFamily
from oracle.routines.int8 import blocks, cases, contract, faults

FAMILY = RoutineFamily(
    name="int8",
    contracts=(contract, blocks),
    grammars=cases.GRAMMARS,
    faults=(faults.FAULTS, faults.PRODUCT, faults.SCALED),
    goldens=cases.GOLDENS,
)
