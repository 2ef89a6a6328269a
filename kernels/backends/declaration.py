"""What a backend declares: its name, and a function for each operation that it has.

A backend module ends with ``BACKEND = Backend(name="...", kernel=..., linear=linear, ...)``. The type checker compares
each function with the signature here; an operation that is not named is not there, and a plan says so
(:meth:`Backend.why_not`) before any call.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import support
from ..errors import Failed, KernelError, MissingPackageError, Reason, Unsupported
from ..records import Config, Machine, Problem

Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""From shape, strides and dtype to an uninitialised tensor."""
Pair = tuple[Tensor, Tensor]
"""Codes and scales."""
Quantiser = Callable[[Tensor, Tensor | None, Allocate], Pair]
"""``(matrix, payload to write into or None, allocator) -> (payload, scales)``."""
Linear = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor]
"""``(a, b, scale_a, scale_b, bias, out_dtype)``."""
Gemm = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, bool], None]
"""``(a, a_scale, b, b_scale, out, c, float_scales)``; the last, DeepGEMM's ``disable_ue8m0_cast``, says that scales
need be no powers of two."""

OfHeads = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Scales of queries, keys and values; None: 1."""
States = tuple[Tensor, Tensor]
"""Outputs of attention and their log-sum-exps."""


class Attended(NamedTuple):
    """The operands of attention over a cache, as of :func:`kernels.mha_fwd`.

    Attributes
    ----------
    q, k, v
        Queries, and keys and values of each sequence or of the pages of a cache.
    scales
        Of queries, keys and values.
    used, pages
        Keys in use and pages of each sequence; None: all, and no pages.
    sink
        A score of each head that has no value.
    scale
        Of scores.
    window
        Keys to the left and to the right of a query; -1 for any number.
    causal, splits, cap
        As of the verb; the soft cap is 0 for none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scales: OfHeads
    used: Tensor | None
    pages: Tensor | None
    sink: Tensor | None
    scale: float
    window: tuple[int, int]
    causal: bool
    splits: int
    cap: float = 0.0


class Batched(NamedTuple):
    """The operands of prefills of several sequences, as of :func:`kernels.batch_prefill_with_paged_kv_cache`.

    Attributes
    ----------
    q, k, v
        Queries of all sequences, and their keys and values or the pages of a cache.
    scales
        Of queries, keys and values.
    ends
        First query of each sequence, and the end.
    of_keys
        The same of keys, or with pages of these.
    pages, last
        Pages of all sequences, and keys in the last one of each; None: no pages.
    dtype, causal, scale
        Of the output, and as of the verb.
    left
        Keys to the left of a query; -1 for any number.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scales: OfHeads
    ends: Tensor
    of_keys: Tensor
    pages: Tensor | None
    last: Tensor | None
    dtype: torch.dtype
    causal: bool
    scale: float
    left: int


WideLinear = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(input [M, K] bf16 or f16, weight [N, K], weight_scale) -> [M, N]`` of the dtype of the input."""


class Blocks(NamedTuple):
    """How a quantiser makes blocks that share a scale byte (:func:`kernels.mx_blocks.quantised`).

    Attributes
    ----------
    element
        ``e4m3``, ``e5m2`` or ``e2m1``, two codes a byte.
    rounding
        Of the shared exponent: ``rceil``, ``floor``, ``ceil``, ``even`` or ``even_of_finite``.
    layout
        ``128x4``, ``8x4`` or ``linear``.
    inversed
        Whether the global scale of NVFP4 is that which multiplies codes.
    gated
        Whether what is quantised is ``silu(gate) * up`` of ``x [M, 2 K] = [gate, up]``, rounded to the dtype of ``x``.
    """

    element: str
    rounding: str
    layout: str
    inversed: bool
    gated: bool


