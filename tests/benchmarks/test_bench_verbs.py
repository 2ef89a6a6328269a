"""What every public verb costs beside a float64 matmul of the same shape, in one run.

``python -m tests.benchmarks.test_bench_verbs`` prints two tables that the page of benchmarks shows: the verbs that take
one call at :data:`SHAPES` (small, medium, of a model), each as a ratio of CPU seconds to those of the matmul beside it,
and whole commands, which have sizes of their own, in CPU seconds of all their processes, started warm. With ``--device
cuda`` the first table is that of a GPU, by the time that passes until it is idle. Nothing here asserts a time.

Not covered: ``conformance`` where no vectors are (``FP8_ORACLE_SHARED`` names their folder).
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from oracle.harness.validation import validate
from tests.support.checkpoints import deepseek
from tests.support.paths import ROOT, SHARED
from tests.support.products import block_scaled
from tests.support.wrong_outputs import GEMM

pytestmark = pytest.mark.turns(4)

SMALL, MEDIUM, MODEL = (64, 256, 2048), (256, 2048, 2048), (512, 4096, 7168)
SHAPES = (SMALL, MEDIUM, MODEL)
UNTIMED = (16, 128, 256)
ROUNDS = 3
KERNEL = "tests.support.subjects.right:gemm_out"
Side = Callable[[], object]


def case(shape: tuple[int, ...]) -> str:
    m, n, k = shape
    return f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m={m},n={n},k={k}/family=randn/seed=1"


def sides(shape: tuple[int, ...], device: str = "cpu") -> dict[str, Side]:
    """Every verb on one call, and the matmul."""
    p = block_scaled("randn", *shape, seed=1)
    inputs = {x: getattr(p, x).to(device) for x in ("a", "a_scale", "b", "b_scale")}
    right = oracle.predict(GEMM, inputs, numerics="sm90.promote128")
    assert isinstance(right, Tensor)
    wrong = right.clone()
    wrong[7] = right[8]
    a, b = (inputs[name].double() for name in ("a", "b"))
    return {
        "float64 matmul": lambda: a @ b.T,
        "reference": lambda: oracle.reference(GEMM, inputs),
        "predict": lambda: oracle.predict(GEMM, inputs, numerics="sm90.promote128"),
        "interval": lambda: oracle.interval(GEMM, inputs, numerics="sm90.promote128"),
        "interval, K split anywhere": lambda: oracle.interval(GEMM, inputs, numerics="sm90.promote128.split"),
        "interval, products in any order": lambda: oracle.interval(GEMM, inputs, numerics="sm90.promote128.any"),
        "judge, right": lambda: oracle.judge(GEMM, inputs, right),
        "judge, a moved row": lambda: oracle.judge(GEMM, inputs, wrong, explain="off"),
        "judge and explain, a moved row": lambda: oracle.judge(GEMM, inputs, wrong),
        "diagnose, a moved row": lambda: oracle.diagnose(GEMM, inputs, wrong),
        "identify": lambda: oracle.identify(GEMM, inputs, right),
        "classify": lambda: oracle.classify(GEMM, inputs, right),
        **({"validate, one case": lambda: validate(KERNEL, GEMM, case=[case(shape)])} if device == "cpu" else {}),
    }


def spent(side: Side, device: str) -> float:
    """CPU seconds of one call and of the processes that it ended, or seconds until the GPU is idle."""

    def now() -> float:
        if device != "cpu":
            torch.cuda.synchronize()
            return time.perf_counter()
        used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(x.ru_utime + x.ru_stime for x in used)

    start = now()
    side()
    return now() - start


def measured(shape: tuple[int, ...], device: str = "cpu", rounds: int = ROUNDS) -> dict[str, float]:
    """The least seconds of each side, which takes turns with the matmul."""
    of = sides(shape, device)
    least = dict.fromkeys(of, float("inf"))
    for name, side in of.items():
        side()
        for _ in range(rounds):
            for one in {"float64 matmul", name}:
                least[one] = min(least[one], spent(of[one], device))
    return least


def commands(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Whole commands of one contract."""
    yield "verify --contract", ["verify", "--contract", GEMM]
    yield "validate --profile quick", ["validate", KERNEL, "--contract", GEMM, "--profile", "quick"]
    yield "mutate --profile brief", ["mutate", "--contract", GEMM, "--profile", "brief"]
    yield "fingerprint", ["fingerprint", KERNEL, "--contract", GEMM]
    yield "lint, the checkpoint of the tests", ["lint", str(folder)]
    vectors = SHARED / "vectors" / "tensor_core"
    if vectors.is_dir():
        yield "conformance", ["conformance", "--vectors", str(vectors)]


@pytest.mark.benchmark(group="verbs")
@pytest.mark.parametrize("name", ["judge, right", "reference"])
def test_verb(benchmark: Any, name: str) -> None:
    """A small shape where nothing is timed."""
    of = sides(UNTIMED if benchmark.disabled else SMALL)
    benchmark.pedantic(of[name], rounds=1 if benchmark.disabled else 5, warmup_rounds=0 if benchmark.disabled else 1)


def table(device: str, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> None:
    print("| verb | " + " | ".join("x".join(map(str, shape)) for shape in shapes) + " |\n|:--|" + "--:|" * len(shapes))
    found = [measured(shape, device, ROUNDS if shape != MODEL else 1) for shape in shapes]
    print("| float64 matmul, ms | " + " | ".join(f"{x['float64 matmul'] * 1e3:.1f}" for x in found) + " |")
    for name in list(found[0])[1:]:
        print(f"| {name} | " + " | ".join(f"{x[name] / x['float64 matmul']:.1f}" for x in found) + " |", flush=True)


def whole() -> None:
    print("\n| command | CPU s |\n|:--|--:|")
    with tempfile.TemporaryDirectory() as made:
        deepseek(Path(made))
        for name, arguments in commands(Path(made)):
            command = [sys.executable, "-m", "oracle", *arguments]

            def run(command: list[str] = command) -> None:
                subprocess.run(command, cwd=ROOT, capture_output=True, check=False)

            run()
            print(f"| {name} | {spent(run, 'cpu'):.1f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    table(options.device)
    if options.device == "cpu":
        whole()
