"""Attention logits of DeepSeek's sparse indexer.

``logits[m,n] = k_scale[n] * sum_h weights[m,h] * relu(<q[m,h], k[n]>)`` for the tokens n in the window of query m, -inf
outside it when cleaned. The shipped kernels leave finite garbage outside the window by default; here they clean it.

NaN in a weight or a scale of keys makes every logit that it reaches NaN; NaN codes are outside of the contract.
Source: DeepGEMM (``fp8_mqa_logits``, ``fp8_paged_mqa_logits``); DeepSeek-V3.2 technical report.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import checks
from .adapters import Inputs, Options, by_name, int32
from .checks import FP8
from .errors import InputError, LayoutError, OptionError, ShapeError
from .operators import empty
from .platform import get_num_sms
from .routes import route
from .verbs import verb

MOST_SMS = 1 << 16
"""Above every device's multiprocessors (an H200 has 132), so that a schedule is never larger than its work."""


# --- as a contract, and as an operator, calls it -------------------------------------------------------------------


def _windows(verb: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    names = ("q", "k", "k_scale", "weights", "cu_seqlen_ks", "cu_seqlen_ke")
    q, k, k_scale, weights, ks, ke = (inputs[n] for n in names)
    return verb(q, (k, k_scale), weights, int32(ks), int32(ke), bool(options.get("clean_logits", True)))


def _pages(verb: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """With a schedule of its own."""
    cache, lens = inputs["kv_cache"], int32(inputs["context_lens"])
    schedule = get_paged_mqa_logits_metadata(lens, cache.shape[1], 132 if cache.device.type == "cpu" else None)
    tables = int32(inputs["block_tables"])
    longest = options.get("max_model_len", tables.shape[1] * cache.shape[1])
    clean = bool(options.get("clean_logits", True))
    return verb(inputs["q"], cache, inputs["weights"], lens, tables, schedule, longest, clean)


_H100 = by_name(converted={"context_lens": int32}, defaults={"block_size": 64, "num_sms": 132})
"""The schedule of the paged kernel, for an H100's 132 multiprocessors unless told otherwise."""


def _mqa_operator(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    clean_logits: bool,
    check: bool | None,
) -> Tensor:
    operands = q, (k, k_scale), weights, cu_seqlen_ks, cu_seqlen_ke
    return fp8_mqa_logits(*operands, clean_logits, check=check).contiguous()


def _mqa_fake(q: Tensor, k: Tensor, *_: object) -> Tensor:
    return empty(q.shape[0], k.shape[0], like=q, dtype=torch.float32)


def _paged_operator(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    schedule_metadata: Tensor,
    max_model_len: int,
    clean_logits: bool,
    check: bool | None,
) -> Tensor:
    operands = q, kv_cache, weights, context_lens, block_tables, schedule_metadata
    return fp8_paged_mqa_logits(*operands, max_model_len, clean_logits, check=check).contiguous()


def _paged_fake(q: Tensor, kv_cache: Tensor, *rest: Any) -> Tensor:
    return empty(q.shape[0] * q.shape[1], rest[4], like=q, dtype=torch.float32)


# --- the verbs -----------------------------------------------------------------------------------------------------


@verb("mqa_logits", adapter=_windows, fake=_mqa_fake, operator=_mqa_operator)
def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    clean_logits: bool = True,
    *,
    check: bool | None = None,
) -> Tensor:
    """Logits over a contiguous key sequence.

    Parameters
    ----------
    q
        ``[M, H, D]`` E4M3.
    kv
        ``(k [N, D] E4M3, k_scale [N] float32)``.
    weights
        ``[M, H]`` float32.
    cu_seqlen_ks, cu_seqlen_ke
        ``[M]`` int32: query m sees ``ks[m] <= n < ke[m]``, from 0 to N.
    clean_logits
        Write -inf outside the window; else those values are unspecified.
    check
        Verify the windows; see :func:`kernels.checks.values`.

    Returns
    -------
    Tensor
        ``[M, N]`` float32.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, ShapeError, ValueRangeError
    """
    m, heads, depth = checks.dtype("q", checks.rank("q", q, 3), FP8).shape
    if not isinstance(kv, tuple) or len(kv) != 2:
        raise InputError(f"kv must be a tuple (k, k_scale), got {type(kv).__name__}")
    k, k_scale = kv
    n, depth_k = checks.dtype("k", checks.rank("k", k, 2), FP8).shape
    if depth != depth_k or 0 in (heads, depth, n):
        raise ShapeError(f"q {list(q.shape)} and k {list(k.shape)} disagree in D or are empty")
    checks.operand("k_scale", k_scale, (n,), "[N]", torch.float32)
    checks.operand("weights", weights, (m, heads), "[M, H]", torch.float32)
    checks.operand("cu_seqlen_ks", cu_seqlen_ks, (m,), "[M]", torch.int32)
    checks.operand("cu_seqlen_ke", cu_seqlen_ke, (m,), "[M]", torch.int32)
    device = checks.same_device(
        q=q, k=k, k_scale=k_scale, weights=weights, cu_seqlen_ks=cu_seqlen_ks, cu_seqlen_ke=cu_seqlen_ke
    )
    if is_compiling():
        op = torch.ops.fp8_kernels.fp8_mqa_logits
        out: Tensor = op(q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits, check)
        return out
    run = route("mqa_logits", device, ("heads", heads), ("head_dim", depth))
    if m == 0:
        return torch.empty(0, n, dtype=torch.float32, device=device)
    if checks.wanted(check, device):
        checks.within("windows", check, cu_seqlen_ks, cu_seqlen_ke, (0, n), f"[0, N={n}]")
    return run.mqa_logits(
        q, k, k_scale.contiguous(), weights, cu_seqlen_ks.contiguous(), cu_seqlen_ke.contiguous(), clean_logits
    )


@verb("paged_mqa_logits", adapter=_pages, fake=_paged_fake, operator=_paged_operator)
def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    schedule_metadata: Tensor,
    max_model_len: int,
    clean_logits: bool = True,
    *,
    check: bool | None = None,
) -> Tensor:
    """Logits over a paged key cache.

    ``schedule_metadata`` ``[num_sms + 1, 2]`` int32.

    Parameters
    ----------
    q
        ``[B, next_n, H, D]`` E4M3.
    kv_cache
        ``[blocks, 64, 1, D + 4]`` uint8: in each block first the E4M3 codes of its 64 tokens, then their 64 float32
        scales.
    weights
        ``[B * next_n, H]`` float32.
    context_lens
        int32 ``[B]`` (length including the new tokens: token t sees ``len - next_n + t + 1``) or ``[B, next_n]``
        (what each token sees).
    block_tables
        ``[B, pages]`` int32.
    schedule_metadata
        What :func:`get_paged_mqa_logits_metadata` returned for these lengths.

    Returns
    -------
    Tensor
        ``[B * next_n, max_model_len]`` float32.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError, ValueRangeError
    """
    batch, next_n, heads, depth = checks.dtype("q", checks.rank("q", q, 4), FP8).shape
    blocks, size, one, width = checks.dtype("kv_cache", checks.rank("kv_cache", kv_cache, 4), torch.uint8).shape
    if one != 1 or width != depth + 4 or size == 0:
        raise ShapeError(f"kv_cache {list(kv_cache.shape)} must be [blocks, 64, 1, D + 4 = {depth + 4}]")
    if kv_cache[:1].numel() and not kv_cache.is_contiguous():
        raise LayoutError("kv_cache must be contiguous: the scales of a block follow its codes in memory")
    checks.operand("weights", weights, (batch * next_n, heads), "[B * next_n, H]", torch.float32)
    lens = lengths(context_lens, batch, next_n)
    checks.dtype("block_tables", checks.rank("block_tables", block_tables, 2), torch.int32)
    if block_tables.shape[0] != batch:
        raise ShapeError(f"block_tables has {block_tables.shape[0]} rows for {batch} sequences")
    check_schedule(schedule_metadata)
    checks.positive("max_model_len", max_model_len)
    checks.room("max_model_len", max_model_len, 4 * batch * next_n * max_model_len)
    device = checks.same_device(
        q=q,
        kv_cache=kv_cache,
        weights=weights,
        context_lens=context_lens,
        block_tables=block_tables,
        schedule_metadata=schedule_metadata,
    )
    if is_compiling():
        op = torch.ops.fp8_kernels.fp8_paged_mqa_logits
        operands = q, kv_cache, weights, context_lens, block_tables, schedule_metadata
        out: Tensor = op(*operands, max_model_len, clean_logits, check)
        return out
    run = route("paged_mqa_logits", device, ("heads", heads), ("head_dim", depth), ("block_size", size))
    if batch == 0:
        return torch.empty(0, max_model_len, dtype=torch.float32, device=device)
    if checks.wanted(check, device):
        check_pages(check, lens, block_tables, blocks, size, max_model_len)
    return run.paged_mqa_logits(
        q, kv_cache, weights, lens, block_tables.contiguous(), schedule_metadata, max_model_len, clean_logits
    )


