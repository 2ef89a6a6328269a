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


def _packed_e2m1(exact: bool) -> str:
    """PTX from eight float32 values, four low and four high ones, to four bytes of two E2M1 codes.

    The upper half of a float32 is a bfloat16, whose last bit is set where the lower half is not 0: it lies on the same
    side of every value and every tie of E2M1. ``exact`` values are bfloat16 already. Two at once: ``a = min(|y|, 6)``,
    of which a NaN is 6, plus 2^6 times its power of two ``2^e`` (1 below 1) is rounded to the step of E2M1, ties to
    even. The bits of the sum are ``2^7 (e + 133) + m``, and the code is ``m + 2 e``; a summand of ``3 * 2^e`` more
    makes ``m + 2 (e + 133)`` equal to it modulo 16. The sign is that of ``y``: products that are NaN have none.
    """
    sticky = "add.u32 t, a{i}, 0xFFFF; and.b32 t, t, 0x10000; or.b32 a{i}, a{i}, t;"
    lines = [
        "{ .reg .b32 a<8>, t, p, s, six, one, magic, o;",
        "mov.b32 six, 0x40C040C0; mov.b32 one, 0x3F803F80; mov.b32 magic, 0x42864286; mov.b32 o, 0;",
        *(f"mov.b32 a{i}, ${i + 1};" + ("" if exact else sticky.format(i=i)) for i in range(8)),
    ]
    for n, i in enumerate((0, 4, 1, 5)):
        lines += [
            f"prmt.b32 a{i}, a{i}, a{i + 2}, 0x7632; abs.bf16x2 s, a{i}; min.bf16x2 s, s, six; max.bf16x2 p, s, one;",
            "and.b32 p, p, 0x7F807F80; fma.rn.bf16x2 s, p, magic, s; shr.b32 t, s, 6; add.u32 s, s, t;",
            f"shl.b32 s, s, {4 * n}; and.b32 s, s, {0x00070007 << 4 * n}; or.b32 o, o, s;",
            f"shr.b32 t, a{i}, {12 - 4 * n}; and.b32 t, t, {0x00080008 << 4 * n}; or.b32 o, o, t;",
        ]
    return "\n".join([*lines, "mov.b32 $0, o; }"])


PACKED_E2M1, PACKED_E2M1_EXACT = tl.constexpr(_packed_e2m1(False)), tl.constexpr(_packed_e2m1(True))


@triton.jit
def _pack_e2m1(y, BLOCK: tl.constexpr, HALF: tl.constexpr, EXACT: tl.constexpr, NATIVE: tl.constexpr):
    """float32 ``[BLOCK, 2 HALF]`` to bytes of two E2M1 codes, the even column in the low nibble.

    ``EXACT`` where every value of at least 2^-126 is one of bfloat16."""
    if NATIVE:
        low, high = tl.split(tl.reshape(y, [BLOCK, HALF, 2]))
        how: tl.constexpr = PACKED_E2M1_EXACT if EXACT else PACKED_E2M1
        packed = tl.inline_asm_elementwise(how, "=r,f,f,f,f,f,f,f,f", [low, high], tl.uint8, is_pure=True, pack=4)
    else:
        low, high = tl.split(tl.reshape(_codes_e2m1(y), [BLOCK, HALF, 2]))
        packed = low | high << 4
    return packed


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


PART = tl.constexpr(16)
"""Values that a thread holds of a row: two vectors of 16 bytes, a block of NVFP4 or half of one of MX."""


