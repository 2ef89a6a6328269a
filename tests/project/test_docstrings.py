"""Docstrings of public tensor functions state shapes, dtypes, errors, non-finite values and their source."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.docstrings import Project, counts, main, violations

WHOLE = '''
"""A module.

Source: IEEE 754-2019, 5.4.1.
"""
from torch import Tensor


def _check(x: Tensor) -> None:
    if x.ndim != 2:
        raise ShapeError("x")


class Base:
    def moved(self, x: Tensor) -> Tensor:
        """``x`` ``[M, K]`` of any dtype, moved to ``[K, M]`` of the same dtype."""


class Below(Base):
    def moved(self, x: Tensor) -> Tensor:
        """The same, in tiles."""


def summed(x: Tensor, y: Tensor) -> Tensor:
    """``x + y`` of two float32 tensors of any shape, float32 of that shape. NaN gives NaN. Raises ShapeError."""
    _check(x)


def twice(x: Tensor, y: Tensor) -> Tensor:
    """Two times; arguments, result and errors as of :func:`summed`."""
    _check(x)


def in_sections(x: Tensor) -> Tensor:
    """The codes.

    Parameters
    ----------
    x
        Float32, ``[M, K]``.

    Returns
    -------
    Tensor
        ``[M, K]``, float8_e4m3fn; NaN stays NaN.
    """
'''
"""A module whose functions lack nothing."""

SABOTAGED = {
    "a shape of a parameter": ("Float32, ``[M, K]``.", "Float32, x[M, K].", ["parameters: no shape of x"]),
    "another parameter": ("``x + y`` of two", "``x +`` y of two", ["parameters: no shape of y"] * 2),
    "a dtype": (
        "``x`` ``[M, K]`` of any dtype, moved to ``[K, M]`` of the same dtype.",
        "``x`` ``[M, K]`` moved to ``[K, M]``.",
        ["parameters: no dtype", "returns: no dtype of the result"] * 2,
    ),
    "a shape of the result": (
        "``[M, K]``, float8_e4m3fn",
        "Tensor, float8_e4m3fn",
        ["returns: no shape of the result"],
    ),
    "a dtype of the result": ("``[M, K]``, float8_e4m3fn", "``[M, K]``", ["returns: no dtype of the result"]),
    "an error": (" Raises ShapeError.", "", ["raises: ShapeError"] * 2),
    "non-finite values": ("; NaN stays NaN", "", ["non-finite: nothing about NaN"]),
    "a source": (
        "Source: IEEE 754-2019, 5.4.1.",
        "IEEE 754-2019, 5.4.1.",
        ["source: none here, nor a line `Source:` of the class or the module"] * 5,
    ),
    "a reference": (
        "as of :func:`summed`",
        "as of `summed`",
        [
            *("parameters: no shape of x", "parameters: no shape of y", "parameters: no dtype"),
            *("returns: no shape of the result", "returns: no dtype of the result"),
            *("raises: ShapeError", "non-finite: nothing about NaN"),
        ],
    ),
    "a base class": (
        "class Below(Base)",
        "class Below",
        [
            *("parameters: no shape of x", "parameters: no dtype"),
            *("returns: no shape of the result", "returns: no dtype of the result"),
            "non-finite: nothing about NaN",
        ],
    ),
}


@pytest.fixture(scope="module")
def lacking() -> dict[str, list[str]]:
    return violations(Project(Path(__file__).resolve().parents[2]))


@pytest.mark.turns(4)
class TestDocstrings:
    """The five rules of ``tests/support/docstrings.py``."""

    def test_nothing_is_lacking(self, lacking: dict[str, list[str]]) -> None:
        assert lacking == {}

    def test_what_is_whole(self, tmp_path: Path) -> None:
        self.write(tmp_path, WHOLE)
        assert violations(Project(tmp_path)) == {} and counts(tmp_path) == {"oracle": (5, 5)}

    @pytest.mark.parametrize("name", SABOTAGED)
    def test_what_is_lacking_is_named(self, tmp_path: Path, name: str) -> None:
        right, wrong, missing = SABOTAGED[name]
        assert WHOLE.count(right) == 1
        self.write(tmp_path, WHOLE.replace(right, wrong))
        assert [what for every in violations(Project(tmp_path)).values() for what in every] == missing
        assert counts(tmp_path)["oracle"][0] < 5

    @pytest.mark.parametrize(
        ("line", "missing"), [("Raises ShapeError: ``x``.", []), ("A ShapeError.", ["ShapeError"] * 2)]
    )
    def test_errors_of_all_functions(self, tmp_path: Path, line: str, missing: list[str]) -> None:
        """A paragraph of the module's docstring that begins with "Raises" is about all; a name elsewhere is not."""
        text = WHOLE.replace(" Raises ShapeError.", "").replace("5.4.1.", f"5.4.1.\n\n{line}")
        self.write(tmp_path, text)
        lacking = [what for every in violations(Project(tmp_path)).values() for what in every]
        assert lacking == [f"raises: {error}" for error in missing]

    def test_which_functions(self, tmp_path: Path) -> None:
        """Private names, faults, functions without tensors and inputs by name are exempt; other public ones are not."""
        bare = [f"def {name}(x: {kind}) -> None: ..." for name, kind in (("f", "Tensor"), ("g", "torch.Tensor | None"))]
        bare += ["def _h(x: Tensor) -> None: ...", "def i(x: int) -> None: ...", "def j(x: Mapping[str, Tensor]): ..."]
        bare += ["@fault('name', 'kind')\ndef read_k(x: Tensor) -> Tensor: ...", "def l() -> list[np.ndarray]: ..."]
        bare += ["class A:\n    def m(self, *x: 'Tensor') -> None: ...", "class _B:\n    def n(self, x: Tensor): ..."]
        self.write(tmp_path, "\n".join(bare))
        (tmp_path / "oracle" / "_private.py").write_text(bare[0])
        assert [function.name for function in Project(tmp_path).functions()] == ["f", "g", "l", "A.m"]

    @staticmethod
    def write(root: Path, text: str) -> None:
        (root / "oracle").mkdir(exist_ok=True)
        (root / "oracle" / "module.py").write_text(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
