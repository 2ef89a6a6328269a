"""FlashInfer's wrappers of ragged and of paged FP8 prefills, as subjects of ``verify``: objects that are planned and
then run, which no binding of one call states. Attention in one call has bindings.

    fp8-oracle verify --provider hardware.attention:subjects --arch sm90 ...        (with tests/ on PYTHONPATH)
    python tests/hardware/attention.py          # compile FlashInfer's kernels for every head dim, side by side

FlashInfer 0.6.18 compiles at first use, two minutes for each head dim and output dtype.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

COMPILED = ((64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16"), (64, "float16"))
WORKSPACE = 256 << 20


def _scales(inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """``scale_q``, ``scale_k`` and ``scale_v``, ones where they are not given."""
    keys = inputs.get("k", inputs.get("k_cache"))
    assert keys is not None
    heads = {"scale_q": inputs["q"].shape[1], "scale_k": keys.shape[-2], "scale_v": keys.shape[-2]}
    return [inputs.get(name, torch.ones(count, device=keys.device)) for name, count in heads.items()]


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


@dataclass(frozen=True)
class Wrapper:
    """A wrapper with the numerics that it was seen to have; see :class:`oracle.harness.subjects.Subject`."""

    contract: str
    numerics: str
    run: Callable[[Mapping[str, Tensor], Mapping[str, Any]], dict[str, Tensor]] = batch
    name: str = "flashinfer_fa3"
    arch: str = "sm90"
    device: str = "cuda"

    def why_not(self) -> str | None:
        return None if torch.cuda.is_available() else "no CUDA device"


def subjects() -> list[Wrapper]:
    """Both."""
    ragged, paged = (f"BatchPrefillWith{name}KVCacheWrapper" for name in ("Ragged", "Paged"))
    return [Wrapper(ragged, "sm90.flashinfer.fp8"), Wrapper(paged, "sm90.flashinfer.fp8.paged")]


def compile_all() -> None:
    """Each module in a process of its own, all at once."""
    text = (
        "import sys, torch; from flashinfer import single_prefill_with_kv_cache as one; "
        "from hardware.attention import batch; d = int(sys.argv[1]); "
        "x, ends = torch.ones(8, 1, d, device='cuda').to(torch.float8_e4m3fn), torch.tensor([0, 8]).int().cuda(); "
        "o = {'o_dtype': getattr(torch, sys.argv[2])}; i = {'q': x, 'k': x, 'v': x}; "
        "one(x, x, x, o_dtype=o['o_dtype'], backend='fa3', return_lse=True); "
        "batch(i | {'qo_indptr': ends, 'kv_indptr': ends}, o); torch.cuda.synchronize()"
    )
    running = [subprocess.Popen([sys.executable, "-c", text, str(d), dtype]) for d, dtype in COMPILED]
    sys.exit(max(one.wait() for one in running))


if __name__ == "__main__":
    compile_all()
