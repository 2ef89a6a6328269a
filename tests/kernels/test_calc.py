"""calc_diff: one number for two tensors."""

import pytest
import torch

from kernels import calc_diff
from kernels.errors import ShapeError


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 0.0], [0.0, 1.0], 1.0),
        ([1.0], [-1.0], 2.0),
        ([0.0], [0.0], 0.0),
        ([], [], 0.0),
        ([0.0], [1.0], 1.0),
    ],
)
def test_values(x: list[float], y: list[float], expected: float) -> None:
    diff = calc_diff(torch.tensor(x), torch.tensor(y))
    assert diff.dtype == torch.float64 and diff.item() == pytest.approx(expected, abs=1e-15)


def test_nan_is_not_hidden() -> None:
    assert calc_diff(torch.tensor([float("nan")]), torch.ones(1)).isnan()


def test_shapes_must_agree() -> None:
    with pytest.raises(ShapeError):
        calc_diff(torch.ones(2), torch.ones(3))
