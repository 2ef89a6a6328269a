"""Products of several matrices, of transposed operands, of float32 sums that accumulate, and of int4 weights.

Shapes and scales as the libraries publish them; ``K`` is cut into scale blocks of 128. Operands whose memory a library
cannot address are copied. A routine whose arithmetic another one has is that one under another name: transposed
operands are views, runs of rows become the aligned runs of
:func:`kernels.grouped.m_grouped_fp8_gemm_nt_contiguous`, int4 weights the E4M3 codes that CUTLASS' table gives them.

NaN in a code or a scale makes every element that it reaches NaN; an infinite scale gives infinity
or NaN.
Source: DeepGEMM (csrc/apis/gemm.hpp, einsum.hpp), FlashInfer (gemm), vLLM (csrc/quantization/cutlass_w8a8 and
cutlass_w4a8).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import blockscaled, checks, grouped, linear
from .adapters import Inputs, Options, Outputs, int32, out_dtype_of, paired, pairs, runs
from .checks import FP8
from .errors import LayoutError, OptionError, ShapeError, shown
from .operators import empty
from .routes import dtype_name, route
from .support import BLOCK, BLOCKS, DENSE, LEAST_1D1D, RUNS
from .verbs import verb

E5M2 = torch.float8_e5m2
NARROW = (torch.bfloat16, torch.float16)
Pair = tuple[Tensor, Tensor]
EQUATION = "bhr,hdr->bhd"


# --- transposed operands: views of the same product ------------------------------------------------------------------


def _turned(name: str, value: object, rank: int = 2) -> Pair:
    """Codes and scale with their last two axes exchanged."""
    codes, scale = checks.pair(name, value)
    return checks.rank(name, codes, rank).mT, checks.rank(f"{name}_scale", scale, rank).mT


# --- as a contract, and as an operator, calls it -------------------------------------------------------------------


def _k_groups(verb: Callable[..., None], inputs: Inputs, options: Options) -> Tensor:
    c, ks = inputs["c"], inputs["ks"]
    out = torch.zeros_like(c, memory_format=torch.contiguous_format)
    verb(*pairs(inputs), out, ks.tolist(), int32(ks), c=c)
    return out


def _heads_apart(verb: Callable[..., None], inputs: Inputs, options: Options) -> Tensor:
    """Gaps stay zero."""
    splits = (int(options.get("left", 128)), int(options.get("mid", 64)), int(options.get("right", 128)))
    m, n = inputs["a"].shape[0], inputs["b"].shape[0]
    columns = n + n // (splits[0] + splits[2]) * splits[1]
    out = torch.zeros(m, columns, dtype=out_dtype_of(options), device=inputs["a"].device)
    verb(*pairs(inputs), out, splits)
    return out


def _of_heads(verb: Callable[..., None], inputs: Inputs, options: Options) -> Outputs:
    return paired(("a", 0), ("a", 1), ("b", 1))(partial(verb, EQUATION), inputs, options)


def _einsum_operator(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    fp8_einsum(EQUATION, (a, a_scale), (b, b_scale), out)


def _bmm_fake(A: Tensor, B: Tensor, A_scale: Tensor, B_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return empty(A.shape[0], A.shape[1], B.shape[2], like=A, dtype=dtype)


def _by_four(verb: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """Runs whose borders are multiples of 4, as the contract has them."""
    return runs(partial(verb, row_alignment=4), inputs, options)


def _every_masked(verb: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    arguments = {**inputs, "masked_m": int32(inputs["masked_m"])}
    return verb(**arguments, expected_m=inputs["a"].shape[1], out_dtype=out_dtype_of(options))


# --- the verbs -----------------------------------------------------------------------------------------------------


@verb(DENSE, adapter=paired(("a", 0), ("b", 1)), native=(BLOCKS,))
def fp8_gemm_nn(a: Pair, b: Pair, out: Tensor, *, c: Tensor | None = None, disable_ue8m0_cast: bool = True) -> None:
    """The dense product with ``b (b [K, N], b_scale [K/128, N/128])``; raises what that raises.

    ``a``, ``out``, ``c`` and dtypes as of :func:`kernels.blockscaled.fp8_gemm_nt`.
    """
    blockscaled.fp8_gemm_nt(a, _turned("b", b), out, c=c, disable_ue8m0_cast=disable_ue8m0_cast)


@verb(DENSE, adapter=paired(("a", 1), ("b", 1)), native=(BLOCKS,))
def fp8_gemm_tn(a: Pair, b: Pair, out: Tensor, *, c: Tensor | None = None, disable_ue8m0_cast: bool = True) -> None:
    """:func:`fp8_gemm_nn` with ``a (a [K, M], a_scale [K/128, M])`` too; the rest as of :func:`fp8_gemm_nn`."""
    left, right = _turned("a", a), _turned("b", b)
    blockscaled.fp8_gemm_nt(left, right, out, c=c, disable_ue8m0_cast=disable_ue8m0_cast)


@verb(DENSE, adapter=paired(("a", 1), ("b", 0)), native=(BLOCKS,))
def fp8_gemm_tt(a: Pair, b: Pair, out: Tensor, *, c: Tensor | None = None, disable_ue8m0_cast: bool = True) -> None:
    """The dense product with ``a (a [K, M], a_scale [K/128, M])``; raises what :func:`fp8_gemm_nn` raises.

    ``b``, ``out``, ``c`` and dtypes as of :func:`kernels.blockscaled.fp8_gemm_nt`.
    """
    blockscaled.fp8_gemm_nt(_turned("a", a), b, out, c=c, disable_ue8m0_cast=disable_ue8m0_cast)


@verb("grouped_contiguous", adapter=paired(("a", 0), ("b", 2), more=("m_indices",)))
def m_grouped_fp8_gemm_nn_contiguous(
    a: Pair, b: Pair, out: Tensor, m_indices: Tensor, *, disable_ue8m0_cast: bool = True, check: bool | None = None
) -> None:
    """:func:`kernels.m_grouped_fp8_gemm_nt_contiguous` with ``b (b [G, K, N], b_scale [G, K/128, N/128])``.

    ``a``, ``out``, ``m_indices`` and dtypes as of :func:`kernels.grouped.m_grouped_fp8_gemm_nt_contiguous`.
    """
    grouped.m_grouped_fp8_gemm_nt_contiguous(
        a, _turned("b", b, 3), out, m_indices, disable_ue8m0_cast=disable_ue8m0_cast, check=check
    )


# --- float32 sums that accumulate -------------------------------------------------------------------------------------


@verb("gemm_1d1d", adapter=paired(("a", 0), ("b", 0), more=("c",)), writes=("out",))
def fp8_gemm_nt_1d1d(a: Pair, b: Pair, out: Tensor, *, c: Tensor | None = None) -> None:
    """``out = a @ b.T + c`` in float32, one scale for every row and 128 steps of K of both operands.

    DeepGEMM's recipe (1, 1, 128). ``a (a [M, K], a_scale [M, ceil(K/128)])`` and ``b (b [N, K], b_scale
    [N, ceil(K/128)])`` E4M3 with float32 scales; ``out [M, N]`` float32; ``c [M, N]`` float32 or None (zeros), which
    may be ``out``.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, LayoutError, NoBackendError, InputError
    """
    (x, xs), (w, ws) = checks.pair("a", a), checks.pair("b", b)
    (m, k), (n, k_b) = checks.matrix("a", x), checks.matrix("b", w)
    if k != k_b:
        raise ShapeError(f"a {list(x.shape)} and b {list(w.shape)} disagree in K")
    blocks = -(-k // BLOCK)
    checks.operand("a_scale", xs, (m, blocks), "[M, ceil(K/128)]", torch.float32)
    checks.operand("b_scale", ws, (n, blocks), "[N, ceil(K/128)]", torch.float32)
    checks.output("out", out, (m, n), "[M, N]", torch.float32)
    if c is not None:
        checks.operand("c", c, (m, n), "[M, N]", torch.float32)
    device = checks.same_device(a=x, a_scale=xs, b=w, b_scale=ws, out=out, c=c)
    if is_compiling():
        torch.ops.fp8_kernels.fp8_gemm_nt_1d1d(x, xs, w, ws, out, c)
        return
    run = route("gemm_1d1d", device, ("m", min(m, LEAST_1D1D)), ("n", n), ("k", k), ("out_dtype", "float32"))
    if m:
        run.gemm_1d1d(x, xs, w, ws, out, c)


@verb("k_grouped", adapter=_k_groups, writes=("out",))
def k_grouped_fp8_gemm_nt_contiguous(
    a: Pair, b: Pair, out: Tensor, ks: tuple[int, ...] | list[int], ks_tensor: Tensor, *, c: Tensor | None = None
) -> None:
    """``out[g] = a_g @ b_g.T + c[g]`` in float32 for every group ``g`` of K: a weight gradient of each expert.

    Parameters
    ----------
    a, b
        Codes E4M3 ``[M * sum(ks)]`` and ``[N * sum(ks)]``: of every group ``[M, K_g]`` row-major, one behind the other;
        scales float32 ``[M, sum(ks)/128]`` and ``[N, sum(ks)/128]``, logical.
    out
        ``[G, M, N]`` float32, contiguous.
    ks, ks_tensor
        Steps of K of each group, multiples of 128 or 0, and the same numbers as int32 ``[G]`` on the device. The kernel
        trusts the tensor; it is not compared with ``ks``, which would wait for the device.
    c
        ``[G, M, N]`` float32, or None: ``out`` itself, which is accumulated into. A group without steps is copied.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, LayoutError, OptionError, NoBackendError, InputError
    """
    (x, xs), (w, ws) = checks.pair("a", a), checks.pair("b", b)
    groups, m, n = checks.rank("out", out, 3).shape
    steps = checks.integers("ks", ks, groups)
    if bad := [k for k in steps if k < 0 or k % BLOCK]:
        raise OptionError(f"ks holds {bad[0]}; every group has a multiple of {BLOCK} steps, pad it with zeros")
    total = sum(steps)
    for name, codes, scale, rows in (("a", x, xs, m), ("b", w, ws, n)):
        checks.shape(name, checks.dtype(name, checks.rank(name, codes, 1), FP8), (rows * total,), "[rows * sum(ks)]")
        checks.operand(f"{name}_scale", scale, (rows, total // BLOCK), "[rows, sum(ks)/128]", torch.float32)
    checks.output("out", out, (groups, m, n), "[G, M, N]", torch.float32)
    summand = out if c is None else c
    checks.operand("c", summand, (groups, m, n), "[G, M, N]", torch.float32)
    checks.operand("ks_tensor", ks_tensor, (groups,), "[G]", torch.int32)
    device = checks.same_device(a=x, a_scale=xs, b=w, b_scale=ws, out=out, ks_tensor=ks_tensor, c=c)
    if is_compiling():
        torch.ops.fp8_kernels.k_grouped_fp8_gemm_nt_contiguous(x, xs, w, ws, out, steps, ks_tensor, c)
        return
    key = ("m", min(m, LEAST_1D1D)), ("n", n), ("groups", groups), ("out_dtype", "float32")
    run = route("k_grouped", device, *key)
    if total == 0 or m * n * groups == 0:
        if c is not None:
            out.copy_(c)
        return
    run.k_grouped(x, xs, w, ws, out, steps, ks_tensor.contiguous(), summand)


# --- heads and batches ------------------------------------------------------------------------------------------------


@verb("skip_head_mid", adapter=_heads_apart, writes=("out",))
def fp8_gemm_nt_skip_head_mid(
    a: Pair, b: Pair, out: Tensor, head_splits: tuple[int, int, int], *, disable_ue8m0_cast: bool = True
) -> None:
    """:func:`kernels.fp8_gemm_nt` whose columns go to heads with a gap, which is not written.

    ``head_splits (left, mid, right)``: ``N`` is a multiple of ``left + right``, and ``out [M, N + N/(left+right)*mid]``
    bf16 (on a CPU f16 and float32 too) holds per head ``left`` columns, a gap of ``mid``, and ``right`` columns.

    Raises
    ------
    ShapeError, OptionError, NoBackendError, DeviceError, DtypeError, InputError, LayoutError
        And what :func:`kernels.fp8_gemm_nt` raises.
    """
    (x, xs), (w, ws) = checks.pair("a", a), checks.pair("b", b)
    (m, k), (n, k_b) = checks.matrix("a", x), checks.matrix("b", w)
    left, mid, right = (
        checks.positive(f"head_splits[{i}]", v) for i, v in enumerate(checks.integers("head_splits", head_splits, 3))
    )
    if k != k_b or n % (left + right):
        raise ShapeError(f"a {list(x.shape)}, b {list(w.shape)}: K must agree, N be a multiple of {left + right}")
    checks.operand("a_scale", xs, (m, -(-k // BLOCK)), "[M, ceil(K/128)]", torch.float32)
    checks.operand("b_scale", ws, (-(-n // BLOCK), -(-k // BLOCK)), "[ceil(N/128), ceil(K/128)]", torch.float32)
    checks.output("out", out, (m, n + n // (left + right) * mid), "[M, N + N/(left+right)*mid]", *checks.WIDE)
    device = checks.same_device(a=x, a_scale=xs, b=w, b_scale=ws, out=out)
    if is_compiling():
        splits = [left, mid, right]
        torch.ops.fp8_kernels.fp8_gemm_nt_skip_head_mid(x, xs, w, ws, out, splits, disable_ue8m0_cast)
        return
    key = (("n", n), ("k", k), ("out_dtype", dtype_name(out.dtype)), *blockscaled.held(disable_ue8m0_cast))
    run = route("skip_head_mid", device, *key)
    if m:
        run.skip_head_mid(x, xs, w, ws, out, (left, mid, right), disable_ue8m0_cast)


@verb("einsum", adapter=_of_heads, writes=("out",), operator=_einsum_operator)
def fp8_einsum(equation: str, a: Pair, b: Pair, out: Tensor) -> None:
    """``"bhr,hdr->bhd"``: for every head ``h``, ``out[:, h] = a[:, h] @ b[h].T`` with block scales.

    ``a (a [B, H, R], a_scale [B, H, ceil(R/128)])``, ``b (b [H, D, R], b_scale [H, ceil(D/128), ceil(R/128)])`` E4M3
    and float32; ``out [B, H, D]`` bf16 (on a CPU f16 and float32 too). Other equations, which exist on sm100 only, are
    refused.

    Raises
    ------
    OptionError, ShapeError, DtypeError, DeviceError, NoBackendError, InputError, LayoutError
    """
    if equation.replace(" ", "") != EQUATION:
        raise OptionError(f"equation {shown(equation)}; the FP8 product of heads is {EQUATION!r}")
    (x, xs), (w, ws) = checks.pair("a", a), checks.pair("b", b)
    m, heads, k = checks.dtype("a", checks.rank("a", x, 3), FP8).shape
    heads_b, n, k_b = checks.dtype("b", checks.rank("b", w, 3), FP8).shape
    if (heads, k) != (heads_b, k_b) or 0 in (heads, n, k):
        raise ShapeError(f"a {list(x.shape)} and b {list(w.shape)} disagree in H or R, or are empty")
    blocks = -(-k // BLOCK)
    checks.operand("a_scale", xs, (m, heads, blocks), "[B, H, ceil(R/128)]", torch.float32)
    checks.operand("b_scale", ws, (heads, -(-n // BLOCK), blocks), "[H, ceil(D/128), ceil(R/128)]", torch.float32)
    checks.output("out", out, (m, heads, n), "[B, H, D]", *checks.WIDE)
    device = checks.same_device(a=x, a_scale=xs, b=w, b_scale=ws, out=out)
    if is_compiling():
        torch.ops.fp8_kernels.fp8_einsum(x, xs, w, ws, out)
        return
    run = route("einsum", device, ("n", n), ("k", k), ("groups", heads), ("out_dtype", dtype_name(out.dtype)))
    if m:
        run.einsum(x, xs, w, ws, out)


@verb("bmm", adapter=lambda verb, inputs, options: verb(**inputs, dtype=out_dtype_of(options)), fake=_bmm_fake)
def bmm_fp8(A: Tensor, B: Tensor, A_scale: Tensor, B_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``A @ B`` for every batch, times both scales.

    ``A_scale`` and ``B_scale`` have any shape of one value.

    Parameters
    ----------
    A, B
        ``[G, M, K]`` and ``[G, K, N]``, E4M3 or E5M2, not both E5M2. The library reads ``B`` column by column whatever
        its strides are; another layout is copied into that one here.
    A_scale, B_scale
        One float32 value each, on the device.
    dtype
        bf16 or f16.

    Returns
    -------
    Tensor
        ``[G, M, N]``.
        of ``dtype``.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, OptionError, NoBackendError, InputError, LayoutError
    """
    groups, m, k = checks.dtype("A", checks.rank("A", A, 3), FP8, E5M2).shape
    groups_b, k_b, n = checks.dtype("B", checks.rank("B", B, 3), FP8, E5M2).shape
    if (groups, k) != (groups_b, k_b) or 0 in (groups, n, k):
        raise ShapeError(f"A {list(A.shape)} and B {list(B.shape)} disagree in G or K, or are empty")
    checks.scalar("A_scale", A_scale)
    checks.scalar("B_scale", B_scale)
    checks.out_dtype(dtype, *NARROW)
    device = checks.same_device(A=A, B=B, A_scale=A_scale, B_scale=B_scale)
    if is_compiling():
        out: Tensor = torch.ops.fp8_kernels.bmm_fp8(A, B, A_scale, B_scale, dtype)
        return out
    run = route(
        "bmm",
        device,
        ("n", n),
        ("k", k),
        ("groups", groups),
        ("out_dtype", dtype_name(dtype)),
        ("a_dtype", dtype_name(A.dtype)),
        ("b_dtype", dtype_name(B.dtype)),
    )
    if m == 0:
        return torch.empty(groups, 0, n, dtype=dtype, device=device)
    return run.bmm(A, B, A_scale.reshape(1), B_scale.reshape(1), dtype)


