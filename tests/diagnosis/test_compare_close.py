"""What the usual checks say of two tensors: by their own definitions, torch's by torch itself."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from oracle.diagnosis.baselines import Said, rules
from oracle.errors import DeviceError, DtypeError, InputError, OptionError, ShapeError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Y = torch.tensor([[1.0, -2.0, 4.0], [0.5, 8.0, -16.0]])


def row(found: oracle.Closeness, name: str) -> Said:
    return next(said for said in found.rows if said.name == name)


def torch_says(x: Tensor, y: Tensor, **tolerances: float) -> bool:
    try:
        torch.testing.assert_close(x, y, **tolerances)
    except AssertionError:
        return False
    return True


class TestFigures:
    """By hand; every rule can fail."""

    def test_equal(self) -> None:
        found = oracle.compare_close(Y, Y)
        assert found and [said.name for said in found.rows] == [rule.name for rule in rules()]
        assert [said.figure for said in found.rows] == pytest.approx([0, 1, 0, 0, 1, 0])
        zeros = torch.zeros(2, 3)
        assert oracle.compare_close(zeros, zeros) and not oracle.compare_close(zeros + 1, zeros)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_negated(self, dtype: torch.dtype) -> None:
        found = oracle.compare_close(-Y.to(dtype), Y.to(dtype))
        assert not any(said.passed for said in found.rows)
        figures = [said.figure for said in found.rows if said.name != "torch assert_close"]
        assert figures == pytest.approx([2, -1, 2, 0, 2])

    def test_one_element(self) -> None:
        """An error of 5 % of the smallest element: only what looks at elements sees it."""
        x = Y.double()
        x[1, 0] *= 1.05
        found = oracle.compare_close(x.float(), Y.double())
        size, error = float(Y.double().square().sum()), float((x.float().double() - Y.double()).square().sum())
        assert row(found, "hipBLASLt norm").figure == pytest.approx(math.sqrt(error / size))
        assert row(found, "flashinfer-bench").figure == pytest.approx(5 / 6)
        refused = {said.name for said in found.rows if not said.passed}
        assert refused == {"torch assert_close", "flashinfer-bench", "hipBLASLt norm"}
        assert "failed: 0.8333, not >= 0.95" in str(found) and "DeepGEMM calc_diff passed: " in str(found)
        assert len(str(found).splitlines()) == len(rules())

    def test_frozen(self) -> None:
        with pytest.raises(FrozenInstanceError):
            oracle.compare_close(Y, Y).rows[0].figure = 1.0  # type: ignore[misc]


class TestTorch:
    """The row of torch and ``torch.testing.assert_close`` agree, at half and at twice each tolerance."""

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("factor", [0.5, 2.0])
    def test_defaults(self, dtype: torch.dtype, factor: float) -> None:
        rtol = {torch.bfloat16: 1.6e-2, torch.float16: 1e-3, torch.float32: 1.3e-6}[dtype]
        x, y = (Y.double() * (1 + factor * rtol)).to(dtype), Y.to(dtype)
        said = row(oracle.compare_close(x, y), "torch assert_close")
        assert said.passed is torch_says(x, y) is (factor < 1)

    @pytest.mark.parametrize(("rtol", "atol"), [(0.0, 0.0), (0.0, 0.5), (0.1, 0.0)])
    @pytest.mark.parametrize("error", [0.0, 0.4, 0.6])
    def test_given(self, rtol: float, atol: float, error: float) -> None:
        x = Y + torch.tensor([[error, 0, 0], [0, 0, 0]])
        found = oracle.compare_close(x, Y, rtol=rtol, atol=atol)
        assert row(found, "torch assert_close").passed is torch_says(x, Y, rtol=rtol, atol=atol)
        assert [s for s in found.rows if s.name[:5] != "torch"] == [
            s for s in oracle.compare_close(x, Y).rows if s.name[:5] != "torch"
        ]

    @pytest.mark.parametrize(
        ("x", "y"),
        [
            (math.nan, 1.0),
            (1.0, math.nan),
            (math.nan, math.nan),
            (math.inf, math.inf),
            (math.inf, 1.0),
            (1.0, math.inf),
            (-math.inf, math.inf),
            (math.nan, math.inf),
            (0.0, -0.0),
        ],
    )
    def test_special_values(self, x: float, y: float) -> None:
        actual, expected = torch.tensor([x, 1.0]), torch.tensor([y, 1.0])
        found = oracle.compare_close(actual, expected)
        assert row(found, "torch assert_close").passed is torch_says(actual, expected)
        if math.isnan(x) or math.isnan(y):
            assert not any(said.passed for said in found.rows)


class TestRefused:
    """Bad input is one typed error that names the value."""

    @pytest.mark.parametrize(
        ("x", "y", "said", "error", "match"),
        [
            ([1.0], Y, {}, InputError, "actual is a list"),
            (Y, None, {}, InputError, "expected is a NoneType"),
            (Y.double(), Y, {}, DtypeError, "actual is torch.float64"),
            (Y, Y.to(torch.float8_e4m3fn), {}, DtypeError, "expected is torch.float8_e4m3fn"),
            (Y, Y[:1], {}, ShapeError, r"expected \[1, 3\]"),
            (Y[:0], Y[:0], {}, ShapeError, "at least one element"),
            (Y, Y.to("meta"), {}, DeviceError, "expected on meta"),
            (Y, Y, {"rtol": 0.1}, OptionError, "both or neither"),
            (Y, Y, {"rtol": 0.1, "atol": -1.0}, OptionError, "not negative"),
            (Y, Y, {"rtol": math.nan, "atol": 0.0}, OptionError, "rtol is nan"),
            (Y, Y, {"rtol": 0.0, "atol": "1"}, OptionError, "atol '1'"),
        ],
    )
    def test_typed_error(self, x: Any, y: Any, said: Any, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            oracle.compare_close(x, y, **said)
