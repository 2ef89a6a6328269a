"""Products of MX and NVFP4: codes of 8 or 4 bits with a scale for each 16, 32 or 128; dense, batched, grouped.

    y[m, n] = alpha * sum_k value(a[m, k]) sa[m, k // w] value(b[n, k]) sb[n, k // w]  (+ bias[n])

Names and layouts are those of the libraries whose place each verb takes: FlashInfer's ``mm_mxfp8`` and ``mm_fp4``,
torch's ``scaled_mm`` and ``scaled_grouped_mm``, DeepGEMM's ``fp8_fp4_gemm_nt`` and its grouped forms. Codes of E2M1 lie
two in a byte, the even column in the low nibble; scale bytes lie in tiles as :mod:`kernels.mx` writes them, and what
stands in their padding is never read. Sums are taken in float32, alpha
multiplies the finished sum in float32, the bias is added to that, and the result is rounded once.

On a GPU without block-scaled instructions a Triton kernel dequantises to bfloat16 in registers, which is exact for
operands from 2^-133 to 2^127 (:mod:`kernels.backends.triton_mx`); on a CPU plain torch multiplies in float32. A summand
``c`` is added in float32 too. On Blackwell a plan takes the libraries whose instructions read the scales
(:mod:`kernels.backends.flashinfer_mx`, vLLM's, torch's) where they serve the product: of one matrix by one weight, of a
batch, and of groups of rows in FlashInfer's placement.

NaN codes, and scale bytes that stand for NaN, make every element that they reach NaN.
Source: FlashInfer (``mm_mxfp8``, ``mm_fp4``, ``group_gemm``), torch (``scaled_mm``), DeepGEMM (``fp8_fp4_gemm_nt``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import checks, operators
from . import platform as machines
from .adapters import Adapter, Inputs, Options, out_dtype_of, pairs
from .backends.declaration import Product, Rows, Scales
from .errors import DtypeError, OptionError, ShapeError, shown
from .layout import shuffled_rows
from .mx_blocks import LINEAR, MX_BLOCK, NVFP4_BLOCK, size_of
from .routes import dtype_name, route
from .support import BLACKWELL, DENSE_MX, FEW_ROWS, MIXED, MX_OPERATIONS, TIGHT_MX, TILE_ROWS
from .verbs import serve, verb

E4M3, E5M2, UE8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
HALVES = (torch.bfloat16, torch.float16)
HIGH, FLAT = "128x4", "8x4"
TORCH_NAMES = ("mat_a", "mat_b", "scale_a", "scale_b")
SWIZZLES = {"SWIZZLE_32_4_4": HIGH, "NO_SWIZZLE": LINEAR}
DENSE, BATCHED, GROUPED, TIGHT, OTHER = "product", "batched", "grouped", "tight", ""
"""How the rows of ``a`` meet the weights: one weight; as many rows for each; groups in FlashInfer's placement; groups
in tiles one behind the other; else. Of DeepGEMM's it is the operation itself (:data:`kernels.support.MIXED`)."""


# --- as a contract, and as an operator, calls it -------------------------------------------------------------------


def _mixed(last: str = "", turned: str = "") -> Adapter:
    """DeepGEMM's products of mixed codes into a fresh output; ``last`` names what says which rows belong to whom, and
    ``turned`` the operands that are given as ``[K, ..]``."""

    def run(verb: Callable[..., None], inputs: Inputs, options: Options) -> Tensor:
        a, b = inputs["a"], inputs["b"]
        m, n = (_rows_of_codes(x, name in turned) for name, x in (("a", a), ("b", b)))
        out = torch.empty(*a.shape[:-2], m, n, dtype=out_dtype_of(options), device=a.device)
        of_a = 1, options.get("gran_k_a", 128)
        of_b = options.get("gran_n", 1), options.get("gran_k_b", 32)
        last_inputs = [inputs[last]] if last else [inputs["c"]] if "c" in inputs else []
        verb(*pairs(inputs), out, *last_inputs, recipe_a=of_a, recipe_b=of_b)
        return out

    return run


def _rows_of_codes(x: Tensor, turned: bool) -> int:
    """Rows of codes ``[.., R, K]``, or ``[.., K, R]`` where they are turned, then of four bits two a byte."""
    if not turned:
        return x.shape[-2]
    return x.shape[-1] * (1 if x.is_floating_point() else 2)


def _groups_of_k(verb: Callable[..., None], inputs: Inputs, options: Options) -> Tensor:
    out = torch.empty_like(inputs["c"], memory_format=torch.contiguous_format)
    recipe = (1, 1, options.get("gran_k", 128))
    verb(*pairs(inputs), out, inputs["ks"].tolist(), c=inputs["c"], recipe=recipe)
    return out


# --- the verbs -----------------------------------------------------------------------------------------------------


@verb("mx_product", native=("mxfp8_product",))
def mm_mxfp8(
    a: Tensor,
    b: Tensor,
    a_descale: Tensor,
    b_descale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    use_8x4_sf_layout: bool = False,
    shuffled: bool = False,
) -> Tensor:
    """MXFP8: ``a [M, K]`` times ``b [K, N]``.

    Parameters
    ----------
    a, b
        E4M3, ``K`` a multiple of 32; ``b`` column-major.
    a_descale, b_descale
        uint8 (E8M0), in 128x4 tiles; those of ``a`` in 8x4 tiles with ``use_8x4_sf_layout``. Any shape.
    out_dtype
        bf16 or f16.
    shuffled
        The rows of the weight and of its scales are in the order of :func:`kernels.shuffle_matrix_a`, as TensorRT-LLM's
        kernels take them; ``N`` is a multiple of 32.

    Returns
    -------
    Tensor
        ``[M, N]``. A NaN code, or a scale byte of 255, makes every element that it reaches NaN.

    Raises
    ------
    ShapeError, DtypeError, OptionError, DeviceError, InputError, LayoutError
    """
    for name, x in (("a", a), ("b", b)):
        checks.dtype(name, checks.rank(name, x, 2), E4M3)
    checks.column_major("b", b)
    checks.multiple("K", a.shape[1], MX_BLOCK, "pad K with zeros")
    tile = FLAT if use_8x4_sf_layout else HIGH
    left = _scales("a_descale", a_descale, UE8M0, a.shape[0], a.shape[1], MX_BLOCK, tile)
    right = _scales("b_descale", b_descale, UE8M0, b.shape[1], b.shape[0], MX_BLOCK, HIGH)
    return _in_order(_dense(a, left, b, right, checks.out_dtype(out_dtype, *HALVES)), shuffled)