@verb("paged_metadata", adapter=_H100)
def get_paged_mqa_logits_metadata(context_lens: Tensor, block_size: int, num_sms: int | None = None) -> Tensor:
    """The split of the paged kernel's work over multiprocessors: ``[num_sms + 1, 2]`` int32.

    Parameters
    ----------
    context_lens
        int32 ``[B]`` or ``[B, next_n]``, converted to the rank that the installed DeepGEMM takes.
    block_size
        Tokens in a page (64).
    num_sms
        Multiprocessors; default: those of the current device.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError
    """
    lens = checks.dtype("context_lens", checks.rank("context_lens", context_lens, 1, 2), torch.int32)
    checks.concrete("context_lens", checks.nonempty("context_lens", lens, *range(lens.dim())))
    checks.positive("block_size", block_size)
    sms = get_num_sms() if num_sms is None else checks.positive("num_sms", num_sms)
    if sms > MOST_SMS:
        raise OptionError(f"num_sms={sms}: no device has more than {MOST_SMS} multiprocessors")
    run = route("paged_metadata", lens.device, ("block_size", block_size))
    return run.paged_metadata(lens if lens.dim() == 2 else lens.unsqueeze(1), block_size, sms)


def lengths(context_lens: Tensor, batch: int, next_n: int) -> Tensor:
    """``[B, next_n]``, the keys of each query; of lengths ``[B]``, the last query of a request sees all.

    ``context_lens`` ``[B]`` or ``[B, next_n]`` int32. Returns int32 ``[B, next_n]``.

    Raises DtypeError, InputError, LayoutError, ShapeError.
    """
    lens = checks.dtype("context_lens", checks.rank("context_lens", context_lens, 1, 2), torch.int32)
    if lens.dim() == 2:
        return checks.shape("context_lens", lens, (batch, next_n), "[B, next_n]")
    checks.shape("context_lens", lens, (batch,), "[B]")
    steps = torch.arange(1 - next_n, 1, dtype=torch.int32, device=lens.device)
    return lens.unsqueeze(1) + steps