class Matrices(NamedTuple):
    """Whose rows are quantised: matrices one after another, each with tiles of scale bytes of its own.

    Attributes
    ----------
    number
        How many; the global scale of NVFP4 is one, or ``[number]``.
    offsets
        int32 ``[number + 1]``: the first row of each, and behind the last one's; None: all have as many rows.
    placement
        Of tiles under ``offsets``, as of :func:`kernels.scaled_fp4_experts_quant`.
    """

    number: int
    offsets: Tensor | None = None
    placement: str = "tight"


class Scales(NamedTuple):
    """The block scales of an operand in their memory.

    Attributes
    ----------
    memory
        Flat: float8_e8m0fnu, float8_e4m3fn or float32.
    width
        Codes of a row that share a scale.
    tile
        ``128x4``, ``8x4`` or ``linear``: how rows and columns lie (:mod:`kernels.layout`).
    """

    memory: Tensor
    width: int
    tile: str


class Rows(NamedTuple):
    """Which rows of a block-scaled product meet which weight, on the device of the operands.

    Attributes
    ----------
    table
        int32 ``[4, G]``: the first row of each group, the row behind its last, and the rows of the matrices of scales
        where the scales of its first row and those of its weight lie.
    expert
        int32 ``[R]`` instead: the group of every row, -1 for none, one group to a tile of 128 rows; scales lie row by
        row.
    depth
        int32 ``[3, G]`` instead: the first k of each group, the k behind its last, and the first of its columns of
        scales, which lie in tiles of its own; the output is ``[G R, N]``.
    """

    table: Tensor | None
    expert: Tensor | None = None
    depth: Tensor | None = None


class Product(NamedTuple):
    """A product of block-scaled codes, written into ``out``.

    Attributes
    ----------
    a, b
        ``[R, K]`` and ``[G, N, K]``; uint8 operands hold two E2M1 codes a byte.
    left, right
        Their scales; those of each weight lie in tiles of its own.
    out
        ``[R, N]``; rows of no group are left alone.
    rows
        Which rows meet which weight; None: all the one of a dense product, or an equal share the weight of each group.
    alpha, bias
        ``[1]`` or ``[G]``, and ``[N]``, or None.
    accumulate
        Whether what stands in ``out`` is added.
    """

    a: Tensor
    left: Scales
    b: Tensor
    right: Scales
    out: Tensor
    rows: Rows | None
    alpha: Tensor | None
    bias: Tensor | None
    accumulate: bool


MxProduct = Callable[[Product], None]
"""As :attr:`Backend.mx_product`."""


class Part(NamedTuple):
    """What goes into one cache: ``x [T, H, D]`` into ``memory [pages, P, H, D]`` (or ``[..., D/x, x]``).

    ``scale`` divides, one value or ``[H]``; without one ``x`` is cast, or copied where the dtypes are equal.
    """

    x: Tensor
    memory: Tensor
    scale: Tensor | None = None


class Slots(NamedTuple):
    """The slot of each token: ``slot [T]``, or that of ``positions`` in the pages of the request ``slot``.

    ``skip``: the slot that is not written; None: negative ones.
    """

    slot: Tensor
    positions: Tensor | None = None
    indices: Tensor | None = None
    indptr: Tensor | None = None
    skip: int | None = None


class CacheRows(NamedTuple):
    """Rows of requests: ``table [B, L]`` of pages, first rows ``starts`` (and the end, where ``lens`` is None)."""

    table: Tensor
    starts: Tensor
    seq_starts: Tensor | None
    lens: Tensor | None


def _absent(*operands: Any, **options: Any) -> Any:
    raise AssertionError("a plan chose a backend for an operation that it does not declare")


def _no_steps(p: Problem, machine: Machine) -> tuple[str, ...]:
    return ()


def _complete(p: Problem, machine: Machine) -> str | None:
    return None


