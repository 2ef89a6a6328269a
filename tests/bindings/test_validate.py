"""``validate MODULE:CALLABLE`` without a contract or an adapter, where a binding says how the routine is called."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from oracle.bindings import known
from oracle.bindings.binding import bind
from oracle.bindings.known import adapter_of, bindings, find
from oracle.errors import OptionError
from oracle.harness.validation import validate
from tests.support.commandline import Cli

CASE = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=2,n=128,k=256/family=randn/seed=2"
LIBRARY = """
    from tests.support.subjects.right import _product

    def fp8_gemm_nt(a, b, d, c=None, recipe=None, compiled_dims="nk", disable_ue8m0_cast=False):
        assert c is None and disable_ue8m0_cast
        d.copy_(_product(*a, *b){wrong})
"""


def library(folder: Path, monkeypatch: pytest.MonkeyPatch, *, wrong: str = "") -> None:
    """A module ``deep_gemm`` with the parameters of DeepGEMM's product."""
    (folder / "deep_gemm.py").write_text(textwrap.dedent(LIBRARY.format(wrong=wrong)))
    monkeypatch.syspath_prepend(folder)


@pytest.mark.turns(4)
@pytest.mark.usefixtures("unexplained", "forked_workers")
@pytest.mark.parametrize(("wrong", "conforms"), [("", True), (" * 2", False)])
def test_a_bound_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, conforms: bool) -> None:
    """By its name alone; a case beyond the binding's domain is not one of its calls."""
    library(tmp_path, monkeypatch, wrong=wrong)
    report = validate("deep_gemm:fp8_gemm_nt", case=[CASE], arch="sm90")
    assert (report.contract, report.domain, report.judged) == ("fp8_gemm_nt", "n % 64 == 0, k % 128 == 0", 1)
    assert report.adapter == "oracle.bindings.known:BOUND.fp8_gemm_nt.deep_gemm.fp8_gemm_nt"
    assert report.conforms is conforms


@pytest.mark.turns(4)
@pytest.mark.usefixtures("forked_workers")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    library(tmp_path, monkeypatch)
    ran = cli("validate", "deep_gemm:fp8_gemm_nt", "--arch", "sm90", "--case", CASE)
    assert ran.status == 0 and "CONFORMS  1 case judged" in ran.out


def test_without_a_binding(cli: Cli) -> None:
    """A near name is offered; a kernel under a contract that it has no binding of is called by name."""
    ran = cli("validate", "deep_gemm:fp8_gemm_tn_", "--case", CASE)
    assert ran.status == 2 and "no binding says how deep_gemm:fp8_gemm_tn_ is called; name a contract" in ran.err
    assert "deep_gemm:fp8_gemm_tn" in ran.err.partition("or ")[2]
    assert find("deep_gemm:fp8_gemm_nt", "cutlass_scaled_mm") is None
    with pytest.raises(OptionError, match="name the contract"):
        validate(lambda: None)


def test_several_contracts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "bindings", lambda: tuple(bind("m:f", contract, "()", "()") for contract in "ab"))
    with pytest.raises(OptionError, match="has bindings of several contracts; name one: a, b"):
        known.find("m:f")


def test_adapters_are_found_by_their_names() -> None:
    """Each binding has one, which a worker imports."""
    assert len({adapter_of(one) for one in bindings()}) == len({one.name for one in bindings()}) == len(bindings())


def test_list(cli: Cli) -> None:
    ran = cli("list", "bindings", "--contract", "fp8_gemm_nt")
    assert ran.status == 0
    assert ran.out.split("\t")[:2] == ["deep_gemm:fp8_gemm_nt", "fp8_gemm_nt"]
    assert len(cli("list", "bindings").out.splitlines()) == len(bindings())
