"""Attention over an FP8 cache: FlashAttention-3 with pages, FlashInfer's prefill of one sequence, of ragged and of
paged ones, FlashMLA's sparse decode.

Query head ``h`` of ``H`` reads KV head ``h // (H / G)``; a score is a dot product times ``softmax_scale`` and the
scales of query and key. The libraries round the weights of keys to E4M3 where queries are E4M3; plain torch does not.

NaN in a query, or in a key that it sees, makes its row NaN; NaN in a value makes that column NaN for its head. In
slots that no key uses FlashAttention-3 multiplies values by 0, so that a NaN there reaches the output
(`docs/findings.md`): an engine writes finite codes into new pages.
Source: vllm-project/flash-attention ``hopper/``, FlashInfer ``single_prefill_with_kv_cache``, FlashMLA
``flash_mla_with_kvcache``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import checks
from .adapters import by_name
from .backends.declaration import Attended, Batched, OfHeads
from .checks import FP8
from .errors import LayoutError, OptionError, ShapeError, shown
from .operators import empty
from .routes import dtype_name, route
from .support import RANK, ROPE, ROW
from .verbs import verb

MOST_SPLITS, WIDEST = 256, 256
"""FlashAttention-3's limits: blocks that share the keys of a row, and elements of a head."""


# --- what an operator returns, without values ----------------------------------------------------------------------


def _fa3_fake(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _depth = q.shape
    out = empty(batch, queries, heads, v.shape[3], like=q, dtype=torch.bfloat16)
    return out, empty(batch, heads, queries, like=q, dtype=torch.float32)


def _prefill_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    c: Tensor | None,
    o_dtype: torch.dtype,
    *_: object,
) -> tuple[Tensor, Tensor]:
    return empty(*q.shape, like=q, dtype=o_dtype), empty(*q.shape[:2], like=q, dtype=torch.float32)


