"""FP8 attention of libraries on a GPU, as subjects of ``verify`` and ``validate``.

    fp8-oracle verify --provider hardware.attention:subjects --arch sm90 ...        (with tests/ on PYTHONPATH)
    python tests/hardware/attention.py compile          # FlashInfer's kernels for every head dim, side by side

``FP8_KERNELS_VLLM_FA3`` names ``vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so`` of vLLM 0.20.2, which takes sequences of
several lengths only: every call passes ``seqused_k``. FlashInfer 0.6.18 compiles at first use, two minutes for each
head dim and output dtype.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch
from hardware.libraries import Library
from torch import Tensor

FA3, FLASHINFER = "vllm_fa3", "flashinfer_fa3"
COMPILED = ((64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16"), (64, "float16"))


@functools.cache
def vllm_fa3() -> Any:
    """The operator of vLLM's FlashAttention-3."""
    torch.ops.load_library(os.environ["FP8_KERNELS_VLLM_FA3"])
    return torch.ops._vllm_fa3_C.fwd


def mha_fwd(inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Tensor]:
    """One split of the keys; ``seqused_k`` of all keys where the call has none."""
    q, k, v = (inputs[name] for name in "qkv")
    used = inputs.get("seqused_k")
    if used is None:
        used = torch.full((k.shape[0],), k.shape[1], dtype=torch.int32, device=k.device)
    scales = [inputs.get(name) for name in ("q_descale", "k_descale", "v_descale")]
    causal, right = bool(options.get("is_causal", False)), options.get("window_size_right", -1)
    left = options.get("window_size_left", -1)
    out, lse, *_ = vllm_fa3()(
        q, k, v, None, None, None, None, None, None, None, None, used, None, None, None, None, None, None, None, None,
        *scales, options.get("softmax_scale") or q.shape[-1] ** -0.5, causal, left, 0 if causal else right, 0.0, True,
        None, 1, None, 0, inputs.get("s_aux"), 1, 0, None,
    )  # fmt: skip  # the operator's 37 parameters, as its flash_attn_interface.py passes them
    return {"out": out, "softmax_lse": lse}


def prefill(inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Tensor]:
    """FlashInfer's function by its backend for sm90."""
    from flashinfer import single_prefill_with_kv_cache

    q, k, v = (inputs[name] for name in "qkv")
    scales = [inputs.get(name) for name in ("scale_q", "scale_k", "scale_v")]
    dtype, scale = options.get("o_dtype", torch.bfloat16), options.get("sm_scale")
    out, lse = single_prefill_with_kv_cache(
        q, k, v, *scales, dtype, causal=options.get("causal", False), sm_scale=scale, backend="fa3", return_lse=True
    )
    return {"out": out, "lse": lse}


def subjects() -> list[Library]:
    """Both, each with the numerics that it was seen to have."""
    return [
        Library(FA3, "mha_fwd", mha_fwd, "sm90.fa3.tile"),
        Library(FLASHINFER, "single_prefill_with_kv_cache", prefill, "sm90.flashinfer.fp8"),
    ]


def compile_all() -> None:
    """Each module in a process of its own, all at once."""
    text = (
        "import sys, torch; from hardware.attention import prefill; d = int(sys.argv[1]); "
        "x = torch.ones(8, 1, d, device='cuda').to(torch.float8_e4m3fn); "
        "prefill({'q': x, 'k': x, 'v': x}, {'o_dtype': getattr(torch, sys.argv[2])}); torch.cuda.synchronize()"
    )
    running = [subprocess.Popen([sys.executable, "-c", text, str(d), dtype]) for d, dtype in COMPILED]
    sys.exit(max(one.wait() for one in running))


if __name__ == "__main__":
    compile_all()
