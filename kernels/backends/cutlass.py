"""vLLM's compiled CUTLASS operators, through ``torch.ops._C``.

When an engine has imported vLLM the operators are registered; otherwise its libraries are loaded by path (no part of
vLLM's Python is imported). The shipped kernels silently misread two things, which are corrected first: block scales
are made M-major (M padded to a multiple of 4), and operands whose row pitch is not their width are copied.

Its FP4 product reads scales of 16 in 128x4 tiles and has not run on hardware here.

Not covered: int8, zero points.

Source: vLLM's csrc/quantization (``cutlass_scaled_mm``, ``per_token_group_quant_fp8``, ``scaled_fp8_quant``).
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from ..config import current_config
from ..errors import MissingPackageError, NoBackendError
from ..records import Machine, Problem, vllm_libraries
from ..support import BLACKWELL, BLOCKS, TIGHT_MX
from ._host import dense, on_its_device
from .declaration import Backend, Blocks, Matrices, Product

log = logging.getLogger(__name__)
ELF = b"\x7fELF"
"""How a shared library begins."""
FP8_MAX = 448.0
FP4 = "cutlass_scaled_fp4_mm"
CHAINS = {"nvfp4_product": "chain_nvf4", "nvfp4_tight": "chain_nvf4", "mxfp4_tight": "chain_mxf4"}
"""The schedule of one chain over K, by operation; its arch goes before it."""
UNSTATED = ("linear", "block_linear", "grouped_scaled", BLOCKS)
"""Products of FP8, for whose kernels on Blackwell no source states an order of sums."""
SWAP_ROWS = 64
"""Up to this many rows ``cutlass_moe_mm`` exchanges its operands."""


def kernel(p: Problem, machine: Machine) -> str:
    """The operator's name."""
    return {
        "quant_token": "dynamic_per_token_scaled_fp8_quant",
        "quant_group": "per_token_group_fp8_quant",
        "grouped_scaled": "cutlass_moe_mm",
        "nvfp4_product": FP4,
        "quant_nvfp4": "scaled_fp4_quant",
        "nvfp4_tight": "cutlass_fp4_group_mm",
        "mxfp4_tight": "cutlass_mxfp4_group_mm",
    }.get(p.op, "cutlass_scaled_mm")


def steps(p: Problem, machine: Machine) -> tuple[str, ...]:
    """How the operands are prepared."""
    if p.op == "nvfp4_product":
        return ("scales as matrices of whole tiles of 128 x 4", "an alpha of 1 where there is none")
    if p.op in TIGHT_MX:
        return ("sizes of each expert's product, first rows of its operand and of its scales, on the device",)
    if p.op not in ("block_linear", BLOCKS):
        return ()
    pad = ("pad M to a multiple of 4, cropped afterwards",) if machine.sm // 10 == 9 or p.op == BLOCKS else ()
    return ("a_scale to M-major", *pad)


def numerics(p: Problem, machine: Machine) -> str:
    """Of FP4 products: one chain over K, whatever M is (their kernels differ in tiles, not in a schedule of tiles).
    Of the others on Blackwell: bounds, since no source states an order."""
    if p.op in UNSTATED and machine.sm in BLACKWELL:
        return "bounds only: the order of its sums is not stated"
    base = f"sm{100 if machine.sm // 10 == 10 else 120}"
    return f"{base}.{CHAINS[p.op]}" if p.op in CHAINS else ""


def operators() -> Any:
    """``torch.ops._C`` with vLLM's operators registered, by vLLM itself or from its libraries.

    Loading registers them for the whole process, and is logged. It cannot be undone (the symbols of these libraries are
    unique, and stay mapped after ``dlclose``): so a file that is no library is refused before any other is loaded, and
    where one of several does not load, its operators alone are missing.

    Raises
    ------
    MissingPackageError
        The libraries are not there or do not load; every failure is listed.
    """
    return _loaded()[0]


@functools.cache
def _loaded() -> tuple[Any, dict[str, str]]:
    """The operators, and why which library did not load."""
    failures: dict[str, str] = {}
    if hasattr(torch.ops._C, "cutlass_scaled_mm"):
        return torch.ops._C, failures
    paths = vllm_libraries(current_config())
    for path in paths:
        if not (path.is_file() and path.open("rb").read(len(ELF)) == ELF):
            raise MissingPackageError("vLLM's CUTLASS operators", {str(path): "it is no library; none was loaded"})
    load: Any = torch.ops.load_library  # torch is untyped here
    for path in paths:
        try:
            load(str(path))
            log.info("vLLM's operators are registered for this process from %s", path)
        except (OSError, RuntimeError) as error:
            failures[path.name] = str(error).splitlines()[0]
    if not hasattr(torch.ops._C, "cutlass_scaled_mm"):
        reasons = failures or {"vllm": "no compiled operators found"}
        raise MissingPackageError("vLLM's CUTLASS operators; install vLLM for this torch", reasons)
    return torch.ops._C, failures