def _latent_fake(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _depth = q.shape
    out = empty(batch, queries, heads, RANK, like=q, dtype=torch.bfloat16)
    return out, empty(batch, heads, queries, like=q, dtype=torch.float32)


# --- checks that several verbs share ---------------------------------------------------------------------------------


def _head(name: str, depth: int) -> None:
    if depth % 16 or not 0 < depth <= WIDEST:
        raise ShapeError(f"{name} has head dim {depth}; it takes multiples of 16 up to {WIDEST}")


def _group(heads: int, of_keys: int) -> None:
    if of_keys == 0 or heads == 0 or heads % of_keys:
        raise ShapeError(f"q has {heads} heads, no multiple of the {of_keys} KV heads of k")


def _scale(name: str, value: float | None, depth: int) -> float:
    return depth**-0.5 if value is None else checks.number(name, value)


# --- the verbs -----------------------------------------------------------------------------------------------------


@verb("attention", adapter=by_name("out", "softmax_lse"), fake=_fa3_fake)
def mha_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    s_aux: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    num_splits: int = 1,
    check: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Prefill, decode and extension over sequences of one number of queries: FlashAttention-3's forward pass.

    The last query of a sequence stands at its last key. It sees the keys from ``window_size_left`` before its place to
    ``window_size_right`` after it (-1: no limit); ``is_causal`` sets the right one to 0. A row without keys gives 0,
    and -inf as log-sum-exp.

    Parameters
    ----------
    q
        ``[B, S, H, D]`` E4M3.
    k, v
        ``[B, N, G, D]`` and ``[B, N, G, V]`` E4M3; with ``page_table`` the cache ``[C, N, G, D]`` and ``[C, N, G, V]``,
        pages of N tokens.
    q_descale, k_descale, v_descale
        ``[B, G]`` float32, the scales of each sequence and KV head, positive and finite; None: 1.
    seqused_k
        ``[B]`` int32, the keys of each sequence; None: all.
    page_table
        ``[B, L]`` int32, the pages of each sequence; None: ``k`` and ``v`` are no cache of pages.
    s_aux
        ``[H]`` bfloat16, the score of a sink for each head; None: no sink.
    softmax_scale
        None: ``D ** -0.5``.
    softcap
        C of ``C tanh(y / C)``, which a score becomes; 0: no soft cap.
    num_splits
        At most so many blocks share the keys of a row, 1 to 256.
    check
        Verify lengths and pages; see :func:`kernels.checks.values`.

    Returns
    -------
    out, softmax_lse
        ``[B, S, H, V]`` bfloat16, and the natural log-sum-exp ``[B, H, S]`` float32, the sink included.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, NoBackendError, OptionError, ShapeError, ValueRangeError
    """
    batch, queries, heads, depth = checks.dtype("q", checks.rank("q", q, 4), FP8).shape
    caches, keys, of_keys, _ = checks.dtype("k", checks.rank("k", k, 4), FP8).shape
    width = checks.dtype("v", checks.rank("v", v, 4), FP8).shape[3]
    checks.shape("k", k, (caches, keys, of_keys, depth), "[B, N, G, D]")
    checks.shape("v", v, (caches, keys, of_keys, width), "[B, N, G, V]")
    _head("q", depth)
    _head("v", width)
    _group(heads, of_keys)
    if page_table is None and caches != batch:
        raise ShapeError(f"k has {caches} sequences and q {batch}; pass page_table where k is a cache of pages")
    pages = (
        None
        if page_table is None
        else checks.dtype("page_table", checks.rank("page_table", page_table, 2), torch.int32)
    )
    if pages is not None and pages.shape[0] != batch:
        raise ShapeError(f"page_table has {pages.shape[0]} rows for {batch} sequences")
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    for name, scale in scales.items():
        if scale is not None:
            checks.operand(name, scale, (batch, of_keys), "[B, G]", torch.float32)
    if seqused_k is not None:
        checks.operand("seqused_k", seqused_k, (batch,), "[B]", torch.int32)
    if s_aux is not None:
        checks.operand("s_aux", s_aux, (heads,), "[H]", torch.bfloat16)
    for name, size in (("window_size_left", window_size_left), ("window_size_right", window_size_right)):
        if size < -1:
            raise OptionError(f"{name}={shown(size)}; pass -1 or a number of keys")
    if not 1 <= num_splits <= MOST_SPLITS:
        raise OptionError(f"num_splits={shown(num_splits)}; pass 1 to {MOST_SPLITS}")
    if softcap != 0:
        checks.number("softcap", softcap)
    factor = _scale("softmax_scale", softmax_scale, depth)
    device = checks.same_device(q=q, k=k, v=v, seqused_k=seqused_k, page_table=pages, s_aux=s_aux, **scales)
    if is_compiling():
        outputs: tuple[Tensor, Tensor] = torch.ops.fp8_kernels.mha_fwd(
            q, k, v, q_descale, k_descale, v_descale, seqused_k, pages, s_aux, softmax_scale, is_causal,
            window_size_left, window_size_right, softcap, num_splits, check,
        )  # fmt: skip  # the operands, then the options
        return outputs
    run = route("attention", device, ("head_dim", depth), ("n", width))
    longest = keys * (1 if pages is None else pages.shape[1])
    if checks.wanted(check, device):
        _check_keys(check, seqused_k, pages, caches, keys, longest)
    if 0 in (batch, queries) or longest == 0:
        out, lse = _fa3_fake(q, k, v)
        return out.zero_(), lse.fill_(-torch.inf)
    of_heads, window = (q_descale, k_descale, v_descale), (window_size_left, 0 if is_causal else window_size_right)
    operands = Attended(q, k, v, of_heads, seqused_k, pages, s_aux, factor, window, is_causal, num_splits, softcap)
    return run.attention(operands)


def _check_keys(
    check: bool | None, used: Tensor | None, pages: Tensor | None, caches: int, size: int, longest: int
) -> None:
    if used is not None and used.numel():
        checks.within("seqused_k", check, used, used, (0, longest), f"[0, {longest}], the keys that there are")
    if pages is None or not pages.numel():
        return
    first = torch.arange(pages.shape[1], device=pages.device) * size
    read = first < (longest if used is None else used[:, None])
    wrong = read & ((pages < 0) | (pages >= caches))
    checks.values(
        "page_table",
        check,
        ~wrong.any(),
        lambda: f"page_table names page {pages[wrong][0].item()} of a cache with {caches} pages",
    )


@verb("attention_prefill", adapter=by_name("out", "lse"), fake=_prefill_fake)
def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: torch.dtype = torch.bfloat16,
    causal: bool = False,
    sm_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Prefill of one sequence: FlashInfer's function with FP8 queries. The last query stands at the last key.

    Parameters
    ----------
    q
        ``[M, H, D]`` E4M3.
    k, v
        ``[N, G, D]`` E4M3.
    scale_q
        ``[H]`` float32, positive and finite; None: 1.
    scale_k, scale_v
        ``[G]`` float32, positive and finite; None: 1.
    o_dtype
        bfloat16 or float16.
    causal
        No key behind the place of a query. A query without keys may give anything.
    sm_scale
        None: ``D ** -0.5``.

    Returns
    -------
    out, lse
        ``[M, H, D]`` of ``o_dtype``, and the log-sum-exp to base 2 ``[M, H]`` float32.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, NoBackendError, OptionError, ShapeError
    """
    queries, heads, depth = checks.dtype("q", checks.rank("q", q, 3), FP8).shape
    keys, of_keys, _ = checks.dtype("k", checks.rank("k", k, 3), FP8).shape
    checks.shape("k", k, (keys, of_keys, depth), "[N, G, D]")
    checks.operand("v", v, (keys, of_keys, depth), "[N, G, D]", FP8)
    _head("q", depth)
    _group(heads, of_keys)
    if scale_q is not None:
        checks.operand("scale_q", scale_q, (heads,), "[H]", torch.float32)
    for name, scale in (("scale_k", scale_k), ("scale_v", scale_v)):
        if scale is not None:
            checks.operand(name, scale, (of_keys,), "[G]", torch.float32)
    checks.out_dtype(o_dtype, torch.bfloat16, torch.float16, name="o_dtype")
    factor = _scale("sm_scale", sm_scale, depth)
    device = checks.same_device(q=q, k=k, v=v, scale_q=scale_q, scale_k=scale_k, scale_v=scale_v)
    if is_compiling():
        outputs: tuple[Tensor, Tensor] = torch.ops.fp8_kernels.single_prefill_with_kv_cache(
            q, k, v, scale_q, scale_k, scale_v, o_dtype, causal, sm_scale
        )
        return outputs
    run = route("attention_prefill", device, ("head_dim", depth), ("out_dtype", dtype_name(o_dtype)))
    if 0 in (queries, keys):
        out, lse = _prefill_fake(q, k, v, None, None, None, o_dtype)
        return out.zero_(), lse.fill_(-torch.inf)
    return run.attention_prefill(q, k, v, (scale_q, scale_k, scale_v), o_dtype, causal, factor)


def _batch_fake(q: Tensor, *operands: Any) -> tuple[Tensor, Tensor]:
    dtype = next(x for x in operands if isinstance(x, torch.dtype))
    return empty(*q.shape, like=q, dtype=dtype), empty(*q.shape[:2], like=q, dtype=torch.float32)


def _batch(
    q: Tensor,
    keys: dict[str, Tensor],
    scales: OfHeads,
    offsets: dict[str, Tensor],
    o_dtype: torch.dtype,
    sm_scale: float | None,
    window_left: int,
) -> tuple[torch.device, float]:
    """Check what ragged and paged prefills share, of ``keys`` and values by name, ``[..., G, D]``; the device, and the
    factor of a score."""
    _, heads, depth = checks.dtype("q", checks.rank("q", q, 3), FP8).shape
    of_keys = next(iter(keys.values())).shape[-2]
    _head("q", depth)
    _group(heads, of_keys)
    counts = {"scale_q": (heads, "[H]"), "scale_k": (of_keys, "[G]"), "scale_v": (of_keys, "[G]")}
    named = dict(zip(counts, scales, strict=True))
    for name, x in named.items():
        if x is not None:
            checks.operand(name, x, (counts[name][0],), counts[name][1], torch.float32)
    for name, x in offsets.items():
        checks.dtype(name, checks.rank(name, x, 1), torch.int32)
    if window_left < -1:
        raise OptionError(f"window_left={shown(window_left)}; pass -1 or a number of keys")
    checks.out_dtype(o_dtype, torch.bfloat16, torch.float16, name="o_dtype")
    return checks.same_device(q=q, **keys, **named, **offsets), _scale("sm_scale", sm_scale, depth)


def _without_keys(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Zeros, and log-sum-exps of no key."""
    out, lse = _batch_fake(q, dtype)
    return out.zero_(), lse.fill_(-torch.inf)


def _rising(name: str, check: bool | None, ends: Tensor, total: int, of: str) -> None:
    wrong = torch.cat([ends[:1] != 0, ends[1:] < ends[:-1], ends[-1:] != total])
    said = f"{name} must rise from 0 to {total}, the rows of {of}"
    checks.values(name, check, ~wrong.any(), lambda: f"{said}; it is {ends.tolist()[:9]}")


@verb(
    "attention_ragged",
    contracts=("BatchPrefillWithRaggedKVCacheWrapper",),
    adapter=by_name("out", "lse"),
    fake=_batch_fake,
)
def batch_prefill_with_ragged_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: torch.dtype = torch.bfloat16,
    causal: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    check: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Prefill of several sequences whose keys lie one behind the other: FlashInfer's wrapper with FP8 queries, planned
    and run in one call. The last query of a sequence stands at its last key.

    Parameters
    ----------
    q
        ``[M, H, D]`` E4M3.
    k, v
        ``[N, G, D]`` E4M3.
    qo_indptr, kv_indptr
        ``[B + 1]`` int32, the first query and the first key of each sequence, and the ends.
    scale_q, scale_k, scale_v
        ``[H]``, ``[G]`` and ``[G]`` float32, positive and finite; None: 1.
    o_dtype
        bfloat16 or float16.
    causal
        No key behind the place of a query. A query without keys may give anything.
    sm_scale
        None: ``D ** -0.5``.
    window_left
        Keys that a query sees before its place; -1: all.
    check
        Verify the offsets; see :func:`kernels.checks.values`.

    Returns
    -------
    out, lse
        ``[M, H, D]`` of ``o_dtype``, and the log-sum-exp to base 2 ``[M, H]`` float32.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, NoBackendError, OptionError, ShapeError, ValueRangeError
    """
    keys, of_keys, depth = checks.dtype("k", checks.rank("k", k, 3), FP8).shape
    checks.shape("k", k, (keys, of_keys, checks.rank("q", q, 3).shape[2]), "[N, G, D]")
    checks.operand("v", v, (keys, of_keys, depth), "[N, G, D]", FP8)
    scales, offsets = (scale_q, scale_k, scale_v), {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr}
    device, factor = _batch(q, {"k": k, "v": v}, scales, offsets, o_dtype, sm_scale, window_left)
    checks.shape("kv_indptr", kv_indptr, tuple(qo_indptr.shape), "[B + 1]")
    if is_compiling():
        outputs: tuple[Tensor, Tensor] = torch.ops.fp8_kernels.batch_prefill_with_ragged_kv_cache(
            q, k, v, qo_indptr, kv_indptr, *scales, o_dtype, causal, sm_scale, window_left, check
        )
        return outputs
    run = route("attention_ragged", device, ("head_dim", depth), ("out_dtype", dtype_name(o_dtype)))
    if checks.wanted(check, device):
        _rising("qo_indptr", check, qo_indptr, q.shape[0], "q")
        _rising("kv_indptr", check, kv_indptr, keys, "k")
    if 0 in (q.shape[0], keys):
        return _without_keys(q, o_dtype)
    return run.attention_ragged(
        Batched(q, k, v, scales, qo_indptr, kv_indptr, None, None, o_dtype, causal, factor, window_left)
    )


@verb(
    "attention_paged",
    contracts=("BatchPrefillWithPagedKVCacheWrapper",),
    adapter=by_name("out", "lse"),
    fake=_batch_fake,
)
def batch_prefill_with_paged_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    paged_kv_indptr: Tensor,
    paged_kv_indices: Tensor,
    paged_kv_last_page_len: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: torch.dtype = torch.bfloat16,
    causal: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    check: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Prefill of several sequences over pages of a cache: FlashInfer's wrapper with FP8 queries, planned and run in one
    call. The last query of a sequence stands at its last key.

    Parameters
    ----------
    q
        ``[M, H, D]`` E4M3.
    k_cache, v_cache
        ``[C, P, G, D]`` E4M3, pages of P keys; slots behind the last key may hold anything.
    qo_indptr, paged_kv_indptr
        ``[B + 1]`` int32, the first query and the first of its ``paged_kv_indices`` of each sequence, and the ends.
    paged_kv_indices
        ``[L]`` int32, the pages of all sequences.
    paged_kv_last_page_len
        ``[B]`` int32, the keys in the last page of each sequence; 0 without pages.
    scale_q, scale_k, scale_v
        ``[H]``, ``[G]`` and ``[G]`` float32, positive and finite; None: 1.
    o_dtype
        bfloat16 or float16.
    causal
        No key behind the place of a query. A query without keys may give anything.
    sm_scale
        None: ``D ** -0.5``.
    window_left
        Keys that a query sees before its place; -1: all.
    check
        Verify offsets, pages and lengths; see :func:`kernels.checks.values`.

    Returns
    -------
    out, lse
        ``[M, H, D]`` of ``o_dtype``, and the log-sum-exp to base 2 ``[M, H]`` float32.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, NoBackendError, OptionError, ShapeError, ValueRangeError
    """
    caches, size, of_keys, depth = checks.dtype("k_cache", checks.rank("k_cache", k_cache, 4), FP8).shape
    checks.shape("k_cache", k_cache, (caches, size, of_keys, checks.rank("q", q, 3).shape[2]), "[C, P, G, D]")
    checks.operand("v_cache", v_cache, (caches, size, of_keys, depth), "[C, P, G, D]", FP8)
    scales, ends, pages, last = (scale_q, scale_k, scale_v), paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
    offsets = {
        "qo_indptr": qo_indptr, "paged_kv_indptr": ends, "paged_kv_indices": pages, "paged_kv_last_page_len": last,
    }  # fmt: skip  # one row
    caches_of = {"k_cache": k_cache, "v_cache": v_cache}
    device, factor = _batch(q, caches_of, scales, offsets, o_dtype, sm_scale, window_left)
    checks.shape("paged_kv_indptr", ends, tuple(qo_indptr.shape), "[B + 1]")
    checks.shape("paged_kv_last_page_len", last, (qo_indptr.shape[0] - 1,), "[B]")
    if is_compiling():
        outputs: tuple[Tensor, Tensor] = torch.ops.fp8_kernels.batch_prefill_with_paged_kv_cache(
            q, k_cache, v_cache, *offsets.values(), *scales, o_dtype, causal, sm_scale, window_left, check
        )
        return outputs
    run = route("attention_paged", device, ("head_dim", depth), ("out_dtype", dtype_name(o_dtype)))
    if checks.wanted(check, device):
        _rising("qo_indptr", check, qo_indptr, q.shape[0], "q")
        _rising("paged_kv_indptr", check, ends, len(pages), "paged_kv_indices")
        if pages.numel():
            checks.within("paged_kv_indices", check, pages, pages, (0, caches - 1), f"[0, {caches - 1}], the pages")
        some = ends[1:] > ends[:-1]
        right = torch.where(some, (last >= 1) & (last <= size), last == 0).all()
        said = f"paged_kv_last_page_len must lie within [1, {size}], and be 0 without pages"
        checks.values("paged_kv_last_page_len", check, right, lambda: f"{said}; it is {last.tolist()[:9]}")
    if 0 in (q.shape[0], pages.shape[0]):
        return _without_keys(q, o_dtype)
    return run.attention_paged(
        Batched(q, k_cache, v_cache, scales, qo_indptr, ends, pages, last, o_dtype, causal, factor, window_left)
    )


@verb("attention_latent", adapter=by_name("out", "softmax_lse"), fake=_latent_fake)
def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    attn_sink: Tensor | None = None,
    softmax_scale: float | None = None,
    check: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Sparse decode of multi-head latent attention over FlashMLA's FP8 cache.

    Token ``(b, s)`` sees the slots ``indices[b, s]``, page times P plus place. A slot has 512 E4M3 codes, 4 float32
    scales of 128 codes each and 64 bfloat16 values (:func:`kernels.concat_and_cache_ds_mla` writes them); the key of
    all heads is code times scale and the 64 values behind, the value its first 512 elements.

    Parameters
    ----------
    q
        ``[B, S, H, 576]`` bfloat16.
    k_cache
        ``[C, P, 1, 656]`` uint8, contiguous.
    indices
        ``[B, S, topk]`` int32; -1 is none.
    attn_sink
        ``[H]`` float32, the score of a sink for each head; None: no sink. The log-sum-exp leaves it out.
    softmax_scale
        None: ``576 ** -0.5``.
    check
        Verify the slots; see :func:`kernels.checks.values`.

    Returns
    -------
    out, softmax_lse
        ``[B, S, H, 512]`` bfloat16, and the natural log-sum-exp ``[B, H, S]`` float32; 0 and +inf of a token without
        slots.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, NoBackendError, OptionError, ShapeError, ValueRangeError
    """
    batch, queries, heads, depth = checks.dtype("q", checks.rank("q", q, 4), torch.bfloat16).shape
    caches, size, one, row = checks.dtype("k_cache", checks.rank("k_cache", k_cache, 4), torch.uint8).shape
    checks.shape("q", q, (batch, queries, heads, RANK + ROPE), "[B, S, H, 576]")
    checks.shape("k_cache", k_cache, (caches, size, 1, ROW), "[C, P, 1, 656]")
    checks.nonempty("q", q, 2)
    if k_cache[:1].numel() and not k_cache.is_contiguous():
        raise LayoutError("k_cache must be contiguous: FlashMLA reads slots one behind the other")
    checks.dtype("indices", checks.rank("indices", indices, 3), torch.int32)
    count = indices.shape[2]
    checks.shape("indices", indices, (batch, queries, count), "[B, S, topk]")
    if attn_sink is not None:
        checks.operand("attn_sink", attn_sink, (heads,), "[H]", torch.float32)
    factor = _scale("softmax_scale", softmax_scale, depth)
    device = checks.same_device(q=q, k_cache=k_cache, indices=indices, attn_sink=attn_sink)
    if is_compiling():
        outputs: tuple[Tensor, Tensor] = torch.ops.fp8_kernels.flash_mla_with_kvcache(
            q, k_cache, indices, attn_sink, softmax_scale, check
        )
        return outputs
    run = route("attention_latent", device, ("heads", heads), ("k", count))
    slots = caches * size
    if checks.wanted(check, device) and indices.numel():
        checks.within("indices", check, indices, indices, (-1, slots - 1), f"[-1, {slots - 1}]: -1, or a slot")
    if 0 in (batch, queries, count, slots):
        out, lse = _latent_fake(q)
        return out.zero_(), lse.fill_(torch.inf)
    return run.attention_latent(q, k_cache, indices, attn_sink, factor)
