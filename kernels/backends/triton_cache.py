"""KV caches in Triton: one launch for every writer and reader, with the bits of plain torch.

Under ``TRITON_INTERPRET=1`` the kernels run on the CPU.

Source: the formulas of :mod:`kernels.kv_cache`.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import FP8
from ..routes import cached
from ._launch import Launch, bits, imported, power_of_two
from .declaration import CacheRows, Part, Slots

WIDEST, WARPS, VECTOR = 2048, 4, 16
"""Most elements that a program holds at once, its most warps, and the bytes that one instruction loads."""
BLOCKS = 128
"""Blocks of 16 that a program holds at once."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
WORDS = {**INTEGERS, 8: torch.int64}
SMALL = 1 << 31
"""Slots of a cache, pages times slots of a page, whose numbers need more than 31 bits."""


@functools.cache
def library() -> tuple[ModuleType, bool]:
    """The kernels, and whether they run natively (not under the interpreter)."""
    return imported("._triton_cache", "store_kernel")


@functools.lru_cache(maxsize=256)
def _prepared(kernel: str, warps: int = WARPS, **constants: object) -> Launch:
    return Launch(getattr(library()[0], kernel), constants, num_warps=warps)


def _raw(x: Tensor) -> Tensor:
    """Elements as integers."""
    return x.view(INTEGERS[x.element_size()]) if x.is_floating_point() else x


def _codes(x: Tensor) -> Tensor:
    """Codes as the kernels store them: the interpreter supports no float8."""
    return x.view(FP8) if library()[1] else x.view(torch.uint8)


class _Half(NamedTuple):
    """How one part of a row is stored: what its elements are read and written as, their bytes, what a launch says."""

    source: torch.dtype
    target: torch.dtype
    size: int
    chunk: int
    numbers: tuple[int, ...]
    """Heads, columns of a head, strides of the rows (token, head) and of the memory (page, slot, head, column)."""


def store(parts: tuple[Part, ...], slots: Slots) -> None:
    """Codes of a given scale, codes of a cast, or bits as they are; two parts.

    All that follows from dtypes, extents, strides and alignment is kept for the next call that has the same.
    """
    tokens = slots.slot.shape[0]
    if not tokens:
        return
    parts = tuple(part if part.x.stride(2) == 1 else part._replace(x=part.x.contiguous()) for part in parts)
    start, page, halves = cached(_stored, *map(_class_of, parts), slots.positions is not None, slots.skip is not None)
    one, skip = slots.slot, slots.skip
    heads = [half.numbers[0] for half in halves]
    scales = [
        one if part.scale is None else _per_head(part.scale, count, bool(start.constants["PER_HEAD"]))
        for part, count in zip(parts, heads, strict=True)
    ]
    (x, memory, _), (y, other, _) = parts
    (source, target, *_), (source_y, target_y, *_) = halves
    sides = x.view(source), y.view(source_y), memory.view(target), other.view(target_y)
    tables = [one if t is None else t.contiguous() for t in (slots.positions, slots.indices, slots.indptr)]
    start(
        2 * tokens,
        (*sides, *scales, one.contiguous(), *tables),
        (page, skip or 0, *halves[0].numbers, *halves[1].numbers),
    )


def _class_of(part: Part) -> tuple[object, ...]:
    """What decides how a part is stored; of its alignment the bits up to the widest word."""
    x, memory, scale = part
    at = x.data_ptr() | memory.data_ptr() | (int(x.storage_offset()) | int(memory.storage_offset())) * x.element_size()
    values = 0 if scale is None else scale.numel()
    return x.dtype, memory.dtype, x.shape[1:], x.stride(), memory.shape, memory.stride(), at & 7, values


def _stored(
    first: tuple[Any, ...], second: tuple[Any, ...], table: bool, skip: bool
) -> tuple[Launch, int, list[_Half]]:
    """The launch for two parts, the slots of a page, and how each part is stored."""
    (x, memory, _, _, pages, _, _, values), native = first, library()[1]
    mode = 2 if values else int(x != memory)
    per_head = max(values, second[-1]) > 1
    halves = [_half(part, mode, per_head, native) for part in (first, second)]
    (_, _, size0, chunk0, (heads0, depth0, *_)), (_, _, size1, chunk1, (heads1, depth1, *_)) = halves
    start = _prepared(
        "store_kernel",
        max(_warps(heads0 * depth0 * size0), _warps(heads1 * depth1 * size1)),
        MODE=mode,
        PER_HEAD=per_head,
        CHUNK0=chunk0,
        CHUNK1=chunk1,
        **_parts(0, heads0, depth0),
        **_parts(1, heads1, depth1),
        TABLE=table,
        SKIP=skip,
        SMALL=pages[0] * pages[1] < SMALL,
        NATIVE=native,
    )
    return start, pages[1], halves


