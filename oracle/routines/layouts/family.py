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
    shards,
)

FAMILY = RoutineFamily(
    name="layouts",
    contracts=(contract, groups, mega, mixed, shards, experts, expert_rows),
    grammars={**cases.GRAMMARS, **expert_cases.GRAMMARS},
    faults=(expert_faults.FAULTS,),
    goldens=(*cases.GOLDENS, *expert_cases.GOLDENS),
)
