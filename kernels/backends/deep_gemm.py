"""DeepGEMM: block-scaled dense and grouped products and indexer logits on sm90, sm100, sm103 and sm120.

The library is imported when a plan first considers it, under any of its import names. DeepGEMM manages the JIT cache
(``DG_JIT_CACHE_DIR``). Differences between releases are handled here: renamed symbols, alignment getters, one- or
two-dimensional context lengths, the ``disable_ue8m0_cast`` option.
DeepGEMM itself converts activation scales to its layout (MN-major, TMA-aligned) unless they have it already; operands
that TMA cannot address are copied first.

Not covered: k-grouped products of operands that are not K-major, which exist on sm100 only.

Source: DeepGEMM (csrc/apis, deep_gemm/utils).
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..errors import MissingPackageError, OptionError
from ..layout import get_mn_major_tma_aligned_packed_ue8m0_tensor, transform_sf_into_required_layout
from ..platform import packs_ue8m0
from ..records import Machine, Problem
from ..support import BLACKWELL, BLOCK, BLOCKS, DENSE, GEMMS, MIXED, RUNS
from ..tiles import from_blocked
from ._host import ALIGNMENT, column_major, dense, is_other_device, on_its_device, packed
from .declaration import Backend, Gemm, Product, Scales

IMPORT_NAMES = ("deep_gemm", "vllm.third_party.deep_gemm")
SYMBOLS = {
    # our name: the library's names, newest first
    DENSE: ("fp8_gemm_nt", "gemm_fp8_fp8_bf16_nt"),
    "grouped_contiguous": ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous"),
    "grouped_masked": (
        "fp8_m_grouped_gemm_nt_masked",
        "m_grouped_fp8_gemm_nt_masked",
        "m_grouped_gemm_fp8_fp8_bf16_nt_masked",
    ),
    "k_grouped": ("k_grouped_fp8_gemm_nt_contiguous",),
    "skip_head_mid": ("fp8_gemm_nt_skip_head_mid",),
    "einsum": ("fp8_einsum",),
    "mqa_logits": ("fp8_mqa_logits",),
    "paged_mqa_logits": ("fp8_paged_mqa_logits",),
    "paged_metadata": ("get_paged_mqa_logits_metadata",),
    "mixed_product": ("fp8_fp4_gemm_nt",),
    "mixed_contiguous": ("m_grouped_fp8_fp4_gemm_nt_contiguous",),
    "mixed_masked": ("m_grouped_fp8_fp4_gemm_nt_masked",),
    "mixed_psum": ("m_grouped_fp8_fp4_gemm_nt_contiguous",),
    "alignment": ("get_mk_alignment_for_contiguous_layout", "get_m_alignment_for_contiguous_layout"),
}
LEGACY = frozenset(
    {"gemm_fp8_fp8_bf16_nt", "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous", "m_grouped_gemm_fp8_fp8_bf16_nt_masked"}
)
"""Names in the first release, whose kernels take TMA-aligned scales and have no UE8M0 option."""
STORED = 64
"""Columns of one store of a bf16 tile (128 bytes, the widest swizzle)."""
ONE = {torch.float32: 1.0, torch.uint8: 127}
"""The scale 1, as a number or as an E8M0 byte."""
MASKED_TILE = 128
"""Each group of a masked product is padded to a multiple of this many rows: the kernel stores whole tiles of up to 128
rows, so that a shorter group overwrites the next one (seen on an H200 with 17 rows a group)."""


def kernel(p: Problem, machine: Machine) -> str:
    """The library's routine."""
    return SYMBOLS[routine(p)][0]


def routine(p: Problem) -> str:
    """The key of :data:`SYMBOLS` for a problem."""
    return {
        "dynamic_blockscale": DENSE,
        "gemm_1d1d": DENSE,
        BLOCKS: DENSE,
        RUNS: "grouped_contiguous",
        "mxfp4_product": "mixed_product",
    }.get(p.op, p.op)


