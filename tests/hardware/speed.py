"""What a GPU computes of bounds and bits beside the CPU's engines, then what failures and verbs cost there.

    python -m tests.hardware.speed                on a GPU, under four minutes
    python -m tests.hardware.speed --profile      where the time of failures goes, on the host and on the GPU
    python -m tests.hardware.speed --device cpu   the same steps on a CPU, at a small shape

Printed are, of a product of each accumulator, whether the three bounds, those of single elements and the prediction
have the bits of the CPU's compiled engines (exit status 1 where one has not, or where the definition was computed
instead), which outputs are judged or explained otherwise than on the CPU, and, without ``--bits``, the tables of
:mod:`tests.benchmarks.test_bench_failures`, at two shapes, and :mod:`tests.benchmarks.test_bench_verbs`, and the calls
of :mod:`tests.benchmarks.test_bench_identify`. No library is needed but torch, cuda.bindings and triton.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

import oracle
from oracle.bounds import engines, of_schedule
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import get
from oracle.truth.gemm import ScaledProduct
from tests.benchmarks import test_bench_failures as failures
from tests.benchmarks import test_bench_identify as identify
from tests.benchmarks import test_bench_verbs as verbs
from tests.support.schedule_products import product_of

SHAPE, SMALL = (192, 512, 4096), (16, 128, 512)
NAMES = ("sm90.promote128", "sm90.chain", "sm89.promote128", "sm100.promote128")
LARGE, LONG, UNTIMED = (4096, 4096, 7168), (4096, 7168, 16384), (64, 256, 1024)
PROFILED, LINES = ("one element", "moved row", "garbage", "store truncates", "float32 in any order"), 15


def moved(product: ScaledProduct, device: str) -> ScaledProduct:
    return replace(product, **{name: getattr(product, name).to(device) for name in ("a", "b", "a_scale", "b_scale")})


def same(x: Tensor, y: Tensor) -> bool:
    """Equal values, NaN equal to NaN."""
    x, y = x.cpu().double(), y.cpu().double()
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


def compared(name: str, shape: tuple[int, int, int], device: str) -> list[str]:
    """What differs between the device and the CPU, of one accumulator."""
    here = product_of(get("sm90.chain" if name.endswith("chain") else "sm90.promote128"), *shape, seed=16)
    there, acc = moved(here, device), of_schedule(get(name))
    wrong = []
    for kind in ("residue_bound", "split_bound", "any_order_bound"):
        if kind == "split_bound" and acc.promotion is None:
            continue  # a definition in plain torch on either
        bound = getattr(engines, kind)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a bound that is not confirmed is the definition's
            due, found = bound(here, acc), bound(there, acc)
        if not (same(due.lo, found.lo) and same(due.hi, found.hi) and torch.equal(due.open, found.open.cpu())):
            wrong.append(f"{name} {kind}")
    wanted = torch.rand(shape[:2], generator=torch.Generator().manual_seed(1)) < 1 / 16
    few = [engines.residue_at(p, acc, wanted.to(p.a.device)) for p in (here, there)]
    if None in few or not all(same(x, y) for x, y in zip(*few, strict=True)):
        wrong.append(f"{name} residue_at")
    bits = [predict_product(x, name, out_dtype=torch.float32) for x in (here, there)]
    return wrong if same(*bits) else [*wrong, f"{name} bits"]


def judged(shape: tuple[int, int, int], device: str) -> Iterator[tuple[str, str]]:
    """Of the outputs of the failures benchmark how the device says another thing than the CPU, or nothing."""
    inputs, found = failures.outputs(*shape)
    found |= failures.legal(inputs, found["right"].dtype)
    for name, out in found.items():
        said = []
        for place in ("cpu", device):
            verdict = oracle.judge(failures.GEMM, {n: x.to(place) for n, x in inputs.items()}, out.to(place))
            said.append((verdict.status.name, verdict.summary, verdict.matches, verdict.explained_by))
        yield name, "" if said[0] == said[1] else f"{said[1]}, on the CPU {said[0]}"


def profiled(shape: tuple[int, int, int], device: str) -> None:
    """The kernels and the functions that take most of the time of a judgement, of a few outputs."""
    inputs, found = failures.outputs(*shape, device)
    found |= failures.legal(inputs, found["right"].dtype)
    for name in PROFILED:
        side = failures.judging(inputs, found[name], name)
        side()
        print(f"{name}: {failures.timed(side, device)[0]:.3f} s", flush=True)
        with torch.profiler.profile() as kernels:
            side()
        order = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
        print(kernels.key_averages().table(sort_by=order, row_limit=LINES, max_name_column_width=60))
        with cProfile.Profile() as functions:
            side()
        for order in ("cumulative", "tottime"):
            pstats.Stats(functions).strip_dirs().sort_stats(order).print_stats(LINES)


def main() -> int:
    """The comparisons, then both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--bits", action="store_true", help="the comparisons alone")
    parser.add_argument("--profile", action="store_true", help="where the time goes, instead of all else")
    options = parser.parse_args()
    device = options.device
    cuda = device == "cuda"
    if cuda:
        print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    if options.profile:
        profiled(LARGE if cuda else UNTIMED, device)
        return 0
    start, wrong = time.perf_counter(), list[str]()
    for name in NAMES:
        differing = compared(name, SHAPE if cuda else SMALL, device)
        print(f"{name:20} {', '.join(differing) or 'the bits of the CPU'}", flush=True)
        wrong += differing
    for name, differs in judged(SHAPE if cuda else SMALL, device):
        print(f"{name:36} {differs or 'as on the CPU'}", flush=True)
    print(f"{time.perf_counter() - start:.1f} s", flush=True)
    if options.bits:
        return 1 if wrong else 0
    for shape in (LARGE, LONG) if cuda else (UNTIMED,):
        failures.main(shape, device, rounds=3 if cuda else 1)
    print(f"{time.perf_counter() - start:.1f} s", flush=True)
    verbs.table(device, verbs.SHAPES if cuda else (UNTIMED,))
    print(f"{time.perf_counter() - start:.1f} s", flush=True)
    unknown = identify.all_calls("cuda") if cuda else 0
    return 1 if wrong or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
