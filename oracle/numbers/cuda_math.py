"""CUDA's and Triton's exponentials on sm90, step by step, SiLU, ``rsqrtf`` and sums of blocks; float64 values.

    n = floor(252 sat(fma(x, 0.005724980, 1/2))) - 126               sat: to 0 and 1
    r = fma(x, 1.925963e-8, fma(x, 1.4426950, -n))                    x log2(e) - n, within [0, 1] or beyond sat
    expf(x) = 2^n ex2.approx.ftz(r)
    silu(x) = RN(x RN(1 / fma(2^n, ex2.approx.ftz(r), 1)))            of -x: the product and the sum are contracted

Triton's ``exp`` is the power of a rounded product instead, and its division ``div.full``:

    e = ex2.approx(RN(x log2(e)))              below an exponent of -126 the square of the power of half of it
    x / (1 + e) = div.full(x, RN(1 + e))

Source: read in the machine code of vLLM 0.20.2 for sm90 (``silu_and_mul_per_block_quant_kernel``,
``rms_norm_static_fp8_quant_kernel``), compiled without fast math; the steps are those of libdevice's ``__nv_expf``.
:mod:`oracle.numbers.mufu` has ``ex2.approx``.
NaN gives NaN in every function here. Not covered: other architectures.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.numbers import fast_math, mufu
from oracle.numbers.formats import FP32
from oracle.numbers.rounding import Overflow, Rounding, f32, power_of_two, round_pair, two_sum

SLOPE = float.fromhex("0x1.77313ap-8")  # log2(e) / 252
LOG2_E, LOG2_E_REST = float.fromhex("0x1.715476p+0"), float.fromhex("0x1.4ae0cp-26")


def fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """``RN(a b + c)`` of float64 values of float32 whose shapes broadcast, rounded once to float32; float64 of the
    shape of ``a b``. Infinities as IEEE 754: 0 times infinity is NaN."""
    product = a * b  # 48 bits: exact
    high, low = two_sum(product, torch.as_tensor(c, dtype=torch.float64, device=a.device).expand_as(product))
    return round_pair(high, low, FP32, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)


def power(x: Tensor) -> tuple[Tensor, Tensor]:
    """``2^n`` and ``ex2(r)`` of ``expf(x)``, both float64 of the same shape as ``x``: float64 values of float32 of any
    shape.

    NaN gives a NaN second factor, infinity an infinite one, minus infinity 0.
    """
    t = fma(x, SLOPE, 0.5).clamp(0.0, 1.0)
    n = torch.nan_to_num(torch.floor(252.0 * t)) - 126.0
    r = fma(x, LOG2_E_REST, fma(x, LOG2_E, -n))
    return power_of_two(n.to(torch.int64)), mufu.exp2(r)


def silu(x: Tensor) -> Tensor:
    """``x / (1 + expf(-x))`` by a rounded reciprocal, of float64 values of float32 of any shape; float64 of the same
    shape. NaN for NaN and for minus infinity."""
    scale, rest = power(-x)
    sum_ = fma(rest, scale, 1.0)
    return f32(x * f32(torch.ones_like(x) / sum_))


def triton_exp(x: Tensor) -> Tensor:
    """``tl.exp(x)`` of float64 values of float32 of any shape; float64 of the same shape. Infinity gives infinity,
    minus infinity 0."""
    exponent = f32(x * LOG2_E)
    small = exponent < -126.0
    result = mufu.exp2(torch.where(small, f32(exponent * 0.5), exponent))
    return torch.where(small, f32(result * result), result)


def triton_silu(x: Tensor) -> Tensor:
    """``x / (1 + tl.exp(-x))`` of float64 values of float32 of any shape; float64 of the same shape. NaN for NaN and
    for minus infinity."""
    return fast_math.divide(x, f32(1.0 + triton_exp(-x)), flushed=False)


def reciprocal_root(x: Tensor) -> Tensor:
    """CUDA's ``rsqrtf(x)`` of float64 values of float32 of any shape; float64 of the same shape.

    Of a subnormal ``x`` 2^12 times the root of 2^24 ``x``. Zeros give infinity of their sign, infinity 0, negative
    values NaN.
    """
    small = x < mufu.SMALLEST_NORMAL
    root = mufu.reciprocal_root(torch.where(small, x * 2.0**24, x))
    return torch.where(small, root * 2.0**12, root)


def sum_of_squares(z: Tensor, vector: int, threads: int) -> Tensor:
    """The sum over each row of ``z [R, H]`` by a block of threads, float64 values of float32; float64 ``[R, 1]``.

    Thread ``t`` adds the squares of its vectors ``t, t + threads, ...`` in order, each by a fused operation; zeros
    stand where H ends. Lanes of a warp are added in a tree by distances 1 to 16, warps one after the other (CUB's
    BlockReduce over warp reductions).
    """
    rows, width = z.shape
    steps, warps = -(-width // (vector * threads)), -(-threads // 32)
    z = torch.nn.functional.pad(z, (0, steps * vector * threads - width)).view(rows, steps, threads, vector)
    lanes = z.new_zeros(rows, threads)
    for step in range(steps):
        for at in range(vector):
            lanes = fma(z[:, step, :, at], z[:, step, :, at], lanes)
    lanes = torch.nn.functional.pad(lanes, (0, warps * 32 - threads)).view(rows, warps, 32)
    for distance in (1, 2, 4, 8, 16):
        lanes = f32(lanes + torch.nn.functional.pad(lanes[..., distance:], (0, distance)))
    total = lanes[:, :1, 0]
    for warp in range(1, warps):
        total = f32(total + lanes[:, warp : warp + 1, 0])
    return total
