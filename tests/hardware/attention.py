"""FP8 attention of libraries on a GPU, as subjects of ``verify`` and ``validate``.

    fp8-oracle verify --provider hardware.attention:subjects --arch sm90 ...        (with tests/ on PYTHONPATH)
    python tests/hardware/attention.py compile          # FlashInfer's kernels for every head dim, side by side
    python tests/hardware/attention.py unpack FOLDER WHEEL...   # what a call needs of the wheels of vLLM and SGLang

``FP8_KERNELS_VLLM_FA3`` names ``vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so`` of vLLM 0.20.2, which takes sequences of
several lengths only: every call passes ``seqused_k``. ``FP8_KERNELS_FLASHMLA`` names ``vllm/_flashmla_C.abi3.so``.
FlashInfer 0.6.18 compiles at first use, two minutes for each head dim and output dtype. The Triton kernels of vLLM and
SGLang are imported from a folder that ``unpack`` fills: their files, and modules of a few lines for what they import
beside (logging, the dtype of FP8, whether the machine has CUDA).
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hardware.libraries import Library
from torch import Tensor

FA3, FLASHINFER, VLLM, SGLANG, FLASHMLA = "vllm_fa3", "flashinfer_fa3", "vllm_triton", "sglang_triton", "flashmla"
COMPILED = ((64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16"), (64, "float16"))
WORKSPACE, SEGMENTS = 256 << 20, 8
OF_VLLM, OF_SGLANG = "vllm/v1/attention/ops", "sglang/srt/layers/attention/triton_ops"
TAKEN = {
    "vllm": [f"{OF_VLLM}/triton_unified_attention.py", f"{OF_VLLM}/triton_attention_helpers.py"],
    "sglang": [f"{OF_SGLANG}/{name}_attention.py" for name in ("decode", "extend", "prefill")],
}
BESIDE = {
    "vllm/envs.py": "VLLM_BATCH_INVARIANT = False\n",
    "vllm/logger.py": "import logging\n\ninit_logger = logging.getLogger\n",
    "vllm/platforms.py": "import torch\n\n\nclass current_platform:\n    fp8_dtype = lambda: torch.float8_e4m3fn\n",
    "vllm/triton_utils.py": "import triton\nimport triton.language as tl\n",
    "vllm/v1/kv_cache_interface.py": "from enum import IntEnum\n\nKVQuantMode = IntEnum('KVQuantMode', "
    "'NONE FP8_PER_TENSOR INT8_PER_TOKEN_HEAD FP8_PER_TOKEN_HEAD NVFP4', start=0)\n",
    "sglang/srt/utils.py": "is_hip, is_cuda = (lambda: False), (lambda: True)\n",
}
"""What the files import beside Triton and torch."""


@functools.cache
def vllm_fa3() -> Any:
    """The operator of vLLM's FlashAttention-3."""
    torch.ops.load_library(os.environ["FP8_KERNELS_VLLM_FA3"])
    return torch.ops._vllm_fa3_C.fwd


def mha_fwd(inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Tensor]:
    """``seqused_k`` of all keys where the call has none."""
    q, k, v = (inputs[name] for name in "qkv")
    used, table = inputs.get("seqused_k"), inputs.get("page_table")
    if used is None:
        keys = k.shape[1] * (1 if table is None else table.shape[1])
        used = torch.full((q.shape[0],), keys, dtype=torch.int32, device=k.device)
    scales = [inputs.get(name) for name in ("q_descale", "k_descale", "v_descale")]
    causal, right = bool(options.get("is_causal", False)), options.get("window_size_right", -1)
    left = options.get("window_size_left", -1)
    out, lse, *_ = vllm_fa3()(
        q, k, v, None, None, None, None, None, None, None, None, used, None, None, table, None, None, None, None, None,
        *scales, options.get("softmax_scale") or q.shape[-1] ** -0.5, causal, left, 0 if causal else right,
        options.get("softcap", 0.0), True,
        None, options.get("num_splits", 1), None, 0, inputs.get("s_aux"), 1, 0, None,
    )  # fmt: skip  # the operator's 37 parameters, as its flash_attn_interface.py passes them
    return {"out": out, "softmax_lse": lse}


