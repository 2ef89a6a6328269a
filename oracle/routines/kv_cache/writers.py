"""Contracts that write into a cache: codes under a given scale, codes and their scales, or bits.

Sources: vLLM csrc/libtorch_stable/cache_kernels.cu @00eb0c8 and quantization/w8a8/fp8/nvidia/quant_utils.cuh; SGLang
kernels/ops/kvcache/mla_buffer.py (0.5.23); FlashInfer include/flashinfer/page.cuh (0.6.18.post1); caches that keep the
scales of their tiles beside the codes: SGLang kernels/ops/quantization/dsa_quant_k_cache.py (0.5.23), and the recipes
of :mod:`oracle.numbers.kv_recipes`. Not covered: other ranks and tiles, vLLM's NVFP4 pages (sm100).

NaN values are coded as any NaN; bits that are moved keep theirs.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import DtypeError, OptionError, ShapeError
from oracle.numbers import kv_recipes
from oracle.numbers.formats import decode
from oracle.numbers.quantize import WIDE
from oracle.numbers.recipes import Recipe
from oracle.numbers.rounding import f32
from oracle.routines.base import E4M3, F32, INTEGERS, Inputs, Options, OptionSpec, TensorSpec, register
from oracle.routines.kv_cache.contract import (
    INDEX_PAGES,
    SCALE_OF_HEADS,
    SIDE_BY_SIDE,
    CacheContract,
    Coded,
    Copied,
    Piece,
    Products,
    Quantised,
    ReadsCodes,
    WritesCodes,
    flat,
    fresh,
    one_scale,
    slots_of,
)
from oracle.routines.quantisers.contract import FOUR_BITS
from oracle.routines.traits import Kind

LAYOUTS = ("NHD", "HND")
LAYOUT = OptionSpec("kv_layout", LAYOUTS[0], LAYOUTS, "[pages, P, H, D], or [pages, H, P, D]")
SLOTS = TensorSpec("slot_mapping", Kind.SLOTS, INTEGERS, ("T",), "slot of each token, negative where it is not written")
KEY = TensorSpec("key", Kind.VALUES, WIDE, ("N", "H", "D"), "keys; tokens past T are padding")
VALUE = TensorSpec("value", Kind.VALUES, WIDE, ("N", "H", "D"), "values")
K_SCALE, V_SCALE = (
    TensorSpec(f"{x}_scale", Kind.SCALES, F32, None, "multiplies on reading; the writer divides") for x in "kv"
)


def columns(count: int) -> Tensor:
    """The integers from 0 to ``count`` - 1, int64 ``[count]``."""
    return torch.arange(count, device="cpu")


def rows(at: Tensor, *steps: Tensor) -> Tensor:
    """Places ``[R, K]``, int64: the first ``at`` ``[R]`` of each row, and the sum of what the columns add, ``steps``
    ``[K]`` each."""
    return at.reshape(-1, 1) + sum(steps[1:], steps[0]).reshape(1, -1)


def of_slots(slot: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Page and offset of each ``slot`` ``[n]`` (integers), int64 ``[n]``."""
    slot = slot.to(torch.int64)
    return slot // page, slot % page


def paged(slot: Tensor, shape: tuple[int, ...], layout: str) -> Tensor:
    """Places ``[T, H, D]``, int64, of the heads of each ``slot`` ``[T]`` in pages of one of the two layouts."""
    (_, page, heads, depth) = shape if layout == "NHD" else (shape[0], shape[2], shape[1], shape[3])
    block, offset = (t.reshape(-1, 1, 1) for t in of_slots(slot, page))
    head = columns(heads).reshape(1, -1, 1)
    column = columns(depth).reshape(1, 1, -1)
    if layout == "NHD":
        return ((block * page + offset) * heads + head) * depth + column
    return ((block * heads + head) * page + offset) * depth + column


def per_head(scale: Tensor, tokens: int, heads: int) -> Tensor:
    """The scale of every row ``[T * H, 1]``, float64, of ``scale`` ``[1]`` or ``[H]``."""
    return decode(scale).flatten().expand(heads).repeat(tokens).reshape(-1, 1)


def written(slot_mapping: Tensor) -> Tensor:
    """Which tokens have a slot in ``slot_mapping`` ``[T]`` (integers), int64 ``[n]``."""
    return torch.nonzero(slot_mapping >= 0).flatten()


class Slots:
    """Token ``t`` goes to slot ``s = slot_mapping[t]``, in page ``s // P`` at ``s mod P``; where ``s`` is negative it
    is not written. Slots are below the pages times P, and one is not negative."""


