"""Triton kernels of the quantisers (imported only when a plan chooses them).

Amax is taken on the bits of ``|x|`` as integers: they order like the values and a NaN, being above infinity, wins.
Division is IEEE division with subnormals, so that scales and codes equal those of plain torch bit for bit. On a GPU
it is written as its PTX instruction, since ``tl.div_rn`` of Triton 3.5 flushes subnormals (``div.rn.ftz.f32``), and
the hardware converts to E4M3 (round to nearest even, saturating). The interpreter supports no PTX, and its conversion
rounds differently: there ``tl.div_rn`` divides and the codes are built from integer bits. It also makes integers of
a mask and a scalar condition, so masks take a condition for each lane (``lane * 0 + col < groups``).
"""

# Triton's language has no Python types: arguments are pointers and tiles, typed by its compiler.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _codes(y):
    """float32 to E4M3 codes (uint8) by integer arithmetic: nearest even, saturating, NaN to a NaN code."""
    bits = y.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    mag = bits & 0x7FFFFFFF
    nan = mag > 0x7F800000
    mag = tl.where(nan, 0, tl.minimum(mag, 0x43E00000))  # 448.0
    normal = ((mag + 0x7FFFF + ((mag >> 20) & 1)) >> 20) - 960  # rebias 127 -> 7 above 3 fraction bits
    steps = mag.to(tl.float32, bitcast=True) + 16384.0  # ulp of 2**14 is 2**-9, the subnormal step
    small = steps.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(mag < 0x3C800000, small, normal)  # 2**-6
    return (tl.where(nan, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def _encode(y, NATIVE: tl.constexpr):
    """float32 to E4M3 by the hardware's conversion, or to its codes where there is none."""
    return y.to(tl.float8e4nv) if NATIVE else _codes(y)


@triton.jit
def _divide(x, y, NATIVE: tl.constexpr):
    """x / y rounded to nearest even, subnormal operands and quotients included."""
    if NATIVE:
        return tl.inline_asm_elementwise("div.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, is_pure=True, pack=1)
    return tl.div_rn(x, y)


@triton.jit
def _ceil_ue8m0(scale):
    """Bits of the smallest power of two >= scale, at least 2**-127; NaN stays."""
    bits = scale.to(tl.int32, bitcast=True)
    up = tl.where(bits > 0x7F800000, bits, (bits + 0x7FFFFF) & 0x7F800000)
    tiny = tl.where(bits <= 0x00400000, 0x00400000, 0x00800000)
    return tl.where(bits <= 0x00800000, tiny, up)


@triton.jit
def _quotient(v, scale, NATIVE: tl.constexpr):
    """v / scale, and 0 where the scale is 0."""
    return tl.where(scale == 0.0, 0.0, _divide(v, tl.where(scale == 0.0, 1.0, scale), NATIVE))


@triton.jit
def _shared_quotient(v, scale, GUARD: tl.constexpr, NATIVE: tl.constexpr):
    """``v / scale [.., 1]`` for a positive scale that many values share: three instructions in place of a division.

    ``near = v * inverse``, then ``near - (near * scale - v) * inverse`` by two fused multiply-adds, in signs that keep
    -0 (``0 - x``, as Triton negates, would not). Its code is that of the float32 quotient
    (``tests/kernels/test_shared_quotient.py``) for scales from 2^-90 and ``|v|`` up to 448 of the scale; beyond,
    ``near`` may overflow, and ``GUARD`` keeps it. By an infinite scale finite values give 0, infinite ones NaN.
    """
    wide = tl.broadcast_to(scale, v.shape)
    if NATIVE:
        inverse = tl.broadcast_to(_divide(tl.full(scale.shape, 1.0, tl.float32), scale, NATIVE), v.shape)
        finite = tl.where(wide == float("inf"), 0.0, wide)
        near = v * inverse
        converted = tl.inline_asm_elementwise(
            "{ .reg .f32 t; neg.f32 t, $1; fma.rn.f32 t, $2, $4, t; neg.f32 t, t; fma.rn.f32 $0, t, $3, $2; }",
            "=f,f,f,f,f",
            [v, near, inverse, finite],
            tl.float32,
            is_pure=True,
            pack=1,
        )
        return tl.where(tl.abs(near) < 512.0, converted, near) if GUARD else converted
    return _quotient(v, wide, NATIVE)


@triton.jit
def group_kernel(
    x,
    q,
    s,
    rows,
    groups,
    x_stride,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAD: tl.constexpr,
    UE8M0: tl.constexpr,
    EPS: tl.constexpr,
    LIMIT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One scale per row and group. A program takes BLOCK groups of one row block (row-major) or one column.

    The scale is ``[rows, groups]`` (``LEAD`` 0), or transposed ``[groups, lead]`` with zeros past ``rows``, ``lead``
    being ``rows`` rounded up to a multiple of ``LEAD``. ``EPS`` holds the bits of the smallest amax. Where ``LIMIT`` is
    not 0, values are multiplied by ``inv = 448/amax`` (1 for zeros; at most the value of these bits), the scale is
    ``1/inv``, and NaN is left out of the amax.
    """
    pid = tl.program_id(0)
    if LEAD:
        row = (pid // groups) * BLOCK + tl.arange(0, BLOCK)
        col = (pid % groups) + tl.zeros([BLOCK], tl.int32)
    else:
        index = pid * BLOCK + tl.arange(0, BLOCK)
        row = index // groups
        col = index % groups
    valid = row < rows
    row = row.to(tl.int64)
    lane = tl.arange(0, LANES)
    inside = valid[:, None] & (lane < GROUP)[None, :]
    source = row[:, None] * x_stride + col[:, None] * GROUP + lane[None, :]
    v = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
    bits = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if LIMIT:
        amax = tl.max(tl.where(bits > 0x7F800000, 0, bits), axis=1)
        zero = amax == 0
        top = tl.where(zero, 1.0, amax.to(tl.float32, bitcast=True))
        inv = _divide(tl.full([BLOCK], 448.0, tl.float32), top, NATIVE)
        inv = tl.minimum(tl.where(zero, 1.0, inv), tl.full([BLOCK], LIMIT, tl.int32).to(tl.float32, bitcast=True))
        scale = _divide(tl.full([BLOCK], 1.0, tl.float32), inv, NATIVE)
        y = v * inv[:, None]
    else:
        amax = tl.maximum(tl.max(bits, axis=1), EPS)
        scale = _divide(amax.to(tl.float32, bitcast=True), tl.full([BLOCK], 448.0, tl.float32), NATIVE)
        if UE8M0:
            scale = _ceil_ue8m0(scale).to(tl.float32, bitcast=True)
        y = _quotient(v, tl.broadcast_to(scale[:, None], [BLOCK, LANES]), NATIVE)
    target = (row[:, None] * groups + col[:, None]) * GROUP + lane[None, :]
    tl.store(q + target, _encode(y, NATIVE), mask=inside)
    if LEAD:
        lead = (rows + LEAD - 1) // LEAD * LEAD
        tl.store(s + col.to(tl.int64) * lead + row, tl.where(valid, scale, 0.0), mask=row < lead)
    else:
        tl.store(s + row * groups + col, scale, mask=valid)


@triton.jit
def packed_kernel(
    x,
    q,
    s,
    rows,
    groups,
    x_stride,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """UE8M0 scales, four exponents an int32, MN-major, rows padded to 4. A program takes BLOCK rows of one word."""
    pid = tl.program_id(0)
    words, lead = (groups + 3) // 4, (rows + 3) // 4 * 4
    row = ((pid // words) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    word = pid % words
    packed = tl.zeros([BLOCK], tl.int32)
    lane = tl.arange(0, LANES)
    for part in tl.static_range(4):
        col = word * 4 + part
        inside = (row < rows)[:, None] & ((lane < GROUP) & (lane * 0 + col < groups))[None, :]
        source = row[:, None] * x_stride + col * GROUP + lane[None, :]
        v = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
        amax = tl.maximum(tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), EPS)
        scale = _divide(amax.to(tl.float32, bitcast=True), tl.full([BLOCK], 448.0, tl.float32), NATIVE)
        bits = _ceil_ue8m0(scale)
        y = _quotient(v, tl.broadcast_to(bits.to(tl.float32, bitcast=True)[:, None], [BLOCK, LANES]), NATIVE)
        target = (row[:, None] * groups + col) * GROUP + lane[None, :]
        tl.store(q + target, _encode(y, NATIVE), mask=inside)
        packed |= tl.where(col < groups, (bits >> 23) & 0xFF, 0) << (8 * part)
    tl.store(s + word * lead + row, tl.where(row < rows, packed, 0), mask=row < lead)


@triton.jit
def token_kernel(
    x,
    q,
    s,
    bound,
    cols,
    x_stride,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    BOUNDED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One scale per row: max(min(amax, bound) / 448, 1 / (448 * 512))."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.int32)
    for part in tl.static_range(PARTS):
        start = part * BLOCK
        v = tl.load(x + row * x_stride + start + lane, mask=start + lane < cols, other=0.0).to(tl.float32)
        top = tl.maximum(top, v.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    amax = tl.max(top, axis=0)
    if BOUNDED:
        limit = tl.load(bound)
        value = amax.to(tl.float32, bitcast=True)
        amax = tl.where(value > limit, limit.to(tl.int32, bitcast=True), amax)  # false for NaN: it stays
        amax = tl.where(limit != limit, limit.to(tl.int32, bitcast=True), amax)
    one = amax + tl.zeros([1], tl.int32)
    scale = _divide(one.to(tl.float32, bitcast=True), tl.full([1], 448.0, tl.float32), NATIVE)
    floor = tl.full([1], 1.0 / 229376.0, tl.float32)  # the double quotient rounds to the float32 one
    scale = tl.where(scale < floor, floor, scale)
    for part in tl.static_range(PARTS):
        start = part * BLOCK
        inside = start + lane < cols
        v = tl.load(x + row * x_stride + start + lane, mask=inside, other=0.0).to(tl.float32)
        y = _shared_quotient(v, scale, BOUNDED, NATIVE)
        tl.store(q + row * cols + start + lane, _encode(y, NATIVE), mask=inside)
    tl.store(s + row + tl.arange(0, 1), scale)


@triton.jit
def amax_kernel(x, amax, total, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Bits of max |x| over a contiguous tensor, into one int32 that starts at 0."""
    lane = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.int32)
    first = tl.program_id(0).to(tl.int64) * (BLOCK * PARTS)
    for part in tl.static_range(PARTS):
        index = first + part * BLOCK + lane
        v = tl.load(x + index, mask=index < total, other=0.0).to(tl.float32)
        top = tl.maximum(top, v.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.atomic_max(amax, tl.max(top, axis=0))


@triton.jit
def tensor_kernel(x, q, amax, s, total, BLOCK: tl.constexpr, STATIC: tl.constexpr, NATIVE: tl.constexpr):
    """Codes with one scale: read from ``s`` when static, else amax / 448 (written to ``s`` by the first program)."""
    lane = tl.arange(0, BLOCK)
    if STATIC:
        scale = tl.load(s) + tl.zeros([BLOCK], tl.float32)
    else:
        bits = tl.load(amax) + tl.zeros([BLOCK], tl.int32)
        scale = _divide(bits.to(tl.float32, bitcast=True), tl.full([BLOCK], 448.0, tl.float32), NATIVE)
        tl.store(s + lane, scale, mask=(lane < 1) & (lane * 0 + tl.program_id(0) == 0))
    index = tl.program_id(0).to(tl.int64) * BLOCK + lane
    v = tl.load(x + index, mask=index < total, other=0.0).to(tl.float32)
    tl.store(q + index, _encode(_quotient(v, scale, NATIVE), NATIVE), mask=index < total)
