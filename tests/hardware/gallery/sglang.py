"""SGLang 0.5.23: Triton products and quantisers, each module imported without the engine; its KV caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hardware.adapters import by_contract
from hardware.kv_caches import SGL_ROUTINES
from torch import Tensor

from oracle.harness.gallery import Kernel, Project

from ._products import (
    Inputs,
    Options,
    Pair,
    act_quant,
    block_product,
    groups,
    masked_silu,
    offered,
    rows_and_channels,
)

OPS = "hardware.alone:sglang.kernels.ops"
FP8_FILE = f"{OPS}.quantization.fp8_kernel"
GROUPS = "per_token_group_quant_fp8"
PRODUCT = f"{OPS}.gemm.fp8_kernel.w8a8_block_fp8_matmul_triton"
TILE = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 32, "num_warps": 4}
FORMS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "split_k": TILE | {"num_stages": 3, "SPLIT_K": 2, "SWAP_AB": False},
    "swap_ab": TILE | {"num_stages": 3, "SPLIT_K": 1, "SWAP_AB": True},
}


def _formed(kernel: Callable[..., Tensor], inputs: Inputs, options: Options, form: str) -> Tensor:
    """The product by one tile, whatever table of tuned tiles the device has."""
    tile = FORMS[form]
    kernel.__globals__["get_w8a8_block_fp8_configs"] = lambda *_: None if tile is None else {1: tile}
    return block_product(kernel, inputs, options)


def plain(kernel: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    return _formed(kernel, inputs, options, "plain")


def split_k(kernel: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    return _formed(kernel, inputs, options, "split_k")


def swap_ab(kernel: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    return _formed(kernel, inputs, options, "swap_ab")


def scaled_mm(kernel: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    a, b, a_scale, b_scale, bias = rows_and_channels(inputs, options)
    assert a is not None and b is not None and a_scale is not None and b_scale is not None
    dtype = options["out_dtype"]
    offered(bias is None or bias.dtype == dtype, "a bias of the output's dtype")
    return kernel(a, b.t(), a_scale.reshape(-1, 1), b_scale.reshape(-1, 1), dtype, bias)


def raw_groups(kernel: Callable[..., Pair], inputs: Inputs, options: Options) -> Pair:
    """Row-major or column-major float32 scales."""
    x = groups(inputs, dict(options) | {"column_major_scales": False})
    offered(not options.get("tma_aligned_scales"), "columns without padding")
    column = bool(options.get("column_major_scales"))
    return kernel(x, options.get("group_size", 128), options.get("eps", 1e-10), column_major_scales=column)


def static(kernel: Callable[..., Pair], inputs: Inputs, options: Options) -> dict[str, Tensor]:
    x = inputs["x"]
    offered("scale" in inputs and x.is_contiguous() and not options.get("num_token_padding"), "given, not padded")
    q, scale = kernel(x, inputs["scale"])
    return {"q": q, "scale": scale}


PROJECT = Project(
    name="sglang",
    distributions=("sglang",),
    carried="of its wheel: the Python files (hardware.alone imports each module without the engine)",
    kernels=(
        Kernel("fp8_gemm_nt", PRODUCT, plain, "w8a8_block_fp8_matmul", pinned="its default tile"),
        Kernel("fp8_gemm_nt", PRODUCT, split_k, "w8a8_block_fp8_matmul split-K", pinned="64x128x128, K in 2 parts"),
        Kernel("fp8_gemm_nt", PRODUCT, swap_ab, "w8a8_block_fp8_matmul swap-AB", pinned="64x128x128, exchanged"),
        Kernel("cutlass_scaled_mm", f"{OPS}.gemm.fp8_kernel.triton_scaled_mm", scaled_mm, "triton_scaled_mm"),
        Kernel(GROUPS, f"{FP8_FILE}._per_token_group_quant_8bit_raw", raw_groups, "per_token_group_quant_8bit"),
        Kernel("scaled_fp8_quant", f"{FP8_FILE}.static_quant_fp8", static, "static_quant_fp8", "sglang_static"),
        Kernel(
            GROUPS, f"{OPS}.quantization.act_quant_triton.act_quant", act_quant, "act_quant",
            "sglang_act_quant_triton",
        ),
        Kernel(
            "silu_and_mul_masked_post_quant", f"{OPS}.moe.ep_moe_kernels.silu_and_mul_masked_post_quant_fwd",
            masked_silu, "silu_and_mul_masked_post_quant_fwd",
        ),
        *(Kernel(name, f"hardware.kv_caches:SGL.{name}", by_contract, name) for name in SGL_ROUTINES),
    ),
    devices=("cpu", "cuda"),
)  # fmt: skip  # a table, one row a line
