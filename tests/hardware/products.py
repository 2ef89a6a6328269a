"""The layer's own Triton product beside DeepGEMM's and SGLang's Triton kernel, FlashInfer below 32 rows; tuning.

    python tests/hardware/products.py --out DIRECTORY [--tune] [--sglang FOLDER]

Needs a GPU of sm90, DeepGEMM and FlashInfer. ``FOLDER`` holds ``tiles.json``, one of SGLang's files of tuned tiles (it
has none for N = 4096 and K = 7168; that of N = 4608 is the nearest); its kernel is imported from what
``pack.py`` left of the wheel. ``--tune`` times
tiles instead, and says which :func:`tile_for` takes.

The candidates of one number of rows are called in turns, each with a cold L2 cache, while the GPU is kept busy until
the launch is queued: a number is the median time between two events, some microseconds of which are theirs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402  # the paths above come first
from hardware import timings  # noqa: E402
from hardware.notes import Notes  # noqa: E402
from torch import Tensor  # noqa: E402

from kernels import blockscaled, plan  # noqa: E402
from kernels.backends import flashinfer, triton_gemm  # noqa: E402
from kernels.backends.triton_gemm import DENSE, Tile, tile_for  # noqa: E402
from kernels.platform import current_machine  # noqa: E402
from oracle.harness import provenance, subjects  # noqa: E402

SHAPE = 4096, 7168
"""N and K."""
OTHERS = ((7168, 2048), (2112, 7168), (24576, 1536), (576, 7168))
"""Of DeepSeek-V3's layers, for tuning."""
ROWS = (64, 128, 256, 512, 1024, 2048, 4096)
GROUPS = 8
ROUNDS = 31
FLUSHED = 256 << 20
"""Bytes written between two calls: several times the L2 cache of an H200 (50 to 60 MB)."""
SLEPT = 400_000
"""Cycles (200 us) for which the GPU waits behind that, so that the slowest launch of a candidate is queued in time."""
PROCESSES = 14
Call = Callable[[], object]


