"""sglang-kernel: CUTLASS products, group and row quantisers, fused and masked ones, the router."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oracle.harness.gallery import Kernel, Project

from ._named import rows
from ._products import FP8, HALVES, Inputs, Options, blocks, groups, lanes, offered, rows_and_channels

QUANTISERS = ("per_token_group_quant_fp8", "per_token_group_quant_fp8_packed", "silu_and_mul_masked_post_quant")
OPERATORS = "hardware.fused_libraries:sgl_operators"
MAX = 448.0
SHAPES = ("m=4,n=128,k=128", "m=32,n=256,k=384", "m=64,n=512,k=640", "m=132,n=128,k=1024", "m=20,n=384,k=256")
FAMILIES = ("randn", "exact", "ties", "outlier")
WHOLE = tuple(
    f"fp8_gemm_nt/e4m3xe4m3-{store}/1x128:128x128/{shape}/family={family}/seed=1"
    for store in ("bf16", "f16")
    for shape in SHAPES
    for family in FAMILIES
)
MASKED = tuple(
    f"silu_and_mul_masked_post_quant/{dtype}-e4m3/1x128/{shape}/ue8m0=1/family={family}/seed=1"
    for dtype in ("bf16", "f16")
    for shape in ("e=1,t=1,i=2048", "e=3,t=9,i=2048", "e=4,t=13,i=4096")
    for family in ("randn", "ties", "amax", "outlier", "heavy", "special", "range", "nan")
)
"""Packed scales of 16 groups of a row and more."""
ROUTED = tuple(
    f"moe_routing/f32/-/{shape}/{options}/family=randn/seed={seed}"
    for shape, options in (
        ("t=1,e=8,k=1", "router=softmax"),
        ("t=40,e=32,k=4", "router=softmax"),
        ("t=40,e=32,k=4", "router=softmax,renormalize=1"),
        ("t=40,e=32,k=4", "groups=4,bias=1,renormalize=1"),
        ("t=7,e=128,k=8", "groups=4,bias=1,renormalize=1"),
    )
    for seed in (1, 2)
)
"""What its two operators take: softmax without a bias; DeepSeek-V3's gate with a bias, groups of at most
32 experts and weights of sum 1."""
Loaded = Callable[[], Any]


def scaled_mm(kernel: Loaded, inputs: Inputs, options: Options) -> Tensor:
    """``fp8_scaled_mm(a, b [K, N], a_scale [M], b_scale [N], dtype, bias)``."""
    a, b, a_scale, b_scale, bias = rows_and_channels(inputs, options)
    assert a is not None and b is not None and a_scale is not None and b_scale is not None
    dtype = options["out_dtype"]
    offered(dtype in HALVES and (bias is None or bias.dtype == dtype), "bf16 or f16 out, a bias of the same dtype")
    offered(a.shape[1] % 16 == 0 and b.shape[0] % 16 == 0, "K % 16 == 0, N % 16 == 0")
    spread = (s.reshape(-1).expand(x.shape[0]).contiguous() for s, x in ((a_scale, a), (b_scale, b)))
    made: Tensor = kernel().fp8_scaled_mm(a, b.t(), *spread, dtype, bias)
    return made


def blockwise(kernel: Loaded, inputs: Inputs, options: Options) -> Tensor:
    """``fp8_blockwise_scaled_mm(a, b [K, N], a_scale M-major, b_scale [K/128, N/128], dtype)``: M % 4 == 0."""
    a, b, a_scale, b_scale = blocks(inputs, options, *HALVES, whole=True)
    offered(a.shape[0] % 4 == 0, "M % 4 == 0")
    scales = lanes(a_scale), b_scale.contiguous().t()
    made: Tensor = kernel().fp8_blockwise_scaled_mm(a, b.t(), *scales, options["out_dtype"])
    return made


def group_v1(kernel: Loaded, inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """The first version of the group quantiser: row-major float32 scales."""
    x, group = groups(inputs, options, floor=1e-10), options.get("group_size", 128)
    q = torch.empty(x.shape, dtype=FP8, device=x.device)
    scale = torch.empty(x.shape[0], x.shape[1] // group, device=x.device)
    kernel().sgl_per_token_group_quant_8bit(x, q, scale, group, 1e-10, -MAX, MAX, False)
    return {"q": q, "scale": scale}


def per_row(kernel: Loaded, inputs: Inputs, options: Options) -> dict[str, Tensor]:
    x = inputs["x"]
    offered(options.get("use_per_token_if_dynamic") and "scale" not in inputs, "a scale for each row")
    offered(not options.get("num_token_padding") and x.shape[1] % 8 == 0, "not padded, K % 8 == 0")
    offered(x.is_contiguous() and "scale_ub" not in inputs, "dense, no bound")
    q, scale = torch.empty(x.shape, dtype=FP8, device=x.device), torch.empty(x.shape[0], 1, device=x.device)
    kernel().sgl_per_token_quant_fp8(x, q, scale)
    return {"q": q, "scale": scale}


PROJECT = Project(
    name="sgl_kernel",
    distributions=("sglang-kernel",),
    carried="of its wheel: common_ops.abi3.so for sm90, which FP8_KERNELS_SGL_OPS names, and the folder dist-info",
    kernels=(
        Kernel("cutlass_scaled_mm", OPERATORS, scaled_mm, "fp8_scaled_mm"),
        Kernel("fp8_gemm_nt", OPERATORS, blockwise, "fp8_blockwise_scaled_mm", case=WHOLE),
        Kernel("per_token_group_quant_fp8", OPERATORS, group_v1, "sgl_per_token_group_quant_8bit"),
        Kernel("scaled_fp8_quant", OPERATORS, per_row, "sgl_per_token_quant_fp8", "sglang_token"),
        *rows("fused_libraries", "sgl", QUANTISERS[:2]),
        *rows("fused_libraries", "sgl", QUANTISERS[2:], case=MASKED),
        *rows("experts", "sgl", ("moe_routing",), case=ROUTED),
    ),
)
