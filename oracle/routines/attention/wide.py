"""Contracts of attention of 16-bit queries over an FP8 cache: vLLM's unified attention, SGLang's decode and extend, and
FlashMLA's sparse decode.

Their products go through 16-bit tensor cores, so P is rounded to the dtype of the queries at most. Two numerics are
admitted: of the exact keys and values, code times scale, and of keys and values that a kernel has rounded to the dtype
of the queries first.

Sources: vLLM 0.20.2 ``vllm/v1/attention/ops/triton_unified_attention.py``; SGLang 0.5.10
``sglang/srt/layers/attention/triton_ops``; FlashMLA as vLLM 0.20.2 builds it, ``_flashmla_C.sparse_decode_fwd``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.errors import InputError, OptionError, ShapeError
from oracle.numbers.formats import decode
from oracle.numbers.rounding import f32
from oracle.routines.attention.contract import (
    AttentionContract,
    Place,
    cap_of,
    check_pages,
    check_spans,
    group_of,
    paged,
    positive_or_none,
    window_size,
    windows,
)
from oracle.routines.base import E4M3, F32, Inputs, Options, OptionSpec, TensorSpec, register
from oracle.routines.kv_cache.writers import RANK, ROPE, ROPE_AT, ROW, SCALES_AT, TILE
from oracle.routines.traits import Kind
from oracle.truth.attention import Attention
from oracle.verdict.sets import rounded_to

INT32 = (torch.int32,)
HALVES = (torch.bfloat16, torch.float16)
ROUNDED = "ieee32.rounded-cache"
"""Keys and values are multiplied with their scales, rounded to float32 and then to the dtype of the queries."""
FLASHMLA = "sm90.flashmla.sparse"
"""The same of codes and scales that are rounded to bfloat16 first."""


class WideAttention(AttentionContract):
    """The scores and the output are float32 sums of products on 16-bit tensor cores."""

    numerics: ClassVar[Mapping[str, tuple[str, ...]]] = {"sm90": (IEEE32, ROUNDED), "cpu": (IEEE32, ROUNDED)}
    plain: ClassVar[tuple[str, ...]] = (IEEE32, ROUNDED)

    def narrow(self, inputs: Inputs) -> torch.dtype | None:
        dtype = inputs["q"].dtype
        return dtype if dtype in HALVES else None

    def dtype(self, inputs: Inputs, options: Options) -> torch.dtype:
        return self.narrow(inputs) or torch.bfloat16

    def shape(self, inputs: Inputs) -> tuple[int, int, int]:
        tokens, heads, width = inputs["q"].shape
        return tokens, heads, width


def _widened(codes: Tensor, scale: Tensor, dtype: torch.dtype, numerics: str) -> Tensor:
    """Code times scale, float64 ``[N, D]``: exact, or rounded to float32 and then to a 16-bit dtype; scales ``[N, 1]``
    or ``[]``."""
    exact = decode(codes) * scale.to(torch.float64)
    return exact if numerics == IEEE32 else decode(rounded_to(f32(exact), dtype))


def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


@register
class UnifiedAttention(WideAttention):
    """Sequence ``b`` has the queries ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` and ``seqused_k[b]`` keys in the
    pages of P keys that its row of ``block_table`` names. Its last query stands at its last key. No query sees a key
    behind its place, nor one that lies more than ``window_size_left`` before it (-1: all). Slots behind the last key
    may hold anything.

    ``k_descale`` and ``v_descale`` are one for the cache; ``k_scale_cache`` and ``v_scale_cache`` one for each key and
    KV head, and multiply these too; all are 1 where they are not given. ``sinks`` is a score for each head that has no
    value. ``softmax_scale`` is D^-0.5 where it is None.

    Queries of E4M3 have no scale here, and their output is bfloat16; a kernel that rounds P to E4M3 for them has to
    lift it."""

    name = "unified_attention"
    dispatched = False
    summary = "vLLM's Triton attention of 16-bit or E4M3 queries over a paged E4M3 cache"
    source = "vLLM 0.20.2 vllm/v1/attention/ops/triton_unified_attention.py unified_attention"
    shapes: ClassVar[Mapping[str, str]] = {"out": "[M, H, D]"}
    scales: ClassVar[Mapping[str, str]] = {"keys": "k_descale", "values": "v_descale"}
    sink = "sinks"
    inputs = (
        TensorSpec("q", Kind.CODES, (*HALVES, *E4M3), ("M", "H", "D"), "queries"),
        TensorSpec("k", Kind.CODES, E4M3, ("C", "P", "G", "D"), "pages of key codes of the G KV heads"),
        TensorSpec("v", Kind.CODES, E4M3, ("C", "P", "G", "D"), "pages of value codes"),
        TensorSpec("cu_seqlens_q", Kind.OFFSETS, INT32, ("E",), "first query of each sequence, and the end: B + 1"),
        TensorSpec("seqused_k", Kind.COUNTS, INT32, ("B",), "keys of each sequence"),
        TensorSpec("block_table", Kind.PAGES, INT32, ("B", "L"), "pages of each sequence"),
        TensorSpec("k_descale", Kind.SCALES, F32, ("1",), "scale of all keys", optional=True),
        TensorSpec("v_descale", Kind.SCALES, F32, ("1",), "scale of all values", optional=True),
        TensorSpec("k_scale_cache", Kind.SCALES, F32, ("C", "P", "G"), "scale of each key", optional=True),
        TensorSpec("v_scale_cache", Kind.SCALES, F32, ("C", "P", "G"), "scale of each value", optional=True),
        TensorSpec("sinks", Kind.LOGITS, (torch.bfloat16,), ("H",), "a score of each head", optional=True),
    )
    options = (
        OptionSpec("softmax_scale", None, None, "what multiplies a score; None: D^-0.5"),
        OptionSpec("window_size_left", -1, None, "keys that a query sees before its place; -1: all"),
        OptionSpec("softcap", 0.0, None, "C of C tanh(y / C), which a score becomes; 0: no soft cap"),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        super().refuse(inputs, options)
        bound, used = self.extents(inputs), inputs["seqused_k"]
        group_of(inputs, self.name)
        positive_or_none(self.name, options, "softmax_scale")
        window_size(self.name, options, "window_size_left")
        cap_of(self.name, options, "softcap")
        check_spans(self.name, "cu_seqlens_q", inputs["cu_seqlens_q"], bound["M"])
        queries = inputs["cu_seqlens_q"].diff()
        if len(queries) != len(used):
            raise ShapeError(f"{self.name}: cu_seqlens_q names {len(queries)} sequences, seqused_k {len(used)}")
        if not bool(((used >= queries) & (used <= bound["L"] * bound["P"])).all()):
            few, most = queries.tolist(), bound["L"] * bound["P"]
            raise InputError(f"{self.name}: seqused_k is {used.tolist()}; pass at least {few} and at most {most}")
        table = inputs["block_table"]
        read = torch.arange(bound["L"], device=table.device) * bound["P"] < used[:, None]
        check_pages(self.name, "block_table", table[read], bound["C"])
        for name in ("k_scale_cache", "v_scale_cache"):
            if name in inputs and bool((inputs[name] < 0).any()):
                raise InputError(f"{self.name}: {name} holds {float(inputs[name].min()):g}; scales are positive")

    def places(self, inputs: Inputs, options: Options, numerics: str = IEEE32) -> Iterator[Place]:
        q, device, group = inputs["q"], inputs["q"].device, group_of(inputs, self.name)
        (_, _, depth), size, of_keys = q.shape, inputs["k"].shape[1], inputs["k"].shape[2]
        ends, one, wide = inputs["cu_seqlens_q"].tolist(), _one(device), self.narrow(inputs) is not None
        scale, left = float(options["softmax_scale"] or depth**-0.5), int(options["window_size_left"])
        for b, keys in enumerate(inputs["seqused_k"].tolist()):
            pages, rows = inputs["block_table"][b, : -(-keys // size)], slice(ends[b], ends[b + 1])
            queries = rows.stop - rows.start
            if not queries:
                continue
            start, stop = windows(queries, keys, group, left, 0, device)
            for g in range(of_keys):
                own, parts = slice(g * group, (g + 1) * group), []
                for name in "kv":
                    codes = paged(inputs[name], pages, keys)[:, g]
                    whole = inputs[f"{name}_descale"][0] if f"{name}_descale" in inputs else one
                    if not wide and f"{name}_scale_cache" not in inputs:
                        parts.append((codes, whole))
                        continue
                    each = whole.to(torch.float64)
                    if f"{name}_scale_cache" in inputs:
                        each = each * paged(inputs[f"{name}_scale_cache"], pages, keys)[:, g, None]
                    parts.append((_widened(codes, each, self.dtype(inputs, options), numerics), one))
                (k, of_k), (v, of_v) = parts
                sink = inputs["sinks"][own].to(torch.float64).repeat(queries) if "sinks" in inputs else None
                taken = q[rows, own].reshape(queries * group, depth)
                ones, cap = one.expand(len(taken)), cap_of(self.name, options, "softcap")
                problem = Attention(taken, k, v, scale, ones, of_k, of_v, start, stop, sink, cap)
                yield Place(problem, b, rows, own)


class TritonAttention(WideAttention):
    """The scales of keys and values are numbers, positive and finite."""

    dispatched = False
    own_options = (
        OptionSpec("sm_scale", None, None, "what multiplies a score; None: D^-0.5"),
        OptionSpec("k_scale", 1.0, None, "scale of all keys of the cache"),
        OptionSpec("v_scale", 1.0, None, "scale of all values of the cache"),
        OptionSpec("logit_cap", 0.0, None, "C of C tanh(y / C), which a score becomes; 0: no soft cap"),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        super().refuse(inputs, options)
        bound = self.extents(inputs)
        group_of(inputs, self.name, "k_buffer")
        for name in ("sm_scale", "k_scale", "v_scale"):
            positive_or_none(self.name, options, name)
            if name != "sm_scale" and options[name] is None:
                raise OptionError(f"{self.name}: {name}=None; pass a positive finite number")
        cap_of(self.name, options, "logit_cap")
        check_spans(self.name, "kv_indptr", inputs["kv_indptr"], bound["L"])
        check_pages(self.name, "kv_indices", inputs["kv_indices"], bound["C"])

    def cached(self, inputs: Inputs, options: Options, numerics: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys ``[N, G, D]`` and values ``[N, G, V]`` of each sequence in the cache, float64; NaN codes are NaN."""
        ends, dtype = inputs["kv_indptr"].tolist(), self.dtype(inputs, options)
        device = inputs["q"].device
        names = ("k_scale", "v_scale")
        of_k, of_v = (torch.tensor(options[name], dtype=torch.float32, device=device) for name in names)
        for first, stop in zip(ends, ends[1:], strict=False):
            k, v = (paged(inputs[name][:, None], inputs["kv_indices"][first:stop], stop - first) for name in BUFFERS)
            yield _widened(k, of_k, dtype, numerics), _widened(v, of_v, dtype, numerics)


BUFFERS = ("k_buffer", "v_buffer")
CACHE = (
    TensorSpec("k_buffer", Kind.CODES, E4M3, ("C", "G", "D"), "key codes of the cache, a row for each token"),
    TensorSpec("v_buffer", Kind.CODES, E4M3, ("C", "G", "V"), "value codes of the cache"),
    TensorSpec("kv_indptr", Kind.OFFSETS, INT32, ("E",), "first index of each sequence, and the end: B + 1"),
    TensorSpec("kv_indices", Kind.PAGES, (torch.int32, torch.int64), ("L",), "rows of the cache of all sequences"),
)
SINKS = TensorSpec("sinks", Kind.LOGITS, F32, ("H",), "a score of each head", optional=True)


@register
class DecodeAttentionFwd(TritonAttention):
    """Query ``b`` sees the keys in the rows ``kv_indices[kv_indptr[b]]`` to that of ``kv_indptr[b + 1]`` of the cache,
    the end excluded. ``sinks`` is a score for each head that has no value. ``sm_scale`` is D^-0.5 where it is None. A
    query has at least one key."""

    name = "decode_attention_fwd"
    summary = "SGLang's Triton decode attention of 16-bit queries over an E4M3 cache"
    source = "SGLang 0.5.10 sglang/srt/layers/attention/triton_ops/decode_attention.py decode_attention_fwd"
    shapes: ClassVar[Mapping[str, str]] = {"out": "[B, H, V]"}
    sink = "sinks"
    inputs = (TensorSpec("q", Kind.VALUES, HALVES, ("B", "H", "D"), "queries, one a sequence"), *CACHE, SINKS)
    options = TritonAttention.own_options

    def masked(self, options: Options) -> bool:
        return False

    def refuse(self, inputs: Inputs, options: Options) -> None:
        super().refuse(inputs, options)
        counts = inputs["kv_indptr"].diff()
        if len(counts) != len(inputs["q"]) or not bool((counts > 0).all()):
            raise InputError(
                f"{self.name}: {len(inputs['q'])} queries have {counts.tolist()} keys; each has at least 1"
            )

    def shape(self, inputs: Inputs) -> tuple[int, int, int]:
        tokens, heads, _ = inputs["q"].shape
        return tokens, heads, inputs["v_buffer"].shape[2]

    def places(self, inputs: Inputs, options: Options, numerics: str = IEEE32) -> Iterator[Place]:
        q, group, one = inputs["q"], group_of(inputs, self.name, "k_buffer"), _one(inputs["q"].device)
        scale = float(options["sm_scale"] or q.shape[2] ** -0.5)
        for b, (k, v) in enumerate(self.cached(inputs, options, numerics)):
            start, stop = windows(1, len(k), group, -1, -1, q.device)
            for g in range(k.shape[1]):
                own = slice(g * group, (g + 1) * group)
                sink = inputs["sinks"][own].to(torch.float64) if "sinks" in inputs else None
                ones, cap = one.expand(group), cap_of(self.name, options, "logit_cap")
                problem = Attention(q[b, own], k[:, g], v[:, g], scale, ones, one, one, start, stop, sink, cap)
                yield Place(problem, b, slice(b, b + 1), own)


@register
class ExtendAttentionFwd(TritonAttention):
    """Sequence ``b`` has the new tokens ``qo_indptr[b]`` to ``qo_indptr[b + 1]`` of ``q``, ``k_extend`` and
    ``v_extend``, behind the keys in the rows ``kv_indices[kv_indptr[b]]`` to that of ``kv_indptr[b + 1]`` of the cache,
    the ends excluded. A query sees no key behind its own token, nor with ``sliding_window_size`` one that lies more
    than that before it (-1: all). Only keys and values of the cache have scales. ``sinks`` is a score for each head
    that has no value. ``sm_scale`` is D^-0.5 where it is None."""

    name = "extend_attention_fwd"
    summary = "SGLang's Triton prefill behind an E4M3 cache: 16-bit queries and new keys"
    source = "SGLang 0.5.10 sglang/srt/layers/attention/triton_ops/extend_attention.py extend_attention_fwd, is_causal"
    shapes: ClassVar[Mapping[str, str]] = {"out": "[M, H, V]"}
    sink = "sinks"
    inputs = (
        TensorSpec("q", Kind.VALUES, HALVES, ("M", "H", "D"), "queries of the new tokens"),
        TensorSpec("k_extend", Kind.VALUES, HALVES, ("M", "G", "D"), "their keys"),
        TensorSpec("v_extend", Kind.VALUES, HALVES, ("M", "G", "V"), "their values"),
        *CACHE,
        TensorSpec("qo_indptr", Kind.OFFSETS, INT32, ("E",), "first new token of each sequence, and the end"),
        SINKS,
    )
    options = (
        *TritonAttention.own_options,
        OptionSpec("sliding_window_size", -1, None, "keys that a query sees before its own; -1: all"),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        super().refuse(inputs, options)
        check_spans(self.name, "qo_indptr", inputs["qo_indptr"], inputs["q"].shape[0])
        if len({inputs[name].dtype for name in ("q", "k_extend", "v_extend")}) > 1:
            dtypes = ", ".join(str(inputs[name].dtype) for name in ("q", "k_extend", "v_extend"))
            raise InputError(f"{self.name}: q, k_extend and v_extend are {dtypes}; they have one dtype")
        window_size(self.name, options, "sliding_window_size")
        if options["sliding_window_size"] == 0:
            raise OptionError(f"{self.name}: sliding_window_size=0; pass -1 or at least 1")

    def shape(self, inputs: Inputs) -> tuple[int, int, int]:
        tokens, heads, _ = inputs["q"].shape
        return tokens, heads, inputs["v_extend"].shape[2]

    def places(self, inputs: Inputs, options: Options, numerics: str = IEEE32) -> Iterator[Place]:
        q, group, one = inputs["q"], group_of(inputs, self.name, "k_buffer"), _one(inputs["q"].device)
        scale, ends = float(options["sm_scale"] or q.shape[2] ** -0.5), inputs["qo_indptr"].tolist()
        left = int(options["sliding_window_size"])
        for b, (k, v) in enumerate(self.cached(inputs, options, numerics)):
            rows = slice(ends[b], ends[b + 1])
            queries = rows.stop - rows.start
            if not queries:
                continue
            k, v = (torch.cat([x, decode(inputs[f"{n}_extend"][rows])]) for n, x in zip("kv", (k, v), strict=True))
            start, stop = windows(queries, len(k), group, left, 0, q.device)
            for g in range(k.shape[1]):
                own = slice(g * group, (g + 1) * group)
                sink = inputs["sinks"][own].to(torch.float64).repeat(queries) if "sinks" in inputs else None
                taken = q[rows, own].reshape(queries * group, q.shape[2])
                ones, cap = one.expand(len(taken)), cap_of(self.name, options, "logit_cap")
                problem = Attention(taken, k[:, g], v[:, g], scale, ones, one, one, start, stop, sink, cap)
                yield Place(problem, b, rows, own)


@register
class FlashMlaWithKvcache(WideAttention):
    """Token ``(b, s)`` sees the slots ``indices[b, s]`` of the cache, page times P plus place; -1 is none. A slot has
    512 E4M3 codes, 4 float32 scales of 128 codes each, and 64 bfloat16 values, 656 bytes; the key of all heads is code
    times scale and the 64 values behind, the value is the first 512 of it. ``attn_sink`` is a score for each head that
    has no value, and that the log-sum-exp leaves out. A token without slots gives 0 and +inf.
    ``softmax_scale`` is 576^-0.5 where it is None.

    The library rounds the scales to bfloat16, and the product to bfloat16."""

    name = "flash_mla_with_kvcache"
    summary = "FlashMLA's sparse decode of bfloat16 queries over the 656-byte cache"
    source = "FlashMLA flash_mla_with_kvcache(is_fp8_kvcache=True, indices=...); vLLM 0.20.2 _flashmla_C"
    returns = ("out", "softmax_lse")
    shapes: ClassVar[Mapping[str, str]] = {"out": "[B, S, H, 512]", "softmax_lse": "[B, H, S]"}
    numerics: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "sm90": (IEEE32, ROUNDED, FLASHMLA),
        "cpu": (IEEE32, ROUNDED, FLASHMLA),
    }
    plain: ClassVar[tuple[str, ...]] = (IEEE32, ROUNDED, FLASHMLA)
    sink = "attn_sink"
    lse_sink = False
    no_keys = torch.inf
    inputs = (
        TensorSpec("q", Kind.VALUES, (torch.bfloat16,), ("B", "S", "H", "576"), "queries"),
        TensorSpec("k_cache", Kind.CODES, (torch.uint8,), ("C", "P", "1", "656"), "pages of P slots"),
        TensorSpec("indices", Kind.SLOTS, INT32, ("B", "S", "T"), "slots of each token; -1: none"),
        TensorSpec("attn_sink", Kind.LOGITS, F32, ("H",), "a score of each head", optional=True),
    )
    options = (OptionSpec("softmax_scale", None, None, "what multiplies a score; None: 576^-0.5"),)

    def masked(self, options: Options) -> bool:
        return False

    def refuse(self, inputs: Inputs, options: Options) -> None:
        super().refuse(inputs, options)
        bound = self.extents(inputs)
        positive_or_none(self.name, options, "softmax_scale")
        slots, indices = bound["C"] * bound["P"], inputs["indices"]
        if indices.numel() and not bool(((indices >= -1) & (indices < slots)).all()):
            names = f"{int(indices.min())} to {int(indices.max())}"
            raise InputError(f"{self.name}: indices names slots {names}; there are {slots}, and -1")

    def shape(self, inputs: Inputs) -> tuple[int, int, int]:
        batch, queries, heads, _ = inputs["q"].shape
        return batch * queries, heads, RANK

    def laid(self, name: str, x: Tensor, inputs: Inputs) -> Tensor:
        whole = x.reshape(*inputs["q"].shape[:2], *x.shape[1:])
        return whole.transpose(1, 2) if name == "lse" else whole

    def places(self, inputs: Inputs, options: Options, numerics: str = IEEE32) -> Iterator[Place]:
        q, one = inputs["q"].flatten(0, 1), _one(inputs["q"].device)
        cache, scale = inputs["k_cache"].reshape(-1, ROW), float(options["softmax_scale"] or (RANK + ROPE) ** -0.5)
        for token, taken in enumerate(inputs["indices"].flatten(0, 1)):
            slots = cache[taken[taken >= 0].to(torch.int64)]
            codes = slots[:, :RANK].contiguous().view(torch.float8_e4m3fn)
            scales = slots[:, SCALES_AT:ROPE_AT].contiguous().view(torch.float32)
            if numerics == FLASHMLA:
                scales = rounded_to(scales.to(torch.float64), torch.bfloat16)
            each = decode(scales).repeat_interleave(TILE, dim=1)
            latent = _widened(codes, each, torch.bfloat16, numerics)
            keys = torch.cat([latent, decode(slots[:, ROPE_AT:].contiguous().view(torch.bfloat16))], dim=1)
            heads, none = q.shape[1], torch.zeros(q.shape[1], dtype=torch.int64, device=q.device)
            sink = inputs["attn_sink"].to(torch.float64) if "attn_sink" in inputs else None
            ends = (none, none + len(keys))
            problem = Attention(q[token], keys, latent, scale, one.expand(heads), one, one, *ends, sink)
            yield Place(problem, token, slice(token, token + 1), slice(0, heads))
