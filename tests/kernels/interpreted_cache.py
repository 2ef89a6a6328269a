"""Runs under ``TRITON_INTERPRET=1``: the Triton kernels of KV caches judged by their contracts; prints statuses.

The variable must be set before Triton is imported, so this is a program of its own (see ``test_triton_cache.py``).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from kernels import kv_cache
from kernels.backends import triton_cache
from kernels.backends.triton_quant import BACKEND
from kernels.verbs import SERVED
from oracle.routines import cases, get
from tests.support.interpreter import repair

warnings.simplefilter("ignore")  # the interpreter divides by zero in numpy
NVFP4 = "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"
# bfloat16 without subnormal values, which the interpreter reads as 0
HEADS = {
    "reshape_and_cache_flash/bf16-e4m3/tensor/t=5,h=3,d=16,p=4": ("", "layout=HND/", "scales=head/"),
    "reshape_and_cache_flash/f32-e4m3/tensor/t=3,h=2,d=24,p=1": ("",),
    "reshape_and_cache/f16-e4m3/tensor/t=5,h=2,d=48,p=4": ("",),
    "concat_and_cache_mla/bf16-e4m3/tensor/t=5,r=48,e=16,p=4": ("",),
    "set_mla_kv_buffer/bf16-e4m3/tensor/t=5,r=48,e=16": ("",),
    "concat_and_cache_ds_mla/bf16-u8/1x128/t=5,p=4": ("", "ue8m0=1/"),
    "indexer_k_quant_and_cache/bf16-u8/1x128/t=5,d=384,p=4": ("", "scale=ue8m0/"),
    "quantize_k_cache/bf16-u8/1x128/s=2,p=3": ("",),
    f"{NVFP4}/bf16-u8/1x16/t=5,h=3,d=48,p=4": ("", "layout=HND/"),
}
CODES = {
    "append_paged_kv_cache/e4m3-e4m3/tensor/b=3,h=2,d=16,p=4": ("", "layout=HND/"),
    "append_paged_mla_kv_cache/bf16-bf16/tensor/b=3,r=48,e=16,p=4": ("",),
    "gather_and_maybe_dequant_cache/e4m3-bf16/tensor/b=4,p=4,c=48": ("", "starts=1/"),
    "gather_and_maybe_dequant_cache/e4m3-f32/tensor/b=4,p=4,c=48": ("",),
    "cp_gather_cache/f32-f32/tensor/b=4,p=4,c=48": ("starts=1/",),
    "cp_gather_and_upconvert_fp8_kv_cache/u8-bf16/1x128/b=4,p=4": ("",),
    "dequantize_k_cache/u8-bf16/1x128/s=2,p=3": ("",),
    "cp_gather_indexer_k_quant_cache/u8-u8/1x128/b=4,p=4,d=256": ("",),
}
FAMILIES = ("randn", "ties", "nan")


def ids() -> Iterator[str]:
    for families, heads in ((FAMILIES, HEADS), (("codes",), CODES)):
        for head, options in heads.items():
            yield from (f"{head}/{option}family={family}/seed=5" for option in options for family in families)


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
    assert triton_cache.library()[1] is False, "run with TRITON_INTERPRET=1"
    repair()
    kv_cache.route = interpreted
    print(json.dumps({text: run(text) for text in ids()}))
