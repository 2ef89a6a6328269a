"""Faults apply by what a contract is: traits, where contracts may be named, and a product of another distribution."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from torch import Tensor

from oracle.routines import base, get, profiles, registered
from oracle.routines.base import Call, Contract, Inputs
from oracle.routines.catalogue import agree, faults_of, run
from oracle.routines.family import BUILT_IN
from oracle.routines.products.contract import ProductContract
from oracle.routines.products.traits import BLOCKS, BY_COUNT, BY_ENDS, BY_INDEX, DENSE, RUNS, TURNED
from oracle.routines.traits import GROUPED, Trait, has_role, of_class, takes
from oracle.tensorcore.schedules import get as get_schedule
from oracle.verdict.products import Part
from tests.support.paths import ROOT

ROUTINES = ROOT / "oracle" / "routines"
NAMED = 15
"""Declarations that may name the one routine which can have their fault."""


def names_of(trait: Trait) -> set[str]:
    return {name for name, contract in registered().items() if trait.holds(contract)}


class TestTraits:
    """Stated, derived and combined."""

    def test_a_stated_trait_is_that_of_its_class_and_of_what_derives_from_it(self) -> None:
        stated, other = Trait("stated"), Trait("other")

        class First(type(get("fp8_gemm_nt"))):  # type: ignore[misc]
            traits = frozenset({stated})

        class Second(First):
            traits = frozenset({other})

        assert stated.holds(First()) and not other.holds(First())
        assert stated.holds(Second()) and other.holds(Second())
        assert not stated.holds(get("fp8_gemm_nt"))

    def test_derived_and_combined(self) -> None:
        gemm, grouped = get("fp8_gemm_nt"), get("m_grouped_fp8_gemm_nt_contiguous")
        for trait, of_gemm, of_grouped in (
            (GROUPED, False, True),
            (~GROUPED, True, False),
            (takes("m_indices"), False, True),
            (takes("out_dtype"), True, True),
            (has_role("a") - GROUPED, True, False),
            (has_role("a") & GROUPED, False, True),
            (GROUPED | of_class(type(gemm)), True, True),
        ):
            assert (trait.holds(gemm), trait.holds(grouped)) == (of_gemm, of_grouped), trait
            assert trait.called("another").holds(gemm) is of_gemm and trait.called("another").name == "another"
        assert (GROUPED & ~takes("bias")).name == "grouped and not takes bias"

    def test_products(self) -> None:
        """What the dims of the operands say."""
        assert names_of(BY_INDEX) == {"m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nn_contiguous"}
        assert names_of(BY_COUNT) == {"fp8_m_grouped_gemm_nt_masked", "batch_deepgemm_fp8_nt_groupwise"}
        assert names_of(RUNS & BY_ENDS) == {"scaled_grouped_mm"}
        assert {"bmm_fp8", "fp8_gemm_tt", "torch_per_token_w8a8_scaled_mm"} <= names_of(TURNED)
        assert "cutlass_scaled_mm" in names_of(BLOCKS) and "cutlass_moe_mm" not in names_of(BLOCKS)
        assert not names_of(DENSE) & names_of(GROUPED)


# --- where a fault names a contract -------------------------------------------------------------------------


def files_of_faults(folder: str) -> list[Path]:
    return sorted(path for path in (ROUTINES / folder).rglob("*.py") if "faults" in str(path.relative_to(ROUTINES)))


def of_names(text: str, known: set[str]) -> Iterator[tuple[str, bool]]:
    """Every name of a contract that a module has as a value, and whether it stands in ``named(...)``."""
    tree = ast.parse(text)
    inside = {
        id(node)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "named"
        for node in ast.walk(call)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in known:
            yield str(node.value), id(node) in inside


def folder_of(contract: Contract) -> str:
    """That of its class, or of the class that one made by a call derives from."""
    modules = (kind.__module__ for kind in type(contract).__mro__)
    return next(module for module in modules if module.startswith("oracle.routines.")).split(".")[2]


def wrong_names(folder: str, text: str) -> list[str]:
    """Names of contracts outside ``named(...)``, or of another folder."""
    found = of_names(text, set(registered()))
    return [name for name, inside in found if not inside or folder_of(get(name)) != folder]


class TestNames:
    """A fault names a contract only where that routine alone can have it, in the folder of the routine."""

    @pytest.mark.parametrize("folder", BUILT_IN)
    def test_no_fault_names_a_contract_of_another_folder(self, folder: str) -> None:
        assert files_of_faults(folder)
        for path in files_of_faults(folder):
            assert not wrong_names(folder, path.read_text()), path

    def test_few_declarations_name_a_contract(self) -> None:
        texts = [path.read_text() for folder in BUILT_IN for path in files_of_faults(folder)]
        assert sum(text.count(" named(") + text.count("=named(") for text in texts) < NAMED

    @pytest.mark.parametrize(
        ("text", "wrong"),
        [
            ('fault("x", CAST, on=named({"fp8_gemm_nt"}))', []),
            ('fault("x", CAST, contracts={"fp8_gemm_nt"})', ["fp8_gemm_nt"]),
            ('SET = frozenset({"fp8_gemm_nt", "fp8_einsum"})', ["fp8_gemm_nt", "fp8_einsum"]),
            ('fault("x", CAST, on=named({"swizzle_scale"}))', ["swizzle_scale"]),
        ],
    )
    def test_what_is_wrong_is_found(self, text: str, wrong: list[str]) -> None:
        assert sorted(wrong_names("products", text)) == sorted(wrong)


# --- a product of another distribution ----------------------------------------------------------------------


def twin_of(name: str) -> type[ProductContract]:
    """A product like ``name`` that knows the public base alone, with names of its own for operands and groups."""
    inside = get(name)
    assert isinstance(inside, ProductContract)
    own = {old: f"my_{old}" for old in (*inside.roles.values(), *([inside.groups] if inside.groups else []))}
    back = {new: old for old, new in own.items()}

    class Twin(ProductContract):
        summary, source, numerics = inside.summary, "this test", inside.numerics
        inputs = tuple(replace(spec, name=own.get(spec.name, spec.name)) for spec in inside.inputs)
        options = inside.options
        roles: ClassVar[Mapping[str, str]] = {role: own[old] for role, old in inside.roles.items()}
        groups = own[inside.groups] if inside.groups else None
        b_columns, laid_out, row_unit = inside.b_columns, inside.laid_out, inside.row_unit
        traits = inside.all_traits

        def parts(self, inputs: Inputs) -> list[Part]:
            return inside.parts({back.get(new, new): x for new, x in inputs.items()})

    Twin.name = f"my_{name}"
    return Twin


@pytest.mark.turns(4)
class TestForeign:
    """A product of another distribution has the faults of its twin inside, whatever its operands are called."""

    @pytest.fixture
    def twin(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Contract:
        made = twin_of(request.param)()
        monkeypatch.setitem(base._REGISTRY, made.name, made)
        return made

    @pytest.mark.parametrize(
        "twin",
        [
            "fp8_gemm_nt",
            "torch_per_token_w8a8_scaled_mm",
            "m_grouped_fp8_gemm_nt_contiguous",
            "fp8_m_grouped_gemm_nt_masked",
            "group_gemm_fp8_nt_groupwise",
            "scaled_grouped_mm",
        ],
        indirect=True,
    )
    def test_it_has_the_same_faults(self, twin: Contract) -> None:
        inside = twin.name.removeprefix("my_")
        assert [fault.name for fault in faults_of(twin.name)] == [fault.name for fault in faults_of(inside)]
        assert len(faults_of(twin.name)) >= 80

    @pytest.mark.parametrize("twin", ["fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous"], indirect=True)
    def test_its_mutants_are_those_of_its_twin(self, twin: Contract) -> None:
        """Bit for bit, and a fault that cannot show says the same reason."""
        inside = twin.name.removeprefix("my_")
        found = (case for case in profiles.cases(inside, "quick") if case.family == "randn" and case["k"] > 256)
        case = min(found, key=lambda case: case["m"] * case["n"] * case["k"])
        schedule, inputs = get_schedule("sm90.promote128"), case.inputs()
        mine = {f"my_{name}": x for name, x in inputs.items()}
        calls = [Call(get(one), x, {}, schedule, case.out_dtype) for one, x in ((inside, inputs), (twin.name, mine))]
        shown = 0
        for fault in faults_of(twin.name):
            reasons = [fault.applies(call) for call in calls]
            assert reasons[0] == reasons[1], fault.name
            if reasons[0] is None:
                here, there = (run(call, fault) for call in calls)
                assert isinstance(here, Tensor) and isinstance(there, Tensor)
                assert bool(agree(here, there).all()), fault.name
                shown += 1
        assert shown >= 60

    @pytest.mark.parametrize("twin", ["fp8_gemm_nt"], indirect=True)
    def test_without_a_trait_it_has_fewer(self, twin: Contract, monkeypatch: pytest.MonkeyPatch) -> None:
        """Scales whose dims say nothing of blocks have no fault of blocks."""
        bare = tuple(replace(spec, dims=None) if "scale" in spec.name else spec for spec in twin.inputs)
        monkeypatch.setattr(type(twin), "inputs", bare)
        missing = {f.name for f in faults_of("fp8_gemm_nt")} - {f.name for f in faults_of(twin.name)}
        assert "A scale of the next K block" in missing and "A scale dropped" not in missing
