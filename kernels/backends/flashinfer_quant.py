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
from .declaration import Backend, Blocks, Matrices, Pair

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


@on_its_device
def quant_blocks(
    x: Tensor, how: Blocks, columns: int, global_scale: Tensor | None, matrices: Matrices | None = None
) -> Pair:
    """One call of the library, its outputs as the layer has them.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    layout, eight_bits = how.layout, how.element != "e2m1"
    whole, lies = dense(torch.nn.functional.pad(x, (0, columns - x.shape[1]))), _layout(layout)
    with ONE_CALL:
        if eight_bits:
            outputs = library().mxfp8_quantize(whole, layout != "linear", backend=CUDA, sf_swizzle_layout=lies)
        elif global_scale is None:
            outputs = library().mxfp4_quantize(whole, backend=CUDA, sfLayout=lies)
        else:
            outputs = library().nvfp4_quantize(whole, global_scale.reshape(1), lies, backend=CUDA, nvfp4_4over6=None)
    q, scale = outputs
    memory = scale.view(torch.uint8).reshape(-1)
    codes = q.view(torch.float8_e4m3fn if eight_bits else torch.uint8)
    return codes, memory.view(x.shape[0], -1) if layout == "linear" else memory


BACKEND = Backend(name="flashinfer_quant", kernel=kernel, missing=missing, quant_blocks=quant_blocks)
