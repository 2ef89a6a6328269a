"""The layer's own quantisers in Triton: per tensor, per token, and per group with scales in every layout.

Bits equal those of plain torch, scale and payload. Under ``TRITON_INTERPRET=1`` they run on the CPU.

Not covered: GPUs without E4M3 conversion (before sm89), where plain torch serves.

Source: the formulas of :mod:`kernels.quantize`.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import fast
from ..config import current_config
from ..context import Memo
from ..fast import modes
from ..records import Machine, Problem
from ..support import BLOCK, BLOCK_QUANTISERS
from . import triton_cache, triton_fused, triton_mx_quant
from ._host import allocator, column_major, on_its_device
from ._launch import ALIGNMENT, HIP, Launch, bits, imported, loads, power_of_two
from .declaration import Allocate, Backend, Quantiser

TILE = 32
"""Groups (or rows) of one program: 4096 elements at 128 a group."""
LINEAR = 4096
"""Elements of one program of the per-tensor kernels."""


def kernel(p: Problem, machine: Machine) -> str:
    """The kernel that runs."""
    return {
        "quant_group": "group_kernel",
        "quant_group_packed": "packed_kernel",
        "quant_token": "token_kernel",
        "quant_gated": "gated_kernel",
        "quant_norm": "norm_kernel",
        "quant_rope": "rope_kernel",
        "quant_cache": "store_kernel",
        **dict.fromkeys(BLOCK_QUANTISERS, "block_kernel"),
    }.get(p.op, "tensor_kernel")


@functools.cache
def library() -> tuple[ModuleType, bool]:
    """The kernels, and whether they run natively (not under the interpreter)."""
    return imported("._triton_kernels", "group_kernel")


@functools.lru_cache(maxsize=256)
def _prepared(kernel: str, num_warps: int, **constants: object) -> Launch:
    return Launch(getattr(library()[0], kernel), constants, num_warps=num_warps)


def quant_static(x: Tensor, scale: Tensor) -> Tensor:
    """``q = sat(x / scale)``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    q, x = _payload(x.contiguous())
    if x.numel():
        _tensor(x, q, None, scale.reshape(1))
    return q