def _half(part: tuple[Any, ...], mode: int, per_head: bool, native: bool) -> _Half:
    """What is copied goes as the widest integers that rows, heads, strides and addresses are made of; heads that follow
    one another are one head."""
    x, _, (heads, depth), (x_t, x_h, _), pages, (*m_strides,), at, _ = part
    chunk = pages[4] if len(pages) == 5 else 0
    m_b, m_o, m_h, m_c = m_strides[:4]
    source, target, size = x, FP8 if native else torch.uint8, x.itemsize
    if mode == 0:
        wide = (
            width
            for width in sorted(WORDS, reverse=True)
            if m_c == 1
            and width >= size
            and not any(n * size % width for n in (depth, x_t, x_h, m_b, m_o, m_h))
            and at % width == 0
        )
        width = next(wide, size)
        source = target = WORDS[width]
        count, size = width // size, width
        depth, x_t, x_h, m_b, m_o, m_h = (n // count for n in (depth, x_t, x_h, m_b, m_o, m_h))
    if heads > 1 and x_h == m_h == depth and m_c == 1 and not per_head and not chunk:
        heads, depth, x_h, m_h = 1, heads * depth, 0, 0
    return _Half(source, target, size, chunk, (heads, depth, x_t, x_h, m_b, m_o, m_h, m_c))


def _per_head(scale: Tensor, heads: int, per_head: bool) -> Tensor:
    if not per_head:
        return scale
    return scale.reshape(-1).expand(heads).contiguous()


def _parts(which: int, heads: int, depth: int) -> dict[str, int]:
    """How many elements a program takes at once, how often, and whether they are of one head."""
    count = heads * depth
    block = min(WIDEST, power_of_two(count))
    return {f"BLOCK{which}": block, f"PARTS{which}": -(-count // block), f"FLAT{which}": heads == 1}


def _warps(elements: int) -> int:
    """As many as leave each thread 16 of the bytes of a row to load."""
    return min(WARPS, max(1, power_of_two(elements) // (32 * VECTOR)))


def tiles(
    x: Tensor,
    rope: Tensor | None,
    memory: tuple[Tensor, Tensor, Tensor | None],
    slot: Tensor | None,
    amax_floor: float,
    scale_floor: float,
    ue8m0: bool,
    reciprocal: bool,
) -> None:
    """Codes and scales of tiles of 128, and rotated columns as they are.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    codes, scales, rotated = memory
    tokens = len(x) if slot is None else len(slot)
    if not tokens:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    count = scales.shape[2]
    start = _prepared(
        "tile_kernel",
        TILES=power_of_two(count),
        ROPE=0 if rope is None else rope.shape[1],
        MODE=2 if reciprocal else int(ue8m0),
        EPS=bits(amax_floor),
        FLOOR=bits(scale_floor),
        SLOTTED=slot is not None,
        SMALL=codes.shape[0] * codes.shape[1] < SMALL,
        NATIVE=library()[1],
    )
    beside, columns = x, codes
    if rope is not None and rotated is not None:
        beside, columns = _raw(rope if rope.stride(1) == 1 else rope.contiguous()), rotated
    slots = x if slot is None else slot.contiguous()
    pointers = x, beside, _codes(codes), scales, columns, slots
    strides = (x.stride(0), beside.stride(0), *codes.stride()[:2], *scales.stride()[:2], *columns.stride()[:2])
    start(tokens, pointers, (codes.shape[1], count, *strides))


def nvfp4(parts: tuple[Part, ...], scales: tuple[Tensor, ...], slot: Tensor) -> None:
    """E2M1 codes of blocks of 16 and their E4M3 scales.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    if not len(slot):
        return
    xs = [x if x.stride(2) == 1 else x.contiguous() for x, _, _ in parts]
    _, heads, depth = xs[0].shape
    count = heads * depth // 16
    block = min(BLOCKS, power_of_two(count))
    pages, page = parts[0].memory.shape[:2]
    start = _prepared(
        "nvfp4_kernel", BLOCK=block, PARTS=-(-count // block), SMALL=pages * page < SMALL, NATIVE=library()[1]
    )
    memories, blocks = [part.memory for part in parts], [scale.view(torch.uint8) for scale in scales]
    global_scales = [part.scale.reshape(-1) for part in parts if part.scale is not None]
    strides: list[int] = []
    for x, q, s in zip(xs, memories, blocks, strict=True):
        strides += [x.stride(0), x.stride(1), *q.stride()[:3], *s.stride()[:3]]
    pointers = (*xs, *memories, *blocks, *global_scales, slot.contiguous())
    start(2 * len(slot), pointers, (page, heads, depth, *strides))


def gather(
    source: Tensor, out: Tensor, scale: Tensor | None, beside: tuple[Tensor, Tensor] | None, rows: CacheRows | None
) -> None:
    """Rows of ``source``, as they are or times their scales; ``beside`` are copied as they are.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    if not len(out):
        return
    source = source if source.stride(2) == 1 else source.contiguous()
    width, scaled = source.shape[2], scale is not None
    c, target = (_codes(source), out) if scaled else (_raw(source), _raw(out))
    s = c if scale is None else scale
    b, other = (c, target) if beside is None else (_raw(beside[0]), _raw(beside[1]))
    empty: Tensor = c
    table, starts, seq_starts, lens = (
        (empty,) * 4
        if rows is None
        else (
            rows.table if rows.table.stride(1) == 1 else rows.table.contiguous(),
            rows.starts.contiguous(),
            empty if rows.seq_starts is None else rows.seq_starts.contiguous(),
            empty if rows.lens is None else rows.lens.contiguous(),
        )
    )
    requests = 1 if rows is None else len(rows.table)
    columns = 0 if beside is None else b.shape[2]
    start = _prepared(
        "gather_kernel",
        TABLE=rows is not None,
        REQUESTS=power_of_two(requests),
        STARTS=rows is not None and rows.seq_starts is not None,
        LENS=rows is not None and rows.lens is not None,
        SCALED=scaled,
        BESIDE=power_of_two(columns) if columns else 0,
        WIDTH=power_of_two(width),
        NATIVE=library()[1],
    )
    integers = (
        requests,
        source.shape[1],
        table.stride(0) if rows is not None else 0,
        width,
        width // (1 if scale is None else scale.shape[2]),
        columns,
        *c.stride()[:2],
        *(s.stride()[:2] if scaled else (0, 0)),
        *(b.stride()[:2] if beside is not None else (0, 0)),
        target.stride(0),
        other.stride(0),
    )
    start(len(out), (c, s, b, target, other, table, starts, seq_starts, lens), integers)
