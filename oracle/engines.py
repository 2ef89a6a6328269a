"""Which engine evaluates the exact value and the residue bound: compiled on the CPU where it can, else plain torch.

Both give the same bits; the choice is one of speed alone. (:mod:`oracle.tensorcore.predict` chooses for predictions.)
"""

from __future__ import annotations

from oracle import gemm
from oracle.bounds import cpu
from oracle.bounds import product as definition
from oracle.bounds.accumulator import Accumulator
from oracle.bounds.interval import Interval
from oracle.gemm import Exact, ScaledProduct


def exact(product: ScaledProduct) -> Exact:
    """:func:`oracle.gemm.exact` by the fastest engine that takes ``product``."""
    return cpu.exact_value(product) if cpu.why_not(product) is None else gemm.exact(product)


def residue_bound(product: ScaledProduct, acc: Accumulator) -> Interval:
    """:func:`oracle.bounds.product.residue_bound` by the fastest engine that takes ``product``."""
    if cpu.why_not(product, acc) is None:
        return cpu.residue_bound(product, acc)
    return definition.residue_bound(product, acc)