class Padded(Slots):
    """Tokens from T on are padding and are not read."""


@register
class ReshapeAndCacheFlash(Padded, WritesCodes):
    """The caches are ``[pages, P, H, D]`` (NHD) or ``[pages, H, P, D]`` (HND). A scale is one value, or one for each
    head, ``[H]``."""

    name = "reshape_and_cache_flash"
    summary = "keys and values divided by their scales into pages, one scale or one for each head"
    source = "vLLM csrc/libtorch_stable/cache_kernels.cu reshape_and_cache_flash_kernel"
    traits = frozenset({SCALE_OF_HEADS})
    kinds = (Coded,)
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        KEY,
        VALUE,
        TensorSpec("key_cache", Kind.STATE, E4M3, None, "pages of keys before the call"),
        TensorSpec("value_cache", Kind.STATE, E4M3, None, "pages of values before the call"),
        SLOTS,
        K_SCALE,
        V_SCALE,
    )
    options: ClassVar[tuple[OptionSpec, ...]] = (LAYOUT,)
    returns = memory = ("key_cache", "value_cache")
    divides = True

    def refuse(self, inputs: Inputs, options: Options) -> None:
        tokens, heads, depth = inputs["key"].shape
        if inputs["value"].dtype != inputs["key"].dtype:
            raise DtypeError(f"value has dtype {inputs['value'].dtype}, key {inputs['key'].dtype}; pass one dtype")
        shape = tuple(inputs["key_cache"].shape)
        due = (heads, depth) if options["kv_layout"] == "NHD" else (heads, shape[2] if len(shape) == 4 else 0, depth)
        if len(shape) != 4 or shape[-len(due) :] != due or tuple(inputs["value_cache"].shape) != shape:
            raise ShapeError(
                f"key_cache {list(shape)} and value_cache {list(inputs['value_cache'].shape)} are no pages of "
                f"{heads} heads of {depth} as {options['kv_layout']}"
            )
        if inputs["k_scale"].numel() != inputs["v_scale"].numel():
            raise ShapeError("k_scale and v_scale differ in size; pass one value or one for each head for both")
        one_scale(inputs, "k_scale", "v_scale", heads=heads)
        page = shape[1] if options["kv_layout"] == "NHD" else shape[2]
        slots_of(inputs["slot_mapping"], "slot_mapping", shape[0] * page, tokens)

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        tokens = written(inputs["slot_mapping"])
        at = paged(inputs["slot_mapping"][tokens], tuple(inputs["key_cache"].shape), str(options["kv_layout"]))
        heads, depth = at.shape[1:]
        parts: list[Piece] = []
        for name, scale in (("key", "k_scale"), ("value", "v_scale")):
            x = inputs[name][tokens].reshape(-1, depth)
            of_row = per_head(inputs[scale], len(tokens), heads)
            parts.append(Coded(f"{name}_cache", x, of_row, at.reshape(-1, depth)))
        return parts


