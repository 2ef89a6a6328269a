"""The unit for approximate functions of sm90, against digests of what an H200 gave for every value of a binade."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from oracle.numbers import mufu

EVERY = 61  # one value of so many; the digests are those of the recorded steps of the same values
RIGHT: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rcp": lambda x: 1.0 / x,
    "ex2": np.exp2,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
}
MADE = {"rcp": mufu.reciprocal, "ex2": mufu.exp2, "rsqrt": mufu.reciprocal_root}
RECORDED = {
    ("rcp", 1.0): "d77c4e6dd134fac9",
    ("rsqrt", 1.0): "15bd9c3d0724ce57",
    ("rsqrt", 2.0): "49ee1ca39a7696da",
    ("ex2", 0.0625): "a298d4ae092d4f99",
    ("ex2", 0.5): "204f0c3e9ee31b85",
    ("ex2", 4.0): "8790192ee1fa627c",
    ("ex2", -0.0625): "5479c377f5e48836",
    ("ex2", -1.0): "83130fbae3981195",
    ("ex2", -4.0): "4038f5b27c403a5a",
}


def digest(name: str, first: float) -> str:
    """Of the float32 steps from the correctly rounded value, as tests/hardware/approximations.py counts them."""
    x = first * (1 + np.arange(0, 1 << 23, EVERY) / 2**23)
    made = MADE[name](torch.from_numpy(x)).to(torch.float32).view(torch.int32).to(torch.int64)
    right = torch.from_numpy(RIGHT[name](x).astype(np.float32)).view(torch.int32).to(torch.int64)
    return hashlib.sha256((made - right).to(torch.int8).numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize(("name", "first"), RECORDED)
def test_every_step_is_the_recorded_one(name: str, first: float) -> None:
    assert digest(name, first) == RECORDED[name, first]


def test_a_square_of_all_products_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what the unit drops; and a digest of rounded values is none of the recorded ones."""
    monkeypatch.setattr(mufu, "_squares", lambda bits: torch.arange(1 << bits) ** 2)
    assert digest("rcp", 1.0) != RECORDED["rcp", 1.0]
    nothing = np.zeros(len(range(0, 1 << 23, EVERY)), dtype=np.int8)
    assert hashlib.sha256(nothing.tobytes()).hexdigest()[:16] not in RECORDED.values()


@pytest.mark.parametrize(
    ("name", "x", "due"),
    [
        ("rcp", 0.0, torch.inf),
        ("rcp", -0.0, -torch.inf),
        ("rcp", -torch.inf, -0.0),
        ("rcp", 2.0**127, 0.0),
        ("rcp", -4.0, -0.25),
        ("ex2", -2.0, 0.25),
        ("ex2", 0.0, 1.0),
        ("ex2", 128.0, torch.inf),
        ("ex2", -130.0, 0.0),
        ("ex2", -torch.inf, 0.0),
        ("rsqrt", 16.0, 0.25),
        ("rsqrt", 2.0**-126, 2.0**63),
        ("rsqrt", 0.0, torch.inf),
        ("rsqrt", torch.inf, 0.0),
    ],
)
def test_ends(name: str, x: float, due: float) -> None:
    made = MADE[name](torch.tensor([x], dtype=torch.float64))
    assert float(made) == due and bool(torch.signbit(made)) == bool(torch.signbit(torch.tensor(due)))


@pytest.mark.parametrize("function", MADE.values())
def test_nan(function: Callable[[Tensor], Tensor]) -> None:
    assert bool(torch.isnan(function(torch.tensor([torch.nan], dtype=torch.float64))).all())
