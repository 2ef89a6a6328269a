"""Attention logits of DeepSeek's sparse indexer, exactly, and the schedule of their work over multiprocessors.

    logits[m, n] = k_scale[n] * sum_h weights[m, h] * relu(x[m, h, n]),   x[m, h, n] = <q[m, h], k[n]>

for ``start[m] <= n < stop[m]``; outside, the logits are -inf when the kernel cleans them, else unspecified.
Every ``x`` of E4M3 codes is exact in float64 (products are multiples of 2^-18 below 2^18); of E2M1 codes with E8M0
scales of 32 it is a double-double. So are ``weights * relu(x)`` and the sum over heads, and a bound on what a pair does
not hold is tracked (``Exact.slack``).

Paged: request ``b`` of ``B`` has ``next_n`` queries and reads key ``n`` from block ``block_tables[b, n // P]``.
Work: request ``b`` has ``ceil(context_len / split)`` segments; processor ``i`` takes those from ``schedule[i]`` to
``schedule[i + 1]``. A correct schedule contains every segment once, and the processors' counts differ by at most one.

Sources: DeepGEMM fp8_mqa_logits, fp8_fp4_mqa_logits, their paged forms, get_paged_mqa_logits_metadata. Not covered:
rounding, bounds (:mod:`oracle.bounds.logits`), the order of summation on hardware (:mod:`oracle.tensorcore.logits`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from oracle.errors import InputError, ShapeError
from oracle.numbers.formats import decode, of_dtype
from oracle.numbers.rounding import fast_two_sum, two_prod
from oracle.truth.gemm import (
    Exact,
    ScaledProduct,
    accumulate,
    block_sums,
    joined,
    overlaid,
    quantum_of_codes,
    zero_nonfinite,
)
from oracle.truth.gemm import exact as gemm_exact
from oracle.truth.layout import ceil_div, unpack_kv_cache

TILE = 1 << 21  # dot products held at once: 16 MiB for each float64 temporary
BLOCK = 32  # codes of E2M1 that share an E8M0 scale
E8M0 = torch.float8_e8m0fnu
SPLIT_BLOCKS = 4
"""Blocks of the cache in one segment of work: one for each of DeepGEMM's four warp groups."""


