"""A quantised linear layer: the quantisation of its input, the routine that multiplies, DeepGEMM's difference measure.

    y = dequantise(quantise(x)) @ dequantise(weight) + bias

``x [..., K]`` is reshaped to a matrix and the result to ``[..., N]``. The input is quantised with the given scale
(static), or dynamically with one scale for the tensor or for each token; only torch's routines take an FP8 input. The
routine follows from the machine and the kinds of scales (:data:`oracle.truth.decisions.DECISIONS`).

Sources: vLLM quantization/utils/w8a8_utils.py (dispatch_w8a8_scaled_mm, Fp8LinearOp); DeepGEMM testing/numeric.py
(calc_diff). Not covered: products (:mod:`oracle.truth.gemm`), bounds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oracle.errors import ShapeError
from oracle.numbers.formats import decode
from oracle.numbers.recipes import TORCH_STATIC, TORCH_TENSOR, TORCH_TOKEN, VLLM_STATIC, VLLM_TENSOR, VLLM_TOKEN, Recipe
from oracle.truth.decisions import decide

ROUTINES = (
    "cutlass_w8a8_scaled_mm",
    "rocm_per_tensor_w8a8_scaled_mm",
    "torch_per_tensor_w8a8_scaled_mm",
    "torch_per_token_w8a8_scaled_mm",
    "torch_channelwise_w8a8_scaled_mm",
)


def dispatch_w8a8_scaled_mm(
    cutlass_fp8_supported: bool,
    per_tensor_weights: bool,
    per_tensor_activations: bool,
    use_per_token_if_dynamic: bool,
    *,
    rocm: bool = False,
    rowwise: bool = False,
) -> str:
    """The routine that multiplies, for any six flags; ``rowwise``: torch has a row-wise kernel on this machine."""
    position = decide(
        "dispatch_w8a8_scaled_mm",
        cutlass_fp8_supported=cutlass_fp8_supported,
        per_tensor_weights=per_tensor_weights,
        per_tensor_activations=per_tensor_activations,
        use_per_token_if_dynamic=use_per_token_if_dynamic,
        rocm=rocm,
        rowwise=rowwise,
    )
    return ROUTINES[position]


def input_recipes(*, static: bool, per_token: bool) -> tuple[Recipe, ...]:
    """The recipes by which a correct layer may quantise its input; the reference's first."""
    if static:
        return TORCH_STATIC, VLLM_STATIC
    return (TORCH_TOKEN, VLLM_TOKEN) if per_token else (TORCH_TENSOR, VLLM_TENSOR)


def calc_diff(x: Tensor, y: Tensor) -> float:
    """``1 - 2 <x, y> / (<x, x> + <y, y>)``, each sum exact and rounded once to float64.

    Parameters
    ----------
    x, y : Tensor of one shape, any float dtype of :mod:`oracle.numbers.formats` (products of two values fit float64)

    Returns float: 0 for two zero tensors (as DeepGEMM has it), NaN when an element is NaN or infinite.
    Raises ShapeError: the shapes differ.
    """
    if x.shape != y.shape:
        raise ShapeError(f"x has shape {list(x.shape)}, y {list(y.shape)}; calc_diff compares equal shapes")
    a, b = decode(x).flatten(), decode(y).flatten()
    if not bool(torch.isfinite(a).all()) or not bool(torch.isfinite(b).all()):
        return math.nan
    both, squares = (math.fsum(products.tolist()) for products in (a * b, torch.cat([a * a, b * b])))
    return 0.0 if squares == 0.0 else 1.0 - 2.0 * both / squares
