"""Contracts that write codes of a given scale into a cache, or bits as they come.

    slot s of pages with P slots: page s // P, offset s mod P; a negative slot belongs to a token that is not written

vLLM divides: ``code = e4m3(float32(x) / scale)``, one scale or one for each head, k and v apart. SGLang's MLA writer
casts without a scale and skips one slot (0) in place of negative ones. FlashInfer copies: token i of request
``batch_indices[i]`` goes to ``positions[i]`` of that request, whose pages are ``kv_indices[kv_indptr[b]:]``.

Sources: vLLM csrc/libtorch_stable/cache_kernels.cu @00eb0c8 and quantization/w8a8/fp8/nvidia/quant_utils.cuh; SGLang
kernels/ops/kvcache/mla_buffer.py (0.5.23); FlashInfer include/flashinfer/page.cuh (0.6.18.post1).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import DtypeError, OptionError, ShapeError
from oracle.numbers.formats import decode
from oracle.numbers.quantize import WIDE
from oracle.numbers.rounding import f32
from oracle.routines.base import E4M3, F32, INTEGERS, Inputs, Options, OptionSpec, TensorSpec, register
from oracle.routines.kv_cache.contract import (
    CacheContract,
    Coded,
    Copied,
    Piece,
    Products,
    flat,
    fresh,
    one_scale,
    slots_of,
)

LAYOUTS = ("NHD", "HND")
LAYOUT = OptionSpec("kv_layout", LAYOUTS[0], LAYOUTS, "[pages, P, H, D], or [pages, H, P, D]")
SLOTS = TensorSpec("slot_mapping", INTEGERS, ("T",), "slot of each token, negative where it is not written")
KEY = TensorSpec("key", WIDE, ("N", "H", "D"), "keys; tokens past T are padding")
VALUE = TensorSpec("value", WIDE, ("N", "H", "D"), "values")
K_SCALE, V_SCALE = (TensorSpec(f"{x}_scale", F32, None, "multiplies on reading; the writer divides") for x in "kv")


def rows(at: Tensor, *steps: Tensor) -> Tensor:
    """Places ``[R, K]``: the first axis of each row, and what the columns add."""
    return at.reshape(-1, 1) + sum(steps[1:], steps[0]).reshape(1, -1)


def of_slots(slot: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Page and offset of each slot."""
    slot = slot.to(torch.int64)
    return slot // page, slot % page


def paged(slot: Tensor, shape: tuple[int, ...], layout: str) -> Tensor:
    """Places ``[T, H, D]`` of heads in pages of one of the two layouts."""
    (_, page, heads, depth) = shape if layout == "NHD" else (shape[0], shape[2], shape[1], shape[3])
    block, offset = (t.reshape(-1, 1, 1) for t in of_slots(slot, page))
    head = torch.arange(heads, device="cpu").reshape(1, -1, 1)
    column = torch.arange(depth, device="cpu").reshape(1, 1, -1)
    if layout == "NHD":
        return ((block * page + offset) * heads + head) * depth + column
    return ((block * heads + head) * page + offset) * depth + column


def per_head(scale: Tensor, tokens: int, heads: int) -> Tensor:
    """The scale of every row ``[T * H, 1]``, float64."""
    return decode(scale).flatten().expand(heads).repeat(tokens).reshape(-1, 1)


def written(slot_mapping: Tensor) -> Tensor:
    """Which tokens have a slot."""
    return torch.nonzero(slot_mapping >= 0).flatten()


@register
class ReshapeAndCacheFlash(CacheContract):
    name = "reshape_and_cache_flash"
    summary = "keys and values divided by their scales into pages, one scale or one for each head"
    source = "vLLM csrc/libtorch_stable/cache_kernels.cu reshape_and_cache_flash_kernel"
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        KEY, VALUE, TensorSpec("key_cache", E4M3, None, "pages of keys before the call"),
        TensorSpec("value_cache", E4M3, None, "pages of values before the call"), SLOTS, K_SCALE, V_SCALE,
    )  # fmt: skip
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
        kept = written(inputs["slot_mapping"])
        at = paged(inputs["slot_mapping"][kept], tuple(inputs["key_cache"].shape), str(options["kv_layout"]))
        heads, depth = at.shape[1:]
        made: list[Piece] = []
        for name, scale in (("key", "k_scale"), ("value", "v_scale")):
            x = inputs[name][kept].reshape(-1, depth)
            of_row = per_head(inputs[scale], len(kept), heads)
            made.append(Coded(f"{name}_cache", x, of_row, at.reshape(-1, depth)))
        return made


