"""Attention logits of a sparse indexer."""

from oracle.routines.family import RoutineFamily
from oracle.routines.logits import cases, contract, faults

FAMILY = RoutineFamily(name="logits", contracts=(contract,), grammars=cases.GRAMMARS, faults=(faults.FAULTS,))
