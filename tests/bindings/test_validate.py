"""``validate MODULE:CALLABLE`` without a contract or an adapter, where a binding says how the routine is called."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from oracle.bindings import known
from oracle.bindings.binding import Binding, bind
from oracle.bindings.known import adapter_of, bindings, find
from oracle.errors import OptionError
from oracle.harness import gallery
from oracle.harness.bound import routine_of
from oracle.harness.validation import validate
from oracle.routines.cases import grammars
from oracle.routines.domain import parse
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


@pytest.mark.turns(4)
@pytest.mark.usefixtures("unexplained", "forked_workers")
@pytest.mark.parametrize(("wrong", "conforms"), [("", True), (" * 2", False)])
def test_a_function_of_a_handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, conforms: bool) -> None:
    """The handle is what a function without arguments gives; by a binding, and under a contract."""
    library(tmp_path, monkeypatch, wrong=wrong)
    text = "import deep_gemm, types\nhandle = lambda: types.SimpleNamespace(gemm=deep_gemm.fp8_gemm_nt)\n"
    (tmp_path / "handles.py").write_text(text)
    one = find("deep_gemm:fp8_gemm_nt", "fp8_gemm_nt")
    assert one is not None
    held = replace(one, target="handles:handle().gemm")
    monkeypatch.setattr(known, "bindings", lambda: (held,))
    assert adapter_of(held) == "oracle.bindings.known:BOUND.fp8_gemm_nt.handles.handle.gemm"
    assert validate("handles:handle().gemm", case=[CASE], arch="sm90").conforms is conforms
    try:
        assert routine_of(held) is sys.modules["deep_gemm"].fp8_gemm_nt
    finally:
        for name in ("handles", "deep_gemm"):
            sys.modules.pop(name, None)


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


def test_domains_are_read() -> None:
    """Each is a condition on extents that cases of its contract have."""
    stated = [one for one in bindings() if one.domain]
    assert len(stated) > 15
    for one in stated:
        assert parse(one.domain, grammars()[one.contract].extents), one.name
    with pytest.raises(OptionError, match="is no extent"):  # the twin
        parse("e % 4 == 0", grammars()["fp8_gemm_nt"].extents)


def test_an_operator_of_a_package_that_was_cut_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package does not register it, the library in its folder is imported; one that does is enough."""
    body = "import torch\nl = torch.library.Library('cut_down', 'FRAGMENT')\nl.define('{}(Tensor x) -> Tensor')\n"
    for name, package in (("of_the_library", "cut"), ("of_the_package", "whole")):
        (tmp_path / package / "sm90").mkdir(parents=True)
        (tmp_path / package / "sm90" / "common_ops.py").write_text(body.format(name))
    (tmp_path / "whole" / "__init__.py").write_text(body.format("of_the_package"))
    monkeypatch.syspath_prepend(tmp_path)

    def of(package: str, name: str) -> Binding:
        loads = (package, f"{package}.sm90.common_ops")
        return bind(f"torch:ops.cut_down.{name}", "fp8_gemm_nt", "(a)", "(x)", loads=loads)

    for one in (of("cut", "of_the_library"), of("whole", "of_the_package")):
        assert not one.registered()
        one.load()
        assert one.registered()
    assert "whole.sm90" not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        of("no_such_package", "of_nothing").load()


def test_the_architectures_that_a_routine_serves(cli: Cli) -> None:
    """A GPU of another one is refused before anything is loaded."""
    ran = cli("validate", "flashinfer.gemm:gemm_fp8_nt_blockscaled", "--arch", "sm90")
    assert ran.status == 2
    assert "gemm_fp8_nt_blockscaled serves sm100, sm103, sm107, sm120, sm121, not sm90" in ran.err
    one = find("flashinfer.gemm:gemm_fp8_nt_blockscaled")
    assert one is not None and one.unserved("sm100") is None
    assert all(other.unserved("sm90") is None for other in bindings() if not other.arches)


def test_a_gallery_leaves_what_does_not_serve_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row says why, and is no failure."""
    monkeypatch.setattr(gallery, "arch_of", lambda device: "sm90")
    monkeypatch.setattr(gallery.Project, "versions", lambda project: {project.distributions[0]: "1"})
    key = "flashinfer.gemm_fp8_nt_blockscaled/gemm_fp8_nt_groupwise"
    with gallery._validating(gallery.Asked(None)) as validated:
        row, report = validated(key)
    assert (row.verdict, report) == ("UNSUPPORTED", None) and "not sm90" in row.why


def test_list(cli: Cli) -> None:
    ran = cli("list", "bindings", "--contract", "fp8_gemm_nt")
    assert ran.status == 0
    assert "\ndeep_gemm:fp8_gemm_nt\tfp8_gemm_nt\t" in f"\n{ran.out}"
    assert len(cli("list", "bindings").out.splitlines()) == len(bindings())
