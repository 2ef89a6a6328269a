"""Layouts of scales and weights, and the scales of fused shards."""

from oracle.routines.family import RoutineFamily
from oracle.routines.layouts import cases, contract, groups, mega, mixed, shards

FAMILY = RoutineFamily(
    name="layouts", contracts=(contract, groups, mega, mixed, shards), grammars=cases.GRAMMARS, goldens=cases.GOLDENS
)
