"""FlashInfer: the SM90 block-scaled product with internal quantisation, and TensorRT-LLM / CUTLASS MoE entry points.

``fp8_blockscale_gemm_sm90`` as shipped silently returns wrong numbers for several documented calls (row-major or
unpadded activation scales, float16 outputs, per-token weight scales, bf16 weights). Here the activation scale is
converted to ``[K/128, align(M, 4)]`` unless it has that layout, bf16 weights are quantised by
:func:`kernels.quantize.flashinfer_quantize_128x128` instead of by the kernel, and the other calls raise an error.

One fault remains in the common call. The kernel quantises bf16 activations with an approximate 448/amax that flushes
subnormals (measured on an H200): a group of 128 whose amax lies above ``HIGH`` or, but for 0, at or below ``LOW``
becomes NaN, as a whole or in its zeros. Only the device knows whether an input has such a group: a check waits for it
(:func:`lost_groups`, on demand), and quantising before the call costs a launch. A network's activations lie far
inside that range.

Not covered: FP4, the sm100 block-scaled products, all-to-all communication.
"""

from __future__ import annotations

import functools
import importlib
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels.backends._host import ALIGNMENT, allocator, dense, is_other_device, on_its_device
from kernels.backends.declaration import Backend
from kernels.config import current_config
from kernels.errors import MissingPackageError
from kernels.fast import flashinfer as direct
from kernels.fast.flashinfer import Runner

if TYPE_CHECKING:
    from kernels.plan import Problem
    from kernels.platform import Machine



def kernel(p: Problem, machine: Machine) -> str:
    """The library's routine."""
    return {"moe_trtllm": "trtllm_fp8_per_tensor_scale_moe", "moe_cutlass": "cutlass_fused_moe"}.get(
        p.op, "fp8_blockscale_gemm_sm90"
    )


def steps(p: Problem, machine: Machine) -> tuple[str, ...]:
    """How the operands are prepared."""
    if p.op.startswith("moe"):
        return ()
    given = p.op != "dynamic_blockscale" and p.a_dtype.startswith("float8")
    done = ("a_scale to [K/128, align(M, 4)]",) if given else (INSIDE,)
    return (*done, "quantise the weight 128x128") if not p.b_dtype.startswith("float8") else done


INSIDE = "none to the input: the kernel quantises it, and makes NaN of a group of amax above 2^126 or below 2^-119"
LOW = 448.0 * 2.0**-128
"""Largest amax for which 448/amax overflows inside the kernel: zeros of the group become NaN."""
HIGH = 2.0**126
"""Largest amax that the quantiser keeps: above it the approximate reciprocal is flushed to 0, and 0 * inf is NaN."""


def lost_groups(x: Tensor) -> Tensor:
    """The groups of a bf16 ``x [M, K]`` that the kernel's quantiser may turn into NaN, bool ``[M, K/128]``.

    Groups with an infinity are left out, and NaN is left out of the amax: both give NaN anyway.
    """
    amax = x.abs().nan_to_num(nan=0.0, posinf=torch.inf).view(x.shape[0], -1, 128).amax(dim=-1)
    return (torch.isfinite(amax) & (amax > HIGH)) | ((amax > 0) & (amax <= LOW))


