"""Contracts of attention of 16-bit queries over chosen keys: DeepSeek-V4's pages, whose values are the keys, and MSA's
blocks of keys.

Sources: FlashInfer 0.6.18.post1 mla/_core.py ``trtllm_batch_decode_sparse_mla_dsv4`` (packed pools of sm120) and
mla/_sparse_mla_sm120.py, FlashMLA's sparse decode over the same pages; msa_ops/sparse_prefill.py and sparse_decode.py.
Not covered: sm120's packed kernel rounds queries and the weights of keys to E4M3 first; dense pools of E4M3; MSA's
keys in NVFP4, its offset of queries, and partial outputs that are kept in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.errors import InputError, OptionError
from oracle.numbers.formats import E4M3FN, decode, from_codes
from oracle.routines.attention.contract import Place, check_pages, check_spans, positive_or_none
from oracle.routines.attention.wide import HALVES, INT32, WideAttention
from oracle.routines.base import E4M3, F32, Inputs, Options, OptionSpec, TensorSpec, positive, register
from oracle.routines.kv_cache import newer
from oracle.routines.kv_cache.contract import flat
from oracle.routines.kv_cache.newer import NOPE, PAGE, ROPE, TILE, v4_places
from oracle.routines.kv_cache.writers import columns, rows
from oracle.routines.traits import Kind
from oracle.truth.attention import Attention

WIDTH = NOPE + ROPE
"""Columns of a key of DeepSeek-V4."""


class Chosen(WideAttention):
    """Every token sees keys of its own; their sums are float32 of products on 16-bit tensor cores."""

    dispatched = False
    numerics: ClassVar[Mapping[str, tuple[str, ...]]] = {"sm90": (IEEE32,), "cpu": (IEEE32,)}
    plain: ClassVar[tuple[str, ...]] = (IEEE32,)

    def masked(self, options: Options) -> bool:
        return False


def of_slots(pages: Tensor, slots: Tensor, page: int) -> Tensor:
    """Keys of the ``slots`` ``[n]``, int64, in DeepSeek-V4's ``pages`` ``[C, bytes]`` of ``page`` tokens: codes times
    their powers of two, and the 64 columns of bfloat16; float64 ``[n, 512]``, NaN codes NaN. Source: as of the
    module."""
    raw = flat(pages)
    first, scales = v4_places(slots, page, pages.shape[1])
    powers = torch.exp2(raw[rows(scales, columns(NOPE // TILE))].to(torch.float64) - 127)
    codes = decode(from_codes(raw[rows(first, columns(NOPE))], E4M3FN))
    rope = decode(raw[rows(first, NOPE + columns(2 * ROPE))].contiguous().view(torch.bfloat16))
    return torch.cat([codes * powers.repeat_interleave(TILE, dim=1), rope], dim=1)


@register
class SparseMlaDsv4(Chosen):
    """Token ``t`` sees the slots ``sparse_indices[t]`` of one pool of pages and, where there are any,
    ``extra_sparse_indices[t]`` of another; -1 is none. Pages are those of ``quantize_and_insert_k_cache``; the key of
    all heads is the value too. ``sinks`` is a score for each head that has no value, and the log-sum-exp, to base 2,
    holds it. A token without slots gives 0, and -1e30 without a sink."""

    name = "trtllm_batch_decode_sparse_mla_dsv4"
    summary = "sparse decode of bfloat16 queries over DeepSeek-V4's pages, of one pool or two"
    source = "FlashInfer flashinfer.mla trtllm_batch_decode_sparse_mla_dsv4, packed pools; FlashMLA's sparse decode"
    returns = ("out", "lse")
    shapes: ClassVar[Mapping[str, str]] = {"out": "[T, H, 512]", "lse": "[T, H]"}
    log_base = 2.0
    sink = "sinks"
    no_keys = -1e30
    inputs = (
        TensorSpec("query", Kind.VALUES, HALVES[:1], ("T", "H", str(WIDTH)), "queries"),
        TensorSpec("swa_kv_cache", Kind.CODES, (torch.uint8,), ("C", "B"), "pages of the window"),
        TensorSpec("sparse_indices", Kind.SLOTS, INT32, ("T", "K"), "slots of each token; -1: none"),
        TensorSpec("compressed_kv_cache", Kind.CODES, (torch.uint8,), ("X", "Y"), "pages of the rest", optional=True),
        TensorSpec("extra_sparse_indices", Kind.SLOTS, INT32, ("T", "Z"), "their slots; -1: none", optional=True),
        TensorSpec("sinks", Kind.LOGITS, F32, ("H",), "a score of each head", optional=True),
    )
    options = (OptionSpec("bmm1_scale", None, None, "what multiplies a score; None: 512^-0.5"), PAGE)

    def narrow(self, inputs: Inputs) -> torch.dtype | None:
        return torch.bfloat16

    def shape(self, inputs: Inputs) -> tuple[int, int, int]:
        tokens, heads, width = inputs["query"].shape
        return tokens, heads, width

    @staticmethod
    def pools(inputs: Inputs) -> list[tuple[str, str]]:
        """The pools that a call has, and the slots in each."""
        pairs = [("swa_kv_cache", "sparse_indices"), ("compressed_kv_cache", "extra_sparse_indices")]
        return [(cache, slots) for cache, slots in pairs if cache in inputs]

    def refuse(self, inputs: Inputs, options: Options) -> None:
        super().refuse(inputs, options)
        self.extents(inputs)
        positive_or_none(self.name, options, "bmm1_scale")
        page = positive(options, "block_size")
        if ("compressed_kv_cache" in inputs) != ("extra_sparse_indices" in inputs):
            raise InputError(f"{self.name}: pass compressed_kv_cache with extra_sparse_indices, or neither")
        for cache, indices in self.pools(inputs):
            newer.check_pages(inputs[cache], page)
            slots, known = inputs[indices], inputs[cache].shape[0] * page
            if slots.numel() and not bool(((slots >= -1) & (slots < known)).all()):
                names = f"{int(slots.min())} to {int(slots.max())}"
                raise InputError(f"{self.name}: {indices} names slots {names}; there are {known}, and -1")

    def places(self, inputs: Inputs, options: Options, numerics: str = IEEE32) -> Iterator[Place]:
        query, page = inputs["query"], positive(options, "block_size")
        tokens, heads, _ = query.shape
        one = torch.ones((), dtype=torch.float32, device=query.device)
        scale = float(options["bmm1_scale"] or WIDTH**-0.5)
        sink = inputs["sinks"].to(torch.float64) if "sinks" in inputs else None
        none = torch.zeros(heads, dtype=torch.int64, device=query.device)
        for token in range(tokens):
            parts = []
            for cache, indices in self.pools(inputs):
                slots = inputs[indices][token]
                parts.append(of_slots(inputs[cache], slots[slots >= 0].to(torch.int64), page))
            keys = torch.cat(parts)
            ends = (none, none + len(keys))
            problem = Attention(query[token], keys, keys, scale, one.expand(heads), one, one, *ends, sink)
            yield Place(problem, token, slice(token, token + 1), slice(0, heads))


@register
class MsaSparseAttention(Chosen):
    """Sequence ``b`` has the queries ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` and the first ``seqused_k[b]`` keys
    of its pages of P; P and D are 128 in the library. A query sees the pages ``q2k_indices[g, t]`` of its sequence for
    KV head ``g`` alone, ascending, -1 behind the last, and with ``causal`` no key behind its place, the last query at
    the last key. ``v_global_scale`` multiplies the output. Every query sees a key."""

    name = "msa_sparse_attention"
    summary = "attention of 16-bit queries over chosen pages of an E4M3 cache"
    source = "FlashInfer flashinfer.msa_ops msa_sparse_attention and msa_sparse_decode_attention, paged E4M3 keys"
    returns = ("out", "lse")
    shapes: ClassVar[Mapping[str, str]] = {"out": "[T, H, D]", "lse": "[T, H]"}
    inputs = (
        TensorSpec("q", Kind.VALUES, HALVES, ("T", "H", "D"), "queries"),
        TensorSpec("k", Kind.CODES, E4M3, ("C", "G", "P", "D"), "pages of key codes"),
        TensorSpec("v", Kind.CODES, E4M3, ("C", "G", "P", "D"), "pages of value codes"),
        TensorSpec("q2k_indices", Kind.POSITIONS, INT32, ("G", "T", "K"), "blocks of each query; -1: none"),
        TensorSpec("cu_seqlens_q", Kind.OFFSETS, INT32, ("E",), "first query of each sequence, and the end"),
        TensorSpec("page_table", Kind.PAGES, INT32, ("B", "L"), "pages of each sequence"),
        TensorSpec("seqused_k", Kind.COUNTS, INT32, ("B",), "keys of each sequence"),
    )
    options = (
        OptionSpec("causal", False, (False, True), "no key behind the place of a query"),
        OptionSpec("softmax_scale", None, None, "what multiplies a score; None: D^-0.5"),
        OptionSpec("v_global_scale", None, None, "what multiplies the output; None: 1"),
    )

    def masked(self, options: Options) -> bool:
        return bool(options["causal"])

    def refuse(self, inputs: Inputs, options: Options) -> None:
        super().refuse(inputs, options)
        bound = self.extents(inputs)
        heads, of_keys = bound["H"], bound["G"]
        if heads % of_keys:
            raise InputError(f"{self.name}: {heads} heads of queries are no multiple of the {of_keys} of keys")
        for name in ("softmax_scale", "v_global_scale"):
            positive_or_none(self.name, options, name)
        check_spans(self.name, "cu_seqlens_q", inputs["cu_seqlens_q"], bound["T"])
        used, table, blocks = inputs["seqused_k"], inputs["page_table"], inputs["q2k_indices"]
        if bound["E"] != bound["B"] + 1:
            raise InputError(f"{self.name}: cu_seqlens_q has {bound['E']} entries; pass one more than sequences")
        most = bound["P"] * bound["L"]
        if not bool(((used >= 0) & (used <= most)).all()):
            raise InputError(f"{self.name}: seqused_k is {used.tolist()}; pages of a sequence hold 0 to {most} keys")
        read = table[torch.arange(bound["L"], device=table.device) * bound["P"] < used[:, None]]
        check_pages(self.name, "page_table", read, bound["C"])
        left, right = blocks[..., :-1], blocks[..., 1:]
        ascending = (right < 0) | (left >= 0) & (right > left)
        last = ((used - 1) // bound["P"]).repeat_interleave(inputs["cu_seqlens_q"].diff().to(torch.int64))
        behind = (blocks >= 0) & (blocks > last[None, :, None])
        if not bool(ascending.all()) or bool(behind.any()):
            raise OptionError(f"{self.name}: q2k_indices do not ascend, or name blocks behind the last key")
        if inputs["q2k_indices"].numel() and any(not stop for *_, stop in self.seen(inputs, options)):
            raise OptionError(f"{self.name}: a query sees no key; name a block before its place")

    @staticmethod
    def seen(inputs: Inputs, options: Options) -> Iterator[tuple[int, int, int, Tensor, int]]:
        """Sequence, query and KV head of each row of heads, the keys of its pages, int64 ``[K]``, ascending, and how
        many of them it sees."""
        ends, page = inputs["cu_seqlens_q"].tolist(), inputs["k"].shape[2]
        inside = torch.arange(page, device=inputs["q"].device)
        for b, used in enumerate(inputs["seqused_k"].tolist()):
            for token in range(ends[b], ends[b + 1]):
                last = used - (ends[b + 1] - 1 - token) if options["causal"] else used
                for g, blocks in enumerate(inputs["q2k_indices"][:, token]):
                    keys = (blocks[blocks >= 0].to(torch.int64)[:, None] * page + inside).flatten()
                    yield b, token, g, keys[keys < used], int((keys < last).sum())

    def places(self, inputs: Inputs, options: Options, numerics: str = IEEE32) -> Iterator[Place]:
        q, size, group = inputs["q"], inputs["k"].shape[2], inputs["q"].shape[1] // inputs["k"].shape[1]
        one = torch.ones((), dtype=torch.float32, device=q.device)
        factor = one * float(options["v_global_scale"] or 1.0)
        scale = float(options["softmax_scale"] or q.shape[2] ** -0.5)
        start = torch.zeros(group, dtype=torch.int64, device=q.device)
        for b, token, g, keys, stop in self.seen(inputs, options):
            page, own = inputs["page_table"][b].to(torch.int64)[keys // size], slice(g * group, (g + 1) * group)
            k, v = (decode(inputs[name][page, g, keys % size]) for name in "kv")
            spans = (start, start + stop)
            problem = Attention(q[token, own], k, v, scale, one.expand(group), one, factor, *spans)
            yield Place(problem, b, slice(token, token + 1), own)
