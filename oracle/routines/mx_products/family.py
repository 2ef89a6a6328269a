"""Products of MX and NVFP4: dense, batched, grouped."""

from oracle.routines.family import RoutineFamily
from oracle.routines.mx_products import cases, contract, deep_gemm
from oracle.routines.mx_products.faults import FAULTS

FAMILY = RoutineFamily(
    name="mx_products",
    contracts=(contract, deep_gemm),
    grammars=cases.GRAMMARS,
    faults=(FAULTS,),
)