def check_schedule(schedule: Tensor) -> None:
    """Refuse a schedule that is not int32 ``[num_sms + 1, 2]``.

    ``schedule`` of any shape.

    Raises DtypeError, InputError, LayoutError, ShapeError.
    """
    checks.dtype("schedule_metadata", checks.rank("schedule_metadata", schedule, 2), torch.int32)
    if schedule.shape[1] != 2 or schedule.shape[0] < 2:
        raise ShapeError(f"schedule_metadata must be [num_sms + 1, 2], got {list(schedule.shape)}")


def check_pages(check: bool | None, lens: Tensor, tables: Tensor, blocks: int, size: int, longest: int) -> None:
    """Refuse lengths beyond the pages, and pages in use that the cache does not have; see :func:`checks.values`.

    ``lens`` ``[B, next_n]`` and ``tables`` ``[B, pages]`` int32.

    Raises ValueRangeError.
    """
    room = f"[0, {min(longest, tables.shape[1] * size)}]: max_model_len={longest} and {tables.shape[1]} pages of {size}"
    checks.within("context_lens", check, lens, lens, (0, min(longest, tables.shape[1] * size)), room)
    used = torch.arange(tables.shape[1], device=tables.device) * size < lens.amax(dim=1, keepdim=True)
    wrong = used & ((tables < 0) | (tables >= blocks))
    checks.values(
        "block_tables",
        check,
        ~wrong.any(),
        lambda: f"block_tables names page {tables[wrong][0].item()} of a cache with {blocks} pages",
    )