@register
class ReshapeAndCache(Padded, WritesCodes):
    """Column ``d`` of head ``h`` of a key lies at ``key_cache[page, h, d // X, offset, d mod X]``, X being 16 in vLLM
    (any is admitted, ``C X`` columns); of a value at ``value_cache[page, h, d, offset]``."""

    name = "reshape_and_cache"
    summary = "keys and values divided by their scales into the pages of the older attention kernels"
    source = "vLLM csrc/libtorch_stable/cache_kernels.cu reshape_and_cache_kernel"
    kinds = (Coded,)
    inputs = (
        KEY,
        VALUE,
        TensorSpec("key_cache", Kind.STATE, E4M3, ("B", "H", "C", "P", "X"), "pages of keys before the call"),
        TensorSpec("value_cache", Kind.STATE, E4M3, ("B", "H", "D", "P"), "pages of values before the call"),
        SLOTS,
        K_SCALE,
        V_SCALE,
    )
    returns = memory = ("key_cache", "value_cache")
    divides = True

    def refuse(self, inputs: Inputs, options: Options) -> None:
        blocks, _, chunks, page, width = inputs["key_cache"].shape
        if chunks * width != (depth := inputs["key"].shape[2]):
            raise ShapeError(f"key_cache holds {chunks} times {width} columns, a head has {depth}")
        one_scale(inputs, "k_scale", "v_scale")
        slots_of(inputs["slot_mapping"], "slot_mapping", blocks * page, inputs["key"].shape[0])

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        tokens = written(inputs["slot_mapping"])
        _, heads, chunks, page, width = inputs["key_cache"].shape
        depth = chunks * width
        block, offset = (t.reshape(-1, 1, 1) for t in of_slots(inputs["slot_mapping"][tokens], page))
        head = columns(heads).reshape(1, -1, 1)
        column = columns(depth).reshape(1, 1, -1)
        of_key = (((block * heads + head) * chunks + column // width) * page + offset) * width + column % width
        of_value = ((block * heads + head) * depth + column) * page + offset
        return [
            Coded(
                f"{name}_cache",
                inputs[name][tokens].reshape(-1, depth),
                per_head(inputs[scale], len(tokens), heads),
                at.reshape(-1, depth),
            )
            for name, scale, at in (("key", "k_scale", of_key), ("value", "v_scale", of_value))
        ]


KV_C = TensorSpec("kv_c", Kind.VALUES, WIDE, ("N", "R"), "compressed keys and values; tokens past T are padding")
K_PE = TensorSpec("k_pe", Kind.VALUES, WIDE, ("N", "E"), "rotated columns of the key")


@register
class ConcatAndCacheMla(Padded, WritesCodes):
    """A row of the cache is the R columns of ``kv_c``, then the E of ``k_pe``, all divided by ``scale``."""

    name = "concat_and_cache_mla"
    summary = "compressed and rotated columns side by side, divided by one scale, into pages"
    source = "vLLM csrc/libtorch_stable/cache_kernels.cu concat_and_cache_mla_kernel"
    traits = frozenset({SIDE_BY_SIDE})
    kinds = (Coded,)
    inputs = (
        KV_C,
        K_PE,
        TensorSpec("kv_cache", Kind.STATE, E4M3, ("B", "P", "C"), "pages before the call, C = R + E"),
        SLOTS,
        TensorSpec("scale", Kind.SCALES, F32, None, "multiplies on reading; the writer divides"),
    )
    returns = memory = ("kv_cache",)
    divides = True

    def refuse(self, inputs: Inputs, options: Options) -> None:
        both = inputs["kv_c"].shape[1] + inputs["k_pe"].shape[1]
        if inputs["kv_c"].dtype != inputs["k_pe"].dtype:
            raise DtypeError(f"k_pe has dtype {inputs['k_pe'].dtype}, kv_c {inputs['kv_c'].dtype}; pass one dtype")
        blocks, page, columns = inputs["kv_cache"].shape
        if columns != both:
            raise ShapeError(f"kv_cache has {columns} columns; kv_c and k_pe have {both}")
        one_scale(inputs, "scale")
        slots_of(inputs["slot_mapping"], "slot_mapping", blocks * page, inputs["kv_c"].shape[0])

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        tokens = written(inputs["slot_mapping"])
        x = torch.cat([inputs["kv_c"][tokens], inputs["k_pe"][tokens]], dim=1)
        at = rows(inputs["slot_mapping"][tokens].to(torch.int64) * x.shape[1], columns(x.shape[1]))
        return [Coded("kv_cache", x, decode(inputs["scale"]).reshape(1, 1).expand(len(tokens), 1), at)]


@register
class SetMlaKvBuffer(WritesCodes):
    """Row ``loc[t]`` is the R columns of ``cache_k_nope``, then the E of ``cache_k_rope``. No scale enters: attention
    takes the scale of this cache as 1. Slots are from 0 to S - 1; tokens of slot ``reserved_skip_index`` are not
    written."""

    name = "set_mla_kv_buffer"
    summary = "compressed and rotated columns cast as they are into slots"
    source = "SGLang kernels/ops/kvcache/mla_buffer.py set_mla_kv_buffer_triton_fp8_quant"
    traits = frozenset({SIDE_BY_SIDE})
    kinds = (Coded,)
    inputs = (
        TensorSpec("kv_buffer", Kind.STATE, E4M3, ("S", "1", "C"), "slots before the call, C = R + E"),
        TensorSpec("loc", Kind.SLOTS, INTEGERS, ("T",), "slot of each token"),
        TensorSpec("cache_k_nope", Kind.VALUES, WIDE[:2], ("T", "1", "R"), "compressed keys and values"),
        TensorSpec("cache_k_rope", Kind.VALUES, WIDE[:2], ("T", "1", "E"), "rotated columns of the key"),
    )
    options = (OptionSpec("reserved_skip_index", 0, None, "the slot that is never written; -1: none"),)
    returns = memory = ("kv_buffer",)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        skip = options["reserved_skip_index"]
        if isinstance(skip, bool) or not isinstance(skip, int):
            raise OptionError(f"reserved_skip_index={skip!r} is no slot")
        slots, _, columns = inputs["kv_buffer"].shape
        nope, rope = inputs["cache_k_nope"], inputs["cache_k_rope"]
        if columns != nope.shape[2] + rope.shape[2] or nope.dtype != rope.dtype:
            raise ShapeError(f"kv_buffer has {columns} columns for {nope.shape[2]} and {rope.shape[2]} of one dtype")
        slots_of(inputs["loc"], "loc", slots, len(inputs["loc"]), skip=skip)

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        tokens = torch.nonzero(inputs["loc"] != options["reserved_skip_index"]).flatten()
        x = torch.cat([inputs[name][tokens, 0] for name in ("cache_k_nope", "cache_k_rope")], dim=1)
        at = rows(inputs["loc"][tokens].to(torch.int64) * x.shape[1], columns(x.shape[1]))
        return [Coded("kv_buffer", x, torch.ones(len(tokens), 1, dtype=torch.float64, device="cpu"), at)]


@register
class ConvertFp8(WritesCodes, ReadsCodes):
    """To codes it divides, from codes it multiplies; of ``src`` and the result one is E4M3 and the other is not."""

    name = "convert_fp8"
    summary = "a whole cache to codes of one scale, or back"
    source = "vLLM csrc/libtorch_stable/cache_kernels.cu convert_fp8_kernel"
    kinds = (Coded, Products)
    inputs = (TensorSpec("src", Kind.VALUES, (*WIDE, *E4M3), None, "[pages, ...]: values, or codes"),)
    options = (
        OptionSpec("scale", 1.0, None, "multiplies on reading"),
        OptionSpec("out_dtype", torch.float8_e4m3fn, (*E4M3, *WIDE), "dtype of the result"),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        scale = options["scale"]
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 2.0**-126 <= scale < 2.0**127:
            raise OptionError(f"scale={scale!r} is no positive number of float32")
        if (options["out_dtype"] in E4M3) == (inputs["src"].dtype in E4M3):
            raise DtypeError(f"src has dtype {inputs['src'].dtype}, out_dtype={options['out_dtype']}: one is E4M3")

    def before(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        return {"out": fresh(tuple(inputs["src"].shape), options["out_dtype"])}

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        src = inputs["src"].contiguous().reshape(inputs["src"].shape[0], -1)
        at = columns(src.numel()).reshape(src.shape)
        once = f32(torch.tensor([[float(options["scale"])]], dtype=torch.float64, device="cpu"))
        if src.dtype in E4M3:
            return [Products("out", src, once.expand(src.shape), at)]
        return [Coded("out", src, once.expand(src.shape[0], 1), at)]


# --- FlashInfer: copies by request and position ---------------------------------------------------------------

ANY = (*E4M3, torch.bfloat16, torch.float16)
PAGES = (
    TensorSpec("batch_indices", Kind.IDS, (torch.int32,), ("N",), "request of each token"),
    TensorSpec("positions", Kind.POSITIONS, (torch.int32,), ("N",), "position of each token in its request"),
    TensorSpec("kv_indices", Kind.PAGES, (torch.int32,), ("I",), "pages of the requests, one request after the other"),
    TensorSpec("kv_indptr", Kind.OFFSETS, (torch.int32,), ("L",), "first of its pages for each request, and the end"),
    TensorSpec("kv_last_page_len", Kind.COUNTS, (torch.int32,), None, "tokens in the last page of each request"),
)


def slots_of_requests(inputs: Inputs, page: int) -> Tensor:
    """The slot of each token, int64 ``[N]``."""
    indptr, position = inputs["kv_indptr"].to(torch.int64), inputs["positions"].to(torch.int64)
    first = indptr[inputs["batch_indices"].to(torch.int64)]
    pages = inputs["kv_indices"].to(torch.int64)[first + position // page]
    return pages * page + position % page


def check_requests(inputs: Inputs, pages: int, page: int) -> None:
    """Refuse requests and positions beyond what the tables say."""
    indptr, last, batch = (inputs[n].to(torch.int64) for n in ("kv_indptr", "kv_last_page_len", "batch_indices"))
    requests = len(indptr) - 1
    if requests < 1 or tuple(last.shape) != (requests,):
        raise ShapeError(f"kv_indptr has {len(indptr)} entries and kv_last_page_len {list(last.shape)}: one more")
    counts = indptr.diff()
    if int(indptr[0]) or bool((counts < 0).any()) or int(indptr[-1]) > len(inputs["kv_indices"]):
        raise OptionError(f"kv_indptr {indptr.tolist()} does not rise from 0 to {len(inputs['kv_indices'])}")
    if bool((batch < 0).any()) or bool((batch >= requests).any()):
        raise OptionError(f"batch_indices reach from {int(batch.min())} to {int(batch.max())}; there are {requests}")
    lengths = (counts - 1) * page + last
    position = inputs["positions"].to(torch.int64)
    if bool((position < 0).any()) or bool((position >= lengths[batch]).any()):
        raise OptionError(f"positions {position.tolist()} leave the lengths {lengths.tolist()} of their requests")
    slots_of(slots_of_requests(inputs, page), "kv_indices", pages * page, len(position))


def same_dtype(inputs: Inputs, *names: str) -> None:
    """FlashInfer converts nothing."""
    dtypes = {str(inputs[name].dtype) for name in names}
    if len(dtypes) > 1:
        raise DtypeError(f"{', '.join(names)} have dtypes {', '.join(sorted(dtypes))}; nothing is converted, pass one")


class Requests:
    """Token ``i`` goes to position ``p = positions[i]`` of request ``b = batch_indices[i]``: to page
    ``kv_indices[kv_indptr[b] + p // P]`` at ``p mod P``. Request ``b`` has the pages from ``kv_indptr[b]`` to
    ``kv_indptr[b + 1]``, excluded, of which the last holds ``kv_last_page_len[b]`` tokens: positions lie below that."""


@register
class AppendPagedKvCache(Requests, CacheContract):
    """The caches are ``[pages, P, H, D]`` (NHD) or ``[pages, H, P, D]`` (HND); bits are copied."""

    name = "append_paged_kv_cache"
    summary = "keys and values copied into the pages of their requests"
    source = "FlashInfer include/flashinfer/page.cuh AppendPagedKVCacheKernel"
    kinds = (Copied,)
    inputs = (
        TensorSpec("append_key", Kind.VALUES, ANY, ("N", "H", "D"), "keys, of the dtype of the cache"),
        TensorSpec("append_value", Kind.VALUES, ANY, ("N", "H", "D"), "values"),
        TensorSpec("k_cache", Kind.STATE, ANY, None, "pages of keys before the call"),
        TensorSpec("v_cache", Kind.STATE, ANY, None, "pages of values before the call"),
        *PAGES,
    )
    options = (LAYOUT,)
    returns = memory = ("k_cache", "v_cache")

    def refuse(self, inputs: Inputs, options: Options) -> None:
        same_dtype(inputs, "append_key", "append_value", "k_cache", "v_cache")
        _, heads, depth = inputs["append_key"].shape
        shape = tuple(inputs["k_cache"].shape)
        nhd = options["kv_layout"] == "NHD"
        if (
            len(shape) != 4
            or tuple(inputs["v_cache"].shape) != shape
            or shape[3] != depth
            or (shape[2 if nhd else 1] != heads)
        ):
            raise ShapeError(f"k_cache {list(shape)} : no pages of {heads} heads of {depth} as {options['kv_layout']}")
        check_requests(inputs, shape[0], shape[1 if nhd else 2])

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        shape, layout = tuple(inputs["k_cache"].shape), str(options["kv_layout"])
        at = paged(slots_of_requests(inputs, shape[1 if layout == "NHD" else 2]), shape, layout)
        return [Copied(f"{name[0]}_cache", _bits(inputs[f"append_{name}"]), at) for name in ("key", "value")]


@register
class AppendPagedMlaKvCache(Requests, CacheContract):
    name = "append_paged_mla_kv_cache"
    summary = "compressed and rotated columns copied into the pages of their requests, a cache each"
    source = "FlashInfer include/flashinfer/page.cuh AppendPagedKVMlaCacheKernel"
    kinds = (Copied,)
    inputs = (
        TensorSpec("append_ckv", Kind.VALUES, ANY, ("N", "R"), "compressed keys and values, of the dtype of the cache"),
        TensorSpec("append_kpe", Kind.VALUES, ANY, ("N", "E"), "rotated columns of the key"),
        TensorSpec("ckv_cache", Kind.STATE, ANY, ("B", "P", "R"), "pages before the call"),
        TensorSpec("kpe_cache", Kind.STATE, ANY, ("B", "P", "E"), "pages before the call"),
        *PAGES,
    )
    returns = memory = ("ckv_cache", "kpe_cache")

    def refuse(self, inputs: Inputs, options: Options) -> None:
        same_dtype(inputs, "append_ckv", "append_kpe", "ckv_cache", "kpe_cache")
        check_requests(inputs, *inputs["ckv_cache"].shape[:2])

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        slots = slots_of_requests(inputs, inputs["ckv_cache"].shape[1])
        return [
            Copied(
                f"{name}_cache",
                _bits(inputs[f"append_{name}"]),
                rows(slots * (n := inputs[f"append_{name}"].shape[1]), columns(n)),
            )
            for name in ("ckv", "kpe")
        ]


def _bits(x: Tensor) -> Tensor:
    return flat(x).reshape(x.shape)


# --- scales beside the codes --------------------------------------------------------------------------------


RANK, ROPE, TILE = 512, 64, 128
SCALES_AT, ROPE_AT, ROW = 512, 528, 656
"""Bytes of a row: where its scales and its rotated columns begin, and its length."""
HALF = WIDE[:2]


class RowsOfTiles(CacheContract):
    """Rows of 656 bytes: 512 codes of the compressed columns; at byte 512 four float32 scales, one for each tile of 128
    of them; at byte 528 the 64 rotated columns in 16 bits, copied."""

    kinds = (Quantised, Copied)
    loses = True
    interval = False

    def row_pieces(
        self, name: str, nope: Tensor, rope: Tensor, slot: Tensor, recipes: tuple[Recipe, ...]
    ) -> list[Piece]:
        """The pieces of values ``nope`` ``[T, 512]`` and ``rope`` ``[T, 64]`` (bfloat16 or float16) in the slots
        ``slot`` ``[T]`` of one output."""
        first = slot.to(torch.int64) * ROW
        scales, at_rope = rows(first, SCALES_AT + columns(16)), rows(first, ROPE_AT + columns(2 * ROPE))
        bits = flat(rope).view(torch.uint8).reshape(len(slot), 2 * ROPE)
        return [
            Quantised(name, nope, recipes, rows(first, columns(RANK)), name, scales),
            Copied(name, bits, at_rope),
        ]


@register
class ConcatAndCacheDsMla(Padded, RowsOfTiles):
    name = "concat_and_cache_ds_mla"
    summary = "rows of 656 bytes in pages: codes in tiles of 128, their scales, the rotated columns as they are"
    source = "vLLM csrc/libtorch_stable/cache_kernels.cu concat_and_cache_ds_mla_kernel (fp8_ds_mla)"
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec(
            "kv_c", Kind.VALUES, HALF, ("N", str(RANK)), "compressed keys and values; tokens past T are padding"
        ),
        TensorSpec("k_pe", Kind.VALUES, HALF, ("N", str(ROPE)), "rotated columns of the key"),
        TensorSpec("kv_cache", Kind.STATE, (torch.uint8,), ("B", "P", str(ROW)), "pages before the call"),
        SLOTS,
    )
    options = (
        OptionSpec(
            "ue8m0",
            None,
            (None, False, True),
            "scales rounded up to powers of two, at least 1e-4, as vLLM writes them since PR 49435 (July 2026); False: "
            "amax/448, as releases before; None admits either",
            declares=True,
        ),
    )
    returns = memory = ("kv_cache",)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if inputs["kv_c"].dtype != inputs["k_pe"].dtype:
            raise DtypeError(f"k_pe has dtype {inputs['k_pe'].dtype}, kv_c {inputs['kv_c'].dtype}; pass one dtype")
        blocks, page, _ = inputs["kv_cache"].shape
        slots_of(inputs["slot_mapping"], "slot_mapping", blocks * page, inputs["kv_c"].shape[0])

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        tokens = written(inputs["slot_mapping"])
        newer, older = kv_recipes.VLLM_DS_MLA_UE8M0, kv_recipes.VLLM_DS_MLA
        recipes = {None: (newer, older), True: (newer,), False: (older,)}[options["ue8m0"]]
        kv_c, k_pe, slot = inputs["kv_c"][tokens], inputs["k_pe"][tokens], inputs["slot_mapping"][tokens]
        return self.row_pieces("kv_cache", kv_c, k_pe, slot, recipes)


@register
class QuantizeKCache(RowsOfTiles):
    """A tile of zeros has the scale 0, under which any code stands for 0."""

    name = "quantize_k_cache"
    shapes = {"out": "that of cache_k with 656 bytes for 576 values in the last axis"}
    summary = "rows of 656 bytes of a whole cache: codes in tiles of 128, their scales, the rotated columns as they are"
    source = "SGLang kernels/ops/quantization/dsa_quant_k_cache.py quantize_k_cache"
    inputs = (
        TensorSpec("cache_k", Kind.VALUES, (torch.bfloat16,), ("B", "P", "1", str(RANK + ROPE)), "pages of values"),
    )

    def before(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        return {"out": fresh((*inputs["cache_k"].shape[:3], ROW), torch.uint8)}

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        x = inputs["cache_k"].reshape(-1, RANK + ROPE)
        recipes = kv_recipes.TORCH_K_CACHE, kv_recipes.SGLANG_K_CACHE, kv_recipes.SGLANG_K_CACHE_POSITIVE
        return self.row_pieces("out", x[:, :RANK].contiguous(), x[:, RANK:], columns(len(x)), recipes)


def index_places(slot: Tensor, page: int, depth: int) -> tuple[Tensor, Tensor]:
    """Places, int64, of the codes ``[T, D]`` and of the bytes of their scales ``[T, 4 D/128]`` of each ``slot`` ``[T]``
    in pages of index keys."""
    block, offset = of_slots(slot, page)
    groups = depth // TILE
    start = block * (page * (depth + 4 * groups))
    scales = start + page * depth + offset * 4 * groups
    return rows(start + offset * depth, columns(depth)), rows(scales, columns(4 * groups))


@register
class IndexerKQuantAndCache(Slots, CacheContract):
    """A page is P times D codes, token after token, then P times D/128 float32 scales, token after token: ``[B, P, C]``
    is its size, not its layout. Byte i of a page is its element ``[i // C, i % C]``, whatever the strides are. A kernel
    that needs the bytes of a page side by side raises NotImplementedError where they are not."""

    name = "indexer_k_quant_and_cache"
    summary = "index keys in groups of 128 into pages that hold codes, then scales"
    source = "vLLM csrc/libtorch_stable/cache_kernels.cu indexer_k_quant_and_cache_kernel"
    traits = frozenset({INDEX_PAGES})
    kinds = (Quantised,)
    inputs = (
        TensorSpec(
            "k", Kind.VALUES, HALF, ("T", "D"), "index keys, one for each slot: the kernel takes the tokens of k"
        ),
        TensorSpec("kv_cache", Kind.STATE, (torch.uint8,), ("B", "P", "C"), "pages before the call, C = D + 4 D/128"),
        SLOTS,
    )
    options = (
        OptionSpec("quant_block_size", TILE, (TILE,), "elements that share a scale"),
        OptionSpec("scale_fmt", "", ("", "ue8m0"), "scales rounded up to powers of two"),
    )
    loses = True
    interval = False
    returns = memory = ("kv_cache",)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        tokens, depth = inputs["k"].shape
        blocks, page, row = inputs["kv_cache"].shape
        if depth % TILE or row != depth + 4 * (depth // TILE):
            raise ShapeError(f"kv_cache has rows of {row} bytes; {depth} columns in groups of 128 need whole groups")
        slots_of(inputs["slot_mapping"], "slot_mapping", blocks * page, tokens)

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        tokens = written(inputs["slot_mapping"])
        recipe = kv_recipes.VLLM_INDEXER_UE8M0 if options["scale_fmt"] else kv_recipes.VLLM_INDEXER
        at, scales = index_places(inputs["slot_mapping"][tokens], inputs["kv_cache"].shape[1], inputs["k"].shape[1])
        return [Quantised("kv_cache", inputs["k"][tokens], (recipe,), at, "kv_cache", scales)]


class Nvfp4Pages(CacheContract):
    """``x ~= code * e4m3(byte) * scale``, a byte for each 16 columns; the low nibble of a byte of codes is the even
    column. Codes are ``[pages, P, H, D/2]``, scales ``[pages, P, H, D/16]`` (NHD), or with P and H exchanged (HND)."""

    traits = frozenset({FOUR_BITS})
    kinds = (Quantised,)
    options = (LAYOUT,)
    loses = True
    interval = False
    returns = memory = ("k_cache", "v_cache", "k_scale_cache", "v_scale_cache")

    @abstractmethod
    def placed(self, inputs: Inputs, page: int) -> tuple[Tensor, Tensor]:
        """The tokens that are written and their slots, integers ``[n]`` each, in pages of ``page`` slots."""

    @abstractmethod
    def check_places(self, inputs: Inputs, pages: int, page: int) -> None:
        """Raises ShapeError or OptionError: a token has no place in ``pages`` pages of ``page`` slots."""

    def refuse(self, inputs: Inputs, options: Options) -> None:
        _, heads, depth = inputs["append_key"].shape
        shape = tuple(inputs["k_cache"].shape)
        if depth % 16 or len(shape) != 4:
            raise ShapeError(f"heads of {depth} columns are no blocks of 16, or k_cache {list(shape)} no pages")
        page = shape[1] if options["kv_layout"] == "NHD" else shape[2]
        lead = (shape[0], page, heads) if options["kv_layout"] == "NHD" else (shape[0], heads, page)
        for name in self.memory:
            due = (*lead, depth // (16 if "scale" in name else 2))
            if tuple(inputs[name].shape) != due:
                raise ShapeError(f"{name} has shape {list(inputs[name].shape)}; these pages have {list(due)}")
        one_scale(inputs, "k_scale", "v_scale")
        self.check_places(inputs, shape[0], page)

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        shape, layout = tuple(inputs["k_cache"].shape), str(options["kv_layout"])
        tokens, slot = self.placed(inputs, shape[1 if layout == "NHD" else 2])
        depth, recipes = (
            inputs["append_key"].shape[2],
            (kv_recipes.TORCH_NVFP4_CACHE, kv_recipes.FLASHINFER_NVFP4_CACHE),
        )
        parts: list[Piece] = []
        for name in ("key", "value"):
            codes, scales = f"{name[0]}_cache", f"{name[0]}_scale_cache"
            at, scale_at = (
                paged(slot, tuple(inputs[n].shape), layout).reshape(-1, inputs[n].shape[3]) for n in (codes, scales)
            )
            x, global_scale = inputs[f"append_{name}"][tokens].reshape(-1, depth), inputs[f"{name[0]}_scale"].reshape(1)
            parts.append(Quantised(codes, x, recipes, at, scales, scale_at, global_scale))
        return parts


def _nvfp4_inputs(keys: str, *places: TensorSpec) -> tuple[TensorSpec, ...]:
    """Keys and values, the pages of codes and of scales before the call, where tokens go, and the scales of both."""
    return (
        TensorSpec("append_key", Kind.VALUES, HALF, ("N", "H", "D"), keys),
        TensorSpec("append_value", Kind.VALUES, HALF, ("N", "H", "D"), "values"),
        *(
            TensorSpec(f"{x}_cache", Kind.STATE, (torch.uint8,), None, "pages of codes before the call, D/2 bytes")
            for x in "kv"
        ),
        *(
            TensorSpec(f"{x}_scale_cache", Kind.STATE, E4M3, None, "pages of scales before the call, D/16")
            for x in "kv"
        ),
        *places,
        K_SCALE,
        V_SCALE,
    )


@register
class Nvfp4QuantizeAppendBySlots(Padded, Nvfp4Pages):
    name = "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"
    summary = "keys and values in NVFP4 into pages, the scales of 16 elements in pages of their own"
    source = "FlashInfer page.cuh NVFP4QuantizeAppendPagedKVCacheWithSlotMappingKernel"
    inputs = _nvfp4_inputs("keys; tokens past T are padding", SLOTS)

    def check_places(self, inputs: Inputs, pages: int, page: int) -> None:
        slots_of(inputs["slot_mapping"], "slot_mapping", pages * page, inputs["append_key"].shape[0])

    def placed(self, inputs: Inputs, page: int) -> tuple[Tensor, Tensor]:
        tokens = written(inputs["slot_mapping"])
        return tokens, inputs["slot_mapping"][tokens]


@register
class Nvfp4QuantizeAppendByRequests(Requests, Nvfp4Pages):
    name = "nvfp4_quantize_append_paged_kv_cache"
    summary = "keys and values in NVFP4 into the pages of their requests, scales in pages of their own"
    source = "FlashInfer page.cuh NVFP4QuantizeAppendPagedKVCacheKernel (0.6.18.post1)"
    inputs = _nvfp4_inputs("keys", *PAGES)
    dispatched = False

    def check_places(self, inputs: Inputs, pages: int, page: int) -> None:
        check_requests(inputs, pages, page)

    def placed(self, inputs: Inputs, page: int) -> tuple[Tensor, Tensor]:
        return torch.arange(len(inputs["positions"]), device=inputs["positions"].device), slots_of_requests(
            inputs, page
        )