def operands(m: int, n: int, k: int) -> dict[str, Tensor]:
    """Random codes of magnitudes up to 4, and scales near 1; ``sa`` as DeepGEMM's kernel reads it, ``rows`` dense."""
    torch.manual_seed(m + n + k)
    a, b = (torch.randn(r, k, device="cuda").to(torch.float8_e4m3fn) for r in (m, n))
    rows = torch.rand(m, -(-k // 128), device="cuda") + 0.5
    sb = torch.rand(-(-n // 128), -(-k // 128), device="cuda") + 0.5
    sa = torch.empty_strided(rows.shape, (1, m + -m % 4), device="cuda").copy_(rows)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    return {"a": a, "sa": sa, "rows": rows, "b": b, "sb": sb, "out": out}


def tiled(t: dict[str, Tensor], tile: Tile) -> None:
    triton_gemm.product(DENSE, t["a"], t["sa"], t["b"][None], t["sb"][None], t["out"], t["out"], tile)


def deep_gemm(t: dict[str, Tensor]) -> None:
    call = importlib.import_module("deep_gemm").fp8_gemm_nt
    call((t["a"], t["sa"]), (t["b"], t["sb"]), t["out"], disable_ue8m0_cast=True)


def microseconds(calls: dict[str, Call]) -> dict[str, float]:
    """Median time of each call on the device, in turns, with a cold L2 cache."""
    flush = torch.empty(FLUSHED, dtype=torch.int8, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
        call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            torch.cuda._sleep(SLEPT)
            start.record()
            call()
            stop.record()
            stop.synchronize()
            samples[name].append(start.elapsed_time(stop) * 1e3)
    return {name: round(statistics.median(values), 2) for name, values in samples.items()}


def sglang(tiles: dict[int, Any] | None) -> Callable[..., object]:
    """SGLang's product with these tuned tiles; None: its default tile."""
    module = importlib.import_module("sglang.kernels.ops.gemm.fp8_kernel")

    def call(*operands: object) -> object:
        vars(module)["get_w8a8_block_fp8_configs"] = lambda *_: tiles
        return module.w8a8_block_fp8_matmul_triton(*operands)

    return call


def compare(notes: Notes, folder: Path | None) -> None:
    """Our product through the layer's backend, SGLang's by its default tile and by tuned ones, DeepGEMM bare."""
    ours = plan.backend_of("triton_gemm").gemm_nt
    theirs = {}
    if folder is not None:
        tuned = {int(m): tile for m, tile in json.loads((folder / "tiles.json").read_text()).items()}
        theirs["SGLang Triton, its default tile"] = sglang(None)
        theirs["SGLang Triton, tiles tuned for N=4608"] = sglang(tuned)
    n, k = SHAPE
    for m in ROWS:
        with notes.attempt(f"products M={m}"):
            t = operands(m, n, k)
            calls: dict[str, Call] = {
                "layer's Triton": lambda t=t: ours(t["a"], t["sa"], t["b"], t["sb"], t["out"], None, True)
            }
            for name, product in theirs.items():
                for layout, scale in ("row-major", t["rows"]), ("column-major", t["sa"]):
                    calls[f"{name}, {layout}"] = lambda t=t, s=scale, call=product: call(
                        t["a"], t["b"], s, t["sb"], [128, 128], torch.bfloat16
                    )
            calls["bare DeepGEMM"] = lambda t=t: deep_gemm(t)
            found = microseconds(calls)
            notes.time(f"device_us.product M={m} N={n} K={k}", found)
            mine = found["layer's Triton"]
            for name, us in found.items():
                print(f"M={m}: {us / mine:.2f} of the rate of {name}", flush=True)
            deep_gemm(t)
            wanted = t["out"].clone()
            calls["layer's Triton"]()
            notes.check(f"products M={m}: bits of DeepGEMM", torch.equal(t["out"], wanted))


def grouped(notes: Notes, each: int) -> None:
    """Both grouped products beside DeepGEMM's: eight experts of so many rows, every row in use."""
    ours, (n, k), library = plan.backend_of("triton_gemm"), SHAPE, importlib.import_module("deep_gemm")
    t = [operands(each, n, k) for _ in range(GROUPS)]
    a, rows, b, sb, out = (torch.stack([x[name] for x in t]) for name in ("a", "rows", "b", "sb", "out"))
    flat, lead, mine, theirs = a.view(-1, k), rows.view(-1, rows.shape[-1]), out.view(-1, n), torch.empty_like(out)
    sa = torch.empty_strided(lead.shape, (1, lead.shape[0]), device="cuda").copy_(lead)
    index = torch.arange(GROUPS, device="cuda", dtype=torch.int32).repeat_interleave(each)
    counts = torch.full((GROUPS,), each, device="cuda", dtype=torch.int32)
    wide = rows.transpose(1, 2).contiguous().transpose(1, 2)
    kinds: dict[str, dict[str, Call]] = {
        "contiguous": {
            "layer's Triton": lambda: ours.grouped_contiguous(flat, sa, b, sb, mine, index, True),
            "bare DeepGEMM": lambda: library.m_grouped_fp8_gemm_nt_contiguous(
                (flat, sa), (b, sb), theirs.view(-1, n), index, disable_ue8m0_cast=True
            ),
        },
        "masked": {
            "layer's Triton": lambda: ours.grouped_masked(a, wide, b, sb, out, counts, each, True),
            "bare DeepGEMM": lambda: library.fp8_m_grouped_gemm_nt_masked(
                (a, wide), (b, sb), theirs, counts, each, disable_ue8m0_cast=True
            ),
        },
    }
    for kind, calls in kinds.items():
        with notes.attempt(f"{kind} products, {GROUPS} x {each} rows"):
            notes.time(f"device_us.{kind}, {GROUPS} x {each} rows, N={n} K={k}", microseconds(calls))
            notes.check(f"{kind} products, {GROUPS} x {each} rows: bits of DeepGEMM", torch.equal(out, theirs))


def below_32_rows(notes: Notes) -> None:
    """A bf16 input: the layer, which quantises it, beside FlashInfer, which does so itself."""
    n, k = SHAPE
    weight = operands(1, n, k)
    b, bs = weight["b"], weight["sb"]
    bare = flashinfer.library("flashinfer.gemm").fp8_blockscale_gemm_sm90
    for m in (1, 16, 31):
        with notes.attempt(f"below 32 rows: M={m}"):
            x = timings.activation(m, k, "cuda")
            kept = blockscaled.prepare_blockscale_linear(b, bs)
            calls: dict[str, Callable[[int], object]] = {
                "layer": lambda _, x=x: blockscaled.dynamic_flashinfer_deepgemm_blockscale_gemm(x, b, bs),
                "kept plan": lambda _, x=x, kept=kept: kept(x),
                "bare FlashInfer": lambda _, x=x: bare(x, b, None, bs),
            }
            replays = {name: timings.replay_of(call) for name, call in calls.items()}
            found = timings.device_microseconds(replays, "cuda", inner=4)
            notes.time(
                f"graph_us.below 32 M={m} N={n} K={k}",
                {name: round(us / timings.IN_GRAPH, 3) for name, us in found.items()},
            )
            host = timings.host_microseconds({name: (lambda c=call: c(0)) for name, call in calls.items()}, "cuda")
            notes.time(f"host_us.below 32 M={m} N={n} K={k}", host)
            tiny = x.clone()
            tiny[:, :127], tiny[:, 127] = 2.0**-130, 0.0
            layer, alone = (
                bool(call(tiny, b, bs).isfinite().all())
                for call in (
                    blockscaled.dynamic_flashinfer_deepgemm_blockscale_gemm,
                    lambda x, b, bs: bare(x, b, None, bs),
                )
            )
            notes.check(f"below 32 rows, M={m}: the layer keeps a tiny group", layer)
            notes.check(f"below 32 rows, M={m}: FlashInfer alone loses it", not alone)


def candidates() -> Iterable[Tile]:
    """Tiles that fit the shared memory and registers of sm90."""
    yield from triton_gemm.TILES
    for columns, pair in ((32, False), (64, False), (128, False), (64, True), (128, True)):
        most = 220_000 // (((64 << pair) + columns) * 128)
        yield from (Tile(columns, stages, pair) for stages in (3, 4, 6, 8) if stages <= most)


def tried(tile: Tile) -> str:
    """Compile in a process of its own; what is wrong, or nothing."""
    t = operands(128, *SHAPE)
    wanted = t["out"].clone()
    deep_gemm(t | {"out": wanted})
    try:
        tiled(t, tile)
        torch.cuda.synchronize()
    except Exception as error:  # whatever a compiler raises is this function's answer
        return f"{type(error).__name__}: {error}"[:200]
    return "" if torch.equal(t["out"], wanted) else "other bits than DeepGEMM's"


def tune(notes: Notes) -> None:
    """Every tile for every number of rows; the fastest and the chosen one are printed."""
    deep_gemm(operands(128, *SHAPE))  # compiled once, for every process
    begun, every = time.monotonic(), list(candidates())
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        answers = dict(zip(every, pool.map(tried, every), strict=True))
    for tile, answer in answers.items():
        if answer:
            print(tile, answer, flush=True)
    print(f"{len(every)} tiles compiled and tried in {time.monotonic() - begun:.0f} s", flush=True)
    machine = current_machine()
    for n, k in (SHAPE, *OTHERS):
        for m in ROWS:
            t = operands(m, n, k)
            calls: dict[str, Call] = {
                str(tuple(tile)): lambda t=t, tile=tile: tiled(t, tile) for tile in every if not answers[tile]
            }
            timed = microseconds(calls | {"bare DeepGEMM": lambda t=t: deep_gemm(t)})
            notes.time(f"tiles_us M={m} N={n} K={k}", timed)
            chosen = str(tuple(tile_for(m, n, 1, machine.sms, machine.sm)))
            best = sorted(timed, key=timed.__getitem__)[:4]
            print(f"M={m} N={n} K={k}: chosen {chosen} {timed[chosen]}; {[(b, timed[b]) for b in best]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for measurements.json")
    parser.add_argument("--tune", action="store_true", help="time tiles instead")
    parser.add_argument("--sglang", type=Path, metavar="FOLDER", help="tiles.json")
    options = parser.parse_args()
    notes = Notes(options.out, provenance.machine() | provenance.versions(subjects.providers()))
    if options.tune:
        tune(notes)
    else:
        compare(notes, options.sglang)
        for each in (128, 512):
            grouped(notes, each)
        below_32_rows(notes)
    notes.write()


if __name__ == "__main__":
    main()
