"""Runs under ``TRITON_INTERPRET=1``: the fused Triton kernels judged by their contracts; prints ``{case: status}``.

Their bits are not those of plain torch (another exponential), so the admissible sets decide. The variable must be set
before Triton is imported, so this is a program of its own (see ``test_triton_fused.py``).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from kernels import fused, mx_blocks
from kernels.backends import triton_fused
from kernels.backends.triton_quant import BACKEND
from kernels.verbs import SERVED
from oracle.routines import cases, get

warnings.simplefilter("ignore")  # the interpreter divides by zero in numpy
GATED = {
    "silu_and_mul_quant/bf16-e4m3/tensor/m=3,i=200": ("", "rounding=none/"),
    "silu_and_mul_per_block_quant/bf16-e4m3/1x128/m=5,i=256": (
        "", "group=64/", "columns=1/", "ub=0.008/", "rounding=each/"),
    "silu_and_mul_per_block_quant/f32-e4m3/1x128/m=5,i=256": ("",),
    "silu_and_mul_masked_post_quant/bf16-e4m3/1x128/e=3,t=4,i=256": ("", "group=32/", "ue8m0=1/"),
    "persistent_masked_m_silu_mul_quant/bf16-e4m3/1x128/e=3,t=4,i=256": ("",),
    "per_token_group_quant_fp8_masked/bf16-e4m3/1x128/e=3,t=4,k=256": ("", "group=16/", "ue8m0=1/"),
}  # fmt: skip  # a table, one row a line
# float16 where values are subnormal: the interpreter reads those of bfloat16 as 0
NORMS = {
    "rms_norm_static_fp8_quant/bf16-e4m3/tensor/m=3,h=200": ("",),
    "fused_add_rms_norm_static_fp8_quant/f16-e4m3/tensor/m=3,h=200": ("",),
    "fused_add_rmsnorm_quant/f16-e4m3/tensor/m=3,h=200": ("",),
    "rms_norm_dynamic_per_token_quant/bf16-e4m3/token/m=3,h=200": ("", "ub=5/"),
    "rms_norm_dynamic_per_token_quant/f16-e4m3/token/m=3,h=200": ("residual=1/",),
    "rms_norm_per_block_quant/f16-e4m3/1x128/m=3,h=384": ("residual=1/", "columns=1/", "group=64/"),
    "mla_rope_quantize_fp8/f16-e4m3/tensor/t=3,h=4,d=16,n=48": ("", "neox=0/"),
}
BLOCKS = {
    # blocks that share a scale byte, of silu and of the rows of experts; float32 is judged by its intervals
    "silu_and_mul_nvfp4_quantize/bf16/1x16/m=17,k=192": ("", "layout=8x4/", "layout=linear/", "global=inf/"),
    "silu_and_mul_nvfp4_quantize/f32/1x16/m=17,k=192": ("",),
    "silu_and_mul_scaled_fp4_experts_quant/bf16/1x16/g=4,m=140,k=192": ("", "placement=flashinfer/"),
    "silu_and_mul_scaled_nvfp4_experts_quantize/bf16/1x16/g=4,m=37,k=192": ("",),
    "silu_and_mul_mxfp4_experts_quant/bf16/1x32/g=4,m=140,k=192": ("", "placement=flashinfer/"),
    "silu_and_mul_mxfp4_experts_quant/f32/1x32/g=4,m=140,k=192": ("",),
    "mxfp4_experts_quant/bf16/1x32/g=4,m=140,k=192": ("",),
}
FAMILIES = ("randn", "ties", "special", "nan", "range")


def ids() -> Iterator[str]:
    for head, options in {**GATED, **NORMS}.items():
        for option in options:
            for family in FAMILIES[: 4 if "rope" in head else 5]:
                yield f"{head}/{option}family={family}/seed=5"
    for head, options in BLOCKS.items():
        for option in options:
            for family in ("randn", "steps", "heavy"):
                yield f"{head}/{option}family={family}/seed=1"


def run(text: str) -> str:
    """The status of one case, computed by the Triton kernel."""
    case = cases.parse(text)
    inputs, options = case.inputs(), case.call_options()
    output = SERVED[case.contract](inputs, options)
    return str(get(case.contract).judge(inputs, output, **options).status)


def interpreted(op: str, device: torch.device, *key: Any) -> Any:
    """The Triton backend, whatever the machine."""
    return BACKEND


if __name__ == "__main__":
    assert triton_fused.library()[1] is False, "run with TRITON_INTERPRET=1"
    fused.route = mx_blocks.route = interpreted
    print(json.dumps({text: run(text) for text in ids()}))
