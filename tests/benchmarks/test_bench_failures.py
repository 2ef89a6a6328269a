"""What a failing judgement costs beside a right one and a float64 matmul of the same shape, in one run.

``python -m tests.benchmarks.test_bench_failures [M N K] [--device cuda]`` takes each side and the matmul in turn, nine
times, and prints the least time of the side as a ratio to the least of the matmul and to that of the right output. On a
CPU that is the CPU seconds of all threads, which other programs change less than the time that passes; on a GPU the
time that passes until the device is idle, beside the memory that a side adds to the operands. Without a shape both
shapes of :data:`SHAPES` are taken on a CPU, then judgements in fresh processes (``--fresh``: these alone). ``pytest
tests/benchmarks/test_bench_failures.py --benchmark-enable --benchmark-only`` compares within one group. Required at
256x2048x2048: 3.5 matmuls for a right output, 10 for a wrong one with its explanation, 20 for a legal one without known
bits; at 64x256x2048 0.3 s for a wrong one, 2 s in a fresh process; at 4096x4096x7168 on a GPU 6 matmuls for the
reference, 15 and 25. Nothing here asserts a time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import oracle
from oracle.numbers.formats import decode
from oracle.verdict.compare import Status
from tests.support.wrong_outputs import GEMM, outputs

pytestmark = pytest.mark.turns(4)

SHAPE, SMALL = (256, 2048, 2048), (16, 128, 256)
LEGAL, MANY = ("store truncates",), 4096  # sums of so many products may legally end a unit in the last place apart
SHAPES = ((64, 256, 2048), SHAPE)
REQUIRED = {  # matmuls
    "cpu": {"right": 3.5, "legal": 20.0, "wrong": 10.0},
    "cuda": {"reference": 6.0, "right": 15.0, "legal": 20.0, "wrong": 25.0},
}
FRESH = """
import sys, time
from safetensors.torch import load_file  # and with it torch
tensors, imported = load_file(sys.argv[1]), time.process_time()
import oracle
oracle.judge(sys.argv[2], tensors, tensors.pop("out"))
print(imported, time.process_time())
"""
COMPILED = "doctor --compile"
UNKNOWN = ("no known bits", "float32 in any order", "K in uneven parts")
"""Legal outputs without known bits: exact values, which no admitted schedule gives, and those of other arithmetics."""
RIGHT = ("right", *UNKNOWN)
Side = Callable[[], object]


def judging(inputs: dict[str, Tensor], out: Tensor, name: str) -> Side:
    """A judgement with its explanation, whose status is checked."""

    def judge() -> None:
        status = oracle.judge(GEMM, inputs, out).status
        legal = name in RIGHT or name in LEGAL and inputs["a"].shape[1] > MANY
        assert (status is Status.PASSED) is legal and status in (Status.PASSED, Status.FAILED)

    return judge


def legal(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Outputs of two arithmetics that a kernel may use undeclared: float32, and K in a third and the rest of it."""
    k, n = inputs["a"].shape[1], inputs["b"].shape[0]
    a, b = (decode(inputs[x]) for x in ("a", "b"))
    sa, sb = (inputs[f"{x}_scale"].double().repeat_interleave(128, 1)[:, :k] for x in ("a", "b"))
    whole = (a * sa).float() @ (b * sb.repeat_interleave(128, 0)[:n]).float().T
    cut = max(1, k // 384) * 128
    parts = [
        {x: (t[:, ends] if t.shape[1] == k else t[:, blocks]).contiguous() for x, t in inputs.items()}
        for ends, blocks in (
            (slice(0, cut), slice(0, cut // 128)),
            (slice(cut, k), slice(cut // 128, k)),
        )
    ]
    numerics = {"numerics": "sm90.promote128", "out_dtype": torch.float32}
    first, second = (oracle.predict(GEMM, part, **numerics) for part in parts)
    assert isinstance(first, Tensor) and isinstance(second, Tensor)
    return {"float32 in any order": whole.to(dtype), "K in uneven parts": (first + second).to(dtype)}


def matmul(inputs: dict[str, Tensor]) -> Side:
    a, b = decode(inputs["a"]), decode(inputs["b"])
    return lambda: a @ b.T


@pytest.mark.benchmark(group="failing judgements")
@pytest.mark.parametrize("name", ["right", "moved row", "K in uneven parts", "float64 matmul"])
def test_failure(benchmark: Any, name: str) -> None:
    """A small shape where nothing is timed."""
    inputs, found = outputs(*(SMALL if benchmark.disabled else SHAPE))
    found |= legal(inputs, found["right"].dtype)
    side = matmul(inputs) if name == "float64 matmul" else judging(inputs, found[name], name)
    benchmark.pedantic(side, rounds=1 if benchmark.disabled else 3, warmup_rounds=0 if benchmark.disabled else 1)


def timed(side: Side, device: str) -> tuple[float, float]:
    """Seconds of one call, and GiB that it added to the memory of a GPU."""
    if device == "cpu":
        start = time.process_time()
        side()
        return time.process_time() - start, 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    side()
    torch.cuda.synchronize()
    return time.perf_counter() - start, (torch.cuda.max_memory_allocated() - before) / 2**30


def main(shape: tuple[int, ...], device: str = "cpu", rounds: int = 9) -> None:
    """One table of ratios, a line as soon as its side is measured."""
    inputs, found = outputs(*shape, device)
    found |= legal(inputs, found["right"].dtype)
    sides = {name: judging(inputs, out, name) for name, out in found.items()}
    if device == "cuda":
        sides = {"reference": lambda: oracle.reference(GEMM, inputs)} | sides
    beside, right = matmul(inputs), None
    beside()
    print(f"{'x'.join(map(str, shape))}, {device}, {torch.get_num_threads()} threads", flush=True)
    for name, side in sides.items():
        side()
        seen = [(timed(beside, device), timed(side, device)) for _ in range(rounds)]
        least, time_ = (min(one[at][0] for one in seen) for at in range(2))
        if name == "right":
            right = time_ / least
        limit = REQUIRED[device].get(name, REQUIRED[device]["legal" if name in UNKNOWN else "wrong"])
        of_right = f"{time_ / least / right:5.1f} rights" if right else " " * 12
        held = max(one[1][1] for one in seen)
        print(
            f"{name:36} {time_:7.3f} s {time_ / least:6.1f} matmuls of {least:.4f} s (at most {limit:g})  {of_right}  "
            f"{held:5.2f} GiB",
            flush=True,
        )


def fresh(shape: tuple[int, ...], name: str = "garbage") -> dict[str, tuple[float, float]]:
    """CPU seconds of importing torch, and of all, of processes that judge a wrong output of a file, by what they find:
    no compiled kernel, with and without the bytecode, and the kernels of ``doctor --compile``."""
    inputs, found = outputs(*shape)
    seen = dict[str, tuple[float, float]]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "call.safetensors"
        save_file({**inputs, "out": found[name]}, path)
        for state in ("nothing kept", "bytecode kept", COMPILED):
            kept = {"PYTHONPYCACHEPREFIX": f"{folder}/bytecode", "XDG_CACHE_HOME": f"{folder}/{state}"}
            kept |= {"NUMBA_CACHE_DIR": f"{folder}/{state}"}
            variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | kept
            if state == COMPILED:
                doctor = [sys.executable, "-m", "oracle", *COMPILED.split()]
                subprocess.run(doctor, capture_output=True, check=False, env=variables)
            command = [sys.executable, "-c", FRESH, path, GEMM]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
            imported, whole = map(float, done.stdout.split())
            seen[state] = imported, whole
    return seen


def all_of_it() -> None:
    """Both shapes on a CPU, then a fresh process."""
    for shape in SHAPES:
        main(shape)
    new_processes()


def new_processes() -> None:
    """A line for each state of the disk."""
    for state, (imported, whole) in fresh(SHAPES[0]).items():
        print(f"garbage in a fresh process, {state:16} {whole:7.3f} s, {imported:.3f} s of them torch (at most 2)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", nargs="*", type=int, metavar="M N K")
    parser.add_argument("--device", choices=REQUIRED, default="cpu")
    parser.add_argument("--fresh", action="store_true", help="fresh processes alone")
    options = parser.parse_args()
    if options.fresh:
        new_processes()
    elif options.shape or options.device != "cpu":
        main(tuple(options.shape) or SHAPE, options.device)
    else:
        all_of_it()
