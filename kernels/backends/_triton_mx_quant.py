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


PACKED_E2M1 = tl.constexpr(
    """
    {
    .reg .f32 a<8>, p<8>;
    .reg .b32 c<8>, d, e, o;
    """
    + "".join(
        f"""
    abs.f32 a{i}, ${i + 1};
    min.f32 a{i}, a{i}, 0f40C00000;
    max.f32 p{i}, a{i}, 0f3F800000;
    mov.b32 c{i}, p{i};
    and.b32 c{i}, c{i}, 0x7F800000;
    mov.b32 p{i}, c{i};
    fma.rn.f32 a{i}, p{i}, 0f4A800000, a{i};
    fma.rn.f32 a{i}, p{i}, 0fCA800000, a{i};
    mul.rn.f32 a{i}, a{i}, 0f00800000;
    mov.b32 c{i}, a{i};
    """
        for i in range(8)
    )
    + "mov.b32 o, 0;"
    + "".join(
        f"""
    prmt.b32 d, c{i}, c{i + 2}, 0x7632;
    mov.b32 e, ${i + 1};
    mov.b32 c{i}, ${i + 3};
    prmt.b32 e, e, c{i}, 0x7632;
    {f"shr.b32 d, d, {6 - 4 * n}" if n < 2 else f"shl.b32 d, d, {4 * n - 6}"};
    {f"shr.b32 e, e, {12 - 4 * n};" if n < 3 else ""}
    or.b32 o, o, d;
    and.b32 e, e, {0x00080008 << 4 * n};
    or.b32 o, o, e;
    """
        for n, i in enumerate((0, 4, 1, 5))
    )
    + """
    mov.b32 $0, o;
    }
    """
)
"""Four low and four high values to four bytes of two E2M1 codes.

``a = min(|y|, 6)``, of which a NaN is 6, plus 2^22 times its power of two (1 below 1) is rounded to the step of E2M1,
ties to even. The difference times 2^-126 is a float32 whose bits above 22 are the code. The sign is that of ``y``:
products that are NaN have none.
"""


@triton.jit
def _pack_e2m1(y, BLOCK: tl.constexpr, HALF: tl.constexpr, NATIVE: tl.constexpr):
    """float32 ``[BLOCK, 2 HALF]`` to bytes of two E2M1 codes, the even column in the low nibble."""
    if NATIVE:
        low, high = tl.split(tl.reshape(y, [BLOCK, HALF, 2]))
        return tl.inline_asm_elementwise(PACKED_E2M1, "=r,f,f,f,f,f,f,f,f", [low, high], tl.uint8, is_pure=True, pack=4)
    low, high = tl.split(tl.reshape(_codes_e2m1(y), [BLOCK, HALF, 2]))
    return low | high << 4


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
def _values(x, source, inside, up, GATED: tl.constexpr, NATIVE: tl.constexpr):
    """Values at ``source`` as float32, 0 where not ``inside``; with ``GATED`` ``silu`` of them times those ``up``
    elements behind, rounded to the dtype of ``x``."""
    v = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        other = tl.load(x + source + up, mask=inside, other=0.0).to(tl.float32)
        v = _rounded(v / (1.0 + tl.exp(-v)) * other, x, NATIVE)
    return v


