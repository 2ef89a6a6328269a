"""Triton kernels of the fused quantisers (imported only when a plan chooses them).

The quantiser's half is that of :mod:`kernels.backends._triton_kernels`: amax on bits, IEEE division, the hardware's
conversion. The value's half uses the device's ``exp``, a division within 2 ulp and ``rsqrt.approx``, as the fused
kernels of engines do. Roundings to the dtype of ``x`` are real ones.
"""

# Triton's language has no Python types: arguments are pointers and tiles, typed by its compiler.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from ._triton_kernels import _ceil_ue8m0, _divide, _encode, _quotient, _shared_quotient


@triton.jit
def _rounded(v, like, NATIVE: tl.constexpr):
    """float32 rounded to the dtype that ``like`` points to, as float32; the interpreter would truncate to bfloat16."""
    if NATIVE or like.dtype.element_ty != tl.bfloat16:
        return v.to(like.dtype.element_ty).to(tl.float32)
    bits = v.to(tl.int32, bitcast=True)
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits, near).to(tl.float32, bitcast=True)


@triton.jit
def _bits(v):
    """Bits of ``|v|`` as int32: they order like the values, NaN above infinity."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _floored(scale, FLOOR: tl.constexpr):
    """At least the value of the bits ``FLOOR``; NaN stays."""
    floor = (scale.to(tl.int32, bitcast=True) * 0 + FLOOR).to(tl.float32, bitcast=True)
    return tl.where(scale < floor, floor, scale)


@triton.jit
def _at_most(value, limit):
    """The smaller of both; a NaN of either stays."""
    low = tl.where(value > limit, limit, value)
    return tl.where(limit != limit, limit, low)


@triton.jit
def _static_quotient(v, scale, NATIVE: tl.constexpr):
    """``v / given`` for a scale of any value, the same for all."""
    wide = tl.zeros(v.shape, tl.float32) + scale
    if (scale > 1e-18) & (scale < 1e18):  # noqa: SIM108  # Triton evaluates both sides of an expression
        y = _shared_quotient(v, wide, True, NATIVE)
    else:
        y = _quotient(v, wide, NATIVE)
    return y


@triton.jit
def gated_kernel(
    x,
    s,
    bound,
    masked,
    q,
    rows,
    cols,
    x_stride,
    tokens,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDING: tl.constexpr,
    MODE: tl.constexpr,
    BOUNDED: tl.constexpr,
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EPS: tl.constexpr,
    FLOOR: tl.constexpr,
    SHARED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """``silu(gate) * up`` of rows ``[rows, 2 * cols]`` and its codes. A program takes BLOCK groups, row by row.

    ``ROUNDING``: 0 none, 1 the product, 2 silu and the product, 3 the value is ``x [rows, cols]`` itself. ``MODE``: 0 a
    scale of each group, 1 that rounded up to a power of two, 2 every step in bfloat16, 3 the scale is given in ``s``.
    ``EPS`` and ``FLOOR`` hold the bits of the least amax and the least scale; ``SHARED`` where the least scale is one
    that :func:`_shared_quotient` takes. With ``MASKED`` row r is in use where
    ``r % tokens < masked[r // tokens]``.
    """
    groups = (cols + GROUP - 1) // GROUP
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, col = index // groups, index % groups
    valid = row < rows
    if MASKED:
        used = tl.load(masked + row // tokens, mask=valid, other=0)
        valid = valid & (row % tokens < used)
    row = row.to(tl.int64)
    lane = tl.arange(0, LANES)
    column = col[:, None] * GROUP + lane[None, :]
    inside = valid[:, None] & (lane < GROUP)[None, :] & (column < cols)
    source = x + row[:, None] * x_stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if ROUNDING == 3:
        v = gate
    else:
        up = tl.load(source + cols, mask=inside, other=0.0).to(tl.float32)
        active = gate / (1.0 + tl.exp(-gate))
        if ROUNDING == 2:
            active = _rounded(active, x, NATIVE)
        v = active * up
        if ROUNDING > 0:
            v = _rounded(v, x, NATIVE)
    if MODE < 3:
        amax = tl.maximum(tl.max(_bits(v), axis=1), EPS).to(tl.float32, bitcast=True)
        if MODE == 2:
            scale = _rounded(amax * 0.002227783203125, x, NATIVE)  # bf16(1/448)
        else:
            scale = _divide(amax, tl.full([BLOCK], 448.0, tl.float32), NATIVE)
        if BOUNDED:
            scale = _at_most(scale, tl.load(bound) + tl.zeros([BLOCK], tl.float32))
        if FLOOR:
            scale = _floored(scale, FLOOR)
        if MODE == 1:
            scale = _ceil_ue8m0(scale).to(tl.float32, bitcast=True)
    if MODE == 2:
        inverse = _rounded(_divide(tl.full([BLOCK], 1.0, tl.float32), scale, NATIVE), x, NATIVE)
        y = _rounded(v * inverse[:, None], x, NATIVE)
    elif MODE == 3:
        y = _static_quotient(v, tl.load(s), NATIVE)
    elif SHARED:
        y = _shared_quotient(v, scale[:, None], BOUNDED, NATIVE)
    else:
        y = _quotient(v, tl.broadcast_to(scale[:, None], [BLOCK, LANES]), NATIVE)
    tl.store(q + row[:, None] * cols + column, _encode(y, NATIVE), mask=inside)
    if MODE < 3:
        if TRANSPOSED:
            tl.store(s + col.to(tl.int64) * rows + row, scale, mask=valid)
        else:
            tl.store(s + row * groups + col, scale, mask=valid)


@triton.jit
def norm_kernel(
    x,
    weight,
    residual,
    bound,
    s,
    z,
    q,
    rows,
    x_stride,
    r_stride,
    COLS: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
    ROUNDING: tl.constexpr,
    SUM: tl.constexpr,
    GIVEN: tl.constexpr,
    BOUNDED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EPSILON: tl.constexpr,
    FLOOR: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """RMS norm of one row of COLS columns and its codes, the row held in registers as GROUPS groups of GROUP columns.

    ``ROUNDING``: 0 none, 1 the product of norm and weight, 2 the norm and the product, to the dtype of ``x``. ``SUM``:
    0 no residual, 1 the sum ``x + residual`` stays float32, 2 it is rounded to that dtype first; it is stored in
    ``z``. A scale of each group, or ``GIVEN`` in ``s``. ``EPSILON`` and ``FLOOR`` hold the bits of what is added to the
    mean square, and of the least scale.
    """
    row = tl.program_id(0).to(tl.int64)
    group, lane = tl.arange(0, GROUPS), tl.arange(0, LANES)
    column = group[:, None] * GROUP + lane[None, :]
    inside = column < COLS
    if LANES != GROUP:
        inside = inside & (lane < GROUP)[None, :]
    w = tl.load(weight + column, mask=inside, other=0.0, eviction_policy="evict_last")
    v = tl.load(x + row * x_stride + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if SUM:
        other = tl.load(residual + row * r_stride + column, mask=inside, other=0.0, eviction_policy="evict_first")
        v += other.to(tl.float32)
        summed = _rounded(v, x, NATIVE)
        tl.store(z + row * COLS + column, summed.to(x.dtype.element_ty), mask=inside)
        if SUM == 2:
            v = summed
    square = tl.sum(tl.reshape(v * v, [GROUPS * LANES], can_reorder=True), axis=0)
    root = tl.rsqrt(square / COLS + tl.full([1, 1], EPSILON, tl.int32).to(tl.float32, bitcast=True))
    v *= root
    if ROUNDING == 2:
        v = _rounded(v, x, NATIVE)
    v *= w.to(tl.float32)
    if ROUNDING:
        v = _rounded(v, x, NATIVE)
    if GIVEN:
        y = _static_quotient(v, tl.load(s), NATIVE)
    else:
        amax = tl.max(_bits(v), axis=1).to(tl.float32, bitcast=True)
        if BOUNDED:
            amax = _at_most(amax, tl.load(bound) + tl.zeros([GROUPS], tl.float32))
        scale = _floored(_divide(amax, tl.full([GROUPS], 448.0, tl.float32), NATIVE), FLOOR)
        y = _shared_quotient(v, scale[:, None], BOUNDED, NATIVE)
        groups: tl.constexpr = (COLS + GROUP - 1) // GROUP
        place = group.to(tl.int64) * rows + row if TRANSPOSED else row * groups + group
        tl.store(s + place, scale, mask=group < groups)
    tl.store(q + row * COLS + column, _encode(y, NATIVE), mask=inside)


@triton.jit
def rope_kernel(
    x,
    other,
    cache,
    positions,
    q,
    p,
    rows,
    heads,
    x_token,
    x_head,
    o_token,
    o_head,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
    NEOX: tl.constexpr,
    FACTOR: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Codes of rotated columns ``[tokens, heads, DEPTH]`` and of the others ``[tokens, heads, WIDTH]``, times a factor.

    A program takes BLOCK heads. ``cache`` holds DEPTH/2 cosines, then as many sines, of each position.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token, head, valid = row // heads, row % heads, row < rows
    factor = (row.to(tl.int32) * 0 + FACTOR).to(tl.float32, bitcast=True)[:, None]
    lane = tl.arange(0, LANES)
    inside = valid[:, None] & (lane < DEPTH)[None, :]
    if NEOX:
        partner = tl.where(lane < DEPTH // 2, lane + DEPTH // 2, lane - DEPTH // 2)
        angle, first = lane % (DEPTH // 2), lane < DEPTH // 2
    else:
        partner = lane ^ 1
        angle, first = lane // 2, lane % 2 == 0
    source = x + (token * x_token + head * x_head)[:, None]
    v = tl.load(source + lane[None, :], mask=inside, other=0.0).to(tl.float32)
    u = tl.load(source + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    position = tl.load(positions + token, mask=valid, other=0).to(tl.int64)
    at = cache + position[:, None] * DEPTH + angle[None, :]
    cos = tl.load(at, mask=inside, other=0.0)
    sin = tl.load(at + DEPTH // 2, mask=inside, other=0.0)
    y = (v * cos - tl.where(first[None, :], u, -u) * sin) * factor
    tl.store(q + row[:, None] * DEPTH + lane[None, :], _encode(y, NATIVE), mask=inside)
    column = tl.arange(0, OTHERS)
    beside = valid[:, None] & (column < WIDTH)[None, :]
    w = tl.load(other + (token * o_token + head * o_head)[:, None] + column[None, :], mask=beside, other=0.0)
    tl.store(p + row[:, None] * WIDTH + column[None, :], _encode(w.to(tl.float32) * factor, NATIVE), mask=beside)