@on_its_device
def linear(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``[M, N]``: one chain over K, ``scale_a * (scale_b * acc)``, bias by one fused multiply-add.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    out = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
    added = None if bias is None else bias.contiguous()
    operators().cutlass_scaled_mm(out, dense(a), columns(b), scale_a.contiguous(), scale_b.contiguous(), added)
    return out


@on_its_device
def block_linear(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``[M, N]``: ``scale_a [M, K/128]`` in any strides, ``scale_b [K/128, N/128]``; promotion every 128.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    m = a.shape[0]
    lead = m + (-m % 4)
    left, scale = dense(a), m_major(scale_a, lead)
    if lead != m:
        left = torch.cat([left, left.new_zeros(lead - m, left.shape[1])])
    out = torch.empty(lead, b.shape[1], dtype=out_dtype, device=a.device)
    operators().cutlass_scaled_mm(out, left, columns(b), scale, scale_b.t().contiguous().t(), None)
    return out[:m]


@on_its_device
def block_product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, c: Tensor | None, float_scales: bool
) -> None:
    """:func:`block_linear` of a weight ``b [N, K]`` into ``out``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    out.copy_(block_linear(a, b.t(), a_scale, b_scale.t(), None, out.dtype))


@on_its_device
def quant_token(x: Tensor, scale_ub: Tensor | None) -> tuple[Tensor, Tensor]:
    """vLLM's dynamic per-token operator.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    if x.shape[0]:  # an empty launch is an error of the runtime
        operators().dynamic_per_token_scaled_fp8_quant(q, x.contiguous(), scale, scale_ub)
    return q, scale


@on_its_device
def quant_group(
    x: Tensor, group: int, eps: float, ue8m0: bool, layout: str = "row", out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """vLLM's group quantiser; ``layout`` row, col or tma. NaN and infinite elements become the code -448.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.

    Raises NoBackendError.
    """
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device) if out is None else out
    rows_of, groups = x.numel() // x.shape[-1], x.shape[-1] // group
    lead = rows_of + (-rows_of % 4 if layout == "tma" else 0)
    if layout == "row":
        scale = torch.empty(*x.shape[:-1], groups, dtype=torch.float32, device=x.device)
    elif x.dim() == 2:
        scale = torch.zeros(groups, lead, dtype=torch.float32, device=x.device)[:, :rows_of].t()
    else:
        raise NoBackendError("column-major scales of more than two axes", {"cutlass": "its operator takes a matrix"})
    into_scale(x, q, scale, group, eps, ue8m0)
    return q, scale


@on_its_device
def into_scale(x: Tensor, q: Tensor, scale: Tensor, group: int, eps: float, ue8m0: bool) -> None:
    """The group quantiser into ``q`` and ``scale``, whose strides determine the layout.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    if x.numel() == 0:
        return
    transposed = scale.dim() == 2 and scale.stride(0) < scale.stride(1)
    operators().per_token_group_fp8_quant(
        x.contiguous(), q, scale, group, eps, -FP8_MAX, FP8_MAX, ue8m0, transposed, transposed
    )


@on_its_device
def grouped_scaled(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """``cutlass_moe_mm``; see :func:`kernels.grouped.scaled_grouped_mm`.

    The kernel takes 64-bit starts, and for at most 64 rows in all it exchanges the operands: then the caller's
    problem sizes are ``(N, M, K)`` instead of ``(M, N, K)``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    groups, n, k = b.shape
    out = torch.empty(a.shape[0], n, dtype=out_dtype, device=a.device)
    ends = offsets.to(torch.int64)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    rows_of, columns_of = (ends - starts).to(torch.int32), torch.full_like(offsets, n)
    first, second = (columns_of, rows_of) if a.shape[0] <= SWAP_ROWS else (rows_of, columns_of)
    sizes = torch.stack([first, second, torch.full_like(offsets, k)], dim=1).contiguous()
    strides = [torch.full((groups,), v, dtype=torch.int64, device=a.device) for v in (k, k, n)]
    operators().cutlass_moe_mm(
        out, dense(a), dense(b), scale_a.contiguous(), scale_b.contiguous(), starts, sizes, *strides, True, True
    )
    return out


@on_its_device
def nvfp4_product(p: Product) -> None:
    """``cutlass_scaled_fp4_mm`` into ``out``, which it takes for dense memory without a look.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    weight, columns = dense(p.b[0]), -(-(2 * p.a.shape[1] // p.left.width) // 4) * 4
    scales = (dense(side.memory.view(torch.float8_e4m3fn)).view(-1, columns) for side in (p.left, p.right))
    factor = torch.ones(1, dtype=torch.float32, device=p.a.device) if p.alpha is None else p.alpha.contiguous()
    operators().cutlass_scaled_fp4_mm(p.out, dense(p.a), weight, *scales, factor)


@on_its_device
def quant_blocks(
    x: Tensor, how: Blocks, columns: int, global_scale: Tensor | None, matrices: Matrices | None = None
) -> tuple[Tensor, Tensor]:
    """``scaled_fp4_quant`` into outputs of zeros: it does not write the padding of the scales.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    assert global_scale is not None, "the operation is that of NVFP4"
    m, blocks, tiled = x.shape[0], columns // 16, how.layout != "linear"
    height, width = (-(-m // 128) * 128, -(-blocks // 4) * 4) if tiled else (m, blocks)
    q = torch.empty(m, columns // 2, dtype=torch.uint8, device=x.device)
    memory = torch.zeros(height * width, dtype=torch.uint8, device=x.device)
    scale = memory.view(torch.int32).view(height, width // 4) if tiled else memory.view(height, width)
    operators().scaled_fp4_quant.out(dense(x), global_scale.reshape(1), tiled, output=q, output_scale=scale)
    return q, memory if tiled else memory.view(m, blocks)


@on_its_device
def tight(p: Product) -> None:
    """``cutlass_fp4_group_mm`` of NVFP4, ``cutlass_mxfp4_group_mm`` of MXFP4, into ``out``.

    It takes the first row of each expert in ``a`` and in the scales, and the size of its product.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    a, left, b, right, out, rows, alpha, *_ = p
    assert rows is not None and rows.table is not None, "the operation is that of a table of rows"
    (groups, n, half), columns = b.shape, -(-(2 * b.shape[2] // left.width) // 4) * 4
    start, end, first, _ = rows.table
    sizes = torch.stack([end - start, torch.full_like(start, n), torch.full_like(start, 2 * half)], dim=1)
    dtype = torch.float8_e4m3fn if left.memory.dtype is torch.float8_e4m3fn else torch.uint8
    whole = left.memory.numel() // columns
    scales = (
        dense(left.memory[: whole * columns].view(dtype)).view(whole, columns),
        dense(right.memory.view(dtype)).view(groups, -1, columns),
    )
    lists = (sizes.contiguous(), start.contiguous(), first.contiguous())
    if dtype is torch.uint8:
        operators().cutlass_mxfp4_group_mm(out, dense(a), dense(b), *scales, *lists)
        return
    factors = torch.ones(groups, dtype=torch.float32, device=a.device) if alpha is None else alpha.contiguous()
    operators().cutlass_fp4_group_mm(out, dense(a), dense(b), *scales, factors, *lists)


def m_major(scale: Tensor, lead: int) -> Tensor:
    """``[M, C]`` as ``[lead, C]`` with strides ``(1, lead)``: ``scale`` itself if it has them; added rows are 1.

    ``scale`` ``[M, C]`` float32; returns float32. Values are moved, NaN included.
    """
    if scale.shape[0] == lead and scale.stride() == (1, lead):
        return scale
    ready = scale.new_ones(scale.shape[1], lead)
    ready[:, : scale.shape[0]] = scale.t()
    return ready.t()


def columns(x: Tensor) -> Tensor:
    """``x`` itself when its transpose is dense on 16 bytes, else a column-major copy (the kernel reads no pitch).

    ``x`` ``[K, N]`` E4M3; returns E4M3 ``[K, N]``, the bytes moved.
    """
    return dense(x.t()).t()


def missing(p: Problem, machine: Machine) -> str | None:
    """Of vLLM's two libraries one may be absent, and its operators with it."""
    name = kernel(p, machine)
    if hasattr(operators(), name):
        built_for_it = p.op not in CHAINS or operators().cutlass_scaled_mm_supports_fp4(machine.sm)
        return None if built_for_it else f"this build has no {name} for {machine.arch}; install one for its CUDA"
    failures = "".join(f"; {library}: {why}" for library, why in _loaded()[1].items())
    return f"the loaded libraries of vLLM have no {name}; load both of them{failures}"


BACKEND = Backend(
    name="cutlass",
    kernel=kernel,
    steps=steps,
    missing=missing,
    quant_token=quant_token,
    quant_group=quant_group,
    linear=linear,
    block_linear=block_linear,
    grouped_scaled=grouped_scaled,
    block_product=block_product,
    nvfp4_product=nvfp4_product,
    quant_blocks=quant_blocks,
    nvfp4_tight=tight,
    mxfp4_tight=tight,
    numerics=numerics,
)
