"""The fused sums in CUDA C++, as far as a machine without a GPU can check them: tables, limits, and the four steps.

Their bits on a GPU are compared in ``tests/bounds/test_engines.py``.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from oracle.errors import NumericsError
from oracle.numbers.formats import by_name, decode
from oracle.tensorcore import cuda_source, cuda_sums
from oracle.tensorcore.cuda_sums import BYTE, POWERS, Sums, least_bit
from oracle.tensorcore.fused import fused_sum, operand, round_accumulator
from oracle.tensorcore.instructions import instruction
from oracle.tensorcore.packing import FMA
from oracle.tensorcore.schedules import get
from tests.support.schedule_products import product_of

E4M3, E5M2 = by_name("float8_e4m3fn"), by_name("float8_e5m2")
NARROW = Sums((E4M3, E4M3), 32, 13, 13, FMA, False)
CPU = torch.device("cpu")


def test_tables() -> None:
    """Every code: its value, 256 to its exponent over the least one's, and the exponent of its lowest set bit."""
    (value, power, lowest), (table, zero) = NARROW._facts(0), NARROW._table(0, CPU)
    exact = torch.nan_to_num(decode(torch.arange(256), E4M3), 0.0)
    assert torch.equal(value.double(), exact) and value[zero] == 0
    nonzero = exact != 0
    exponent = torch.frexp(exact)[1] - 1
    powers = power.view(torch.bfloat16).double()
    assert torch.equal(powers[nonzero], 2.0 ** (POWERS * (exponent.clamp(min=-6)[nonzero] + 6) - 59).double())
    unit = 2.0 ** (lowest[nonzero].double() + least_bit(E4M3))
    odd = exact[nonzero] / unit
    assert torch.equal(odd, odd.round()) and bool((odd % 2 == 1).all())
    assert not powers[~nonzero].any() and bool((lowest[~nonzero] == NARROW._zero).all())
    first, second = table.unbind(dim=1)
    assert torch.equal(first.view(torch.float32), value) and torch.equal(second.to(torch.int16), power)
    assert torch.equal((second >> 16).to(torch.uint8), lowest) and torch.equal(second < 0, exact < 0)


def test_what_fits() -> None:
    """E4M3 by E4M3, in float32 or in float64; no wider range or result, no other group, no sum that leaves these."""
    assert NARROW.fits(1 << 24) and replace(NARROW, group=16).fits(128) and not NARROW._wide
    for wide in (replace(NARROW, out_bits=12), replace(NARROW, align_bits=25, out_bits=23)):
        assert wide.fits(1 << 24) and wide._wide
    for other in (
        replace(NARROW, formats=(E4M3, E5M2)),
        replace(NARROW, group=64),
        replace(NARROW, align_bits=25, out_bits=25),
        replace(NARROW, out_bits=25),
        replace(NARROW, align_bits=45),
    ):
        assert not other.fits(128), other
    assert not NARROW.fits(1 << 40)


def stepwise(codes: torch.Tensor, c: torch.Tensor, sums: Sums = NARROW) -> torch.Tensor:
    """The sums ``[R]`` of ``codes [2, R, G]`` and ``c`` by the four steps of the source, in float64 and integers."""
    value, power, lowest = sums._facts(0)
    a, b = codes.long()
    powers = power.view(torch.bfloat16).double()
    d = 2.0**-118 + (powers[a] * powers[b]).sum(dim=-1)
    field = torch.frexp(d.float())[1] + 126
    top = (field >> 3) - 1 + sums._least_product
    m = torch.maximum(top, torch.where(c == 0, -200, torch.frexp(c)[1] - 1))
    q = 2.0 ** (m - sums.align_bits).double()
    product = value[a].double() * value[b].double()
    floors = torch.floor(product / q[:, None]).sum(dim=-1)
    at = (2 * BYTE + 22 + sums._least_bit) - (m + 150 - sums.align_bits)
    byte = lowest[a].int() + lowest[b].int() + at[:, None]
    assert bool(((byte >= 0) & (byte < 256)).all())
    counted = (byte < BYTE) & ((value[a] < 0) != (value[b] < 0))
    return (torch.trunc(c / q) + floors + counted.sum(dim=-1)) * q


@pytest.mark.parametrize("spread", [1, 8, 127])
def test_four_steps(spread: int) -> None:
    """Floors and counted bytes give the sum that the definition truncates, zeros and subnormals among the operands."""
    wgmma = instruction("sm90.wgmma.fp8")
    g = torch.Generator().manual_seed(spread)
    codes = torch.randint(0, 127, (2, 3000, 32), generator=g) // spread * spread
    codes += 128 * torch.randint(0, 2, codes.shape, generator=g)
    c = torch.zeros(3000, dtype=torch.float64)
    for _ in range(3):
        a, b = (operand(x.to(torch.uint8).view(torch.float8_e4m3fn), wgmma) for x in codes)
        exact = fused_sum(
            a.values * b.values, a.exponents + b.exponents, c, align_bits=13, min_exponent=-126, c_emin=-126
        )
        assert torch.equal(stepwise(codes, c), exact)
        c = round_accumulator(exact, wgmma, out=torch.float32)


def test_notices_a_wrong_zero() -> None:
    """A zero operand whose byte does not carry is counted."""

    class Wrong(Sums):
        @property
        def _zero(self) -> int:
            return 0

    codes = torch.full((2, 1, 32), 0x78)
    codes[0, 0, 1], codes[1, 0, 1] = 0, 0xF8  # 0 * -256
    wrong = Wrong(NARROW.formats, 32, 13, 13, FMA, False)
    zero = torch.zeros(1, dtype=torch.float64)
    assert stepwise(codes, zero, wrong) != stepwise(codes, zero)


def test_what_a_launch_passes() -> None:
    """Pointers of tensors, int as 32 bits, and what says its own kind."""
    x = torch.zeros(3)
    assert cuda_source._passed(x) == (ctypes.c_void_p, x.data_ptr())
    assert cuda_source._passed(7) == (ctypes.c_int, 7)
    assert cuda_source._passed(ctypes.c_longlong(1 << 40)) == (ctypes.c_longlong, 1 << 40)


def test_only_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = get("sm90.promote128")
    product = product_of(schedule, 2, 3, 128, seed=1)
    assert cuda_sums.kernels(product, schedule, 32) is None
    with pytest.raises(NumericsError, match=cuda_source.SWITCH):
        cuda_source.checked((1,))
    assert cuda_source.checked((0, "found")) == "found" and cuda_source.checked((0,)) is None
