"""PyTorch: scaled products as ``torch`` offers them."""

from __future__ import annotations

import torch

from oracle.bindings.binding import bind
from oracle.bindings.forms import LANES, columns

E4M3, BF16, F16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16
PARAMETERS = "(self, mat2, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False)"

OF = "torch.nn.functional.ScalingType"

BINDINGS = (
    bind(
        "torch:_scaled_mm",
        "torch_per_tensor_w8a8_scaled_mm",
        "(qinput, weight.t().contiguous().t(), scale_a, scale_b, bias, out_dtype=out_dtype)",
        PARAMETERS,
        takes={"out_dtype": (BF16, F16, torch.float32)},
        where="scale_a.numel() == scale_b.numel() == 1 and (bias is None or bias.dtype == out_dtype != torch.float32)",
        domain="k % 16 == 0, n % 16 == 0",
        dense=("*",),
        release="torch 2.9",
    ),
    bind(
        "torch:_scaled_mm",
        "torch_per_token_w8a8_scaled_mm",
        "(qinput, weight.t().contiguous().t(), scale_a, scale_b, bias, out_dtype=out_dtype)",
        PARAMETERS,
        takes={"out_dtype": BF16},
        where="scale_a.shape == (qinput.shape[0], 1) and scale_b.shape == (1, weight.shape[1]) "
        "and (bias is None or bias.dtype == out_dtype)",
        domain="k % 16 == 0, n % 16 == 0",
        dense=("*",),
        release="torch 2.9",
    ),
    bind(
        "torch:_scaled_grouped_mm",
        "scaled_grouped_mm",
        "(a, b.transpose(1, 2), scale_a.squeeze(1), scale_b, offsets, out_dtype=out_dtype)",
        "(self, mat2, scale_a, scale_b, offs=None, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False)",
        takes={"out_dtype": BF16, "offsets": torch.int32},
        domain="k % 16 == 0, n % 16 == 0",
        dense=("*",),
        release="torch 2.9",
    ),
    *(
        bind(
            "torch.nn.functional:scaled_mm",
            "fp8_gemm_nt",
            f"(a, b.t(), lanes(a_scale), {OF}.BlockWise1x128, columns(b_scale.t(), a), {OF}.BlockWise128x128, "
            "output_dtype=out_dtype)",
            "(mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a=None, swizzle_b=None, "
            "bias=None, output_dtype=torch.bfloat16, contraction_dim=(), use_fast_accum=False)",
            takes={"a": E4M3, "b": E4M3, "c": None, "out_dtype": BF16},
            where="a.shape[0] % 4 == 0",
            arches=("sm90",),
            functions=LANES
            | {"columns": (lambda scale, a: columns(scale), lambda scale, a: scale[: (a.shape[1] + 127) // 128])},
            domain="n % 128 == 0, k % 128 == 0",
            dense=("*",),
            release="torch 2.13",
        )
        for known in [torch.nn.functional]
        if hasattr(known, "scaled_mm")  # since torch 2.10
    ),
)