@dataclass(frozen=True)
class Logits:
    """Operands of one set of logits.

    Attributes
    ----------
    q : Tensor ``[M, H, D]`` float8 codes, or uint8: one code of E2M1 each.
    k : Tensor ``[N, D]`` of the same kind.
    k_scale : Tensor ``[N]`` float32.
    weights : Tensor ``[M, H]`` float32 or bfloat16.
    start, stop : Tensor ``[M]`` integers; the window of each row, ``stop`` excluded.
    q_blocks, k_blocks : Tensor ``[M, H, D / 32]`` and ``[N, D / 32]`` E8M0 or None, scales inside the dot products.
    first : Tensor ``[M]`` or None, the key in column 0 of the output of each row.
    """

    q: Tensor
    k: Tensor
    k_scale: Tensor
    weights: Tensor
    start: Tensor
    stop: Tensor
    q_blocks: Tensor | None = None
    k_blocks: Tensor | None = None
    first: Tensor | None = None

    def __post_init__(self) -> None:
        m, h, d = self.q.shape
        n = self.k.shape[0]
        wanted = {"k": (n, d), "k_scale": (n,), "weights": (m, h), "start": (m,), "stop": (m,)}
        if self.q_blocks is not None:
            wanted |= {"q_blocks": (m, h, ceil_div(d, BLOCK)), "k_blocks": (n, ceil_div(d, BLOCK))}
        for name, shape in wanted.items():
            actual = tuple(getattr(self, name).shape)
            if actual != shape:
                raise ShapeError(f"{name} has shape {list(actual)}; these operands take {list(shape)}")

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    def window(self) -> Tensor:
        """Bool ``[M, N]``: the elements that the contract specifies."""
        n = torch.arange(self.k.shape[0], device=self.k.device)
        return (n >= self.start[:, None]) & (n < self.stop[:, None])

    def products(self) -> ScaledProduct:
        """The dot products of every row and head, ``[M * H, N]``, with the scales inside them or unit scales."""
        one = torch.ones((1, 1), dtype=torch.float32, device=self.q.device)
        n, d = self.k.shape
        if self.q_blocks is not None and self.k_blocks is not None:
            left = self.q_blocks.flatten(0, 1)
            return ScaledProduct(self.q.reshape(-1, d), self.k, left, self.k_blocks, block=BLOCK, b_rows=1)
        return ScaledProduct(self.q.reshape(-1, d), self.k, one, one, block=d, b_rows=n)

    @cached_property
    def dots(self) -> Exact:
        """The exact dot products ``[M, H, N]``, NaN where a NaN code or scale enters; for one of :meth:`tiles`.
        Computed once: the value and its bound both need them."""
        shape = self.q.shape[0], self.heads, self.k.shape[0]
        if self.q_blocks is not None:
            value = gemm_exact(self.products())
            return Exact(*(part.reshape(shape) for part in (value.hi, value.lo, value.slack)))
        q, k = decode(self.q).flatten(0, 1), decode(self.k)
        quantum = quantum_of_codes(of_dtype(self.q.dtype), of_dtype(self.k.dtype))
        x = torch.zeros((q.shape[0], k.shape[0]), dtype=torch.float64, device=q.device)
        for part in block_sums(zero_nonfinite(q), zero_nonfinite(k), quantum=quantum):
            x = x + part
        if not bool(torch.isfinite(q).all()) or not bool(torch.isfinite(k).all()):
            x = x + 0.0 * (q @ k.T)
        x = x.reshape(shape)
        return Exact(x, torch.zeros_like(x), torch.zeros_like(x))

    def tiles(self) -> Iterator[Logits]:
        """The problem in blocks of rows with at most ``TILE`` dot products each (or one row)."""
        rows = max(1, TILE // (self.heads * self.k.shape[0]))
        if rows >= self.q.shape[0]:
            yield self
            return
        for i in range(0, self.q.shape[0], rows):
            r = slice(i, i + rows)
            rows_of = {name: getattr(self, name)[r] for name in ("q", "weights", "start", "stop")}
            yield replace(self, q_blocks=None if self.q_blocks is None else self.q_blocks[r], **rows_of)


def exact(problem: Logits) -> Exact:
    """The exact logits of every pair as a double-double, windows ignored.

    NaN and infinities follow IEEE: a NaN code, weight or scale gives NaN in every logit that it enters (torch's relu
    keeps NaN; ``fmaxf`` gives 0).
    """
    return joined([_exact_tile(tile) for tile in problem.tiles()])


def _exact_tile(problem: Logits) -> Exact:
    weights, scale = decode(problem.weights), decode(problem.k_scale)[None, :]
    dot = problem.dots
    x = dot.hi
    plain = (weights[:, :, None] * torch.relu(x)).sum(dim=1) * scale
    w = zero_nonfinite(weights)[:, :, None].expand(x.shape)
    p, pe = two_prod(w, torch.relu(zero_nonfinite(x)))
    # the low words of positive dot products, their two roundings, and what relu (1-Lipschitz) lets through
    rest = w * torch.where(x > 0, dot.lo, 0.0)
    pe = pe + rest
    open_ = 2.0**-51 * torch.where(rest == 0, 0.0, rest.abs() + pe.abs()) + w.abs() * dot.slack
    hi, lo = torch.zeros_like(plain), torch.zeros_like(plain)
    slack = open_.sum(dim=1) * (1 + 2.0**-40)
    for h in range(problem.heads):
        hi, lo, slack = accumulate(hi, lo, slack, p[:, h], pe[:, h])
    s = zero_nonfinite(scale).expand(plain.shape)
    q, qe = two_prod(hi, s)
    tail = lo * s
    rest = qe + tail
    # the low word's two roundings; nothing underflows, as all are multiples of 2**-600 (scales of float32 and E8M0)
    slack = slack * s.abs() + 2.0**-51 * (tail.abs() + rest.abs())
    return overlaid(plain, *fast_two_sum(q, rest), slack)


def from_pages(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    max_model_len: int,
    q_blocks: Tensor | None = None,
) -> list[Logits]:
    """The logits of a paged call, one problem for each request.

    Parameters
    ----------
    q : Tensor ``[B, next_n, H, D]`` float8_e4m3fn, or uint8: one code of E2M1 each
    kv_cache : Tensor ``[blocks, P, 1, D + 4]`` uint8, as :func:`oracle.truth.layout.pack_kv_cache` makes it; with E2M1
        ``[blocks, P, 1, D / 2 + 4]``: two codes a byte, and four E8M0 bytes in the place of a scale
    q_blocks : Tensor ``[B, next_n, H, D / 32]`` E8M0, with E2M1
    weights : Tensor ``[B * next_n, H]`` float32
    context_lens : Tensor ``[B]`` or ``[B, next_n]``
        Keys of a request, its new tokens included: query ``j`` of ``next_n`` sees ``context_lens[b] - next_n + 1 + j``
        of them; with two axes, ``context_lens[b, j]``.
    block_tables : Tensor ``[B, most blocks]``, entries past a request's last block are not read.

    Returns list of Logits: with ``N`` the keys of the request's blocks, ``ceil(len / P) * P``; one block of zeros when
    it has none. Codes and scales are moved unchanged, NaN too.
    Raises ShapeError, InputError.
    """
    codes, scales = unpack_kv_cache(kv_cache)
    tokens = codes.shape[1]
    batch, next_n = q.shape[:2]
    lens = context_lens.to(torch.int64)
    if tuple(lens.shape) == (batch,):
        lens = lens[:, None] - next_n + 1 + torch.arange(next_n, device=lens.device)
    if tuple(lens.shape) != (batch, next_n):
        raise ShapeError(f"context_lens has shape {list(lens.shape)}; pass [{batch}] or [{batch}, {next_n}]")
    if int(lens.max()) > max_model_len:
        raise InputError(f"context_lens holds {int(lens.max())}, max_model_len is {max_model_len}")
    requests = []
    for b in range(batch):
        used = ceil_div(max(0, int(lens[b].max())), tokens)
        if used > block_tables.shape[1]:
            raise InputError(f"request {b} has {used} blocks of {tokens} keys, block_tables {block_tables.shape[1]}")
        table = block_tables[b, :used].to(torch.int64)
        if used and not 0 <= int(table.min()) <= int(table.max()) < codes.shape[0]:
            raise InputError(f"block_tables[{b}] is {table.tolist()}; the cache has blocks 0..{codes.shape[0] - 1}")
        bits, scale = codes.view(torch.uint8)[table], scales[table]
        if not used:
            bits, scale = torch.zeros_like(codes[:1].view(torch.uint8)), torch.ones_like(scales[:1])
        k, scale = bits.flatten(0, 1), scale.flatten()
        window = weights[b * next_n : (b + 1) * next_n], torch.zeros_like(lens[b]), lens[b].clamp(min=0)
        if q_blocks is None:
            requests.append(Logits(q[b], k.view(codes.dtype), scale, *window))
        else:
            k_blocks, one = words(scale, q.shape[-1]), torch.ones_like(scale)
            requests.append(Logits(q[b], nibbles(k), one, *window, q_blocks.view(torch.uint8)[b].view(E8M0), k_blocks))
    return requests


def words(scale: Tensor, depth: int) -> Tensor:
    """E8M0 scales ``[.., D / 32]`` out of words ``scale`` ``[..]`` of four bytes, the first block in the lowest byte;
    bytes are moved unchanged."""
    stored = scale.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return stored.reshape(*scale.shape, 4)[..., : ceil_div(depth, BLOCK)].view(E8M0)


def nibbles(packed: Tensor) -> Tensor:
    """E2M1 codes ``[.., D]``, uint8, one a byte, out of ``packed`` ``[.., D / 2]``, the even one in the low nibble;
    codes are moved unchanged."""
    raw = packed.view(torch.uint8)
    return torch.stack([raw & 0xF, raw >> 4], dim=-1).flatten(-2)


def segments(context_lens: Tensor, split: int) -> list[int]:
    """Segments of each request: ``ceil(len / split)`` of its longest row; ``context_lens`` integers ``[B]`` or ``[B,
    next_n]``."""
    longest = context_lens if context_lens.dim() == 1 else context_lens[:, -1]
    return [ceil_div(max(0, length), split) for length in longest.tolist()]


def schedule(context_lens: Tensor, block_size: int, num_sms: int) -> Tensor:
    """A correct schedule, int32 ``[num_sms + 1, 2]`` of (request, segment): the last processors take one more.

    ``context_lens``: integers ``[B]`` or ``[B, next_n]``.
    """
    counts = segments(context_lens, SPLIT_BLOCKS * block_size)
    each, more = divmod(sum(counts), num_sms)
    work = [(request, segment) for request, count in enumerate(counts) for segment in range(count)]
    work.append((len(counts), 0))
    starts = [each * i + max(0, i - (num_sms - more)) for i in range(num_sms + 1)]
    return torch.tensor([work[start] for start in starts], dtype=torch.int32, device=context_lens.device)


def shares(table: Tensor, context_lens: Tensor, block_size: int) -> list[int] | str:
    """Segments of each processor, or the reason why the table is no partition.

    ``table``: integers ``[processors + 1, 2]`` as of :func:`schedule`; ``context_lens``: integers ``[B]`` or ``[B,
    next_n]``.
    """
    counts = segments(context_lens, SPLIT_BLOCKS * block_size)
    starts = []
    for i, (request, segment) in enumerate(table.tolist()):
        inside = 0 <= request < len(counts) and 0 <= segment < max(1, counts[request])
        if not inside and (request, segment) != (len(counts), 0):
            return f"row {i} is ({request}, {segment}), which is no segment; requests have {counts} segments"
        starts.append(sum(counts[:request]) + segment)
    if starts[0] != 0 or starts[-1] != sum(counts):
        return f"the table goes from segment {starts[0]} to {starts[-1]}; there are 0..{sum(counts)}"
    per_processor = [stop - start for start, stop in zip(starts, starts[1:], strict=False)]
    backward = [i for i, share in enumerate(per_processor) if share < 0]
    if backward:
        return f"processor {backward[0]} ends before it starts, so segments are done twice"
    return per_processor
