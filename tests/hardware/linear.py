"""Cuts of the layer's linear kernel for few rows, timed beside FlashInfer's, which quantises in a launch of its own.

    python tests/hardware/linear.py --out DIRECTORY [--quick]

Needs a GPU of sm90 and FlashInfer. A number is the share of a call in a replayed CUDA graph, whose calls take
different weights in turns, together larger than the L2 cache: the time on the device, weights read from memory. Cuts
whose sums are not split must have the bits of the layer's quantiser and its other Triton product in a row. The best cut
of each shape is printed, and the cuts whose slowest shape is least slow beside FlashInfer.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402  # the paths above come first
from hardware import timings  # noqa: E402
from hardware.notes import Notes  # noqa: E402
from torch import Tensor  # noqa: E402

from kernels import dynamic_flashinfer_deepgemm_blockscale_gemm  # noqa: E402
from kernels.backends import flashinfer, triton_gemm, triton_linear, triton_quant  # noqa: E402
from kernels.backends.triton_linear import Cut  # noqa: E402
from kernels.config import Config, use_config  # noqa: E402
from kernels.platform import current_machine  # noqa: E402
from kernels.support import BLOCK, shared_memory  # noqa: E402
from oracle.harness import provenance, subjects  # noqa: E402

SHAPES = ((4096, 7168), (7168, 2048), (2112, 7168), (24576, 1536))
"""N and K of DeepSeek-V3's layers."""
ROWS = (1, 8, 16, 31)
TUNED = (1, 16, 31)
L2 = 200 << 20
"""Bytes of weights that are taken in turns: several times the L2 cache of an H200."""
CALLS, ROUNDS = 12, 9
"""Calls of one graph, and replays that are timed."""
Way = tuple[Cut, int]
"""A cut, and the number of sums."""


