"""Which engine evaluates the exact value and the residue bound: compiled on the CPU where it can, else plain torch.

Both give the same bits; the choice is one of speed alone. Numba is imported at the first use, and a machine for which
it does not exist takes the definitions. (:mod:`oracle.tensorcore.predict` chooses for predictions.)
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from oracle import gemm
from oracle.bounds import product as definition
from oracle.bounds.accumulator import Accumulator
from oracle.bounds.interval import Interval
from oracle.gemm import Exact, ScaledProduct


def exact(product: ScaledProduct) -> Exact:
    """:func:`oracle.gemm.exact` by the fastest engine that takes ``product``."""
    cpu = _compiled(product)
    if cpu is not None and cpu.why_not(product) is None:
        value = cpu.exact_value(product)
        assert isinstance(value, Exact)
        return value
    return gemm.exact(product)


def residue_bound(product: ScaledProduct, acc: Accumulator) -> Interval:
    """:func:`oracle.bounds.product.residue_bound` by the fastest engine that takes ``product``."""
    cpu = _compiled(product)
    if cpu is not None and cpu.why_not(product, acc) is None:
        interval = cpu.residue_bound(product, acc)
        assert isinstance(interval, Interval)
        return interval
    return definition.residue_bound(product, acc)


def _compiled(product: ScaledProduct) -> ModuleType | None:
    if product.a.device.type != "cpu" or importlib.util.find_spec("numba") is None:
        return None
    return importlib.import_module("oracle.bounds.cpu")
