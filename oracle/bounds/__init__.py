"""Intervals that contain every result a declared accumulator can produce.

A bound is a derivation, not a setting: each file states its formula, its proof sketch and its source, and returns
offsets ``lo <= computed - exact <= hi`` in float64. Which bound applies is decided by the contract
(:mod:`oracle.routines`), never here.
"""

from oracle.bounds.accumulator import Accumulator, of_schedule
from oracle.bounds.ieee32 import ieee32_bound
from oracle.bounds.interval import Interval, admissible
from oracle.bounds.product import any_order_bound, residue_bound, split_bound

__all__ = [
    "Accumulator",
    "Interval",
    "of_schedule",
    "admissible",
    "any_order_bound",
    "ieee32_bound",
    "residue_bound",
    "split_bound",
]
