"""An arch with the instructions of another is one row, and every contract knows it."""

from __future__ import annotations

import pytest

import oracle
from oracle.errors import NumericsError
from oracle.routines import profiles
from oracle.routines.base import Call
from oracle.tensorcore.instructions import ALIKE, arches


@pytest.mark.parametrize("arch", ALIKE)
def test_every_contract_knows_it(arch: str) -> None:
    """Its admitted numerics are those of the other arch, wherever a contract has that."""
    known = 0
    for name, contract in oracle.contracts().items():
        listed = profiles.cases(name, "quick")
        if not listed or ALIKE[arch] not in contract.numerics:
            continue
        inputs, options = listed[0].inputs(), listed[0].call_options()
        mine, other = (
            contract.arithmetics(Call(contract, inputs, options, arch=a).checked()) for a in (arch, ALIKE[arch])
        )
        assert mine == other, name
        known += 1
    assert known > 20


def test_the_other_has_instructions() -> None:
    """A row that names no arch of the table would be of no use; an arch without a row is refused."""
    assert set(ALIKE.values()) <= set(arches())
    contract = oracle.contracts()["fp8_gemm_nt"]
    inputs = profiles.cases("fp8_gemm_nt", "quick")[0].inputs()
    with pytest.raises(NumericsError, match="no numerics model for arch 'sm99'"):
        contract.arithmetics(Call(contract, inputs, arch="sm99").checked())
