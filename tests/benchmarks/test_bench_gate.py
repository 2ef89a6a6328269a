"""What ``oracle.gate`` costs beside ``oracle.judge`` without an explanation, and beside one float64 matrix product.

``python -m tests.benchmarks.test_bench_gate [M N K] [--device cuda]`` prints CPU seconds, on a GPU seconds, and their
multiples of that product, for a right and a wrong output, of the first call and of a call that was prepared. Nothing
here asserts a time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import oracle
from oracle.routines import cases

GEMM = "fp8_gemm_nt"
SMALL = (16, 128, 256)
WHAT = ("judge, right", "judge, wrong", "gate, right", "gate, wrong", "prepared, right", "prepared, wrong")


def asked(m: int, n: int, k: int, arch: str, device: str = "cpu") -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    inputs = cases.parse(f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m={m},n={n},k={k}/family=randn/seed=1").inputs()
    inputs = {name: x.to(device) for name, x in inputs.items()}
    right: Any = oracle.reference(GEMM, inputs, out_dtype=torch.bfloat16)
    if arch != "cpu":
        right = oracle.predict(GEMM, inputs, out_dtype=torch.bfloat16)
    wrong = torch.where(torch.arange(right.numel(), device=device).view_as(right) == 5, 2 * right + 1, right)
    accepts, a, b = (
        oracle.gate(GEMM, arch=arch),
        torch.randn(m, k, device=device).double(),
        torch.randn(n, k, device=device).double(),
    )
    prepared = accepts.prepared(inputs)
    prepared(right)
    return {
        "float64 product": lambda: a @ b.T,
        "judge, right": lambda: oracle.judge(GEMM, inputs, right, arch=arch, explain="off"),
        "judge, wrong": lambda: oracle.judge(GEMM, inputs, wrong, arch=arch, explain="off"),
        "gate, right": lambda: accepts(inputs, right),
        "gate, wrong": lambda: accepts(inputs, wrong),
        "prepared, right": lambda: prepared(right),
        "prepared, wrong": lambda: prepared(wrong),
    }


@pytest.mark.sampled(2)
@pytest.mark.benchmark(group="gate")
@pytest.mark.parametrize("what", WHAT)
def test_gate(benchmark: Any, what: str) -> None:
    benchmark(asked(*(SMALL if benchmark.disabled else (512, 512, 2048)), "cpu")[what])


def seconds(call: Callable[[], object], device: str) -> float:
    """The least of three: CPU time, or time until a GPU is done."""
    times = []
    for _ in range(3):
        clock = time.process_time if device == "cpu" else time.perf_counter
        start = clock()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(clock() - start)
    return min(times)


def main(extents: list[int], device: str) -> None:
    """A line for each arch and what is timed."""
    for arch in ("cpu", "sm90"):
        spent = {name: seconds(call, device) for name, call in asked(*extents, arch, device).items()}
        for name, one in spent.items():
            multiple = one / spent["float64 product"]
            print(f"{arch:<5} {name:<16} {1e3 * one:9.1f} ms, {multiple:6.2f} float64 products")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("extents", type=int, nargs="*", default=[512, 512, 4096])
    parser.add_argument("--device", default="cpu")
    torch.set_num_threads(1)
    main(**vars(parser.parse_args()))
