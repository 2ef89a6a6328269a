"""Triton kernels of KV caches (imported only when a plan chooses them).

Every program serves one token, or one row of a destination; offsets into caches are 64-bit. Division and conversion are
those of :mod:`kernels.backends._triton_kernels`.
"""

# Triton's language has no Python types: arguments are pointers and tiles that only its compiler knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.backends._triton_kernels import _ceil_ue8m0, _codes, _divide, _encode, _quotient


@triton.jit
def _slot(slots, positions, indices, indptr, token, page, skip, TABLE: tl.constexpr, SKIP: tl.constexpr):
    """The slot of a token and whether it has one; with ``TABLE`` by its request and its position there."""
    slot = tl.load(slots + token).to(tl.int64)
    if TABLE:
        position = tl.load(positions + token).to(tl.int64)
        first = tl.load(indptr + slot).to(tl.int64)
        slot = tl.load(indices + first + position // page).to(tl.int64) * page + position % page
    valid = slot != skip if SKIP else slot >= 0
    return tl.where(valid, slot, 0), valid


@triton.jit
def _part(
    x, memory, scale, token, block, offset, valid, heads, depth, x_t, x_h, m_b, m_o, m_h, m_c,
    MODE: tl.constexpr, PER_HEAD: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """The row of one token, ``heads * depth`` elements, into its slot, in ``PARTS`` of ``BLOCK``.

    ``MODE`` 0 copies, 1 casts, 2 divides. A head's columns lie side by side, or in chunks of ``CHUNK`` at ``m_c``.
    """
    source, target = x + token * x_t, memory + block * m_b + offset * m_o
    lane = tl.arange(0, BLOCK)
    for part in range(PARTS):
        index = part * BLOCK + lane
        known = index < heads * depth
        inside = known & valid
        head, column = index // depth, index % depth
        v = tl.load(source + head.to(tl.int64) * x_h + column, mask=known, other=0)  # it does not wait for the slot
        at = head.to(tl.int64) * m_h
        if CHUNK:
            at += (column // CHUNK).to(tl.int64) * m_c + column % CHUNK
        else:
            at += column.to(tl.int64) * m_c
        if MODE == 0:
            tl.store(target + at, v, mask=inside)
        else:
            y = v.to(tl.float32)
            if MODE == 2:
                if PER_HEAD:
                    s = tl.load(scale + head, mask=known, other=1.0)
                else:
                    s = tl.load(scale) + tl.zeros([BLOCK], tl.float32)
                y = _quotient(y, s, NATIVE)
            tl.store(target + at, _encode(y, NATIVE), mask=inside)


@triton.jit
def store_kernel(
    x0, x1, m0, m1, s0, s1, slots, positions, indices, indptr,
    page, skip, heads0, depth0, x0_t, x0_h, m0_b, m0_o, m0_h, m0_c, heads1, depth1, x1_t, x1_h, m1_b, m1_o, m1_h, m1_c,
    MODE: tl.constexpr, PER_HEAD: tl.constexpr, CHUNK0: tl.constexpr, CHUNK1: tl.constexpr, BLOCK0: tl.constexpr,
    PARTS0: tl.constexpr, BLOCK1: tl.constexpr, PARTS1: tl.constexpr, TABLE: tl.constexpr, SKIP: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """One half of one token, keys or values (compressed or rotated columns), into its slot."""
    pid = tl.program_id(0)
    token = (pid // 2).to(tl.int64)
    slot, valid = _slot(slots, positions, indices, indptr, token, page, skip, TABLE, SKIP)
    if pid % 2 == 0:
        _part(x0, m0, s0, token, slot // page, slot % page, valid, heads0, depth0, x0_t, x0_h, m0_b, m0_o, m0_h, m0_c,
              MODE, PER_HEAD, CHUNK0, BLOCK0, PARTS0, NATIVE)  # fmt: skip
    else:
        _part(x1, m1, s1, token, slot // page, slot % page, valid, heads1, depth1, x1_t, x1_h, m1_b, m1_o, m1_h, m1_c,
              MODE, PER_HEAD, CHUNK1, BLOCK1, PARTS1, NATIVE)  # fmt: skip


@triton.jit
def tile_kernel(
    x, rope, q, s, r, slots, page, tiles, x_t, rope_t, q_b, q_o, s_b, s_o, r_b, r_o,
    TILES: tl.constexpr, ROPE: tl.constexpr, MODE: tl.constexpr, EPS: tl.constexpr, FLOOR: tl.constexpr,
    SLOTTED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The tiles of 128 of one token: codes, scales and ``ROPE`` columns as they are.

    ``MODE`` 0 divides by the scale, 1 rounds it up to a power of two first, 2 multiplies by its reciprocal. ``EPS`` and
    ``FLOOR`` hold the bits of the least amax and the least scale. NaN is left out of the amax.
    """
    token = tl.program_id(0).to(tl.int64)
    slot, valid = token, token >= 0
    if SLOTTED:
        slot, valid = _slot(slots, slots, slots, slots, token, page, 0, False, False)
    block, offset = slot // page, slot % page
    tile, lane = tl.arange(0, TILES), tl.arange(0, 128)
    column = tile[:, None] * 128 + lane[None, :]
    known = (tile < tiles)[:, None] & (lane >= 0)[None, :]
    inside = known & valid
    v = tl.load(x + token * x_t + column, mask=known, other=0.0).to(tl.float32)  # it does not wait for the slot
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
        kept = (at >= 0) & valid
        columns = tl.load(rope + token * rope_t + at, mask=kept, other=0)
        tl.store(r + block * r_b + offset * r_o + at, columns, mask=kept)


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
    x, q, s, given, token, block, offset, valid, heads, depth, x_t, x_h, q_b, q_o, q_h, s_b, s_o, s_h,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The blocks of 16 of one token, ``BLOCK`` at a time."""
    blocks = depth // 16
    g = tl.load(given) + tl.zeros([BLOCK], tl.float32)
    pair = tl.arange(0, 8)
    for step in range(PARTS):
        index = step * BLOCK + tl.arange(0, BLOCK)
        known = index < heads * blocks
        kept = known & valid
        head, part = (index // blocks).to(tl.int64), index % blocks
        inside = kept[:, None] & (pair >= 0)[None, :]
        column = tl.arange(0, 16)
        source = x + token * x_t + (head * x_h + part * 16)[:, None] + column[None, :]
        v = tl.load(source, mask=known[:, None] & (column >= 0)[None, :], other=0.0).to(tl.float32)
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
        tl.store(s + block * s_b + offset * s_o + head * s_h + part, code, mask=kept)


@triton.jit
def nvfp4_kernel(
    x0, x1, q0, q1, s0, s1, g0, g1, slots,
    page, heads, depth, x0_t, x0_h, q0_b, q0_o, q0_h, s0_b, s0_o, s0_h, x1_t, x1_h, q1_b, q1_o, q1_h, s1_b, s1_o, s1_h,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Keys or values of one token in NVFP4."""
    pid = tl.program_id(0)
    token = (pid // 2).to(tl.int64)
    slot, valid = _slot(slots, slots, slots, slots, token, page, 0, False, False)
    if pid % 2 == 0:
        _blocks(x0, q0, s0, g0, token, slot // page, slot % page, valid, heads, depth, x0_t, x0_h, q0_b, q0_o, q0_h,
                s0_b, s0_o, s0_h, BLOCK, PARTS, NATIVE)  # fmt: skip
    else:
        _blocks(x1, q1, s1, g1, token, slot // page, slot % page, valid, heads, depth, x1_t, x1_h, q1_b, q1_o, q1_h,
                s1_b, s1_o, s1_h, BLOCK, PARTS, NATIVE)  # fmt: skip


@triton.jit
def gather_kernel(
    c, s, b, out, beside, table, starts, seq_starts, lens,
    requests, page, table_b, width, tile, other, c_b, c_o, s_b, s_o, b_b, b_o, o_t, beside_t,
    TABLE: tl.constexpr, REQUESTS: tl.constexpr, STARTS: tl.constexpr, LENS: tl.constexpr, SCALED: tl.constexpr,
    BESIDE: tl.constexpr, WIDTH: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One row of a destination: ``width`` elements as they are, or codes times the scale of their ``tile``.

    ``other`` elements beside them are copied. The request of a row is the last one that begins at or before it.
    """
    row = tl.program_id(0).to(tl.int64)
    block, offset, valid = row // page, row % page, row >= 0
    if TABLE:
        which = tl.arange(0, REQUESTS)
        first = tl.load(starts + which, mask=which < requests, other=0x7FFFFFFF).to(tl.int64)
        request = tl.sum((first <= row).to(tl.int32), axis=0) - 1
        start = tl.max(tl.where(first <= row, first, -1), axis=0)
        if LENS:
            total = tl.load(starts + requests - 1).to(tl.int64) + tl.load(lens + requests - 1).to(tl.int64)
        else:
            total = tl.load(starts + requests).to(tl.int64)
        valid = (row < total) & (request >= 0)
        token = row - start
        if STARTS:
            token += tl.load(seq_starts + request, mask=valid, other=0).to(tl.int64)
        block = tl.load(table + request * table_b + token // page, mask=valid, other=0).to(tl.int64)
        offset = token % page
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
        kept = (at < other) & valid
        w = tl.load(b + block * b_b + offset * b_o + at, mask=kept)
        tl.store(beside + row * beside_t + at, w, mask=kept)


@triton.jit
def _narrow(y, like, NATIVE: tl.constexpr):
    """float32 rounded to the dtype that ``like`` points to; the interpreter would truncate to bfloat16."""
    if NATIVE or like.dtype.element_ty != tl.bfloat16:
        made = y.to(like.dtype.element_ty)
    else:
        bits = y.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        made = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits, near).to(tl.float32, bitcast=True).to(tl.bfloat16)
    return made
