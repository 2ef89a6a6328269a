"""Every stored golden against a second derivation in integers and fractions that shares no code with the first."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.support.slow_oracle import numbers
from tests.support.slow_oracle.numbers import Array, read, same
from tests.support.slow_oracle.routines import PROPERTIES, ROUTINES, derive

GOLDEN = Path(__file__).resolve().parents[2] / "fixtures" / "golden"
CASES: list[dict[str, Any]] = [e for e in json.loads((GOLDEN / "manifest.json").read_text())["cases"] if e["file"]]
SIGNED_ZERO = {"q", "weight"}  # codes: a quantiser keeps the sign of zero


def differences(entry: Mapping[str, Any], tensors: Mapping[str, Array]) -> list[str]:
    """One line for each output of a golden that the second derivation contradicts."""
    roles = {name: facts[0] for name, facts in entry["tensors"].items()}
    inputs = {name: tensors[name] for name, role in roles.items() if role == "input"}
    outputs = {n.removeprefix("out.") if n != "out" else "out": tensors[n] for n, r in roles.items() if r == "expected"}
    if entry["contract"] in PROPERTIES:
        fault = PROPERTIES[entry["contract"]](inputs, entry["options"], outputs)
        return [] if fault is None else [fault]
    derived = _derived(entry, inputs)
    if set(derived) != set(outputs):
        return [f"outputs {sorted(derived)}, stored {sorted(outputs)}"]
    lines = []
    for name, codes in derived.items():
        stored = outputs[name]
        if len(codes) != len(stored.codes):
            lines.append(f"{name}: {len(codes)} elements, stored {len(stored.codes)}")
            continue
        pairs = list(zip(codes, stored.codes, strict=True))
        wrong = [
            (i, f, w)
            for i, (f, w) in enumerate(pairs)
            if f is not None and not same(f, w, stored.dtype, signed_zero=name in SIGNED_ZERO)
        ]
        if wrong:
            i, found, wanted = wrong[0]
            lines.append(f"{name}: {len(wrong)} of {len(codes)} differ, first [{i}]: derived {found}, stored {wanted}")
    return lines


def _derived(entry: Mapping[str, Any], inputs: dict[str, Array]) -> Any:
    """The derivation, once for equal inputs."""
    key = (entry["id"], tuple((name, tuple(x.codes)) for name, x in inputs.items()))
    if key not in _KNOWN:
        _KNOWN[key] = derive(entry["contract"], inputs, entry["options"])
    return _KNOWN[key]


_KNOWN: dict[object, Any] = {}


class TestGoldens:
    """Two derivations, one answer: every expected bit of every routine."""

    @pytest.mark.parametrize("entry", CASES, ids=lambda e: e["id"])
    def test_expected_bits(self, entry: dict[str, Any]) -> None:
        assert differences(entry, read(GOLDEN / entry["file"])) == []

    @pytest.mark.parametrize("contract", sorted({e["contract"] for e in CASES}))
    def test_a_changed_output_is_noticed(self, contract: str) -> None:
        """The negative test: one code of each expected output, changed by its lowest bit or replaced."""
        entry = max((e for e in CASES if e["contract"] == contract), key=lambda e: e["seed"])
        tensors = read(GOLDEN / entry["file"])
        expected = [name for name, facts in entry["tensors"].items() if facts[0] == "expected"]
        for name in expected:
            changed = [self._spoiled(entry, tensors, name, i) for i in self._places(tensors[name])]
            assert any(differences(entry, spoiled) for spoiled in changed), name

    def _places(self, x: Array) -> list[int]:
        """A few elements: some may be unspecified (padding, outside a window)."""
        count = len(x.codes)
        return sorted({0, count // 3, count // 2, 2 * count // 3})

    def _spoiled(self, entry: Any, tensors: dict[str, Array], name: str, at: int) -> dict[str, Array]:
        codes = list(tensors[name].codes)
        codes[at] ^= 1
        return {**tensors, name: replace(tensors[name], codes=codes)}


@pytest.mark.turns(4)
class TestInputsMatter:
    """The second derivation reads its inputs: another code or scale gives another answer."""

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize(
        "contract",
        [
            "fp8_gemm_nt",
            "fp8_mqa_logits",
            "moe_fp8",
            "Fp8LinearOp",
            "silu_and_mul",
            "scaled_grouped_mm",
            "apply_fi_trtllm_fp8_per_tensor_moe",
            "silu_and_mul_quant",
            "fused_add_rmsnorm_quant",
            "rope_quantize_fp8",
        ],
    )
    def test_a_changed_input_is_noticed(self, contract: str) -> None:
        entries = [e for e in CASES if e["contract"] == contract and "family=randn" in e["id"]]
        for entry in {e["id"].split("/")[1]: e for e in reversed(entries)}.values():  # the first of each pair of dtypes
            self.changed(contract, entry)

    def changed(self, contract: str, entry: dict[str, Any]) -> None:
        tensors = read(GOLDEN / entry["file"])
        for name, facts in entry["tensors"].items():
            if facts[0] == "input" and facts[1].startswith(("float", "bfloat")):
                bit = 0x80 if facts[1].startswith("float8") else 1 << numbers.FORMATS[facts[1]][1] - 1  # no new NaN
                codes = [code ^ bit for code in tensors[name].codes]
                spoiled = {**tensors, name: replace(tensors[name], codes=codes)}
                assert differences(entry, spoiled), f"{contract}: all of {name} changed and nobody noticed"


class TestNumbers:
    """The second derivation's own arithmetic."""

    @pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"])
    def test_every_code_round_trips(self, dtype: str) -> None:
        for code in range(256):
            value = numbers.decode(code, dtype)
            if isinstance(value, Fraction):
                assert numbers.encode(value, dtype, negative_zero=code == 0x80) == code

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_midpoints_go_to_even(self, dtype: str) -> None:
        for code in range(0, 0x7B00, 7):
            low, high = (numbers.decode(c, dtype) for c in (code, code + 1))
            assert isinstance(low, Fraction) and isinstance(high, Fraction)
            assert numbers.encode((low + high) / 2, dtype) == code + code % 2
            assert numbers.encode((low + 2 * high) / 3, dtype) == code + 1

    @pytest.mark.parametrize("x", [Fraction(0), Fraction(1), Fraction(-1), Fraction(-37, 3), Fraction(25, 7)])
    def test_exponential_is_bounded(self, x: Fraction) -> None:
        """exp(x) exp(-x) = 1 lies between the products of the bounds, which are narrow; a shifted one does not hold."""
        low, high = numbers.exp_bounds(x)
        back_low, back_high = numbers.exp_bounds(-x)
        assert low * back_low <= 1 <= high * back_high
        assert high - low <= high / 2**150
        assert not (low * (1 + Fraction(1, 2**100))) * back_low <= 1

    def test_two_readings_of_one_exponential_are_refused(self) -> None:
        with pytest.raises(ArithmeticError, match="two values"):
            numbers.decided(Fraction(1), Fraction(2), "bfloat16")


class TestIndependence:
    """It covers every routine that has a golden, and imports nothing of the first oracle."""

    def test_every_contract_has_a_second_derivation(self) -> None:
        assert {e["contract"] for e in CASES} <= set(ROUTINES) | set(PROPERTIES)

    def test_imports(self) -> None:
        allowed = {"__future__", "ast", "collections", "dataclasses", "decimal", "fractions", "json", "math", "pathlib"}
        allowed |= {"tests"}
        for path in (Path(__file__).parents[1] / "support" / "slow_oracle").glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = (
                    [a.name for a in node.names]
                    if isinstance(node, ast.Import)
                    else ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
                )
                assert {name.partition(".")[0] for name in names} <= allowed, path.name