def steps(p: Problem, machine: Machine) -> tuple[str, ...]:
    """How the operands are prepared."""
    if p.op in (*MIXED, "mxfp4_product"):
        packed = ("scales to packed UE8M0 int32, MN-major, TMA-aligned", "codes of four bits as int8")
        return packed if p.op in MIXED else ("scales out of their tiles", *packed)
    if p.op not in GEMMS:
        return ("clean the logits outside the window",) if p.op.endswith("logits") else ()
    scale = (
        "a_scale to packed UE8M0 int32, MN-major, TMA-aligned"
        if packs_ue8m0(machine)
        else "a_scale to float32 MN-major, TMA-aligned"
    )
    first = {
        "dynamic_blockscale": ("quantise the input 1x128",),
        "grouped_masked": (f"pad the rows of each group to a multiple of {MASKED_TILE}, cropped afterwards",),
    }.get(p.op, ())
    return (*first, f"{scale} (by the library; nothing when it already is)")


def numerics(p: Problem, machine: Machine) -> str:
    """Of products on Blackwell: one chain over K with the scales inside on sm100 and sm103; on sm120 K may be cut."""
    if p.op in ("mqa_logits", "paged_mqa_logits") and machine.sm in BLACKWELL:
        known = machine.sm // 10 == 10
        return "sm100.mqa_logits" if known else "bounds only: the order of its sums over heads is not stated"
    if p.op not in (*GEMMS, *MIXED, "mxfp4_product", "skip_head_mid") or not packs_ue8m0(machine):
        return ""
    if p.a_dtype == p.b_dtype == "uint8" and machine.sm // 10 == 10:
        return "bounds only: two operands of four bits meet in kind mxf8f6f4 or mxf4, by release"
    return "sm100.chain_ue8m0" if machine.sm // 10 == 10 else "bounds only: it may cut K"


@functools.cache
def library() -> ModuleType:
    """The imported library.

    Raises
    ------
    MissingPackageError
        No import name works; every failure is listed.
    """
    reasons: dict[str, str] = {}
    for name in IMPORT_NAMES:
        try:
            return importlib.import_module(name)
        except Exception as error:  # whatever a foreign library raises while it loads is the reason given below
            reasons[name] = f"{type(error).__name__}: {error}"
    raise MissingPackageError("DeepGEMM; install `sgl-deep-gemm` or vLLM, which vendors it", reasons)


@functools.cache
def symbol(name: str) -> tuple[Callable[..., Any], str]:
    """The library's function for one of :data:`SYMBOLS`, with the name it was found under."""
    module = library()
    for candidate in SYMBOLS[name]:
        function = getattr(module, candidate, None)
        if function is not None:
            return function, candidate
    missing = " or ".join(SYMBOLS[name])
    raise MissingPackageError("DeepGEMM", {module.__name__: f"this release has no {missing}; install a newer one"})


def alignment() -> int:
    """Rows to which each expert's run is aligned in the contiguous layout."""
    return int(symbol("alignment")[0]())


def gemm_nt(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, c: Tensor | None, float_scales: bool
) -> None:
    """Dense product into ``out``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    if is_other_device(a.device):
        with torch.cuda.device(a.device):
            return gemm_nt(a, a_scale, b, b_scale, out, c, float_scales)
    target = writable(out)
    aligned_gemm_nt(addressable(a), _row_scale(a_scale), b, b_scale, target, c, float_scales)
    if target is not out:
        out.copy_(target)


def aligned_gemm_nt(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, c: Tensor | None, float_scales: bool
) -> None:
    """:func:`gemm_nt` for ``a``, ``a_scale`` and ``out`` that are dense on 16 bytes; the weight may be neither.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    dense_gemm_nt()(a, a_scale, addressable(b), _weight_scale(b_scale), out, c, float_scales)


