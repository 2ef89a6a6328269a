"""Layouts of scales and weights, and the scales of fused shards."""

from oracle.routines.family import RoutineFamily
from oracle.routines.layouts import (
    cases,
    contract,
    expert_cases,
    expert_faults,
    expert_rows,
    experts,
    groups,
    mega,
    mixed,
    padded,
    padded_cases,
    padded_faults,
    shards,
)

FAMILY = RoutineFamily(
    name="layouts",
    contracts=(contract, groups, mega, mixed, shards, experts, expert_rows, padded),
    grammars={**cases.GRAMMARS, **expert_cases.GRAMMARS, **padded_cases.GRAMMARS},
    faults=(expert_faults.FAULTS, padded_faults.FAULTS),
)
