"""KV caches in FP8 and NVFP4: writers and readers of pages."""

from oracle.routines.family import RoutineFamily
from oracle.routines.kv_cache import cases, faults, newer, readers, rotated, writers

FAMILY = RoutineFamily(
    name="kv_cache",
    contracts=(writers, readers, newer, rotated),
    grammars=cases.GRAMMARS,
    faults=(faults.FAULTS, faults.CASTS, faults.INSIDE, faults.ROTATED),
)
