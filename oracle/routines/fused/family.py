"""Fused quantisers: activation or norm and quantiser in one kernel."""

from oracle.routines.family import RoutineFamily
from oracle.routines.fused import cases, faults, kernels, norms

FAMILY = RoutineFamily(
    name="fused",
    contracts=(kernels, norms),
    grammars=cases.GRAMMARS,
    faults=(faults.INSIDE, faults.QUANTISER, faults.VALUES, faults.NORMS, faults.LAYER_NORM, faults.ROTARY),
)