# --- FlashInfer's and CUTLASS' groups --------------------------------------------------------------------------------


@verb(DENSE, adapter=runs, native=(BLOCKS,))
def gemm_fp8_nt_groupwise(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """``a @ b.T`` with 128x128 scales on ``b`` and scales of one row, or of 128, on ``a``.

    Returns ``[M, N]`` of ``out_dtype``.

    ``a [M, K]``, ``b [N, K]`` E4M3; ``a_scale [M or ceil(M/128), ceil(K/128)]``, ``b_scale [ceil(N/128), ceil(K/128)]``
    float32, logical; ``[M, N]`` bf16 or f16. Raises what :func:`kernels.fp8_gemm_nt` raises.

    Raises DtypeError, InputError, LayoutError, OptionError, ShapeError.
    """
    checks.out_dtype(out_dtype, *NARROW)
    (m, _), (n, _) = checks.matrix("a", a), checks.matrix("b", b)
    rows = checks.rank("a_scale", a_scale, 2).shape[0]
    if rows != m and rows == -(-m // BLOCK):
        a_scale = a_scale.repeat_interleave(BLOCK, dim=0)[:m]
    out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    blockscaled.fp8_gemm_nt((a, a_scale), (b, b_scale), out)
    return out


@verb("grouped_masked", adapter=_every_masked)
def batch_deepgemm_fp8_nt_groupwise(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    masked_m: Tensor,
    expected_m: int,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """:func:`kernels.fp8_m_grouped_gemm_nt_masked` under FlashInfer's name: ``[G, M, N]``, zero past the counts.

    ``a`` ``[G, M, K]`` and ``b`` ``[G, N, K]`` E4M3, ``a_scale`` ``[G, M, ceil(K/128)]`` and ``b_scale`` ``[G,
    ceil(N/128), ceil(K/128)]`` float32, ``masked_m`` ``[G]`` int32. Returns ``[G, M, N]`` of ``out_dtype``.

    Raises InputError, LayoutError, OptionError, ShapeError.
    """
    checks.out_dtype(out_dtype)
    groups, m, _ = checks.rank("a", a, 3).shape
    out = torch.zeros(groups, m, checks.rank("b", b, 3).shape[1], dtype=out_dtype, device=a.device)
    grouped.fp8_m_grouped_gemm_nt_masked((a, a_scale), (b, b_scale), out, masked_m, expected_m)
    return out


@verb("grouped_contiguous", adapter=_by_four, native=(RUNS,))
def group_gemm_fp8_nt_groupwise(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    m_indptr: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    row_alignment: int = 1,
) -> Tensor:
    """Rows ``m_indptr[g]`` to ``m_indptr[g + 1]`` of ``a`` times ``b[g].T``, block scales.

    ``m_indptr`` ``[G + 1]`` int32, every entry a multiple of ``row_alignment``: FlashInfer's kernel on sm100 and sm103
    takes multiples of 4, and no value on a device can be looked at in time. Returns ``[M, N]`` of ``out_dtype``.

    ``a [M, K]``, ``b [G, N, K]`` E4M3; ``a_scale [M, ceil(K/128)]``, ``b_scale [G, ceil(N/128), ceil(K/128)]`` float32,
    logical; ``m_indptr`` int32 ``[G + 1]``, never decreasing; ``[M, N]``, rows of no group zero. No alignment of runs
    is needed: they are copied into aligned ones where the product needs them.

    Raises DeviceError, DtypeError, InputError, OptionError, ShapeError, ValueRangeError.
    """
    starts = _borders("m_indptr", m_indptr, b)
    checks.positive("row_alignment", row_alignment)
    return _runs(a, b, a_scale, b_scale, starts[:-1], starts[1:], out_dtype, borders=starts, alignment=row_alignment)


@verb("grouped_contiguous", adapter=runs)
def cutlass_blockwise_scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scales_a: Tensor,
    scales_b: Tensor,
    expert_offsets: Tensor,
    problem_sizes: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """:func:`group_gemm_fp8_nt_groupwise` with the first row of each expert and its sizes ``[G, 3]`` (rows, N, K).

    ``a`` ``[M, K]`` and ``b`` ``[G, N, K]`` E4M3, ``scales_a`` ``[M, ceil(K/128)]`` and ``scales_b`` ``[G, ceil(N/128),
    ceil(K/128)]`` float32, ``expert_offsets`` ``[G]`` and ``problem_sizes`` ``[G, 3]`` int32. Returns ``[M, N]`` of
    ``out_dtype``.
    """
    starts, ends = _starts(expert_offsets, problem_sizes, b)
    return _runs(a, b, scales_a, scales_b, starts, ends, out_dtype, ("scales_a", "scales_b"))


@verb("grouped_scaled", adapter=runs)
def cutlass_moe_mm(
    a: Tensor,
    b: Tensor,
    scales_a: Tensor,
    scales_b: Tensor,
    expert_offsets: Tensor,
    problem_sizes: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Rows of every expert times its weight, ``scales_a * (scales_b * sum)``.

    Parameters
    ----------
    a, b
        ``[M, K]`` and ``[G, N, K]`` E4M3.
    scales_a
        ``[M, 1]`` or ``[1, 1]`` float32.
    scales_b
        ``[G, N]`` or ``[G, 1]`` float32.
    expert_offsets
        ``[G]`` int32: the first row of each expert, behind the rows of the one before.
    problem_sizes
        ``[G, 3]`` int32: rows, N and K of each expert.

    Returns
    -------
    Tensor
        ``[M, N]`` of ``out_dtype``; unassigned rows are unspecified. NaN reaches the elements of its row or column.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, OptionError, ValueRangeError, NoBackendError, InputError, LayoutError
    """
    _, ends = _starts(expert_offsets, problem_sizes, b)
    rows, groups, n = checks.rank("a", a, 2).shape[0], b.shape[0], b.shape[1]
    checks.same_device(a=a, scales_a=scales_a, scales_b=scales_b)
    if checks.dtype("scales_a", scales_a, torch.float32).numel() == 1:
        scales_a = scales_a.reshape(1, 1).expand(rows, 1)
    if tuple(checks.dtype("scales_b", scales_b, torch.float32).shape) == (groups, 1):
        scales_b = scales_b.expand(groups, n)
    checks.shape("scales_a", scales_a, (rows, 1), "[M, 1], or [1, 1]")
    checks.shape("scales_b", scales_b, (groups, n), "[G, N], or [G, 1]")
    return grouped.scaled_grouped_mm(a, b, scales_a, scales_b, ends, out_dtype)


@verb("grouped_scaled", adapter=runs)
def grouped_mm_fp8(
    a: Tensor, b: Tensor, m_indptr: Tensor, alpha: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Rows ``m_indptr[g]`` to ``m_indptr[g + 1]`` of ``a`` times ``b[g].T``, times ``alpha`` (one float32 value).

    ``m_indptr`` ``[G + 1]`` int32; ``alpha`` of any shape. Returns ``[M, N]`` of ``out_dtype``.

    ``a [M, K]``, ``b [G, N, K]`` E4M3, ``m_indptr`` int32 ``[G + 1]``; ``[M, N]``, rows of no group unspecified.

    Raises DeviceError, DtypeError, InputError, LayoutError, ShapeError.
    """
    checks.scalar("alpha", alpha)
    starts = _borders("m_indptr", m_indptr, b)
    rows = checks.rank("a", a, 2).shape[0]
    checks.same_device(a=a, b=b, alpha=alpha)
    scale_a, scale_b = alpha.reshape(1, 1).expand(rows, 1), alpha.new_ones(b.shape[:2])
    return grouped.scaled_grouped_mm(a, b, scale_a, scale_b, starts[1:], out_dtype)


# --- int4 weights ----------------------------------------------------------------------------------------------------


@checks.checked(gradients=True)
def decode_int4(b_q: Tensor, b_group_scales: Tensor) -> Tensor:
    """E4M3 codes ``[..., N, K]`` of int4 weights: ``RN_e4m3(q * scale)``, saturated, as CUTLASS' table has them.

    ``b_q`` int8 ``[..., N, K]``, values -8..7, not checked; ``b_group_scales`` E4M3 ``[..., ceil(K/128), N]``. A scale
    and a weight have 4 bits each, so that their float32 product is exact. A NaN scale gives NaN.

    Raises DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError.
    """
    checks.dtype("b_q", b_q, torch.int8)
    checks.dtype("b_group_scales", b_group_scales, FP8)
    checks.same_device(b_q=b_q, b_group_scales=b_group_scales)
    if b_q.dim() < 2:
        raise ShapeError(f"b_q must be [..., N, K], got shape {list(b_q.shape)}")
    k = b_q.shape[-1]
    wanted = (*b_q.shape[:-2], -(-k // BLOCK), b_q.shape[-2])
    checks.shape("b_group_scales", b_group_scales, wanted, "[..., ceil(K/128), N]")
    each = b_group_scales.to(torch.float32).mT.repeat_interleave(BLOCK, dim=-1)[..., :k]
    return (b_q.to(torch.float32) * each).clamp(-checks.FP8_MAX, checks.FP8_MAX).to(FP8)


@verb("layout")
def unified_encode_int4b(b: Tensor) -> Tensor:
    """Bytes of two int4 weights each as CUTLASS looks them up: nibbles 1..7 become ``8 - v``, the others stay.

    Returns uint8 of the same shape.

    ``b`` uint8 of any shape; the same shape. It is its own inverse.

    Raises DtypeError.
    """
    checks.dtype("b", b, torch.uint8)
    low, high = b & 15, b >> 4
    low, high = (torch.where((v > 0) & (v < 8), 8 - v, v) for v in (low, high))
    return high << 4 | low


@verb("layout")
def cutlass_encode_and_reorder_int4b(b: Tensor) -> Tensor:
    """int4 weights encoded as :func:`unified_encode_int4b` does, in the order in which a warp of CUTLASS reads them.

    Place ``16 t + v`` of a tile of 16 rows by 32 columns holds row ``t//4 + 8 (v//4 % 2)``, column
    ``4 (t % 4) + v % 4 + 16 (v//8)``; tiles follow each other down the rows.

    Parameters
    ----------
    b
        int32 ``[K/8, N]``, strides ``(1, K/8)``: eight weights of a row a word, the lowest bits first. ``N`` is a
        multiple of 16, ``K`` of 32.

    Returns
    -------
    Tensor
        Of the shape and strides of ``b``.
        The same shape, int32.

    Raises
    ------
    DtypeError, InputError, LayoutError, ShapeError
    """
    checks.dtype("b", checks.rank("b", b, 2), torch.int32)
    n, k = b.shape[1], b.shape[0] * 8
    checks.multiple("N", n, 16, "pad the rows of weights")
    checks.multiple("K", k, 32, "pad K")
    if not b.t().is_contiguous():
        raise LayoutError(f"b has strides {b.stride()}; it must be [K/8, N] in columns, as `w.t().contiguous().t()`")
    byte = unified_encode_int4b(b.t().view(torch.uint8))
    nibble = torch.stack([byte & 15, byte >> 4], dim=-1).flatten()
    place = torch.arange(n * k, device=b.device)
    tile, t, v = place // 512, place // 16 % 32, place % 16
    row = tile % (n // 16) * 16 + t // 4 + v // 4 % 2 * 8
    column = tile // (n // 16) * 32 + t % 4 * 4 + v % 4 + v // 8 * 16
    moved = nibble[row * k + column].view(-1, 2)
    return (moved[:, 1] << 4 | moved[:, 0]).view(torch.int32).view(n, k // 8).t()


@verb("layout")
def cutlass_pack_scale_fp8(scales: Tensor) -> Tensor:
    """E4M3 ``[8 n]``: for each of ``n`` group scales its products with -8 to -1, rounded and saturated.

    ``scales`` of any shape with ``n`` elements. A NaN scale gives eight NaN codes.

    Raises DtypeError.
    """
    checks.dtype("scales", scales, FP8)
    steps = torch.arange(-8, 0, device=scales.device).to(torch.float32)
    products = scales.to(torch.float32).flatten()[:, None] * steps
    return products.clamp(-checks.FP8_MAX, checks.FP8_MAX).to(FP8).flatten()


@verb("linear", adapter=runs)
def cutlass_w4a8_mm(
    a: Tensor,
    b_q: Tensor,
    b_group_scales: Tensor,
    b_channel_scales: Tensor,
    a_token_scales: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``channel * (token * (a @ w.T))`` of E4M3 ``a [M, K]`` and int4 weights ``w`` (:func:`decode_int4`).

    ``b_q`` ``[N, K]`` int8 and ``b_group_scales`` ``[ceil(K/128), N]`` E4M3. Returns ``[M, N]`` of ``out_dtype``.

    ``b_channel_scales`` float32 ``[N, 1]``, ``a_token_scales`` float32 ``[M, 1]``; ``[M, N]`` bf16 or f16. Weights are
    decoded at every call; a layer that keeps them decodes once and calls :func:`kernels.cutlass_scaled_mm`.

    Raises DeviceError, DtypeError, InputError, LayoutError, ShapeError.
    """
    w = decode_int4(checks.rank("b_q", b_q, 2), b_group_scales)
    checks.operand("b_channel_scales", b_channel_scales, (w.shape[0], 1), "[N, 1]", torch.float32)
    checks.operand("a_token_scales", a_token_scales, (checks.rank("a", a, 2).shape[0], 1), "[M, 1]", torch.float32)
    checks.same_device(a=a, b_q=b_q, b_channel_scales=b_channel_scales, a_token_scales=a_token_scales)
    return linear.cutlass_scaled_mm(a, w.t(), a_token_scales, b_channel_scales.t(), out_dtype)


@verb("grouped_scaled", adapter=runs)
def cutlass_w4a8_moe_mm(
    a: Tensor,
    b_q: Tensor,
    b_group_scales: Tensor,
    b_channel_scales: Tensor,
    a_token_scales: Tensor,
    expert_offsets: Tensor,
    problem_sizes: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """:func:`cutlass_moe_mm` with int4 weights ``b_q [G, N, K]``, group scales ``[G, ceil(K/128), N]``, channels
    ``[G, N]``.

    ``a`` ``[M, K]`` E4M3, ``b_q`` ``[G, N, K]`` int8, ``b_group_scales`` ``[G, ceil(K/128), N]`` E4M3,
    ``b_channel_scales`` ``[G, N]`` and ``a_token_scales`` ``[M, 1]`` float32, ``expert_offsets`` ``[G]`` and
    ``problem_sizes`` ``[G, 3]`` int32. Returns ``[M, N]`` of ``out_dtype``.

    Raises DeviceError, DtypeError, InputError, LayoutError, ShapeError.
    """
    w = decode_int4(checks.rank("b_q", b_q, 3), b_group_scales)
    checks.operand("b_channel_scales", b_channel_scales, tuple(w.shape[:2]), "[G, N]", torch.float32)
    checks.operand("a_token_scales", a_token_scales, (checks.rank("a", a, 2).shape[0], 1), "[M, 1]", torch.float32)
    checks.same_device(a=a, b_q=b_q, b_channel_scales=b_channel_scales, a_token_scales=a_token_scales)
    return cutlass_moe_mm(a, w, a_token_scales, b_channel_scales, expert_offsets, problem_sizes, out_dtype)


# --- helpers ----------------------------------------------------------------------------------------------------------


def _borders(name: str, borders: Tensor, b: Tensor) -> Tensor:
    groups = checks.rank("b", b, 3).shape[0]
    checks.same_device(b=b, **{name: checks.operand(name, borders, (groups + 1,), "[G + 1]", torch.int32)})
    return borders


def _starts(expert_offsets: Tensor, problem_sizes: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """First row and end of every expert."""
    groups = checks.rank("b", b, 3).shape[0]
    starts = checks.operand("expert_offsets", expert_offsets, (groups,), "[G]", torch.int32)
    sizes = checks.operand("problem_sizes", problem_sizes, (groups, 3), "[G, 3]", torch.int32)
    checks.same_device(b=b, expert_offsets=expert_offsets, problem_sizes=problem_sizes)
    return starts, starts + sizes[:, 0]


def _runs(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    starts: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    scales: tuple[str, str] = ("a_scale", "b_scale"),
    borders: Tensor | None = None,
    alignment: int = 1,
) -> Tensor:
    """Runs of any length, which begin and end at the ``borders``, by a library that takes them as they lie; else by the
    product of aligned runs: every run moved to a multiple of the alignment, and back. The borders are multiples of
    ``alignment``."""
    checks.out_dtype(out_dtype)
    m, k = checks.dtype("a", checks.rank("a", a, 2), FP8).shape
    groups, n, k_b = checks.dtype("b", checks.rank("b", b, 3), FP8).shape
    if k != k_b:
        raise ShapeError(f"a {list(a.shape)} and b {list(b.shape)} disagree in K")
    blocks = -(-k // BLOCK)
    checks.operand(scales[0], a_scale, (m, blocks), "[M, ceil(K/128)]", torch.float32)
    checks.operand(scales[1], b_scale, (groups, -(-n // BLOCK), blocks), "[G, ceil(N/128), ceil(K/128)]", torch.float32)
    device = checks.same_device(a=a, b=b, **{scales[0]: a_scale, scales[1]: b_scale})
    if m == 0:
        return torch.empty(0, b.shape[1], dtype=out_dtype, device=device)
    if checks.wanted(None, device) and not is_compiling():
        good = (starts[1:] >= ends[:-1]).all() & (ends >= starts).all() & (starts[0] >= 0) & (ends[-1] <= m)
        checks.values(
            "runs",
            None,
            good,
            lambda: f"runs from {starts.tolist()} to {ends.tolist()} must ascend from 0 to at most M={m}",
        )
        if borders is not None and alignment > 1:
            given, whole = borders, (borders % alignment == 0).all()
            checks.values(
                "m_indptr", None, whole, lambda: f"{given.tolist()} must hold multiples of row_alignment={alignment}"
            )
    if borders is not None and not is_compiling():
        extents = (("n", n), ("k", k), ("groups", groups), ("out_dtype", dtype_name(out_dtype)))
        run = route(RUNS, device, *extents, ("row_alignment", alignment), *blockscaled.held(True))
        if run.takes_runs():
            target = torch.zeros(m, n, dtype=out_dtype, device=device)
            run.block_runs(a, a_scale, b, b_scale, target, borders)
            return target
    unit = grouped.get_mk_alignment_for_contiguous_layout() if device.type == "cuda" else 1
    source, index, place = aligned_runs(starts, ends, m, unit)
    codes = a.view(torch.uint8).index_select(0, source).view(a.dtype)
    out = torch.zeros(len(index) + 1, b.shape[1], dtype=out_dtype, device=device)
    pair = codes, a_scale.index_select(0, source)
    grouped.m_grouped_fp8_gemm_nt_contiguous(pair, (b, b_scale), out[:-1], index, check=False)
    return out.index_select(0, place)


def aligned_runs(starts: Tensor, ends: Tensor, m: int, unit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where ``m`` rows in runs go when every run begins at a multiple of ``unit``; starts and ends int32 ``[G]``.

    ``starts`` and ``ends`` ``[G]`` int32.

    Returns ``(source, index, place)``: the row that each place takes (any for an unused place), int64 ``[L]``; each
    place's group or -1, int32 ``[L]``; and each row's place, int64 ``[m]``, ``L`` for rows of no group. ``L`` follows
    from ``m``, ``G`` and ``unit`` alone, so that nothing waits for a device.
    """
    groups, device = len(starts), starts.device
    rows = torch.arange(m, dtype=torch.int32, device=device)
    group = torch.searchsorted(ends.contiguous(), rows, right=True).to(torch.int32)
    at = group.clamp(max=groups - 1).long()
    real = (group < groups) & (rows >= starts[at])
    whole = (ends - starts + unit - 1) // unit * unit
    first = whole.cumsum(0, dtype=torch.int32) - whole
    length = m if unit == 1 else -(-(m + groups * (unit - 1)) // unit) * unit
    place = torch.where(real, first[at] + rows - starts[at], length).long()
    index = torch.full((length + 1,), -1, dtype=torch.int32, device=device).scatter_(0, place, group)[:-1]
    source = torch.zeros(length + 1, dtype=torch.int64, device=device).scatter_(0, place, rows.long())[:-1]
    return source, index, place
