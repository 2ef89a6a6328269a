"""Attention in plain torch, float32: the weights of keys are not rounded.

NaN in a query or in a key that a row sees makes the row NaN; values of keys that no row may see are not read.
Source: the formulas of :mod:`kernels.attention`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..support import RANK, ROPE_AT, SCALES_AT, TILE
from ._host import no_autocast_no_grad, take
from .declaration import Attended, Batched, OfHeads


def _weighed(
    q: Tensor, k: Tensor, v: Tensor, factor: Tensor, seen: Tensor, sink: Tensor | None, cap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """One KV head, with a soft ``cap`` or 0: ``q`` ``[R, D]``, ``k`` ``[N, D]``, ``v`` ``[N, V]`` float32, ``factor``
    and ``sink`` ``[R]``, and the keys ``seen`` bool ``[R, N]``; the output ``[R, V]`` and the log-sum-exps ``[R]`` with
    and without the sink, float32."""
    scores = (q @ k.t()) * factor[:, None]
    scores = torch.tanh(scores / cap) * cap if cap else scores
    scores = scores.masked_fill(~seen, -math.inf)
    top = scores.amax(dim=1)
    if sink is not None:
        top = torch.maximum(top, sink.masked_fill(~seen.any(dim=1), -math.inf))
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(scores - top[:, None])
    own = weights.sum(dim=1)
    whole = own if sink is None else own + torch.exp(sink - top)
    out = (weights @ v) / whole[:, None]
    return out.masked_fill(~seen.any(dim=1)[:, None], 0.0), top + whole.log(), top + own.log()


def _place(queries: int, keys: Tensor, group: int) -> Tensor:
    """The place of every row among its keys, ``[queries * group]`` integers."""
    return torch.arange(queries, device=keys.device).repeat_interleave(group) + keys - queries


@no_autocast_no_grad
def attention(p: Attended) -> tuple[Tensor, Tensor]:
    """Operands and results as of :class:`~kernels.backends.declaration.Backend`."""
    q, k, v, scales, used, pages, sink, scale, (left, right), *_ = p
    (batch, queries, heads, depth), (_, _, of_keys, width) = q.shape, v.shape
    group = heads // of_keys
    out = torch.empty(batch, queries, heads, width, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    ones = torch.ones(batch, of_keys, dtype=torch.float32, device=q.device)
    of_q, of_k, of_v = (ones if x is None else x for x in scales)
    for b in range(batch):
        if pages is None:
            keys, values = k[b], v[b]
        else:
            table = pages[b].clamp(0, k.shape[0] - 1).long()  # entries behind the last key may hold anything
            keys, values = (take(x, table).flatten(0, 1) for x in (k, v))
        place = torch.arange(keys.shape[0], device=q.device)
        count = place.new_tensor(keys.shape[0]) if used is None else used[b].long()
        at = _place(queries, count, group)[:, None]
        seen = (place < count).expand(queries * group, keys.shape[0])
        if left >= 0:
            seen = seen & (place >= at - left)
        if right >= 0:
            seen = seen & (place <= at + right)
        for g in range(of_keys):
            own = slice(g * group, (g + 1) * group)
            rows = q[b, :, own].to(torch.float32).reshape(queries * group, depth)
            part = values[:, g].to(torch.float32).masked_fill(~(place < count)[:, None], 0.0)
            sinks = None if sink is None else sink[own].to(torch.float32).repeat(queries)
            factor = (of_q[b, g] * of_k[b, g] * scale).expand(len(rows))
            o, total, _ = _weighed(rows, keys[:, g].to(torch.float32), part, factor, seen, sinks, p.cap)
            out[b, :, own] = (o * of_v[b, g]).reshape(queries, group, width).to(torch.bfloat16)
            none = ~seen.any(dim=1)
            lse[b, own] = total.masked_fill(none, -math.inf).reshape(queries, group).t()
    return out, lse


@no_autocast_no_grad
def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: OfHeads,
    dtype: torch.dtype,
    causal: bool,
    scale: float,
    left: int = -1,
) -> tuple[Tensor, Tensor]:
    """Operands and results as of :class:`~kernels.backends.declaration.Backend`; ``left`` as of
    :class:`~kernels.backends.declaration.Batched`."""
    (queries, heads, depth), (keys, of_keys, _) = q.shape, k.shape
    group, out = heads // of_keys, torch.empty(q.shape, dtype=dtype, device=q.device)
    lse = torch.empty(queries, heads, dtype=torch.float32, device=q.device)
    counts = (heads, of_keys, of_keys)
    ones = torch.ones(heads, dtype=torch.float32, device=q.device)
    of_q, of_k, of_v = (ones[:n] if x is None else x for x, n in zip(scales, counts, strict=True))
    place = torch.arange(keys, device=q.device)
    seen = torch.ones(queries * group, keys, dtype=torch.bool, device=q.device)
    at = _place(queries, place.new_tensor(keys), group)[:, None]
    if causal:
        seen = seen & (place <= at)
    if left >= 0:
        seen = seen & (place >= at - left)
    for g in range(of_keys):
        own = slice(g * group, (g + 1) * group)
        rows = q[:, own].to(torch.float32).reshape(queries * group, depth)
        factor = (of_q[own] * of_k[g] * scale).repeat(queries)
        o, total, _ = _weighed(rows, k[:, g].to(torch.float32), v[:, g].to(torch.float32), factor, seen, None)
        out[:, own] = (o * of_v[g]).reshape(queries, group, depth).to(dtype)
        lse[:, own] = (total / math.log(2.0)).reshape(queries, group)
    return out, lse


def batch(p: Batched) -> tuple[Tensor, Tensor]:
    """Operands and results as of :class:`~kernels.backends.declaration.Backend`: one sequence after the other."""
    out = torch.zeros(p.q.shape, dtype=p.dtype, device=p.q.device)
    lse = torch.full(p.q.shape[:2], -math.inf, dtype=torch.float32, device=p.q.device)
    ends, of_keys = p.ends.tolist(), p.of_keys.tolist()
    for b, (first, stop) in enumerate(zip(ends, ends[1:], strict=False)):
        k, v = (x[of_keys[b] : of_keys[b + 1]] for x in (p.k, p.v))
        if p.pages is not None and p.last is not None:
            pages = p.pages[of_keys[b] : of_keys[b + 1]].long()
            keys = max(0, len(pages) - 1) * p.k.shape[1] + int(p.last[b])
            k, v = (take(x, pages).flatten(0, 1)[:keys] for x in (p.k, p.v))
        if stop > first and len(k):
            some = slice(first, stop)
            out[some], lse[some] = prefill(p.q[some], k, v, p.scales, p.dtype, p.causal, p.scale, p.left)
    return out, lse


@no_autocast_no_grad
def latent(q: Tensor, cache: Tensor, indices: Tensor, sink: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Operands and results as of :class:`~kernels.backends.declaration.Backend`."""
    batch, queries, heads, _ = q.shape
    out = torch.empty(batch, queries, heads, RANK, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    slots = cache.reshape(-1, cache.shape[3])
    for b in range(batch):
        for s in range(queries):
            index = indices[b, s].long()
            rows, seen = slots[index.clamp(min=0)], (index >= 0).expand(heads, -1)
            codes = rows[:, :RANK].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
            tiles = rows[:, SCALES_AT:ROPE_AT].contiguous().view(torch.float32)
            values = codes * tiles.repeat_interleave(TILE, dim=1)
            keys = torch.cat([values, rows[:, ROPE_AT:].contiguous().view(torch.bfloat16).to(torch.float32)], dim=1)
            values = values.masked_fill((index < 0)[:, None], 0.0)
            factor = torch.full((heads,), scale, dtype=torch.float32, device=q.device)
            o, _, total = _weighed(q[b, s].to(torch.float32), keys, values, factor, seen, sink)
            out[b, s] = o.to(torch.bfloat16)
            lse[b, :, s] = total.masked_fill(~seen.any(dim=1), math.inf)
    return out, lse
