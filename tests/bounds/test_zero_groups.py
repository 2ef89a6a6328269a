"""Block scales: three published models differ in which zeros align what is added; the interval holds them all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oracle.bounds import admissible, chain, of_schedule, steps
from oracle.bounds.chain import residue_step
from oracle.bounds.engines import exact, residue_bound
from oracle.numbers.formats import E2M1, decode
from oracle.tensorcore import predict
from oracle.tensorcore.schedules import get, schedules
from oracle.truth.gemm import ScaledProduct, rounded
from oracle.verdict.compare import compare

E4M3 = torch.float8_e4m3fn
NAMES = ("sm100.chain_nvf4", "sm100.chain_mxf4", "sm120.chain_nvf4")


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


@pytest.mark.turns(4)
def test_also_a_coarser_alignment() -> None:
    """1 next to 2**35 and -2**35: lost by 34 bits, kept by 35; refused by a bound of 35 alone."""
    name, a = "sm100.chain_mxf4", torch.zeros(1, 64, dtype=torch.uint8)
    a[0, 0], a[0, 16], a[0, 32] = 2, 10, 2  # 1, -1 and 1
    b = torch.full((1, 64), 2, dtype=torch.uint8)
    scale = torch.tensor([[2.0**20, 1.0]])
    given = ScaledProduct(a, b, scale, torch.tensor([[2.0**15, 1.0]]), 32, 1)
    bits = [float(predict.predict_product(given, name + x, out_dtype=torch.float32)) for x in ("", ".align34")]
    assert bits == [1.0, 0.0]
    assert outside(given, name, seen=f"{name}.align34") == 0
    assert outside(given, f"{name}.align36", seen=f"{name}.align34") == 1  # a named reading has its own width


def drawn_fp8(seed: int) -> ScaledProduct:
    """Rows of zeros under large scales beside small products, scale exponents over most of E8M0."""
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(rows, 128, generator=g).to(E4M3).float() for rows in (6, 5))
    a = torch.where(torch.rand(6, 4, generator=g).repeat_interleave(32, dim=1) < 0.5, torch.zeros_like(a), a)
    powers = (torch.randint(-70, 60, (rows, 4), generator=g) for rows in (6, 5))
    return ScaledProduct(a.to(E4M3), b.to(E4M3), *(torch.exp2(e.double()).float() for e in powers), 32, 1)


def outside(given: ScaledProduct, name: str, *, seen: str = "") -> int:
    """Elements of the bits by ``seen`` (empty: ``name``) outside the interval of ``name``."""
    out = predict.predict_product(given, seen or name, out_dtype=torch.float32)
    a, b = (decode(x, E2M1).to(E4M3) if x.dtype == torch.uint8 else x for x in (given.a, given.b))
    twin = ScaledProduct(a, b, given.a_scale, given.b_scale, given.block, given.b_rows)
    value = exact(twin)
    interval = residue_bound(twin, of_schedule(get(name)))
    return compare(out, admissible(value, rounded(twin, value, torch.float32), interval)).outside


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reading", ["", ".zero_sums", ".counted", ".align34", ".align36", ".sums32", ".saturates"])
def test_the_interval_holds_every_reading(name: str, reading: str) -> None:
    if name.endswith("nvf4") and reading in (".sums32", ".saturates"):
        assert name + reading not in {s.name for s in schedules()}  # one scale for 16, and no sum so large
        return
    assert sum(outside(drawn(name, seed), name, seen=name + reading) for seed in range(4)) == 0


def test_sums_of_32_under_one_scale() -> None:
    """9 and -7 beside 2**37 and -2**37: 8 and -4 are kept of them, of their sum nothing; one step must hold both."""
    name = "sm100.chain_mxf4"
    a, b = torch.zeros(1, 64, dtype=torch.uint8), torch.full((1, 64), 2, dtype=torch.uint8)  # 1.0
    a[0, 0], a[0, 1], a[0, 16], a[0, 17], a[0, 32], a[0, 48] = 7, 5, 14, 13, 2, 10  # 6 and 3; -4 and -3; 1; -1
    given = ScaledProduct(a, b, torch.tensor([[1.0, 2.0**20]]), torch.tensor([[1.0, 2.0**17]]), 32, 1)
    bits = [float(predict.predict_product(given, name + x, out_dtype=torch.float32)) for x in ("", ".sums32")]
    assert bits == [4.0, 0.0] and outside(given, name) == outside(given, name, seen=f"{name}.sums32") == 0
    addends = torch.tensor([[[9.0, -7.0, 2.0**37, -(2.0**37)]]], dtype=torch.float64)
    zero, top = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1), 37)
    step = zero, zero, zero, zero, addends, top, of_schedule(get(name)), top
    x, low, _ = residue_step(*step, addends.unflatten(2, (-1, 2)).sum(dim=3))
    assert float(x) == 2.0 and float(x + low) <= 0.0
    x, low, _ = residue_step(*step)  # the negative test, which knows sums of 16 alone
    assert float(x + low) > 0.0


@pytest.mark.turns(4)
def test_also_that_of_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero operands counted at -126 plus the scales' exponents; refused where the bound leaves them out."""
    name = "sm100.chain_ue8m0"
    cases = [drawn_fp8(seed) for seed in range(4)] + [large_zeros()]
    assert all(outside(x, name, seen=name + reading) == 0 for x in cases for reading in ("", ".zero_sums", ".counted"))
    a, b = (predict.predict_product(large_zeros(), name + x, out_dtype=torch.float32) for x in ("", ".counted"))
    assert float(a) == 1 + 2.0**-18 and float(b) == 0.0
    monkeypatch.setattr(chain, "residue_step", without_least)
    assert outside(large_zeros(), name, seen=name + ".counted") == 1


def large_zeros() -> ScaledProduct:
    """``1 + 2**-18`` from the first block, then zeros times 448 under scales of 2**73."""
    a, b = torch.zeros(1, 64), torch.full((1, 64), 448.0)
    a[0, 0], b[0, 0], a[0, 1], b[0, 1] = 1.0, 1.0, 2.0**-9, 2.0**-9
    scale = torch.tensor([[1.0, 2.0**73]])
    return ScaledProduct(a.to(E4M3), b.to(E4M3), scale, scale, 32, 1)


def without_least(*arguments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A step whose largest exponent is surely that of what is not 0."""
    x, low, high, slack, p, top, acc, least, *_ = arguments
    return residue_step(x, low, high, slack, p, top if least is None else least, acc)  # type: ignore[arg-type]


def small_beside_zeros() -> ScaledProduct:
    """``1.0 * 2**-40`` next to a group of zeros with scale 1: counted zeros align it away."""
    a, b = torch.zeros(1, 64, dtype=torch.uint8), torch.zeros(1, 64, dtype=torch.uint8)
    a[0, 0] = b[0, 0] = 2  # 1.0
    scale = torch.tensor([[2.0**-20, 1.0]])
    return ScaledProduct(a, b, scale, scale, 32, 1)


def test_what_they_differ_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held by the interval, and refused by one that lets only the groups that are not 0 align (the negative test)."""
    given, name = small_beside_zeros(), NAMES[1]
    bits = [float(predict.predict_product(given, name + x, out_dtype=torch.float32)) for x in ("", ".counted")]
    assert bits == [2.0**-40, 0.0]
    assert outside(given, name) == outside(given, name, seen=f"{name}.counted") == 0
    monkeypatch.setattr(steps, "residue_step", without_least)
    assert outside(given, name, seen=f"{name}.counted") == 1
