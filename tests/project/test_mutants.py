"""The list of survivors of the mutation tests, and a few mutants of each commit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

mutation = pytest.importorskip(
    "tests.support.mutation", reason="cosmic-ray is not installed; the extra `mutants` has it"
)


def unmatched(reasons: dict[tuple[str, str, str], str]) -> list[tuple[str, str, str]]:
    """Entries that are no mutant of their file."""
    lines: dict[str, set[str]] = {}
    for path, before, _ in reasons:
        lines.setdefault(path, set()).add(before)
    made = {mutant.key for path, only in lines.items() for mutant in mutation.mutants(path, only)}
    return [key for key in reasons if key not in made]


@pytest.mark.turns(4)
def test_every_survivor_is_a_mutant_and_has_a_reason() -> None:
    whole, reasons = mutation.listed()
    assert unmatched(reasons) == []
    assert all(len(reason.split()) > 5 for reason in reasons.values())
    assert all((mutation.ROOT / path).is_file() for path in whole)


def test_an_entry_that_matches_nothing_is_named() -> None:
    """The negative test."""
    path = "oracle/truth/tiles.py"
    right = mutation.mutants(path)[0].key
    wrong = (path, right[1], right[2] + " + 1")
    assert unmatched({right: "", wrong: ""}) == [wrong]


@pytest.mark.turns(4)
def test_a_few_mutants_of_this_commit(root: Path) -> None:
    """Of a file that was run whole: each is killed, or has its reason."""
    command = [sys.executable, "tests/support/mutation.py", "--ci"]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{mutation.IN_CI} mutants, {mutation.IN_CI} killed" in ran.stdout


@pytest.mark.parametrize(
    ("code", "operator", "mutants"),
    [
        ("x = a - b + c\n", "DropTerm", ["x = - b + c", "x = a + c", "x = a - b"]),
        ("x = a * b\n", "core/ReplaceBinaryOperator_Mul_Add", ["x = a + b"]),
        ("def f(*, n: int | None = None) -> int | None: ...\n", "core/ReplaceBinaryOperator_BitOr_BitAnd", []),
        ("@lru_cache(maxsize=64)\ndef f() -> None: ...\n", "core/NumberReplacer", []),
        (
            "@dataclass(frozen=True, kw_only=True, eq=True)\nclass A: ...\n",
            "core/ReplaceTrueWithFalse",
            ["@dataclass(frozen=True, kw_only=True, eq=False)"],
        ),
        ("TILE, BAND_ON_DEVICE = 2, 3\n", "core/NumberReplacer", []),
        (
            "TILE, LEAST = 2, 3\n",
            "core/NumberReplacer",
            [f"TILE, LEAST = {two}" for two in ("3, 3", "1, 3", "2, 4", "2, 2")],
        ),
        ("def f() -> None:\n    TILE = 2\n", "core/NumberReplacer", ["TILE = 3", "TILE = 1"]),
        ("def f(n) -> int:\n    step = max(1, TILE // n)\n    return step\n", "core/NumberReplacer", []),
        ("def f(n) -> int:\n    cube = TILE if n > 2 else 3\n    return cube\n", "core/NumberReplacer", []),
        ("def f(n) -> bool:\n    return 2 * n > TILE\n", "core/NumberReplacer", []),
        ("def f(n) -> str:\n    return f'{n + 1} rows'\n", "core/ReplaceBinaryOperator_Add_Sub", []),
        (
            "def f(n) -> int:\n    return n // TILE * 2\n",
            "core/NumberReplacer",
            ["return n // TILE * 3", "return n // TILE * 1"],
        ),
        ("x = f(maxsize=64)\n", "core/NumberReplacer", ["x = f(maxsize= 65)", "x = f(maxsize= 63)"]),
    ],
)
def test_mutants_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, operator: str, mutants: list[str]
) -> None:
    """What an operator makes of it; nothing of annotations, nor of decorators that say what is cached or set."""
    (tmp_path / "a.py").write_text(code)
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    monkeypatch.setattr(mutation, "OPERATORS", () if operator == "DropTerm" else (operator,))
    made = [mutant.after for mutant in mutation.mutants("a.py")]
    assert made[: len(mutants)] == mutants and (operator == "DropTerm" or len(made) == len(mutants))


@pytest.mark.turns(4)
def test_a_mutant_outside_of_functions_is_imported(root: Path) -> None:
    """A constant of a module, which a test compares with its source."""
    path, line = "oracle/truth/shards.py", "UNLOADED = -448.0"
    code = f"""
from tests.support import mutation as m
m.MAPS.mkdir(parents=True, exist_ok=True)
mutant = next(x for x in m.mutants("{path}", ["{line}"]) if x.after.endswith("447.0"))
m.alone(mutant, [m.BY_HAND], lambda _, result, __: print("BY", result))
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert f"BY {mutation.BY_HAND}::TestShards::test_the_sentinel" in ran.stdout, ran.stdout + ran.stderr
