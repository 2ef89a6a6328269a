"""FlashInfer: the SM90 block-scaled product with internal quantisation, TensorRT-LLM / CUTLASS MoE entry points, and
prefills of one sequence and of several with FP8 queries.

``fp8_blockscale_gemm_sm90`` as shipped silently returns wrong numbers for several documented calls (row-major or
unpadded activation scales, float16 outputs, per-token weight scales, bf16 weights). Here the activation scale is
converted to ``[K/128, align(M, 4)]`` unless it has that layout, bf16 weights are quantised by
:func:`kernels.quantize.flashinfer_quantize_128x128` instead of by the kernel, and the other calls raise an error.

Nor is its quantiser of bf16 activations used, which divides approximately and flushes subnormals (measured on an
H200): a finite group of 128 whose amax lies above 2^126 or, but for 0, below 2^-119 becomes NaN, as a whole or in its
zeros. The verbs quantise by the same formula with true division (``quant_reciprocal``) and pass codes and scales; the
library then launches one kernel less.

Not covered: FP4, the sm100 block-scaled products, all-to-all communication.

Source: FlashInfer (gemm_base, fused_moe).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import fast
from ..config import current_config
from ..fast import Run
from ..records import Machine, Problem
from ..support import BLACKWELL, PREFILLS
from ._flashinfer import ONE_CALL, library
from ._host import ALIGNMENT, allocator, dense, is_other_device, on_its_device
from .declaration import Backend, Batched, OfHeads, States

NAMES = {
    "attention_prefill": "single_prefill_with_kv_cache",
    "attention_ragged": "BatchPrefillWithRaggedKVCacheWrapper",
    "attention_paged": "BatchPrefillWithPagedKVCacheWrapper",
    "moe_trtllm": "trtllm_fp8_per_tensor_scale_moe",
    "moe_cutlass": "cutlass_fused_moe",
    "bmm": "bmm_fp8",
}
WORKSPACE = 256 << 20
"""Bytes that the wrappers ask for, once for each device."""


def kernel(p: Problem, machine: Machine) -> str:
    """The library's routine."""
    return NAMES.get(p.op, "fp8_blockscale_gemm_sm90")


def steps(p: Problem, machine: Machine) -> tuple[str, ...]:
    """How the operands are prepared."""
    if p.op.startswith("moe"):
        return ()
    if p.op in PREFILLS:
        compiled = "its kernel is compiled at the first call of a head dim and dtype"
        return (compiled,) if p.op == "attention_prefill" else ("each call is planned on the host", compiled)
    if p.op == "bmm":
        return ("B to column-major",)
    quantised = p.op != "dynamic_blockscale" and p.a_dtype.startswith("float8")
    done = ("a_scale to [K/128, align(M, 4)]",) if quantised else ("quantise the input 1x128",)
    return (*done, "quantise the weight 128x128") if not p.b_dtype.startswith("float8") else done


def blockscale_sm90(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor | None = None) -> Tensor:
    """``[M, N]`` bf16 of E4M3 operands; ``a_scale [K/128, align(M, 4)]`` contiguous.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    if is_other_device(a.device):
        with torch.cuda.device(a.device):
            return blockscale_sm90(a, a_scale, b, b_scale, out)
    a, b = dense(a), dense(b)
    b_scale = b_scale if b_scale.is_contiguous() else b_scale.contiguous()
    if out is not None and out.is_contiguous() and out.data_ptr() % ALIGNMENT == 0:
        target = out
    else:
        target = allocator(a.device)((a.shape[0], b.shape[0]), (b.shape[0], 1), torch.bfloat16)
    run = _fast_run()
    with ONE_CALL:
        if run is None:
            library("flashinfer.gemm").fp8_blockscale_gemm_sm90(a, b, a_scale, b_scale, target)
        else:
            run(a, b, target, a_scale, b_scale)
    return target if out is None or target is out else out.copy_(target)


def _fast_run() -> Run | None:
    """The runner's call of a known release without logging or tracing, else None (:mod:`kernels.fast`)."""
    config = current_config()
    return _run() if config.fast_paths and not config.flashinfer_observed else None


@functools.cache
def _run() -> Run | None:
    return fast.flashinfer_run(library(), lambda: library("flashinfer.gemm.gemm_base"))


