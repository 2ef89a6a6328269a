"""KV caches of libraries on a GPU: as subjects of ``verify`` and ``validate``, captured, and timed beside ours.

    fp8-oracle validate hardware.kv_caches:VLLM.reshape_and_cache --contract reshape_and_cache \\
               --adapter hardware.adapters:by_contract --device cuda
    fp8-oracle verify --provider hardware.kv_caches:subjects --subject vllm
    python tests/hardware/kv_caches.py capture vllm convert_fp8 --out DIR        # outputs of a case, in a folder
    python tests/hardware/kv_caches.py time --out DIR

``FP8_KERNELS_VLLM_C`` names vLLM's compiled library (0.20.2); of SGLang (0.5.23) single modules are imported
(:mod:`hardware.alone`), FlashInfer as a whole. A call that a library does not document is not offered.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hardware import alone
from torch import Tensor

import kernels
from kernels.verbs import VERBS

Inputs, Options = Mapping[str, Tensor], Mapping[str, Any]
Kernel = Callable[[Inputs, Options], dict[str, Tensor]]
FP8 = torch.float8_e4m3fn
NVFP4 = "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"
CACHE, TOKENS, PAGE = 8192, 4096, 64
"""Slots of the measured caches, tokens of one call, slots of a page."""


def offered(holds: object, what: str) -> None:
    if not holds:
        raise NotImplementedError(f"taken: {what}")


def fresh(inputs: Inputs, contract: str) -> dict[str, Tensor]:
    """Copies of what a routine writes into, in memory that a watch may guard."""
    return {name: torch.empty_like(inputs[name]).copy_(inputs[name]) for name in VERBS[contract].writes or ()}


def nhd(cache: Tensor, options: Options) -> Tensor:
    """A cache as ``[pages, P, H, D]`` with the strides that it has."""
    return cache.transpose(1, 2) if options.get("kv_layout") == "HND" else cache


# --- vLLM ---------------------------------------------------------------------------------------------------------


@functools.cache
def vllm_ops() -> Any:
    torch.ops.load_library(os.environ["FP8_KERNELS_VLLM_C"])
    return torch.ops._C_cache_ops


def vllm(contract: str, inputs: Inputs, options: Options) -> dict[str, Tensor]:
    ops = vllm_ops()
    if contract == "convert_fp8":
        src = inputs["src"].contiguous()
        out = torch.empty(src.shape, dtype=options["out_dtype"], device=src.device)
        ops.convert_fp8(_bytes(out), _bytes(src), options["scale"], "fp8")
        return {"out": out}
    made = fresh(inputs, contract)
    i = {name: _bytes(x) for name, x in {**inputs, **made}.items()}
    if contract in ("reshape_and_cache_flash", "reshape_and_cache"):
        caches = [nhd(i[name], options) for name in ("key_cache", "value_cache")]
        getattr(ops, contract)(
            i["key"], i["value"], *caches, i["slot_mapping"].long(), "fp8", i["k_scale"], i["v_scale"]
        )
    elif contract == "concat_and_cache_mla":
        ops.concat_and_cache_mla(i["kv_c"], i["k_pe"], i["kv_cache"], i["slot_mapping"].long(), "fp8", i["scale"])
    elif contract == "concat_and_cache_ds_mla":
        offered(not options["ue8m0"], "scales of any value (0.20.2)")
        one = torch.ones(1, device=i["kv_c"].device)
        ops.concat_and_cache_mla(i["kv_c"], i["k_pe"], i["kv_cache"], i["slot_mapping"].long(), "fp8_ds_mla", one)
    elif contract == "indexer_k_quant_and_cache":
        offered(i["k"].is_contiguous(), "dense keys: it reads no pitch")
        offered(i["k"].is_contiguous(), "keys without a pitch: none is read")
        ops.indexer_k_quant_and_cache(i["k"], i["kv_cache"], i["slot_mapping"].long(), 128, options["scale_fmt"])
    elif contract == "cp_gather_indexer_k_quant_cache":
        ops.cp_gather_indexer_k_quant_cache(
            i["kv_cache"], i["dst_k"], i["dst_scale"], i["block_table"], i["cu_seq_lens"]
        )
    elif contract == "gather_and_maybe_dequant_cache":
        offered(i["dst"].shape[1] in (320, 576), "rows of 320 or 576")
        ends = i["cu_seq_lens"]
        tokens, of_row = _rows_of(inputs["cu_seq_lens"], i["dst"].shape[0])
        ops.gather_and_maybe_dequant_cache(
            i["src_cache"], i["dst"], i["block_table"], ends, of_row, tokens, "fp8", i["scale"], i.get("seq_starts")
        )
    elif contract == "cp_gather_cache":
        requests = i["block_table"].shape[0]
        ops.cp_gather_cache(i["src_cache"], i["dst"], i["block_table"], i["cu_seq_lens"], requests, i.get("seq_starts"))
    else:
        ops.cp_gather_and_upconvert_fp8_kv_cache(
            i["src_cache"], i["dst"], i["block_table"], i["seq_lens"], i["workspace_starts"], len(i["seq_lens"])
        )
    return made


def _rows_of(ends: Tensor, rows: int) -> tuple[int, Tensor]:
    """How many tokens there are, and the request of each row; kept with the tensor, so that a capture asks nothing."""
    if not hasattr(ends, "rows_of"):
        of_row = torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True) - 1
        ends.rows_of = int(ends[-1]), of_row.clamp(max=len(ends) - 2).to(torch.int32)  # type: ignore[attr-defined]
    found: tuple[int, Tensor] = ends.rows_of  # type: ignore[attr-defined]
    return found


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == FP8 else x


# --- FlashInfer ---------------------------------------------------------------------------------------------------


def flashinfer(contract: str, inputs: Inputs, options: Options) -> dict[str, Tensor]:
    from flashinfer import page

    i = {**inputs, **(made := fresh(inputs, contract))}
    tables = [i.get(name) for name in ("kv_indices", "kv_indptr", "kv_last_page_len")]
    layout = options.get("kv_layout")
    if contract == "append_paged_kv_cache":
        offered(i["append_key"].shape[2] in (64, 128, 256, 512), "heads of 64 to 512")
        both = i["k_cache"], i["v_cache"]
        page.append_paged_kv_cache(
            i["append_key"], i["append_value"], i["batch_indices"], i["positions"], both, *tables, layout
        )
    elif contract == "append_paged_mla_kv_cache":
        offered((i["append_ckv"].shape[1], i["append_kpe"].shape[1]) == (512, 64), "512 and 64 columns")
        page.append_paged_mla_kv_cache(
            i["append_ckv"],
            i["append_kpe"],
            i["batch_indices"],
            i["positions"],
            i["ckv_cache"],
            i["kpe_cache"],
            *tables,
        )
    else:
        offered(i["append_key"].shape[2] in (64, 128, 256, 512), "heads of 64 to 512")
        caches, scales = (i["k_cache"], i["v_cache"]), (i["k_scale_cache"], i["v_scale_cache"])
        page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            i["append_key"], i["append_value"], i["slot_mapping"], caches, scales, i["k_scale"], i["v_scale"], layout
        )
    return made


# --- SGLang -------------------------------------------------------------------------------------------------------


SGL_PLACES = {
    "quantize_k_cache": "quantization.dsa_quant_k_cache",
    "dequantize_k_cache": "attention.dsa.dequant_k_cache",
    "set_mla_kv_buffer_triton_fp8_quant": "kvcache.mla_buffer",
}


def sgl_call(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(alone.module(f"sglang.kernels.ops.{SGL_PLACES[name]}"), name)
    return found


def sgl(contract: str, inputs: Inputs, options: Options) -> dict[str, Tensor]:
    if contract == "quantize_k_cache":
        return {"out": sgl_call("quantize_k_cache")(inputs["cache_k"].contiguous()).view(torch.uint8)}
    if contract == "dequantize_k_cache":
        memory = inputs["quant_k_cache"].contiguous().view(FP8)
        return {"out": sgl_call("dequantize_k_cache")(memory)}
    made = fresh(inputs, contract)
    sgl_call("set_mla_kv_buffer_triton_fp8_quant")(
        made["kv_buffer"],
        inputs["loc"],
        inputs["cache_k_nope"],
        inputs["cache_k_rope"],
        FP8,
        reserved_skip_index=options["reserved_skip_index"],
    )
    return made


VLLM_ROUTINES = (
    "reshape_and_cache_flash",
    "reshape_and_cache",
    "concat_and_cache_mla",
    "concat_and_cache_ds_mla",
    "indexer_k_quant_and_cache",
    "cp_gather_indexer_k_quant_cache",
    "gather_and_maybe_dequant_cache",
    "cp_gather_cache",
    "cp_gather_and_upconvert_fp8_kv_cache",
    "convert_fp8",
)
FLASHINFER_ROUTINES = ("append_paged_kv_cache", "append_paged_mla_kv_cache", NVFP4)
SGL_ROUTINES = ("quantize_k_cache", "dequantize_k_cache", "set_mla_kv_buffer")
LIBRARIES: Mapping[str, tuple[Callable[[str, Inputs, Options], dict[str, Tensor]], tuple[str, ...]]] = {
    "vllm": (vllm, VLLM_ROUTINES),
    "flashinfer": (flashinfer, FLASHINFER_ROUTINES),
    "sgl": (sgl, SGL_ROUTINES),
}
VLLM, FLASHINFER, SGL = (
    SimpleNamespace(**{name: functools.partial(run, name) for name in names}) for run, names in LIBRARIES.values()
)


@dataclass(frozen=True)
class Subject:
    """A routine of a library."""

    name: str
    contract: str
    kernel: Kernel
    arch: str = "sm90"
    numerics: str | None = None
    device: str = "cuda"

    def why_not(self) -> str | None:
        return None if torch.cuda.is_available() else "needs a GPU"

    def run(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        return self.kernel(inputs, options)


def subjects() -> list[Subject]:
    """Every routine of every library."""
    return [
        Subject(library, name, functools.partial(run, name))
        for library, (run, names) in LIBRARIES.items()
        for name in names
    ]


# --- captures -----------------------------------------------------------------------------------------------------

SHAPES = {
    # where a library needs more than the smallest shape of the goldens
    "append_paged_kv_cache": "b=3,h=2,d=64,p=2",
    "append_paged_mla_kv_cache": "b=3,r=512,e=64,p=2",
    "cp_gather_indexer_k_quant_cache": "b=3,p=4,d=128",  # a page in multiples of 16 bytes
    NVFP4: "t=3,h=2,d=64,p=2",
    "gather_and_maybe_dequant_cache": "b=3,p=2,c=320",
}


def capture(library: str, contract: str, dtypes: str, out: Path) -> int:
    """A case of a routine of a library, kept as a folder that ``fixtures adopt`` takes; wrong outputs are kept, too."""
    from oracle.cli import main as oracle
    from oracle.routines.kv_cache.cases import GOLDENS

    parts = next(name for name in GOLDENS if name.startswith(f"{contract}/")).split("/")
    parts[3], parts[1] = SHAPES.get(contract, parts[3]), dtypes or parts[1]
    folder = out / f"h200_kv_{library}_{contract}{'_' + dtypes if dtypes else ''}"
    return oracle(
        [
            "verify",
            "--case",
            "/".join(parts),
            "--subject",
            library,
            "--provider",
            "hardware.kv_caches:subjects",
            "--keep",
            str(folder),
            "--fixtures",
            "none",
            "-q",
        ]
    )


# --- time ---------------------------------------------------------------------------------------------------------


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
    from hardware.timings import device_microseconds, host_microseconds, replay_of

    global fresh
    kept, measured = fresh, {}
    fresh = lambda inputs, contract: {name: inputs[name] for name in VERBS[contract].writes or ()}  # noqa: E731
    for name, (count, inputs, options) in operands().items():
        source = torch.empty(count // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        calls: dict[str, Callable[[], object]] = {
            "copy": functools.partial(target.copy_, source),
            "ours": functools.partial(getattr(kernels, name), **inputs, **options),
        }
        for library, (run, names) in LIBRARIES.items():
            if name in names:
                calls[library] = functools.partial(run, name, inputs, options)
        usable = {who: call for who, call in calls.items() if _runs(who, name, call)}
        replays = {who: replay_of(lambda _, call=call: call()) for who, call in usable.items()}
        times = {who: round(t / 10, 3) for who, t in device_microseconds(replays, "cuda", inner=3).items()}
        shares = {who: round(times["copy"] / t, 3) for who, t in times.items()}
        host = host_microseconds(usable, "cuda")
        measured[name] = {"bytes": count, "microseconds": times, "share_of_copy": shares, "host_microseconds": host}
        print(f"{name}: {times} us, of the copy's rate {shares}; host {host} us", flush=True)
    fresh = kept
    (out / "timed.json").write_text(json.dumps(measured, indent=1))
    return 0


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
    parser.add_argument("what", choices=("capture", "time"))
    parser.add_argument("library", nargs="?", choices=tuple(LIBRARIES), help="whose routine is captured")
    parser.add_argument("contract", nargs="?", help="the routine")
    parser.add_argument("dtypes", nargs="?", default="", help="of its case, as f16-u8")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.what == "time":
        return measure(arguments.out)
    return capture(arguments.library, arguments.contract, arguments.dtypes, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