def weights(n: int, k: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(n + k)
    first = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn), torch.rand(-(-n // 128), k // 128, device="cuda")
    return [first, *((first[0].clone(), first[1]) for _ in range(min(CALLS, -(-L2 // (n * k))) - 1))]


def candidates(rows: int, quick: bool) -> Iterator[Way]:
    """Cuts that fit the shared memory, stages enough to have 16 KiB of weights in flight."""
    for columns, together, warps in itertools.product((64, 128), (1, 2, 4), (4, 8)):
        step = BLOCK * together * (columns + 2 * rows)
        most = shared_memory(90) // step - 1
        for stages in sorted({min(most, s) for s in (3, 4, 6, 8)}):
            if stages >= 2 and (stages - 1) * together * columns >= 128 and (not quick or stages == min(most, 4)):
                yield from ((Cut(columns, together, stages, warps), parts) for parts in (1, 2, 4))


@contextmanager
def cut_so(way: Way) -> Iterator[None]:
    """Within the block, layers are prepared with this cut and number of sums."""
    cut, parts = way
    was = triton_linear.CUTS, triton_linear.parts_of
    vars(triton_linear).update(CUTS={16: cut, 32: cut}, parts_of=lambda *_: parts)
    try:
        yield
    finally:
        vars(triton_linear).update(CUTS=was[0], parts_of=was[1])


def layer(way: Way, x: Tensor, n: int, k: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The prepared layer."""
    with cut_so(way):
        made = triton_linear.few_rows(x.dtype, n, k)
    return lambda w, s: made(x, w, s)


def eager(ways: Mapping[str, Way], x: Tensor, w: Tensor, s: Tensor, bare: Callable[..., Tensor]) -> dict[str, float]:
    """Microseconds of a call of the public verb in an uninterrupted loop, beside FlashInfer's."""
    found = {}
    for name, way in ways.items():
        with cut_so(way), use_config(Config()):
            found |= timings.device_microseconds(
                {
                    name: lambda _: dynamic_flashinfer_deepgemm_blockscale_gemm(x, w, s),
                    f"bare beside {name}": lambda _: bare(x, w, None, s),
                },
                "cuda",
            )
    return found


def quantised(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    """The layer's quantiser, then its other Triton product, which has DeepGEMM's bits."""
    q, lanes = triton_quant.reciprocal_quantiser(x.dtype)(
        x, None, lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda")
    )
    out = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device="cuda")
    scale = lanes.as_strided((x.shape[0], lanes.shape[0]), (1, lanes.shape[1]))
    triton_gemm.fp8_gemm_nt(q, scale, w, s, out, None, True)
    return out


def fits(way: Way, k: int) -> bool:
    return k // BLOCK % way[1] == 0 and k // BLOCK // way[1] >= triton_linear.LEAST_BLOCKS


def tried(way: Way, rows: int) -> str:
    """Compile and run in a process of its own; what is wrong, or nothing."""
    try:
        for n, k in SHAPES:
            if fits(way, k):
                x, (w, s) = timings.activation(rows, k, "cuda"), weights(n, k)[0]
                made, wanted = layer(way, x, n, k)(w, s), quantised(x, w, s)
                if way[1] == 1 and not torch.equal(made, wanted):
                    return f"other bits, N={n} K={k}"
                error = ((made.float() - wanted.float()).norm() / wanted.float().norm()).item()
                if not error < 2**-8:
                    return f"relative error {error}, N={n} K={k}"
        torch.cuda.synchronize()
    except Exception as error:  # whatever a compiler raises is this function's answer
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def microseconds(call: Callable[[Tensor, Tensor], Tensor], pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Median share of a call in a graph of :data:`CALLS`, the weights in turns."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call(*pairs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(*pairs[i % len(pairs)]) for i in range(CALLS)]
    samples = []
    for _ in range(ROUNDS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        samples.append(start.elapsed_time(stop) * 1e3 / CALLS)
    del kept
    return round(statistics.median(samples[1:]), 2)


def tune(notes: Notes, quick: bool) -> None:
    """Every cut for every shape."""
    begun = time.monotonic()
    bare = flashinfer.library("flashinfer.gemm").fp8_blockscale_gemm_sm90
    every = [(rows, way) for rows in (16, 32) for way in candidates(rows, quick)]
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 3), mp_context=get_context("spawn")) as pool:
        answers = dict(zip(every, pool.map(tried, [w for _, w in every], [min(r, 31) for r, _ in every]), strict=True))
    for (rows, way), answer in answers.items():
        if answer:
            print(rows, *way, answer, flush=True)
    print(f"{len(every)} cuts compiled and tried in {time.monotonic() - begun:.0f} s", flush=True)
    machine, slow = current_machine(), {16: {}, 32: {}}  # type: dict[int, dict[str, dict[str, float]]]
    for n, k in SHAPES:
        pairs = weights(n, k)
        for m in TUNED if not quick else (16,):
            x, rows = timings.activation(m, k, "cuda"), 16 if m <= 16 else 32
            timed = {
                f"{tuple(way[0])} x{way[1]}": microseconds(layer(way, x, n, k), pairs)
                for (r, way), answer in answers.items()
                if r == rows and not answer and fits(way, k)
            }
            beside = {"bare FlashInfer": microseconds(lambda w, s, x=x: bare(x, w, None, s), pairs)}
            notes.time(f"cuts_us M={m} N={n} K={k}", timed | beside)
            best = sorted(timed, key=timed.__getitem__)
            chosen = f"{tuple(triton_linear.CUTS[rows])} x{triton_linear.parts_of(n, k, 64, machine.sms)}"
            print(f"== M={m} N={n} K={k}: {beside}; chosen {chosen} {timed.get(chosen)}", flush=True)
            one = [b for b in best if "x1" in b]
            print("   ", [(b, timed[b]) for b in best[:5]], "one sum:", [(b, timed[b]) for b in one[:4]])
            ways = {f"{tuple(way[0])} x{way[1]}": way for (r, way) in answers if r == rows}
            called = eager({name: ways[name] for name in dict.fromkeys((best[0], one[0]))}, x, *pairs[0], bare)
            notes.time(f"eager_us M={m} N={n} K={k}", called)
            print("    eager", called, flush=True)
            for name, us in timed.items():
                slow[rows].setdefault(name, {})[f"{m},{n},{k}"] = us / min(beside.values())
    for rows, named in slow.items():
        for parts in ("x1", ""):
            whole = {n: r for n, r in named.items() if parts in n}
            most = max((len(r) for r in whole.values()), default=0)
            order = sorted((max(r.values()), n) for n, r in whole.items() if len(r) == most)
            print(f"== rows {rows} {parts}: slowest shape beside FlashInfer: {order[:8]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for measurements.json")
    parser.add_argument("--quick", action="store_true", help="one depth a cut, 16 rows")
    options = parser.parse_args()
    notes = Notes(options.out, provenance.machine() | provenance.versions(subjects.providers()))
    tune(notes, options.quick)
    notes.write()


if __name__ == "__main__":
    main()
