"""Block-scaled FP4: two published models differ in whether a group that sums to 0 takes part in the alignment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from oracle.bounds import admissible, of_schedule, steps
from oracle.bounds.chain import NONE, residue_step
from oracle.bounds.engines import exact, residue_bound
from oracle.numbers.formats import E2M1, decode
from oracle.tensorcore import predict
from oracle.tensorcore.schedules import get
from oracle.truth.gemm import ScaledProduct, rounded
from oracle.verdict.compare import compare

E4M3 = torch.float8_e4m3fn
NAMES = ("sm100.chain_nvf4", "sm100.chain_mxf4", "sm120.chain_nvf4")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The older revision: the exponent of a group is that of its scales, also where its products sum to 0."""

    def block_scaled(p: Tensor, scale: Tensor, scale_exponent: Tensor) -> tuple[Tensor, Tensor]:
        return p.reshape(*p.shape[:-1], -1, 16).sum(dim=-1) * scale, scale_exponent

    monkeypatch.setattr(predict, "block_scaled", block_scaled)
    yield


def drawn(name: str, seed: int) -> ScaledProduct:
    """Groups of zeros, groups that cancel, scales far apart."""
    block = get(name).instruction.scale_block or 16
    g = torch.Generator().manual_seed(seed)
    k, (m, n) = 192, (6, 5)
    a, b = (torch.randint(0, 16, (rows, k), generator=g, dtype=torch.uint8) for rows in (m, n))
    b[:, 1::2] = b[:, 0::2]
    quiet = torch.rand(m, k // 16, generator=g) < 0.4
    cancel = (torch.rand(m, k // 16, generator=g) < 0.5).repeat_interleave(8, dim=1)
    a[:, 1::2] = torch.where(cancel, a[:, 0::2] ^ 8, a[:, 1::2])  # the same magnitude with the other sign
    a = torch.where(quiet.repeat_interleave(16, dim=1), torch.zeros_like(a), a)
    if block == 16:
        codes = [torch.randint(0, 0x7F, (rows, k // 16), generator=g, dtype=torch.uint8) for rows in (m, n)]
        return ScaledProduct(a, b, *(c.view(E4M3).float() for c in codes), 16, 1)
    powers = (torch.randint(-20, 21, (rows, k // block), generator=g) for rows in (m, n))
    return ScaledProduct(a, b, *(torch.exp2(e.double()).float() for e in powers), block, 1)


def outside(given: ScaledProduct, name: str) -> int:
    out = predict.predict_product(given, name, out_dtype=torch.float32)
    a, b = (decode(x, E2M1).to(E4M3) for x in (given.a, given.b))
    twin = ScaledProduct(a, b, given.a_scale, given.b_scale, given.block, given.b_rows)
    value = exact(twin)
    interval = residue_bound(twin, of_schedule(get(name)))
    return compare(out, admissible(value, rounded(twin, value, torch.float32), interval)).outside


@pytest.mark.parametrize("name", NAMES)
def test_the_interval_holds_the_predicted_bits(name: str) -> None:
    assert sum(outside(drawn(name, seed), name) for seed in range(6)) == 0


@pytest.mark.parametrize("name", NAMES)
def test_and_those_of_the_other_revision(name: str, counted: None) -> None:
    assert sum(outside(drawn(name, seed), name) for seed in range(6)) == 0


def small_beside_zeros() -> ScaledProduct:
    """``1.0 * 2**-40`` next to a group of zeros with scale 1: the other revision aligns it away."""
    a, b = torch.zeros(1, 64, dtype=torch.uint8), torch.zeros(1, 64, dtype=torch.uint8)
    a[0, 0] = b[0, 0] = 2  # 1.0
    scale = torch.tensor([[2.0**-20, 1.0]])
    return ScaledProduct(a, b, scale, scale, 32, 1)


def test_what_they_differ_in() -> None:
    given = small_beside_zeros()
    assert float(predict.predict_product(given, NAMES[1], out_dtype=torch.float32)) == 2.0**-40
    assert outside(given, NAMES[1]) == 0


def test_what_they_differ_in_by_the_other(counted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held by the interval, and refused by one that lets only the groups that are not 0 align (the sabotaged twin)."""
    given = small_beside_zeros()
    assert float(predict.predict_product(given, NAMES[1], out_dtype=torch.float32)) == 0.0
    assert outside(given, NAMES[1]) == 0

    def dropped(*arguments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        *rest, top, acc, least = arguments
        assert bool((least > NONE).any())
        return residue_step(*rest, least, acc)  # type: ignore[arg-type]

    monkeypatch.setattr(steps, "residue_step", dropped)
    assert outside(given, NAMES[1]) == 1
