"""KV caches in plain torch, on every device: indexed copies that never wait for a GPU.

A token without a slot is written as another token is, or as what its slot holds: indexing takes no mask.

Source: the formulas of :mod:`kernels.kv_cache`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import FP8, FP8_MAX
from ..errors import ValueRangeError
from ..formulas import ceil_to_ue8m0, divide_and_saturate, fp8_max, saturate
from ._host import no_autocast_no_grad
from .declaration import CacheRows, Part, Slots

TILE, BLOCK = 128, 16
BELOW, AT = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
"""Midpoints of the magnitudes of E2M1 whose even code is the lower one, and the upper one."""


def _bits(x: Tensor) -> Tensor:
    """Elements as integers: torch before 2.10 indexes no float8 on a CPU."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return x.view(widths[x.element_size()]) if x.is_floating_point() else x


def _exist(what: str, index: Tensor, count: int, *, least: int = 0) -> None:
    """Refuse an index from ``count`` on or below ``least``, on a CPU. Nothing waits for a GPU."""
    if index.device.type != "cpu" or not index.numel():
        return
    if (last := int(index.max())) >= count:
        raise ValueRangeError(f"index {last} is outside of the {count} {what}; pass a larger table or cache")
    if (first := int(index.min())) < least:
        raise ValueRangeError(f"index {first} is outside of the {count} {what}; pass indices from 0 on")


class _Places:
    """Where the rows of tokens go: page and offset, and the token that stands in for one without a slot."""

    def __init__(self, slots: Slots, memory: Tensor) -> None:
        pages, page = memory.shape[:2]
        if slots.positions is not None:
            assert slots.indices is not None and slots.indptr is not None
            position = slots.positions.long()
            first = slots.indptr.long()[slots.slot.long()]
            entry = first + position // page
            _exist("positions of kv_indices", entry, len(slots.indices))
            slot = slots.indices.long()[entry] * page + position % page
        else:
            slot = slots.slot.long()
        no_slot = torch.iinfo(torch.int64).min  # every negative one
        _exist("slots of the cache", slot, pages * page, least=no_slot)
        valid = slot >= 0 if slots.skip is None else slot != slots.skip
        self.some = valid.any()
        tokens = torch.arange(len(slot), device=slot.device)
        self.token = torch.where(valid, tokens, valid.to(torch.int32).argmax())  # another token's row, once more
        chosen = torch.where(self.some, slot[self.token], 0)
        self.block, self.offset = chosen // page, chosen % page

    def store(self, memory: Tensor, rows: Tensor) -> None:
        """``memory [pages, P, ...]`` takes ``rows [T, ...]``; nothing where no token has a slot."""
        target = _bits(memory)
        rows = _bits(rows)[self.token].reshape(-1, *target.shape[2:])
        target[self.block, self.offset] = torch.where(self.some, rows, target[self.block, self.offset])


@no_autocast_no_grad
def store(parts: tuple[Part, ...], slots: Slots) -> None:
    """Codes of a given scale, codes of a cast, or bits as they are."""
    count = len(slots.slot)
    if not count:
        return
    places = _Places(slots, parts[0].memory)
    for x, memory, scale in parts:
        rows = x[:count]
        if scale is not None:
            rows = divide_and_saturate(rows, scale.reshape(-1, 1))
        elif memory.dtype != x.dtype:
            rows = saturate(rows.to(torch.float32))
        places.store(memory, rows)