@register
class ReshapeAndCache(CacheContract):
    """The key cache has x = 16 codes of a head side by side, then the slots of the page; the value cache the slots."""

    name = "reshape_and_cache"
    summary = "keys and values divided by their scales into the pages of the older attention kernels"
    source = "vLLM csrc/libtorch_stable/cache_kernels.cu reshape_and_cache_kernel"
    inputs = (
        KEY, VALUE, TensorSpec("key_cache", E4M3, ("B", "H", "C", "P", "X"), "pages of keys before the call"),
        TensorSpec("value_cache", E4M3, ("B", "H", "D", "P"), "pages of values before the call"), SLOTS,
        K_SCALE, V_SCALE,
    )  # fmt: skip
    returns = memory = ("key_cache", "value_cache")
    divides = True

    def refuse(self, inputs: Inputs, options: Options) -> None:
        blocks, _, chunks, page, width = inputs["key_cache"].shape
        if chunks * width != (depth := inputs["key"].shape[2]):
            raise ShapeError(f"key_cache holds {chunks} times {width} columns, a head has {depth}")
        one_scale(inputs, "k_scale", "v_scale")
        slots_of(inputs["slot_mapping"], "slot_mapping", blocks * page, inputs["key"].shape[0])

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        kept = written(inputs["slot_mapping"])
        _, heads, chunks, page, width = inputs["key_cache"].shape
        depth = chunks * width
        block, offset = (t.reshape(-1, 1, 1) for t in of_slots(inputs["slot_mapping"][kept], page))
        head = torch.arange(heads, device="cpu").reshape(1, -1, 1)
        column = torch.arange(depth, device="cpu").reshape(1, 1, -1)
        of_key = (((block * heads + head) * chunks + column // width) * page + offset) * width + column % width
        of_value = ((block * heads + head) * depth + column) * page + offset
        return [
            Coded(f"{name}_cache", inputs[name][kept].reshape(-1, depth),
                  per_head(inputs[scale], len(kept), heads), at.reshape(-1, depth))
            for name, scale, at in (("key", "k_scale", of_key), ("value", "v_scale", of_value))
        ]  # fmt: skip


KV_C = TensorSpec("kv_c", WIDE, ("N", "R"), "compressed keys and values; tokens past T are padding")
K_PE = TensorSpec("k_pe", WIDE, ("N", "E"), "rotated columns of the key")


@register
class ConcatAndCacheMla(CacheContract):
    name = "concat_and_cache_mla"
    summary = "compressed and rotated columns side by side, divided by one scale, into pages"
    source = "vLLM csrc/libtorch_stable/cache_kernels.cu concat_and_cache_mla_kernel"
    inputs = (
        KV_C, K_PE, TensorSpec("kv_cache", E4M3, ("B", "P", "C"), "pages before the call, C = R + E"), SLOTS,
        TensorSpec("scale", F32, None, "multiplies on reading; the writer divides"),
    )  # fmt: skip
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
        kept = written(inputs["slot_mapping"])
        x = torch.cat([inputs["kv_c"][kept], inputs["k_pe"][kept]], dim=1)
        at = rows(inputs["slot_mapping"][kept].to(torch.int64) * x.shape[1], torch.arange(x.shape[1], device="cpu"))
        return [Coded("kv_cache", x, decode(inputs["scale"]).reshape(1, 1).expand(len(kept), 1), at)]


@register
class SetMlaKvBuffer(CacheContract):
    """No scale enters: attention takes the scale of this cache as 1. Slots are not negative; one of them is skipped."""

    name = "set_mla_kv_buffer"
    summary = "compressed and rotated columns cast as they are into slots"
    source = "SGLang kernels/ops/kvcache/mla_buffer.py set_mla_kv_buffer_triton_fp8_quant"
    inputs = (
        TensorSpec("kv_buffer", E4M3, ("S", "1", "C"), "slots before the call, C = R + E"),
        TensorSpec("loc", INTEGERS, ("T",), "slot of each token"),
        TensorSpec("cache_k_nope", WIDE[:2], ("T", "1", "R"), "compressed keys and values"),
        TensorSpec("cache_k_rope", WIDE[:2], ("T", "1", "E"), "rotated columns of the key"),
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
        kept = torch.nonzero(inputs["loc"] != options["reserved_skip_index"]).flatten()
        x = torch.cat([inputs[name][kept, 0] for name in ("cache_k_nope", "cache_k_rope")], dim=1)
        at = rows(inputs["loc"][kept].to(torch.int64) * x.shape[1], torch.arange(x.shape[1], device="cpu"))
        return [Coded("kv_buffer", x, torch.ones(len(kept), 1, dtype=torch.float64, device="cpu"), at)]


@register
class ConvertFp8(CacheContract):
    """To codes it divides, from codes it multiplies."""

    name = "convert_fp8"
    summary = "a whole cache to codes of one scale, or back"
    source = "vLLM csrc/libtorch_stable/cache_kernels.cu convert_fp8_kernel"
    inputs = (TensorSpec("src", (*WIDE, *E4M3), None, "[pages, ...]: values, or codes"),)
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
        at = torch.arange(src.numel(), device="cpu").reshape(src.shape)
        once = f32(torch.tensor([[float(options["scale"])]], dtype=torch.float64, device="cpu"))
        if src.dtype in E4M3:
            return [Products("out", src, once.expand(src.shape), at)]
        return [Coded("out", src, once.expand(src.shape[0], 1), at)]


# --- FlashInfer: copies by request and position ---------------------------------------------------------------

ANY = (*E4M3, torch.bfloat16, torch.float16)
PAGES = (
    TensorSpec("batch_indices", (torch.int32,), ("N",), "request of each token"),
    TensorSpec("positions", (torch.int32,), ("N",), "position of each token in its request"),
    TensorSpec("kv_indices", (torch.int32,), ("I",), "pages of the requests, one request after the other"),
    TensorSpec("kv_indptr", (torch.int32,), ("L",), "first of its pages for each request, and the end"),
    TensorSpec("kv_last_page_len", (torch.int32,), None, "tokens in the last page of each request"),
)


def slots_of_requests(inputs: Inputs, page: int) -> Tensor:
    """The slot of each token."""
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


@register
class AppendPagedKvCache(CacheContract):
    name = "append_paged_kv_cache"
    summary = "keys and values copied into the pages of their requests"
    source = "FlashInfer include/flashinfer/page.cuh AppendPagedKVCacheKernel"
    inputs = (
        TensorSpec("append_key", ANY, ("N", "H", "D"), "keys, of the dtype of the cache"),
        TensorSpec("append_value", ANY, ("N", "H", "D"), "values"),
        TensorSpec("k_cache", ANY, None, "pages of keys before the call"),
        TensorSpec("v_cache", ANY, None, "pages of values before the call"),
        *PAGES,
    )
    options = (LAYOUT,)
    returns = memory = ("k_cache", "v_cache")

    def refuse(self, inputs: Inputs, options: Options) -> None:
        same_dtype(inputs, "append_key", "append_value", "k_cache", "v_cache")
        _, heads, depth = inputs["append_key"].shape
        shape = tuple(inputs["k_cache"].shape)
        nhd = options["kv_layout"] == "NHD"
        if len(shape) != 4 or tuple(inputs["v_cache"].shape) != shape or shape[3] != depth or (
            shape[2 if nhd else 1] != heads
        ):
            raise ShapeError(f"k_cache {list(shape)} : no pages of {heads} heads of {depth} as {options['kv_layout']}")
        check_requests(inputs, shape[0], shape[1 if nhd else 2])

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        shape, layout = tuple(inputs["k_cache"].shape), str(options["kv_layout"])
        at = paged(slots_of_requests(inputs, shape[1 if layout == "NHD" else 2]), shape, layout)
        return [Copied(f"{name[0]}_cache", _bits(inputs[f"append_{name}"]), at) for name in ("key", "value")]


@register
class AppendPagedMlaKvCache(CacheContract):
    name = "append_paged_mla_kv_cache"
    summary = "compressed and rotated columns copied into the pages of their requests, a cache each"
    source = "FlashInfer include/flashinfer/page.cuh AppendPagedKVMlaCacheKernel"
    inputs = (
        TensorSpec("append_ckv", ANY, ("N", "R"), "compressed keys and values, of the dtype of the cache"),
        TensorSpec("append_kpe", ANY, ("N", "E"), "rotated columns of the key"),
        TensorSpec("ckv_cache", ANY, ("B", "P", "R"), "pages before the call"),
        TensorSpec("kpe_cache", ANY, ("B", "P", "E"), "pages before the call"),
        *PAGES,
    )
    returns = memory = ("ckv_cache", "kpe_cache")

    def refuse(self, inputs: Inputs, options: Options) -> None:
        same_dtype(inputs, "append_ckv", "append_kpe", "ckv_cache", "kpe_cache")
        check_requests(inputs, *inputs["ckv_cache"].shape[:2])

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        slots = slots_of_requests(inputs, inputs["ckv_cache"].shape[1])
        return [
            Copied(f"{name}_cache", _bits(inputs[f"append_{name}"]),
                   rows(slots * (n := inputs[f"append_{name}"].shape[1]), torch.arange(n, device="cpu")))
            for name in ("ckv", "kpe")
        ]  # fmt: skip


def _bits(x: Tensor) -> Tensor:
    return flat(x).reshape(x.shape)
