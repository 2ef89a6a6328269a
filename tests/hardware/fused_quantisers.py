"""Fused quantisers on a GPU: ours beside a copy of the same bytes and beside other libraries', and the host's part.

    python tests/hardware/fused_quantisers.py --out DIR

A library's call is that of its binding, laid out before it is timed; its numbers are judged by ``fp8-oracle gallery
run``, ours by ``fp8-oracle verify --provider kernels.subjects:subjects --subject triton``.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from hardware.timings import device_microseconds, host_microseconds, replay_of
from torch import Tensor

from kernels import fused
from kernels.backends import triton_fused as own
from oracle.harness.bound import call_of
from oracle.routines import get

ROWS, COLUMNS = 4096, 7168
Inputs, Options = Mapping[str, Tensor], Mapping[str, object]


def vllm(contract: str, inputs: Inputs, options: Options) -> Callable[[], object]:
    return _ready(f"torch:ops._C.{contract}", contract, inputs, options)


def flashinfer(contract: str, inputs: Inputs, options: Options) -> Callable[[], object]:
    return _ready(f"flashinfer.norm:{contract}", contract, inputs, options)


def _ready(target: str, contract: str, inputs: Inputs, options: Options) -> Callable[[], object]:
    """The call of a library with what its contract has of these; where it is not here, one that says so."""
    spec = get(contract)
    own_inputs = {name: x for name, x in inputs.items() if name in {one.name for one in spec.inputs}}
    own_options = {name: x for name, x in options.items() if name in {one.name for one in spec.options}}
    try:
        return call_of(target, contract, own_inputs, own_options)
    except ImportError as error:
        print(f"{target}: {error}", flush=True)
        return functools.partial(print, target)


def measure(out: Path) -> int:
    """Device time of a call at ``ROWS x COLUMNS`` by replays of graphs of ten, in turns, and its share of the rate of a
    copy of as many bytes."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    wide = torch.randn(ROWS, 2 * COLUMNS, device="cuda", generator=generator).bfloat16()
    x, residual = wide[:, :COLUMNS].contiguous(), wide[:, COLUMNS:].contiguous()
    weight, scale = x[0].contiguous(), torch.full((1,), 0.05, device="cuda")
    codes = ROWS * COLUMNS
    block = {"group_size": 128, "is_scale_transposed": False, "epsilon": 1e-6, "in_place": True}
    static = {"x": x, "weight": weight, "scale": scale}
    summed = {**static, "residual": residual}
    table: dict[str, tuple[int, dict[str, Callable[[], object]]]] = {
        "silu_and_mul_per_block_quant": (
            5 * codes + codes // 32,
            {
                "ours": lambda: fused.silu_and_mul_per_block_quant(wide),
                "vllm": vllm("silu_and_mul_per_block_quant", {"x": wide}, block),
            },
        ),
        "silu_and_mul_quant": (
            5 * codes,
            {
                "ours": lambda: fused.silu_and_mul_quant(wide, scale),
                "vllm": vllm("silu_and_mul_quant", {"x": wide, "scale": scale}, {}),
            },
        ),
        "rms_norm_per_block_quant": (
            3 * codes + codes // 32,
            {
                "ours": lambda: fused.rms_norm_per_block_quant(x, weight),
                "vllm": vllm("rms_norm_per_block_quant", {"x": x, "weight": weight}, block),
            },
        ),
        "rms_norm_per_block_quant + residual": (
            7 * codes + codes // 32,
            {
                "ours": lambda: fused.rms_norm_per_block_quant(x, weight, residual=residual),
                "vllm": vllm("rms_norm_per_block_quant", summed, block),
            },
        ),
        "fused_add_rms_norm_static_fp8_quant": (
            7 * codes,
            {
                "ours": lambda: fused.fused_add_rms_norm_static_fp8_quant(x, residual, weight, scale),
                "vllm": vllm("fused_add_rms_norm_static_fp8_quant", summed, block),
                "flashinfer": flashinfer("fused_add_rmsnorm_quant", summed, block),
            },
        ),
        "rms_norm_static_fp8_quant": (
            3 * codes,
            {
                "ours": lambda: fused.rms_norm_static_fp8_quant(x, weight, scale),
                "vllm": vllm("rms_norm_static_fp8_quant", static, block),
                "flashinfer": flashinfer("rmsnorm_quant", static, block),
            },
        ),
        "rms_norm_dynamic_per_token_quant": (
            3 * codes,
            {
                "ours": lambda: fused.rms_norm_dynamic_per_token_quant(x, weight),
                "vllm": vllm("rms_norm_dynamic_per_token_quant", {"x": x, "weight": weight}, block),
            },
        ),
    }
    have = {name for name in ("vllm", "flashinfer") if _present(name)}
    measured = {}
    for name, (bytes_moved, calls) in table.items():
        source = torch.empty(bytes_moved // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        chosen = {"copy": lambda source=source, target=target: target.copy_(source)}
        chosen |= {who: call for who, call in calls.items() if who == "ours" or who in have}
        replays = {who: replay_of(lambda _, call=call: call()) for who, call in chosen.items()}
        times = {who: t / 10 for who, t in device_microseconds(replays, "cuda", inner=3).items()}
        rates = {who: round(times["copy"] / t, 3) for who, t in times.items()}
        measured[name] = {"bytes": bytes_moved, "microseconds": times, "share_of_copy": rates}
        print(f"{name}: {times} us, of the copy's rate {rates}", flush=True)
    measured["sweep"] = _swept(wide, x, residual, weight, scale)
    measured["host"] = _host(have)
    (out / "timed.json").write_text(json.dumps(measured, indent=1))
    return 0


def _host(have: set[str]) -> dict[str, dict[str, float]]:
    """Host time of an eager call on 16 rows, ours beside the libraries' with the allocations that a caller makes."""
    wide = torch.randn(16, 2048, device="cuda").bfloat16()
    x, residual = wide[:, :1024].contiguous(), wide[:, 1024:].contiguous()
    weight, scale = x[0].contiguous(), torch.full((1,), 0.05, device="cuda")
    block = {"group_size": 128, "is_scale_transposed": False, "epsilon": 1e-6, "in_place": True}
    static, summed = {"x": x, "weight": weight, "scale": scale}, {"x": x, "weight": weight, "residual": residual}
    calls: dict[str, dict[str, Callable[[], object]]] = {
        "silu_and_mul_per_block_quant": {
            "ours": lambda: fused.silu_and_mul_per_block_quant(wide),
            "vllm": vllm("silu_and_mul_per_block_quant", {"x": wide}, block),
        },
        "rms_norm_static_fp8_quant": {
            "ours": lambda: fused.rms_norm_static_fp8_quant(x, weight, scale),
            "vllm": vllm("rms_norm_static_fp8_quant", static, block),
            "flashinfer": flashinfer("rmsnorm_quant", static, block),
        },
        "rms_norm_per_block_quant + residual": {
            "ours": lambda: fused.rms_norm_per_block_quant(x, weight, residual=residual),
            "vllm": vllm("rms_norm_per_block_quant", summed, block),
        },
    }
    found = {}
    for name, each in calls.items():
        found[name] = host_microseconds({who: c for who, c in each.items() if who == "ours" or who in have}, "cuda")
        print(f"host: {name}: {found[name]} us", flush=True)
    return found


def _swept(wide: Tensor, x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> dict[str, float]:
    """Device time of our two kernels at other extents of a program, microseconds."""
    kept, replays = (own.ELEMENTS, own.WARPS, own.PER_THREAD), {}
    for size, warps in ((2048, 2), (2048, 4), (2048, 8), (4096, 8), (8192, 16)):
        own.ELEMENTS, own.WARPS = size, warps
        replays[f"gated {size} by {warps} warps"] = replay_of(lambda _: fused.silu_and_mul_per_block_quant(wide))
    norms: dict[str, Callable[[], object]] = {
        "block": lambda: fused.rms_norm_per_block_quant(x, weight),
        "block + residual": lambda: fused.rms_norm_per_block_quant(x, weight, residual=residual),
        "token": lambda: fused.rms_norm_dynamic_per_token_quant(x, weight),
        "static": lambda: fused.rms_norm_static_fp8_quant(x, weight, scale),
        "static, float32": lambda: fused.rmsnorm_quant(x, weight, scale),
    }
    for own.PER_THREAD in (16, 32, 64):
        replays |= {f"{name}, {own.PER_THREAD} a thread": replay_of(lambda _, c=c: c()) for name, c in norms.items()}
    own.ELEMENTS, own.WARPS, own.PER_THREAD = kept
    found = {name: round(t / 10, 2) for name, t in device_microseconds(replays, "cuda", inner=3).items()}
    for name, t in found.items():
        print(f"{name}: {t} us", flush=True)
    return found


def _present(name: str) -> bool:
    if name == "vllm":
        return hasattr(torch.ops._C, "silu_and_mul_quant")  # registered by the first call that was laid out
    try:
        import flashinfer.norm  # noqa: F401
    except ImportError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    status = measure(arguments.out)
    print(f"{time.perf_counter() - begun:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
