"""SGLang's compiled operators, from the package ``sgl_kernel``: FP8 products, block-scaled products, group quantiser.

Its products read operands, and scales along M, as dense memory whatever their strides (only the unit stride is
checked), so anything else is copied first; per-tensor scales are expanded to one per token and channel. Its group
quantiser numbers groups in 32 bits, ignores NaN, and packs scales in whole words of four. Three operators are not
offered, because they break this layer's contracts: the per-tensor one multiplies by the reciprocal, and adds to a scale
that must be zero before; the per-token one has no floor and codes an all-zero row of a small batch as NaN; float32
UE8M0 scales, row-major, are rounded after the payload was quantised.

Read off sgl-kernel 0.3.21 and its sources (fp8_gemm_kernel.cu, fp8_blockwise_gemm_kernel.cu,
per_token_group_quant_8bit{,_v2}.cu); its sm90 build uses approximate division. Has not run on hardware here. Not
covered: int8, FP4, grouped products, the masked and fused forms of the quantiser.

Source: sgl-kernel (csrc/gemm).
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

from ..errors import DtypeError, MissingPackageError, NoBackendError, OptionError, shown
from ..records import Machine, Problem
from ..support import SGL_WORD
from ._host import dense, on_its_device
from .declaration import Backend

PACKAGE = "sgl_kernel"
FP8_MAX = 448.0
EPS = 1e-10
"""The amax floor compiled into the group quantiser; other values are refused."""
ELEMENTS = 1 << 31
"""Elements that a 32-bit offset reaches."""
GROUP_QUANT = ("sgl_per_token_group_quant_8bit", "sgl_per_token_group_quant_fp8")
"""The quantiser's names, newest first."""


def kernel(p: Problem, machine: Machine) -> str:
    """The library's routine."""
    return {
        "linear": "fp8_scaled_mm",
        "block_linear": "fp8_blockwise_scaled_mm",
        "quant_tensor": "sgl_per_tensor_quant_fp8",
        "quant_token": "sgl_per_token_quant_fp8",
    }.get(p.op, GROUP_QUANT[0])


def steps(p: Problem, machine: Machine) -> tuple[str, ...]:
    """How the operands are prepared."""
    if p.op == "linear":
        spread = "tensor" in (p.a_scale, p.b_scale)
        return ("operands dense", *(("scales spread to one per token and channel",) if spread else ()))
    return ("operands dense", "a_scale to M-major, dense") if p.op == "block_linear" else ("input contiguous",)


@functools.cache
def library() -> ModuleType:
    """The imported package.

    Raises
    ------
    MissingPackageError
        It is not there, or its libraries do not load.
    """
    try:
        return importlib.import_module(PACKAGE)
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MissingPackageError("sgl-kernel; install it for this torch and CUDA", {PACKAGE: reason}) from error


def routine(*names: str) -> Callable[..., Any]:
    """The first of these names that the installed release has.

    Raises
    ------
    MissingPackageError
        It has none of them.
    """
    module = library()
    for name in names:
        function: Callable[..., Any] | None = getattr(module, name, None)
        if function is not None:
            return function
    have = getattr(module, "__version__", "unknown")
    raise MissingPackageError(names[0], {PACKAGE: f"release {have} has no {' or '.join(names)}; install a newer one"})


