"""Small pure checks shared by the ``why_not`` of the backends: each returns a reason or None."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.plan import Problem
    from kernels.platform import Machine


def gpu(p: Problem, machine: Machine, package: str | None, *, vendor: str | None = "nvidia") -> str | None:
    """Operands on a GPU of the vendor, and the package usable."""
    if machine.vendor == "cpu" or p.device == "cpu":
        return "needs a GPU; the operands are on the CPU"
    if vendor is not None and machine.vendor != vendor:
        return f"needs an {vendor.upper()} GPU; this is {machine.arch}"
    return None if package is None else machine.package(package).why_not


def multiples(p: Problem, **of: int) -> str | None:
    """Extents of the problem that must be multiples of something; unknown extents pass."""
    for name, factor in of.items():
        value = getattr(p, name)
        if value is not None and value % factor != 0:
            return f"{name.upper()}={value} is not a multiple of {factor}"
    return None


def dtypes(p: Problem, field: str, *admitted: str) -> str | None:
    """A dtype field of the problem must be one of the admitted ones."""
    value = getattr(p, field)
    return None if value in admitted else f"{field}={value}; it takes {' or '.join(admitted)}"


def first(*reasons: str | None) -> str | None:
    """The first reason there is."""
    return next((r for r in reasons if r is not None), None)