@triton.jit
def _scaled(
    v,
    factor,
    BLOCK: tl.constexpr,
    ELEMENT: tl.constexpr,
    RCEIL: tl.constexpr,
    EVEN: tl.constexpr,
    FINITE: tl.constexpr,
    STEP: tl.constexpr,
    INVERSE: tl.constexpr,
    EMAX: tl.constexpr,
    INVERSED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The scale byte of each row of ``v [BLOCK, WIDTH]``, and ``v`` over its scale; ``factor`` one or ``[BLOCK]``."""
    bits = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if RCEIL or ELEMENT == 3 or FINITE:
        if NATIVE:  # the hardware's maximum leaves a NaN out, and is NaN where there is nothing else
            amax = tl.max(tl.abs(v), axis=1).to(tl.int32, bitcast=True)
            amax = tl.where(amax > 0x7F800000, 0, amax)
        else:
            amax = tl.max(tl.where(bits > 0x7F800000, 0, bits), axis=1)
    else:
        amax = tl.max(bits, axis=1)
    if ELEMENT == 3:
        sixth = tl.full([BLOCK], INVERSE, tl.int32).to(tl.float32, bitcast=True)
        largest = amax.to(tl.float32, bitcast=True)
        if INVERSED:
            t, decode = _divide(largest * sixth, factor + tl.zeros([BLOCK], tl.float32), NATIVE), factor
        else:
            t, decode = largest * (factor * sixth), _divide(1.0, factor, NATIVE)
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
    return byte, v * inverse[:, None]


@triton.jit
def _store_codes(
    q,
    target,
    y,
    byte,
    valid,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    ELEMENT: tl.constexpr,
    TOP: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Codes of ``y [BLOCK, WIDTH]`` under scale bytes, each row of which begins at element ``target``."""
    lane = tl.arange(0, WIDTH)
    written = valid[:, None] & (lane < WIDTH)[None, :]
    if ELEMENT < 2:
        y = tl.where((byte == 255)[:, None], float("nan"), y)
        top = tl.full([BLOCK, WIDTH], TOP, tl.int32).to(tl.float32, bitcast=True)
        y = tl.where(y > top, top, tl.where(y < -top, -top, y))
        if ELEMENT == 0:
            tl.store(q + target[:, None] + lane[None, :], _encode(y, NATIVE), mask=written)
        else:
            tl.store(q + target[:, None] + lane[None, :], _codes_e5m2(y), mask=written)
    else:
        half = tl.arange(0, WIDTH // 2)
        bytes_ = valid[:, None] & (half < WIDTH)[None, :]
        packed = _pack_e2m1(y, BLOCK, WIDTH // 2, NATIVE)
        tl.store(q + (target // 2)[:, None] + half[None, :], packed, mask=bytes_)


@triton.jit
def _in_tiles(row, col, across, HEIGHT: tl.constexpr):
    """Where the scale byte of a block lies in tiles of HEIGHT rows by four columns."""
    inner: tl.constexpr = min(32, HEIGHT)
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
    TOP: tl.constexpr,
    INVERSE: tl.constexpr,
    EMAX: tl.constexpr,
    INVERSED: tl.constexpr,
    GATED: tl.constexpr,
    FACTORS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One scale byte for WIDTH elements of a row. A program takes BLOCK blocks, ascending along rows.

    ``x`` holds ``count`` matrices of ``rows`` rows, one after another. ``columns`` and ``given`` count blocks of a row:
    those written, and those that ``x`` has, behind which values are 0. Scale bytes lie row by row (``HEIGHT`` 0), or in
    tiles of HEIGHT rows by four columns, of each matrix its own, with zeros in the rest of the last ones. With
    ``GATED`` a value is ``silu(gate) * up``, rounded to the dtype of ``x``, whose rows are gates and behind them as
    many ups. ``ELEMENT`` 0: E4M3, 1: E5M2, 2: E2M1 under E8M0, 3: E2M1 under E4M3 and a factor ``g``: one (``FACTORS``
    0), one for each row (1) or each matrix (2). ``FINITE``: a NaN takes no part in the scale, which is finite, and
    under byte 0 codes are 0. ``TOP`` and ``INVERSE`` are the bits of the largest value and of its reciprocal.
    """
    across = columns if HEIGHT == 0 else (columns + 3) // 4 * 4
    down = rows if HEIGHT == 0 else (rows + HEIGHT - 1) // HEIGHT * HEIGHT
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    col = index % across
    place = index // across
    matrix = place // down if count != 1 else place * 0
    within = place - matrix * down
    row = (matrix * rows + within).to(tl.int64)
    there = (within < rows) & (matrix < count)
    valid = there & (col < columns)
    lane = tl.arange(0, WIDTH)
    inside = (there & (col < given))[:, None] & (lane < WIDTH)[None, :]
    source = row[:, None] * x_stride + col[:, None] * WIDTH + lane[None, :]
    v = _values(x, source, inside, given * WIDTH, GATED, NATIVE)
    factor = 1.0
    if ELEMENT == 3:
        if FACTORS == 0:
            factor = tl.load(g)
        else:
            factor = tl.load(g + (row if FACTORS == 1 else matrix) * g_stride, mask=valid, other=1.0)
    byte, y = _scaled(
        v, factor, BLOCK, ELEMENT, RCEIL, EVEN, FINITE, STEP, INVERSE, EMAX, INVERSED, NATIVE
    )  # fmt: skip
    _store_codes(q, (row * columns + col) * WIDTH, y, byte, valid, BLOCK, WIDTH, ELEMENT, TOP, NATIVE)
    byte = tl.where(valid, byte, 0).to(tl.uint8)
    if HEIGHT:
        tl.store(s + _in_tiles(place.to(tl.int64), col, across, HEIGHT), byte, mask=place < count * down)
    else:
        tl.store(s + index, byte, mask=valid)


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
    TOP: tl.constexpr,
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
    row = tl.program_id(0).to(tl.int64)
    col, lane = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    columns: tl.constexpr = COLS // WIDTH
    column = col[:, None] * WIDTH + lane[None, :]
    inside = column + row * 0 < tl.where(row < rows, COLS, 0)
    w = tl.load(weight + column, mask=inside, other=0.0, eviction_policy="evict_last")
    v = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if SUM:
        v += tl.load(residual + row * r_stride + column, mask=inside, other=0.0).to(tl.float32)
        summed = _rounded(v, x, NATIVE).to(x.dtype.element_ty)
        tl.store(z + row * COLS + column, summed, mask=inside)
    square = tl.sum(tl.reshape(v * v, [BLOCK * WIDTH], can_reorder=True), axis=0)
    v *= tl.rsqrt(square / COLS + tl.full([1, 1], EPSILON, tl.int32).to(tl.float32, bitcast=True))
    if ROUNDING == 2:
        v = _rounded(v, x, NATIVE)
    v *= w.to(tl.float32)
    if ROUNDING:
        v = _rounded(v, x, NATIVE)
    factor = 1.0
    if ELEMENT == 3:
        factor = tl.load(g)
    byte, y = _scaled(
        v, factor, BLOCK, ELEMENT, RCEIL, EVEN, FINITE, STEP, INVERSE, EMAX, INVERSED, NATIVE
    )  # fmt: skip
    valid = col + row * 0 < tl.where(row < rows, columns, 0)
    _store_codes(q, (row * columns + col) * WIDTH, y, byte, valid, BLOCK, WIDTH, ELEMENT, TOP, NATIVE)
    byte = tl.where(valid, byte, 0).to(tl.uint8)
    if HEIGHT:
        across: tl.constexpr = (columns + 3) // 4 * 4
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
    TOP: tl.constexpr,
    INVERSE: tl.constexpr,
    EMAX: tl.constexpr,
    INVERSED: tl.constexpr,
    GATED: tl.constexpr,
    TIGHT: tl.constexpr,
    GROUPS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """As :func:`block_kernel`, of rows that lie expert by expert: ``offsets[i]`` is the first of expert ``i``.

    A program takes BLOCK blocks of one row, whose scale bytes go to its row in the tiles of its expert. Behind them one
    program for each tile down writes zeros where an expert has no row. An expert's tiles begin behind those of the one
    before it (``TIGHT``), or at row ``(offset + (HEIGHT - 1) i) // HEIGHT HEIGHT``. ``g`` has a factor for each expert;
    ``GROUPS`` is a power of two that is at least ``experts``.
    """
    across = (columns + 3) // 4 * 4
    chunks = (across + BLOCK - 1) // BLOCK
    tiles = (rows + (HEIGHT - 1) * experts) // HEIGHT
    pid = tl.program_id(0)
    each = tl.arange(0, GROUPS)
    first = tl.load(offsets + each, mask=each < experts, other=0)
    last = tl.load(offsets + 1 + each, mask=each < experts, other=0)
    padded = (last - first + HEIGHT - 1) // HEIGHT * HEIGHT
    start = tl.cumsum(padded, axis=0) - padded if TIGHT else (first + (HEIGHT - 1) * each) // HEIGHT * HEIGHT
    end = tl.load(offsets + experts)
    if pid < rows * chunks:
        row = (pid // chunks).to(tl.int64)
        expert = tl.sum(((each < experts) & (last <= row)).to(tl.int32), axis=0)
        own = tl.where(each == expert, start - first, 0)
        place = row + tl.sum(own, axis=0)
        col = pid % chunks * BLOCK + tl.arange(0, BLOCK)
        lane = tl.arange(0, WIDTH)
        inside = (col < given)[:, None] & (lane < WIDTH)[None, :]
        v = _values(x, row * x_stride + col[:, None] * WIDTH + lane[None, :], inside, given * WIDTH, GATED, NATIVE)
        factor = 1.0
        if ELEMENT == 3:
            factor = tl.load(g + tl.minimum(expert, experts - 1) * g_stride)
        byte, y = _scaled(
            v, factor, BLOCK, ELEMENT, RCEIL, EVEN, FINITE, STEP, INVERSE, EMAX, INVERSED, NATIVE
        )  # fmt: skip
        valid = col < columns
        _store_codes(q, (row * columns + col) * WIDTH, y, byte, valid, BLOCK, WIDTH, ELEMENT, TOP, NATIVE)
        # a row of no expert has no place; offsets that do not ascend lead to none outside of the memory
        placed = (col < across) & (col * 0 + row < end) & (col * 0 + place >= 0) & (col * 0 + place < tiles * HEIGHT)
        byte = tl.where(valid, byte, 0).to(tl.uint8)
        tl.store(s + _in_tiles(place, col, across, HEIGHT), byte, mask=placed)
    else:
        tile = (pid - rows * chunks).to(tl.int64)
        here = (each < experts) & (start <= tile * HEIGHT) & (tile * HEIGHT < start + padded)
        filled = tl.sum(tl.where(here, last - first - (tile * HEIGHT - start), 0), axis=0)
        index = tl.arange(0, 4 * HEIGHT)
        empty = index // 16 + index % 16 // 4 * 32 >= filled
        tile_bytes, column = s + tile * (across * HEIGHT) + index, 0
        while column < across // 4:  # the interpreter knows no range up to an argument
            tl.store(tile_bytes + column * (4 * HEIGHT), (index * 0).to(tl.uint8), mask=empty)
            column += 1
