"""KV caches of the layer timed beside those of libraries, on a GPU.

    python tests/hardware/kv_caches.py --out DIR

A library's call is that of its binding, laid out before it is timed. Their verdicts are those of ``fp8-oracle gallery
run``, captures those of ``fp8-oracle verify --provider oracle.harness.bound:subjects --keep DIR``.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from hardware.timings import device_microseconds, host_microseconds, replay_of
from torch import Tensor

import kernels
from oracle.bindings.binding import Binding
from oracle.bindings.known import bindings
from oracle.harness.bound import call_of

Inputs, Options = Mapping[str, Tensor], Mapping[str, Any]
FP8 = torch.float8_e4m3fn
NVFP4 = "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"
CACHE, TOKENS, PAGE = 8192, 4096, 64
"""Slots of the measured caches, tokens of one call, slots of a page."""


def operands(device: str = "cuda") -> dict[str, tuple[int, Inputs, Options]]:
    """Of each routine the bytes that it moves at ``TOKENS`` tokens, its inputs and its options."""
    generator = torch.Generator(device=device).manual_seed(1)

    def wide(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).bfloat16()

    def memory(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.zeros(*shape, dtype=torch.uint8, device=device).view(dtype)

    pages, heads, depth, t = CACHE // PAGE, 8, 128, TOKENS
    slots = torch.randperm(CACHE, device=device, generator=generator)[:t]
    key, value, one = wide(t, heads, depth), wide(t, heads, depth), torch.full((1,), 0.05, device=device)
    paged, row = (pages, PAGE, heads, depth), heads * depth
    table = torch.randperm(pages, device=device, generator=generator).to(torch.int32).reshape(2, -1)
    ends = torch.tensor([0, t // 2, t], dtype=torch.int32, device=device)
    scaled = {"k_scale": one, "v_scale": one * 2}
    flash = {
        "key": key,
        "value": value,
        "key_cache": memory(*paged, dtype=FP8),
        "value_cache": memory(*paged, dtype=FP8),
        "slot_mapping": slots,
    }
    packed = {
        "key_cache": memory(pages, heads, depth // 16, PAGE, 16, dtype=FP8),
        "value_cache": memory(pages, heads, depth, PAGE, dtype=FP8),
    }
    mla = {"kv_c": wide(t, 512), "k_pe": wide(t, 64), "slot_mapping": slots}
    rows = memory(pages, PAGE, 656)
    rows[..., 512:528] = torch.full((4,), 0.05, device=device).view(torch.uint8)
    position = torch.arange(t, device=device, dtype=torch.int32)
    requests = {
        "batch_indices": torch.zeros_like(position),
        "positions": position,
        "kv_indices": table.flatten()[: t // PAGE],
        "kv_indptr": torch.tensor([0, t // PAGE], dtype=torch.int32, device=device),
        "kv_last_page_len": torch.full((1,), PAGE, dtype=torch.int32, device=device),
    }
    gathered = {"block_table": table, "cu_seq_lens": ends}
    return {
        "reshape_and_cache_flash": (2 * 3 * t * row, flash | scaled, {"kv_layout": "NHD"}),
        "reshape_and_cache": (2 * 3 * t * row, flash | packed | scaled, {}),
        "concat_and_cache_mla": (
            3 * t * 576,
            mla | {"kv_cache": memory(pages, PAGE, 576, dtype=FP8), "scale": one},
            {},
        ),
        "concat_and_cache_ds_mla": (t * (576 * 2 + 656), mla | {"kv_cache": rows}, {"ue8m0": False}),
        "indexer_k_quant_and_cache": (
            t * (256 + 132),
            {"k": wide(t, 128), "kv_cache": memory(pages, PAGE, 132), "slot_mapping": slots},
            {"quant_block_size": 128, "scale_fmt": "ue8m0"},
        ),
        "append_paged_kv_cache": (
            4 * t * row,
            {
                "append_key": key.to(FP8),
                "append_value": value.to(FP8),
                **requests,
                "k_cache": memory(*paged, dtype=FP8),
                "v_cache": memory(*paged, dtype=FP8),
            },
            {"kv_layout": "NHD"},
        ),
        NVFP4: (
            2 * t * row * 41 // 16,
            {
                "append_key": key,
                "append_value": value,
                **{f"{x}_cache": memory(*paged[:3], depth // 2) for x in "kv"},
                **{f"{x}_scale_cache": memory(*paged[:3], depth // 16, dtype=FP8) for x in "kv"},
                "slot_mapping": slots,
                **scaled,
            },
            {"kv_layout": "NHD"},
        ),
        "gather_and_maybe_dequant_cache": (
            3 * t * 576,
            {"src_cache": memory(pages, PAGE, 576, dtype=FP8), "dst": wide(t, 576), **gathered, "scale": one},
            {},
        ),
        "cp_gather_and_upconvert_fp8_kv_cache": (
            t * (656 + 1152),
            {
                "src_cache": rows,
                "dst": wide(t, 576),
                "block_table": table,
                "seq_lens": ends.diff(),
                "workspace_starts": ends[:-1].contiguous(),
            },
            {},
        ),
        "cp_gather_indexer_k_quant_cache": (
            2 * t * 132,
            {"kv_cache": memory(pages, PAGE, 132), "dst_k": memory(t, 128), "dst_scale": memory(t, 4), **gathered},
            {},
        ),
        "quantize_k_cache": (t * (1152 + 656), {"cache_k": wide(t // PAGE, PAGE, 1, 576)}, {}),
    }


def measure(out: Path) -> int:
    """Device time of a call by replays of graphs of ten, in turns; its share of the rate of a copy of as many bytes.

    And host time of an eager call. Libraries get the caches themselves, as ours do: no copy of them is timed.
    """
    measured = {}
    for name, (count, inputs, options) in operands().items():
        source = torch.empty(count // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        calls: dict[str, Callable[[], object]] = {
            "copy": functools.partial(target.copy_, source),
            "ours": functools.partial(getattr(kernels, name), **inputs, **options),
        }
        for one in bindings():
            if one.contract == name:
                calls |= _laid_out(one, inputs, options)
        usable = {who: call for who, call in calls.items() if _runs(who, name, call)}
        replays = {who: replay_of(lambda _, call=call: call()) for who, call in usable.items()}
        times = {who: round(t / 10, 3) for who, t in device_microseconds(replays, "cuda", inner=3).items()}
        shares = {who: round(times["copy"] / t, 3) for who, t in times.items()}
        host = host_microseconds(usable, "cuda")
        measured[name] = {"bytes": count, "microseconds": times, "share_of_copy": shares, "host_microseconds": host}
        print(f"{name}: {times} us, of the copy's rate {shares}; host {host} us", flush=True)
    (out / "timed.json").write_text(json.dumps(measured, indent=1))
    return 0


def _laid_out(
    one: Binding, inputs: Mapping[str, Tensor], options: Mapping[str, Any]
) -> dict[str, Callable[[], object]]:
    """The call of a library, ready; nothing, and the reason printed, where it is not here or does not take the call."""
    try:
        return {one.shown: call_of(one.target, one.contract, inputs, options)}
    except (ImportError, AttributeError, NotImplementedError) as error:
        print(f"{one.shown} {one.contract}: {type(error).__name__}: {error}", flush=True)
        return {}


def _runs(who: str, name: str, call: Callable[[], object]) -> bool:
    """Whether a library is here and takes the call; what keeps it from doing so is printed."""
    try:
        call()
        torch.cuda.synchronize()
    except (ImportError, KeyError, RuntimeError, OSError, NotImplementedError) as error:
        print(f"{who} {name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    return measure(arguments.out)


if __name__ == "__main__":
    sys.exit(main())
