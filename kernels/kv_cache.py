"""FP8 and NVFP4 KV caches: writers into pages, which work in place, and readers out of them.

    slot s of pages with P slots: page s // P, offset s mod P; a token whose slot is negative is not written

Writers divide: ``code = sat(float32(x) / scale)``, with one scale or one for each head; readers multiply:
``T(float32(value(code) * scale))``. Tiles of 128 (MLA rows of 656 bytes, index keys) compute scales of their own, an
amax of which NaN is no part. What no token owns stays as it is. Every writer is one launch on a GPU, and none waits
for it: slots and tables are not read on the host, so that one beyond the cache is the caller's mistake.

NaN and infinity: a NaN is coded NaN, an infinity of a given scale 448; a tile with an infinity has an infinite scale.
Not covered: E5M2, two tokens in one slot, pages whose last axis has a stride.

Source: vLLM (csrc/cache_kernels.cu), SGLang (``set_mla_kv_buffer``), FlashInfer (page.cuh).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import checks
from .backends.declaration import Backend, CacheRows, Part, Slots
from .checks import FP8, WIDE
from .errors import DtypeError, LayoutError, OptionError, ShapeError, shown
from .operators import empty
from .routes import route
from .support import RANK, ROPE, ROPE_AT, ROW, SCALES_AT, TILE
from .verbs import verb

LAYOUTS = ("NHD", "HND")
NARROW = (torch.bfloat16, torch.float16)
FLT_MIN = 2.0**-126
INDEX_FLOOR = 1e-4
"""Least amax of an index key, and least scale of a row with powers of two (vLLM csrc cache_kernels.cu, PR 49435)."""
INTEGER = (torch.int32, torch.int64)


# --- what runs after the checks, and on the fast path for repeated calls --------------------------------------------


def _run_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    kv_layout: str = "NHD",
) -> None:
    k, v = _views(key_cache, value_cache, kv_layout)
    _route(key.device).cache_store((Part(key, k, k_scale), Part(value, v, v_scale)), Slots(slot_mapping))


def _run_chunks(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    k, v = key_cache.permute(0, 3, 1, 2, 4), value_cache.permute(0, 3, 1, 2)
    _route(key.device).cache_store((Part(key, k, k_scale), Part(value, v, v_scale)), Slots(slot_mapping))


def _run_mla(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, scale: Tensor) -> None:
    memory, rank = kv_cache.unsqueeze(2), kv_c.shape[1]
    parts = Part(kv_c.unsqueeze(1), memory[..., :rank], scale), Part(k_pe.unsqueeze(1), memory[..., rank:], scale)
    _route(kv_c.device).cache_store(parts, Slots(slot_mapping))


def _run_append(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    k, v = _views(k_cache, v_cache, kv_layout)
    slots = Slots(batch_indices, positions, kv_indices, kv_indptr)
    _route(append_key.device).cache_store((Part(append_key, k), Part(append_value, v)), slots)


def _run_append_mla(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    parts = Part(append_ckv.unsqueeze(1), ckv_cache.unsqueeze(2)), Part(append_kpe.unsqueeze(1), kpe_cache.unsqueeze(2))
    _route(append_ckv.device).cache_store(parts, Slots(batch_indices, positions, kv_indices, kv_indptr))


def _run_ds_mla(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, ue8m0: bool = False) -> None:
    rows, floor = _rows("kv_cache", kv_cache, 3), INDEX_FLOOR if ue8m0 else FLT_MIN
    _route(kv_c.device).cache_tiles(kv_c, k_pe, rows, slot_mapping, 0.0, floor, ue8m0, False)


def _run_index(
    k: Tensor, kv_cache: Tensor, slot_mapping: Tensor, quant_block_size: int = TILE, scale_fmt: str = ""
) -> None:
    rows = _index_keys(kv_cache, k.shape[1])
    _route(k.device).cache_tiles(k, None, rows, slot_mapping, INDEX_FLOOR, 0.0, scale_fmt == "ue8m0", False)


def _run_nvfp4(
    append_key: Tensor,
    append_value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale_cache: Tensor,
    v_scale_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    kv_layout: str = "NHD",
) -> None:
    k, v = _views(k_cache, v_cache, kv_layout)
    parts = Part(append_key, k, k_scale), Part(append_value, v, v_scale)
    _route(append_key.device).cache_nvfp4(parts, _views(k_scale_cache, v_scale_cache, kv_layout), slot_mapping)


def _run_gather(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    scale: Tensor,
    seq_starts: Tensor | None = None,
) -> None:
    factor, rows = scale.reshape(1, 1, 1).expand(*src_cache.shape[:2], 1), (block_table, cu_seq_lens, seq_starts, None)
    _route(dst.device).cache_gather(src_cache, dst, factor, None, CacheRows(*rows))


def _run_copy(
    src_cache: Tensor, dst: Tensor, block_table: Tensor, cu_seq_lens: Tensor, seq_starts: Tensor | None = None
) -> None:
    rows = CacheRows(block_table, cu_seq_lens, seq_starts, None)
    _route(dst.device).cache_gather(src_cache, dst, None, None, rows)


def _run_upconvert(
    src_cache: Tensor, dst: Tensor, block_table: Tensor, seq_lens: Tensor, workspace_starts: Tensor
) -> None:
    codes, scales, rope = _rows("src_cache", src_cache, 3)
    rows = CacheRows(block_table, workspace_starts, None, seq_lens)
    _route(dst.device).cache_gather(codes, dst[:, :RANK], scales, (rope, dst[:, RANK:]), rows)


def _run_gather_index(
    kv_cache: Tensor, dst_k: Tensor, dst_scale: Tensor, block_table: Tensor, cu_seq_lens: Tensor
) -> None:
    codes, scales, _ = _index_keys(kv_cache, dst_k.shape[1])
    rows = CacheRows(block_table, cu_seq_lens, None, None)
    _route(dst_k.device).cache_gather(codes, dst_k, None, (scales.view(torch.uint8), dst_scale), rows)


def _views(k: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Caches as ``[pages, P, H, D]``."""
    return (k, v) if layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))


