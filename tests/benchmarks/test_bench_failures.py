"""What a failing judgement costs beside a right one and a float64 matmul of the same shape, in one run.

``python -m tests.benchmarks.test_bench_failures [M N K]`` takes the sides in turn, several times, and prints for each
the least CPU seconds of all threads (which other programs change less than the time that passes), as a ratio
to the least of the matmul and to that of the right output. ``pytest tests/benchmarks/test_bench_failures.py
--benchmark-enable --benchmark-only`` compares within one group. Required at 256x2048x2048: 3.5 matmuls for a right
output, 12 for a wrong one with its explanation. Nothing here asserts a time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from oracle.numbers.formats import decode
from oracle.routines import get
from oracle.routines.catalogue import Call, run
from oracle.routines.catalogue import get as get_fault
from oracle.tensorcore.schedules import get as get_schedule
from oracle.verdict.compare import Status
from tests.support.products import block_scaled

GEMM = "fp8_gemm_nt"
SHAPE, SMALL = (256, 2048, 2048), (16, 128, 256)
FAULTS = ("A scale of the previous K block", "store truncates")
REQUIRED = {"right": 3.5, "wrong": 12.0}  # float64 matmuls
Side = Callable[[], object]


def outputs(m: int, n: int, k: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inputs of a call, and outputs by what was done to the right one."""
    p = block_scaled("randn", m, n, k, seed=1)
    inputs = {"a": p.a, "a_scale": p.a_scale, "b": p.b, "b_scale": p.b_scale}
    call = Call(get(GEMM), inputs, schedule=get_schedule("sm90.promote128"))
    right = run(call)
    assert isinstance(right, Tensor)
    found = {name: right.clone() for name in ("right", "one element", "moved row", "moved tile", "two faults")}
    found["one element"][3, 5] = 2 * right[3, 5] + 1
    found["moved row"][7] = right[8]
    half = m // 2
    found["moved tile"][:half, :128] = right[half : 2 * half, :128]
    found["two faults"][7] = right[8]
    found["two faults"][:, 3] = 0
    found["garbage"] = torch.randn(right.shape, generator=torch.Generator().manual_seed(1)).to(right.dtype)
    found["NaN"] = torch.full_like(right, torch.nan)
    for name in FAULTS:
        wrong = run(replace(call), get_fault(name))
        assert isinstance(wrong, Tensor)
        found[name] = wrong
    return inputs, found


def judging(inputs: dict[str, Tensor], out: Tensor, name: str) -> Side:
    """A judgement with its explanation, whose status is checked."""

    def judge() -> None:
        status = oracle.judge(GEMM, inputs, out).status
        assert (status is Status.PASSED) is (name == "right") and status in (Status.PASSED, Status.FAILED)

    return judge


def matmul(inputs: dict[str, Tensor]) -> Side:
    a, b = decode(inputs["a"]), decode(inputs["b"])
    return lambda: a @ b.T


@pytest.mark.benchmark(group="failing judgements")
@pytest.mark.parametrize("name", ["right", "moved row", "float64 matmul"])
def test_failure(benchmark: Any, name: str) -> None:
    """A small shape where nothing is timed."""
    inputs, found = outputs(*(SMALL if benchmark.disabled else SHAPE))
    side = matmul(inputs) if name == "float64 matmul" else judging(inputs, found[name], name)
    benchmark.pedantic(side, rounds=1 if benchmark.disabled else 3, warmup_rounds=0 if benchmark.disabled else 1)


def main(shape: tuple[int, ...], rounds: int = 3) -> None:
    """One table of ratios."""
    inputs, found = outputs(*shape)
    plain = matmul(inputs)
    sides = {name: judging(inputs, out, name) for name, out in found.items()}
    best = dict.fromkeys(["float64 matmul", *sides], float("inf"))

    def timed(name: str, side: Side) -> None:
        start = time.process_time()
        side()
        best[name] = min(best[name], time.process_time() - start)

    for side in sides.values():
        side()
    for _ in range(rounds):
        for name, side in sides.items():
            for _ in range(3):
                timed("float64 matmul", plain)
            timed(name, side)
    least = best.pop("float64 matmul")
    print(f"{'x'.join(map(str, shape))}, {torch.get_num_threads()} threads; float64 matmul {least:.4f} CPU seconds")
    for name in best:
        of_matmul, of_right = best[name] / least, best[name] / best["right"]
        limit = REQUIRED["right" if name == "right" else "wrong"]
        print(f"{name:36} {of_matmul:6.1f} matmuls (required {limit:g})  {of_right:5.1f} right judgements")


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:4])) or SHAPE)