@on_its_device
def bmm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """``bmm_fp8`` by cuBLASLt, which reads ``b [G, K, N]`` column by column whatever its strides are.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    out: Tensor = library("flashinfer.gemm").bmm_fp8(
        dense(a), dense(b.mT).mT, scale_a, scale_b, out_dtype, backend="cublas"
    )
    return out


@on_its_device
def moe_trtllm(**arguments: Any) -> Tensor:
    """``trtllm_fp8_per_tensor_scale_moe`` with the arguments as published.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    result = library("flashinfer.fused_moe").trtllm_fp8_per_tensor_scale_moe(**arguments)
    out: Tensor = result[0] if isinstance(result, list) else result
    return out


@on_its_device
def moe_cutlass(**arguments: Any) -> Tensor:
    """``cutlass_fused_moe`` with the arguments as published.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    result = library("flashinfer.fused_moe").cutlass_fused_moe(**arguments)
    out: Tensor = result[0] if isinstance(result, list | tuple) else result
    return out


@on_its_device
def prefill(q: Tensor, k: Tensor, v: Tensor, scales: OfHeads, dtype: torch.dtype, causal: bool, scale: float) -> States:
    """``single_prefill_with_kv_cache`` by its backend for sm90, which reads a scale for every head.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    whole = _of_every_head(q, k, scales)
    run = library("flashinfer.prefill").single_prefill_with_kv_cache
    out, lse = run(
        dense(q), dense(k), dense(v), *whole, dtype, causal=causal, sm_scale=scale, backend="fa3", return_lse=True
    )
    return out, lse


@on_its_device
def batch(q: Tensor, p: Batched) -> States:
    """The wrapper of ragged or of paged sequences by the backend for sm90: planned, then run.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`; ``q`` is that of ``p``.
    """
    (_, heads, depth), of_keys, module = q.shape, p.k.shape[-2], library("flashinfer.prefill")
    options: dict[str, Any] = {"causal": p.causal, "sm_scale": p.scale, "window_left": p.left}
    options |= {"q_data_type": q.dtype, "kv_data_type": q.dtype, "o_data_type": p.dtype}
    if p.pages is None:
        wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(_workspace(q.device), "NHD", backend="fa3")
        wrapper.plan(p.ends, p.of_keys, heads, of_keys, depth, **options)
        cache: tuple[Any, ...] = (dense(p.k), dense(p.v))
    else:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(_workspace(q.device), "NHD", backend="fa3")
        wrapper.plan(p.ends, p.of_keys, p.pages, p.last, heads, of_keys, depth, p.k.shape[1], **options)
        cache = ((dense(p.k), dense(p.v)),)
    out, lse = wrapper.run(dense(q), *cache, *_of_every_head(q, p.k, p.scales), return_lse=True)
    return out, lse


def _of_every_head(q: Tensor, k: Tensor, scales: OfHeads) -> tuple[Tensor, ...]:
    """A scale for every head of the queries, keys and values: 1 where none is given."""
    counts = (q.shape[-2], k.shape[-2], k.shape[-2])
    return tuple(
        torch.ones(n, dtype=torch.float32, device=q.device) if x is None else dense(x)
        for x, n in zip(scales, counts, strict=True)
    )


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


def numerics(p: Problem, machine: Machine) -> str:
    """On Blackwell: neither cuBLASLt nor TensorRT-LLM's kernels state an order of sums."""
    if machine.sm not in BLACKWELL:
        return ""
    return f"bounds only: {'cuBLASLt' if p.op == 'bmm' else 'TensorRT-LLM'}'s order of sums is not stated"


def missing(p: Problem, machine: Machine) -> str | None:
    """A release may lack a routine."""
    homes = {"moe_trtllm": "fused_moe", "moe_cutlass": "fused_moe", **dict.fromkeys(PREFILLS, "prefill")}
    module = library(f"flashinfer.{homes.get(p.op, 'gemm')}")
    name = kernel(p, machine)
    return None if hasattr(module, name) else f"this release has no {name}; install a newer one"


BACKEND = Backend(
    name="flashinfer",
    kernel=kernel,
    steps=steps,
    missing=missing,
    numerics=numerics,
    blockscale_sm90=blockscale_sm90,
    bmm=bmm,
    moe_trtllm=moe_trtllm,
    moe_cutlass=moe_cutlass,
    attention_prefill=prefill,
    attention_ragged=lambda p: batch(p.q, p),
    attention_paged=lambda p: batch(p.q, p),
)
