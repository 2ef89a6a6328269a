"""Routines: what a contract is, and one folder for each family of them."""

from oracle.routines.base import Contract, OptionSpec, TensorSpec
from oracle.routines.family import RoutineFamily, families, get, registered

__all__ = ["Contract", "OptionSpec", "RoutineFamily", "TensorSpec", "families", "get", "registered"]
