"""Layouts of scales and weights, and the scales of fused shards."""

from oracle.routines.family import RoutineFamily
from oracle.routines.layouts import cases, contract, experts, groups, shards, tiles

FAMILY = RoutineFamily(
    name="layouts", contracts=(contract, experts, groups, shards, tiles), grammars=cases.GRAMMARS, goldens=cases.GOLDENS
)
