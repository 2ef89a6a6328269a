"""KV caches in Triton: one launch for every writer and reader, with the bits of plain torch.

Under ``TRITON_INTERPRET=1`` the kernels run on the CPU.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from kernels.backends._launch import Launch, bits, imported, power_of_two
from kernels.backends.declaration import CacheRows, Part, Slots
from kernels.checks import FP8

WIDEST, WARPS, VECTOR = 2048, 4, 16
"""Most elements that a program holds at once, its most warps, and the bytes that one instruction loads."""
BLOCKS = 128
"""Blocks of 16 that a program holds at once."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.cache
def library() -> tuple[ModuleType, bool]:
    """The kernels, and whether they run natively (not under the interpreter)."""
    return imported("kernels.backends._triton_cache", "store_kernel")


@functools.lru_cache(maxsize=256)
def _prepared(kernel: str, warps: int = WARPS, **constants: object) -> Launch:
    return Launch(getattr(library()[0], kernel), constants, num_warps=warps)


def _small(memory: Tensor) -> bool:
    """Whether the slots of a cache, pages times slots of a page, are numbers of 31 bits."""
    return memory.shape[0] * memory.shape[1] < 1 << 31


def _words(part: Part) -> Part:
    """What is copied as the widest integers that its rows, heads and strides are made of."""
    x, memory, scale = part
    size, dtype = x.element_size(), INTEGERS[x.element_size()]
    x, memory = x.view(dtype), memory.view(dtype)
    if x.stride(2) != 1 or memory.stride(3) != 1:
        return Part(x, memory, scale)
    steps = (x.shape[2], *x.stride()[:2], *memory.stride()[:3])
    for width in (8, 4, 2):
        count = width // size
        aligned = not any((t.storage_offset() % count or t.data_ptr() % width) for t in (x, memory))
        if count > 1 and aligned and not any(step % count for step in steps):
            return Part(x.view(WORDS[width]), memory.view(WORDS[width]), scale)
    return Part(x, memory, scale)


def _raw(x: Tensor) -> Tensor:
    """Elements as integers."""
    return x.view(INTEGERS[x.element_size()]) if x.is_floating_point() else x


def _codes(x: Tensor) -> Tensor:
    """Codes as the kernels store them: the interpreter knows no float8."""
    return x.view(FP8) if library()[1] else x.view(torch.uint8)


def store(parts: tuple[Part, ...], slots: Slots) -> None:
    """Codes of a given scale, codes of a cast, or bits as they are; two parts."""
    tokens = len(slots.slot)
    if not tokens:
        return
    native, first = library()[1], parts[0]
    mode = 2 if first.scale is not None else int(first.x.dtype != first.memory.dtype)
    per_head = any(part.scale is not None and part.scale.numel() > 1 for part in parts)
    laid = [_laid(_words(part) if mode == 0 else part, per_head) for part in parts]
    heads = [x.shape[1] for x, _, _ in laid]
    one = slots.slot
    start = _prepared(
        "store_kernel", max(_warps(x) for x, _, _ in laid), MODE=mode, PER_HEAD=per_head, CHUNK0=laid[0][2],
        CHUNK1=laid[1][2], **_parts(0, laid[0][0]), **_parts(1, laid[1][0]), TABLE=slots.positions is not None,
        SKIP=slots.skip is not None, SMALL=_small(first.memory), NATIVE=native,
    )  # fmt: skip
    xs = [x for x, _, _ in laid]
    memories = [m if mode == 0 else _codes(m) for _, m, _ in laid]
    scales = [
        one if part.scale is None else _per_head(part.scale, h, per_head) for part, h in zip(parts, heads, strict=True)
    ]
    tables = (one if t is None else t.contiguous() for t in (slots.positions, slots.indices, slots.indptr))
    strides = []
    for (x, memory, _), count in zip(laid, heads, strict=True):
        strides += [count, x.shape[2], x.stride(0), x.stride(1), *memory.stride()[:4]]
    pointers = *xs, *memories, *scales, one.contiguous(), *tables
    start(2 * tokens, pointers, (parts[0].memory.shape[1], slots.skip or 0, *strides))


def _laid(part: Part, per_head: bool) -> tuple[Tensor, Tensor, int]:
    """Rows with dense columns, the memory, and the columns of a chunk; heads that follow one another are one head."""
    x, memory, _ = part
    x = x if x.stride(2) == 1 else x.contiguous()
    chunk = memory.shape[4] if memory.dim() == 5 else 0
    tokens, heads, depth = x.shape
    follow = heads == 1 or (x.stride(1) == depth and memory.stride(2) == depth and memory.stride(3) == 1)
    if follow and not per_head and not chunk and heads > 1:
        shape = (*memory.shape[:2], 1, heads * depth)
        memory = memory.as_strided(shape, (*memory.stride()[:2], 0, 1), memory.storage_offset())
        x = x.as_strided((tokens, 1, heads * depth), (x.stride(0), 0, 1), x.storage_offset())
    return x, memory, chunk


def _per_head(scale: Tensor, heads: int, per_head: bool) -> Tensor:
    return scale.reshape(-1).expand(heads).contiguous() if per_head else scale.reshape(-1)