KEYS = ("key", "value", "slot_mapping")
APPENDED = ("append_key", "append_value", "append_ckv", "append_kpe", "batch_indices", "positions")
GATHERED = ("dst", "dst_k", "dst_scale")
"""What has a row for each token."""


# --- writers of codes under a given scale ----------------------------------------------------------------------------


@verb("quant_cache", writes=("key_cache", "value_cache"), run=_run_flash, rows=KEYS)
def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Keys and values divided by their scales into their slots.

    Parameters
    ----------
    key, value
        ``[N, H, D]`` bf16, f16 or f32, N at least T: rows past T are padding.
    key_cache, value_cache
        E4M3 ``[pages, P, H, D]`` (NHD) or ``[pages, H, P, D]`` (HND) of any strides with the last axis dense.
    slot_mapping
        ``[T]`` int32 or int64.
    k_scale, v_scale
        float32, one value or ``[H]``.

    Raises
    ------
    DeviceError, DtypeError, InputError, ShapeError
    """
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    pages = {name: _paged(name, x, kv_layout, FP8) for name, x in caches.items()}
    _heads({"key": key, "value": value}, pages, slot_mapping)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        checks.dtype(name, scale, torch.float32)
        if scale.numel() not in (1, key.shape[1]):
            raise ShapeError(f"{name} {list(scale.shape)} must hold one value or one for each of {key.shape[1]} heads")
    checks.same_device(key=key, k_scale=k_scale, v_scale=v_scale)
    if is_compiling():
        torch.ops.fp8_kernels.reshape_and_cache_flash(
            key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, kv_layout
        )
        return
    _run_flash(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, kv_layout)


@verb("quant_cache", writes=("key_cache", "value_cache"), run=_run_chunks, rows=KEYS)
def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """:func:`reshape_and_cache_flash` into caches of chunks of ``x`` columns, with one scale each.

    ``key``, ``value``, ``slot_mapping`` and scales as of :func:`reshape_and_cache_flash`; ``k_scale`` and ``v_scale``
    of any shape with one value.

    Parameters
    ----------
    key_cache
        E4M3 ``[pages, H, D/x, P, x]``.
    value_cache
        E4M3 ``[pages, H, D, P]``.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, LayoutError, InputError
    """
    checks.dtype("key_cache", checks.rank("key_cache", key_cache, 5), FP8)
    checks.dtype("value_cache", checks.rank("value_cache", value_cache, 4), FP8)
    depth = key_cache.shape[2] * key_cache.shape[4]
    checks.dtype("key", checks.rank("key", key, 3), *WIDE)
    checks.operand("value", value, tuple(key.shape), "the shape of the keys", key.dtype)
    checks.shape("key", key, (key.shape[0], key_cache.shape[1], depth), "[N, H, D] of key_cache [pages, H, D/x, P, x]")
    checks.shape(
        "value_cache", value_cache, (key_cache.shape[0], *key.shape[1:], key_cache.shape[3]), "[pages, H, D, P]"
    )
    _tokens(slot_mapping, key=key, value=value)
    checks.scalar("k_scale", k_scale)
    checks.scalar("v_scale", v_scale)
    checks.same_device(key=key, key_cache=key_cache, value_cache=value_cache, k_scale=k_scale, v_scale=v_scale)
    _written(key_cache=key_cache, value_cache=value_cache)
    if is_compiling():
        torch.ops.fp8_kernels.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
        return
    _run_chunks(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)


@verb("quant_cache", writes=("kv_cache",), run=_run_mla, rows=("kv_c", "k_pe", "slot_mapping"))
def concat_and_cache_mla(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, scale: Tensor) -> None:
    """Compressed ``kv_c [N, R]`` and rotated ``k_pe [N, E]`` divided by one scale, into E4M3 ``[pages, P, R + E]``.

    ``kv_cache`` ``[pages, P, R + E]``, ``slot_mapping`` ``[T]`` int32 or int64, N at least T; ``scale`` float32 of any
    shape with one value.

    Raises DeviceError, DtypeError, InputError, LayoutError, ShapeError.
    """
    for name, x in (("kv_c", kv_c), ("k_pe", k_pe)):
        checks.dtype(name, checks.rank(name, x, 2), *WIDE)
    checks.dtype("k_pe", k_pe, kv_c.dtype)
    checks.dtype("kv_cache", checks.rank("kv_cache", kv_cache, 3), FP8)
    width = kv_c.shape[1] + k_pe.shape[1]
    checks.shape("kv_cache", kv_cache, (*kv_cache.shape[:2], width), "[pages, P, R + E]")
    _tokens(slot_mapping, kv_c=kv_c, k_pe=k_pe)
    checks.scalar("scale", scale)
    checks.same_device(kv_c=kv_c, kv_cache=kv_cache, scale=scale)
    _written(kv_cache=kv_cache)
    if is_compiling():
        torch.ops.fp8_kernels.concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, scale)
        return
    _run_mla(kv_c, k_pe, kv_cache, slot_mapping, scale)


@verb("quant_cache", writes=("kv_buffer",))
def set_mla_kv_buffer(
    kv_buffer: Tensor, loc: Tensor, cache_k_nope: Tensor, cache_k_rope: Tensor, reserved_skip_index: int = 0
) -> None:
    """``[T, 1, R]`` and ``[T, 1, E]`` (bf16 or f16) cast as they are into slots of E4M3 ``[S, 1, R + E]``.

    ``kv_buffer`` ``[S, 1, R + E]`` E4M3, ``loc`` ``[T]`` int32 or int64, ``cache_k_nope`` ``[T, 1, R]``,
    ``cache_k_rope`` ``[T, 1, E]``.

    A token whose ``loc`` is ``reserved_skip_index`` is not written; -1: every token is.

    Raises DeviceError, DtypeError, InputError, LayoutError, ShapeError.
    """
    for name, x in (("cache_k_nope", cache_k_nope), ("cache_k_rope", cache_k_rope)):
        checks.dtype(name, checks.rank(name, x, 3), *NARROW)
    checks.dtype("cache_k_rope", cache_k_rope, cache_k_nope.dtype)
    checks.dtype("kv_buffer", checks.rank("kv_buffer", kv_buffer, 3), FP8)
    rank = cache_k_nope.shape[2]
    checks.shape("kv_buffer", kv_buffer, (kv_buffer.shape[0], 1, rank + cache_k_rope.shape[2]), "[S, 1, R + E]")
    checks.shape("loc", loc, (cache_k_nope.shape[0],), "a slot for each token")
    checks.shape("cache_k_nope", cache_k_nope, (loc.shape[0], 1, rank), "[T, 1, R]")
    checks.shape("cache_k_rope", cache_k_rope, (loc.shape[0], 1, cache_k_rope.shape[2]), "[T, 1, E]")
    device = _tokens(loc, "loc", cache_k_nope=cache_k_nope, cache_k_rope=cache_k_rope)
    checks.same_device(cache_k_nope=cache_k_nope, kv_buffer=kv_buffer)
    _written(kv_buffer=kv_buffer)
    if is_compiling():
        torch.ops.fp8_kernels.set_mla_kv_buffer(kv_buffer, loc, cache_k_nope, cache_k_rope, reserved_skip_index)
        return
    memory = kv_buffer.unsqueeze(1)
    parts = Part(cache_k_nope, memory[..., :rank]), Part(cache_k_rope, memory[..., rank:])
    _route(device).cache_store(parts, Slots(loc, skip=reserved_skip_index))


@verb("quant_tensor", fake=lambda src, scale=1.0, out_dtype=FP8: torch.empty_like(src, dtype=out_dtype))
def convert_fp8(src: Tensor, scale: float = 1.0, out_dtype: torch.dtype = FP8) -> Tensor:
    """A whole cache to E4M3 (divided by ``scale``), or from it (multiplied) to bf16, f16 or f32.

    ``src`` of any shape, bf16, f16, f32 or E4M3. Returns ``out_dtype`` of the same shape.

    Raises DtypeError, OptionError.
    """
    checks.dtype("src", src, *WIDE, FP8)
    if not 0.0 < scale < float("inf"):
        raise OptionError(f"scale={shown(scale)} is not a positive number")
    if (out_dtype is FP8) == (src.dtype is FP8) or out_dtype not in (*WIDE, FP8):
        raise DtypeError(f"src is {src.dtype} and out_dtype {out_dtype}: one of them must be float8_e4m3fn")
    if is_compiling():
        out: Tensor = torch.ops.fp8_kernels.convert_fp8(src, scale, out_dtype)
        return out
    factor = torch.full((1,), scale, dtype=torch.float32, device=src.device)
    if out_dtype is FP8:
        return route("quant_tensor", src.device).quant_static(src, factor)
    return (src.to(torch.float32) * factor).to(out_dtype)


# --- writers that copy: FlashInfer's ---------------------------------------------------------------------------------


@verb("quant_cache", writes=("k_cache", "v_cache"), run=_run_append, rows=APPENDED, free=("kv_indices",))
def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Keys and values ``[N, H, D]`` copied to ``positions`` of their requests, whose pages the tables name.

    ``append_key`` and ``append_value`` ``[N, H, D]``, ``k_cache`` and ``v_cache`` ``[pages, P, H, D]`` or ``[pages, H,
    P, D]``; int32 ``batch_indices`` ``[N]``, ``positions`` ``[N]``, ``kv_indices`` ``[L]``, ``kv_indptr`` ``[B + 1]``
    and ``kv_last_page_len`` ``[B]``.

    Nothing is converted: caches ``[pages, P, H, D]`` (NHD) or ``[pages, H, P, D]`` (HND) have the dtype of the keys
    (E4M3, bf16 or f16). ``kv_indices[kv_indptr[b]:]`` are the pages of request b; ``kv_last_page_len`` is not read.

    Raises DtypeError, InputError, LayoutError, ShapeError.
    """
    dtypes = (FP8, *NARROW)
    checks.dtype("append_key", checks.rank("append_key", append_key, 3), *dtypes)
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    pages = {name: _paged(name, x, kv_layout, append_key.dtype) for name, x in caches.items()}
    _requests(append_key.shape[0], batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    operands = {"append_key": append_key, "append_value": append_value}
    _heads(operands, pages, batch_indices, "batch_indices", dtypes)
    if is_compiling():
        torch.ops.fp8_kernels.append_paged_kv_cache(
            append_key,
            append_value,
            batch_indices,
            positions,
            k_cache,
            v_cache,
            kv_indices,
            kv_indptr,
            kv_last_page_len,
            kv_layout,
        )
        return
    _run_append(
        append_key,
        append_value,
        batch_indices,
        positions,
        k_cache,
        v_cache,
        kv_indices,
        kv_indptr,
        kv_last_page_len,
        kv_layout,
    )


@verb("quant_cache", writes=("ckv_cache", "kpe_cache"), run=_run_append_mla, rows=APPENDED, free=("kv_indices",))
def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """:func:`append_paged_kv_cache` of ``[N, R]`` and ``[N, E]`` into ``[pages, P, R]`` and ``[pages, P, E]``.

    ``append_ckv`` ``[N, R]`` and ``append_kpe`` ``[N, E]`` E4M3, bf16 or f16, ``ckv_cache`` ``[pages, P, R]`` and
    ``kpe_cache`` ``[pages, P, E]`` of their dtype; ``batch_indices`` ``[N]``, ``positions`` ``[N]``, ``kv_indices``
    ``[L]``, ``kv_indptr`` ``[B + 1]`` and ``kv_last_page_len`` ``[B]`` int32.

    Raises DeviceError, DtypeError, InputError, LayoutError, ShapeError.
    """
    checks.dtype("append_ckv", checks.rank("append_ckv", append_ckv, 2), FP8, *NARROW)
    checks.dtype("append_kpe", checks.rank("append_kpe", append_kpe, 2), append_ckv.dtype)
    for name, x, cache in (("ckv_cache", append_ckv, ckv_cache), ("kpe_cache", append_kpe, kpe_cache)):
        checks.dtype(name, checks.rank(name, cache, 3), x.dtype)
        checks.shape(name, cache, (*ckv_cache.shape[:2], x.shape[1]), "the pages of ckv_cache")
    _requests(append_ckv.shape[0], batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    _tokens(batch_indices, "batch_indices", append_ckv=append_ckv, append_kpe=append_kpe)
    checks.same_device(append_ckv=append_ckv, ckv_cache=ckv_cache, kpe_cache=kpe_cache, kv_indices=kv_indices)
    _written(ckv_cache=ckv_cache, kpe_cache=kpe_cache)
    if is_compiling():
        torch.ops.fp8_kernels.append_paged_mla_kv_cache(
            append_ckv,
            append_kpe,
            batch_indices,
            positions,
            ckv_cache,
            kpe_cache,
            kv_indices,
            kv_indptr,
            kv_last_page_len,
        )
        return
    _run_append_mla(
        append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, kv_last_page_len
    )


# --- writers that compute scales -------------------------------------------------------------------------------------


@verb("quant_cache", writes=("kv_cache",), run=_run_ds_mla, rows=("kv_c", "k_pe", "slot_mapping"))
def concat_and_cache_ds_mla(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, ue8m0: bool = False
) -> None:
    """``kv_c [N, 512]`` in tiles of 128 and ``k_pe [N, 64]`` as it is, into ``uint8 [pages, P, 656]``.

    ``kv_c`` and ``k_pe`` bf16 or f16; ``kv_cache`` ``[pages, P, 656]`` uint8, ``slot_mapping`` ``[T]`` int32 or int64.

    ``scale = max(amax / 448, 2^-126)``; with ``ue8m0`` rounded up to a power of two, and at least 1e-4 before.

    Raises DeviceError, DtypeError, InputError, LayoutError, ShapeError.
    """
    for name, x, width in (("kv_c", kv_c, RANK), ("k_pe", k_pe, ROPE)):
        checks.dtype(name, checks.rank(name, x, 2), *NARROW)
        checks.shape(name, x, (x.shape[0], width), f"[N, {width}]")
    checks.dtype("k_pe", k_pe, kv_c.dtype)
    _rows("kv_cache", kv_cache, 3)
    _tokens(slot_mapping, kv_c=kv_c, k_pe=k_pe)
    checks.same_device(kv_c=kv_c, kv_cache=kv_cache)
    _written(kv_cache=kv_cache)
    if is_compiling():
        torch.ops.fp8_kernels.concat_and_cache_ds_mla(kv_c, k_pe, kv_cache, slot_mapping, ue8m0)
        return
    _run_ds_mla(kv_c, k_pe, kv_cache, slot_mapping, ue8m0)


@verb("quant_cache", fake=lambda x: empty(*x.shape[:3], ROW, like=x, dtype=torch.uint8))
def quantize_k_cache(cache_k: Tensor) -> Tensor:
    """Rows of 656 bytes ``uint8 [pages, P, 1, 656]`` of ``cache_k [pages, P, 1, 576]`` bf16.

    ``scale = amax / 448``, ``code = sat(x * (1 / scale))``; a tile of zeros has the scale and the codes 0.

    Raises DtypeError, InputError, LayoutError, ShapeError.
    """
    checks.dtype("cache_k", checks.rank("cache_k", cache_k, 4), torch.bfloat16)
    checks.shape("cache_k", cache_k, (*cache_k.shape[:2], 1, RANK + ROPE), "[pages, P, 1, 576]")
    if is_compiling():
        out: Tensor = torch.ops.fp8_kernels.quantize_k_cache(cache_k)
        return out
    out = torch.empty((*cache_k.shape[:3], ROW), dtype=torch.uint8, device=cache_k.device)
    x = cache_k.reshape(-1, RANK + ROPE)
    rows = _rows("out", out.view(-1, 1, ROW), 3)
    _route(cache_k.device).cache_tiles(x[:, :RANK], x[:, RANK:], rows, None, 0.0, 0.0, False, True)
    return out


@verb("quant_cache", writes=("kv_cache",), run=_run_index, rows=("k", "slot_mapping"))
def indexer_k_quant_and_cache(
    k: Tensor, kv_cache: Tensor, slot_mapping: Tensor, quant_block_size: int = TILE, scale_fmt: str = ""
) -> None:
    """Index keys ``[N, D]`` (bf16 or f16) in groups of 128 into ``uint8 [pages, P, D + 4 D/128]``.

    ``k`` ``[N, D]``, ``kv_cache`` ``[pages, P, D + 4 D/128]`` uint8, ``slot_mapping`` ``[N]`` int32 or int64.

    A page holds its codes, one key after the other, then their float32 scales: ``max(amax, 1e-4) / 448``, with
    ``scale_fmt="ue8m0"`` rounded up to a power of two.

    Raises DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError.
    """
    checks.dtype("k", checks.rank("k", k, 2), *NARROW)
    if quant_block_size != TILE or scale_fmt not in ("", "ue8m0"):
        raise OptionError(
            f"quant_block_size={shown(quant_block_size)}, scale_fmt={shown(scale_fmt)}: groups of 128, '' or 'ue8m0'"
        )
    _index_keys(kv_cache, k.shape[1])
    _tokens(checks.shape("slot_mapping", slot_mapping, (k.shape[0],), "a slot for each key"), k=k)
    checks.same_device(k=k, kv_cache=kv_cache)
    _written(kv_cache=kv_cache)
    if is_compiling():
        torch.ops.fp8_kernels.indexer_k_quant_and_cache(k, kv_cache, slot_mapping, quant_block_size, scale_fmt)
        return
    _run_index(k, kv_cache, slot_mapping, quant_block_size, scale_fmt)


@verb(
    "quant_cache",
    writes=("k_cache", "v_cache", "k_scale_cache", "v_scale_cache"),
    run=_run_nvfp4,
    rows=(*APPENDED, "slot_mapping"),
)
def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: Tensor,
    append_value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale_cache: Tensor,
    v_scale_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Keys and values ``[N, H, D]`` (bf16 or f16) in NVFP4, blocks of 16, into their slots.

    ``append_key`` and ``append_value`` ``[N, H, D]``, ``slot_mapping`` ``[T]`` int32 or int64; ``k_scale_cache`` and
    ``v_scale_cache`` have the shape of the caches with D/16 columns, ``k_scale`` and ``v_scale`` any shape of one
    value.

    Parameters
    ----------
    k_cache, v_cache
        uint8 ``[pages, P, H, D/2]`` or ``[pages, H, P, D/2]``: two codes a byte, the low nibble is the even column.
    k_scale_cache, v_scale_cache
        E4M3 with D/16 in place of D/2: ``e4m3(amax / (6 * scale))``.
    k_scale, v_scale
        One float32 value each, which multiplies on reading: ``x ~= code * block scale * scale``.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, ShapeError
    """
    checks.dtype("append_key", checks.rank("append_key", append_key, 3), *NARROW)
    depth = checks.multiple("D", append_key.shape[2], 16, "a block has 16 columns")
    memory: dict[str, Tensor] = {}
    for name, cache, dtype, width in (
        ("k_cache", k_cache, torch.uint8, depth // 2),
        ("v_cache", v_cache, torch.uint8, depth // 2),
        ("k_scale_cache", k_scale_cache, FP8, depth // 16),
        ("v_scale_cache", v_scale_cache, FP8, depth // 16),
    ):
        view = _paged(name, cache, kv_layout, dtype)
        due = (*memory.get("k_cache", view).shape[:2], append_key.shape[1], width)
        memory[name] = checks.shape(name, view, due, "pages of D/2 bytes, or of D/16 scales")
    operands = {"append_key": append_key, "append_value": append_value}
    _heads(operands, memory, slot_mapping, dtypes=NARROW, narrow=True)
    checks.scalar("k_scale", k_scale)
    checks.scalar("v_scale", v_scale)
    checks.same_device(append_key=append_key, k_scale=k_scale, v_scale=v_scale)
    if is_compiling():
        torch.ops.fp8_kernels.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            append_key,
            append_value,
            k_cache,
            v_cache,
            k_scale_cache,
            v_scale_cache,
            slot_mapping,
            k_scale,
            v_scale,
            kv_layout,
        )
        return
    _run_nvfp4(
        append_key,
        append_value,
        k_cache,
        v_cache,
        k_scale_cache,
        v_scale_cache,
        slot_mapping,
        k_scale,
        v_scale,
        kv_layout,
    )


# --- readers ---------------------------------------------------------------------------------------------------------


@verb("quant_cache", writes=("dst",), run=_run_gather, rows=GATHERED)
def gather_and_maybe_dequant_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    scale: Tensor,
    seq_starts: Tensor | None = None,
) -> None:
    """Rows of requests out of E4M3 ``[pages, P, C]`` times one scale, into ``dst [N, C]`` bf16, f16 or f32.

    ``src_cache`` ``[pages, P, C]``, ``block_table`` ``[B, L]``, ``cu_seq_lens`` ``[B + 1]`` and ``seq_starts`` ``[B]``
    int32; ``scale`` float32 of any shape with one value.

    Request b fills rows ``cu_seq_lens[b]`` to ``cu_seq_lens[b + 1]`` from token ``seq_starts[b]`` (0 without) of its
    pages ``block_table[b]`` (int32); rows behind the last request stay.

    Raises DeviceError, DtypeError, InputError, LayoutError, ShapeError.
    """
    checks.dtype("src_cache", checks.rank("src_cache", src_cache, 3), FP8)
    checks.dtype("dst", checks.rank("dst", dst, 2), *WIDE)
    outputs = (("dst", dst, src_cache.shape[2]),)
    _gathered({"src_cache": src_cache}, outputs, block_table, {"cu_seq_lens": cu_seq_lens}, seq_starts)
    checks.scalar("scale", scale)
    checks.same_device(src_cache=src_cache, scale=scale)
    if is_compiling():
        torch.ops.fp8_kernels.gather_and_maybe_dequant_cache(
            src_cache, dst, block_table, cu_seq_lens, scale, seq_starts
        )
        return
    _run_gather(src_cache, dst, block_table, cu_seq_lens, scale, seq_starts)


@verb("quant_cache", writes=("dst",), run=_run_copy, rows=GATHERED)
def cp_gather_cache(
    src_cache: Tensor, dst: Tensor, block_table: Tensor, cu_seq_lens: Tensor, seq_starts: Tensor | None = None
) -> None:
    """:func:`gather_and_maybe_dequant_cache` of rows as they are, of any dtype of 1, 2 or 4 bytes.

    ``dst`` ``[N, C]`` of the dtype of ``src_cache`` ``[pages, P, C]``; ``block_table`` ``[B, L]``, ``cu_seq_lens`` ``[B
    + 1]`` and ``seq_starts`` ``[B]`` int32.

    Raises DtypeError, InputError, LayoutError, ShapeError.
    """
    checks.dtype("src_cache", checks.rank("src_cache", src_cache, 3), FP8, torch.uint8, *WIDE)
    checks.dtype("dst", checks.rank("dst", dst, 2), src_cache.dtype)
    outputs = (("dst", dst, src_cache.shape[2]),)
    _gathered({"src_cache": src_cache}, outputs, block_table, {"cu_seq_lens": cu_seq_lens}, seq_starts)
    if is_compiling():
        torch.ops.fp8_kernels.cp_gather_cache(src_cache, dst, block_table, cu_seq_lens, seq_starts)
        return
    _run_copy(src_cache, dst, block_table, cu_seq_lens, seq_starts)


@verb("quant_cache", writes=("dst",), run=_run_upconvert, rows=GATHERED)
def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: Tensor, dst: Tensor, block_table: Tensor, seq_lens: Tensor, workspace_starts: Tensor
) -> None:
    """Rows of 656 bytes of requests, dequantised tile by tile into ``dst [N, 576]`` bf16, rotated columns as they are.

    ``src_cache`` ``[pages, P, 656]`` uint8, ``block_table`` ``[B, L]`` int32.

    ``seq_lens [B]`` int32 rows at ``workspace_starts [B]``, one request behind the other; rows behind them stay (vLLM's
    kernel gives them to the last request).

    Raises DtypeError, InputError, LayoutError, ShapeError.
    """
    codes, _, _ = _rows("src_cache", src_cache, 3)
    checks.dtype("dst", checks.rank("dst", dst, 2), torch.bfloat16)
    outputs, starts = (("dst", dst, RANK + ROPE),), {"workspace_starts": workspace_starts}
    _gathered({"src_cache": codes}, outputs, block_table, starts, None, seq_lens)
    if is_compiling():
        torch.ops.fp8_kernels.cp_gather_and_upconvert_fp8_kv_cache(
            src_cache, dst, block_table, seq_lens, workspace_starts
        )
        return
    _run_upconvert(src_cache, dst, block_table, seq_lens, workspace_starts)


@verb("quant_cache", fake=lambda x: empty(*x.shape[:3], RANK + ROPE, like=x, dtype=torch.bfloat16))
def dequantize_k_cache(quant_k_cache: Tensor) -> Tensor:
    """``[pages, P, 1, 576]`` bf16 of rows of 656 bytes ``uint8 [pages, P, 1, 656]``; see :func:`quantize_k_cache`.

    ``quant_k_cache`` ``[pages, P, 1, 656]``.

    Raises DtypeError, InputError, LayoutError, ShapeError.
    """
    checks.dtype("quant_k_cache", checks.rank("quant_k_cache", quant_k_cache, 4), torch.uint8)
    checks.shape("quant_k_cache", quant_k_cache, (*quant_k_cache.shape[:2], 1, ROW), "[pages, P, 1, 656]")
    if is_compiling():
        out: Tensor = torch.ops.fp8_kernels.dequantize_k_cache(quant_k_cache)
        return out
    shape = (*quant_k_cache.shape[:3], RANK + ROPE)
    out = torch.empty(shape, dtype=torch.bfloat16, device=quant_k_cache.device)
    codes, scales, rope = _rows("quant_k_cache", quant_k_cache.reshape(-1, 1, ROW), 3)
    flat = out.view(-1, RANK + ROPE)
    _route(out.device).cache_gather(codes, flat[:, :RANK], scales, (rope, flat[:, RANK:]), None)
    return out


@verb("quant_cache", writes=("dst_k", "dst_scale"), run=_run_gather_index, rows=GATHERED)
def cp_gather_indexer_k_quant_cache(
    kv_cache: Tensor, dst_k: Tensor, dst_scale: Tensor, block_table: Tensor, cu_seq_lens: Tensor
) -> None:
    """Index keys of requests as they are: codes into ``dst_k [N, D]`` uint8, scales into ``dst_scale [N, 4 D/128]``.

    ``kv_cache`` ``[pages, P, D + 4 D/128]`` uint8, ``block_table`` ``[B, L]`` and ``cu_seq_lens`` ``[B + 1]`` int32.

    Raises DtypeError, InputError, LayoutError, ShapeError.
    """
    checks.dtype("dst_k", checks.rank("dst_k", dst_k, 2), torch.uint8)
    checks.dtype("dst_scale", checks.rank("dst_scale", dst_scale, 2), torch.uint8)
    depth = dst_k.shape[1]
    codes, _, _ = _index_keys(kv_cache, depth)
    outputs = ("dst_k", dst_k, depth), ("dst_scale", dst_scale, depth // TILE * 4)
    _gathered({"kv_cache": codes}, outputs, block_table, {"cu_seq_lens": cu_seq_lens}, None)
    if is_compiling():
        torch.ops.fp8_kernels.cp_gather_indexer_k_quant_cache(kv_cache, dst_k, dst_scale, block_table, cu_seq_lens)
        return
    _run_gather_index(kv_cache, dst_k, dst_scale, block_table, cu_seq_lens)


# --- checks and views ------------------------------------------------------------------------------------------------


def _route(device: torch.device) -> Backend:
    return route("quant_cache", device)


def _written(**caches: Tensor) -> None:
    for name, x in caches.items():
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise LayoutError(f"{name} has strides {x.stride()}; its last axis must be dense")
        checks.disjoint(name, checks.writable(name, x))


def _tokens(slot: Tensor, slots: str = "slot_mapping", **operands: Tensor) -> torch.device:
    """Operands of the same tokens, at least as many as have slots; ``slots`` is the name of these in errors."""
    checks.dtype(slots, checks.rank(slots, slot, 1), *INTEGER)
    counts = {name: x.shape[0] for name, x in operands.items()}
    if len(set(counts.values())) > 1 or min(counts.values()) < slot.shape[0]:
        rows = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ShapeError(f"rows of tokens: {rows}, for {slot.shape[0]} slots of {slots}; pass a row for each slot")
    return checks.same_device(**operands, **{slots: slot})


def _paged(name: str, cache: Tensor, layout: str, dtype: torch.dtype) -> Tensor:
    """A cache as ``[pages, P, H, D]``, whatever its layout."""
    if layout not in LAYOUTS:
        raise OptionError(f"kv_layout={shown(layout)}: there are {', '.join(LAYOUTS)}")
    checks.dtype(name, checks.rank(name, cache, 4), dtype)
    _written(**{name: cache})
    return cache if layout == "NHD" else cache.transpose(1, 2)


def _heads(
    operands: dict[str, Tensor],
    pages: dict[str, Tensor],
    slot: Tensor,
    slots: str = "slot_mapping",
    dtypes: tuple[torch.dtype, ...] = WIDE,
    *,
    narrow: bool = False,
) -> torch.device:
    """Keys and values of one dtype and shape, and pages for their heads; each by its name."""
    (k_name, key), (v_name, value) = operands.items()
    checks.dtype(k_name, checks.rank(k_name, key, 3), *dtypes)
    checks.dtype(v_name, checks.rank(v_name, value, 3), key.dtype)
    checks.shape(v_name, value, tuple(key.shape), f"the shape of {k_name}")
    if not narrow:
        due = (*next(iter(pages.values())).shape[:2], *key.shape[1:])
        for name, cache in pages.items():
            checks.shape(name, cache, due, f"[pages, P, H, D] of the heads of {k_name}")
    device = _tokens(slot, slots, **operands)
    checks.same_device(**{k_name: key}, **pages)
    return device


def _requests(tokens: int, batch: Tensor, positions: Tensor, indices: Tensor, indptr: Tensor, last: Tensor) -> None:
    """Tables of pages, and a request and a position of each token."""
    for name, x in (("batch_indices", batch), ("positions", positions)):
        checks.dtype(name, checks.shape(name, x, (tokens,), "one for each token"), torch.int32)
    for name, x in (("kv_indices", indices), ("kv_indptr", indptr), ("kv_last_page_len", last)):
        checks.dtype(name, checks.rank(name, x, 1), torch.int32)
    checks.shape("kv_last_page_len", last, (indptr.shape[0] - 1,), "one for each request")
    tables = {"kv_indices": indices, "kv_indptr": indptr, "kv_last_page_len": last}
    checks.same_device(batch_indices=batch, positions=positions, **tables)


def _rows(name: str, cache: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and rotated columns of rows of 656 bytes."""
    checks.dtype(name, checks.rank(name, cache, rank), torch.uint8)
    checks.shape(name, cache, (*cache.shape[:-1], ROW), "rows of 656 bytes")
    strides = cache.stride()
    if not is_compiling() and (strides[-1] != 1 or any(s % 4 for s in strides[:-1]) or cache.storage_offset() % 4):
        raise LayoutError(f"{name} has strides {cache.stride()}; rows must be dense and begin at multiples of 4 bytes")
    scales, rope = cache.view(torch.float32), cache.view(torch.int16)
    return cache[..., :RANK], scales[..., SCALES_AT // 4 : ROPE_AT // 4], rope[..., ROPE_AT // 2 :]


def _index_keys(cache: Tensor, depth: int) -> tuple[Tensor, Tensor, None]:
    """Codes and scales of pages of index keys."""
    checks.dtype("kv_cache", checks.rank("kv_cache", cache, 3), torch.uint8)
    checks.multiple("D", depth, TILE, "a group has 128 columns")
    blocks, page, groups = *cache.shape[:2], depth // TILE
    checks.nonempty("kv_cache", cache, 0, 1, 2)
    checks.shape("kv_cache", cache, (blocks, page, depth + 4 * groups), "[pages, P, D + 4 D/128]")
    dense = is_compiling() or cache[0].is_contiguous()
    if not dense or not is_compiling() and (cache.stride(0) % 4 or cache.storage_offset() % 4):
        raise LayoutError(f"kv_cache has strides {cache.stride()}; a page must be dense and begin at a multiple of 4")
    flat = cache.flatten(1)
    codes, scales = flat[:, : page * depth], flat[:, page * depth :].view(torch.float32)
    return codes.view(blocks, page, depth), scales.view(blocks, page, groups), None


def _gathered(
    source: dict[str, Tensor],
    outputs: tuple[tuple[str, Tensor, int], ...],
    table: Tensor,
    first_rows: dict[str, Tensor],
    seq_starts: Tensor | None,
    lens: Tensor | None = None,
) -> None:
    """Which rows go where: the first rows have an end too unless ``lens`` are given; tensors by their names."""
    for name, out, width in outputs:
        checks.output(name, out, (outputs[0][1].shape[0], width), "rows of the destination", out.dtype)
    checks.dtype("block_table", checks.rank("block_table", table, 2), torch.int32)
    requests = table.shape[0]
    for name, x in first_rows.items():
        checks.operand(name, x, (requests + (lens is None),), "the first row of each request", torch.int32)
    for name, of_request in (("seq_starts", seq_starts), ("seq_lens", lens)):
        if of_request is not None:
            checks.operand(name, of_request, (requests,), "one for each request", torch.int32)
    named = {name: out for name, out, _ in outputs}
    checks.same_device(**source, block_table=table, **first_rows, seq_starts=seq_starts, seq_lens=lens, **named)
