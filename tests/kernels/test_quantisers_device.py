"""On a GPU: the instructions that the block quantisers are written in, beside the formulas that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton")

import triton  # only where it is installed
import triton.language as tl

from kernels.backends import _triton_mx_quant as own
from kernels.backends._launch import EXACT
from kernels.mx_blocks import fp4_codes, pack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU here")
ROWS = 256
CHUNK = 1 << 27


@triton.jit
def codes_kernel(y, q, ROWS: tl.constexpr, SURE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane, half = tl.arange(0, 16), tl.arange(0, 8)
    values = tl.load(y + row[:, None] * 16 + lane[None, :])
    tl.store(q + row[:, None] * 8 + half[None, :], own._pack_e2m1(values, ROWS, 8, SURE, True))


@triton.jit
def values_kernel(x, w, out, ROWS: tl.constexpr, WHAT: tl.constexpr, OWN: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    v, other = tl.load(x + index), tl.load(w + index)
    if WHAT == 0:
        if OWN:
            made = own._gated(v, other, w, True)
        else:
            gate = v.to(tl.float32)
            made = own._rounded(gate / (1.0 + tl.exp(-gate)) * other.to(tl.float32), w, True)
    elif WHAT == 1:
        if OWN:
            made = own._weighted(v, other, w, 2, True)
        else:
            made = own._rounded(own._rounded(v, w, True) * other.to(tl.float32), w, True)
    else:
        made = own._wide(other, True)
    tl.store(out + index, made)


def packed(y: Tensor, exact: bool) -> Tensor:
    q = torch.empty(y.numel() // 2, dtype=torch.uint8, device="cuda")
    codes_kernel[(y.numel() // (16 * ROWS),)](y, q, ROWS=ROWS, SURE=exact, **EXACT)
    return q


def computed(x: Tensor, w: Tensor, what: int, ours: bool) -> Tensor:
    out = torch.empty(x.numel(), dtype=torch.float32, device="cuda")
    values_kernel[(x.numel() // ROWS,)](x, w, out, ROWS=ROWS, WHAT=what, OWN=ours, **EXACT)
    return out


def differ(a: Tensor, b: Tensor) -> int:
    return int(((a.view(torch.int32) != b.view(torch.int32)) & ~(a.isnan() & b.isnan())).sum())


def halves(start: int, count: int) -> Tensor:
    """bfloat16 numbers by their bits."""
    return torch.arange(start, start + count, device="cuda", dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def test_every_float32_has_its_code() -> None:
    """All 2^32; a NaN of a product has no sign."""
    wrong = 0
    for start in range(-(1 << 31), 1 << 31, CHUNK):
        y = (torch.arange(CHUNK, device="cuda", dtype=torch.int32) + start).view(torch.float32)
        y = torch.where(y.isnan(), float("nan"), y)
        wrong += int((packed(y, False) != pack(fp4_codes(y[None]))).sum())
    assert wrong == 0


def test_every_bfloat16_has_its_code() -> None:
    y = halves(0, 1 << 16).float()
    y = torch.where(y.isnan(), float("nan"), y)
    right = pack(fp4_codes(y[None]))
    assert torch.equal(packed(y, True), right)
    assert not torch.equal(packed(y * (1 + 2.0**-20), True), pack(fp4_codes((y * (1 + 2.0**-20))[None]))), "negative"


@pytest.mark.parametrize("what", ["silu", "norm"])
def test_values_are_those_of_the_formula(what: str) -> None:
    """Every bfloat16 gate by 1,024 ups, and float32 numbers of every binade by weights, with the bits of Triton's own
    operations."""
    generator = torch.Generator(device="cuda").manual_seed(3)
    gate = halves(0, 1 << 16).repeat_interleave(1 << 10)
    up = halves(0, 1 << 16)[torch.randint(0, 1 << 16, (1 << 26,), generator=generator, device="cuda")]
    x = gate
    if what == "norm":
        x = torch.randint(-(1 << 31), 1 << 31, (1 << 26,), generator=generator, device="cuda").int().view(torch.float32)
    kind = int(what == "norm")
    assert differ(computed(x, up, kind, True), computed(x, up, kind, False)) == 0
    assert differ(computed(x, up, kind, True), computed(x, up.neg(), kind, True)) > 0, "the negative test"


def test_widened() -> None:
    x: Any = halves(0, 1 << 16)
    assert differ(computed(x.float(), x, 2, True), x.float()) == 0
