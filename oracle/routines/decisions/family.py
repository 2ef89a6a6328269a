"""Decisions about a machine, and the records of constructors."""

from oracle.routines.decisions import cases, contract, faults
from oracle.routines.family import RoutineFamily

FAMILY = RoutineFamily(name="decisions", contracts=(contract,), grammars=cases.GRAMMARS, faults=(faults.FAULTS,))
