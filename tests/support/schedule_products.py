"""Products that a schedule can compute, with bell-shaped, finite or arbitrary codes, for the tests of engines."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from oracle.numbers.formats import by_name, codes_of, decode, from_codes
from oracle.tensorcore.schedules import Scales, Schedule
from oracle.truth.gemm import ScaledProduct


def formats_of(schedule: Schedule) -> tuple[str, ...]:
    return tuple(f for f in schedule.instruction.operands if f not in ("tfloat32", "float4_e2m1fn"))


def any_codes(rows: int, k: int, fmt: str, *, seed: int, special: bool) -> Tensor:
    """Uniform codes; without ``special`` those of NaN and infinities become the largest finite value."""
    f = by_name(fmt)
    codes = torch.from_numpy(np.random.Generator(np.random.Philox(seed)).integers(0, 1 << f.bits, (rows, k)))
    if not special:
        codes = torch.where(torch.isfinite(decode(codes, f)), codes, f.max_code)
    return from_codes(codes, f)


def within(x: Tensor) -> Tensor:
    """Finite values with their exponents folded into [-105, 105], so that any scale of 2^-20 to 2^19 leaves them normal
    bfloat16 values, as a schedule that dequantises asks."""
    value = decode(x)
    fraction, exponent = torch.frexp(value)
    folded = torch.ldexp(fraction, (exponent + 105) % 211 - 105)
    return torch.where(torch.isfinite(value), folded, value).to(x.dtype)


def bell(rows: int, k: int, fmt: str, *, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, k, generator=g).to(by_name(fmt).torch_dtype)


def product_of(
    schedule: Schedule,
    m: int,
    n: int,
    k: int,
    *,
    seed: int,
    formats: tuple[str, str] | None = None,
    data: str = "bell",
    bias: bool = False,
) -> ScaledProduct:
    """A product that the schedule can compute, every scale different."""
    g = torch.Generator().manual_seed(seed)
    left, right = formats or (formats_of(schedule)[0],) * 2
    block = (
        32
        if schedule.dequantises
        else {Scales.PROMOTION: 128, Scales.OPERANDS: 32, Scales.EPILOGUE: k}[schedule.scales]
    )
    blocks = -(-k // block)
    if data == "bell":
        a, b = bell(m, k, left, seed=seed + 1), bell(n, k, right, seed=seed + 2)
    else:
        a = any_codes(m, k, left, seed=seed + 1, special=data == "special")
        b = any_codes(n, k, right, seed=seed + 2, special=data == "special")
        if schedule.dequantises:
            a, b = within(a), within(b)
    if schedule.scales is Scales.OPERANDS or schedule.dequantises:
        sa = 2.0 ** torch.randint(-20, 20, (m, blocks), generator=g)
        sb = 2.0 ** torch.randint(-20, 20, (-(-n // 2), blocks), generator=g)
    else:
        sa, sb = torch.rand(m, blocks, generator=g) + 0.1, torch.rand(-(-n // 2), blocks, generator=g) - 0.5
    return ScaledProduct(a, b, sa, sb, block, 2, bias=torch.randn(n, generator=g) if bias else None)


def differing(x: Tensor, y: Tensor) -> int:
    return int((codes_of(x) != codes_of(y)).sum())