def dense_gemm_nt() -> Gemm:
    """:func:`aligned_gemm_nt` for a weight that is dense on 16 bytes too: the library's function, looked up once."""
    function, name = symbol(DENSE)
    legacy = name in LEGACY

    def gemm(
        a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, c: Tensor | None, float_scales: bool
    ) -> None:
        if legacy:
            function((a, _legacy_scale(a_scale)), (b, b_scale), out)
        else:
            function((a, a_scale), (b, b_scale), out, disable_ue8m0_cast=float_scales)

    return gemm


@on_its_device
def grouped_contiguous(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, m_indices: Tensor, float_scales: bool
) -> None:
    """Grouped product over rows sorted by expert, into ``out``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    function, name = symbol("grouped_contiguous")
    target = writable(out)
    a_scale, b_scale = _packed(a, a_scale, b, b_scale)
    weight = addressable(b), _weight_scale(b_scale)
    if name in LEGACY:
        function((addressable(a), _legacy_scale(a_scale)), weight, target, m_indices)
    else:
        left = addressable(a), _row_scale(a_scale)
        function(left, weight, target, m_indices, disable_ue8m0_cast=float_scales)
    if target is not out:
        out.copy_(target)


@on_its_device
def grouped_masked(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    masked_m: Tensor,
    expected_m: int,
    float_scales: bool,
) -> None:
    """Grouped product over ``[G, M, K]`` with a row count per group, into ``out``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    function, name = symbol("grouped_masked")
    m = a.shape[1]
    a_scale = _of_real_rows(a_scale, masked_m)
    if m % MASKED_TILE and a.shape[0] > 1:
        lead = m + (-m % MASKED_TILE)
        a, a_scale = _pad_groups(a, lead), _pad_scales(a_scale, lead)
        target = torch.empty(out.shape[0], lead, out.shape[2], dtype=out.dtype, device=out.device)
    else:
        target = writable(out)
    a_scale, b_scale = _packed(a, a_scale, b, b_scale)
    left, right = (addressable(a), _row_scale(a_scale)), (addressable(b), _weight_scale(b_scale))
    if name in LEGACY:
        function((left[0], _legacy_scale(a_scale)), right, target, masked_m, expected_m)
    else:
        function(left, right, target, masked_m, expected_m, disable_ue8m0_cast=float_scales)
    if target is not out:
        out.copy_(target[:, :m])


@on_its_device
def gemm_1d1d(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, c: Tensor | None) -> None:
    """``c`` plus the product with a scale for every row of both operands, into float32 ``out``; the kernel needs a
    summand, and adds to it in memory.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    target = writable(out)
    if c is None:
        target.zero_()
    elif target.data_ptr() != c.data_ptr():
        target.copy_(c)
    function, name = symbol(DENSE)
    if name in LEGACY:
        raise MissingPackageError("DeepGEMM", {name: "it has no recipe (1, 1, 128); install a newer release"})
    left, right = (dense(a), lanes(a_scale)), (dense(b), lanes(b_scale))  # it takes K for the pitch of the rows
    function(left, right, target, c=target, recipe=(1, 1, BLOCK), disable_ue8m0_cast=True)
    if target is not out:
        out.copy_(target)


@on_its_device
def k_grouped(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, ks: list[int], ks_tensor: Tensor, c: Tensor
) -> None:
    """:func:`gemm_1d1d` for every group of K. A tile's rows behind a group's last one are added to the next group:
    their codes are zeros of the load, and their scales must be numbers, so the padding of the scales is zero here.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    target = writable(out)
    if target.data_ptr() != c.data_ptr():
        target.copy_(c)
    left, right = (dense(a), lanes(a_scale)), (dense(b), lanes(b_scale))
    symbol("k_grouped")[0](left, right, target, ks, ks_tensor, target, (1, 1, BLOCK))
    if target is not out:
        out.copy_(target)


