"""Adapters that several projects share: block-scaled products, quantisers in groups, tensors and blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]
Options = Mapping[str, Any]
Pair = tuple[Tensor, Tensor]
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
BLOCK = [128, 128]
HALVES = (BF16, torch.float16)


def offered(good: object, what: str) -> None:
    """What a project does not document is not called."""
    if not good:
        raise NotImplementedError(f"taken: {what}")


def launched(x: Tensor) -> None:
    """Triton runs on a GPU, or on a CPU by its interpreter."""
    offered(x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1", "a GPU, or TRITON_INTERPRET=1")


def one_config(names: Mapping[str, Any], *tuned: str, most: int | None = None) -> None:
    """Autotuned kernels among the names of a module, held to the first configuration of their lists; ``most``: the
    first one whose tile has no more rows, columns and products than this."""
    for one in tuned:
        tuner = names[one]
        fits = [c for c in tuner.configs if most is None or max(c.kwargs[f"BLOCK_{x}"] for x in "MNK") <= most]
        tuner.configs = fits[:1]


def lanes(scale: Tensor, unit: int = 1) -> Tensor:
    """``[R, C]`` in columns at strides of ``align(R, unit)``, whatever strides a dimension of one has."""
    rows, columns = scale.shape
    return torch.empty_strided((rows, columns), (1, rows + -rows % unit), device=scale.device).copy_(scale)


def blocks(inputs: Inputs, options: Options, *dtypes: torch.dtype, whole: bool = False) -> tuple[Tensor, ...]:
    """``a, b, a_scale, b_scale`` of ``fp8_gemm_nt``: E4M3, dense rows; ``whole``: K and N in multiples of 128."""
    a, b = inputs["a"], inputs["b"]
    offered(a.dtype == b.dtype == FP8 and "c" not in inputs, "E4M3 operands and no c")
    offered(a.is_contiguous() and b.is_contiguous(), "rows without a pitch")
    offered(not dtypes or options["out_dtype"] in dtypes, f"out as {', '.join(map(str, dtypes))}")
    offered(not whole or (a.shape[1] % 128 == 0 and b.shape[0] % 128 == 0), "K % 128 == 0, N % 128 == 0")
    return a, b, inputs["a_scale"], inputs["b_scale"]


def block_product(kernel: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """``(A, B, As, Bs, [128, 128], dtype)`` of SGLang and of what descends from it."""
    a, b, a_scale, b_scale = blocks(inputs, options)
    return kernel(a, b, a_scale.contiguous(), b_scale.contiguous(), BLOCK, options["out_dtype"])


def block_pairs(kernel: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """``(a, a_s, b, b_s)`` of DeepSeek-V3's inference code and of what descends from it: bf16 out."""
    a, b, a_scale, b_scale = blocks(inputs, options, BF16, whole=True)
    return kernel(a, a_scale.contiguous(), b, b_scale.contiguous())


def groups(inputs: Inputs, options: Options, *, floor: float | None = None, group: int | None = None) -> Tensor:
    """``x`` of ``per_token_group_quant_fp8``: dense, row-major float32 scales; ``floor``: the one that a kernel has."""
    x = inputs["x"]
    launched(x)
    offered(x.is_contiguous() and x.dim() == 2, "dense rows")
    offered(not options.get("use_ue8m0") and not options.get("column_major_scales"), "row-major float32 scales")
    offered(floor is None or options.get("eps", 1e-10) == floor, f"the floor {floor}")
    offered(group is None or options.get("group_size", 128) == group, f"groups of {group}")
    return x


def group_quantiser(kernel: Callable[..., Pair], inputs: Inputs, options: Options) -> Pair:
    """``(x, group_size, eps)``."""
    return kernel(groups(inputs, options), options.get("group_size", 128), options.get("eps", 1e-10))


def act_quant(kernel: Callable[..., Pair], inputs: Inputs, options: Options) -> Pair:
    """``(x, block_size)`` with a floor of its own, which its recipe has."""
    return kernel(groups(inputs, options, floor=1e-10), options.get("group_size", 128))


def weight_quant(kernel: Callable[..., Pair], inputs: Inputs, options: Options) -> Pair:
    """``(x, 128)``, ``[N, K]`` in whole blocks, float32 scales ``[N/128, K/128]``."""
    x = inputs["x"]
    launched(x)
    offered(x.is_contiguous() and not options.get("use_ue8m0"), "dense rows, float32 scales")
    offered(x.shape[0] % 128 == 0 and x.shape[1] % 128 == 0, "whole blocks")
    offered(tuple(options.get("block_size", BLOCK)) == (128, 128), "blocks of 128x128")
    return kernel(x, 128)


def masked_silu(kernel: Callable[..., None], inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """``(input, output, output_scale, group, masked_m)``, float32 scales, SiLU rounded to the input's dtype."""
    x, group = inputs["x"], options.get("group_size", 128)
    launched(x)
    offered(x.is_contiguous() and x.dtype in HALVES, "dense bf16 or f16")
    offered(options.get("rounding", "each") == "each", "SiLU rounded to the dtype of the input")
    offered(not options.get("use_ue8m0") and (x.shape[2] // 2) % group == 0, "float32 scales, whole groups")
    q = torch.empty(*x.shape[:2], x.shape[2] // 2, dtype=FP8, device=x.device)
    scale = torch.empty(*q.shape[:2], q.shape[2] // group, dtype=torch.float32, device=x.device)
    kernel(x, q, scale, group, inputs["masked_m"].to(torch.int32))
    return {"q": q, "scale": scale}


def rows_and_channels(inputs: Inputs, options: Options) -> tuple[Tensor | None, ...]:
    """``a, b [N, K], a_scale [M], b_scale [N], bias`` of ``cutlass_scaled_mm`` without block scales."""
    a, b = inputs["a"], inputs["b"]
    a_scale, b_scale, bias = inputs["a_scale"], inputs["b_scale"], inputs.get("bias")
    (m, _), n = a.shape, b.shape[0]
    offered(a.dtype == b.dtype == FP8 and a.is_contiguous() and b.is_contiguous(), "dense E4M3 operands")
    offered(a_scale.numel() in (1, m) and b_scale.numel() in (1, n), "scales of tensors, rows and channels")
    return a, b, a_scale, b_scale, bias
