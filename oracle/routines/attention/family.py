"""Attention over FP8 keys and values."""

from oracle.routines.attention import (
    blockscaled,
    cases,
    faults,
    merge,
    prefill,
    sage,
    sparse,
    sparse_cases,
    sparse_faults,
    wide,
)
from oracle.routines.family import RoutineFamily

FAMILY = RoutineFamily(
    name="attention",
    contracts=(prefill, wide, sage, merge, sparse, blockscaled),
    grammars={**cases.GRAMMARS, **sparse_cases.GRAMMARS},
    faults=(faults.FAULTS, sparse_faults.FAULTS),
)