@no_autocast_no_grad
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
    """Codes and scales of tiles of 128, ``max(max(amax, amax_floor) / 448, scale_floor)``, and rotated columns.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    codes, scales, rotated = memory
    if slot is None:
        slot = torch.arange(len(x), device=x.device)
    if not len(slot):
        return
    places = _Places(Slots(slot), codes)
    wide = x[: len(slot)].to(torch.float32).reshape(len(slot), -1, TILE)
    amax = torch.where(wide.isnan(), torch.zeros_like(wide), wide).abs().amax(dim=-1).clamp(min=amax_floor)
    scale = (amax / fp8_max(x)).clamp(min=scale_floor)
    if ue8m0:
        scale = ceil_to_ue8m0(scale)
    if reciprocal:
        inverse = torch.where(scale == 0, torch.zeros_like(scale), scale.reciprocal())
        q = saturate(wide * inverse.unsqueeze(-1))
    else:
        q = divide_and_saturate(wide, scale.unsqueeze(-1))
    places.store(codes, q.flatten(1))
    places.store(scales, scale)
    if rope is not None and rotated is not None:
        places.store(rotated, rope[: len(slot)].contiguous())


@no_autocast_no_grad
def nvfp4(parts: tuple[Part, ...], scales: tuple[Tensor, ...], slot: Tensor) -> None:
    """E2M1 codes of blocks of 16 and ``e4m3(amax / (6 * scale))``; 0 codes under a scale of 0, NaN is coded 0.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    if not len(slot):
        return
    places = _Places(Slots(slot), parts[0].memory)
    for (x, memory, global_scale), of_blocks in zip(parts, scales, strict=True):
        assert global_scale is not None
        blocks = x[: len(slot)].to(torch.float32).reshape(len(slot), x.shape[1], -1, BLOCK)
        amax = torch.where(blocks.isnan(), torch.zeros_like(blocks), blocks).abs().amax(dim=-1)
        scale = (amax / (global_scale.reshape(()) * 6.0)).clamp(max=FP8_MAX).to(FP8)
        total = scale.to(torch.float32) * global_scale.reshape(())
        inverse = torch.where(total == 0, torch.zeros_like(total), total.reciprocal())
        y = blocks * inverse.unsqueeze(-1)
        magnitude, code = y.abs(), torch.zeros_like(y, dtype=torch.int32)
        for edge in BELOW:
            code += magnitude > edge
        for edge in AT:
            code += magnitude >= edge
        nibble = torch.where(y.isnan(), 0, code + 8 * torch.signbit(y)).to(torch.uint8).flatten(2)
        places.store(memory, nibble[..., ::2] | nibble[..., 1::2] << 4)
        places.store(of_blocks, scale)


@no_autocast_no_grad
def gather(
    source: Tensor, out: Tensor, scale: Tensor | None, beside: tuple[Tensor, Tensor] | None, rows: CacheRows | None
) -> None:
    """Rows of ``source [pages, P, C]``, as they are or times their scales; ``beside`` are copied as they are.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    page, count = source.shape[1], len(out)
    row = torch.arange(count, device=out.device)
    if rows is None:
        block, offset, inside = row // page, row % page, torch.ones_like(row, dtype=torch.bool)
    else:
        starts = rows.starts.long()
        total = starts[-1] if rows.lens is None else starts[-1] + rows.lens[-1]
        first = starts[:-1] if rows.lens is None else starts
        request = (torch.searchsorted(first, row, right=True) - 1).clamp(min=0)
        inside = row < total
        token = row - first[request] + (0 if rows.seq_starts is None else rows.seq_starts.long()[request])
        token = torch.where(inside, token, 0)
        _exist("pages of a request in block_table", token // page, rows.table.shape[1])
        at = rows.table.long()[torch.where(inside, request, 0), token // page]
        _exist("pages of the cache", torch.where(inside, at, 0), source.shape[0])
        block, offset = torch.where(inside, at, 0), token % page
    if scale is None:
        values = _bits(source)[block, offset]
        _kept(_bits(out), values, inside)
    else:
        codes = _bits(source)[block, offset].view(FP8).to(torch.float32)
        tiled = codes.reshape(count, scale.shape[2], codes.shape[1] // scale.shape[2])
        wide = tiled * scale[block, offset].unsqueeze(-1)
        _kept(out, wide.flatten(1).to(out.dtype), inside)
    if beside is not None:
        _kept(_bits(beside[1]), _bits(beside[0])[block, offset], inside)


def _kept(out: Tensor, values: Tensor, inside: Tensor) -> None:
    """Rows that belong to a request; the others stay."""
    out.copy_(torch.where(inside.unsqueeze(1), values, out))