@triton.jit
def _halves(x, source, inside):
    """PART values at each ``source``, 0 where not ``inside``, of the dtype of ``x``, each PART in one thread: the first
    half of them, and the second."""
    lane = tl.arange(0, PART // 2)
    at, there = x + source[:, None] + lane[None, :], inside[:, None] & (lane < PART)[None, :]
    return tl.load(at, mask=there, other=0.0), tl.load(at + PART // 2, mask=there, other=0.0)


@triton.jit
def _joined(low, high, PARTS: tl.constexpr):
    """``[PARTS, PART]`` of their halves."""
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [PARTS, PART])


WIDENED = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")
"""Two bfloat16 values as float32."""
GATED_BF16 = tl.constexpr(
    "{ .reg .f32 g<2>, u<2>, e<2>; shl.b32 g0, $1, 16; and.b32 g1, $1, 0xFFFF0000; shl.b32 u0, $2, 16;"
    "and.b32 u1, $2, 0xFFFF0000;"
    + "".join(
        f"mul.rn.f32 e{i}, g{i}, 0fBFB8AA3B; ex2.approx.ftz.f32 e{i}, e{i};"
        f"fma.rn.f32 e{i}, e{i}, 0f3E800000, 0f3E800000; rcp.approx.ftz.f32 e{i}, e{i};"
        f"mul.rn.f32 g{i}, g{i}, 0f3E800000; mul.rn.f32 g{i}, g{i}, e{i}; mul.rn.f32 g{i}, g{i}, u{i};"
        for i in range(2)
    )
    + "cvt.rn.bf16x2.f32 $0, g1, g0; }"
)
"""``silu(gate) * up`` of two bfloat16 gates and ups, with the bits of Triton's ``v / (1.0 + tl.exp(-v)) * up``.

Triton's division within 2 ulp multiplies by the device's reciprocal, of a divisor and a dividend that are both divided
by 4 where the divisor is above 2^126. Here they always are, which is exact: the divisor is at least 1. An exponential
that is flushed to 0 is none that a sum with 1 shows.
"""
NORMED_BF16 = tl.constexpr(
    "{ .reg .b32 t, z; cvt.rn.bf16x2.f32 t, $2, $1; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, t, $3, z; }"
)
"""Two float32 values rounded to bfloat16, times two weights, rounded again; the sum with -0 is the product itself."""


@triton.jit
def _wide(v, NATIVE: tl.constexpr):
    """``v`` as float32."""
    if NATIVE and v.dtype == tl.bfloat16:
        wide = tl.inline_asm_elementwise(WIDENED, "=f,=f,r", [v], tl.float32, is_pure=True, pack=2)
    else:
        wide = v.to(tl.float32)
    return wide


@triton.jit
def _gated(gate, up, x, NATIVE: tl.constexpr):
    """``silu(gate) * up`` in float32, rounded to the dtype of ``x``."""
    if NATIVE and x.dtype.element_ty == tl.bfloat16:
        v = tl.inline_asm_elementwise(GATED_BF16, "=r,r,r", [gate, up], tl.bfloat16, is_pure=True, pack=2)
        v = _wide(v, NATIVE)
    else:
        v = gate.to(tl.float32)
        v = _rounded(v / (1.0 + tl.exp(-v)) * up.to(tl.float32), x, NATIVE)
    return v


@triton.jit
def _weighted(v, weight, x, ROUNDING: tl.constexpr, NATIVE: tl.constexpr):
    """``v * weight`` in float32, rounded as ``ROUNDING`` of :func:`norm_kernel` says."""
    if NATIVE and ROUNDING == 2 and x.dtype.element_ty == tl.bfloat16 and weight.dtype == tl.bfloat16:
        v = tl.inline_asm_elementwise(NORMED_BF16, "=r,f,f,r", [v, weight], tl.bfloat16, is_pure=True, pack=2)
        v = _wide(v, NATIVE)
    else:
        if ROUNDING == 2:
            v = _rounded(v, x, NATIVE)
        v *= weight.to(tl.float32)
        if ROUNDING:
            v = _rounded(v, x, NATIVE)
    return v


@triton.jit
def _scaled(
    v,
    factor,
    decode,
    BLOCK: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDTH: tl.constexpr,
    RCEIL: tl.constexpr,
    EVEN: tl.constexpr,
    FINITE: tl.constexpr,
    STEP: tl.constexpr,
    INVERSE: tl.constexpr,
    EMAX: tl.constexpr,
    INVERSED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The scale byte of each block, and ``v`` over its scale, of blocks whose parts of PART values are rows of ``v``.

    ``factor`` and ``decode``, the global scale and what it multiplies a scale byte by, are one or ``[BLOCK]``.
    """
    EACH: tl.constexpr = WIDTH // PART
    bits = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if NATIVE and (RCEIL or ELEMENT == 3 or FINITE):
        # the hardware's maximum leaves a NaN out, and is NaN where there is nothing else
        amax = tl.max(tl.abs(v), axis=1)
        amax = tl.max(tl.reshape(amax, [BLOCK, EACH]), axis=1).to(tl.int32, bitcast=True)
        amax = tl.where(amax > 0x7F800000, 0, amax)
    else:
        if RCEIL or ELEMENT == 3 or FINITE:
            bits = tl.where(bits > 0x7F800000, 0, bits)
        amax = tl.max(tl.reshape(tl.max(bits, axis=1), [BLOCK, EACH]), axis=1)
    if ELEMENT == 3:
        sixth = tl.full([BLOCK], INVERSE, tl.int32).to(tl.float32, bitcast=True)
        largest = amax.to(tl.float32, bitcast=True)
        if INVERSED:
            t = _divide(largest * sixth, factor + tl.zeros([BLOCK], tl.float32), NATIVE)
        else:
            t = largest * (factor * sixth)
        t = tl.where(amax == 0, 0.0, t)
        t = tl.where(t > 448.0, 448.0, t)
        if NATIVE:
            code = t.to(tl.float8e4nv)
            byte, value = code.to(tl.uint8, bitcast=True).to(tl.int32), code.to(tl.float32)
        else:
            byte = _codes(t).to(tl.int32)
            value = _e4m3_value(byte)
        inverse = _divide(tl.full([BLOCK], 1.0, tl.float32), value * decode, NATIVE)
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
        if ELEMENT < 2 and not RCEIL:
            inverse = tl.where(byte == 255, float("nan"), inverse)
    each = tl.reshape(tl.broadcast_to(inverse[:, None], [BLOCK, EACH]), [BLOCK * EACH])
    return byte, v * each[:, None]


@triton.jit
def _store_codes(
    q, target, y, valid, PARTS: tl.constexpr, ELEMENT: tl.constexpr, EXACT: tl.constexpr, NATIVE: tl.constexpr
):
    """Codes of ``y [PARTS, PART]``, each row of which begins at element ``target``; they saturate. ``EXACT``: each is a
    value of bfloat16 by a power of two where the scale is one."""
    if ELEMENT < 2:
        lane = tl.arange(0, PART)
        at, written = q + target[:, None] + lane[None, :], valid[:, None] & (lane < PART)[None, :]
        if ELEMENT == 0:
            tl.store(at, _encode(y, NATIVE), mask=written)
        else:
            tl.store(at, _codes_e5m2(y), mask=written)
    else:
        half = tl.arange(0, PART // 2)
        written = valid[:, None] & (half < PART)[None, :]
        packed = _pack_e2m1(y, PARTS, PART // 2, EXACT and ELEMENT == 2, NATIVE)
        tl.store(q + (target // 2)[:, None] + half[None, :], packed, mask=written)


@triton.jit
def _in_tiles(row, col, across, HEIGHT: tl.constexpr):
    """Where the scale byte of a block lies in tiles of HEIGHT rows by four columns."""
    inner: tl.constexpr = 32 if HEIGHT >= 32 else HEIGHT
    tile = row // HEIGHT * (across // 4) + col // 4
    within = row % inner * (HEIGHT // inner * 4) + row % HEIGHT // inner * 4 + col % 4
    return tile * (HEIGHT * 4) + within


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
    count,
    ELEMENT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HEIGHT: tl.constexpr,
    RCEIL: tl.constexpr,
    EVEN: tl.constexpr,
    FINITE: tl.constexpr,
    STEP: tl.constexpr,
    INVERSE: tl.constexpr,
    EMAX: tl.constexpr,
    INVERSED: tl.constexpr,
    GATED: tl.constexpr,
    ACROSS: tl.constexpr,
    FACTORS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One scale byte for WIDTH elements of a row. A program takes BLOCK blocks, ACROSS of each of its rows.

    ``x`` holds ``count`` matrices of ``rows`` rows, one after another. ``columns`` and ``given`` count blocks of a row:
    those written, and those that ``x`` has, behind which values are 0. Scale bytes lie row by row (``HEIGHT`` 0), or in
    tiles of HEIGHT rows by four columns, of each matrix its own, with zeros in the rest of the last ones. In tiles of
    128 rows those of a program are 32 apart, four by four, whose bytes are neighbours. With
    ``GATED`` a value is ``silu(gate) * up``, rounded to the dtype of ``x``, whose rows are gates and behind them as
    many ups. ``ELEMENT`` 0: E4M3, 1: E5M2, 2: E2M1 under E8M0, 3: E2M1 under E4M3 and a factor ``g``: one (``FACTORS``
    0), one for each row (1) or each matrix (2). ``FINITE``: a NaN takes no part in the scale, which is finite, and
    under byte 0 codes are 0. ``INVERSE`` are the bits of the reciprocal of the largest value.
    """
    EACH: tl.constexpr = WIDTH // PART
    PARTS: tl.constexpr = BLOCK * EACH
    ROWS: tl.constexpr = BLOCK // ACROSS
    APART: tl.constexpr = ROWS // 4 if HEIGHT == 128 and ROWS % 4 == 0 else ROWS  # rows that lie one after another
    across = columns if HEIGHT == 0 else (columns + 3) // 4 * 4
    down = rows if HEIGHT == 0 else (rows + HEIGHT - 1) // HEIGHT * HEIGHT
    chunks, bands = (across + ACROSS - 1) // ACROSS, (down + ROWS - 1) // ROWS
    band = tl.program_id(0) // chunks
    chunk = tl.program_id(0) - band * chunks
    matrix = band // bands if count != 1 else band * 0
    band -= matrix * bands
    first = band * ROWS if APART == ROWS else band // (32 // APART) * 128 + band % (32 // APART) * APART
    part, block = tl.arange(0, PARTS), tl.arange(0, BLOCK)
    within = first + part // (ACROSS * EACH) // APART * 32 + part // (ACROSS * EACH) % APART
    col = chunk * (ACROSS * EACH) + part % (ACROSS * EACH)
    row = (matrix * rows + within).to(tl.int64)
    inside = (within < rows) & (col < given * EACH)
    source = row * x_stride + col * PART
    low, high = _halves(x, source, inside)
    if GATED:
        up, next_up = _halves(x + given * WIDTH, source, inside)
        v = _joined(_gated(low, up, x, NATIVE), _gated(high, next_up, x, NATIVE), PARTS)
    else:
        v = _joined(_wide(low, NATIVE), _wide(high, NATIVE), PARTS)
    valid = (within < rows) & (col < columns * EACH)
    target = row * columns * WIDTH + col * PART
    within = first + block // ACROSS // APART * 32 + block // ACROSS % APART
    col = chunk * ACROSS + block % ACROSS
    there = (within < rows) & (col < columns)
    factor, decode = 1.0, 1.0
    if ELEMENT == 3:
        if FACTORS == 0:
            factor = tl.load(g)
            decode = factor if INVERSED else _divide(1.0, factor, NATIVE)
        else:
            place = matrix * rows + within if FACTORS == 1 else matrix + within * 0
            factor = tl.load(g + place.to(tl.int64) * g_stride, mask=there, other=1.0)
            decode = factor if INVERSED else _divide(tl.full([BLOCK], 1.0, tl.float32), factor, NATIVE)
    byte, y = _scaled(
        v, factor, decode, BLOCK, ELEMENT, WIDTH, RCEIL, EVEN, FINITE, STEP, INVERSE, EMAX, INVERSED, NATIVE
    )  # fmt: skip
    _store_codes(q, target, y, valid, PARTS, ELEMENT, x.dtype.element_ty == tl.bfloat16, NATIVE)
    byte = tl.where(there, byte, 0).to(tl.uint8)
    if HEIGHT:
        place = (matrix * down + within).to(tl.int64)
        tl.store(s + _in_tiles(place, col, across, HEIGHT), byte, mask=(within < down) & (col < across))
    else:
        tl.store(s + (matrix * rows + within).to(tl.int64) * columns + col, byte, mask=there)


@triton.jit
def norm_kernel(
    x,
    weight,
    residual,
    g,
    q,
    s,
    z,
    rows,
    x_stride,
    r_stride,
    ELEMENT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HEIGHT: tl.constexpr,
    RCEIL: tl.constexpr,
    EVEN: tl.constexpr,
    FINITE: tl.constexpr,
    STEP: tl.constexpr,
    INVERSE: tl.constexpr,
    EMAX: tl.constexpr,
    INVERSED: tl.constexpr,
    GATED: tl.constexpr,
    COLS: tl.constexpr,
    ROUNDING: tl.constexpr,
    SUM: tl.constexpr,
    EPSILON: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """As :func:`block_kernel`, of the RMS norm of a row of COLS columns, which one program holds in registers.

    Rows behind ``rows`` fill the last tiles with zeros. ``ROUNDING`` and ``EPSILON`` as of
    :func:`kernels.backends._triton_fused.norm_kernel`; with ``SUM`` the row is ``x + residual`` in float32, stored in
    ``z``.
    """
    EACH: tl.constexpr = WIDTH // PART
    PARTS: tl.constexpr = BLOCK * EACH
    columns: tl.constexpr = COLS // WIDTH
    across: tl.constexpr = (columns + 3) // 4 * 4
    row = tl.program_id(0).to(tl.int64)
    part, col = tl.arange(0, PARTS), tl.arange(0, BLOCK)
    inside = part + row * 0 < tl.where(row < rows, columns * EACH, 0)
    low, high = _halves(x + row * x_stride, part * PART, inside)
    w, next_w = _halves(weight, part * PART, inside)
    low, high = _wide(low, NATIVE), _wide(high, NATIVE)
    if SUM:
        other, next_other = _halves(residual + row * r_stride, part * PART, inside)
        low, high = low + _wide(other, NATIVE), high + _wide(next_other, NATIVE)
        lane = tl.arange(0, PART // 2)
        at = z + row * COLS + part[:, None] * PART + lane[None, :]
        summed = inside[:, None] & (lane < PART)[None, :]
        tl.store(at, _rounded(low, x, NATIVE).to(x.dtype.element_ty), mask=summed)
        tl.store(at + PART // 2, _rounded(high, x, NATIVE).to(x.dtype.element_ty), mask=summed)
    square = tl.sum(tl.reshape(low * low + high * high, [PARTS * PART // 2], can_reorder=True), axis=0)
    root = tl.rsqrt(square / COLS + tl.full([1, 1], EPSILON, tl.int32).to(tl.float32, bitcast=True))
    low, high = _weighted(low * root, w, x, ROUNDING, NATIVE), _weighted(high * root, next_w, x, ROUNDING, NATIVE)
    v = _joined(low, high, PARTS)
    factor, decode = 1.0, 1.0
    if ELEMENT == 3:
        factor = tl.load(g)
        decode = _divide(1.0, factor, NATIVE)
    byte, y = _scaled(
        v, factor, decode, BLOCK, ELEMENT, WIDTH, RCEIL, EVEN, FINITE, STEP, INVERSE, EMAX, INVERSED, NATIVE
    )  # fmt: skip
    exact: tl.constexpr = x.dtype.element_ty == tl.bfloat16 and ROUNDING > 0
    _store_codes(q, row * COLS + part * PART, y, inside, PARTS, ELEMENT, exact, NATIVE)
    valid = col + row * 0 < tl.where(row < rows, columns, 0)
    byte = tl.where(valid, byte, 0).to(tl.uint8)
    if HEIGHT:
        tl.store(s + _in_tiles(row, col, across, HEIGHT), byte, mask=col < across)
    else:
        tl.store(s + row * columns + col, byte, mask=valid)


@triton.jit
def expert_kernel(
    x,
    g,
    offsets,
    q,
    s,
    rows,
    columns,
    given,
    x_stride,
    g_stride,
    experts,
    ELEMENT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HEIGHT: tl.constexpr,
    RCEIL: tl.constexpr,
    EVEN: tl.constexpr,
    FINITE: tl.constexpr,
    STEP: tl.constexpr,
    INVERSE: tl.constexpr,
    EMAX: tl.constexpr,
    INVERSED: tl.constexpr,
    GATED: tl.constexpr,
    ACROSS: tl.constexpr,
    TIGHT: tl.constexpr,
    GROUPS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """As :func:`block_kernel`, of rows that lie expert by expert: ``offsets[i]`` is the first of expert ``i``.

    A program takes ACROSS blocks of each of its rows, whose scale bytes go to their rows in the tiles of their experts.
    Before them one program for each tile down writes zeros where an expert has no row. An expert's tiles begin behind
    those of the one before it (``TIGHT``), or at row ``(offset + (HEIGHT - 1) i) // HEIGHT HEIGHT``. ``g`` has a factor
    for each expert; ``GROUPS`` is a power of two that is at least ``experts``.
    """
    EACH: tl.constexpr = WIDTH // PART
    PARTS: tl.constexpr = BLOCK * EACH
    ROWS: tl.constexpr = BLOCK // ACROSS
    across = (columns + 3) // 4 * 4
    chunks = (across + ACROSS - 1) // ACROSS
    tiles = (rows + (HEIGHT - 1) * experts) // HEIGHT
    each = tl.arange(0, GROUPS)
    if tl.program_id(0) >= tiles:
        band = (tl.program_id(0) - tiles) // chunks
        chunk = tl.program_id(0) - tiles - band * chunks
        part, block = tl.arange(0, PARTS), tl.arange(0, BLOCK)
        line = (band * ROWS + part // (ACROSS * EACH)).to(tl.int64)
        col = chunk * (ACROSS * EACH) + part % (ACROSS * EACH)
        inside = (line < rows) & (col < given * EACH)
        source = line * x_stride + col * PART
        low, high = _halves(x, source, inside)  # on their way while the experts are searched
        if GATED:
            up, next_up = _halves(x + given * WIDTH, source, inside)
        valid, target = (line < rows) & (col < columns * EACH), line * columns * WIDTH + col * PART
        first = tl.load(offsets + each, mask=each < experts, other=0)
        last = tl.load(offsets + 1 + each, mask=each < experts, other=0)
        row = band * ROWS + tl.arange(0, ROWS)
        expert = tl.sum(((each < experts)[None, :] & (last[None, :] <= row[:, None])).to(tl.int32), axis=1)
        padded = (last - first + HEIGHT - 1) // HEIGHT * HEIGHT
        start = tl.cumsum(padded, axis=0) - padded if TIGHT else (first + (HEIGHT - 1) * each) // HEIGHT * HEIGHT
        place = row + tl.sum(tl.where(each[None, :] == expert[:, None], (start - first)[None, :], 0), axis=1)
        # a row of no expert has no place; offsets that do not ascend lead to none outside of the memory
        placed = (row < rows) & (row < tl.load(offsets + experts)) & (place >= 0) & (place < tiles * HEIGHT)
        place = tl.reshape(tl.broadcast_to(tl.where(placed, place, -1)[:, None], [ROWS, ACROSS]), [BLOCK])
        factor, decode = 1.0, 1.0
        if ELEMENT == 3:
            one = tl.load(g + tl.minimum(expert, experts - 1) * g_stride)
            factor = tl.reshape(tl.broadcast_to(one[:, None], [ROWS, ACROSS]), [BLOCK])
            one = _divide(tl.full([ROWS], 1.0, tl.float32), one, NATIVE)
            decode = tl.reshape(tl.broadcast_to(one[:, None], [ROWS, ACROSS]), [BLOCK])
        if GATED:
            v = _joined(_gated(low, up, x, NATIVE), _gated(high, next_up, x, NATIVE), PARTS)
        else:
            v = _joined(_wide(low, NATIVE), _wide(high, NATIVE), PARTS)
        byte, y = _scaled(
            v, factor, decode, BLOCK, ELEMENT, WIDTH, RCEIL, EVEN, FINITE, STEP, INVERSE, EMAX, INVERSED, NATIVE
        )  # fmt: skip
        _store_codes(q, target, y, valid, PARTS, ELEMENT, x.dtype.element_ty == tl.bfloat16, NATIVE)
        col = chunk * ACROSS + block % ACROSS
        byte = tl.where(col < columns, byte, 0).to(tl.uint8)
        where = s + _in_tiles(place.to(tl.int64), col, across, HEIGHT)
        tl.store(where, byte, mask=(place >= 0) & (col < across))
    else:
        tile = tl.program_id(0).to(tl.int64)
        first = tl.load(offsets + each, mask=each < experts, other=0)
        last = tl.load(offsets + 1 + each, mask=each < experts, other=0)
        padded = (last - first + HEIGHT - 1) // HEIGHT * HEIGHT
        start = tl.cumsum(padded, axis=0) - padded if TIGHT else (first + (HEIGHT - 1) * each) // HEIGHT * HEIGHT
        here = (each < experts) & (start <= tile * HEIGHT) & (tile * HEIGHT < start + padded)
        filled = tl.sum(tl.where(here, last - first - (tile * HEIGHT - start), 0), axis=0)
        index = tl.arange(0, 4 * HEIGHT)
        empty = index // 16 + index % 16 // 4 * 32 >= filled
        tile_bytes, column = s + tile * (across * HEIGHT) + index, 0
        while column < across // 4:  # the interpreter knows no range up to an argument
            tl.store(tile_bytes + column * (4 * HEIGHT), (index * 0).to(tl.uint8), mask=empty)
            column += 1