def _untold(p: Problem, machine: Machine) -> str:
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One library.

    Operands of the operations, which the verbs have checked (M rows, N columns, K summed, G groups, C columns of a row,
    codes E4M3 and scales float32 unless another dtype is named). Nothing is checked again.

    quantisers
        ``x`` ``[M, K]`` or ``[..., K]`` bf16, f16 or f32; ``scale``, ``scale_ub`` ``[1]`` float32; ``global_scale``
        ``[1]`` or ``[M]`` float32; ``out``, ``q`` ``[M, K]`` E4M3; ``masked_m`` ``[G]`` int32. They return codes of
        the shape of ``x`` (of half its columns for gated inputs, whose rows are gate and up) and scales ``[1]``,
        ``[M, 1]`` or ``[M, K / group]`` float32.
    norms and rope
        ``x``, ``residual`` ``[M, C]`` bf16, f16 or f32, ``weight`` ``[C]``, ``scale`` ``[1]``; ``rotated``
        ``[T, H, D]``, ``other`` ``[T, H, C]``, ``cos_sin_cache`` ``[S, D]`` float32, ``pos_ids`` ``[T]`` integers.
    caches
        ``x`` ``[T, C]``, ``rope`` ``[T, E]``, ``memory`` ``[pages, P, C]``, ``slot`` ``[T]`` integers, ``scales``
        ``[pages, P, H, D/16]``; ``source`` ``[pages, P, C]``, ``out`` ``[T, C]``, ``scale`` ``[pages, P, tiles]``,
        ``beside`` ``[pages, P, E]``.
    linear, block_linear, scaled_mm, unfused
        ``a`` ``[M, K]``, ``b`` ``[K, N]`` column-major; ``scale_a`` ``[M, 1]`` or ``[1, 1]``, ``scale_b`` ``[1, N]`` or
        ``[1, 1]``, or blocks ``[M, K/128]`` and ``[K/128, N/128]``; ``bias`` ``[N]`` bf16, f16 or f32, ``one`` ``[1]``.
        They return ``[M, N]`` of ``out_dtype``.
    products into an output
        ``a`` ``[M, K]``, ``a_scale`` ``[M, K/128]``, ``b`` ``[N, K]``, ``b_scale`` ``[N/128, K/128]``, ``out`` and
        ``c`` ``[M, N]`` bf16, f16 or f32; grouped: ``b`` ``[G, N, K]``, ``b_scale`` ``[G, N/128, K/128]``,
        ``m_indices`` ``[M]``, ``m_indptr`` ``[G + 1]``, and masked ``a`` ``[G, M, K]``, ``masked_m`` ``[G]`` int32; of
        groups of K ``ks_tensor`` ``[G]`` int32, ``out`` ``[G, M, N]``; ``scale_a`` ``[M, 1]``, ``scale_b`` ``[G, N]``
        and ``offsets`` ``[G]`` int32 with scales of rows and channels; of block-scaled codes ``alpha`` ``[1]`` or
        ``[G]``, ``bias`` ``[N]``.
    logits
        ``q`` ``[M, H, D]`` or ``[B, next_n, H, D]``, ``k`` ``[N, D]``, ``k_scale`` ``[N]``, ``weights`` ``[M, H]``,
        ``ks`` and ``ke`` ``[M]`` int32; ``cache`` ``[blocks, P, 1, D + 4]`` uint8, ``lens`` ``[B, next_n]``, ``tables``
        ``[B, pages]``, ``schedule`` ``[num_sms + 1, 2]`` int32. They return ``[M, N]`` float32.
    attention
        ``q`` ``[B, S, H, D]``, ``k`` and ``v`` ``[B, N, G, ...]`` or pages ``[C, N, G, ...]``, ``scales`` ``[B, G]``,
        ``used`` ``[B]`` and ``pages`` ``[B, L]`` int32, ``sink`` ``[H]`` bf16; of one sequence ``q`` ``[M, H, D]``,
        ``k`` and ``v`` ``[N, G, D]``, ``scales`` ``[H]`` and ``[G]``; latent ``q`` ``[B, S, H, 576]`` bf16, ``cache``
        ``[C, P, 1, 656]`` uint8, ``indices`` ``[B, S, T]`` int32, ``sink`` ``[H]`` float32. They return outputs in the
        shape of ``q`` with the width of a value, and log-sum-exps as of the verb.
    layers of block-scaled experts
        ``x`` ``[T, H]``, ``x_scale`` flat in tiles, ``topk_weights`` ``[T, top_k]`` float32, ``local`` ``[T, top_k]``
        int32, ``globals_`` and ``factors`` ``[E]`` float32, ``gates`` ``[E, 3]`` float32. They return ``[T, H]``.
    experts of TensorRT-LLM
        ``routing_logits`` ``[T, E]``, ``hidden_states`` ``[T, H]``, ``gemm1_weights`` ``[E, 2I, H]``,
        ``gemm2_weights`` ``[E, H, I]``, ``output1_scales_scalar``, ``output1_scales_gate_scalar`` and
        ``output2_scales_scalar`` ``[E]`` float32. They return ``[T, H]`` bf16.

    NaN and infinity are as of the verb that calls: :mod:`kernels.quantize` for codes; a NaN code or scale reaches the
    elements of its row or column of a product.

    Attributes
    ----------
    name
        As in :data:`kernels.plan.TABLE` and :data:`kernels.support.NEEDS`.
    kernel, steps
        The library's routine for a problem, and what is done to the operands before it is called; both pure.
    missing
        What the installed release lacks for a problem, or None. It may load the library, so it is asked on the running
        machine only, after everything else holds; MissingPackageError is an answer too.
    numerics
        How it sums, where a plan says so: the name of a schedule, or that only bounds hold, and why; pure.
    """

    name: str
    kernel: Callable[[Problem, Machine], str]
    steps: Callable[[Problem, Machine], tuple[str, ...]] = _no_steps
    missing: Callable[[Problem, Machine], str | None] = _complete
    numerics: Callable[[Problem, Machine], str] = _untold

    quant_static: Callable[[Tensor, Tensor], Tensor] = _absent  # (x, scale)
    quant_tensor: Callable[[Tensor], Pair] = _absent
    quant_token: Callable[[Tensor, Tensor | None], Pair] = _absent  # (x, scale_ub)
    quant_group: Callable[[Tensor, int, float, bool, str, Tensor | None], Pair] = _absent
    """``(x, group, eps, ue8m0, layout, out)``; layout row, col or tma."""
    group_quantiser: Callable[[int, float, bool, str], Quantiser] | None = None
    """:attr:`quant_group` for matrices, prepared: ``(group, eps, ue8m0, layout)``; only where it is worth it."""
    quant_group_packed: Callable[[Tensor, int, float], Pair] = _absent  # (x, group, eps)
    reciprocal_quantiser: Callable[[torch.dtype], Quantiser] = _absent
    """For inputs of a dtype: groups of 128 by FlashInfer's formula (:func:`kernels.formulas.flashinfer_blocks`), the
    scale ``[K/128, align(M, 4)]``."""
    gated_static: Callable[[Tensor, Tensor, str], Tensor] = _absent  # (x, scale, rounding)
    gated_group: Callable[[Tensor, int, str, float, float, Tensor | None, bool, bool, Tensor | None], Pair] = _absent
    """``(x, group, rounding, amax_floor, scale_floor, scale_ub, ue8m0, transposed, masked_m)``."""
    gated_group_bf16: Callable[[Tensor, float, Tensor], Pair] = _absent  # (x, amax_floor, masked_m)
    norm_static: Callable[[Tensor, Tensor, Tensor | None, Tensor, float, str, bool], tuple[Tensor, Tensor | None]] = (
        _absent
    )
    """``(x, weight, residual, scale, epsilon, rounding, rounded_sum)``: codes and the sum."""
    norm_group: Callable[
        [Tensor, Tensor, Tensor | None, float, int, Tensor | None, bool], tuple[Tensor, Tensor, Tensor | None]
    ] = _absent
    """``(x, weight, residual, epsilon, group, scale_ub, transposed)``: codes, scales and the sum."""
    norm_blocks: Callable[
        [Tensor, Tensor, Tensor | None, float, str, Blocks, Tensor | None], tuple[Tensor, Tensor, Tensor | None]
    ] = _absent
    """``(x, weight, residual, epsilon, rounding, blocks, global_scale)``: codes, scale bytes and the sum."""
    rope: Callable[[Tensor, Tensor, Tensor, Tensor, bool, float], Pair] = _absent
    """``(rotated, other, cos_sin_cache, pos_ids, is_neox, factor)``: the codes of both."""
    cache_store: Callable[[tuple[Part, ...], Slots], None] = _absent
    cache_tiles: Callable[
        [Tensor, Tensor | None, tuple[Tensor, Tensor, Tensor | None], Tensor | None, float, float, bool, bool], None
    ] = _absent
    """``(x, rope, (codes, scales, rotated), slot, amax_floor, scale_floor, ue8m0, reciprocal)``."""
    cache_nvfp4: Callable[[tuple[Part, ...], tuple[Tensor, ...], Tensor], None] = _absent
    """``(parts, their scales [pages, P, H, D/16], slot)``."""
    cache_gather: Callable[[Tensor, Tensor, Tensor | None, tuple[Tensor, Tensor] | None, CacheRows | None], None] = (
        _absent
    )
    """``(source [pages, P, C], out [N, C], scale [pages, P, tiles], (beside, its rows), rows)``."""
    quant_blocks: Callable[[Tensor, Blocks, int, Tensor | None, Matrices | None], Pair] = _absent
    """``(x, blocks, columns, global_scale, matrices)``: blocks that share a scale byte; ``matrices`` under recipes that
    are not the usual one."""
    linear: Linear = _absent
    block_linear: Linear = _absent
    scaled_mm: Linear = _absent
    unfused: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype, Tensor], Tensor] = _absent
    """As :attr:`scaled_mm`, then a float32 one on the device."""
    block_product: Gemm = _absent
    """:attr:`gemm_nt` on Blackwell."""
    gemm_nt: Gemm = _absent
    aligned_gemm_nt: Gemm = _absent
    """:attr:`gemm_nt` for ``a``, ``a_scale`` and ``out`` that are dense on 16 bytes."""
    dense_gemm_nt: Callable[[], Gemm] | None = None
    """:attr:`aligned_gemm_nt` for a weight and a scale that are so too, prepared for the configuration of the moment;
    only where it is worth it."""
    blockscale_sm90: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor] = _absent
    """``(a, a_scale [K/128, align(M, 4)], b, b_scale, out)``."""
    few_rows: Callable[[torch.dtype, int, int], WideLinear] = _absent
    """``(dtype, n, k)``: for inputs of a dtype with less than 32 rows and a weight ``[N, K]``; FlashInfer's
    formula, inside the product."""
    grouped_contiguous: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], None] = _absent
    """``(a, a_scale, b, b_scale, out, m_indices, float_scales)``."""
    block_runs: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None] = _absent
    """``(a, a_scale, b, b_scale, out, m_indptr)``: rows in runs as they lie; rows of no group are left alone."""
    grouped_masked: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, bool], None] = _absent
    """``(a, a_scale, b, b_scale, out, masked_m, expected_m, float_scales)``."""
    alignment: Callable[[], int] = _absent
    """Rows to which each expert's run of :attr:`grouped_contiguous` is aligned."""
    grouped_scaled: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor] = _absent
    """``(a, b, scale_a, scale_b, offsets, out_dtype)``."""
    gemm_1d1d: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], None] = _absent
    """``(a, a_scale [M, K/128], b, b_scale [N, K/128], out float32, c)``."""
    k_grouped: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, list[int], Tensor, Tensor], None] = _absent
    """``(a, a_scale, b, b_scale, out [G, M, N] float32, ks, ks_tensor, c)``."""
    skip_head_mid: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[int, int, int], bool], None] = _absent
    """``(a, a_scale, b, b_scale, out, (left, mid, right), float_scales)``."""
    einsum: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] = _absent
    """``(a [B, H, R], a_scale, b [H, D, R], b_scale, out [B, H, D])``."""
    bmm: Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor] = _absent
    """``(A [G, M, K], B [G, K, N], A_scale [1], B_scale [1], out_dtype)``."""
    mx_product: MxProduct = _absent
    """Block-scaled codes of every kind."""
    mxfp8_product: MxProduct = _absent
    """One matrix by one weight: E4M3 or E5M2 codes with E8M0 scales of 32 in tiles."""
    nvfp4_product: MxProduct = _absent
    """The same of E2M1 codes with E4M3 scales of 16, and an alpha ``[1]``."""
    mxfp4_product: MxProduct = _absent
    """The same of E2M1 codes with E8M0 scales of 32."""
    mxfp8_batched: MxProduct = _absent
    """:attr:`mxfp8_product` of G matrices of R / G rows, each with a weight of its own."""
    mxfp8_mxfp4_grouped: MxProduct = _absent
    """FP8 rows of each expert against its weight of E2M1, scales of rows in FlashInfer's placement."""
    nvfp4_grouped: MxProduct = _absent
    """E2M1 rows of each expert against its weight, with E4M3 scales of 16 and an alpha ``[G]``."""
    mxfp8_tight: MxProduct = _absent
    """Rows of each expert against its weight, scales of an expert's rows in tiles right behind those before them."""
    nvfp4_tight: MxProduct = _absent
    """The same of E2M1 codes with E4M3 scales of 16, and an alpha ``[G]``."""
    mxfp4_tight: MxProduct = _absent
    """The same of E2M1 codes with E8M0 scales of 32."""
    mixed_product: MxProduct = _absent
    """Codes of eight or four bits on either side, with powers of two by rows and columns, float32 or E8M0."""
    mixed_contiguous: MxProduct = _absent
    """The same of rows that name their expert."""
    mixed_masked: MxProduct = _absent
    """The same of a matrix for each expert, whose first rows are real."""
    mixed_psum: MxProduct = _absent
    """The same of rows up to the end of their expert, which begins at a multiple of 128."""
    moe_blocks: Callable[..., Tensor] = _absent
    """``(operation, x [T, H] bf16 or E4M3, its scales in tiles or None, weights, their scales [E, bytes], routing
    weights [T, top_k], local ids, global scales [E], factors [E], gates [E, 3], combine)``; pairs are of the first and
    the second product."""
    moe_trtllm: Callable[..., Tensor] = _absent
    moe_cutlass: Callable[..., Tensor] = _absent
    mqa_logits: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Tensor] = _absent
    """``(q, k, k_scale, weights, ks, ke, clean)``."""
    paged_mqa_logits: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, bool], Tensor] = _absent
    """``(q, cache, weights, lens, tables, schedule, longest, clean)``."""
    paged_metadata: Callable[[Tensor, int, int], Tensor] = _absent  # (lens, block_size, num_sms)

    attention: Callable[[Attended], States] = _absent
    attention_prefill: Callable[[Tensor, Tensor, Tensor, OfHeads, torch.dtype, bool, float], States] = _absent
    """``(q, k, v, scales, dtype, causal, softmax_scale)`` of one sequence; the log-sum-exp is to base 2."""
    attention_ragged: Callable[[Batched], States] = _absent
    """Several sequences; the log-sum-exp is to base 2."""
    attention_paged: Callable[[Batched], States] = _absent
    """The same over pages."""
    attention_latent: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], States] = _absent
    """``(q, cache, indices, sink, softmax_scale)``; the log-sum-exp is without the sink."""

    def gemm(self, op: str) -> Gemm:
        """Its product of block-scaled FP8 codes for an operation of the plan."""
        own = op == support.BLOCKS and self.block_product is not _absent
        return self.block_product if own else self.gemm_nt

    def takes_runs(self) -> bool:
        """Whether it multiplies rows in runs as they lie."""
        return self.block_runs is not _absent

    def of(self, op: str) -> MxProduct:
        """Its product of block-scaled codes for an operation: one of its own, or that of every kind."""
        own: MxProduct = getattr(self, op)
        return self.mx_product if own is _absent else own

    def declares(self, op: str) -> bool:
        """Whether it has the functions of an operation of the plan."""
        ways = FUNCTIONS.get(op, ((op,),))
        return any(all(getattr(self, name) is not _absent for name in way) for way in ways)

    def why_not(self, p: Problem, machine: Machine, config: Config) -> Reason | None:
        """Why it does not serve the problem, by the first row that fails and by what it declares; pure."""
        why = support.why_not(self.name, p, machine, config)
        return why or (None if self.declares(p.op) else Unsupported(f"it has no {p.op}"))

    def lacks(self, p: Problem, machine: Machine) -> Reason | None:
        """What the installed release lacks for a problem that :meth:`why_not` lets pass; may load the library."""
        try:
            why = self.missing(p, machine)
        except MissingPackageError as error:
            why = "; ".join(error.reasons.values())
        return None if why is None else Failed(why)


