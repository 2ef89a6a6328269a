"""Int8 quantisers and the product with a zero point."""

from oracle.routines.family import RoutineFamily
from oracle.routines.int8 import blocks, cases, contract, faults, sage

FAMILY = RoutineFamily(
    name="int8",
    contracts=(contract, blocks, sage),
    grammars=cases.GRAMMARS,
    faults=(faults.FAULTS, faults.PRODUCT, faults.SCALED, faults.SAGE, faults.CHANNELS),
)
