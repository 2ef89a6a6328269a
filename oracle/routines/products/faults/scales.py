"""Faults of the scales in scaled products: the scale of another place, memory read in another layout, another number.

Functions of scales take and return matrices ``[rows, blocks]``. A layout fault writes the matrix to memory as the
caller does and looks for element ``(m, b)`` where the kernel does; the value of an out-of-bounds
read is chosen by :class:`~oracle.routines.fault.Beyond`.

NaN is moved like any other value where only places change.

Source: the threads that each declaration names; the layouts as :mod:`oracle.truth.layout`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from oracle.routines.fault import INDEX, VALUE, Beyond, Call, Change, Faults, WhyNot, both, need, ones, way
from oracle.routines.products.roles import (
    b_by_row,
    each,
    has,
    matrix,
    of_the_next,
    operand,
    several_blocks,
    several_rows,
)
from oracle.routines.products.traits import B_BY_ROW, BLOCKS, BY_COUNT, BY_SHAPE, DENSE, IN_GROUPS, PRODUCT
from oracle.routines.traits import has_role
from oracle.truth.gemm import ScaledProduct
from oracle.verdict.sets import rounded_to

# A fault is a row: what is wrong and where it was met; the change; when it shows.
FAULTS = Faults(PRODUCT)
fault = FAULTS.declare

EQUAL = "the scales that are exchanged are equal"
SQUARE = "one row or one block: both layouts are the same memory"
POWERS = "every scale is a power of two"
ONES = "every scale is 1"
EXPONENT = 0x7F80_0000
MANTISSA = 0x007F_FFFF
SENTINEL = -448.0  # finfo(float8_e4m3fn).min, the value of a scale that no checkpoint has filled
ROLE_NAMES = (("a_scale", "A scale"), ("b_scale", "B scale"))


# --- what a call must have ----------------------------------------------------------------------------------

several_groups = need(lambda call: operand(call, "b").shape[0] > 1, "there is one group")


def _shape(role: str, holds: Callable[[int, int], bool], otherwise: str) -> WhyNot:
    """The scale is a matrix whose rows and blocks are such."""
    return need(
        lambda call: holds(*matrix(call, role).shape),
        lambda call: otherwise.format(role=role, rows=matrix(call, role).shape[0], blocks=matrix(call, role).shape[1]),
    )


def _matrix_scale(role: str) -> WhyNot:
    return _shape(role, lambda m, b: m > 1 and b > 1, "{role} is {rows} x {blocks}: every layout is the same")


def _no_powers(role: str) -> WhyNot:
    return need(lambda call: bool((_bits(matrix(call, role)) & MANTISSA).any()), POWERS)


# --- the scale of another place -----------------------------------------------------------------------------


def _columns(index: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor], Tensor]:
    """Column ``index(column, columns)`` in the place of each column."""
    return lambda scale: scale[:, index(torch.arange(scale.shape[1], device=scale.device), scale.shape[1])]


def _rows(index: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor], Tensor]:
    """Row ``index(row, rows)`` in the place of each row."""
    return lambda scale: scale[index(torch.arange(scale.shape[0], device=scale.device), scale.shape[0])]


def _ones_from(first: Callable[[int], int]) -> Callable[[Tensor], Tensor]:
    def change(scale: Tensor) -> Tensor:
        scale = scale.clone()
        scale[:, first(scale.shape[1]) :] = 1.0
        return scale

    return change


TIRX = "mlc-ai/TIRx-kernels PR 5"
FBGEMM = "pytorch/FBGEMM 6159"
CUTLASS_INDEX = "NVIDIA/cutlass 2087, 2154"
BLOCK_FAULTS = (
    ("of the next K block", TIRX, _columns(lambda b, n: (b + 1).clamp(max=n - 1)), several_blocks),
    (
        "of the previous K block",
        "no public thread: the scale's stage advanced after the codes' stage",
        _columns(lambda b, n: (b - 1).clamp(min=0)),
        several_blocks,
    ),
    ("of K block 0 throughout", TIRX, _columns(lambda b, n: 0 * b), several_blocks),
    ("index advances by words of four only", TIRX, _columns(lambda b, n: b // 4 * 4), several_blocks),
    (
        "swapped between the two K blocks of a tile",
        "pytorch 195751",
        _columns(lambda b, n: torch.where((b ^ 1) < n, b ^ 1, b)),
        several_blocks,
    ),
    ("of the last K block not applied", FBGEMM, _ones_from(lambda n: n - 1), several_blocks),
    (
        "of every trailing K block not applied",
        FBGEMM,
        _ones_from(lambda n: max(1, n // 4 * 4)),
        need(lambda c: c.parts[0].product.B % 4 and c.parts[0].product.B > 1, "the K blocks fill whole words of four"),
    ),
)
for role, what in ROLE_NAMES:
    for place, seen, change, needs in BLOCK_FAULTS:
        fault(f"{what} {place}", INDEX, seen=seen, on=BLOCKS, read=each(role, change), needs=needs, same_if=EQUAL)
    fault(
        f"{what} matrix transposed where it is square",
        INDEX,
        seen="pytorch 195751, flashinfer 2147, pytorch/ao PR 4229",
        on=BLOCKS,
        read=each(role, lambda scale: scale.t().contiguous()),
        needs=_shape(role, lambda m, b: m == b > 1, "{role} is {rows} x {blocks}, not square"),
        same_if="the matrix is symmetric",
    )

for name, seen, role, index in (
    ("A scale of the previous row", CUTLASS_INDEX, "a_scale", lambda r, n: (r - 1) % n),
    (
        "A scale of one row taken from its neighbour",
        "no public thread: one thread of an epilogue off by a row",
        "a_scale",
        lambda r, n: torch.where(r == n // 2, r - 1, r),
    ),
    ("B scale of the previous N block", CUTLASS_INDEX, "b_scale", lambda r, n: (r - 1) % n),
    ("A scale per tile instead of per row", CUTLASS_INDEX, "a_scale", lambda r, n: r // 128 * 128),
    ("A scale of the first row throughout", "pytorch 159940", "a_scale", lambda r, n: 0 * r),
    ("B scale of the first row throughout", "pytorch 159940", "b_scale", lambda r, n: 0 * r),
    (
        "B scale of every second N block for two",
        "NVIDIA/cutlass PR 3394: tiles counted before the swizzle",
        "b_scale",
        lambda r, n: r // 2,
    ),
):
    fault(name, INDEX, seen=seen, read=each(role, _rows(index)), needs=several_rows(role), same_if=EQUAL)


def _second_wave(scale: Tensor) -> Tensor:
    later = torch.arange(scale.shape[0] - 64, device=scale.device)
    return torch.cat([scale[:64], scale[64:] * scale[later % 64]])


fault(
    "second M wave multiplied by the first wave's A scale as well",
    INDEX,
    seen="NVIDIA/cutlass 3596",
    read=each("a_scale", _second_wave),
    needs=_shape("a_scale", lambda m, b: m > 64, "{role} has {rows} rows, not more than 64"),
    same_if="the first wave's scales are 1",
)


# --- memory read in another layout --------------------------------------------------------------------------


def look(call: Call, buffer: Tensor, index: Tensor) -> Tensor:
    """Elements of ``buffer``, of any shape and float dtype, read flat at ``index``, int64 of any shape.

    Returns the shape of ``index`` and the dtype of ``buffer``. Out of bounds they wrap around, or are NaN
    (:class:`Beyond`).
    """
    length = buffer.numel()
    element = buffer.flatten()[index % length]
    if call.beyond is Beyond.UNKNOWN:
        element = torch.where(index < length, element, torch.full_like(element, torch.nan))
    return element


def places(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column numbers of a matrix ``scale`` ``[M, B]`` of any dtype, int64 ``[M, 1]`` and ``[1, B]``."""
    rows = torch.arange(scale.shape[0], device=scale.device)[:, None]
    return rows, torch.arange(scale.shape[1], device=scale.device)[None, :]


