"""What ``oracle.gate`` costs beside ``oracle.judge`` without an explanation, and beside one float64 matrix product.

``python -m tests.benchmarks.test_bench_gate [M N K] [--device cuda]`` prints CPU seconds, on a GPU seconds, and their
multiples of that product, for a right and a wrong output, of the first call and of a call that was prepared; ``--only
gate`` leaves out the others. The gate's bar is two products and a millisecond: the status of the command says whether
all its times keep it. No test asserts a time.
"""

from __future__ import annotations

import argparse
import sys
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


def main(extents: list[int], device: str, only: str) -> int:
    """A line for each arch and what is timed; 1 where the gate is beyond its bar."""
    beyond = 0
    for arch in ("cpu", "sm90"):
        calls = asked(*extents, arch, device)
        product = seconds(calls.pop("float64 product"), device)
        print(f"{arch:<5} {'float64 product':<16} {1e3 * product:9.1f} ms")
        for name, call in calls.items():
            if not name.startswith(only):
                continue
            one, bar = seconds(call, device), 2 * product + 1e-3
            beyond += (late := name.startswith("gate") and one > bar)
            kept = f", bar {1e3 * bar:.2f} ms: {'missed' if late else 'kept'}" if name.startswith("gate") else ""
            print(f"{arch:<5} {name:<16} {1e3 * one:9.2f} ms, {one / product:6.2f} float64 products{kept}")
    return int(beyond > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("extents", type=int, nargs="*", default=[512, 512, 4096])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", metavar="WORD", help="what begins with this word alone")
    torch.set_num_threads(1)
    sys.exit(main(**vars(parser.parse_args())))