def lanes(scale: Tensor) -> Tensor:
    """``[rows, blocks]`` as the kernel reads it, rows padded to 16 bytes with zeros.

    ``scale`` ``[rows, blocks]`` float32; values are moved, NaN included.
    """
    return column_major(scale, ALIGNMENT // scale.element_size())


@on_its_device
def skip_head_mid(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    splits: tuple[int, int, int],
    float_scales: bool,
) -> None:
    """Dense product into the heads' columns of ``out``, whose gaps stay as they are.

    The kernel stores up to 64 columns at once, and does not compile for splits that are no multiples of what it stores.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.

    Raises OptionError.
    """
    if any(part % STORED for part in splits):
        raise OptionError(f"head_splits {splits}: DeepGEMM takes multiples of {STORED}")
    target = writable(out)
    if target is not out:
        target.copy_(out)
    a_scale, b_scale = _packed(a, a_scale, b, b_scale)
    left, right = (addressable(a), _row_scale(a_scale)), (addressable(b), _weight_scale(b_scale))
    recipe = (1, BLOCK, BLOCK)
    symbol("skip_head_mid")[0](left, right, target, splits, recipe=recipe, disable_ue8m0_cast=float_scales)
    if target is not out:
        out.copy_(target)


@on_its_device
def einsum(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """A dense product for every head.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    target = writable(out)
    symbol("einsum")[0]("bhr,hdr->bhd", (dense(a), dense(a_scale)), (dense(b), dense(b_scale)), target)
    if target is not out:
        out.copy_(target)


def mxfp4_product(p: Product) -> None:
    """``fp8_fp4_gemm_nt`` of two operands of four bits with scales of 32 in tiles, which are taken out of them.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    columns = 2 * p.a.shape[1] // p.left.width
    sides = (p.left, p.a.shape[0]), (p.right, p.b.shape[1])
    left, right = (side._replace(memory=from_blocked(side.memory, rows, columns)) for side, rows in sides)
    mixed(p._replace(left=left, right=right), op="mixed_product")


@on_its_device
def mixed(p: Product, *, op: str) -> None:
    """``fp8_fp4_gemm_nt`` and its grouped forms. Where a matrix of a masked product has no multiple of 128 rows, it is
    padded: the kernel stores whole tiles.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    a, left, b, right, out, rows, _, _, accumulate = p
    groups, n = b.shape[:2]
    target = writable(out)
    if accumulate and target is not out:
        target.copy_(out)
    x, w = (t if t.is_floating_point() else t.view(torch.int8) for t in (dense(a), dense(b)))
    recipes = {"recipe_a": (1, left.width), "recipe_b": (1, right.width)}
    of_weight = _words(right, groups, n)
    function = symbol(op)[0]
    if op == "mixed_product":
        summand = {"c": target} if accumulate else {}
        function((x, _words(left, 1, a.shape[0])[0]), (w[0], of_weight[0]), target, **summand, **recipes)
    elif op == "mixed_masked":
        assert rows is not None and rows.table is not None, "the operation is that of a table of rows"
        m = a.shape[0] // groups
        counts = (rows.table[1] - rows.table[0]).contiguous()
        codes, scale, lead = x.view(groups, m, -1), _of_real_rows(_matrix(left, groups, m), counts), m
        if m % MASKED_TILE and groups > 1:
            lead = m + (-m % MASKED_TILE)
            codes = _pad_groups(codes.view(torch.uint8), lead).view(codes.dtype)
            scale = _pad_scales(scale, lead)
            target = torch.empty(groups, lead, n, dtype=out.dtype, device=out.device)
        y = target.view(groups, lead, n)
        function((codes, _packed_words(scale)), (w, of_weight), y, counts, lead, **recipes)
        target = y[:, :m].reshape(groups * m, n) if lead != m else target
    else:
        assert rows is not None, "the operation is that of groups of rows"
        psum = op == "mixed_psum"
        layout = rows.expert if rows.table is None else rows.table[1]
        assert layout is not None, "rows name their expert, or its end"
        ready = (x, _words(left, 1, a.shape[0])[0]), (w, of_weight)
        function(*ready, target, layout.contiguous(), use_psum_layout=psum, **recipes)
    if target is not out:
        out.copy_(target)


def _matrix(scales: Scales, groups: int, rows: int) -> Tensor:
    """Scales that lie in rows and columns as ``[groups, rows, columns]``: float32, or E8M0 as bytes."""
    memory = scales.memory
    return (memory if memory.dtype is torch.float32 else memory.view(torch.uint8)).view(groups, rows, -1)


def _words(scales: Scales, groups: int, rows: int) -> Tensor:
    return _packed_words(_matrix(scales, groups, rows))


def _packed_words(scale: Tensor) -> Tensor:
    """Float32 powers of two, or E8M0 bytes, ``[G, R, C]`` as four a word, column by column, on 16 bytes."""
    if scale.dtype is torch.float32:
        return get_mn_major_tma_aligned_packed_ue8m0_tensor(scale)
    whole = torch.nn.functional.pad(scale, (0, -scale.shape[2] % 4)).contiguous()
    return column_major(whole.view(torch.int32), ALIGNMENT // 4)


def _of_real_rows(scale: Tensor, counts: Tensor) -> Tensor:
    """Float32 scales ``[G, M, C]`` that become exponents: those of rows past the counts are 1. They may hold anything,
    which a packer that looks at values refuses (sgl-project/sglang 32386)."""
    if scale.dtype is not torch.float32 or not packs_ue8m0():
        return scale
    rows = torch.arange(scale.shape[1], dtype=torch.int32, device=scale.device)
    return torch.where((rows < counts[:, None])[..., None], scale, 1.0)


def _pad_scales(scale: Tensor, lead: int) -> Tensor:
    """``[G, M, C]`` padded to ``lead`` rows a group with the scale 1, which every format of scales has."""
    return torch.nn.functional.pad(scale, (0, 0, 0, lead - scale.shape[1]), value=ONE[scale.dtype])


def _pad_groups(x: Tensor, lead: int) -> Tensor:
    """``[G, M, C]`` padded to ``lead`` rows a group with zeros."""
    ready = x.new_zeros(x.shape[0], lead, x.shape[2])
    ready[:, : x.shape[1]] = x
    return ready


@on_its_device
def mqa_logits(q: Tensor, k: Tensor, k_scale: Tensor, weights: Tensor, ks: Tensor, ke: Tensor, clean: bool) -> Tensor:
    """Indexer logits ``[M, N]``; ``clean`` writes -inf outside the window.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    function, _ = symbol("mqa_logits")
    logits: Tensor = function(
        q.contiguous(), (k.contiguous(), k_scale), weights.contiguous(), ks, ke, clean_logits=clean
    )
    return logits


@on_its_device
def paged_mqa_logits(
    q: Tensor, cache: Tensor, weights: Tensor, lens: Tensor, tables: Tensor, schedule: Tensor, longest: int, clean: bool
) -> Tensor:
    """Indexer logits ``[B * next_n, longest]`` over a paged cache; ``lens`` is ``[B, next_n]``, per query token.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    function, _ = symbol("paged_mqa_logits")
    logits: Tensor = function(
        q.contiguous(), cache, weights.contiguous(), context_lens(lens), tables, schedule, longest, clean_logits=False
    )
    if clean:
        outside = torch.arange(longest, device=q.device) >= lens.reshape(-1, 1)
        logits.masked_fill_(outside, float("-inf"))
    return logits


@on_its_device
def paged_metadata(lens: Tensor, block_size: int, num_sms: int) -> Tensor:
    """``[num_sms + 1, 2]`` int32; ``lens`` is ``[B, next_n]``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    schedule: Tensor = symbol("paged_metadata")[0](context_lens(lens), block_size, num_sms)
    return schedule


def context_lens(lens: Tensor) -> Tensor:
    """``[B, next_n]`` unchanged for releases that take it, else its last column ``[B]``.

    ``lens`` ``[B, next_n]`` int32; returns int32. Values are moved.
    """
    return lens.contiguous() if takes_2d_lens() else lens[:, -1].contiguous()


@functools.cache
def takes_2d_lens() -> bool:
    """Whether this release takes context lengths per query token: releases with a parameter ``indices`` do."""
    function, _ = symbol("paged_metadata")
    if "indices" in (function.__doc__ or ""):
        return True
    try:
        return "indices" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a compiled function without a signature: the first releases
        return False


def addressable(x: Tensor) -> Tensor:
    """E4M3 ``x`` itself when TMA can address it (K-major, rows and base on 16 bytes), else a contiguous copy.

    ``x`` ``[..., R, K]``; returns E4M3 of the same shape, the bytes moved.
    """
    strides = x.stride()
    if strides[-1] == 1 and strides[-2] % ALIGNMENT == 0 and x.data_ptr() % ALIGNMENT == 0:
        if len(strides) == 3 and packed(x):
            return x
        if len(strides) == 2 and (x.is_contiguous() or strides[0] >= x.shape[1]):
            return x
    return x.clone(memory_format=torch.contiguous_format)


def writable(out: Tensor) -> Tensor:
    """``out`` itself when the kernel can write it, else an empty contiguous buffer to copy from.

    ``out`` of any shape, bf16, f16 or f32; returns a tensor of the same shape and dtype. No value is read.
    """
    if packed(out) and out.data_ptr() % ALIGNMENT == 0:
        return out
    return torch.empty(out.shape, dtype=out.dtype, device=out.device)


def _packed(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 scales as this machine's kernels read them, every one checked to be a power of two where values are: the
    library itself would drop the mantissa of any other. ``a`` ``[M, K]`` or ``[G, M, K]``, ``b`` ``[N, K]`` or
    ``[G, N, K]``."""
    if not packs_ue8m0():
        return a_scale, b_scale
    made = []
    for x, scale in ((a, a_scale), (b, b_scale)):
        if scale.dtype is not torch.int32:
            groups = x.shape[0] if x.dim() == 3 else None
            recipe = (1, BLOCK, BLOCK)
            mn, k = x.shape[-2:]
            scale = transform_sf_into_required_layout(scale, mn, k, recipe, groups, is_sfa=x is a)
        made.append(scale)
    return made[0], made[1]


def _row_scale(scale: Tensor) -> Tensor:
    """On 16 bytes: the library uses a scale that has its layout already without a copy, which would align it."""
    return scale if scale.data_ptr() % ALIGNMENT == 0 else scale.clone(memory_format=torch.contiguous_format)


def _weight_scale(scale: Tensor) -> Tensor:
    """Float32 scales made dense, as the library requires; packed UE8M0 scales unchanged."""
    if packed(scale) or scale.dtype is not torch.float32:
        return scale
    return scale.clone(memory_format=torch.contiguous_format)


def _legacy_scale(scale: Tensor) -> Tensor:
    ready: Tensor = library().get_col_major_tma_aligned_tensor(scale)
    return ready


def missing(p: Problem, machine: Machine) -> str | None:
    """A release may lack a routine under every name."""
    symbol(routine(p))
    return None


BACKEND = Backend(
    name="deep_gemm",
    kernel=kernel,
    steps=steps,
    missing=missing,
    numerics=numerics,
    gemm_nt=gemm_nt,
    aligned_gemm_nt=aligned_gemm_nt,
    dense_gemm_nt=dense_gemm_nt,
    grouped_contiguous=grouped_contiguous,
    grouped_masked=grouped_masked,
    alignment=alignment,
    gemm_1d1d=gemm_1d1d,
    k_grouped=k_grouped,
    skip_head_mid=skip_head_mid,
    einsum=einsum,
    mqa_logits=mqa_logits,
    paged_mqa_logits=paged_mqa_logits,
    paged_metadata=paged_metadata,
    mxfp4_product=mxfp4_product,
    mixed_product=functools.partial(mixed, op="mixed_product"),
    mixed_contiguous=functools.partial(mixed, op="mixed_contiguous"),
    mixed_masked=functools.partial(mixed, op="mixed_masked"),
    mixed_psum=functools.partial(mixed, op="mixed_psum"),
)
