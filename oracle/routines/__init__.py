"""Routines: what a contract is, and one folder for each family of them.

What a family of another distribution needs stands here: see :mod:`oracle.routines.family` and the page "Add a routine".
"""

from oracle.bounds.interval import Admissible
from oracle.routines import data
from oracle.routines.base import Call, Contract, Operands, OptionSpec, Out, TensorSpec, positive, register
from oracle.routines.case import Case, Grammar
from oracle.routines.family import RoutineFamily, families, get, registered
from oracle.routines.fault import ARITHMETIC, CAST, INDEX, MOVEMENT, VALUE, Fault, Faults, both, entry, need
from oracle.routines.traits import Kind
from oracle.verdict.sets import Bits, Elements, Property, Sets

__all__ = [
    "ARITHMETIC",
    "CAST",
    "INDEX",
    "MOVEMENT",
    "VALUE",
    "Admissible",
    "Bits",
    "Call",
    "Case",
    "Contract",
    "Elements",
    "Fault",
    "Faults",
    "Grammar",
    "Kind",
    "Operands",
    "OptionSpec",
    "Out",
    "Property",
    "RoutineFamily",
    "Sets",
    "TensorSpec",
    "both",
    "data",
    "entry",
    "families",
    "get",
    "need",
    "positive",
    "register",
    "registered",
]