def quant_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dynamic per tensor: ``scale [1] = amax / 448``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    q, x = _payload(x.contiguous())
    scale = torch.empty(1, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return q, scale.zero_()
    amax = torch.zeros(1, dtype=torch.int32, device=x.device)
    parts = 4
    programs = -(-x.numel() // (LINEAR * parts))
    _prepared("amax_kernel", 8, BLOCK=LINEAR, PARTS=parts)(programs, (x, amax), (x.numel(),))
    _tensor(x, q, amax, scale)
    return q, scale


def quant_token(x: Tensor, scale_ub: Tensor | None) -> tuple[Tensor, Tensor]:
    """Dynamic per token: ``scale [M, 1] = max(min(amax, scale_ub) / 448, 1 / (448 * 512))``.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    native = library()[1]
    q, x = _payload(x)
    rows, cols = x.shape
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        block = min(power_of_two(cols), 8192)
        bound = scale if scale_ub is None else scale_ub.reshape(1)
        start = _prepared(
            "token_kernel",
            8 if block > 2048 else 4,
            BLOCK=block,
            PARTS=-(-cols // block),
            BOUNDED=scale_ub is not None,
            NATIVE=native,
        )
        start(rows, (x, _bytes(q, native), scale, bound), (cols, x.stride(0)))
    return q, scale


@on_its_device
def quant_group(
    x: Tensor, group: int, eps: float, ue8m0: bool, layout: str = "row", out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One scale per row and group of the last axis; ``layout`` row, col or tma.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    if x.dim() != 2:
        return _stacked(x, group, eps, ue8m0, layout, out)
    return group_quantiser(group, eps, ue8m0, layout)(x, out, allocator(x.device))


def group_quantiser(group: int, eps: float, ue8m0: bool, layout: str) -> Quantiser:
    """:func:`quant_group` for matrices, prepared: what does not depend on the matrix is done once."""
    native = library()[1]
    return _group_quantiser(group, eps, ue8m0, layout, native, native and not HIP and current_config().fast_paths)


def reciprocal_quantiser(dtype: torch.dtype) -> Quantiser:
    """Groups of 128 by :func:`kernels.formulas.flashinfer_blocks`, the scale ``[K/128, align(M, 4)]``."""
    native = library()[1]
    start = _prepared(
        "group_kernel",
        4,
        GROUP=BLOCK,
        LANES=BLOCK,
        BLOCK=TILE,
        LEAD=4,
        UE8M0=False,
        EPS=0,
        LIMIT=bits(torch.finfo(dtype).max),
        NATIVE=native,
    )

    def quantise(x: Tensor, out: Tensor | None, allocate: Allocate) -> tuple[Tensor, Tensor]:
        rows, cols = x.shape
        groups, lead = cols // BLOCK, rows + -rows % 4
        x = x if x.stride(1) == 1 else x.contiguous()
        q = allocate((rows, cols), (cols, 1), torch.float8_e4m3fn) if out is None else out
        scale = allocate((groups, lead), (lead, 1), torch.float32)
        start(-(-lead // TILE) * groups, (x, q if native else q.view(torch.uint8), scale), (rows, groups, x.stride(0)))
        return q, scale

    return quantise


@functools.lru_cache(maxsize=64)
def _group_quantiser(group: int, eps: float, ue8m0: bool, layout: str, native: bool, direct: bool) -> Quantiser:
    block, transposed, align = _tile(group), layout != "row", 4 if layout == "tma" else 1
    start = _prepared(
        "group_kernel",
        4,
        GROUP=group,
        LANES=power_of_two(group),
        BLOCK=block,
        LEAD={"row": 0, "col": 1, "tma": 4}[layout],
        UE8M0=ue8m0,
        EPS=bits(eps),
        LIMIT=0,
        NATIVE=native,
    )

    def programs_of(rows: int, groups: int) -> int:
        return -(-(rows + -rows % align) // block) * groups if transposed else -(-rows * groups // block)

    def quantise(x: Tensor, out: Tensor | None, allocate: Allocate) -> tuple[Tensor, Tensor]:
        (rows, cols), (pitch, unit) = x.shape, x.stride()
        groups, lead = cols // group, rows + -rows % align
        if unit != 1:
            x, pitch = x.contiguous(), cols
        q = allocate((rows, cols), (cols, 1), torch.float8_e4m3fn) if out is None else out
        if lead != rows:
            scale = allocate((groups, lead), (lead, 1), torch.float32)
        else:
            scale = allocate((rows, groups), (1, rows) if transposed else (groups, 1), torch.float32)
        if rows:
            codes, integers = q if native else q.view(torch.uint8), (rows, groups, pitch)
            inputs, outputs = ((x,), (codes, scale)) if out is None else ((x, codes), (scale,))
            start.here(programs_of(rows, groups), inputs, integers, outputs)
        return q, scale if lead == rows else scale.as_strided((rows, groups), (1, lead))

    if not direct:
        return quantise
    launches: Memo[tuple[object, ...], tuple[Any, ...]] = Memo()

    def again(x: Tensor, out: Tensor | None, allocate: Allocate) -> tuple[Tensor, Tensor]:
        """As above, in two thirds of its host time for dense scales and extents of an earlier call."""
        (rows, cols), (pitch, unit), index, now = x.shape, x.stride(), x.device.index, modes()
        key = index, now, x.dtype, rows, cols, pitch
        launch = launches.get(key)
        if launch is None or out is not None or unit != 1 or (address := x.data_ptr()) % ALIGNMENT:
            q, scale = quantise(x, out, allocate)
            ready = start.ready(index, now, programs_of(rows, cols // group), (rows, cols // group, pitch), x.dtype)
            if ready is not None and unit == 1 and rows % align == 0:
                launches.keep(key, (q.stride(), tuple(scale.shape), scale.stride(), *ready))
            return q, scale
        strides, shape, scale_strides, begin, fixed, after = launch
        q = allocate((rows, cols), strides, torch.float8_e4m3fn)
        scale = allocate(shape, scale_strides, torch.float32)
        begin(fast.STREAM(index), *fixed, address, q.data_ptr(), scale.data_ptr(), *after)
        return q, scale

    return again


def quant_group_packed(x: Tensor, group: int, eps: float) -> tuple[Tensor, Tensor]:
    """UE8M0 scales packed four an int32, strides ``(1, align(M, 4))``, pad lanes 0.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    native = library()[1]
    q, x = _payload(x)
    rows, groups = x.shape[0], x.shape[1] // group
    words, lead = -(-groups // 4), rows + (-rows % 4)
    scale = torch.empty(words, lead, dtype=torch.int32, device=x.device)
    if rows:
        block = _tile(group)
        start = _prepared(
            "packed_kernel", 4, GROUP=group, LANES=power_of_two(group), BLOCK=block, EPS=bits(eps), NATIVE=native
        )
        start(-(-lead // block) * words, (x, _bytes(q, native), scale), (rows, groups, x.stride(0)))
    return q, scale.as_strided((rows, words), (1, lead))


def _stacked(x: Tensor, group: int, eps: float, ue8m0: bool, layout: str, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """:func:`quant_group` of any rank: rows are independent, and scales are transposed per matrix afterwards."""
    width = x.shape[-1]
    q, scale = quant_group(x.reshape(-1, width), group, eps, ue8m0, "row", None if out is None else out.view(-1, width))
    scale = scale.view(*x.shape[:-1], width // group)
    return q.view(x.shape), scale if layout == "row" else column_major(scale, 4 if layout == "tma" else 1)


def _tensor(x: Tensor, q: Tensor, amax: Tensor | None, scale: Tensor) -> None:
    native = library()[1]
    start = _prepared("tensor_kernel", 8, BLOCK=LINEAR, STATIC=amax is None, NATIVE=native)
    pointers = x, _bytes(q, native), scale if amax is None else amax, scale
    start(-(-x.numel() // LINEAR), pointers, (x.numel(),))


def _payload(x: Tensor) -> tuple[Tensor, Tensor]:
    """An empty contiguous payload for ``x``, and ``x`` with unit stride along its rows."""
    return torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device), x if x.stride(-1) == 1 else x.contiguous()


def _bytes(q: Tensor, native: bool) -> Tensor:
    """The payload as the kernel stores it: the interpreter writes codes."""
    return q if native else q.view(torch.uint8)


def _tile(group: int) -> int:
    return max(1, TILE * 128 // power_of_two(group))


BACKEND = Backend(
    name="triton",
    kernel=kernel,
    missing=loads(library),
    quant_static=quant_static,
    quant_tensor=quant_tensor,
    quant_token=quant_token,
    quant_group=quant_group,
    group_quantiser=group_quantiser,
    quant_group_packed=quant_group_packed,
    reciprocal_quantiser=reciprocal_quantiser,
    quant_blocks=triton_mx_quant.quant_blocks,
    gated_static=triton_fused.gated_static,
    gated_group=triton_fused.gated_group,
    gated_group_bf16=triton_fused.gated_group_bf16,
    norm_static=triton_fused.norm_static,
    norm_group=triton_fused.norm_group,
    norm_blocks=triton_mx_quant.norm_blocks,
    rope=triton_fused.rope,
    cache_store=triton_cache.store,
    cache_tiles=triton_cache.tiles,
    cache_nvfp4=triton_cache.nvfp4,
    cache_gather=triton_cache.gather,
)