def _parts(which: int, x: Tensor) -> dict[str, int]:
    """How many elements a program takes at once, how often, and whether they are of one head."""
    count = x.shape[1] * x.shape[2]
    block = min(WIDEST, power_of_two(count))
    return {f"BLOCK{which}": block, f"PARTS{which}": -(-count // block), f"FLAT{which}": x.shape[1] == 1}


def _warps(x: Tensor) -> int:
    """As many as leave each thread 16 bytes of a row to load."""
    count = min(WIDEST, power_of_two(x.shape[1] * x.shape[2])) * x.element_size()
    return min(WARPS, max(1, count // (32 * VECTOR)))


def tiles(
    x: Tensor, rope: Tensor | None, memory: tuple[Tensor, Tensor, Tensor | None], slot: Tensor | None,
    amax_floor: float, scale_floor: float, ue8m0: bool, reciprocal: bool,
) -> None:  # fmt: skip
    """Codes and scales of tiles of 128, and rotated columns as they are."""
    codes, scales, rotated = memory
    tokens = len(x) if slot is None else len(slot)
    if not tokens:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    count = scales.shape[2]
    start = _prepared(
        "tile_kernel", TILES=power_of_two(count), ROPE=0 if rope is None else rope.shape[1],
        MODE=2 if reciprocal else int(ue8m0), EPS=bits(amax_floor), FLOOR=bits(scale_floor), SLOTTED=slot is not None,
        SMALL=_small(codes), NATIVE=library()[1],
    )  # fmt: skip
    beside, columns = x, codes
    if rope is not None and rotated is not None:
        beside, columns = _raw(rope if rope.stride(1) == 1 else rope.contiguous()), rotated
    slots = x if slot is None else slot.contiguous()
    pointers = x, beside, _codes(codes), scales, columns, slots
    strides = (x.stride(0), beside.stride(0), *codes.stride()[:2], *scales.stride()[:2], *columns.stride()[:2])
    start(tokens, pointers, (codes.shape[1], count, *strides))


def nvfp4(parts: tuple[Part, ...], scales: tuple[Tensor, ...], slot: Tensor) -> None:
    """E2M1 codes of blocks of 16 and their E4M3 scales."""
    if not len(slot):
        return
    xs = [x if x.stride(2) == 1 else x.contiguous() for x, _, _ in parts]
    _, heads, depth = xs[0].shape
    count = heads * depth // 16
    block = min(BLOCKS, power_of_two(count))
    start = _prepared("nvfp4_kernel", BLOCK=block, PARTS=-(-count // block), SMALL=_small(parts[0].memory),
                      NATIVE=library()[1])  # fmt: skip
    memories, blocks = [part.memory for part in parts], [scale.view(torch.uint8) for scale in scales]
    given = [part.scale.reshape(-1) for part in parts if part.scale is not None]
    strides: list[int] = []
    for x, q, s in zip(xs, memories, blocks, strict=True):
        strides += [x.stride(0), x.stride(1), *q.stride()[:3], *s.stride()[:3]]
    pointers = (*xs, *memories, *blocks, *given, slot.contiguous())
    start(2 * len(slot), pointers, (memories[0].shape[1], heads, depth, *strides))


def gather(
    source: Tensor, out: Tensor, scale: Tensor | None, beside: tuple[Tensor, Tensor] | None, rows: CacheRows | None
) -> None:
    """Rows of ``source``, as they are or times their scales; ``beside`` are copied as they are."""
    if not len(out):
        return
    source = source if source.stride(2) == 1 else source.contiguous()
    width, scaled = source.shape[2], scale is not None
    c, target = (_codes(source), out) if scaled else (_raw(source), _raw(out))
    s = c if scale is None else scale
    b, other = (c, target) if beside is None else (_raw(beside[0]), _raw(beside[1]))
    empty: Tensor = c
    table, starts, seq_starts, lens = (empty,) * 4 if rows is None else (
        rows.table if rows.table.stride(1) == 1 else rows.table.contiguous(), rows.starts.contiguous(),
        empty if rows.seq_starts is None else rows.seq_starts.contiguous(),
        empty if rows.lens is None else rows.lens.contiguous(),
    )  # fmt: skip
    requests = 1 if rows is None else len(rows.table)
    columns = 0 if beside is None else b.shape[2]
    start = _prepared(
        "gather_kernel", TABLE=rows is not None, REQUESTS=power_of_two(requests),
        STARTS=rows is not None and rows.seq_starts is not None, LENS=rows is not None and rows.lens is not None,
        SCALED=scaled, BESIDE=power_of_two(columns) if columns else 0, WIDTH=power_of_two(width),
        NATIVE=library()[1],
    )  # fmt: skip
    integers = (
        requests, source.shape[1], table.stride(0) if rows is not None else 0, width,
        width // (1 if scale is None else scale.shape[2]), columns, *c.stride()[:2],
        *(s.stride()[:2] if scaled else (0, 0)), *(b.stride()[:2] if beside is not None else (0, 0)), target.stride(0),
        other.stride(0),
    )  # fmt: skip
    start(len(out), (c, s, b, target, other, table, starts, seq_starts, lens), integers)
