"""What ``identify`` and a judgement by a found split cost beside a float64 matmul of the same shape, in one run.

``python -m tests.benchmarks.test_bench_identify [ROUNDS]`` prints CPU seconds (``OMP_NUM_THREADS=1``: of one core), the
ratio to the least of the matmul beside it, and what was named; ``pytest tests/benchmarks/test_bench_identify.py
--benchmark-enable --benchmark-only`` compares within one group. Required: 0.3 s at 64x256x2048, 60 matmuls at
256x2048x2048, 3 s for a K of 16,384 that is split in 6, with bfloat16 and with float32 outputs. Nothing here asserts a
time. ``python -m tests.benchmarks.test_bench_identify calls`` identifies and judges 96 calls of ``torch._scaled_mm`` as
``mmaemu`` computes them, cut as cuBLASLt cuts them on an H200 (``fixtures/splits``); ``calls --device cuda`` those that
a GPU of sm90 computes, up to 512x4096x16384. The last line counts them, and the exit status is 1 where one is not.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from oracle.numbers.formats import decode
from oracle.truth.gemm import ScaledProduct
from tests.hardware.split_k import COLUMNS, KINDS, LENGTHS, ROWS, operands
from tests.hardware.split_k import call as scaled_mm
from tests.support.products import block_scaled, operand
from tests.support.splits import calls as recorded

pytestmark = pytest.mark.turns(4)

GEMM, SPLIT = "fp8_gemm_nt", "torch_per_tensor_w8a8_scaled_mm"
SHAPES = ((64, 256, 2048), (256, 2048, 2048))
LONG = (64, 512, 16384)
UNTIMED = (8, 128, 512)
Call = tuple[str, dict[str, Tensor], Tensor, dict[str, object]]


def blocks(m: int, n: int, k: int) -> Call:
    """A product of blocks by the arithmetic of DeepGEMM."""
    p = block_scaled("randn", m, n, k, seed=1)
    inputs = {"a": p.a, "b": p.b, "a_scale": p.a_scale, "b_scale": p.b_scale}
    out = oracle.predict(GEMM, inputs, numerics="sm90.promote128")
    assert isinstance(out, Tensor)
    return GEMM, inputs, out, {}


def split(m: int, n: int, k: int, *, fast: bool, dtype: torch.dtype, parts: int = 6) -> Call:
    """A product of ``torch._scaled_mm`` with one scale an operand, whose K is cut in parts as cuBLASLt cuts it."""
    a, b = (operand("codes", rows, k, seed=seed) for seed, rows in enumerate((m, n)))
    inputs = {"qinput": a, "weight": b.t(), "scale_a": torch.tensor(0.37), "scale_b": torch.tensor(1.9)}
    base = "sm90.chain.product" if fast else "sm90.promote128.scale_after.product"
    out = oracle.predict(SPLIT, inputs, numerics=f"{base}.split{parts}", out_dtype=dtype)
    assert isinstance(out, Tensor)
    return SPLIT, inputs, out, {"out_dtype": dtype}


def matmul(call: Call) -> Callable[[], object]:
    a, b = (decode(x) for x in list(call[1].values())[:2])
    return lambda: a @ (b if call[0] == SPLIT else b.T)


def identified(call: Call) -> str:
    contract, inputs, out, options = call
    return oracle.identify(contract, inputs, out, **options)[0].schedule


def judged(call: Call) -> str:
    contract, inputs, out, options = call
    verdict = oracle.judge(contract, inputs, out, arch="sm90", **options)
    return f"{verdict.status.name}, {verdict.matches or verdict.summary}"


def calls() -> dict[str, Call]:
    made = {f"blocks {'x'.join(map(str, shape))}": blocks(*shape) for shape in SHAPES}
    for fast in (True, False):
        for dtype in (torch.bfloat16, torch.float32):
            name = f"split6 {'x'.join(map(str, LONG))} {'chain' if fast else 'promoted'} {str(dtype)[6:]}"
            made[name] = split(*LONG, fast=fast, dtype=dtype)
    return made


@pytest.mark.benchmark(group="identify")
@pytest.mark.parametrize("name", ["blocks", "split", "float64 matmul"])
def test_identify(benchmark: Any, name: str) -> None:
    """A small shape where nothing is timed."""
    shape = UNTIMED if benchmark.disabled else SHAPES[0]
    call = split(*shape, fast=True, dtype=torch.float32, parts=2) if name == "split" else blocks(*shape)
    side = matmul(call) if name == "float64 matmul" else lambda: identified(call)
    found = benchmark.pedantic(side, rounds=1 if benchmark.disabled else 3)
    if name != "float64 matmul":
        assert found.endswith("product.split2" if name == "split" else "sm90.promote128")


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    made = run()
    return time.process_time() - start, made


def main(rounds: int) -> None:
    for name, call in calls().items():
        beside = matmul(call)
        least = min(seconds(beside)[0] for _ in range(5))
        for verb in (identified, judged):
            runs = [seconds(lambda verb=verb, call=call: verb(call)) for _ in range(rounds)]
            best = min(time_ for time_, _ in runs)
            print(f"{name:42} {verb.__name__:10} {best:8.3f} s {best / least:8.1f} matmuls  {runs[0][1]}", flush=True)


def emulated() -> Iterator[tuple[str, Call]]:
    """Of every length of K the smallest shapes of the record, computed by ``mmaemu`` and cut as the record says."""
    import mmaemu

    kept: dict[int, list[dict[str, Any]]] = {}
    for one in sorted(recorded("h200"), key=lambda c: c["m"] * c["n"] * c["k"]):
        if one["kind"] == KINDS[0] and len(kept.setdefault(one["k"], [])) < 12:
            kept[one["k"]].append(one)
    for one in itertools.chain.from_iterable(kept.values()):
        p, dtype = operands(one["m"], one["n"], one["k"], one["kind"], "cpu"), getattr(torch, one["dtype"])
        parts = one["schedule"].rpartition(".split")[2] if ".split" in one["schedule"] else "1"
        cut = 1 if parts == "1" else (int(parts), "contiguous")
        scales = [x.reshape(()) for x in (p.a_scale, p.b_scale)]
        how = {"use_fast_accum": one["fast"], "profile": "hopper", "splitk": cut}
        yield called(p, mmaemu.scaled_mm(p.a, p.b.t(), *scales, out_dtype=dtype, **how), fast=one["fast"])


def computed() -> Iterator[tuple[str, Call]]:
    """Of every length of K the smallest shape, one between and the largest, computed by the GPU."""
    ends = ROWS[0], COLUMNS[0]
    shapes = itertools.product(LENGTHS, (ends, (ROWS[2], COLUMNS[2]), (ROWS[-1], COLUMNS[-1])))
    for (k, (m, n)), fast, dtype in itertools.product(shapes, (True, False), (torch.float32, torch.bfloat16)):
        p = operands(m, n, k, KINDS[0], "cuda")
        yield called(p, scaled_mm(p, fast=fast, dtype=dtype), fast=fast)


def called(p: ScaledProduct, out: Tensor, *, fast: bool) -> tuple[str, Call]:
    inputs = {"qinput": p.a, "weight": p.b.t(), "scale_a": p.a_scale.reshape(()), "scale_b": p.b_scale.reshape(())}
    said = f"{p.M}x{p.N}x{p.K} {str(out.dtype)[6:]} {'fast' if fast else 'precise'}"
    return said, (SPLIT, inputs, out, {"out_dtype": out.dtype})


def all_calls(device: str) -> int:
    """A line of each call, with the seconds that pass, and how many of them have known bits: those of the schedule that
    is named first where it is compared, and those of one schedule in every element."""
    known = number = 0
    for number, (said, (contract, inputs, out, options)) in enumerate((emulated if device == "cpu" else computed)(), 1):
        start = time.perf_counter()
        matches = oracle.identify(contract, inputs, out, arch="sm90", **options)
        between = time.perf_counter()
        verdict = oracle.judge(contract, inputs, out, arch="sm90", **options)
        took, judging = between - start, time.perf_counter() - between
        held = matches[0].equal == 1.0 and bool(verdict.matches)
        known += held
        judged = verdict.matches or verdict.summary
        print(f"{number:3} {said:34} {took:6.2f} s {judging:6.2f} s  {matches[0].schedule}, {judged}", flush=True)
    print(f"{known} of {number} identified and judged by their bits")
    return known != number


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", default="2", metavar="ROUNDS | calls")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    asked = parser.parse_args()
    if asked.what == "calls":
        sys.exit(all_calls(asked.device))
    main(int(asked.what))
