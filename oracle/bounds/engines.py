"""Which engine evaluates the exact value and the residue bound: compiled on the CPU where it can, else plain torch.

Both give the same bits; the choice is one of speed alone. Numba is imported at the first use, and a machine for which
it does not exist takes the definitions. (:mod:`oracle.tensorcore.predict` chooses for predictions.)
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from oracle.bounds import product as definition
from oracle.bounds.accumulator import Accumulator
from oracle.bounds.interval import Interval
from oracle.truth import gemm
from oracle.truth.gemm import Exact, ScaledProduct


def exact(product: ScaledProduct) -> Exact:
    """:func:`oracle.truth.gemm.exact` by the fastest engine that takes ``product``."""
    cpu = _compiled(product)
    if cpu is not None and cpu.why_not(product) is None:
        value = cpu.exact_value(product)
        assert isinstance(value, Exact)
        return value
    return gemm.exact(product)


def residue_bound(product: ScaledProduct, acc: Accumulator) -> Interval:
    """:func:`oracle.bounds.product.residue_bound` by the fastest engine that takes ``product``."""
    compiled = _both(product, acc)
    return definition.residue_bound(product, acc) if compiled is None else compiled[1]


def exact_and_residue(product: ScaledProduct, acc: Accumulator) -> tuple[Exact, Interval]:
    """:func:`exact` and :func:`residue_bound`, in one pass where the engine can."""
    compiled = _both(product, acc)
    return (exact(product), definition.residue_bound(product, acc)) if compiled is None else compiled


def _both(product: ScaledProduct, acc: Accumulator) -> tuple[Exact, Interval] | None:
    cpu = _compiled(product)
    if cpu is None or cpu.why_not(product, acc) is not None:
        return None
    value, interval = cpu.exact_and_residue(product, acc)
    assert isinstance(value, Exact) and isinstance(interval, Interval)
    return value, interval


def _compiled(product: ScaledProduct) -> ModuleType | None:
    if product.a.device.type != "cpu" or importlib.util.find_spec("numba") is None:
        return None
    return importlib.import_module("oracle.bounds.cpu")
