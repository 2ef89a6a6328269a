"""Contracts of attention whose queries, keys and values are E4M3: FlashAttention-3's forward pass and FlashInfer's
prefill of one sequence, of ragged and of paged ones.

Sources: vllm-project/flash-attention ``hopper/`` @617264c and vLLM 0.20.2 ``_vllm_fa3_C.fwd``; FlashInfer 0.6.18
``single_prefill_with_kv_cache``, ``BatchPrefillWithRaggedKVCacheWrapper`` and ``BatchPrefillWithPagedKVCacheWrapper``
with FP8 queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.errors import InputError, OptionError, ShapeError
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
from oracle.routines.base import E4M3, F32, Call, Inputs, Options, OptionSpec, TensorSpec, register
from oracle.routines.traits import Kind
from oracle.truth.attention import Attention

INT32 = (torch.int32,)


def _depth(name: str, tensor: str, depth: int, admitted: tuple[int, ...] | None = None) -> None:
    if admitted is not None and depth not in admitted:
        raise ShapeError(f"{name}: {tensor} has head dim {depth}; it takes {', '.join(map(str, admitted))}")
    if depth % 16 or depth > 256:
        raise ShapeError(f"{name}: {tensor} has head dim {depth}; it takes multiples of 16 up to 256")


@register
class MhaFwd(AttentionContract):
    """Sequence ``b`` has ``seqused_k[b]`` keys (all N without it), and query ``s`` stands at key ``seqused_k[b] - S +
    s``. It sees the keys from ``window_size_left`` before that place to ``window_size_right`` after it (-1: no limit);
    ``is_causal`` sets the right one to 0. Keys and values from ``seqused_k[b]`` on may hold anything.

    With ``page_table`` the keys of sequence ``b`` lie in the pages of N keys that its row names, one after the other;
    without it C is B.

    ``q_descale``, ``k_descale`` and ``v_descale`` are one for each sequence and KV head, that of the queries too; 1
    where they are not given. ``s_aux`` is a score for each query head that has no value. A row without keys gives 0 and
    -inf. ``softmax_scale`` is D^-0.5 where it is None. At most ``num_splits`` blocks share the keys of a row: each
    takes ``ceil(tiles / splits)`` tiles, and the float32 outputs are added with the exponentials of their
    log-sum-exps."""

    name = "mha_fwd"
    summary = "FlashAttention-3 forward of E4M3 queries, keys and values, with scales per sequence and KV head"
    source = "vLLM 0.20.2 torch.ops._vllm_fa3_C.fwd; Dao-AILab/flash-attention hopper"
    returns = ("out", "softmax_lse")
    shapes = {"out": "[B, S, H, V]", "softmax_lse": "[B, H, S]"}
    numerics: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "sm90": ("sm90.fa3.tile", "sm90.fa3.chain"),
        "cpu": (IEEE32,),
    }
    scales: ClassVar[Mapping[str, str]] = {"queries": "q_descale", "keys": "k_descale", "values": "v_descale"}
    sink = "s_aux"
    inputs = (
        TensorSpec("q", Kind.CODES, E4M3, ("B", "S", "H", "D"), "query codes"),
        TensorSpec("k", Kind.CODES, E4M3, ("C", "N", "G", "D"), "key codes of the G KV heads"),
        TensorSpec("v", Kind.CODES, E4M3, ("C", "N", "G", "V"), "value codes"),
        TensorSpec("q_descale", Kind.SCALES, F32, ("B", "G"), "scale of the queries of a KV head", optional=True),
        TensorSpec("k_descale", Kind.SCALES, F32, ("B", "G"), "scale of its keys", optional=True),
        TensorSpec("v_descale", Kind.SCALES, F32, ("B", "G"), "scale of its values", optional=True),
        TensorSpec("seqused_k", Kind.COUNTS, INT32, ("B",), "keys of each sequence", optional=True),
        TensorSpec("page_table", Kind.PAGES, INT32, ("B", "L"), "pages of each sequence", optional=True),
        TensorSpec("s_aux", Kind.LOGITS, (torch.bfloat16,), ("H",), "a sink: the score of each head", optional=True),
    )
    options = (
        OptionSpec("softmax_scale", None, None, "what multiplies a score; None: D^-0.5"),
        OptionSpec("is_causal", False, (False, True), "no key behind the place of a query"),
        OptionSpec("window_size_left", -1, None, "keys before the place of a query; -1: all"),
        OptionSpec("window_size_right", -1, None, "keys behind it; -1: all"),
        OptionSpec("softcap", 0.0, None, "C of C tanh(y / C), which a score becomes; 0: no soft cap"),
        OptionSpec("num_splits", 1, None, "at most so many blocks share the keys of a row; 1 to 256"),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        super().refuse(inputs, options)
        bound = self.extents(inputs)
        group_of(inputs, self.name)
        _depth(self.name, "q", bound["D"])
        _depth(self.name, "v", bound["V"])
        keys, table = bound["N"], inputs.get("page_table")
        if table is None and bound["C"] != bound["B"]:
            raise ShapeError(f"{self.name}: k has {bound['C']} sequences, q {bound['B']}; pass page_table for pages")
        if table is not None:
            keys = keys * bound["L"]
        used = inputs.get("seqused_k")
        if used is not None and not bool(((used >= 0) & (used <= keys)).all()):
            raise InputError(f"{self.name}: seqused_k is {used.tolist()}; there are {keys} keys")
        if table is not None:
            read = (
                table
                if used is None
                else table[torch.arange(bound["L"], device=table.device) * bound["N"] < used[:, None]]
            )
            check_pages(self.name, "page_table", read, bound["C"])
        positive_or_none(self.name, options, "softmax_scale")
        for name in ("window_size_left", "window_size_right"):
            window_size(self.name, options, name)
        cap_of(self.name, options, "softcap")
        splits = options["num_splits"]
        if type(splits) is not int or not 1 <= splits <= 256:
            raise OptionError(f"{self.name}: num_splits={splits!r}; pass 1 to 256")

    def masked(self, options: Options) -> bool:
        return bool(options["is_causal"]) or options["window_size_right"] != -1

    def splits(self, options: Options) -> int:
        return int(str(options["num_splits"]))

    def places(self, inputs: Inputs, options: Options, numerics: str = IEEE32) -> Iterator[Place]:
        q, k, v = (inputs[name] for name in "qkv")
        (batch, queries, _, depth), group = q.shape, group_of(inputs, self.name)
        ones = torch.ones((batch, k.shape[2]), dtype=torch.float32, device=q.device)
        of_q, of_k, of_v = (inputs.get(name, ones) for name in self.scales.values())
        scale = float(options["softmax_scale"] or depth**-0.5)
        left, right = int(options["window_size_left"]), int(options["window_size_right"])
        right, table = 0 if options["is_causal"] else right, inputs.get("page_table")
        for b in range(batch):
            keys = k.shape[1] * (1 if table is None else table.shape[1])
            keys = keys if "seqused_k" not in inputs else int(inputs["seqused_k"][b])
            pages = None if table is None else table[b, : -(-keys // k.shape[1])]
            own_k, own_v = (x[b, :keys] if pages is None else paged(x, pages, keys) for x in (k, v))
            start, stop = windows(queries, keys, group, left, right, q.device)
            for g in range(k.shape[2]):
                heads = slice(g * group, (g + 1) * group)
                sink = inputs["s_aux"][heads].to(torch.float64).repeat(queries) if "s_aux" in inputs else None
                rows = q[b, :, heads].reshape(queries * group, depth)
                problem = Attention(
                    rows, own_k[:, g], own_v[:, g], scale, of_q[b, g].expand(len(rows)), of_k[b, g],
                    of_v[b, g], start, stop, sink, cap_of(self.name, options, "softcap"),
                )  # fmt: skip  # the operands, then the windows
                yield Place(problem, b, slice(b * queries, (b + 1) * queries), heads)

    def shape(self, inputs: Inputs) -> tuple[int, int, int]:
        (batch, queries, heads, _), width = inputs["q"].shape, inputs["v"].shape[3]
        return batch * queries, heads, width

    def laid(self, name: str, x: Tensor, inputs: Inputs) -> Tensor:
        whole = x.reshape(*inputs["q"].shape[:2], *x.shape[1:])
        return whole.transpose(1, 2) if name == "lse" else whole

    def dtype(self, inputs: Inputs, options: Options) -> torch.dtype:
        return torch.bfloat16


class FlashInferPrefill(AttentionContract):
    """The last query of a sequence stands at its last key, and with ``causal`` a query sees no key behind its place.
    ``scale_q`` is one for each query head, ``scale_k`` and ``scale_v`` one for each KV head; 1 where they are not
    given. ``sm_scale`` is D^-0.5 where it is None. The log-sum-exp is to base 2. A query without keys may give
    anything."""

    returns = ("out", "lse")
    shapes: ClassVar[Mapping[str, str]] = {"out": "[M, H, D]", "lse": "[M, H]"}
    numerics: ClassVar[Mapping[str, tuple[str, ...]]] = {"sm90": ("sm90.flashinfer.fp8",), "cpu": (IEEE32,)}
    log_base = 2.0
    scales: ClassVar[Mapping[str, str]] = {"queries": "scale_q", "keys": "scale_k", "values": "scale_v"}
    keys: ClassVar[str] = "k"
    own_scales = (
        TensorSpec("scale_q", Kind.SCALES, F32, ("H",), "scale of each query head", optional=True),
        TensorSpec("scale_k", Kind.SCALES, F32, ("G",), "scale of the keys of each KV head", optional=True),
        TensorSpec("scale_v", Kind.SCALES, F32, ("G",), "scale of the values of each KV head", optional=True),
    )
    own_options = (
        OptionSpec("o_dtype", torch.bfloat16, (torch.bfloat16, torch.float16), "dtype of the output"),
        OptionSpec("causal", False, (False, True), "no key behind the place of a query"),
        OptionSpec("sm_scale", None, None, "what multiplies a score; None: D^-0.5"),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        super().refuse(inputs, options)
        self.extents(inputs)
        group_of(inputs, self.name, self.keys)
        _depth(self.name, "q", inputs["q"].shape[2], (64, 128, 256))
        positive_or_none(self.name, options, "sm_scale")

    def masked(self, options: Options) -> bool:
        return bool(options["causal"])

    def sequences(self, inputs: Inputs) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """The rows of the queries of each sequence, its keys and its values, codes ``[N, G, D]`` of E4M3; NaN stays."""
        yield slice(0, inputs["q"].shape[0]), inputs["k"], inputs["v"]

    def left(self, options: Options) -> int:
        """Keys that a query sees before its place; -1: all."""
        return -1

    def places(self, inputs: Inputs, options: Options, numerics: str = IEEE32) -> Iterator[Place]:
        q, group = inputs["q"], group_of(inputs, self.name, self.keys)
        (_, heads, depth), of_keys = q.shape, inputs[self.keys].shape[-2]
        ones = torch.ones(heads, dtype=torch.float32, device=q.device)
        of_q = inputs.get("scale_q", ones)
        of_k, of_v = (inputs.get(name, ones[:of_keys]) for name in ("scale_k", "scale_v"))
        scale, right = float(options["sm_scale"] or depth**-0.5), 0 if options["causal"] else -1
        for number, (rows, k, v) in enumerate(self.sequences(inputs)):
            queries = rows.stop - rows.start
            if not queries:
                continue
            start, stop = windows(queries, k.shape[0], group, self.left(options), right, q.device)
            for g in range(of_keys):
                own = slice(g * group, (g + 1) * group)
                taken = q[rows, own].reshape(queries * group, depth)
                problem = Attention(
                    taken, k[:, g], v[:, g], scale, of_q[own].repeat(queries), of_k[g], of_v[g], start, stop
                )
                yield Place(problem, number, rows, own)

    def shape(self, inputs: Inputs) -> tuple[int, int, int]:
        queries, heads, width = inputs["q"].shape
        return queries, heads, width

    def dtype(self, inputs: Inputs, options: Options) -> torch.dtype:
        dtype = options["o_dtype"]
        assert isinstance(dtype, torch.dtype)
        return dtype

    def _specified(self, call: Call) -> dict[str, Tensor | None]:
        tokens, heads, width = self.shape(call.inputs)
        seen = torch.zeros((tokens, heads), dtype=torch.bool, device=call.inputs["q"].device)
        for place in self._places(call):
            place.put(place.problem.seen(), seen)
        if bool(seen.all()):
            return dict.fromkeys(self.returns)
        return {"out": seen[:, :, None].expand(tokens, heads, width), "lse": seen}


CODES = (
    TensorSpec("q", Kind.CODES, E4M3, ("M", "H", "D"), "query codes"),
    TensorSpec("k", Kind.CODES, E4M3, ("N", "G", "D"), "key codes of the G KV heads"),
    TensorSpec("v", Kind.CODES, E4M3, ("N", "G", "D"), "value codes"),
)
WINDOW = OptionSpec("window_left", -1, None, "keys that a query sees before its place; -1: all")
QUERY_ENDS = TensorSpec("qo_indptr", Kind.OFFSETS, INT32, ("E",), "first query of each sequence, and the end: B + 1")


@register
class SinglePrefillWithKvCache(FlashInferPrefill):
    """One sequence of N keys."""

    name = "single_prefill_with_kv_cache"
    summary = "FlashInfer's prefill of one sequence with E4M3 queries, keys and values"
    source = "FlashInfer 0.6.18 single_prefill_with_kv_cache, backend fa3, FP8 queries"
    inputs = (*CODES, *FlashInferPrefill.own_scales)
    options = FlashInferPrefill.own_options


class BatchPrefill(FlashInferPrefill):
    """Every sequence has its own numbers of queries and keys. No query sees a key that lies more than ``window_left``
    before its place; -1: no limit."""

    options = (*FlashInferPrefill.own_options, WINDOW)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        super().refuse(inputs, options)
        window_size(self.name, options, "window_left")
        check_spans(self.name, "qo_indptr", inputs["qo_indptr"], inputs["q"].shape[0])

    def left(self, options: Options) -> int:
        return int(str(options["window_left"]))


@register
class BatchPrefillWithRaggedKVCacheWrapper(BatchPrefill):
    """Sequence ``b`` has the queries ``qo_indptr[b]`` to ``qo_indptr[b + 1]`` and the keys ``kv_indptr[b]`` to
    ``kv_indptr[b + 1]``, the ends excluded."""

    name = "BatchPrefillWithRaggedKVCacheWrapper"
    production = "batch_prefill_with_ragged_kv_cache"
    summary = "FlashInfer's prefill of ragged sequences with E4M3 queries, keys and values"
    source = "FlashInfer 0.6.18 BatchPrefillWithRaggedKVCacheWrapper.plan and run, backend fa3, FP8 queries"
    inputs = (
        *CODES,
        QUERY_ENDS,
        TensorSpec("kv_indptr", Kind.OFFSETS, INT32, ("E",), "first key of each sequence, and the end"),
        *FlashInferPrefill.own_scales,
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        super().refuse(inputs, options)
        check_spans(self.name, "kv_indptr", inputs["kv_indptr"], inputs["k"].shape[0])

    def sequences(self, inputs: Inputs) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """As of :meth:`FlashInferPrefill.sequences`."""
        ends, of_keys = inputs["qo_indptr"].tolist(), inputs["kv_indptr"].tolist()
        for b in range(len(ends) - 1):
            keys = slice(of_keys[b], of_keys[b + 1])
            yield slice(ends[b], ends[b + 1]), inputs["k"][keys], inputs["v"][keys]


@register
class BatchPrefillWithPagedKVCacheWrapper(BatchPrefill):
    """Sequence ``b`` has the queries ``qo_indptr[b]`` to ``qo_indptr[b + 1]`` and the pages
    ``paged_kv_indices[paged_kv_indptr[b]]`` to that of ``paged_kv_indptr[b + 1]``, the ends excluded, of P keys each;
    the last holds ``paged_kv_last_page_len[b]``. Slots behind the last key may hold anything."""

    name = "BatchPrefillWithPagedKVCacheWrapper"
    production = "batch_prefill_with_paged_kv_cache"
    summary = "FlashInfer's prefill over a paged E4M3 cache with E4M3 queries"
    source = "FlashInfer 0.6.18 BatchPrefillWithPagedKVCacheWrapper.plan and run, backend fa3, FP8 queries"
    numerics: ClassVar[Mapping[str, tuple[str, ...]]] = {"sm90": ("sm90.flashinfer.fp8.paged",), "cpu": (IEEE32,)}
    keys = "k_cache"
    inputs = (
        CODES[0],
        TensorSpec("k_cache", Kind.CODES, E4M3, ("C", "P", "G", "D"), "pages of key codes of the G KV heads"),
        TensorSpec("v_cache", Kind.CODES, E4M3, ("C", "P", "G", "D"), "pages of value codes"),
        QUERY_ENDS,
        TensorSpec("paged_kv_indptr", Kind.OFFSETS, INT32, ("E",), "first page of each sequence, and the end"),
        TensorSpec("paged_kv_indices", Kind.PAGES, INT32, ("L",), "the pages of all sequences"),
        TensorSpec("paged_kv_last_page_len", Kind.COUNTS, INT32, ("B",), "keys in the last page of each sequence"),
        *FlashInferPrefill.own_scales,
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        super().refuse(inputs, options)
        pages, last = inputs["paged_kv_indices"], inputs["paged_kv_last_page_len"]
        ends, size = inputs["paged_kv_indptr"], inputs["k_cache"].shape[1]
        check_spans(self.name, "paged_kv_indptr", ends, pages.shape[0])
        check_pages(self.name, "paged_kv_indices", pages, inputs["k_cache"].shape[0])
        if last.shape[0] != ends.shape[0] - 1:
            raise ShapeError(f"{self.name}: paged_kv_last_page_len has {len(last)} sequences, not {len(ends) - 1}")
        some = ends.diff() > 0
        if not bool(torch.where(some, (last >= 1) & (last <= size), last == 0).all()):
            raise InputError(f"{self.name}: paged_kv_last_page_len is {last.tolist()}; a page holds {size} keys")

    def sequences(self, inputs: Inputs) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """As of :meth:`FlashInferPrefill.sequences`."""
        ends, of_pages = inputs["qo_indptr"].tolist(), inputs["paged_kv_indptr"].tolist()
        size = inputs["k_cache"].shape[1]
        for b in range(len(ends) - 1):
            pages = inputs["paged_kv_indices"][of_pages[b] : of_pages[b + 1]]
            keys = max(0, len(pages) - 1) * size + int(inputs["paged_kv_last_page_len"][b])
            k, v = (paged(inputs[name], pages, keys) for name in ("k_cache", "v_cache"))
            yield slice(ends[b], ends[b + 1]), k, v
