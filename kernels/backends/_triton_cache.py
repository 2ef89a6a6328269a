"""Triton kernels of KV caches (imported only when a plan chooses them).

Every program serves one token, or one row of a destination; offsets into caches are 64-bit, rows, positions and, where
they fit, slots 32-bit. Division and conversion are
those of :mod:`kernels.backends._triton_kernels`.
"""

# Triton's language has no Python types: arguments are pointers and tiles, typed by its compiler.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from ._triton_kernels import _ceil_ue8m0, _codes, _divide, _encode, _quotient


@triton.jit
def _place(
    slots, positions, indices, indptr, token, page, skip, TABLE: tl.constexpr, SKIP: tl.constexpr, SMALL: tl.constexpr
):
    """The page of a token, its offset there, and whether it has a slot; with ``TABLE`` by its request and position.

    ``SMALL``: no slot is beyond 31 bits. Divisions of 64 bits are subroutines, before which nothing is loaded ahead.
    """
    slot = tl.load(slots + token)
    if TABLE:
        position = tl.load(positions + token).to(tl.int32)
        first = tl.load(indptr + slot).to(tl.int32)
        block, offset = tl.load(indices + first + position // page).to(tl.int64), position % page
        valid = (block >= 0) & (offset >= 0)
    else:
        valid = slot != skip if SKIP else slot >= 0
        slot = tl.where(valid, slot, 0)
        slot = slot.to(tl.int32) if SMALL else slot.to(tl.int64)
        block, offset = (slot // page).to(tl.int64), slot % page
    return tl.where(valid, block, 0), tl.where(valid, offset, 0).to(tl.int64), valid


@triton.jit
def _index(part, depth, heads, BLOCK: tl.constexpr, FLAT: tl.constexpr):
    """Head and column of every element of a part, and which are there."""
    index = part * BLOCK + tl.arange(0, BLOCK)
    if FLAT:
        head, column = index * 0, index
    else:
        head, column = index // depth, index % depth
    return head, column, index < heads * depth


@triton.jit
def _write(
    v,
    target,
    scale,
    head,
    column,
    in_row,
    valid,
    m_h,
    m_c,
    MODE: tl.constexpr,
    PER_HEAD: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One part of a row; ``MODE`` 0 copies, 1 casts, 2 divides. Columns lie at ``m_c``, or in chunks of ``CHUNK``."""
    at = head.to(tl.int64) * m_h
    if CHUNK:
        at += (column // CHUNK).to(tl.int64) * m_c + column % CHUNK
    else:
        at += column.to(tl.int64) * m_c
    if MODE == 0:
        tl.store(target + at, v, mask=in_row & valid)
    else:
        y = v.to(tl.float32)
        if MODE == 2:
            if PER_HEAD:
                s = tl.load(scale + head, mask=in_row, other=1.0)
            else:
                s = tl.load(scale) + tl.zeros([BLOCK], tl.float32)
            y = _quotient(y, s, NATIVE)
        tl.store(target + at, _encode(y, NATIVE), mask=in_row & valid)


@triton.jit
def _part(
    x,
    memory,
    scale,
    slots,
    positions,
    indices,
    indptr,
    token,
    page,
    skip,
    heads,
    depth,
    x_t,
    x_h,
    m_b,
    m_o,
    m_h,
    m_c,
    MODE: tl.constexpr,
    PER_HEAD: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    FLAT: tl.constexpr,
    TABLE: tl.constexpr,
    SKIP: tl.constexpr,
    SMALL: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The row of one token, ``heads * depth`` elements, into its slot, in ``PARTS`` of ``BLOCK``.

    The first part is loaded while the slot is looked up.
    """
    source = x + token * x_t
    head, column, in_row = _index(0, depth, heads, BLOCK, FLAT)
    v = tl.load(source + head.to(tl.int64) * x_h + column, mask=in_row, other=0)
    block, offset, valid = _place(slots, positions, indices, indptr, token, page, skip, TABLE, SKIP, SMALL)
    target = memory + block * m_b + offset * m_o
    _write(v, target, scale, head, column, in_row, valid, m_h, m_c, MODE, PER_HEAD, CHUNK, BLOCK, NATIVE)
    for part in range(1, PARTS):
        head, column, in_row = _index(part, depth, heads, BLOCK, FLAT)
        v = tl.load(source + head.to(tl.int64) * x_h + column, mask=in_row, other=0)
        _write(v, target, scale, head, column, in_row, valid, m_h, m_c, MODE, PER_HEAD, CHUNK, BLOCK, NATIVE)


@triton.jit
def store_kernel(
    x0,
    x1,
    m0,
    m1,
    s0,
    s1,
    slots,
    positions,
    indices,
    indptr,
    page,
    skip,
    heads0,
    depth0,
    x0_t,
    x0_h,
    m0_b,
    m0_o,
    m0_h,
    m0_c,
    heads1,
    depth1,
    x1_t,
    x1_h,
    m1_b,
    m1_o,
    m1_h,
    m1_c,
    MODE: tl.constexpr,
    PER_HEAD: tl.constexpr,
    CHUNK0: tl.constexpr,
    CHUNK1: tl.constexpr,
    BLOCK0: tl.constexpr,
    PARTS0: tl.constexpr,
    FLAT0: tl.constexpr,
    BLOCK1: tl.constexpr,
    PARTS1: tl.constexpr,
    FLAT1: tl.constexpr,
    TABLE: tl.constexpr,
    SKIP: tl.constexpr,
    SMALL: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One half of one token, keys or values (compressed or rotated columns), into its slot."""
    pid = tl.program_id(0)
    token = (pid // 2).to(tl.int64)
    if pid % 2 == 0:
        _part(
            x0,
            m0,
            s0,
            slots,
            positions,
            indices,
            indptr,
            token,
            page,
            skip,
            heads0,
            depth0,
            x0_t,
            x0_h,
            m0_b,
            m0_o,
            m0_h,
            m0_c,
            MODE,
            PER_HEAD,
            CHUNK0,
            BLOCK0,
            PARTS0,
            FLAT0,
            TABLE,
            SKIP,
            SMALL,
            NATIVE,
        )
    else:
        _part(
            x1,
            m1,
            s1,
            slots,
            positions,
            indices,
            indptr,
            token,
            page,
            skip,
            heads1,
            depth1,
            x1_t,
            x1_h,
            m1_b,
            m1_o,
            m1_h,
            m1_c,
            MODE,
            PER_HEAD,
            CHUNK1,
            BLOCK1,
            PARTS1,
            FLAT1,
            TABLE,
            SKIP,
            SMALL,
            NATIVE,
        )


@triton.jit
def tile_kernel(
    x,
    rope,
    q,
    s,
    r,
    slots,
    page,
    tiles,
    x_t,
    rope_t,
    q_b,
    q_o,
    s_b,
    s_o,
    r_b,
    r_o,
    TILES: tl.constexpr,
    ROPE: tl.constexpr,
    MODE: tl.constexpr,
    EPS: tl.constexpr,
    FLOOR: tl.constexpr,
    SLOTTED: tl.constexpr,
    SMALL: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The tiles of 128 of one token: codes, scales and ``ROPE`` columns as they are.

    ``MODE`` 0 divides by the scale, 1 rounds it up to a power of two first, 2 multiplies by its reciprocal. ``EPS`` and
    ``FLOOR`` hold the bits of the least amax and the least scale. NaN is left out of the amax.
    """
    row = tl.program_id(0)
    token = row.to(tl.int64)
    tile, lane = tl.arange(0, TILES), tl.arange(0, 128)
    column = tile[:, None] * 128 + lane[None, :]
    in_row = (tile < tiles)[:, None] & (lane >= 0)[None, :]
    v = tl.load(x + token * x_t + column, mask=in_row, other=0.0).to(tl.float32)  # while the slot is looked up
    if SLOTTED:
        block, offset, valid = _place(slots, slots, slots, slots, token, page, 0, False, False, SMALL)
    else:
        block, offset, valid = (row // page).to(tl.int64), (row % page).to(tl.int64), row >= 0
    inside = in_row & valid
    bits = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.maximum(tl.max(tl.where(bits > 0x7F800000, 0, bits), axis=1), EPS).to(tl.float32, bitcast=True)
    scale = _divide(amax, tl.full([TILES], 448.0, tl.float32), NATIVE)
    if FLOOR:
        least = tl.full([TILES], FLOOR, tl.int32).to(tl.float32, bitcast=True)
        scale = tl.where(scale < least, least, scale)
    if MODE == 1:
        scale = _ceil_ue8m0(scale).to(tl.float32, bitcast=True)
    if MODE == 2:
        inverse = _quotient(tl.full([TILES], 1.0, tl.float32), scale, NATIVE)
        y = v * inverse[:, None]
    else:
        y = _quotient(v, tl.broadcast_to(scale[:, None], [TILES, 128]), NATIVE)
    tl.store(q + block * q_b + offset * q_o + column, _encode(y, NATIVE), mask=inside)
    tl.store(s + block * s_b + offset * s_o + tile, scale, mask=(tile < tiles) & valid)
    if ROPE:
        at = tl.arange(0, ROPE)
        written = (at >= 0) & valid
        columns = tl.load(rope + token * rope_t + at, mask=written, other=0)
        tl.store(r + block * r_b + offset * r_o + at, columns, mask=written)


@triton.jit
def _value(code):
    """E4M3 codes (uint8, no NaN) as float32, by integer arithmetic."""
    bits = code.to(tl.int32)
    mag = bits & 0x7F
    normal = ((mag + 960) << 20).to(tl.float32, bitcast=True)  # rebias 7 -> 127 above 3 fraction bits
    return tl.where(mag < 8, mag.to(tl.float32) * 0.001953125, normal)  # 2**-9


@triton.jit
def _nibble(y):
    """float32 to E2M1: nearest, ties to even, saturating; NaN is 0."""
    mag = tl.abs(y)
    code = (mag > 0.25).to(tl.int32) + (mag >= 0.75).to(tl.int32) + (mag > 1.25).to(tl.int32)
    code += (mag >= 1.75).to(tl.int32) + (mag > 2.5).to(tl.int32) + (mag >= 3.5).to(tl.int32)
    code += (mag > 5.0).to(tl.int32)
    sign = (y.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(y == y, code | sign, 0)


@triton.jit
def _blocks(
    x,
    q,
    s,
    global_scale,
    token,
    block,
    offset,
    valid,
    heads,
    depth,
    x_t,
    x_h,
    q_b,
    q_o,
    q_h,
    s_b,
    s_o,
    s_h,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The blocks of 16 of one token, ``BLOCK`` at a time."""
    blocks = depth // 16
    g = tl.load(global_scale) + tl.zeros([BLOCK], tl.float32)
    pair = tl.arange(0, 8)
    for step in range(PARTS):
        index = step * BLOCK + tl.arange(0, BLOCK)
        in_row = index < heads * blocks
        written = in_row & valid
        head, part = (index // blocks).to(tl.int64), index % blocks
        inside = written[:, None] & (pair >= 0)[None, :]
        column = tl.arange(0, 16)
        source = x + token * x_t + (head * x_h + part * 16)[:, None] + column[None, :]
        v = tl.load(source, mask=in_row[:, None] & (column >= 0)[None, :], other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(v, [BLOCK, 8, 2]))
        first, second = even.to(tl.int32, bitcast=True) & 0x7FFFFFFF, odd.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        top = tl.maximum(tl.where(first > 0x7F800000, 0, first), tl.where(second > 0x7F800000, 0, second))
        amax = tl.max(top, axis=1).to(tl.float32, bitcast=True)
        code = _codes(_divide(amax, g * 6.0, NATIVE))
        total = _value(code) * g
        inverse = _quotient(tl.full([BLOCK], 1.0, tl.float32), total, NATIVE)[:, None]
        byte = _nibble(even * inverse) | (_nibble(odd * inverse) << 4)
        target = q + block * q_b + offset * q_o + (head * q_h + part * 8)[:, None] + pair[None, :]
        tl.store(target, byte.to(tl.uint8), mask=inside)
        tl.store(s + block * s_b + offset * s_o + head * s_h + part, code, mask=written)


@triton.jit
def nvfp4_kernel(
    x0,
    x1,
    q0,
    q1,
    s0,
    s1,
    g0,
    g1,
    slots,
    page,
    heads,
    depth,
    x0_t,
    x0_h,
    q0_b,
    q0_o,
    q0_h,
    s0_b,
    s0_o,
    s0_h,
    x1_t,
    x1_h,
    q1_b,
    q1_o,
    q1_h,
    s1_b,
    s1_o,
    s1_h,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SMALL: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Keys or values of one token in NVFP4."""
    pid = tl.program_id(0)
    token = (pid // 2).to(tl.int64)
    block, offset, valid = _place(slots, slots, slots, slots, token, page, 0, False, False, SMALL)
    if pid % 2 == 0:
        _blocks(
            x0,
            q0,
            s0,
            g0,
            token,
            block,
            offset,
            valid,
            heads,
            depth,
            x0_t,
            x0_h,
            q0_b,
            q0_o,
            q0_h,
            s0_b,
            s0_o,
            s0_h,
            BLOCK,
            PARTS,
            NATIVE,
        )
    else:
        _blocks(
            x1,
            q1,
            s1,
            g1,
            token,
            block,
            offset,
            valid,
            heads,
            depth,
            x1_t,
            x1_h,
            q1_b,
            q1_o,
            q1_h,
            s1_b,
            s1_o,
            s1_h,
            BLOCK,
            PARTS,
            NATIVE,
        )


@triton.jit
def gather_kernel(
    c,
    s,
    b,
    out,
    beside,
    table,
    starts,
    seq_starts,
    lens,
    requests,
    page,
    table_b,
    width,
    tile,
    other,
    c_b,
    c_o,
    s_b,
    s_o,
    b_b,
    b_o,
    o_t,
    beside_t,
    TABLE: tl.constexpr,
    REQUESTS: tl.constexpr,
    STARTS: tl.constexpr,
    LENS: tl.constexpr,
    SCALED: tl.constexpr,
    BESIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One row of a destination: ``width`` elements as they are, or codes times the scale of their ``tile``.

    ``other`` elements beside them are copied. The request of a row is the last one that begins at or before it.
    """
    number = tl.program_id(0)
    row = number.to(tl.int64)
    if TABLE:
        which = tl.arange(0, REQUESTS)
        first = tl.load(starts + which, mask=which < requests, other=0x7FFFFFFF).to(tl.int32)
        request = tl.sum((first <= number).to(tl.int32), axis=0) - 1
        start = tl.max(tl.where(first <= number, first, -1), axis=0)
        if LENS:
            total = tl.load(starts + requests - 1).to(tl.int32) + tl.load(lens + requests - 1).to(tl.int32)
        else:
            total = tl.load(starts + requests).to(tl.int32)
        valid = (number < total) & (request >= 0)
        token = number - start
        if STARTS:
            token += tl.load(seq_starts + request, mask=valid, other=0).to(tl.int32)
        block = tl.load(table + request * table_b + token // page, mask=valid, other=0).to(tl.int64)
        offset = (token % page).to(tl.int64)
    else:
        block, offset, valid = (number // page).to(tl.int64), (number % page).to(tl.int64), number >= 0
    lane = tl.arange(0, WIDTH)
    inside = (lane < width) & valid
    v = tl.load(c + block * c_b + offset * c_o + lane, mask=inside)
    if SCALED:
        if NATIVE:
            value = v.to(tl.float32)
        else:
            value = tl.where(v > 127, -_value(v), _value(v))
            value = tl.where((v & 0x7F) == 0x7F, float("nan"), value)
        y = value * tl.load(s + block * s_b + offset * s_o + lane // tile, mask=inside, other=0.0)
        tl.store(out + row * o_t + lane, _narrow(y, out, NATIVE), mask=inside)
    else:
        tl.store(out + row * o_t + lane, v, mask=inside)
    if BESIDE:
        at = tl.arange(0, BESIDE)
        written = (at < other) & valid
        w = tl.load(b + block * b_b + offset * b_o + at, mask=written)
        tl.store(beside + row * beside_t + at, w, mask=written)


@triton.jit
def _narrow(y, like, NATIVE: tl.constexpr):
    """float32 rounded to the dtype that ``like`` points to; the interpreter would truncate to bfloat16."""
    if NATIVE or like.dtype.element_ty != tl.bfloat16:
        cast = y.to(like.dtype.element_ty)
    else:
        bits = y.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        cast = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits, near).to(tl.float32, bitcast=True).to(tl.bfloat16)
    return cast
