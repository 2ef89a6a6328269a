"""Indexer logits in plain torch: ``logits[m,n] = k_scale[n] * sum_h weights[m,h] * relu(<q[m,h], k[n]>)``.

Dot products and the sum over heads are taken in float32. The paged cache stores, per block, first the codes of all
its tokens and then their float32 scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backends._ambient import as_written
from kernels.backends._rows import take

SPLIT_KV = 256
"""Cached tokens in one unit of work of the paged kernel's schedule."""


@as_written
def mqa_logits(q: Tensor, k: Tensor, k_scale: Tensor, weights: Tensor, ks: Tensor, ke: Tensor, clean: bool) -> Tensor:
    """``[M, N]`` float32; outside ``ks[m] <= n < ke[m]`` it is -inf when cleaned, else the plain formula."""
    logits = score(q, k, weights) * k_scale
    if clean:
        n = torch.arange(k.shape[0], device=q.device)
        logits.masked_fill_((n < ks.unsqueeze(1)) | (n >= ke.unsqueeze(1)), float("-inf"))
    return logits


def score(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """``sum_h weights[m,h] * relu(<q[m,h], k[n]>)`` for ``q [M,H,D]``, ``k [N,D]``: ``[M, N]`` float32."""
    right = k.to(torch.float32).t()
    total = torch.zeros(q.shape[0], k.shape[0], dtype=torch.float32, device=q.device)
    for head in range(q.shape[1]):
        total += weights[:, head : head + 1] * (q[:, head].to(torch.float32) @ right).relu()
    return total


@as_written
def paged_mqa_logits(
    q: Tensor, cache: Tensor, weights: Tensor, lens: Tensor, tables: Tensor, schedule: Tensor, longest: int, clean: bool
) -> Tensor:
    """``[B * next_n, longest]`` float32; token t of sequence b sees ``lens[b, t]`` cached tokens, the rest is -inf."""
    batch, next_n, _, depth = q.shape
    block = cache.shape[1]
    flat = cache.view(cache.shape[0], -1)
    codes = flat[:, : block * depth].view(torch.float8_e4m3fn).view(-1, block, depth)
    scales = flat[:, block * depth :].view(torch.float32)
    logits = torch.full((batch * next_n, longest), float("-inf"), dtype=torch.float32, device=q.device)
    for b, row in enumerate(lens.tolist()):
        pages = tables[b, : -(-max(row) // block)].long()
        k, k_scale = take(codes, pages).view(-1, depth), scales[pages].view(-1)
        for t, length in enumerate(row):
            at = b * next_n + t
            logits[at, :length] = (score(q[b, t : t + 1], k[:length], weights[at : at + 1]) * k_scale[:length])[0]
    return logits


def paged_metadata(lens: Tensor, block_size: int, num_sms: int) -> Tensor:
    """Even split of the work: row i says at which sequence and which 256-token piece multiprocessor i starts."""
    pieces = (lens[:, -1].cpu().long() + SPLIT_KV - 1) // SPLIT_KV
    ends = pieces.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    at = torch.arange(num_sms + 1, device="cpu")
    starts = at * (total // num_sms) + at.clamp(max=total % num_sms)
    sequence = torch.searchsorted(ends, starts, right=True)
    before = torch.cat([ends.new_zeros(1), ends])[sequence]
    return torch.stack([sequence, starts - before], dim=1).to(torch.int32).to(lens.device)
