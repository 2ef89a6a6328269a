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

TANGENTS = {
    -8: "e0a7e929a23769d5",
    -7: "e8359d2a777ac1ca",
    -6: "178fd053c8051dfb",
    -5: "1c3a235b3138dd40",
    -4: "b9447ab7e9217f1c",
    -3: "587dddd9f1008fa7",
    -2: "540ed64875cc8b31",
    -1: "0ac298021bfbdb30",
    0: "a3486cf7086101d0",
    1: "ad04fd9fd5eb9f39",
    2: "4473a37a9d41dd39",
}
"""Digests of ``tanh.approx`` as an H100 gave it, for every 4096th value of the binade of each exponent."""


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


class TestTangent:
    """``tanh.approx``: an H100's results, odd, x below 2^-8 and 1 from 8 on."""

    @pytest.mark.parametrize("exponent", TANGENTS)
    def test_every_recorded_bit(self, exponent: int) -> None:
        x = torch.from_numpy(2.0**exponent * (1 + np.arange(0, 1 << 23, 4096) / 2**23))
        bits = mufu.tanh(x).to(torch.float32).view(torch.int32).numpy()
        assert hashlib.sha256(bits.tobytes()).hexdigest()[:16] == TANGENTS[exponent]
        assert torch.equal(mufu.tanh(-x), -mufu.tanh(x))

    def test_another_row_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mufu, "TANGENT", mufu.TANGENT[17:] + mufu.TANGENT[:17])
        mufu._tangent.cache_clear()
        try:
            with pytest.raises(AssertionError):
                self.test_every_recorded_bit(0)
        finally:
            mufu._tangent.cache_clear()

    def test_ends(self) -> None:
        x = torch.tensor([0.0, -0.0, 2.0**-149, 2.0**-9, 2.0**-8, 8.0, torch.inf, -torch.inf], dtype=torch.float64)
        due = torch.tensor([0.0, -0.0, 2.0**-149, 2.0**-9, 2.0**-8, 1.0, 1.0, -1.0], dtype=torch.float64)
        assert torch.equal(mufu.tanh(x).view(torch.int64), due.view(torch.int64))
        assert bool(torch.isnan(mufu.tanh(torch.tensor([torch.nan], dtype=torch.float64))).all())

    def test_within_2_to_the_minus_16(self) -> None:
        """Of the real tangent, relative; PTX promises 2^-10.987."""
        x = torch.linspace(2.0**-9, 9.0, 300_001, dtype=torch.float32).to(torch.float64)
        error = ((mufu.tanh(x) - torch.tanh(x)) / torch.tanh(x)).abs().max()
        assert 2.0**-17 < float(error) < 2.0**-16
