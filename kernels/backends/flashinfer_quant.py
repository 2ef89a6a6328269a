"""FlashInfer's quantisers to MXFP8, MXFP4 and NVFP4 on Blackwell, by their CUDA kernels.

Their formula is the library's: it multiplies by approximate reciprocals where the layer divides, so that a code at a
tie may be its neighbour. They are taken where ``FP8_KERNELS_LIBRARY_QUANTISERS`` allows it. An NVFP4 scale is searched
among two candidates where ``FLASHINFER_NVFP4_4OVER6`` is set in the environment and the call does not say otherwise:
here the call says that it is not.

NaN and infinity are as of FlashInfer's recipes. Below sm100 the kernels are empty and leave the output alone; a row
refuses these. Has not run on hardware here.

Not covered: CuTe DSL's kernels, a scale for each row, shuffled rows.
Source: FlashInfer 0.7.2.post1 (quantization/fp4_quantization.py, fp8_quantization.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..records import Machine, Problem
from ._flashinfer import ONE_CALL, library
from ._host import dense, on_its_device
from .declaration import Backend, Pair

ROUTINES = {"quant_mxfp8": "mxfp8_quantize", "quant_mxfp4": "mxfp4_quantize", "quant_nvfp4": "nvfp4_quantize"}
"""The library's routine of each operation."""
CUDA = "cuda"
"""What the library calls these kernels."""


def kernel(p: Problem, machine: Machine) -> str:
    """The library's routine."""
    return f'{ROUTINES[p.op]}(backend="{CUDA}")'


def missing(p: Problem, machine: Machine) -> str | None:
    """A release may lack a routine."""
    name = ROUTINES[p.op]
    return None if hasattr(library(), name) else f"this release has no {name}; install a newer one"


def _layout(layout: str) -> Any:
    """The library's word for how scales lie."""
    return library("flashinfer.tllm_enums").SfLayout[f"layout_{layout}"]


def _bytes(q: Tensor, scale: Tensor, rows: int, layout: str, dtype: torch.dtype) -> Pair:
    """Codes of a dtype, and scale bytes flat, or by row and column."""
    memory = scale.view(torch.uint8).reshape(-1)
    return q.view(dtype), memory.view(rows, -1) if layout == "linear" else memory


@on_its_device
def quant_mxfp8(x: Tensor, layout: str) -> Pair:
    """Operands and results as of :class:`~kernels.backends.declaration.Backend`."""
    with ONE_CALL:
        q, scale = library().mxfp8_quantize(
            dense(x), layout != "linear", backend=CUDA, sf_swizzle_layout=_layout(layout)
        )
    return _bytes(q, scale, x.shape[0], layout, torch.float8_e4m3fn)


@on_its_device
def quant_mxfp4(x: Tensor, layout: str) -> Pair:
    """Operands and results as of :class:`~kernels.backends.declaration.Backend`."""
    with ONE_CALL:
        q, scale = library().mxfp4_quantize(dense(x), backend=CUDA, sfLayout=_layout(layout))
    return _bytes(q, scale, x.shape[0], layout, torch.uint8)


@on_its_device
def quant_nvfp4(x: Tensor, global_scale: Tensor, layout: str) -> Pair:
    """Operands and results as of :class:`~kernels.backends.declaration.Backend`."""
    with ONE_CALL:
        q, scale = library().nvfp4_quantize(
            dense(x), global_scale.reshape(1), _layout(layout), backend=CUDA, nvfp4_4over6=None
        )
    return _bytes(q, scale, x.shape[0], layout, torch.uint8)


BACKEND = Backend(
    name="flashinfer_quant",
    kernel=kernel,
    missing=missing,
    quant_mxfp8=quant_mxfp8,
    quant_mxfp4=quant_mxfp4,
    quant_nvfp4=quant_nvfp4,
)