def _scales(inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """``scale_q``, ``scale_k`` and ``scale_v``, ones where they are not given."""
    keys = inputs.get("k", inputs.get("k_cache"))
    assert keys is not None
    heads = {"scale_q": inputs["q"].shape[1], "scale_k": keys.shape[-2], "scale_v": keys.shape[-2]}
    return [inputs.get(name, torch.ones(count, device=keys.device)) for name, count in heads.items()]


def prefill(inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Tensor]:
    """FlashInfer's function by its backend for sm90."""
    from flashinfer import single_prefill_with_kv_cache

    q, k, v = (inputs[name] for name in "qkv")
    dtype, scale = options.get("o_dtype", torch.bfloat16), options.get("sm_scale")
    out, lse = single_prefill_with_kv_cache(
        q, k, v, *_scales(inputs), dtype, causal=options.get("causal", False), sm_scale=scale, backend="fa3",
        return_lse=True,
    )  # fmt: skip  # the tensors, then the options
    return {"out": out, "lse": lse}


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


def batch(inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Tensor]:
    """FlashInfer's wrappers of ragged and of paged sequences: plan, then run."""
    import flashinfer

    q, space = inputs["q"], _workspace(inputs["q"].device)
    dtypes = {"q_data_type": q.dtype, "kv_data_type": q.dtype, "o_data_type": options.get("o_dtype", torch.bfloat16)}
    planned = {"causal": options.get("causal", False), "window_left": options.get("window_left", -1)}
    planned |= {"sm_scale": options.get("sm_scale")} | dtypes
    wrapper: Any
    if "k" in inputs:
        keys: Any = (inputs["k"], inputs["v"])
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(space, "NHD", backend="fa3")
        of_keys = keys[0].shape[1]
        wrapper.plan(inputs["qo_indptr"], inputs["kv_indptr"], q.shape[1], of_keys, q.shape[2], **planned)
    else:
        keys = ((inputs["k_cache"], inputs["v_cache"]),)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend="fa3")
        _, size, of_keys, _ = inputs["k_cache"].shape
        pages = [inputs[f"paged_kv_{name}"] for name in ("indptr", "indices", "last_page_len")]
        wrapper.plan(inputs["qo_indptr"], *pages, q.shape[1], of_keys, q.shape[2], size, **planned)
    out, lse = wrapper.run(q, *keys, *_scales(inputs), return_lse=True)
    return {"out": out, "lse": lse}


