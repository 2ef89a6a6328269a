"""Small random products for the tests: codes, scales and shapes from a seeded generator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oracle.numbers.formats import by_name, decode, from_codes
from oracle.tensorcore.schedules import Schedule
from oracle.truth.gemm import ScaledProduct
from oracle.verdict.compare import Verdict
from oracle.verdict.products import Part, ProductSets

KINDS = ("randn", "codes", "positive", "one large among tiny", "one huge among tiny")
EDGE = {13: (0.1875, 16.0), 25: (0.03515625, 240.0)}  # (tiny, large): tiny**2 lies between 1 and 2 quanta of large**2
TINY = {"one large among tiny": (0.0625, 16.0), "one huge among tiny": (0.0625, 240.0)}


def operand(kind: str, rows: int, k: int, *, seed: int, fmt: str = "float8_e4m3fn") -> Tensor:
    """Codes ``[rows, k]``: gaussian-like, every finite code (16-bit formats: wide exponents), positive, adversarial.

    The adversarial rows hold one product in 32 whose exponent puts the others just below the quantum of an aligner of
    13 (large) or 25 bits (huge).
    """
    g = torch.Generator().manual_seed(seed)
    f = by_name(fmt)
    if kind == "codes" and f.bits == 16:
        wide = torch.randint(-12, 12, (rows, k), generator=g)
        return (torch.randn(rows, k, generator=g) * 2.0**wide).to(f.torch_dtype)
    if kind == "codes":
        codes = torch.randint(0, 256, (rows, k), generator=g).to(torch.uint8)
        finite = torch.isfinite(decode(codes, f))
        return from_codes(torch.where(finite, codes, torch.zeros_like(codes)), f)
    x = torch.randn(rows, k, generator=g)
    if kind == "positive":
        x = x.abs()
    if kind in TINY:
        tiny, large = TINY[kind]
        x = (1 + torch.randint(0, 8, (rows, k), generator=g) / 8) * tiny
        x = torch.where(torch.rand(rows, k, generator=g) < 0.5, x, x / 2)
        x[:, ::32] = large
        if kind == KINDS[3]:
            x[:, ::32] *= torch.sign(torch.randn(rows, -(-k // 32), generator=g))
    return x.to(f.torch_dtype)


def block_scaled(
    kind: str, m: int, n: int, k: int, *, seed: int, fmt: str = "float8_e4m3fn", powers: bool = False
) -> ScaledProduct:
    """1x128 scales on ``a`` and 128x128 on ``b``, all different; powers of two on request."""
    g = torch.Generator().manual_seed(seed + 1)
    blocks, groups = -(-k // 128), -(-n // 128)

    def scales(rows: int) -> Tensor:
        if powers:
            return 2.0 ** torch.randint(-3, 4, (rows, blocks), generator=g).to(torch.float32)
        return torch.rand(rows, blocks, generator=g) + 0.5

    a, b = operand(kind, m, k, seed=seed, fmt=fmt), operand(kind, n, k, seed=seed + 7, fmt=fmt)
    return ScaledProduct(a, b, scales(m), scales(groups), block=128, b_rows=128)


def row_scaled(kind: str, m: int, n: int, k: int, *, seed: int, fmt: str = "float8_e4m3fn") -> ScaledProduct:
    """One scale for each row of ``a`` and of ``b``, and a bfloat16 bias."""
    g = torch.Generator().manual_seed(seed + 2)
    a, b = operand(kind, m, k, seed=seed, fmt=fmt), operand(kind, n, k, seed=seed + 7, fmt=fmt)
    sa, sb = torch.rand(m, 1, generator=g) + 0.5, torch.rand(n, 1, generator=g) + 0.5
    return ScaledProduct(a, b, sa, sb, block=k, b_rows=1, bias=torch.randn(n, generator=g).to(torch.bfloat16))


def at_the_edge(align_bits: int, m: int, n: int, k: int) -> ScaledProduct:
    """Products between one and two quanta of an ``align_bits`` aligner: one bit fewer loses them whole."""
    tiny, large = EDGE[align_bits]
    x = torch.full((m + n, k), tiny)
    x[:, ::128] = large
    codes = x.to(torch.float8_e4m3fn)
    g = torch.Generator().manual_seed(1)
    sa, sb = torch.rand(m, -(-k // 128), generator=g) + 0.5, torch.rand(-(-n // 128), -(-k // 128), generator=g) + 0.5
    return ScaledProduct(codes[:m], codes[m:], sa, sb, block=128, b_rows=128)


def judge_parts(
    parts: Sequence[Part],
    output: Tensor,
    *,
    numerics: Sequence[str],
    wider: Sequence[str] = (),
    faults: Sequence[Schedule] = (),
) -> Verdict:
    """The verdict on ``output [R, N]`` by these numerics and classes, without a contract."""
    return ProductSets(parts, numerics, wider, faults).judge({"out": output})
