"""Attention logits of DeepSeek's sparse indexer from FP4: E2M1 codes with E8M0 scales of 32.

``logits[m,n] = sum_h weights[m,h] * relu(<q[m,h], k[n]>)`` for the keys n in the window of query m, the scales inside
the dot products; -inf outside the window when cleaned. Names and layouts are DeepGEMM's. The dot products are those of
:mod:`kernels.mx_products` in float32 (a Triton kernel on GPUs without block-scaled instructions, plain torch on a CPU),
and heads are added in float32. Not covered: tokens of several requests in one call (``indices``), DeepGEMM's own kernel
of sm100.

Source: DeepGEMM (``fp8_fp4_mqa_logits``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import checks
from .adapters import Inputs, Options, int32, out_dtype_of
from .backends.declaration import Rows, Scales
from .errors import InputError, LayoutError, OptionError, ShapeError
from .logits import check_pages, check_schedule, fp8_mqa_logits, fp8_paged_mqa_logits, lengths
from .mx_blocks import LINEAR, MX_BLOCK
from .mx_products import UE8M0, run_product
from .verbs import verb

HELD = 1 << 26
"""Dot products held at once: 256 MiB."""
Queries = tuple[Tensor, Tensor | None]


# --- as a contract, and as an operator, calls it -------------------------------------------------------------------


def _windows(verb: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    names = ("q", "q_sf", "k", "k_sf", "weights", "cu_seqlen_ks", "cu_seqlen_ke")
    q, q_sf, k, k_sf, weights, ks, ke = (inputs[n] for n in names)
    clean, columns = bool(options.get("clean_logits", True)), options.get("max_seqlen_k", 0)
    return verb((q, q_sf), (k, k_sf), weights, int32(ks), int32(ke), clean, columns, out_dtype_of(options))


def _pages(verb: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """With a schedule of zeros: it is not read."""
    cache, lens, tables = inputs["kv_cache"], int32(inputs["context_lens"]), int32(inputs["block_tables"])
    longest = options.get("max_model_len") or tables.shape[1] * cache.shape[1]
    clean, queries = bool(options.get("clean_logits", True)), (inputs["q"], inputs["q_sf"])
    return verb(
        queries, cache, inputs["weights"], lens, tables, tables.new_zeros(2, 2), longest, clean, out_dtype_of(options)
    )


# --- the verbs -----------------------------------------------------------------------------------------------------


@verb("mx_product", adapter=_windows)
def fp8_fp4_mqa_logits(
    q: Queries,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    *,
    check: bool | None = None,
) -> Tensor:
    """Logits over a contiguous key sequence; without a scale of q :func:`kernels.fp8_mqa_logits`.

    Parameters
    ----------
    q, kv
        ``(q [M, H, D/2], q_sf [M, H])`` and ``(k [N, D/2], k_sf [N])``: uint8 or int8, two codes each, and int32 of
        four E8M0 bytes, the first block of 32 in the lowest.
    weights
        ``[M, H]`` float32, or bf16 with bf16 logits.
    cu_seqlen_ks, cu_seqlen_ke
        ``[M]`` int32: query m sees ``ks[m] <= n < ke[m]``, from 0 to N.
    clean_logits
        Write -inf outside the window; else those values are unspecified.
    max_seqlen_k
        0, or the number of columns: row m holds the keys from ``ks[m]`` on, and nothing is cleaned.

    Returns
    -------
    Tensor
        ``[M, N]`` or ``[M, max_seqlen_k]``. A NaN scale (byte 255) makes every logit that it reaches NaN.

    Raises
    ------
    InputError, ShapeError, DtypeError, OptionError, DeviceError, LayoutError, ValueRangeError
    """
    codes, q_sf = _pair("q", q)
    k, k_sf = _pair("kv", kv)
    if q_sf is None:
        if logits_dtype is not torch.float32 or max_seqlen_k:
            raise OptionError(f"logits_dtype={logits_dtype}, max_seqlen_k={max_seqlen_k}: FP8 gives float32, every key")
        assert k_sf is not None
        return fp8_mqa_logits(codes, (k, k_sf), weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits, check=check)
    m, heads, half = checks.rank("q", codes, 3).shape
    n = checks.rank("k", k, 2).shape[0]
    left = _fp4("q", codes, q_sf)
    right = _fp4("k", k, k_sf)
    if k.shape[1] != half or n == 0:
        raise ShapeError(f"q {list(codes.shape)} and k {list(k.shape)} disagree in D or are empty")
    _weights(weights, (m, heads), "[M, H]", logits_dtype)
    checks.operand("cu_seqlen_ks", cu_seqlen_ks, (m,), "[M]", torch.int32)
    checks.operand("cu_seqlen_ke", cu_seqlen_ke, (m,), "[M]", torch.int32)
    if max_seqlen_k < 0 or max_seqlen_k and clean_logits:
        raise OptionError(f"max_seqlen_k={max_seqlen_k}, clean_logits={clean_logits}: 0, or a size without cleaning")
    windows = {"cu_seqlen_ks": cu_seqlen_ks, "cu_seqlen_ke": cu_seqlen_ke}
    device = checks.same_device(q=codes, q_sf=q_sf, k=k, k_sf=k_sf, weights=weights, **windows)
    if checks.wanted(check, device):
        checks.within("windows", check, cu_seqlen_ks, cu_seqlen_ke, (0, n), f"[0, N={n}]")
    out = torch.empty(m, n, dtype=logits_dtype, device=device)
    step = max(1, HELD // (heads * n))
    for start in range(0, m, step):
        rows = slice(start, start + step)
        _heads((left[0][rows], left[1][rows]), (right[0][None], right[1]), weights[rows], out[rows], None)
    column = torch.arange(max_seqlen_k or n, device=device)
    if max_seqlen_k:
        return out.gather(1, (cu_seqlen_ks.long()[:, None] + column).clamp(max=n - 1))
    if clean_logits:
        out.masked_fill_((column < cu_seqlen_ks[:, None]) | (column >= cu_seqlen_ke[:, None]), float("-inf"))
    return out


@verb("mx_product", adapter=_pages)
def fp8_fp4_paged_mqa_logits(
    q: Queries,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    schedule_metadata: Tensor,
    max_model_len: int,
    clean_logits: bool = True,
    logits_dtype: torch.dtype = torch.float32,
    *,
    check: bool | None = None,
) -> Tensor:
    """Logits over a paged key cache; without a scale of q :func:`kernels.fp8_paged_mqa_logits`.

    ``context_lens`` ``[B]`` or ``[B, next_n]``, ``block_tables`` ``[B, pages]`` and ``schedule_metadata`` ``[num_sms +
    1, 2]`` int32.

    Parameters
    ----------
    q
        ``(q [B, next_n, H, D/2], q_sf [B, next_n, H])`` as of :func:`fp8_fp4_mqa_logits`.
    kv_cache
        ``[blocks, P, 1, D/2 + 4]`` uint8: in each block first the codes of its tokens, then their int32 scales.
    weights, context_lens, block_tables, schedule_metadata, max_model_len
        As of :func:`kernels.fp8_paged_mqa_logits`; the schedule is not used here.

    Returns
    -------
    Tensor
        ``[B * next_n, max_model_len]``.

    Raises
    ------
    InputError, ShapeError, DtypeError, OptionError, DeviceError, LayoutError, ValueRangeError
    """
    codes, q_sf = _pair("q", q)
    check_schedule(schedule_metadata)
    rest = weights, context_lens, block_tables, schedule_metadata, max_model_len, clean_logits
    if q_sf is None:
        if logits_dtype is not torch.float32:
            raise OptionError(f"logits_dtype={logits_dtype}: FP8 gives float32")
        return fp8_paged_mqa_logits(codes, kv_cache, *rest, check=check)
    batch, next_n, heads, half = checks.rank("q", codes, 4).shape
    a, a_scale = (x.flatten(0, 1) for x in _fp4("q", codes, q_sf))
    blocks, size, one, width = checks.dtype("kv_cache", checks.rank("kv_cache", kv_cache, 4), torch.uint8).shape
    if one != 1 or width != half + 4 or size == 0:
        raise ShapeError(f"kv_cache {list(kv_cache.shape)} must be [blocks, P, 1, D/2 + 4 = {half + 4}]")
    if not kv_cache.is_contiguous():
        raise LayoutError("kv_cache must be contiguous: the scales of a block follow its codes in memory")
    _weights(weights, (batch * next_n, heads), "[B * next_n, H]", logits_dtype)
    lens = lengths(context_lens, batch, next_n)
    pages = checks.dtype("block_tables", checks.rank("block_tables", block_tables, 2), torch.int32).shape[1]
    if block_tables.shape[0] != batch or 0 in (batch, pages, blocks):
        raise ShapeError(f"block_tables {list(block_tables.shape)} for {batch} sequences and {blocks} blocks")
    checks.positive("max_model_len", max_model_len)
    checks.room("max_model_len", max_model_len, 4 * batch * next_n * max_model_len)
    tensors = {"weights": weights, "context_lens": context_lens, "block_tables": block_tables}
    tensors["schedule_metadata"] = schedule_metadata
    device = checks.same_device(q=codes, q_sf=q_sf, kv_cache=kv_cache, **tensors)
    if checks.wanted(check, device):
        check_pages(check, lens, block_tables, blocks, size, max_model_len)
    flat, keys = kv_cache.view(blocks, -1), pages * size
    k, k_sf = flat[:, : size * half].reshape(blocks, size, half), flat[:, size * half :].reshape(blocks, size, 4)
    k_sf = k_sf[..., : a_scale.shape[-1]]
    logits = torch.empty(batch * next_n, keys, dtype=logits_dtype, device=device)
    step = max(1, HELD // (next_n * heads * keys))
    for start in range(0, batch, step):
        table = block_tables[start : start + step].long().clamp(0, blocks - 1).flatten()
        each = table.shape[0] // pages
        rows = slice(start * next_n, (start + each) * next_n)
        right = k[table].view(each, keys, half), k_sf[table].reshape(each * keys, -1)
        first = torch.arange(each, dtype=torch.int32, device=device) * next_n * heads
        group = torch.arange(each, dtype=torch.int32, device=device) * keys
        runs = Rows(torch.stack([first, first + next_n * heads, first, group]))
        _heads((a[rows], a_scale[rows]), right, weights[rows], logits[rows], runs)
    out = torch.full((batch * next_n, max_model_len), float("-inf"), dtype=logits_dtype, device=device)
    shared = min(keys, max_model_len)
    out[:, :shared] = logits[:, :shared]
    if clean_logits:
        outside = torch.arange(max_model_len, device=device) >= lens.flatten()[:, None]
        out.masked_fill_(outside, float("-inf"))
    return out


def _heads(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], weights: Tensor, out: Tensor, runs: Rows | None
) -> None:
    """``out [R, N]``: the weighted sum over heads of the positive dot products of ``left [R, H, D/2]``."""
    rows, heads, half = left[0].shape
    b, n = right[0], right[0].shape[1]
    dots = torch.empty(rows * heads, n, dtype=torch.float32, device=out.device)
    scales = (Scales(part.contiguous().view(UE8M0).reshape(-1), MX_BLOCK, LINEAR) for part in (left[1], right[1]))
    run_product(left[0].reshape(-1, half), next(scales), b, next(scales), dots, runs)
    out.copy_(dots.relu_().view(rows, heads, n).mul_(weights.to(torch.float32)[:, :, None]).sum(dim=1))


def _pair(name: str, operand: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    if len(operand) != 2:
        raise InputError(f"{name} must be a tuple (codes, scales), got {len(operand)} parts")
    return checks.tensor(name, operand[0]), None if operand[1] is None else checks.tensor(f"{name}_sf", operand[1])


def _fp4(name: str, codes: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes as uint8 and the bytes ``[.., D / 32]`` of their scales."""
    checks.dtype(name, codes, torch.uint8, torch.int8)
    depth = 2 * codes.shape[-1]
    if depth not in (32, 64, 96, 128) or 0 in codes.shape[1:-1]:
        raise ShapeError(f"{name} is {list(codes.shape)}, so D={depth}; a word holds the scales of 32, 64, 96 or 128")
    if scale is None:
        raise InputError(f"{name} has no scales; pass int32 words of four E8M0 bytes")
    checks.operand(f"{name}_sf", scale, tuple(codes.shape[:-1]), "one word for each row of codes", torch.int32)
    raw = scale.contiguous().view(torch.uint8).reshape(*scale.shape, 4)
    return codes.contiguous().view(torch.uint8), raw[..., : depth // MX_BLOCK]


def _weights(weights: Tensor, shape: tuple[int, ...], meaning: str, dtype: torch.dtype) -> None:
    checks.out_dtype(dtype, torch.float32, torch.bfloat16, name="logits_dtype")
    checks.dtype("weights", checks.tensor("weights", weights), torch.float32, torch.bfloat16)
    checks.shape("weights", weights, shape, meaning)
    if weights.dtype is torch.bfloat16 and dtype is not torch.bfloat16:
        raise OptionError(f"weights are bfloat16 and logits_dtype={dtype}; pass torch.bfloat16")