def align(extent: int, unit: int) -> int:
    """``extent`` rounded up to a multiple of ``unit``."""
    return -(-extent // unit) * unit


def row_major(scale: Tensor, *, lead: int) -> Tensor:
    """The matrix ``scale`` ``[M, B]`` in memory, ``[M * lead]`` of the same dtype: rows of ``lead`` elements, the rest
    zero."""
    return torch.nn.functional.pad(scale, (0, lead - scale.shape[1])).flatten()


def swizzled_index(scale: Tensor, *, tile_rows: int) -> Tensor:
    """Where element (m, b) of ``scale`` ``[M, B]``, of any dtype, lies in tiles of ``tile_rows`` x 4, int64 ``[M, B]``.

    Tiles of 128 rows are the 32x4x4 interleave, tiles of 8 plain rows.
    """
    rows, columns = places(scale)
    tiles = align(scale.shape[1], 4) // 4
    tile = (rows // tile_rows) * tiles + columns // 4
    if tile_rows == 128:
        inner = (rows % 32) * 16 + (rows % 128) // 32 * 4 + columns % 4
    else:
        inner = (rows % tile_rows) * 4 + columns % 4
    return tile * tile_rows * 4 + inner


def _read_column_major(unit: int) -> Change:
    """A row-major matrix read column by column, columns aligned to ``unit`` rows."""

    def change(call: Call, scale: Tensor) -> Tensor:
        rows, columns = places(scale)
        return look(call, scale.flatten(), columns * align(scale.shape[0], unit) + rows)

    return change


def _columns_aligned(*, written: int, read: int) -> Change:
    """A column-major matrix, its columns aligned to ``written`` rows in memory and to ``read`` rows for the kernel."""

    def change(call: Call, scale: Tensor) -> Tensor:
        rows, columns = places(scale)
        buffer = row_major(scale.t(), lead=align(scale.shape[0], written))
        return look(call, buffer, columns * align(scale.shape[0], read) + rows)

    return change


def _blocks_read_padded(call: Call, scale: Tensor) -> Tensor:
    rows, columns = places(scale)
    return look(call, scale.flatten(), rows * align(scale.shape[1], 4) + columns)


def _unswizzled(call: Call, scale: Tensor) -> Tensor:
    return look(call, row_major(scale, lead=align(scale.shape[1], 4)), swizzled_index(scale, tile_rows=128))


def _wrong_swizzle(call: Call, scale: Tensor) -> Tensor:
    size = align(scale.shape[0], 8) * align(scale.shape[1], 4)
    buffer = torch.zeros(size, dtype=scale.dtype, device=scale.device)
    buffer[swizzled_index(scale, tile_rows=8).flatten()] = scale.flatten()
    return look(call, buffer, swizzled_index(scale, tile_rows=128))


LAYOUT = "FlashInfer 0.6.18 on an H200, pytorch/ao 4209, TensorRT-LLM PR 3144"
a_matrix = _matrix_scale("a_scale")
ragged_rows = both(
    _shape("a_scale", lambda m, b: b != 1, "one K block: the leading dimension is not used"),
    _shape("a_scale", lambda m, b: m % 4 != 0, "M={rows} is a multiple of 4"),
)
ragged_blocks = both(
    _shape("a_scale", lambda m, b: m != 1, "one row: the row stride is not used"),
    _shape("a_scale", lambda m, b: b % 4 != 0, "{blocks} K blocks are a multiple of 4"),
)
fault(
    "row-major A scale read as [K/128, align(M, 4)]",
    INDEX,
    seen=LAYOUT,
    on=BLOCKS - BY_SHAPE,
    read=each("a_scale", _read_column_major(4)),
    needs=a_matrix,
    same_if=SQUARE,
)
fault(
    "row-major A scale read M-major",
    INDEX,
    seen="vLLM 0.20.2 cutlass_scaled_mm on an H200",
    on=BY_SHAPE,
    read=each("a_scale", _read_column_major(4)),
    needs=a_matrix,
    same_if=SQUARE,
)
fault(
    "{}",
    INDEX,
    on=BLOCKS,
    same_if=EQUAL,
    over=(
        way(
            "unpadded A scale read with leading dimension align(M, 4)",
            _columns_aligned(written=1, read=4),
            seen="FlashInfer 0.6.18 on an H200",
            needs=ragged_rows,
        ),
        way(
            "A scale padded to align(M, 4) read with leading dimension M",
            _columns_aligned(written=4, read=1),
            seen="pytorch/ao 4209",
            needs=ragged_rows,
        ),
        way(
            "A scale read with K blocks padded to 4",
            _blocks_read_padded,
            seen="TensorRT-LLM PR 3144",
            needs=ragged_blocks,
        ),
    ),
    read=lambda change: each("a_scale", change),
)
fault(
    "row-major B scale read N-major",
    INDEX,
    seen=LAYOUT,
    on=BLOCKS,
    read=each("b_scale", _read_column_major(1)),
    needs=_matrix_scale("b_scale"),
    same_if=SQUARE,
)
fault(
    "{}",
    INDEX,
    on=BLOCKS,
    needs=a_matrix,
    same_if=EQUAL,
    over=(
        way("A scale not swizzled into 128x4 tiles", _unswizzled, seen="triton PR 10382"),
        way("A scale swizzled 8x4 read as 128x4", _wrong_swizzle, seen="flashinfer 3604"),
    ),
    read=lambda change: each("a_scale", change),
)

fault(
    "per-token weight scale indexed per 128x128 block",
    INDEX,
    seen="FlashInfer 0.6.18 on an H200",
    on=B_BY_ROW,
    read=each("b_scale", _rows(lambda r, n: r // 128)),
    needs=b_by_row,
    same_if=EQUAL,
)


fault(
    "B scale of the first of 16 columns for all of them",
    INDEX,
    seen="ROCm/composable_kernel 3771: one scale for each tile of a warp",
    read=each("b_scale", _rows(lambda r, n: r // 16 * 16)),
    needs=both(b_by_row, several_rows("b_scale")),
    same_if=EQUAL,
)


@fault(
    "B scale of the last columns of an N block from the next one",
    INDEX,
    seen="H200 mutants",
    on=BLOCKS,
    needs=need(
        lambda c: c.parts[0].product.b_scale.shape[0] > 1 and c.parts[0].product.b_rows > 8,
        "b_scale has no two blocks along N",
    ),
    same_if=EQUAL,
)
def product_few_columns_of_next_block(product: ScaledProduct) -> ScaledProduct:
    each_column = product.b_scale.repeat_interleave(product.b_rows, dim=0)[: product.N].clone()
    for group in range(1, product.b_scale.shape[0]):
        each_column[group * product.b_rows - 8 : group * product.b_rows] = product.b_scale[group]
    return replace(product, b_scale=each_column, b_rows=1)


@fault(
    "B scales of blocks as long as N over their number",
    INDEX,
    seen="NVIDIA/TensorRT-Model-Connect PR 1115: 125 columns for 1,000 in blocks of 128",
    on=BLOCKS,
    needs=need(
        lambda c: (p := c.parts[0].product).b_scale.shape[0] > 1 and p.N % p.b_rows > 0,
        "whole blocks along N, or one",
    ),
    same_if=EQUAL,
)
def product_of_equal_blocks(product: ScaledProduct) -> ScaledProduct:
    """The length of a block taken from the two extents, which a partial last block makes too short."""
    length = -(-product.N // product.b_scale.shape[0])
    return replace(product, b_scale=product.b_scale.repeat_interleave(length, dim=0)[: product.N], b_rows=1)


def _block_k(width: int) -> Callable[[ScaledProduct], ScaledProduct]:
    def change(product: ScaledProduct) -> ScaledProduct:
        column = torch.arange(-(-product.K // width), device=product.a.device).clamp(max=product.B - 1)
        return replace(product, block=width, a_scale=product.a_scale[:, column], b_scale=product.b_scale[:, column])

    return change


for width, seen in ((64, "pytorch 195751"), (32, "ROCm/rocm-libraries PR 7920")):
    fault(
        f"scale column advances once per BLOCK_K = {width}",
        INDEX,
        seen=seen,
        on=BLOCKS,
        product=_block_k(width),
        needs=several_blocks,
        same_if=EQUAL,
        schedule=lambda s, width=width: s if s is None or s.interval is None else replace(s, interval=width),
    )


def _of_first_split(scale: Tensor) -> Tensor:
    """The second half of the K blocks has the scales of the first."""
    return scale[:, torch.arange(scale.shape[1], device=scale.device) % -(-scale.shape[1] // 2)]


fault(
    "scales of the second split of K from the first",
    INDEX,
    seen="NVIDIA/cutlass 3537, PR 3615: the count of K tiles begins at 0 in every slice",
    on=BLOCKS,
    read=lambda call, inputs: each("b_scale", _of_first_split)(call, each("a_scale", _of_first_split)(call, inputs)),
    needs=several_blocks,
    same_if=EQUAL,
)


@fault(
    "scalar A scale read as a vector",
    INDEX,
    seen="pytorch 159940",
    on=DENSE,
    needs=both(
        need(lambda c: c.parts[0].product.a_scale.shape == (1, 1), "a_scale is no scalar"),
        need(lambda c: c.parts[0].product.M > 1, "there is one row"),
    ),
)
def product_scalar_as_vector(product: ScaledProduct) -> ScaledProduct:
    """The scalar is read with the row number: behind the first row an out-of-bounds read."""
    junk = torch.linspace(0.5, 1.5, product.M, dtype=torch.float64, device="cpu").to(torch.float32).to(product.a.device)
    return replace(product, a_scale=torch.cat([product.a_scale, junk[1:, None] * product.a_scale]))


for role, what, scaled in (("a_scale", "A scale", BY_COUNT), ("b_scale", "B scale", IN_GROUPS & has_role("b_scale"))):
    fault(
        f"{what} of the next group",
        INDEX,
        seen="DeepGEMM PR 343",
        on=scaled,
        read=of_the_next(role),
        needs=several_groups,
        same_if=EQUAL,
    )


@fault(
    "batch stride of padded A scales wrong",
    INDEX,
    seen="flashinfer 3604",
    on=BY_COUNT,
    needs=both(
        need(lambda c: operand(c, "a").shape[0] != 1, "there is one group"),
        need(lambda c: operand(c, "a").shape[1] % 4, lambda c: f"M={operand(c, 'a').shape[1]} is a multiple of 4"),
    ),
    same_if=EQUAL,
)
def read_batch_stride(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    name = call.contract.roles["a_scale"]
    scale = inputs[name]
    groups, m, blocks = scale.shape
    lead = align(m, 4)
    buffer = torch.stack([row_major(s.t(), lead=lead) for s in scale]).flatten()
    rows, columns = places(scale[0])
    read_at = [look(call, buffer, g * m * blocks + columns * lead + rows) for g in range(groups)]
    return inputs | {name: torch.stack(read_at)}


for name, seen, index in (
    (
        "shard scale row overwritten by the next shard",
        "Megatron-LM PR 6045, vllm 52997",
        lambda r, n: torch.where(r < n // 2, r + n // 2, r),
    ),
    (
        "gate and up scales swapped without the weights",
        "sglang PR 11081, PR 32430",
        lambda r, n: torch.where(r + n // 2 < n // 2 * 2, (r + n // 2) % max(1, n // 2 * 2), r),
    ),
):
    fault(name, INDEX, seen=seen, read=each("b_scale", _rows(index)), needs=several_rows("b_scale"), same_if=EQUAL)


# --- another number -----------------------------------------------------------------------------------------


def _bits(scale: Tensor) -> Tensor:
    return scale.contiguous().view(torch.int32)


def _from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).contiguous().view(torch.float32)


def exponent_only(scale: Tensor) -> Tensor:
    """The largest power of two not above ``scale``, positive float32 of any shape, in the same shape and dtype.

    Its mantissa is cleared: subnormals give 0, NaN infinity.
    """
    return _from_bits(_bits(scale) & EXPONENT)


def rounded_up(scale: Tensor) -> Tensor:
    """The smallest power of two not below ``scale``, positive float32 of any shape, in the same shape and dtype.

    Subnormals give the smallest normal number; beyond the range infinity; NaN and infinity stay.
    """
    bits = _bits(scale)
    special = (bits & EXPONENT) == EXPONENT
    up = (bits & EXPONENT) + torch.where((bits & MANTISSA) != 0, 1 << 23, 0)
    return _from_bits(torch.where(special, bits, up))


def one_ulp_up(scale: Tensor) -> Tensor:
    """The next number of larger magnitude than ``scale``, float32 of any shape; same shape and dtype. Infinity and NaN
    stay."""
    bits = _bits(scale)
    special = (bits & EXPONENT) == EXPONENT
    return _from_bits(torch.where(special, bits, bits + 1))


def _bf16(scale: Tensor) -> Tensor:
    return rounded_to(scale.to(torch.float64), torch.bfloat16).to(torch.float32)


NUMBER_FAULTS = (
    ("mantissa of the {} truncated", "DeepGEMM PR 112, vllm PR 22399", exponent_only, True, POWERS),
    (
        "{} rounded up to a power of two without requantising",
        "transformers 47030, sglang PR 28418",
        rounded_up,
        True,
        POWERS,
    ),
    ("{} rounded to bfloat16", "pytorch/ao PR 4725", _bf16, True, "every scale is a bfloat16 value"),
    ("{} one ulp high", "sglang PR 32616", one_ulp_up, False, ""),
    ("inverse of the {} used", "vllm PR 36297", lambda scale: ones(scale) / scale, False, ONES),
    ("{} applied twice", "NVIDIA/cutlass 3596", lambda scale: scale * scale, False, ONES),
    ("{} dropped", "pytorch 190449, TensorRT-LLM PR 14199", ones, False, ONES),
)
for role, what in ROLE_NAMES:
    for name, seen, change, no_powers, same_if in NUMBER_FAULTS:
        fault(
            name.format(what),
            VALUE,
            seen=seen,
            read=each(role, change),
            needs=_no_powers(role) if no_powers else has(role),
            same_if=same_if,
        )

fault(
    "A scale replaced by the reciprocal of its reciprocal",
    VALUE,
    seen="sglang PR 4362, flashinfer 2441",
    read=each("a_scale", lambda scale: ones(scale) / (ones(scale) / scale)),
    needs=_no_powers("a_scale"),
    same_if="1/(1/s) = s for these scales",
    admissible_if="1/(1/s) is s or its neighbour: orders of the epilogue differ by as much",
)


def _middle_row_larger(scale: Tensor) -> Tensor:
    scale = scale.clone()
    scale[scale.shape[0] // 2] *= 1.0 + 2.0**-7
    return scale


fault(
    "A scale of one row 2^-7 too large",
    VALUE,
    seen="H200 mutants",
    read=each("a_scale", _middle_row_larger),
    same_if="every sum of that row is zero",
)


def _bleeding(scale: Tensor) -> Tensor:
    """Packed without a mask: the top mantissa bit of block b lands in bit 7 of the exponent byte of block b - 1."""
    bits = _bits(scale)
    byte = bits >> 23 & 0xFF
    carry = torch.zeros_like(byte)
    carry[:, :-1] = (bits[:, 1:] >> 22 & 1) << 7
    place = torch.arange(scale.shape[1], device=scale.device)
    return _from_bits(torch.where(place % 4 != 3, byte | carry, byte) << 23)


fault(
    "mantissa bit of an A scale bleeds into the neighbour byte",
    VALUE,
    seen="sglang PR 25733, TransformerEngine PR 2589",
    on=BLOCKS,
    read=each("a_scale", _bleeding),
    needs=_no_powers("a_scale"),
    same_if=POWERS,
)


def _bytes_as_exponents(scale: Tensor) -> Tensor:
    """Block b takes byte b mod 4 of float32 word b // 4 as an exponent."""
    column = torch.arange(scale.shape[1], device=scale.device)
    words = _bits(scale)[:, column // 4]
    return _from_bits((words >> (8 * (column % 4)).to(torch.int32) & 0xFF) << 23)


fault(
    "float32 bits of the A scale read as four exponents",
    VALUE,
    seen="sglang PR 26306",
    on=BLOCKS,
    read=each("a_scale", _bytes_as_exponents),
)


def _bf16_pairs(scale: Tensor) -> Tensor:
    """A bfloat16 buffer read as float32: two neighbours make one number, and half of the reads are out of bounds."""
    high = _bits(_bf16(scale)).flatten() >> 16 & 0xFFFF
    first = torch.arange(high.numel(), device=high.device) * 2 % high.numel()
    second = (first + 1) % high.numel()
    return _from_bits(high[first] | high[second] << 16).reshape(scale.shape)


fault(
    "bfloat16 bits of the A scale read as float32",
    VALUE,
    seen="flashinfer PR 3497",
    read=each("a_scale", _bf16_pairs),
    needs=several_rows("a_scale"),
)
fault(
    "A scale left at exponent byte 1",
    VALUE,
    seen="triton-ascend PR 2280",
    on=BLOCKS,
    read=each("a_scale", lambda scale: torch.full_like(scale, 2.0**-126)),
)
fault(
    "last B scale left at its unloaded sentinel",
    VALUE,
    seen="vllm-omni 5263",
    read=each("b_scale", lambda scale: torch.cat([scale[:-1], torch.full_like(scale[-1:], SENTINEL)])),
    needs=has("b_scale"),
)


def _pairs_share(scale: Tensor) -> Tensor:
    """Pairs of neighbouring rows share the larger scale; their codes stay as they are."""
    place = torch.arange(scale.shape[0], device=scale.device)
    partner = torch.where((place ^ 1) < scale.shape[0], place ^ 1, place)
    return torch.maximum(scale, scale[partner])


fault(
    "two shards share the larger B scale without requantising",
    VALUE,
    seen="vllm PR 41021",
    read=each("b_scale", _pairs_share),
    needs=several_rows("b_scale"),
    same_if="both scales are equal",
)
