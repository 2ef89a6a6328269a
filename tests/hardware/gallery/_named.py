"""Kernels that are subjects of ``tests/hardware`` already, as rows of the gallery."""

from __future__ import annotations

from collections.abc import Iterable

from hardware.adapters import by_contract

from oracle.harness.gallery import Kernel


def rows(
    module: str, library: str, contracts: Iterable[str], *, numerics: str | None = None, apart: str = "",
    space: str = "NAMED",
) -> list[Kernel]:  # fmt: skip
    """A row for each contract of a library of ``hardware.MODULE``; ``apart`` ends the name of each, where a project has
    a contract twice; ``space`` holds the libraries."""
    return [
        Kernel(contract, f"hardware.{module}:{space}.{library}.{contract}", by_contract, contract + apart, numerics)
        for contract in contracts
    ]
