"""A Triton kernel of the quantisers whose blocks share a scale byte: MXFP8, MXFP4 and NVFP4, bytes in every layout.

The steps are those of :mod:`kernels.mx_blocks`, each rounded once, so codes and scale bytes equal those of plain torch.
A NaN code has no sign here where the hardware converts.
"""

# Triton's language has no Python types: arguments are pointers and tiles, typed by its compiler.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from ._triton_fused import _rounded
from ._triton_kernels import _codes, _divide, _encode


@triton.jit
def _codes_e5m2(y):
    """float32 to E5M2 codes (uint8) by integer arithmetic: nearest even, of at most 57344, NaN to a NaN code."""
    bits = y.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    mag = bits & 0x7FFFFFFF
    nan = mag > 0x7F800000
    mag = tl.where(nan, 0, tl.minimum(mag, 0x47600000))  # 57344.0
    normal = ((mag + 0xFFFFF + ((mag >> 21) & 1)) >> 21) - 448  # rebias 127 -> 15 above 2 fraction bits
    steps = mag.to(tl.float32, bitcast=True) + 128.0  # ulp of 2**7 is 2**-16, the subnormal step
    small = steps.to(tl.int32, bitcast=True) - 0x43000000
    code = tl.where(mag < 0x38800000, small, normal)  # 2**-14
    return (tl.where(nan, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def _codes_e2m1(y):
    """float32 to E2M1 codes (uint8): nearest even, of at most 6; NaN is 6."""
    bits = y.to(tl.int32, bitcast=True)
    sign = tl.where(bits & 0x7FFFFFFF > 0x7F800000, 0, (bits >> 28) & 8)
    mag = tl.minimum(bits & 0x7FFFFFFF, 0x40C00000)  # 6.0
    normal = ((mag + 0x1FFFFF + ((mag >> 22) & 1)) >> 22) - 252  # rebias 127 -> 1 above 1 fraction bit
    steps = mag.to(tl.float32, bitcast=True) + 4194304.0  # ulp of 2**22 is 0.5, the subnormal step
    small = steps.to(tl.int32, bitcast=True) - 0x4A800000
    return (tl.where(mag < 0x3F800000, small, normal) | sign).to(tl.uint8)


@triton.jit
def _e4m3_value(code):
    """The float32 values of E4M3 codes (int32)."""
    exponent, fraction = (code >> 3) & 15, code & 7
    normal = ((exponent + 120) << 23 | fraction << 20).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, fraction.to(tl.float32) * 0.001953125, normal)  # 2**-9
    value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    return tl.where(code & 0x80 != 0, -value, value)


@triton.jit
def _shared_exponent(bits, RCEIL: tl.constexpr, EVEN: tl.constexpr, STEP: tl.constexpr, INVERSE, EMAX: tl.constexpr):
    """The scale byte of blocks from the bits of their amax, as :func:`kernels.mx_blocks.shared_exponent`."""
    if RCEIL:
        bits = (bits.to(tl.float32, bitcast=True) * INVERSE).to(tl.int32, bitcast=True)
        up = (bits >> 23) + (bits & 0x7FFFFF != 0).to(tl.int32)
        return tl.minimum(tl.where(bits >> 23 > 0, up, (bits > 0x400000).to(tl.int32)), 254)
    bits = tl.where(bits < 0x7F800000, bits + EVEN, bits)
    step = (bits & 0x7FFFFF != 0).to(tl.int32) * STEP
    return tl.where(bits < 0x7F800000, tl.minimum(tl.maximum((bits >> 23) + step - EMAX, 0), 254), 255)


@triton.jit
def block_kernel(
    x,
    g,
    q,
    s,
    rows,
    columns,
    given,
    x_stride,
    g_stride,
    ELEMENT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HEIGHT: tl.constexpr,
    RCEIL: tl.constexpr,
    EVEN: tl.constexpr,
    FINITE: tl.constexpr,
    STEP: tl.constexpr,
    TOP: tl.constexpr,
    INVERSE: tl.constexpr,
    EMAX: tl.constexpr,
    INVERSED: tl.constexpr,
    GATED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One scale byte for WIDTH elements of a row. A program takes BLOCK blocks, ascending along rows.

    ``columns`` and ``given`` count blocks of a row: those written, and those that ``x`` has, behind which values are 0.
    Scale bytes lie row by row (``HEIGHT`` 0), or in tiles of HEIGHT rows by four columns with zeros in the rest of the
    last ones. With ``GATED`` a value is ``silu(gate) * up``, rounded to the dtype of ``x``, whose rows are gates and
    behind them as many ups. ``ELEMENT`` 0: E4M3, 1: E5M2, 2: E2M1 under E8M0, 3: E2M1 under E4M3 and a factor ``g``.
    ``FINITE``: a NaN takes no part in the scale, which is finite, and under byte 0 codes are 0. ``TOP`` and
    ``INVERSE`` are the bits of the largest value and of its reciprocal.
    """
    across = columns if HEIGHT == 0 else (columns + 3) // 4 * 4
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    col = index % across
    row = (index // across).to(tl.int64)
    valid = (row < rows) & (col < columns)
    lane = tl.arange(0, WIDTH)
    inside = ((row < rows) & (col < given))[:, None] & (lane < WIDTH)[None, :]
    source = row[:, None] * x_stride + col[:, None] * WIDTH + lane[None, :]
    v = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x + source + given * WIDTH, mask=inside, other=0.0).to(tl.float32)
        v = _rounded(v / (1.0 + tl.exp(-v)) * up, x, NATIVE)
    bits = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if RCEIL or ELEMENT == 3 or FINITE:
        bits = tl.where(bits > 0x7F800000, 0, bits)
    amax = tl.max(bits, axis=1)
    one = tl.full([BLOCK], 1.0, tl.float32)
    if ELEMENT == 3:
        factor = tl.load(g + row * g_stride, mask=valid, other=1.0)
        sixth = tl.full([BLOCK], INVERSE, tl.int32).to(tl.float32, bitcast=True)
        largest = amax.to(tl.float32, bitcast=True)
        if INVERSED:
            t, decode = _divide(largest * sixth, factor, NATIVE), factor
        else:
            t, decode = largest * (factor * sixth), _divide(one, factor, NATIVE)
        t = tl.where(amax == 0, 0.0, t)
        byte = _codes(tl.where(t > 448.0, 448.0, t)).to(tl.int32)
        inverse = _divide(one, _e4m3_value(byte) * decode, NATIVE)
        finite = tl.full([BLOCK], 0x7F7FFFFF, tl.int32).to(tl.float32, bitcast=True)
        inverse = tl.where(inverse > finite, finite, inverse)
    else:
        scaling = tl.full([BLOCK], INVERSE, tl.int32).to(tl.float32, bitcast=True)
        byte = _shared_exponent(amax, RCEIL, EVEN, STEP, scaling, EMAX)
        if FINITE:
            byte = tl.minimum(byte, 254)
        power = tl.maximum(254 - byte, 0)
        inverse = tl.where(power == 0, 1 << 22, power << 23).to(tl.float32, bitcast=True)
        if FINITE:
            inverse = tl.where(byte == 0, 0.0, inverse)
    y = v * inverse[:, None]
    written = valid[:, None] & (lane < WIDTH)[None, :]
    target = (row * columns + col)[:, None] * WIDTH
    if ELEMENT < 2:
        y = tl.where((byte == 255)[:, None], float("nan"), y)
        top = tl.full([BLOCK, WIDTH], TOP, tl.int32).to(tl.float32, bitcast=True)
        y = tl.where(y > top, top, tl.where(y < -top, -top, y))
        if ELEMENT == 0:
            tl.store(q + target + lane[None, :], _encode(y, NATIVE), mask=written)
        else:
            tl.store(q + target + lane[None, :], _codes_e5m2(y), mask=written)
    else:
        low, high = tl.split(tl.reshape(_codes_e2m1(y), [BLOCK, WIDTH // 2, 2]))
        half = tl.arange(0, WIDTH // 2)
        bytes_ = valid[:, None] & (half < WIDTH)[None, :]
        tl.store(q + target // 2 + half[None, :], low | high << 4, mask=bytes_)
    if HEIGHT:
        inner: tl.constexpr = min(32, HEIGHT)
        tile = row // HEIGHT * (across // 4) + col // 4
        within = row % inner * (HEIGHT // inner * 4) + row % HEIGHT // inner * 4 + col % 4
        down = (rows + HEIGHT - 1) // HEIGHT * HEIGHT
        tl.store(s + tile * (HEIGHT * 4) + within, tl.where(valid, byte, 0).to(tl.uint8), mask=row < down)
    else:
        tl.store(s + index, byte.to(tl.uint8), mask=valid)