def unified(inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> Tensor:
    """vLLM's Triton kernel for prefills; with one query a sequence that of several segments, as the engine has it."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention  # type: ignore[import-not-found]
    from vllm.v1.kv_cache_interface import KVQuantMode  # type: ignore[import-not-found]

    q, used, ends = inputs["q"], inputs["seqused_k"], inputs["cu_seqlens_q"]
    out = torch.empty(q.shape, dtype=q.dtype if q.dtype.itemsize > 1 else torch.bfloat16, device=q.device)
    one, left = torch.ones(1, device=q.device), options.get("window_size_left", -1)
    of_keys = [inputs.get(name, one) for name in ("k_descale", "v_descale")]
    each = {name: inputs[name] for name in ("k_scale_cache", "v_scale_cache") if name in inputs}
    mode = KVQuantMode.FP8_PER_TOKEN_HEAD if each else KVQuantMode.FP8_PER_TENSOR
    few = {"dtype": torch.float32, "device": q.device}
    parts: dict[str, Any] = {"seq_threshold_3D": 128, "num_par_softmax_segments": SEGMENTS}
    width = 1 << (q.shape[2] - 1).bit_length()
    parts["softmax_segm_output"] = torch.empty(*q.shape[:2], SEGMENTS, width, **few)
    parts |= {f"softmax_segm_{name}": torch.empty(*q.shape[:2], SEGMENTS, **few) for name in ("max", "expsum")}
    scale = options.get("softmax_scale") or q.shape[2] ** -0.5
    unified_attention(
        q, inputs["k"], inputs["v"], out, ends, int(ends.diff().max()), used, int(used.max()), scale, True,
        (left, 0 if left >= 0 else -1), inputs["block_table"],
        options.get("softcap", 0.0), None, *of_keys, sinks=inputs.get("sinks"),
        kv_quant_mode=mode, **each, **parts,
    )  # fmt: skip  # the tensors, then the options
    return out


def decode(inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> Tensor:
    """SGLang's Triton kernel, one split of the keys."""
    from sglang.srt.layers.attention.triton_ops.decode_attention import (  # type: ignore[import-not-found]
        decode_attention_fwd,
    )

    q, v = inputs["q"], inputs["v_buffer"]
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    few = {"dtype": torch.float32, "device": q.device}
    partial, lse = torch.zeros(*q.shape[:2], SEGMENTS, v.shape[2], **few), torch.zeros(*q.shape[:2], SEGMENTS, **few)
    splits = torch.ones(len(q), dtype=torch.int32, device=q.device)
    scale = options.get("sm_scale") or q.shape[2] ** -0.5
    decode_attention_fwd(
        q, inputs["k_buffer"], v, out, inputs["kv_indptr"], inputs["kv_indices"], partial, lse, splits, SEGMENTS, scale,
        options.get("k_scale", 1.0), options.get("v_scale", 1.0), logit_cap=options.get("logit_cap", 0.0),
        sinks=inputs.get("sinks"),
    )  # fmt: skip  # the tensors, then the options
    return out


def extend(inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> Tensor:
    """SGLang's Triton kernel, causal."""
    from sglang.srt.layers.attention.triton_ops.extend_attention import (  # type: ignore[import-not-found]
        extend_attention_fwd,
    )

    q, ends = inputs["q"], inputs["qo_indptr"]
    out = torch.empty(*q.shape[:2], inputs["v_extend"].shape[2], dtype=q.dtype, device=q.device)
    extend_attention_fwd(
        q, inputs["k_extend"], inputs["v_extend"], out, inputs["k_buffer"], inputs["v_buffer"], ends,
        inputs["kv_indptr"], inputs["kv_indices"], None, True, None, int(ends.diff().max()),
        options.get("k_scale", 1.0), options.get("v_scale", 1.0), sm_scale=options.get("sm_scale"),
        logit_cap=options.get("logit_cap", 0.0),
        sliding_window_size=options.get("sliding_window_size", -1), sinks=inputs.get("sinks"),
    )  # fmt: skip  # the tensors, then the options
    return out


@functools.cache
def _flashmla() -> Any:
    torch.ops.load_library(os.environ["FP8_KERNELS_FLASHMLA"])
    return torch.ops._flashmla_C.sparse_decode_fwd


def latent(inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Tensor]:
    """FlashMLA's sparse decode, as ``flash_mla_interface.py`` calls the operator."""
    scale = options.get("softmax_scale") or inputs["q"].shape[3] ** -0.5
    out, lse, *_ = _flashmla()(
        inputs["q"], inputs["k_cache"], inputs["indices"], None, inputs.get("attn_sink"), None, None, None, None, None,
        512, scale, None,
    )  # fmt: skip  # the operator's 13 parameters
    return {"out": out, "softmax_lse": lse}


def unpack(folder: Path, *wheels: Path) -> None:
    """The Triton kernels of vLLM and SGLang, and modules for what they import beside."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as content:
            for name in TAKEN[wheel.name.split("-")[0]]:
                content.extract(name, folder)
    for name, text in BESIDE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def subjects() -> list[Library]:
    """All, those of codes of P with the numerics that they were seen to have."""
    ragged, paged = (f"BatchPrefillWith{name}KVCacheWrapper" for name in ("Ragged", "Paged"))
    return [
        Library(FA3, "mha_fwd", mha_fwd, "sm90.fa3.tile"),
        Library(FLASHINFER, "single_prefill_with_kv_cache", prefill),
        Library(FLASHINFER, ragged, batch, "sm90.flashinfer.fp8"),
        Library(FLASHINFER, paged, batch, "sm90.flashinfer.fp8.paged"),
        Library(VLLM, "unified_attention", unified),
        Library(SGLANG, "decode_attention_fwd", decode),
        Library(SGLANG, "extend_attention_fwd", extend),
        Library(FLASHMLA, "flash_mla_with_kvcache", latent),
    ]


def compile_all() -> None:
    """Each module in a process of its own, all at once."""
    text = (
        "import sys, torch; from hardware.attention import batch, prefill; d = int(sys.argv[1]); "
        "x, ends = torch.ones(8, 1, d, device='cuda').to(torch.float8_e4m3fn), torch.tensor([0, 8]).int().cuda(); "
        "o = {'o_dtype': getattr(torch, sys.argv[2])}; i = {'q': x, 'k': x, 'v': x}; prefill(i, o); "
        "batch(i | {'qo_indptr': ends, 'kv_indptr': ends}, o); torch.cuda.synchronize()"
    )
    running = [subprocess.Popen([sys.executable, "-c", text, str(d), dtype]) for d, dtype in COMPILED]
    sys.exit(max(one.wait() for one in running))


if __name__ == "__main__":
    if sys.argv[1:2] == ["unpack"]:
        unpack(*map(Path, sys.argv[2:]))
    else:
        compile_all()
