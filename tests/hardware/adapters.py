"""How ``fp8-oracle validate`` calls GPU libraries by name (with tests/ on PYTHONPATH)::

    validate deep_gemm:fp8_gemm_nt --contract fp8_gemm_nt --adapter hardware.adapters:deep_gemm --device cuda
    validate flashinfer.gemm:fp8_blockscale_gemm_sm90 --contract fp8_blockscale_gemm_sm90 \\
             --adapter hardware.adapters:flashinfer_gemm --device cuda
    validate kernels.backends.cutlass:operators --contract cutlass_scaled_mm \\
             --adapter hardware.adapters:vllm_cutlass --device cuda
    validate torch:_scaled_mm --contract torch_per_token_w8a8_scaled_mm --adapter hardware.adapters:torch_scaled_mm \\
             --device cuda --numerics sm90.promote128.scale_after

Layouts are made as each library wants them; a call that a library refuses by its documentation is not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]
Options = Mapping[str, Any]


def deep_gemm(kernel: Callable[..., None], inputs: Inputs, options: Options) -> Tensor:
    """``fp8_gemm_nt((a, sa), (b, sb), out)``: bf16 out, K % 128 == 0, N % 64 == 0."""
    a, b = inputs["a"], inputs["b"]
    _offered(a.dtype == b.dtype == torch.float8_e4m3fn, "E4M3 operands")
    _offered(options["out_dtype"] == torch.bfloat16 and "c" not in inputs, "bf16 out and no c")
    _offered(a.shape[1] % 128 == 0 and b.shape[0] % 64 == 0, "K % 128 == 0 and N % 64 == 0")
    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)
    kernel((a, inputs["a_scale"]), (b, inputs["b_scale"]), out, disable_ue8m0_cast=True)
    return out


def triton_gemm(kernel: Callable[..., None], inputs: Inputs, options: Options) -> Tensor:
    """``kernels.backends.triton_gemm:fp8_gemm_nt``: any shape and output dtype, E4M3, no c."""
    a, b = inputs["a"], inputs["b"]
    _offered(a.dtype == b.dtype == torch.float8_e4m3fn and "c" not in inputs, "E4M3 operands and no c")
    out = torch.empty(a.shape[0], b.shape[0], dtype=options["out_dtype"], device=a.device)
    kernel(a, inputs["a_scale"], b, inputs["b_scale"], out, None, True)
    return out


def deep_gemm_masked(kernel: Callable[..., None], inputs: Inputs, options: Options) -> Tensor:
    """``fp8_m_grouped_gemm_nt_masked``: as the dense one; M a multiple of 128, since whole tiles are stored."""
    a, b = inputs["a"], inputs["b"]
    _offered(a.dtype == b.dtype == torch.float8_e4m3fn, "E4M3 operands")
    _offered(options["out_dtype"] == torch.bfloat16, "bf16 out")
    _offered(a.shape[0] == 1 or a.shape[1] % 128 == 0, "M in multiples of 128: a tile is stored whole")
    _offered(a.shape[2] % 128 == 0 and b.shape[1] % 64 == 0, "K % 128 == 0 and N % 64 == 0")
    out = torch.empty(*a.shape[:2], b.shape[1], dtype=torch.bfloat16, device=a.device)
    left, right = (a, inputs["a_scale"]), (b, inputs["b_scale"])
    kernel(left, right, out, inputs["masked_m"].to(torch.int32), a.shape[1], disable_ue8m0_cast=True)
    return out


def flashinfer_gemm(kernel: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """``fp8_blockscale_gemm_sm90`` with the activation scale ``[K/128, align(M, 4)]``."""
    x, weight, weight_scale = inputs["input"], inputs["weight"], inputs.get("weight_scale")
    _offered(torch.float8_e5m2 not in (x.dtype, weight.dtype), "E4M3 or bf16 operands")
    _offered(x.is_contiguous() and weight.is_contiguous(), "rows without a pitch: the kernel reads none")
    _offered(options["out_dtype"] == torch.bfloat16, "bf16 out")
    _offered(x.shape[1] % 128 == 0 and weight.shape[0] % 64 == 0, "K % 128 == 0 and N % 64 == 0")
    blocks = weight_scale is None or weight_scale.shape[0] == -(-weight.shape[0] // 128)
    _offered(blocks and weight.dtype != torch.bfloat16, "weights in FP8, one scale a 128x128 block")
    scale = inputs.get("input_scale")
    if scale is not None:
        m, blocks_k = scale.shape
        ready = scale.new_zeros(blocks_k, m + (-m % 4))
        ready[:, :m] = scale.t()
        scale = ready
    return kernel(x, weight, scale, weight_scale)


def vllm_cutlass(kernel: Callable[[], Any], inputs: Inputs, options: Options) -> Tensor:
    """``torch.ops._C.cutlass_scaled_mm``; ``kernel`` loads the operators. Block scales M-major, M in multiples of 4."""
    a, b, a_scale, b_scale = (inputs[n] for n in ("a", "b", "a_scale", "b_scale"))
    (m, k), n = a.shape, b.shape[0]
    dtype = options["out_dtype"]
    bias = inputs.get("bias")
    _offered(a.dtype == b.dtype == torch.float8_e4m3fn, "E4M3 operands")
    _offered(a.is_contiguous() and b.is_contiguous(), "rows without a pitch: the kernel reads none from the operands")
    _offered(dtype in (torch.bfloat16, torch.float16), "bf16 or f16 out")
    _offered(k % 16 == 0 and n % 16 == 0 and (bias is None or bias.dtype == dtype), "K, N % 16, bias as the output")
    stored = tuple(b_scale.shape) == (-(-n // 128), -(-k // 128))
    if stored and tuple(a_scale.shape) == (m, -(-k // 128)) and (k > 128 or b_scale.numel() not in (1, n)):
        _offered(m % 4 == 0 and n % 128 == 0 and k % 128 == 0 and bias is None, "blocks: M % 4, N % 128, K % 128")
        a_scale, b_scale = a_scale.t().contiguous().t(), b_scale.t()
    out = torch.empty(m, n, dtype=dtype, device=a.device)
    kernel().cutlass_scaled_mm(out, a, b.t(), a_scale, b_scale, bias)
    return out


def torch_scaled_mm(kernel: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """``torch._scaled_mm``, per tensor or row-wise, with promotion."""
    a, b, scale_a, scale_b = (inputs[n] for n in ("qinput", "weight", "scale_a", "scale_b"))
    bias, dtype = inputs.get("bias"), options["out_dtype"]
    _offered(a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0, "K and N in multiples of 16")
    rowwise = scale_a.numel() > 1 or scale_b.numel() > 1
    _offered(dtype == torch.bfloat16 or not rowwise, "bf16 out when row-wise")
    _offered(bias is None or bias.dtype == dtype != torch.float32, "a bias of the output's dtype")
    if rowwise:
        scale_a = scale_a.reshape(-1, 1).expand(a.shape[0], 1).contiguous()
        scale_b = scale_b.reshape(1, -1).expand(1, b.shape[1]).contiguous()
    columns = b if b.stride(0) == 1 else b.t().contiguous().t()
    return kernel(a, columns, scale_a, scale_b, bias=bias, out_dtype=dtype)


def flashinfer_mxfp8_quantize(kernel: Callable[..., tuple[Tensor, Tensor]], inputs: Inputs, options: Options) -> Any:
    """``mxfp8_quantize(x, is_sf_swizzled_layout, alignment)``: bf16 or f16, E4M3 codes, K in multiples of 32."""
    x = inputs["x"]
    _offered(x.dtype in (torch.bfloat16, torch.float16) and x.is_contiguous(), "dense bf16 or f16")
    _offered(options["element"] == "e4m3" and options["rounding"] == "rceil", "E4M3, RCEIL")
    _offered(options["layout"] in ("128x4", "linear") and x.shape[1] % 32 == 0, "128x4 or linear, K % 32 == 0")
    alignment = options.get("alignment", 32)
    q, scale = kernel(x, options["layout"] != "linear", *([alignment] if x.shape[1] % alignment else []))
    scale = scale.view(torch.uint8)
    return q, scale.reshape(x.shape[0], -1) if options["layout"] == "linear" else scale.reshape(-1)


def flashinfer_fp4_quantize(kernel: Callable[..., tuple[Tensor, Tensor]], inputs: Inputs, options: Options) -> Any:
    """``fp4_quantize(x, global_scale, 16, False, swizzled, 8x4)``: bf16 or f16, K in multiples of 16."""
    x, layout = inputs["x"], options["layout"]
    _offered(x.dtype in (torch.bfloat16, torch.float16) and x.is_contiguous(), "dense bf16 or f16")
    _offered(x.shape[1] % 16 == 0 and not options["is_global_scale_inversed"], "K % 16 == 0, an encoding global scale")
    q, scale = kernel(x, inputs["global_scale"], 16, False, layout != "linear", layout == "8x4")
    scale = scale.view(torch.uint8)
    return q.view(torch.uint8), scale.reshape(x.shape[0], -1) if layout == "linear" else scale.reshape(-1)


def by_contract(kernel: Callable[..., Any], inputs: Inputs, options: Options) -> Any:
    """``hardware.kv_caches:VLLM.NAME`` and the like: they take inputs and options by the contract's names."""
    return kernel(inputs, options)


def _offered(good: bool, what: str) -> None:
    if not good:
        raise NotImplementedError(f"taken: {what}")