@functools.cache
def library(name: str = "flashinfer") -> ModuleType:
    """A module of the imported library, or :class:`MissingPackageError` with the reason."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever a foreign library raises while it loads is the reason given below
        why = f"{type(error).__name__}: {error}"
        raise MissingPackageError("FlashInfer; install `flashinfer-python`", {name: why}) from error


def blockscale_sm90(a: Tensor, a_scale: Tensor | None, b: Tensor, b_scale: Tensor, out: Tensor | None = None) -> Tensor:
    """``[M, N]`` bf16; ``a`` bf16 (quantised inside) or E4M3 with a logical ``[M, K/128]`` scale; ``b`` E4M3."""
    if is_other_device(a.device):
        with torch.cuda.device(a.device):
            return blockscale_sm90(a, a_scale, b, b_scale, out)
    a, b = dense(a), dense(b)
    scale = None if a_scale is None else kernel_scale(a_scale)
    b_scale = b_scale if b_scale.is_contiguous() else b_scale.contiguous()
    (m, k), n = a.shape, b.shape[0]
    allocate = allocator(a.device)
    if out is not None and out.is_contiguous() and out.data_ptr() % ALIGNMENT == 0:
        target = out
    else:
        target = allocate((m, n), (n, 1), torch.bfloat16)
    runner = _fast_runner()
    if runner is None:
        with ONE_CALL:
            library("flashinfer.gemm").fp8_blockscale_gemm_sm90(a, b, scale, b_scale, target)
    else:
        with ONE_CALL:
            workspace = allocate((runner.workspace(m, n, k),), (1,), torch.uint8)
            runner.configure(workspace)
            runner.run(a, b, target, scale, b_scale)
    return target if out is None or target is out else out.copy_(target)


ONE_CALL = threading.Lock()
"""Held from the query of the workspace size to the launch. The process has one runner, which stores the workspace:
without the lock two threads quantise into the same one on different streams (43 of 8000 outputs of four threads were
wrong on an H200). The runner also stores the largest M that it was queried with and lays the workspace out by that, so
that a size is valid only until the next query.

Not covered: calls of FlashInfer in other threads that bypass this module."""


def _fast_runner() -> Runner | None:
    """The runner of a known release that nobody observes, else None (:mod:`kernels.fast.flashinfer`)."""
    config = current_config()
    return _runner() if config.fast_paths and not config.flashinfer_observed else None


@functools.cache
def _runner() -> Runner | None:
    return direct.runner(library(), lambda: library("flashinfer.gemm.gemm_base"))


def kernel_scale(scale: Tensor) -> Tensor:
    """A logical ``[M, K/128]`` scale as the kernel reads it: ``[K/128, align(M, 4)]`` contiguous."""
    m, blocks = scale.shape
    lead = m + (-m % 4)
    if blocks > 0 and scale.stride() == (1, lead) and scale.data_ptr() % ALIGNMENT == 0 and _owns(scale, blocks * lead):
        return scale.as_strided((blocks, lead), (lead, 1))
    return _padded(scale, lead)


@on_its_device
def moe_trtllm(**arguments: Any) -> Tensor:
    """``trtllm_fp8_per_tensor_scale_moe`` with the arguments as published."""
    result = library("flashinfer.fused_moe").trtllm_fp8_per_tensor_scale_moe(**arguments)
    made: Tensor = result[0] if isinstance(result, list) else result
    return made


@on_its_device
def moe_cutlass(**arguments: Any) -> Tensor:
    """``cutlass_fused_moe`` with the arguments as published."""
    result = library("flashinfer.fused_moe").cutlass_fused_moe(**arguments)
    made: Tensor = result[0] if isinstance(result, list | tuple) else result
    return made


def _owns(scale: Tensor, elements: int) -> bool:
    return scale.storage_offset() + elements <= scale.untyped_storage().nbytes() // scale.element_size()


def _padded(scale: Tensor, lead: int) -> Tensor:
    ready = scale.new_zeros(scale.shape[1], lead)
    ready[:, : scale.shape[0]] = scale.t()
    return ready


def missing(p: Problem, machine: Machine) -> str | None:
    """A release may lack a routine."""
    module = library("flashinfer.fused_moe" if p.op.startswith("moe") else "flashinfer.gemm")
    name = kernel(p, machine)
    return None if hasattr(module, name) else f"this release has no {name}; install a newer one"


BACKEND = Backend(
    name="flashinfer", kernel=kernel, steps=steps, missing=missing,
    blockscale_sm90=blockscale_sm90, lost_groups=lost_groups, moe_trtllm=moe_trtllm, moe_cutlass=moe_cutlass,
)  # fmt: skip