@on_its_device
def linear(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``[M, N]``: one chain over K, scales per token and channel, bias of the output dtype.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    m, n = a.shape[0], b.shape[1]
    out: Tensor = routine("fp8_scaled_mm")(
        dense(a),
        dense(b.t()).t(),
        scale_a.reshape(-1).expand(m).contiguous(),
        scale_b.reshape(-1).expand(n).contiguous(),
        out_dtype,
        None if bias is None else bias.contiguous(),
    )
    return out


@on_its_device
def block_linear(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``[M, N]``: ``scale_a [M, K/128]`` in any strides, ``scale_b [K/128, N/128]``; promotion every 128.

    The library pads M to a multiple of 4 by itself and crops the result.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    out: Tensor = routine("fp8_blockwise_scaled_mm")(
        dense(a), dense(b.t()).t(), scale_a.t().contiguous().t(), scale_b.t().contiguous().t(), out_dtype
    )
    return out


@on_its_device
def quant_group(
    x: Tensor, group: int, eps: float, ue8m0: bool, layout: str = "row", out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scale ``amax * (1/448)``, payload ``x * (448/amax)``; ``layout`` row, col or tma. NaN never enters an amax.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.

    Raises NoBackendError, OptionError.
    """
    if ue8m0:
        raise OptionError("ue8m0: sgl-kernel rounds a float32 scale after the payload was quantised; use packed scales")
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device) if out is None else out
    rows_of, groups = x.numel() // x.shape[-1], x.shape[-1] // group
    if layout == "row":
        scale = torch.empty(rows_of, groups, dtype=torch.float32, device=x.device)
        _quantise(x, q, scale, group, eps, ue8m0=False)
        return q, scale.view(*x.shape[:-1], groups)
    if x.dim() != 2:
        raise NoBackendError("column-major scales of more than two axes", {PACKAGE: "its operator takes a matrix"})
    lead = rows_of + (-rows_of % 4 if layout == "tma" else 0)
    scale = torch.zeros(groups, lead, dtype=torch.float32, device=x.device)[:, :rows_of].t()
    _quantise(x, q, scale, group, eps, ue8m0=False)
    return q, scale


@on_its_device
def quant_group_packed(x: Tensor, group: int, eps: float) -> tuple[Tensor, Tensor]:
    """Packed UE8M0 scales (int32, strides ``(1, align(M, 4))``, pad lanes 0).

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.

    Raises NoBackendError.
    """
    m, groups = x.shape[0], x.shape[1] // group
    if groups % SGL_WORD:
        raise NoBackendError(f"K={x.shape[1]} with packed scales", {PACKAGE: "K ends inside a word of four groups"})
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.zeros(groups // SGL_WORD, m + (-m % 4), dtype=torch.int32, device=x.device)[:, :m].t()
    _quantise(x, q, scale, group, eps, ue8m0=True)
    return q, scale


def _quantise(x: Tensor, q: Tensor, scale: Tensor, group: int, eps: float, *, ue8m0: bool) -> None:
    """The operator itself, which derives the layout of the scale from its strides."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise DtypeError(f"x has dtype {x.dtype}; sgl-kernel's quantiser takes bfloat16 or float16")
    if eps != EPS:
        raise OptionError(f"eps={shown(eps)}: sgl-kernel's quantiser was compiled with {EPS}")
    if x.numel() >= ELEMENTS:
        raise NoBackendError(f"{x.numel()} elements", {PACKAGE: "its quantiser numbers elements in 32 bits"})
    if x.numel() == 0:
        return  # an empty launch is an error of the runtime
    run = routine(*GROUP_QUANT)
    # Without the argument newer releases import sglang, which may be absent, to choose between two kernels.
    chosen = {"enable_v2": False} if "enable_v2" in inspect.signature(run).parameters else {}
    matrix = x.reshape(-1, x.shape[-1])
    run(dense(matrix), q.view(matrix.shape), scale, group, eps, -FP8_MAX, FP8_MAX, ue8m0, **chosen)


def missing(p: Problem, machine: Machine) -> str | None:
    """A release may lack a routine."""
    name = kernel(p, machine)
    routine(*GROUP_QUANT if name in GROUP_QUANT else (name,))
    return None


BACKEND = Backend(
    name="sgl_kernel",
    kernel=kernel,
    steps=steps,
    missing=missing,
    quant_group=quant_group,
    quant_group_packed=quant_group_packed,
    linear=linear,
    block_linear=block_linear,
)