@verb("mx_product", native=("nvfp4_product", "mxfp4_product"))
def mm_fp4(
    a: Tensor,
    b: Tensor,
    a_descale: Tensor,
    b_descale: Tensor,
    alpha: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    block_size: int = NVFP4_BLOCK,
    use_8x4_sf_layout: bool = False,
    use_nvfp4: bool = True,
    shuffled: bool = False,
) -> Tensor:
    """NVFP4 or MXFP4: ``alpha * a [M, K] b [K, N]``.

    Parameters
    ----------
    a, b
        uint8, two codes each: ``[M, K/2]`` and, column-major, ``[K/2, N]``.
    a_descale, b_descale
        uint8 in tiles as for :func:`mm_mxfp8`: E4M3 scales of 16, or without ``use_nvfp4`` E8M0 scales of 32.
    alpha
        One float32 value, or ``[M]``, one for each row; None for 1.
    block_size
        16 or 32, as ``use_nvfp4`` says.
    shuffled
        As of :func:`mm_mxfp8`.

    Raises
    ------
    ShapeError, DtypeError, OptionError, DeviceError, InputError, LayoutError
    """
    width, dtype = (NVFP4_BLOCK, E4M3) if use_nvfp4 else (MX_BLOCK, UE8M0)
    if block_size != width:
        raise OptionError(f"block_size={block_size} with use_nvfp4={use_nvfp4}: it must be {width}")
    for name, x in (("a", a), ("b", b)):
        checks.dtype(name, checks.rank(name, x, 2), torch.uint8)
    checks.column_major("b", b)
    checks.multiple("K", 2 * a.shape[1], width, "pad K with zeros")
    if alpha is None or checks.tensor("alpha", alpha).numel() == 1:
        checks.scalar("alpha", alpha)
    else:
        alpha = checks.operand("alpha", alpha, (a.shape[0],), "[1] or [M]", torch.float32).contiguous()
    tile = FLAT if use_8x4_sf_layout else HIGH
    left = _scales("a_descale", a_descale, dtype, a.shape[0], 2 * a.shape[1], width, tile)
    right = _scales("b_descale", b_descale, dtype, b.shape[1], 2 * b.shape[0], width, HIGH)
    return _in_order(_dense(a, left, b, right, checks.out_dtype(out_dtype, *HALVES), alpha), shuffled)


def _in_order(out: Tensor, shuffled: bool) -> Tensor:
    """Columns of a product with a shuffled weight as those of the weight before."""
    if not shuffled:
        return out
    return out.index_select(1, torch.argsort(shuffled_rows(out.shape[1], device=out.device)))


@verb("mx_product", native=DENSE_MX)
def scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    global_scale_a: Tensor | None = None,
    global_scale_b: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    swizzle: str = "SWIZZLE_32_4_4",
) -> Tensor:
    """torch's block-scaled recipes: ``mat_a [M, K]`` times ``mat_b [K, N]``.

    ``global_scale_a`` and ``global_scale_b`` have any shape of one value. Returns ``[M, N]`` of ``out_dtype``.

    FP8 with E8M0 scales of 32 (MXFP8); two codes a byte with E8M0 scales of 32 (MXFP4) or E4M3 scales of 16 (NVFP4),
    the latter with a global scale of both operands or of none.

    Parameters
    ----------
    mat_a, mat_b
        E4M3 or E5M2 (not both E5M2), or uint8; ``mat_b`` column-major, ``K`` a multiple of 16.
    scale_a, scale_b
        float8_e8m0fnu or float8_e4m3fn, any shape.
    global_scale_a, global_scale_b
        One float32 value each; they are multiplied first.
    bias
        ``[N]`` bf16, f16 or f32.
    swizzle
        ``SWIZZLE_32_4_4`` or ``NO_SWIZZLE``, of both scales.

    Raises
    ------
    ShapeError, DtypeError, OptionError, DeviceError, InputError, LayoutError
    """
    for name, x in (("mat_a", mat_a), ("mat_b", mat_b)):
        checks.dtype(name, checks.rank(name, x, 2), E4M3, E5M2, torch.uint8)
    checks.column_major("mat_b", mat_b)
    if swizzle not in SWIZZLES:
        raise OptionError(f"swizzle={shown(swizzle)}: there are {', '.join(SWIZZLES)}")
    four = mat_a.dtype is torch.uint8
    if four != (mat_b.dtype is torch.uint8) or mat_a.dtype == mat_b.dtype == E5M2:
        raise DtypeError(f"mat_a is {mat_a.dtype}, mat_b {mat_b.dtype}: two FP8 (not both E5M2) or two of four bits")
    checks.dtype("scale_a", checks.tensor("scale_a", scale_a), *((UE8M0, E4M3) if four else (UE8M0,)))
    checks.dtype("scale_b", checks.tensor("scale_b", scale_b), scale_a.dtype)
    checks.scalar("global_scale_a", global_scale_a)
    checks.scalar("global_scale_b", global_scale_b)
    if (global_scale_a is None) != (global_scale_b is None) or scale_a.dtype != E4M3 and global_scale_a is not None:
        raise OptionError("global scales come in pairs, beside E4M3 scales of 16")
    width, k = NVFP4_BLOCK if scale_a.dtype == E4M3 else MX_BLOCK, mat_a.shape[1] * (1 + four)
    checks.multiple("K", k, 16, "pad K with zeros")
    left = _scales("scale_a", scale_a, scale_a.dtype, mat_a.shape[0], k, width, SWIZZLES[swizzle])
    right = _scales("scale_b", scale_b, scale_b.dtype, mat_b.shape[1], k, width, SWIZZLES[swizzle])
    alpha = None
    if global_scale_a is not None and global_scale_b is not None:
        checks.same_device(mat_a=mat_a, global_scale_a=global_scale_a, global_scale_b=global_scale_b)
        alpha = global_scale_a.reshape(1) * global_scale_b.reshape(1)
    if bias is not None:
        checks.operand("bias", bias, (mat_b.shape[1],), "[N]", *checks.WIDE)
    return _dense(mat_a, left, mat_b, right, checks.out_dtype(out_dtype), alpha, bias, TORCH_NAMES)


# --- batched and grouped --------------------------------------------------------------------------------------------


