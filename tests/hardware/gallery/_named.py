"""Kernels that are subjects of ``tests/hardware`` already, as rows of the gallery."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hardware import python_peers
from hardware.adapters import by_contract

from oracle.harness.gallery import Kernel


def rows(
    module: str,
    library: str,
    contracts: Iterable[str],
    *,
    numerics: str | None = None,
    apart: str = "",
    space: str = "NAMED",
    adapter: Callable[..., Any] = by_contract,
    domain: str | None = None,
    case: tuple[str, ...] = (),
    exempt: Mapping[str, str] | None = None,
) -> list[Kernel]:
    """A row for each contract of a library of ``hardware.MODULE``; ``apart`` ends the name of each, where a project has
    a contract twice; ``space`` holds the libraries; the rest is as for :class:`Kernel`."""
    return [
        Kernel(
            contract,
            f"hardware.{module}:{space}.{library}.{contract}",
            adapter,
            contract + apart,
            numerics,
            domain,
            case=case,
            exempt=exempt or {},
        )
        for contract in contracts
    ]


def references(library: str, no_nan: str = "") -> tuple[Kernel, ...]:
    """The rows of a library of ``hardware.python_peers``; ``no_nan``: what it says of NaN and infinity, where its
    quantisers refuse both."""
    found: list[Kernel] = []
    for one in python_peers.subjects():
        if one.name == library:
            refused = {"data of nan": no_nan} if no_nan and one.contract.endswith(("_quantize", "_quant")) else {}
            found += rows("python_peers", library, [one.contract], numerics=one.numerics, exempt=refused)
    return tuple(found)
