"""Contracts that read a cache: rows of requests one after the other, as they are or times their scale.

    token i of request b lies in page block_table[b, (start_b + i) // P] at (start_b + i) mod P

A read value is ``T(float32(value(code) * scale))``. Rows of the destination that belong to no request hold what they
held. Sources: vLLM csrc/libtorch_stable/cache_kernels.cu @00eb0c8; SGLang kernels/ops/attention/dsa/dequant_k_cache.py
(0.5.23). A request may start within a page, as vLLM reads it since PR 51739 (0.33); releases before round such a start
down to the page, which is refused.

NaN codes give NaN; bits that are moved keep theirs.
Sources: vLLM csrc/libtorch_stable/cache_kernels.cu @00eb0c8; SGLang dequant_k_cache.py (0.5.23).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import DtypeError, OptionError, ShapeError
from oracle.numbers.formats import E2M1, E4M3FN, decode, from_codes
from oracle.numbers.quantize import WIDE
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.routines.base import E4M3, F32, Call, Inputs, Options, TensorSpec, register
from oracle.routines.kv_cache.contract import (
    FILLS,
    INDEX_PAGES,
    ROWS_READ,
    CacheContract,
    Copied,
    Piece,
    Products,
    ReadsCodes,
    flat,
    fresh,
    one_scale,
)
from oracle.routines.kv_cache.writers import (
    HALF,
    LAYOUT,
    RANK,
    ROPE,
    ROPE_AT,
    ROW,
    SCALES_AT,
    TILE,
    columns,
    index_places,
    paged,
    rows,
)
from oracle.routines.mx.contract import unpack
from oracle.routines.traits import Kind
from oracle.verdict.sets import all_equal

INT32 = (torch.int32,)
TABLE = TensorSpec("block_table", Kind.PAGES, INT32, ("B", "L"), "pages of each request")
ENDS = TensorSpec("cu_seq_lens", Kind.OFFSETS, INT32, ("E",), "first row of each request, and the end: B + 1")
STARTS = TensorSpec(
    "seq_starts", Kind.POSITIONS, INT32, ("B",), "first token of each request, within a page too", optional=True
)


def spans(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """First row and number of rows of each request, int64 ``[B]``."""
    if "cu_seq_lens" in inputs:
        ends = inputs["cu_seq_lens"].to(torch.int64)
        return ends[:-1], ends.diff()
    return inputs["workspace_starts"].to(torch.int64), inputs["seq_lens"].to(torch.int64)


def gathered(inputs: Inputs, page: int) -> tuple[Tensor, Tensor]:
    """The slot in the cache, and the row of the destination, of every token, int64 ``[n]``."""
    first, counts = spans(inputs)
    table = inputs["block_table"].to(torch.int64)
    start = inputs["seq_starts"].to(torch.int64) if "seq_starts" in inputs else torch.zeros_like(first)
    slots, places = [], []
    for b, (row, count) in enumerate(zip(first.tolist(), counts.tolist(), strict=True)):
        token = start[b] + columns(count)
        slots.append(table[b, token // page] * page + token % page)
        places.append(row + columns(count))
    return torch.cat(slots), torch.cat(places)


def check_requests(inputs: Inputs, pages: int, page: int, room: int) -> None:
    """Refuse tables that lead beyond the cache or the destination."""
    first, counts = spans(inputs)
    table = inputs["block_table"].to(torch.int64)
    if len(first) != len(table):
        raise ShapeError(f"block_table has {len(table)} requests; their ends name {len(first)}")
    following = torch.cumsum(counts, 0) - counts
    if bool((counts < 0).any()) or not torch.equal(first, following) or int(counts.sum()) > room:
        raise OptionError(
            f"requests of {counts.tolist()} rows at {first.tolist()} do not lie one after the other in {room} rows"
        )
    if not int(counts.sum()):
        raise ShapeError("no request has a row; there is nothing to judge")
    start = inputs["seq_starts"].to(torch.int64) if "seq_starts" in inputs else torch.zeros_like(first)
    if bool((start < 0).any()):
        raise OptionError(f"seq_starts {start.tolist()} are no tokens of the requests; the first token is 0")
    for b, count in enumerate(counts.tolist()):
        last = -(-(int(start[b]) + count) // page)
        used = table[b, int(start[b]) // page : last]
        if count and (last > table.shape[1] or bool((used < 0).any()) or bool((used >= pages).any())):
            raise OptionError(f"request {b} of {count} tokens needs pages {used.tolist()} of {pages}")


class Gather(CacheContract):
    """Token ``i`` of request ``b`` is read from page ``block_table[b, (start + i) // P]`` at ``(start + i) mod P`` and
    written to row ``first + i`` of the destination, where requests follow one another. Where it is given ``start`` is
    ``seq_starts[b]``. Else ``start`` is 0. Of ``cu_seq_lens`` request ``b`` has the rows from ``first``, which is
    ``cu_seq_lens[b]``, to ``cu_seq_lens[b + 1]``, excluded. A request may have no row.
    Rows of the destination that belong to no request hold what they held. Entries of the table behind the last page may
    hold anything and are not read."""

    cache: ClassVar[str] = "src_cache"
    returns: ClassVar[tuple[str, ...]] = ("dst",)
    memory: ClassVar[tuple[str, ...]] = ("dst",)

    def paged(self, name: str) -> bool:
        return False  # rows of the destination follow one another

    def refuse(self, inputs: Inputs, options: Options) -> None:
        pages, page = inputs[self.cache].shape[:2]
        check_requests(inputs, pages, page, inputs[self.memory[0]].shape[0])

    def slots(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The slot in the cache, and the row of the destination, of every token, int64 ``[n]``."""
        return gathered(inputs, inputs[self.cache].shape[1])


@register
class GatherAndMaybeDequantCache(Gather, ReadsCodes):
    name = "gather_and_maybe_dequant_cache"
    summary = "rows of requests out of pages, times one scale"
    source = "vLLM csrc/libtorch_stable/cache_kernels.cu gather_and_maybe_dequant_cache"
    kinds = (Products,)
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("src_cache", Kind.CODES, E4M3, ("S", "P", "C"), "pages of codes"),
        TensorSpec("dst", Kind.STATE, WIDE, ("N", "C"), "rows before the call"),
        TABLE,
        ENDS,
        TensorSpec("scale", Kind.SCALES, F32, None, "multiplies"),
        STARTS,
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        one_scale(inputs, "scale")

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        slots, places = self.slots(inputs)
        width = inputs["src_cache"].shape[2]
        codes = from_codes(flat(inputs["src_cache"])[rows(slots * width, columns(width))], E4M3FN)
        return [
            Products(
                "dst",
                codes,
                decode(inputs["scale"]).reshape(1, 1).expand(codes.shape),
                rows(places * width, columns(width)),
            )
        ]


@register
class CpGatherCache(Gather):
    name = "cp_gather_cache"
    summary = "rows of requests out of pages, as they are"
    source = "vLLM csrc/libtorch_stable/cache_kernels.cu cp_gather_cache"
    kinds = (Copied,)
    inputs = (
        TensorSpec("src_cache", Kind.CODES, (*E4M3, torch.uint8, *WIDE), ("S", "P", "C"), "pages of any dtype"),
        TensorSpec(
            "dst", Kind.STATE, (*E4M3, torch.uint8, *WIDE), ("N", "C"), "rows before the call, of the same dtype"
        ),
        TABLE,
        ENDS,
        STARTS,
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if inputs["dst"].dtype != inputs["src_cache"].dtype:
            raise DtypeError(f"dst has dtype {inputs['dst'].dtype}, src_cache {inputs['src_cache'].dtype}; pass one")

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        slots, places = self.slots(inputs)
        width = columns(inputs["src_cache"].shape[2])
        return [
            Copied("dst", flat(inputs["src_cache"])[rows(slots * len(width), width)], rows(places * len(width), width))
        ]


def read_rows(name: str, memory: Tensor, slots: Tensor, places: Tensor) -> list[Piece]:
    """The values of rows of 656 bytes of ``memory`` ``[..., 656]``, uint8, in rows of 576: from ``slots`` ``[n]`` to
    ``places`` ``[n]``, int64."""
    raw, first, target = flat(memory), slots * ROW, places * (RANK + ROPE)
    codes = from_codes(raw[rows(first, columns(RANK))], E4M3FN)
    scales = raw[rows(first, SCALES_AT + columns(16))].view(torch.float32)
    rope = raw[rows(first, ROPE_AT + columns(2 * ROPE))].view(torch.int16)
    return [
        Products(name, codes, decode(scales).repeat_interleave(TILE, dim=1), rows(target, columns(RANK))),
        Copied(name, rope, rows(target, RANK + columns(ROPE))),
    ]


def equal_scales(memory: Tensor) -> str | None:
    """The reason for mistrust when every scale of ``memory`` ``[..., 656]``, uint8 rows of 656 bytes, is the same."""
    scales = flat(memory).reshape(-1, ROW)[:, SCALES_AT:ROPE_AT].contiguous().view(torch.float32)
    return all_equal("the scales of tiles", [scales])


@register
class CpGatherAndUpconvertFp8KvCache(Gather, ReadsCodes):
    """Rows of 656 bytes: 512 codes of E4M3, four float32 scales of tiles of 128, 64 columns of 16 bits; read as 512
    products ``bfloat16(code * scale)``, then the 64 columns as they are. Request ``b`` has ``seq_lens[b]`` rows from
    ``workspace_starts[b]`` on. The kernel ends the last request with the destination, so their rows are as many."""

    name = "cp_gather_and_upconvert_fp8_kv_cache"
    summary = "rows of requests out of pages of 656 bytes a row, dequantised tile by tile"
    source = "vLLM csrc/libtorch_stable/cache_kernels.cu cp_gather_and_upconvert_fp8_kv_cache"
    traits = frozenset({ROWS_READ, FILLS})
    kinds = (Products, Copied)
    inputs = (
        TensorSpec("src_cache", Kind.CODES, (torch.uint8,), ("S", "P", str(ROW)), "pages of rows of 656 bytes"),
        TensorSpec("dst", Kind.STATE, (torch.bfloat16,), ("N", str(RANK + ROPE)), "rows before the call"),
        TABLE,
        TensorSpec("seq_lens", Kind.COUNTS, INT32, ("B",), "rows of each request"),
        TensorSpec(
            "workspace_starts", Kind.OFFSETS, INT32, ("B",), "first row of each request: they follow one another"
        ),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (rows := int(inputs["seq_lens"].sum())) != inputs["dst"].shape[0]:
            raise ShapeError(f"dst has {inputs['dst'].shape[0]} rows for requests of {rows}; pass as many")

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        return read_rows("dst", inputs["src_cache"], *self.slots(inputs))

    def why_mistrust(self, call: Call) -> str | None:
        return equal_scales(call.inputs["src_cache"])


@register
class DequantizeKCache(ReadsCodes):
    """Rows of 656 bytes as rows of 576 values, as ``cp_gather_and_upconvert_fp8_kv_cache`` reads them."""

    name = "dequantize_k_cache"
    shapes = {"out": "that of quant_k_cache with 576 values for 656 bytes in the last axis"}
    summary = "every row of 656 bytes of a cache, dequantised tile by tile"
    source = "SGLang kernels/ops/attention/dsa/dequant_k_cache.py dequantize_k_cache"
    traits = frozenset({ROWS_READ})
    kinds = (Products, Copied)
    inputs = (
        TensorSpec(
            "quant_k_cache", Kind.CODES, (torch.uint8,), ("B", "P", "1", str(ROW)), "pages of rows of 656 bytes"
        ),
    )

    def before(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        return {"out": fresh((*inputs["quant_k_cache"].shape[:3], RANK + ROPE), torch.bfloat16)}

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        every = columns(inputs["quant_k_cache"].numel() // ROW)
        return read_rows("out", inputs["quant_k_cache"], every, every)

    def why_mistrust(self, call: Call) -> str | None:
        return equal_scales(call.inputs["quant_k_cache"])


@register
class CpGatherIndexerKQuantCache(Gather):
    """Pages are those of ``indexer_k_quant_and_cache``: P times D codes, then P times D/128 float32 scales. Byte i of a
    page is its element ``[i // C, i % C]``, whatever the strides are. A kernel that needs the bytes of a page side by
    side raises NotImplementedError where they are not."""

    name = "cp_gather_indexer_k_quant_cache"
    summary = "index keys of requests and their scales out of pages, as they are"
    source = "vLLM csrc/libtorch_stable/cache_kernels.cu cp_gather_indexer_k_quant_cache_kernel"
    traits = frozenset({INDEX_PAGES})
    kinds = (Copied,)
    inputs = (
        TensorSpec(
            "kv_cache", Kind.CODES, (torch.uint8,), ("S", "P", "C"), "pages of codes, then scales; C = D + 4 D/128"
        ),
        TensorSpec("dst_k", Kind.STATE, (torch.uint8,), ("N", "D"), "rows of codes before the call"),
        TensorSpec(
            "dst_scale",
            Kind.STATE,
            (torch.uint8,),
            ("N", "G"),
            "bytes of their float32 scales before the call, 4 D/128",
        ),
        TABLE,
        ENDS,
    )
    cache = "kv_cache"
    returns = memory = ("dst_k", "dst_scale")

    def refuse(self, inputs: Inputs, options: Options) -> None:
        depth, row = inputs["dst_k"].shape[1], inputs["kv_cache"].shape[2]
        if depth % TILE or inputs["dst_scale"].shape[1] != 4 * (depth // TILE) or row != depth + 4 * (depth // TILE):
            raise ShapeError(f"rows of {row} bytes do not hold {depth} codes in groups of 128 and their scales")

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        slots, places = self.slots(inputs)
        raw, depth = flat(inputs["kv_cache"]), inputs["dst_k"].shape[1]
        pairs = zip(self.memory, index_places(slots, inputs["kv_cache"].shape[1], depth), strict=True)
        return [Copied(name, raw[at], rows(places * at.shape[1], columns(at.shape[1]))) for name, at in pairs]


@register
class Nvfp4KvDequantizePaged(ReadsCodes):
    """Token ``i`` of request ``b``, below ``seq_lens[b]``, is read from page ``block_table[b, i // P]`` at ``i mod P``:
    ``out[b, i] = T(float32(e2m1 * e4m3(byte) * scale))``, a byte of scales for each 16 columns, the low nibble of a
    byte of codes the even column. Other tokens of the output hold what they held."""

    name = "nvfp4_kv_dequantize_paged"
    summary = "keys and values of requests out of pages of NVFP4, times the scales of blocks and of the tensor"
    source = "FlashInfer csrc/fp4_kv_dequantization.cu nvfp4_paged_dequant_kernel (0.6.18.post1)"
    kinds = (Products,)
    dispatched = False
    returns: ClassVar[tuple[str, ...]] = ("output_k", "output_v")
    memory: ClassVar[tuple[str, ...]] = ("output_k", "output_v")
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        *(TensorSpec(f"{x}_cache", Kind.CODES, (torch.uint8,), None, "pages of codes, D/2 bytes a head") for x in "kv"),
        *(TensorSpec(f"{x}_scale_cache", Kind.SCALES, E4M3, None, "pages of scales, D/16 a head") for x in "kv"),
        TABLE,
        TensorSpec("seq_lens", Kind.COUNTS, INT32, ("B",), "tokens of each request"),
        *(TensorSpec(f"{x}_scale", Kind.SCALES, F32, ("1",), "multiplies") for x in "kv"),
        *(TensorSpec(f"output_{x}", Kind.STATE, HALF, ("B", "S", "H", "D"), "rows before the call") for x in "kv"),
    )
    options = (LAYOUT,)

    def paged(self, name: str) -> bool:
        return False  # tokens of a request follow one another

    def refuse(self, inputs: Inputs, options: Options) -> None:
        count, room, heads, depth = inputs["output_k"].shape
        shape, nhd = tuple(inputs["k_cache"].shape), options["kv_layout"] == "NHD"
        if depth % 16 or len(shape) != 4 or inputs["output_v"].dtype != inputs["output_k"].dtype:
            raise ShapeError(f"heads of {depth} columns are no blocks of 16, or k_cache {list(shape)} no pages")
        page = shape[1 if nhd else 2]
        lead = (shape[0], page, heads) if nhd else (shape[0], heads, page)
        for name in ("k_cache", "v_cache", "k_scale_cache", "v_scale_cache"):
            due = (*lead, depth // (16 if "scale" in name else 2))
            if tuple(inputs[name].shape) != due:
                raise ShapeError(f"{name} has shape {list(inputs[name].shape)}; these pages have {list(due)}")
        one_scale(inputs, "k_scale", "v_scale")
        lengths, table = inputs["seq_lens"], inputs["block_table"]
        if bool((lengths < 0).any()) or bool((lengths > min(room, table.shape[1] * page)).any()):
            raise OptionError(f"seq_lens {lengths.tolist()} exceed {room} rows or {table.shape[1]} pages of {page}")
        if not int(lengths.sum()):
            raise ShapeError("no request has a token; there is nothing to judge")
        for b, length in enumerate(lengths.tolist()):
            used = table[b, : -(-length // page)]
            if bool((used < 0).any()) or bool((used >= shape[0]).any()):
                raise OptionError(f"request {b} needs pages {used.tolist()} of {shape[0]}")

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        _, room, heads, depth = inputs["output_k"].shape
        layout, parts = str(options["kv_layout"]), list[Piece]()
        page = inputs["k_cache"].shape[1 if layout == "NHD" else 2]
        table, lengths = inputs["block_table"].to(torch.int64), inputs["seq_lens"].tolist()
        tokens = [(b, columns(length)) for b, length in enumerate(lengths)]
        slot = torch.cat([table[b, i // page] * page + i % page for b, i in tokens])
        target = torch.cat([b * room + i for b, i in tokens])
        for x in "kv":
            memory, bytes_ = inputs[f"{x}_cache"], inputs[f"{x}_scale_cache"]
            packed, scales = (flat(m)[paged(slot, tuple(m.shape), layout)] for m in (memory, bytes_))
            nibbles = unpack(packed.reshape(-1, depth // 2)).reshape(-1, heads, depth)
            scale = decode(from_codes(scales, E4M3FN)) * decode(inputs[f"{x}_scale"])
            values = to_dtype(
                decode(nibbles, E2M1), torch.float8_e4m3fn, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE
            )
            at = ((target[:, None, None] * heads + columns(heads)[:, None]) * depth + columns(depth)).flatten(1)
            parts.append(Products(f"output_{x}", values.flatten(1), scale.repeat_interleave(16, dim=-1).flatten(1), at))
        return parts