FUNCTIONS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    # operation: the functions it needs, in each way that serves it; one function of its own name where none is listed
    "quant_tensor": (("quant_static", "quant_tensor"),),
    "quant_reciprocal": (("reciprocal_quantiser",),),
    "quant_gated": (("gated_static", "gated_group", "gated_group_bf16"),),
    "quant_norm": (("norm_static", "norm_group", "norm_blocks"),),
    "quant_rope": (("rope",),),
    "quant_cache": (("cache_store", "cache_tiles", "cache_nvfp4", "cache_gather"),),
    **{op: (("quant_blocks",),) for op in support.BLOCK_QUANTISERS},
    "cast": ((),),  # plain torch on every device; nothing is dispatched
    "layout": ((),),
    "torch_linear": (("scaled_mm", "unfused"),),
    support.DENSE: (("gemm_nt", "aligned_gemm_nt"),),
    support.BLOCKS: (("block_product",), ("gemm_nt", "aligned_gemm_nt")),
    "dynamic_blockscale": (("few_rows",), ("blockscale_sm90",), ("aligned_gemm_nt",)),  # or after a quantiser
    "grouped_contiguous": (("grouped_contiguous", "alignment"),),
    support.RUNS: (("block_runs",), ("grouped_contiguous", "alignment")),
    **{op: (("moe_blocks",), ("mx_product",)) for op in support.MX_LAYERS},  # or grouped products
    **{
        op: ((op,), ("mx_product",))
        for op in support.MX_OPERATIONS  # the product of every kind serves each
    },
}