@verb("mx_product", native=("mxfp8_batched",))
def bmm_mxfp8(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    placement: str = "rows",
) -> Tensor:
    """MXFP8, batched: ``a [B, M, K]`` times ``b [B, K, N]``, ``[B, M, N]``.

    Returns ``[B, M, N]`` of ``out_dtype``.

    Parameters
    ----------
    a, b
        E4M3 or E5M2, ``K`` a multiple of 32; matrices of ``b`` column-major.
    a_scale, b_scale
        uint8 (E8M0) in 128x4 tiles, any shape.
    out_dtype
        bf16 or f16.
    placement
        ``rows``: the rows of all matrices are one matrix of scales, as :func:`kernels.mxfp8_quantize` gives it for
        ``[B * M, K]``; ``batch``: each matrix has tiles of its own. The same where M and N are multiples of 128.

    Raises
    ------
    ShapeError, DtypeError, OptionError, DeviceError, InputError, LayoutError
    """
    for name, x in (("a", a), ("b", b)):
        checks.dtype(name, checks.rank(name, x, 3), E4M3, E5M2)
    checks.column_major("b", b)
    if placement not in ("rows", "batch"):
        raise OptionError(f"placement={shown(placement)}: there are rows, batch")
    (batch, m, k), n = a.shape, b.shape[2]
    if tuple(b.shape[:2]) != (batch, k):
        raise ShapeError(f"a is {list(a.shape)} and b {list(b.shape)}; they are [B, M, K] and [B, K, N]")
    checks.multiple("K", k, MX_BLOCK, "pad K with zeros")
    whole, groups = placement == "rows", 1 if placement == "rows" else batch
    left = _scales("a_scale", a_scale, UE8M0, m * batch // groups, k, MX_BLOCK, HIGH, groups)
    right = _scales("b_scale", b_scale, UE8M0, n * batch // groups, k, MX_BLOCK, HIGH, groups)
    out = torch.empty(batch * m, n, dtype=checks.out_dtype(out_dtype, *HALVES), device=a.device)
    start = torch.arange(batch, dtype=torch.int32, device=a.device)
    step_a, step_b = (m, n) if whole else (_up(m), _up(n))
    table = torch.stack([start * m, start * m + m, start * step_a, start * step_b])
    run_product(a.reshape(batch * m, k), left, b.mT, right, out, Rows(table), form=BATCHED)
    return out.view(batch, m, n)


@verb("mx_product", native=("mxfp8_mxfp4_grouped",))
def group_gemm_mxfp8_mxfp4_nt_groupwise(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    m_indptr: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    row_alignment: int = 1,
) -> Tensor:
    """MXFP8 rows of each expert against its MXFP4 weight, ``[M, N]``.

    ``a_scale`` and ``b_scale`` have any shape of so many bytes. Returns ``[M, N]`` of ``out_dtype``.

    Parameters
    ----------
    a
        ``[M, K]`` E4M3 or E5M2, rows sorted by expert, ``K`` a multiple of 32.
    b
        ``[G, N, K/2]`` uint8, two codes each.
    a_scale
        uint8 (E8M0): one matrix in 128x4 tiles in which the scales of group ``g`` begin at row
        ``floor((m_indptr[g] + 127 g) / 128) * 128``.
    b_scale
        uint8 (E8M0), each weight in 128x4 tiles of its own.
    m_indptr
        ``[G + 1]`` int32: where the rows of each expert begin, and behind the last M.
    row_alignment
        What every entry of ``m_indptr`` is a multiple of; FlashInfer's kernels take 4, and are not called with less.
        The values are looked at on a CPU, and elsewhere where values are checked.

    Raises
    ------
    ShapeError, DtypeError, OptionError, DeviceError, InputError, LayoutError
    """
    checks.dtype("a", checks.rank("a", a, 2), E4M3, E5M2)
    checks.dtype("b", checks.rank("b", b, 3), torch.uint8)
    checks.out_dtype(out_dtype, *HALVES)
    return grouped_product((a, a_scale), (b, b_scale), m_indptr, UE8M0, out_dtype, row_alignment=row_alignment)


@verb("mx_product", native=("nvfp4_grouped",))
def group_gemm_nvfp4_nt_groupwise(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    m_indptr: Tensor,
    alpha: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    row_alignment: int = 1,
) -> Tensor:
    """NVFP4 rows of each expert against its weight; as :func:`group_gemm_mxfp8_mxfp4_nt_groupwise`.

    ``a_scale`` and ``b_scale`` have any shape of so many bytes. Returns ``[M, N]`` of ``out_dtype``.

    Parameters
    ----------
    a
        ``[M, K/2]`` uint8, two codes each; E4M3 scales of 16 on both sides.
    alpha
        ``[G]`` float32, a factor for each expert; None for 1.

    Raises
    ------
    ShapeError, DtypeError, OptionError, DeviceError, InputError, LayoutError
    """
    checks.dtype("a", checks.rank("a", a, 2), torch.uint8)
    checks.dtype("b", checks.rank("b", b, 3), torch.uint8)
    checks.out_dtype(out_dtype, *HALVES)
    return grouped_product((a, a_scale), (b, b_scale), m_indptr, E4M3, out_dtype, alpha, row_alignment)


def grouped_product(
    left: tuple[Tensor, Tensor],
    right: tuple[Tensor, Tensor],
    m_indptr: Tensor,
    scales: torch.dtype,
    out_dtype: torch.dtype,
    alpha: Tensor | None = None,
    row_alignment: int = 1,
) -> Tensor:
    """Groups of rows in FlashInfer's placement, of codes and scales on either side.

    ``left`` codes ``[M, K]`` and ``right`` ``[G, N, K]``, FP8 or two of E2M1 a byte, with the scales, ``m_indptr``
    ``[G + 1]`` int32 and ``alpha`` of :func:`group_gemm_nvfp4_nt_groupwise`; ``scales`` is the dtype of both scales,
    E4M3 of 16 or E8M0 of 32. Returns ``[M, N]`` of ``out_dtype``, bf16, f16 or f32.

    Raises DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError.
    """
    (a, a_scale), (b, b_scale) = left, right
    width = NVFP4_BLOCK if scales is E4M3 else MX_BLOCK
    k, b_k = (x.shape[-1] * (1 if x.is_floating_point() else 2) for x in (a, b))
    groups, n, _ = b.shape
    checks.multiple("K", k, width, "pad K with zeros")
    if b_k != k:
        raise ShapeError(f"b holds K={b_k} codes a row and a K={k}")
    _pointers("m_indptr", m_indptr, groups + 1, a.shape[0], checks.positive("row_alignment", row_alignment))
    _factors("alpha", alpha, groups)
    rows = (a.shape[0] + 127 * groups) // 128 * 128
    of_a = _scales("a_scale", a_scale, scales, rows, k, width, HIGH)
    of_b = _scales("b_scale", b_scale, scales, n, k, width, HIGH, groups)
    checks.same_device(a=a, m_indptr=m_indptr)
    out = torch.empty(a.shape[0], n, dtype=checks.out_dtype(out_dtype), device=a.device)
    group = torch.arange(groups, dtype=torch.int32, device=a.device)
    start = m_indptr[:-1].to(torch.int32)
    scale = (start + 127 * group) // 128 * 128
    table = torch.stack([start, m_indptr[1:].to(torch.int32), scale, group * _up(n)])
    run_product(a, of_a, b, of_b, out, Rows(table), alpha, form=GROUPED, row_alignment=row_alignment)
    return out


@verb("mx_product", native=TIGHT_MX)
def scaled_grouped_mm_mx(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    global_scale_a: Tensor | None = None,
    global_scale_b: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """torch's block-scaled grouped product: rows of each expert against its weight, ``[M, N]``.

    ``scale_a`` and ``scale_b`` have any shape of so many bytes. Returns ``[M, N]`` of ``out_dtype``.

    Parameters
    ----------
    mat_a, mat_b
        ``[M, K]`` and ``[G, N, K]`` E4M3, or uint8 with two codes each.
    scale_a
        float8_e8m0fnu or float8_e4m3fn: each group in 128x4 tiles of its own, one behind the other; the memory may be
        larger.
    scale_b
        Of the same dtype, each weight in tiles of its own.
    offs
        ``[G]`` int32: where the rows of each expert end. Rows past the last end are unspecified.
    global_scale_a, global_scale_b
        ``[G]`` float32 beside E4M3 scales, both or none; they are multiplied first.

    Raises
    ------
    ShapeError, DtypeError, OptionError, DeviceError, InputError, LayoutError
    """
    checks.dtype("mat_a", checks.rank("mat_a", mat_a, 2), E4M3, torch.uint8)
    groups, n, _ = checks.dtype("mat_b", checks.rank("mat_b", mat_b, 3), mat_a.dtype).shape
    four = mat_a.dtype is torch.uint8
    checks.dtype("scale_a", checks.tensor("scale_a", scale_a), *((UE8M0, E4M3) if four else (UE8M0,)))
    checks.dtype("scale_b", checks.tensor("scale_b", scale_b), scale_a.dtype)
    if (global_scale_a is None) != (global_scale_b is None) or scale_a.dtype != E4M3 and global_scale_a is not None:
        raise OptionError("global scales come in pairs, beside E4M3 scales of 16")
    width, k = NVFP4_BLOCK if scale_a.dtype == E4M3 else MX_BLOCK, mat_a.shape[1] * (1 + four)
    checks.multiple("K", k, width, "pad K with zeros")
    if mat_b.shape[2] != mat_a.shape[1]:
        raise ShapeError(f"mat_a is {list(mat_a.shape)} and mat_b {list(mat_b.shape)}; they have the same K")
    _pointers("offs", offs, groups, mat_a.shape[0])
    alpha = None
    for name, scale in (("global_scale_a", global_scale_a), ("global_scale_b", global_scale_b)):
        _factors(name, scale, groups)
        alpha = scale if alpha is None or scale is None else alpha * scale
    memory = _memory("scale_a", scale_a, scale_a.dtype)
    left = Scales(memory, width, HIGH)
    right = _scales("scale_b", scale_b, scale_a.dtype, n, k, width, HIGH, groups)
    checks.same_device(mat_a=mat_a, offs=offs)
    out = torch.empty(mat_a.shape[0], n, dtype=checks.out_dtype(out_dtype, torch.bfloat16), device=mat_a.device)
    end = offs.to(torch.int32)
    start = torch.cat([end.new_zeros(1), end[:-1]])
    scale = torch.cumsum((end - start + 127) // 128 * 128, 0, dtype=torch.int32)
    if not is_compiling() and checks.wanted(None, offs.device) and groups:
        least = int(scale[-1]) * ((-(-k // width) + 3) // 4 * 4)
        if memory.numel() < least:
            raise ShapeError(f"scale_a holds {memory.numel()} scales; the tiles of these experts take {least}")
    first = torch.cat([scale.new_zeros(1), scale[:-1]])
    table = torch.stack([start, end, first, torch.arange(groups, dtype=torch.int32, device=offs.device) * _up(n)])
    run_product(mat_a, left, mat_b, right, out, Rows(table), alpha, names=TORCH_NAMES, form=TIGHT)
    return out


@verb("mx_product")
def scaled_grouped_mm_mx_k_groups(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """torch's block-scaled grouped product of two matrices whose K the offsets cut, ``[G, M, N]``.

    ``scale_a`` and ``scale_b`` have any shape of so many bytes. Returns ``[G, M, N]`` of ``out_dtype``.

    Parameters
    ----------
    mat_a, mat_b
        ``[M, K]`` and ``[N, K]`` E4M3.
    scale_a, scale_b
        float8_e8m0fnu: the blocks of 32 of each group in 128x4 tiles of their own
        (:func:`kernels.to_blocked_k_groups`), group behind group; the memory may be larger.
    offs
        ``[G]`` int32, multiples of 32: where the K of each group ends; what follows the last belongs to none. A group
        without K gives zeros.

    Raises
    ------
    ShapeError, DtypeError, OptionError, DeviceError, InputError, LayoutError
    """
    checks.dtype("mat_a", checks.rank("mat_a", mat_a, 2), E4M3)
    checks.dtype("mat_b", checks.rank("mat_b", mat_b, 2), E4M3)
    (m, k), n = mat_a.shape, mat_b.shape[0]
    if mat_b.shape[1] != k:
        raise ShapeError(f"mat_a is {list(mat_a.shape)} and mat_b {list(mat_b.shape)}; they have the same K")
    checks.multiple("K", k, MX_BLOCK, "pad K with zeros")
    groups = checks.tensor("offs", offs).numel()
    _pointers("offs", offs, groups, k)
    checks.same_device(mat_a=mat_a, offs=offs)
    end = offs.to(torch.int32)
    first = torch.cat([end.new_zeros(1), end[:-1]])
    columns = torch.cumsum((end - first + 127) // 128 * 4, 0, dtype=torch.int32)
    looked_at = offs.device.type == "cpu" and not is_compiling()  # elsewhere a look would wait, or break a graph
    across = int(columns[-1]) if looked_at and groups else 0
    sides = []
    for name, scale, rows in (("scale_a", scale_a, m), ("scale_b", scale_b, n)):
        memory = _memory(name, scale, UE8M0)
        if memory.numel() < (least := _up(rows) * across):
            raise ShapeError(f"{name} holds {memory.numel()} scales; these groups of {rows} rows take {least}")
        sides.append(Scales(memory, MX_BLOCK, HIGH))
    out = torch.empty(groups * m, n, dtype=checks.out_dtype(out_dtype, torch.bfloat16), device=mat_a.device)
    depth = torch.stack([first, end, torch.cat([columns.new_zeros(1), columns[:-1]])])
    run_product(mat_a, sides[0], mat_b[None], sides[1], out, Rows(None, None, depth), names=TORCH_NAMES)
    return out.view(groups, m, n)


# --- DeepGEMM -------------------------------------------------------------------------------------------------------


@verb("mx_product", adapter=_mixed(), native=MIXED[:1])
def fp8_fp4_gemm_nt(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    out: Tensor,
    c: Tensor | None = None,
    *,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] = (1, 128),
    recipe_b: tuple[int, int] = (1, 32),
) -> None:
    """``out = c + a [M, K] b [N, K].T`` of E4M3 codes, or two E2M1 codes a byte, on either side.

    Parameters
    ----------
    a, b
        ``(codes, scales)``: codes E4M3 ``[R, K]``, or uint8 or int8 ``[R, K/2]``; scales float32 powers of two
        ``[ceil(R / gran), ceil(K / gran_k)]``, or with ``gran`` 1 their exponents, int32
        ``[R, ceil(K / (4 gran_k))]`` of any strides, the first in the lowest byte
        (:func:`kernels.get_mn_major_tma_aligned_packed_ue8m0_tensor`).
    out
        ``[M, N]`` bf16 or f32.
    c
        ``[M, N]`` of its dtype, or ``out`` itself; None for 0.
    recipe
        ``(gran_a, gran_b, gran_k)`` for both instead of the next two.
    recipe_a, recipe_b
        ``(gran, gran_k)``: rows and codes that share a scale, ``(1, 32)`` or ``(1, 128)``; of ``b`` also
        ``(128, 128)``.

    Raises
    ------
    ShapeError, DtypeError, OptionError, DeviceError, LayoutError, InputError
    """
    if recipe is not None:
        recipe_a, recipe_b = (recipe[0], recipe[2]), (recipe[1], recipe[2])
    x, left, k = _codes("a", a, recipe_a, ((1, 32), (1, 128)), 2)
    w, right, _ = _codes("b", b, recipe_b, ((1, 32), (1, 128), (128, 128)), 2, k)
    checks.output("out", out, (x.shape[0], w.shape[0]), "[M, N]", torch.bfloat16, torch.float32)
    if c is not None and c is not out:
        checks.shape("c", checks.dtype("c", checks.tensor("c", c), out.dtype), tuple(out.shape), "[M, N]")
        checks.same_device(out=out, c=c)
        out.copy_(c)
    _into(x, left, w[None], right, out, None, MIXED[0], c is not None)


@verb("mx_product", adapter=_mixed(turned="b"), native=MIXED[:1])
def fp8_fp4_gemm_nn(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    out: Tensor,
    c: Tensor | None = None,
    *,
    recipe_a: tuple[int, int] = (1, 128),
    recipe_b: tuple[int, int] = (1, 32),
) -> None:
    """:func:`fp8_fp4_gemm_nt` with ``b [K, N]``, of four bits ``[K, N / 2]``, and its scales transposed alike.

    The other operands and dtypes as of :func:`fp8_fp4_gemm_nt`.
    """
    fp8_fp4_gemm_nt(a, _turned("b", b), out, c, recipe_a=recipe_a, recipe_b=recipe_b)


@verb("mx_product", adapter=_mixed(turned="ab"), native=MIXED[:1])
def fp8_fp4_gemm_tn(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    out: Tensor,
    c: Tensor | None = None,
    *,
    recipe_a: tuple[int, int] = (1, 128),
    recipe_b: tuple[int, int] = (1, 32),
) -> None:
    """:func:`fp8_fp4_gemm_nt` with ``a [K, M]`` and ``b [K, N]``; both scales transposed alike.

    The other operands and dtypes as of :func:`fp8_fp4_gemm_nt`.
    """
    fp8_fp4_gemm_nt(_turned("a", a), _turned("b", b), out, c, recipe_a=recipe_a, recipe_b=recipe_b)


@verb("mx_product", adapter=_mixed(turned="a"), native=MIXED[:1])
def fp8_fp4_gemm_tt(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    out: Tensor,
    c: Tensor | None = None,
    *,
    recipe_a: tuple[int, int] = (1, 128),
    recipe_b: tuple[int, int] = (1, 32),
) -> None:
    """:func:`fp8_fp4_gemm_nt` with ``a [K, M]``, of four bits ``[K, M / 2]``, and its scales transposed alike.

    The other operands and dtypes as of :func:`fp8_fp4_gemm_nt`.
    """
    fp8_fp4_gemm_nt(_turned("a", a), b, out, c, recipe_a=recipe_a, recipe_b=recipe_b)


@verb("mx_product", adapter=_mixed("m_indices"), native=MIXED[1:2])
def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    out: Tensor,
    grouped_layout: Tensor,
    *,
    recipe_a: tuple[int, int] = (1, 128),
    recipe_b: tuple[int, int] = (1, 32),
    use_psum_layout: bool = False,
) -> None:
    """:func:`fp8_fp4_gemm_nt` of rows sorted by expert: ``b [G, N, K]``.

    ``a``, ``out`` and dtypes as of :func:`fp8_fp4_gemm_nt`.

    ``grouped_layout`` is int32 ``[M]``, the expert of each row, whose runs begin at multiples of 128 rows; rows with -1
    are padding. With ``use_psum_layout`` it is int32 ``[G]``, where the rows of each expert end; those of the next one
    begin at the multiple of 128 that is not below. Unassigned rows are not written.

    Raises DeviceError, DtypeError, InputError, LayoutError, ShapeError.
    """
    x, left, k = _codes("a", a, recipe_a, ((1, 32), (1, 128)), 2)
    w, right, _ = _codes("b", b, recipe_b, ((1, 32), (1, 128), (128, 128)), 3, k)
    (groups, n), m = w.shape[:2], x.shape[0]
    checks.output("out", out, (m, n), "[M, N]", torch.bfloat16, torch.float32)
    groups_of_rows = checks.dtype("grouped_layout", checks.tensor("grouped_layout", grouped_layout), torch.int32)
    extent, meaning = ((groups,), "[G]") if use_psum_layout else ((m,), "[M]")
    checks.shape("grouped_layout", groups_of_rows, extent, meaning)
    checks.same_device(out=out, grouped_layout=grouped_layout)
    if not use_psum_layout:
        _into(x, left, w, right, out, Rows(None, grouped_layout.contiguous()), MIXED[1])
        return
    start = torch.nn.functional.pad(groups_of_rows[:-1], (1, 0)).add(127) // 128 * 128
    group = torch.arange(groups, dtype=torch.int32, device=out.device)
    table = torch.stack([start, torch.maximum(groups_of_rows, start), start, group * n]).to(torch.int32)
    _into(x, left, w, right, out, Rows(table), MIXED[3])


serve(
    "m_grouped_fp8_fp4_gemm_nt_psum",
    "mx_product",
    partial(m_grouped_fp8_fp4_gemm_nt_contiguous, use_psum_layout=True),
    _mixed("ends"),
    MIXED[3:],
)


@verb("mx_product", adapter=_mixed("m_indices", turned="b"), native=MIXED[1:2])
def m_grouped_fp8_fp4_gemm_nn_contiguous(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    out: Tensor,
    grouped_layout: Tensor,
    *,
    recipe_a: tuple[int, int] = (1, 128),
    recipe_b: tuple[int, int] = (1, 32),
    use_psum_layout: bool = False,
) -> None:
    """:func:`m_grouped_fp8_fp4_gemm_nt_contiguous` with ``b [G, K, N]``, and its scales transposed alike.

    The other operands and dtypes as of :func:`m_grouped_fp8_fp4_gemm_nt_contiguous`.
    """
    m_grouped_fp8_fp4_gemm_nt_contiguous(
        a, _turned("b", b), out, grouped_layout, recipe_a=recipe_a, recipe_b=recipe_b, use_psum_layout=use_psum_layout
    )


@verb("mx_product", adapter=_groups_of_k)
def k_grouped_fp8_gemm_tn_contiguous(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    out: Tensor,
    ks: tuple[int, ...] | list[int],
    *,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 1, 128),
) -> None:
    """``out[g] = c[g] + a_g [K_g, M].T b_g [K_g, N]`` in float32 for every group of K: a weight gradient of an expert.

    Parameters
    ----------
    a, b
        ``(codes, scales)``: codes E4M3 ``[sum(ks), M]`` and ``[sum(ks), N]``, groups one behind the other; scales
        float32 powers of two ``[sum(ks) / gran_k, M]`` and ``[sum(ks) / gran_k, N]``, or int32 words of four exponents
        of one group (:func:`kernels.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor`).
    out
        ``[G, M, N]`` float32.
    ks
        Rows of K of each group, multiples of ``gran_k`` or 0.
    c
        ``[G, M, N]`` float32, or None: ``out`` itself, which is accumulated into.
    recipe
        ``(1, 1, gran_k)`` with ``gran_k`` 32 or 128.

    Raises
    ------
    ShapeError, DtypeError, OptionError, DeviceError, LayoutError, InputError
    """
    if tuple(recipe) not in ((1, 1, 32), (1, 1, 128)):
        raise OptionError(f"recipe={recipe}: there are (1, 1, 32), (1, 1, 128)")
    gran = recipe[2]
    groups, m, n = checks.rank("out", out, 3).shape
    steps = checks.integers("ks", ks, groups)
    if bad := [k for k in steps if k < 0 or k % gran]:
        raise OptionError(f"ks holds {bad[0]}; every group has a multiple of {gran} rows, pad it with zeros")
    pairs, total = {}, sum(steps)
    words = sum(-(-k // (4 * gran)) for k in steps)
    for name, pair, rows in (("a", a, m), ("b", b, n)):
        codes, scale = checks.pair(name, pair)
        checks.shape(name, checks.dtype(name, checks.rank(name, codes, 2), E4M3), (total, rows), "[sum(ks), rows]")
        checks.dtype(f"{name}_scale", checks.tensor(f"{name}_scale", scale), torch.float32, torch.int32)
        due = words if scale.dtype is torch.int32 else total // gran
        checks.shape(f"{name}_scale", scale, (due, rows), "[sum(ks) / gran_k, rows], or the words of every group")
        pairs[name] = codes, scale
    checks.output("out", out, (groups, m, n), "[G, M, N]", torch.float32)
    if c is not None and c is not out:
        checks.operand("c", c, (groups, m, n), "[G, M, N]", torch.float32)
        checks.same_device(out=out, c=c)
        out.copy_(c)
    start = word = 0
    for group, k in enumerate(steps):
        of_words = slice(word, word + -(-k // (4 * gran)))
        span, blocks = slice(start, start + k), slice(start // gran, (start + k) // gran)
        start, word = span.stop, of_words.stop
        if k:
            left, right = (
                _turned(name, (codes[span], scale[of_words if scale.dtype is torch.int32 else blocks]))
                for name, (codes, scale) in pairs.items()
            )
            fp8_fp4_gemm_nt(left, right, out[group], c=out[group], recipe=recipe)


def _turned(name: str, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Codes ``[.., K, R]``, or packed ``[.., K, R / 2]``, and their scales with the last two axes exchanged."""
    codes, scale = checks.pair(name, pair)
    checks.dtype(name, checks.tensor(name, codes), E4M3, torch.uint8, torch.int8)
    scale = checks.tensor(f"{name}_scale", scale)
    if codes.dim() < 2 or scale.dim() != codes.dim():
        raise ShapeError(f"{name} has shape {list(codes.shape)} and scales {list(scale.shape)}; both are matrices")
    if codes.dtype is E4M3:
        return codes.mT.contiguous(), scale.mT.contiguous()
    checks.multiple("K", codes.shape[-2], 2, "two codes make a byte of the transpose")
    nibbles = codes.view(torch.uint8)
    wide = torch.stack([nibbles & 0xF, nibbles >> 4], dim=-1).flatten(-2).mT
    return (wide[..., ::2] | wide[..., 1::2] << 4).contiguous(), scale.mT.contiguous()


@verb("mx_product", adapter=_mixed("masked_m"), native=MIXED[2:3])
def m_grouped_fp8_fp4_gemm_nt_masked(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    out: Tensor,
    masked_m: Tensor,
    *,
    recipe_a: tuple[int, int] = (1, 128),
    recipe_b: tuple[int, int] = (1, 32),
) -> None:
    """:func:`fp8_fp4_gemm_nt` of a matrix for each expert: ``a [G, M, K]``, ``b [G, N, K]``, ``out [G, M, N]``.

    The first ``masked_m[g]`` (int32 ``[G]``) rows of group ``g`` are real; the others are left alone.

    Raises DeviceError, DtypeError, InputError, LayoutError, ShapeError.
    """
    x, left, k = _codes("a", a, recipe_a, ((1, 32), (1, 128)), 3)
    w, right, _ = _codes("b", b, recipe_b, ((1, 32), (1, 128), (128, 128)), 3, k)
    (groups, m), n = x.shape[:2], w.shape[1]
    checks.output("out", out, (groups, m, n), "[G, M, N]", torch.bfloat16, torch.float32)
    counts = checks.dtype("masked_m", checks.tensor("masked_m", masked_m), torch.int32)
    checks.shape("masked_m", counts, (groups,), "[G]")
    checks.same_device(out=out, masked_m=masked_m)
    group = torch.arange(groups, dtype=torch.int32, device=out.device)
    table = torch.stack([group * m, group * m + masked_m, group * m, group * n])
    _into(x.reshape(groups * m, -1), left, w, right, out.view(groups * m, n), Rows(table), MIXED[2])


def _codes(
    name: str,
    pair: tuple[Tensor, Tensor],
    recipe: tuple[int, int],
    recipes: tuple[tuple[int, int], ...],
    rank: int,
    k: int | None = None,
) -> tuple[Tensor, Scales, int]:
    """Codes and scales of an operand of DeepGEMM, and its K; the scales a row for each row."""
    x, scale = checks.pair(name, pair)
    x = checks.dtype(name, checks.rank(name, x, rank), E4M3, torch.uint8, torch.int8)
    x = x.view(torch.uint8) if x.dtype is torch.int8 else x
    if tuple(recipe) not in recipes:
        raise OptionError(f"recipe_{name}={recipe}: there are {', '.join(map(str, recipes))}")
    (gran, gran_k), rows, width = recipe, x.shape[-2], x.shape[-1] * (1 + (x.dtype is torch.uint8))
    if k is not None and width != k:
        raise ShapeError(f"{name} has K={width} and a K={k}; two codes of four bits lie in a byte")
    checks.multiple("K", width, MX_BLOCK, "pad K with zeros")
    scale_name, columns = f"{name}_scale", -(-width // gran_k)
    checks.dtype(scale_name, checks.tensor(scale_name, scale), torch.float32, torch.int32)
    if scale.dtype is torch.int32:
        if gran != 1:
            raise OptionError(f"recipe_{name}={recipe} with packed scales: they hold the exponents of one row, (1, ..)")
        checks.shape(scale_name, scale, (*x.shape[:-1], (columns + 3) // 4), "[.., rows, ceil(K / (4 gran_k))]")
        exponents = scale.clone(memory_format=torch.contiguous_format).view(torch.uint8)[..., :columns]
        dense = exponents.contiguous()  # one column of a word, flat, would be a view of every fourth byte
        return x, Scales(dense.reshape(-1).view(UE8M0), gran_k, LINEAR), width
    due = (*x.shape[:-2], -(-rows // gran), columns)
    checks.shape(scale_name, scale, due, "[.., ceil(rows / gran), ceil(K / gran_k)]")
    each = scale if gran == 1 else scale.repeat_interleave(gran, dim=-2)[..., :rows, :]
    return x, Scales(each.contiguous().reshape(-1), gran_k, LINEAR), width


def _into(
    a: Tensor,
    left: Scales,
    b: Tensor,
    right: Scales,
    out: Tensor,
    rows: Rows | None,
    form: str,
    accumulate: bool = False,
) -> None:
    """A product into the caller's output, of any strides."""
    if out.is_contiguous():
        run_product(a, left, b, right, out, rows, accumulate=accumulate, form=form)
        return
    dense = out.contiguous()
    run_product(a, left, b, right, dense, rows, accumulate=accumulate, form=form)
    out.copy_(dense)


# --- what they share ------------------------------------------------------------------------------------------------


def _dense(
    a: Tensor,
    left: Scales,
    b: Tensor,
    right: Scales,
    out_dtype: torch.dtype,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    names: tuple[str, str, str, str] = ("a", "b", "a_descale", "b_descale"),
) -> Tensor:
    """One product; ``b`` is ``[K, N]``."""
    if b.shape[0] != a.shape[1]:
        raise ShapeError(f"{names[1]} has {b.shape[0]} rows and {names[0]} {a.shape[1]} columns; they are the same K")
    out = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
    run_product(a, left, b.t()[None], right, out, None, alpha, bias, names=names)
    return out


def run_product(
    a: Tensor,
    left: Scales,
    b: Tensor,
    right: Scales,
    out: Tensor,
    rows: Rows | None,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    accumulate: bool = False,
    names: tuple[str, str, str, str] = ("a", "b", "a_scale", "b_scale"),
    form: str = OTHER,
    row_alignment: int = 1,
) -> None:
    """``a [R, K]`` times ``b [G, N, K]`` into ``out [R, N]``; unassigned rows are not written.

    ``alpha`` ``[1]``, ``[G]`` or, of one product, ``[R]``, and ``bias`` ``[N]`` float32 (``bias`` bf16 or f16 too).

    ``names`` of the operands and of their scales, for errors; ``form``: how rows meet weights, where a library has a
    product of that kind; ``row_alignment``: every group begins and ends at a multiple of it.

    Raises DeviceError, InputError, ShapeError.
    """
    checks.nonempty("a", a, 0, 1)
    checks.nonempty("b", b, 0, 1, 2)
    a, b = a.contiguous(), b.contiguous()
    operands = dict(zip(names, (a, b, left.memory, right.memory), strict=True))
    checks.same_device(**operands, out=out, alpha=alpha, bias=bias)
    run = torch.ops.fp8_kernels.mx_product if is_compiling() else mx_product
    form = form or DENSE if rows is None else form
    run(a, *left, b, *right, out, *(rows or Rows(None)), alpha, bias, accumulate, form, row_alignment)


def mx_product(
    a: Tensor,
    a_scale: Tensor,
    a_width: int,
    a_tile: str,
    b: Tensor,
    b_scale: Tensor,
    b_width: int,
    b_tile: str,
    out: Tensor,
    table: Tensor | None,
    expert: Tensor | None,
    depth: Tensor | None,
    alpha: Tensor | None,
    bias: Tensor | None,
    accumulate: bool,
    form: str,
    row_alignment: int,
) -> None:
    """The operator under every verb: :attr:`kernels.backends.declaration.Backend.mx_product` of the plan's backend.

    Operands and dtypes as of :class:`kernels.backends.declaration.Backend`; ``a_scale``, ``b_scale`` flat ``[bytes]``,
    ``table`` ``[4, G]``, ``expert`` ``[R]`` and ``depth`` ``[3, G]`` int32 as of
    :class:`kernels.backends.declaration.Rows`.
    """
    rows = Rows(table, expert, depth)
    left, right = Scales(a_scale, a_width, a_tile), Scales(b_scale, b_width, b_tile)
    product = Product(a, left, b, right, out, rows, alpha, bias, accumulate)
    op, key = "mx_product", list[tuple[str, object]]([("out_dtype", dtype_name(out.dtype))])
    if form and machines.current_machine().sm in BLACKWELL:
        own = form if form in MIXED else f"{recipe_of(a, left, b, right)}_{form}"
        if own in MX_OPERATIONS:
            op, key = own, [*key, *_fields(product, form)]
            key += [("row_alignment", row_alignment)] if form == GROUPED else []
            key += [("a_width", a_width), ("b_width", b_width)] if form in MIXED else []
    route(op, a.device, *key).of(op)(product)


def recipe_of(a: Tensor, left: Scales, b: Tensor, right: Scales) -> str:
    """``mxfp8``, ``nvfp4``, ``mxfp4`` or ``mxfp8_mxfp4`` by codes and scales; empty for any other pair.

    ``a`` and ``b`` hold codes of any shape, E4M3 or E5M2, or two of E2M1 a byte (uint8).
    """
    kinds = {(side.memory.dtype, side.width) for side in (left, right)}
    narrow = (not a.is_floating_point(), not b.is_floating_point())
    if kinds == {(E4M3, NVFP4_BLOCK)}:
        return "nvfp4" if narrow == (True, True) else ""
    names = {(False, False): "mxfp8", (True, True): "mxfp4", (False, True): "mxfp8_mxfp4"}
    return names.get(narrow, "") if kinds == {(UE8M0, MX_BLOCK)} else ""


def _fields(p: Product, form: str) -> tuple[tuple[str, object], ...]:
    """The fields of a problem that rows of :mod:`kernels.support` look at; of the rows what these ask about, so that a
    changing number of them adds few decisions."""
    a, left, b, right, out, _, alpha, bias, accumulate = p
    (groups, n, _), rows = b.shape, a.shape[0]
    k = a.shape[1] * (1 if a.is_floating_point() else 2)
    one = form == DENSE or form == MIXED[0]
    m = min(rows, FEW_ROWS + 1) if one else TILE_ROWS if rows % (TILE_ROWS * groups) == 0 else 1
    return (
        ("m", m),
        ("n", n),
        ("k", k),
        ("groups", None if one else groups),
        ("a_dtype", dtype_name(a.dtype)),
        ("b_dtype", dtype_name(b.dtype)),
        ("tiles", left.tile if left.tile == right.tile else left.tile if right.tile == HIGH else right.tile),
        ("alpha", None if alpha is None else _of_whom(alpha, form)),
        ("bias", None if bias is None else dtype_name(bias.dtype)),
        ("c", dtype_name(out.dtype) if accumulate else None),
    )


def _of_whom(alpha: Tensor, form: str) -> str:
    if form in (GROUPED, TIGHT):
        return "group"
    return "one" if alpha.numel() == 1 else "row"


operators.register("mx_product", mx_product, operators.nothing, writes=("out",))


def _scales(
    name: str, x: Tensor, dtype: torch.dtype, rows: int, k: int, width: int, tile: str, groups: int = 1
) -> Scales:
    """The memory of ``groups`` matrices of scales as ``dtype``, of the size that its layout takes."""
    memory, columns = _memory(name, x, dtype), -(-k // width)
    due = groups * size_of(rows, columns, tile)
    if memory.numel() != due:
        count = f"{groups} x {rows} x {columns}" if groups > 1 else f"{rows} x {columns}"
        raise ShapeError(f"{name} holds {memory.numel()} scales; {count} of them take {due} ({tile})")
    return Scales(memory, width, tile)


def _memory(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The scales in storage order, flat; those of a transposed matrix in its storage order."""
    checks.dtype(name, checks.tensor(name, x), torch.uint8, dtype)
    lies = x.t() if x.dim() == 2 and not x.is_contiguous() and x.t().is_contiguous() else x
    return lies.contiguous().reshape(-1).view(dtype)


def _up(rows: int) -> int:
    """Rows that a matrix of scales takes in 128x4 tiles."""
    return (rows + 127) // 128 * 128


def _pointers(name: str, x: Tensor, count: int, most: int, alignment: int = 1) -> None:
    """Ends of groups, the values looked at on a CPU: ascending, from 0 to ``most``, multiples of ``alignment``."""
    checks.operand(name, x, (count,), "int32, one for each expert", torch.int32)
    if not is_compiling() and checks.wanted(None, x.device) and count:
        checks.values(
            name,
            None,
            (x[1:] >= x[:-1]).all() & (x[0] >= 0) & (x[-1] <= most),
            lambda: f"{name} {x.tolist()} must ascend from 0 to at most {most}",
        )
        if alignment > 1:
            checks.values(
                name,
                None,
                (x % alignment == 0).all(),
                lambda: f"{name} {x.tolist()} must hold multiples of row_alignment={alignment}",
            )


def _factors(name: str, x: Tensor | None, groups: int) -> None:
    if x is not None:
        checks.operand(name, x, (groups,), "[G]", torch.float32)