DECISIONS = frozenset({"name", "kernel", "steps", "missing", "numerics", "alignment"})
"""What a backend declares beside its operations."""
PREPARED = frozenset({"group_quantiser", "reciprocal_quantiser", "dense_gemm_nt", "few_rows"})
"""Functions that give the function of an operation, for many calls."""


def traced(
    backend: Backend, calls: Counter[tuple[str, str]], failed: Callable[[Exception], None] = lambda error: None
) -> Backend:
    """The backend, whose functions count their calls and are ranges of ``torch.profiler`` and NVTX.

    ``failed`` is told what a function raised beside a refusal of the layer and a lack of memory.
    """

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        label = f"fp8_kernels.{backend.name}.{name}"

        @functools.wraps(function)
        def run(*operands: Any, **options: Any) -> Any:
            calls[backend.name, name] += 1
            on_gpu = torch.cuda.is_available()
            with torch.profiler.record_function(label), torch.cuda.nvtx.range(label) if on_gpu else nullcontext():
                try:
                    return function(*operands, **options)
                except (KernelError, torch.OutOfMemoryError):
                    raise
                except Exception as error:  # any class of a library; noted, then raised
                    failed(error)
                    raise

        return run

    def prepared(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(function)(lambda *key: counted(name, function(*key)))

    functions: dict[str, Any] = {}
    for name in (f.name for f in fields(backend)):
        function = getattr(backend, name)
        if name not in DECISIONS and function not in (None, _absent):
            functions[name] = (prepared if name in PREPARED else counted)(name, function)
    return replace(backend, **functions)
